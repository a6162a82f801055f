"""Actions on one invocation, and calls of tasks, over HTTP: what ``submit``, ``cancel``, ``rerun`` … do."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from holdfast.archive.api import Archive
from holdfast.codec import Codec
from holdfast.invocation import Invocation
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.converting import call_of_values
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.naming import declared, find_definition
from holdfast.runtime.rerun import edited
from holdfast.runtime.runs import of_python
from holdfast.showing import brief, call_without_named, describe
from holdfast.web.actions import touched
from holdfast.web.documents import refuse_hidden
from holdfast.web.principals import Role
from holdfast.web.problems import Problem, about, wrong
from holdfast.web.routing import Act, Asked, Render, action

Duration = str | float


class CallGiven(Act, kw_only=True):
    """A call of a task: its arguments as JSON, and options as `Task.options` takes them."""

    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    delay: Duration | None = None
    at: dt.datetime | float | None = None
    priority: int | None = None
    queue: str | None = None
    key: str | None = None
    key_for: Duration | None = None
    expires: Duration | None = None
    retries: int | None = None
    retention: str | float | None = None
    attributes: dict[str, str] | None = None

    def options(self) -> dict[str, Any]:
        own = set(Act.__struct_fields__) | {"args", "kwargs"}
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name not in own}
        return {name: value for name, value in given.items() if value is not None}


class Cancelling(Act, kw_only=True):
    """What ``cancel`` takes. `children`: and what it has submitted; else as that was declared."""

    children: bool | None = None


class Rerunning(Act, kw_only=True):
    """What ``rerun`` takes; `arguments` are other ones, as an invocation shows them."""

    arguments: dict[str, Any] | list[Any] | None = None
    new_key: bool = False
    at: dt.datetime | float | None = None
    delay: Duration | None = None
    request: str | None = None


class Purging(Act, kw_only=True):
    """What ``purge`` takes. `force`: also if its key is still taken."""

    force: bool = False


class Retaining(Act, kw_only=True):
    """What ``retain`` takes: a duration from its end, or "forever"."""

    retention: str | float


class ForkedRun(Act, kw_only=True):
    """What ``workflow fork`` takes."""

    step: str
    arguments: dict[str, Any] | list[Any] | None = None
    results: dict[str, Any] = msgspec.field(default_factory=dict)
    new_key: bool = False


class SubmittableTask(Protocol):
    """A task, as far as a submit over HTTP knows it."""

    @property
    def name(self) -> str: ...
    def options(self, **given: Any) -> SubmittableTask: ...
    async def asubmit(self, *args: Any, **kwargs: Any) -> Invocation[Any]: ...


# --- new calls


async def submit(asked: Asked) -> Render:
    body: CallGiven = asked.body
    definition = find_definition(declared(asked.runtime), asked.path["name"])
    await asked.runtime.aready()
    with about("body"):
        args, kwargs = await asyncio.to_thread(call_of_values, definition, body.args, body.kwargs)
        task = cast(SubmittableTask, asked.runtime.tasks[definition.name]).options(**_options(asked, body))
    said = call_text(asked.codec, definition.name, args, kwargs)
    if body.preview:
        return lambda: touched("It would store a call:", 1, [said])
    invocation = await task.asubmit(*args, **kwargs)
    is_new = invocation.is_fresh
    text = f"Submitted {invocation.id}" if is_new else f"{invocation.id} was there already"
    return lambda: touched(text, 1, [invocation.id], id=invocation.id, task=definition.name, new=is_new)


def _options(asked: Asked, body: CallGiven) -> dict[str, Any]:
    options = body.options()
    header = asked.request.headers.get("idempotency-key")
    if header is not None and options.setdefault("key", header) != header:
        raise wrong("body.key", "the body has another key than the header Idempotency-Key", status=422)
    return options


def call_text(codec: Codec, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return a call as Python would write it, in short and without secrets."""
    shown, named = call_without_named(args, kwargs, codec.parameters.get(name, ()))
    parts = [*map(describe, shown), *(f"{each}={describe(value)}" for each, value in named.items())]
    return brief(f"{name}({', '.join(parts)})")


# --- one invocation


def _handle(asked: Asked) -> Invocation[Any]:
    return Invocation(asked.runtime, asked.id)


def line_of(record: InvocationRecord) -> str:
    """Return an invocation in a line of a preview."""
    return f"{record.task} {record.id}, {record.status}"


_SAID = {Status.CANCELLED: "is cancelled", Status.CANCELLING: "is asked to end"}


async def cancel(asked: Asked) -> Render:
    record, body = await asked.record(), cast(Cancelling, asked.body)
    if body.preview:
        said = f"It has ended: {record.status}" if record.status in FINAL else f"It is {record.status}, and would end"
        return lambda: touched(said, int(record.status not in FINAL), [line_of(record)])
    status = await _handle(asked).acancel(body.reason, by=asked.principal.name, children=body.children)
    said = _SAID.get(status, f"had ended before: {status}" if status in FINAL else "is asked to end by its next owner")
    return lambda: touched(f"{record.task} {said}", 1, [record.id], id=record.id, status=str(status))


async def wake(asked: Asked) -> Render:
    record, body = await asked.record(), cast(Act, asked.body)
    if body.preview:
        return lambda: touched(f"It is {record.status}, and would go on at once", 1, [line_of(record)])
    await _handle(asked).awake()
    return lambda: touched("It is back in the queue", 1, [record.id], id=record.id)


async def rerun(asked: Asked) -> Render:
    record, body = await asked.record(), cast(Rerunning, asked.body)
    if body.at is not None and body.delay is not None:
        raise wrong("body.at", "give either delay or at, not both", status=422)
    call = await _call(asked, record, body.arguments)
    if body.preview:
        if record.status not in FINAL:
            raise Problem(
                409, "InvocationStatusTransitionError", f"it is {record.status}; only what has ended runs again"
            )
        what = "with the same arguments" if call is None else f"as {call_text(asked.codec, record.task, *call)}"
        return lambda: touched(f"It would be stored once more, {what}", 1, [line_of(record)])
    engine, other = await asked.runtime.aready(), None
    with about("body.arguments"):
        if call is not None:
            task = asked.runtime.tasks.get(record.task)
            other = await asyncio.to_thread(edited, engine, task, record, tuple(call[0]), call[1])
    with about("body"):
        again = await _handle(asked).arerun(
            at=body.at, delay=body.delay, request=body.request, new_key=body.new_key, arguments=other
        )
    return lambda: _stored(again.id, record)


def _stored(id: str, record: InvocationRecord) -> dict[str, Any]:
    return touched(f"{id} is a rerun of {record.id}", 1, [id], id=id, rerun_of=record.id)


async def _call(asked: Asked, record: InvocationRecord, given: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Return other arguments as values of the task's annotations: from a list, from named ones, or as a document has
    both, in `args` and `kwargs`.
    """
    if given is None:
        return None
    with about("body.arguments"):
        await asyncio.to_thread(refuse_hidden, asked.codec, record, given)
    is_both = isinstance(given, dict) and given.keys() == {"args", "kwargs"}
    if is_both and not (isinstance(given["args"], list) and isinstance(given["kwargs"], dict)):
        raise wrong("body.arguments", "args is a list, and kwargs an object", status=422)
    args = given["args"] if is_both else given if isinstance(given, list) else []
    kwargs = given["kwargs"] if is_both else given if isinstance(given, dict) else {}
    definition = _definition(asked, record)
    if definition is None:
        return args, kwargs
    with about("body.arguments"):
        return await asyncio.to_thread(call_of_values, definition, args, kwargs)


def _definition(asked: Asked, record: InvocationRecord) -> TaskDefinition | None:
    task = asked.runtime.tasks.get(record.task)
    return None if task is None else task.definition


async def purge(asked: Asked) -> Render:
    body = cast(Purging, asked.body)
    record = await asked.record()
    done = await Archive(asked.runtime).apurge([record.id], dry_run=body.preview, force=body.force)
    if done.kept:
        raise Problem(409, "UsageError", f"it is kept: {done.kept[0][1]}", path="path.id")
    if body.preview:
        return lambda: touched("It would be removed for good", 1, [line_of(record)])
    return lambda: touched(f"{record.task} {record.id} is removed", done.removed, [record.id])


async def retain(asked: Asked) -> Render:
    body = cast(Retaining, asked.body)
    record = await asked.record()
    with about("body.retention"):
        done = await Archive(asked.runtime).aretain(body.retention, [record.id], dry_run=body.preview)
    if done.refused:
        raise Problem(409, "UsageError", f"it stays as it is: {done.refused[0][1]}", path="path.id")
    over = "; its time is over by that, so it is removed soon" if done.over else ""
    said = f"{'It would be' if body.preview else 'It is'} kept for another time{over}"
    return lambda: touched(said, len(done.originals), [line_of(record)])


async def fork(asked: Asked) -> Render:
    body = cast(ForkedRun, asked.body)
    record = of_python(await asked.record())
    call = await _call(asked, record, body.arguments)
    if call is not None and call[0] and call[1]:
        raise wrong("body.arguments", "give a list of arguments, or an object of named ones, not both", status=422)
    if body.preview:
        await asked.runtime.arun(asked.reading.step(record, body.step))
        return lambda: touched(f"A new run would go on before {body.step}", 1, [line_of(record)])
    arguments = None if call is None else tuple(call[0]) or call[1]
    await asked.runtime.aready()
    fresh = await _handle(asked).afork(body.step, arguments=arguments, results=body.results, new_key=body.new_key)
    return lambda: touched(f"{fresh.id} goes on before {body.step}", 1, [fresh.id], id=fresh.id, fork_of=record.id)


ROUTES = (
    action("/tasks/{name}/submit", submit, "store a call of a task", "invocation.submit", CallGiven),
    action("/invocations/{id}/cancel", cancel, "ask for its end", "invocation.cancel", Cancelling),
    action("/invocations/{id}/rerun", rerun, "run it again", "archive.rerun", Rerunning),
    action("/invocations/{id}/wake", wake, "give it another try, or end its sleeps", "invocation.wake", Act),
    action("/invocations/{id}/purge", purge, "remove it", "archive.purge", Purging, Role.ADMIN),
    action("/invocations/{id}/retain", retain, "keep it for another time", "archive.retain", Retaining),
    action("/invocations/{id}/fork", fork, "start a run that goes on before a step", "workflow.fork", ForkedRun),
)
