"""Runs as people look at them: the records of steps and events, and what the feature of workflows does for a handle.

`Invocation` is below that feature, and knows it by `RunLooks` and `RunForks` alone. The app puts them in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.codec import Codec, ErrorRecord, Payloads
from holdfast.errors import UsageError
from holdfast.model.explain import Explanation, RunWait
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine

WAITING, RUNNING, RETRYING = "waiting", "running", "retrying"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
STEP, CHILD, WAIT, HOOK, STREAM = "step", "child", "wait", "hook", "stream"


class Stored(msgspec.Struct, frozen=True):
    """An encoded value, decoded when it is asked for: that may run user code, and need classes of the app."""

    data: bytes
    codec: Codec
    payloads: Payloads = {}

    def value(self) -> Any:
        """Return the value. Large values that were not fetched are placeholders. Raises `NotDecodable`."""
        return self.codec.decode(self.data, self.payloads, describe=True)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments. Raises `NotDecodable`."""
        return self.codec.decode_call(self.data, self.payloads, describe=True)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a workflow's body, as its log has it: a step, a child, a wait, a hook, or a write to a stream (`kind`).

    `status` is waiting, running, retrying, completed, failed or cancelled. `started_at` is that of the first attempt,
    `due` that of the next one, or of the end of a wait. `child` is the invocation that performs the call elsewhere.
    """

    id: str
    kind: str
    name: str
    status: str
    attempt: int = 0
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    due: float | None = None
    error: ErrorRecord | None = None
    child: str = ""
    queue: str = ""
    where: str = ""
    why: str = ""
    position: int = 0  # of its first event in the log
    received: int = 0  # payloads of a hook
    stored_arguments: Stored | None = None
    stored_result: Stored | None = None

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments. Raises `NotDecodable`."""
        return ((), {}) if self.stored_arguments is None else self.stored_arguments.call()

    @property
    def result(self) -> Any:
        """Return the recorded result; None if there is none. Raises `NotDecodable`."""
        return None if self.stored_result is None else self.stored_result.value()

    @property
    def is_open(self) -> bool:
        return self.status in (WAITING, RUNNING, RETRYING)


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run. `cursor` names its place for the next page; `position` is that in the log, None for events of
    the run itself (run_created, …), which are made from its invocation. `correlation` is the call that it is about.
    """

    cursor: str
    type: str
    at: float
    generation: int = 0
    position: int | None = None
    correlation: str = ""
    name: str = ""
    where: str = ""
    attempt: int = 0
    due: float | None = None
    error: ErrorRecord | None = None
    child: str = ""
    code: str = ""
    why: str = ""
    stored: Stored | None = None

    @property
    def value(self) -> Any:
        """Return what the event carries: arguments as a dict of args and kwargs, a result, what was set."""
        if self.stored is None:
            return None
        if self.type in ("step_created", "run_created"):
            args, kwargs = self.stored.call()
            return {"args": list(args), "kwargs": kwargs}
        return self.stored.value()


class RunLooks(Protocol):
    """What looks into runs. Each method takes the record of a run. `calls` are steps, children, waits and hooks."""

    async def calls(self, engine: Engine, record: InvocationRecord, *, fetch: bool = False) -> list[StepRecord]: ...

    async def steps(self, engine: Engine, record: InvocationRecord, *, fetch: bool) -> list[StepRecord]: ...

    async def step(self, engine: Engine, record: InvocationRecord, id: str, *, fetch: bool) -> StepRecord: ...

    async def events(
        self,
        engine: Engine,
        record: InvocationRecord,
        *,
        correlation: str | None,
        generation: int | None,
        after: str | None,
        limit: int,
        fetch: bool,
    ) -> list[LogEvent]: ...

    async def wake(self, engine: Engine, record: InvocationRecord) -> None: ...

    async def waits_for(self, engine: Engine, record: InvocationRecord) -> Sequence[RunWait]: ...

    async def explain(self, engine: Engine, record: InvocationRecord) -> Explanation | None:
        """Explain what a run waits for that no runner performs; None for all others."""
        ...


class RunForks(Protocol):
    """The port that forks a run: a new run from a part of another run's log."""

    def changed(self, engine: Engine, arguments: object, results: Mapping[str, object]) -> Any:
        """Encode what a fork changes, on the caller's thread. Raises `UsageError`, `NotEncodable`."""
        ...

    async def fork(
        self,
        engine: Engine,
        record: InvocationRecord,
        step: str,
        changed: Any,
        definition: TaskDefinition | None,
        *,
        new_key: bool,
    ) -> str: ...


def of_run(record: InvocationRecord) -> InvocationRecord:
    """Return the record. Raises `UsageError` unless it is that of a workflow."""
    if record.run is None:
        raise UsageError(f"{record.task} {record.id} is a task, and has no log: this is for runs of workflows")
    return record


def of_python(record: InvocationRecord) -> InvocationRecord:
    """Return the record. Raises `UsageError` unless it is that of a workflow in Python."""
    if is_world(record):
        raise UsageError(f"{record.task} {record.id} is a run of a World: this is for workflows in Python")
    return of_run(record)


def started_at(record: InvocationRecord) -> float:
    """Return when a run was first started; when it was created, if it was not."""
    if record.run is not None and record.run.started_at is not None:
        return record.run.started_at
    return next((line.at for line in record.history if line.status is Status.RUNNING), record.created_at)


def began_at(call: StepRecord) -> float | None:
    """Return when a call began; its end, if the log has no more of it, as of a short sleep."""
    return next((at for at in (call.started_at, call.created_at, call.ended_at) if at is not None), None)


def took(call: StepRecord, end: float) -> float | None:
    """Return how many seconds a call took until its end, or until now; None if the log does not say."""
    since = call.started_at if call.started_at is not None else call.created_at
    return None if since is None else max(0.0, (end if call.ended_at is None else call.ended_at) - since)


# --- kinds of runs

WORLD_QUEUE = "~world"  # of the runs of a World: no runner serves it
WORLD_TASK = "world:"  # what the task of such a run begins with
WORLD_APP = "~world"  # what the name of an app of messages ends with


def is_world(record: InvocationRecord) -> bool:
    """Return whether an invocation is a run of a World."""
    return record.queue == WORLD_QUEUE and record.task.startswith(WORLD_TASK)


def kind_of(record: InvocationRecord) -> str:
    """Return whether an invocation is of a task, a workflow or a World."""
    if is_world(record):
        return "world"
    return "task" if record.run is None else "workflow"


# --- on a time line

_FIRST, _LAST = 10, 30  # calls that are drawn of a long log; open calls always are


class Span(NamedTuple):
    """The time from the start of a run to its end, or to now."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def span_of(record: InvocationRecord, calls: Sequence[StepRecord], now: float) -> Span:
    """Return the time that the log of a run covers. After a restart, that of its present log."""
    began = [at for at in map(began_at, calls) if at is not None]
    if began and record.run is not None and record.run.generation:
        start = min(began)
    else:
        start = min([started_at(record), *began])
    return Span(start, max([start, record.changed_at if record.status in FINAL else now]))


def label(call: StepRecord, queue: str) -> str:
    """Return the name of a call for people: with the kind of a wait, the token of a hook that code has chosen, and the
    queue of a step that is not the run's. Of a World, the name comes first: its ids are long, and begin alike.
    """
    is_foreign = "#" not in call.id and "@" not in call.id  # of a World, where the id of a step is not made of its name
    if is_foreign:
        return f"{call.name} {call.id}"
    if call.kind in (WAIT, HOOK):
        return f"{call.id} {call.name}"
    return f"{call.id} on {call.queue}" if call.queue and call.queue != queue else call.id


def chosen(calls: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the calls that are drawn: of many, the first, the last, and the open ones."""
    if len(calls) <= _FIRST + _LAST:
        return list(calls)
    return [*calls[:_FIRST], *[call for call in calls[_FIRST:-_LAST] if call.is_open][:_LAST], *calls[-_LAST:]]
