"""World runs as people look at runs: their steps, waits, hooks and events, and what they wait for.

Runs of Python workflows are looked at by `others`. Payloads in the `devl` form are shown as values; what is encrypted,
or of a kind that only JavaScript has, is shown as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.clock import format_duration
from holdfast.codec import Codec, ErrorRecord
from holdfast.errors import InvocationStatusTransitionError, LogEventNotFound, NotDecodable, NotEncodable, UsageError
from holdfast.model.explain import Explanation, RunWait, living, moment_in_words
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.foreign import MAX_DELIVERIES, Message
from holdfast.runtime.runs import (
    COMPLETED,
    FAILED,
    HOOK,
    RETRYING,
    RUNNING,
    STEP,
    WAIT,
    WAITING,
    LogEvent,
    RunLooks,
    StepRecord,
    Stored,
    is_world,
)
from holdfast.workflows.looking import no_step
from holdfast.world import devl, rules
from holdfast.world.errors import WorldError
from holdfast.world.queue import OPEN, Messages, as_message, queue_for
from holdfast.world.records import position_of, run_name
from holdfast.world.requests import MAX_LIMIT
from holdfast.world.rules import WorldRun, WorldStep
from holdfast.world.storage import WorldStorage

_ENDED = {"completed": COMPLETED, "failed": FAILED}


class WorldLooking:
    """See `holdfast.runtime.runs.RunLooks`."""

    def __init__(self, others: RunLooks) -> None:
        self._others = others

    async def calls(self, engine: Engine, record: InvocationRecord, *, fetch: bool = False) -> list[StepRecord]:
        if not is_world(record):
            return await self._others.calls(engine, record, fetch=fetch)
        run = await self._run(engine, record)
        found = [_step(engine.codec, step) for step in run.steps.values()]
        found += [_wait(wait, run) for wait in run.waits.values()] + [_hook(hook, run) for hook in run.hooks.values()]
        return sorted(found, key=lambda call: call.position)

    async def steps(self, engine: Engine, record: InvocationRecord, *, fetch: bool = False) -> list[StepRecord]:
        if not is_world(record):
            return await self._others.steps(engine, record, fetch=fetch)
        return [call for call in await self.calls(engine, record, fetch=fetch) if call.kind == STEP]

    async def step(self, engine: Engine, record: InvocationRecord, id: str, *, fetch: bool = False) -> StepRecord:
        if not is_world(record):
            return await self._others.step(engine, record, id, fetch=fetch)
        calls = await self.calls(engine, record, fetch=fetch)
        for call in calls:
            if call.id == id:
                return call
        raise no_step(record, id, [call.id for call in calls])

    async def events(
        self,
        engine: Engine,
        record: InvocationRecord,
        *,
        correlation: str | None = None,
        generation: int | None = None,
        after: str | None = None,
        limit: int = 1000,
        fetch: bool = False,
    ) -> list[LogEvent]:
        if not is_world(record):
            given: dict[str, Any] = {"correlation": correlation, "generation": generation, "after": after}
            return await self._others.events(engine, record, limit=limit, fetch=fetch, **given)
        if type(limit) is not int or limit < 0:
            raise UsageError(f"limit={limit!r:.40}: expected a whole number from 0 on")
        if generation:
            raise LogEventNotFound(f"{record.task} {record.id} is a run of a World: its log has one generation, 0")
        cursor, found = _cursor(after), list[LogEvent]()
        run = run_name(record.id)
        while len(found) < limit:
            pagination = {"limit": min(limit - len(found), MAX_LIMIT), "cursor": cursor}
            page = await self._page(engine, run, correlation, pagination)
            found += [_event(engine.codec, event) for event in page["data"]]
            cursor = page["cursor"]
            if not page["hasMore"] or cursor is None:
                break
        return found

    async def _page(
        self, engine: Engine, run: str, correlation: str | None, pagination: dict[str, Any]
    ) -> dict[str, Any]:
        storage = engine.part(WorldStorage)
        try:
            if correlation is None:
                return await storage.events_list(run_id=run, pagination=pagination)
            return await storage.events_list_by_correlation_id(
                correlation_id=correlation, run_id=run, pagination=pagination
            )
        except WorldError as error:
            raise LogEventNotFound(error.message) from error

    async def _run(self, engine: Engine, record: InvocationRecord) -> WorldRun:
        try:
            return await engine.part(WorldStorage).run(run_name(record.id))
        except WorldError as error:
            raise LogEventNotFound(error.message) from error

    # --- waiting

    async def waits_for(self, engine: Engine, record: InvocationRecord) -> Sequence[RunWait]:
        if not is_world(record):
            return await self._others.waits_for(engine, record)
        return []

    async def explain(self, engine: Engine, record: InvocationRecord) -> Explanation | None:
        """Explain what a World run waits for; None for other runs, and for one that has ended."""
        if not is_world(record) or record.status in FINAL:
            return None
        run, now = await self._run(engine, record), engine.store.now()
        messages = engine.part(Messages)
        found = [as_message(each) for each in await messages.find(run=run.id, statuses=OPEN)]
        roster = await engine.store.roster(messages.engine.app)
        is_served = bool(living(roster, now, engine.settings.dead_after_seconds))
        said = [_delivery(each, now) for each in sorted(found, key=lambda each: each.due_at)[:3]]
        is_on_its_way = bool(said)
        said += [text for call in await self.calls(engine, record) if (text := _waits(call))]
        if not is_on_its_way:
            said.append("no message is on its way to it: a server sends one within a minute, if the run can go on")
        if not is_served:
            said.append("no server delivers: start one with `holdfast world serve`")
        text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said)
        return Explanation(reasons=(), text=text)

    async def wake(self, engine: Engine, record: InvocationRecord) -> None:
        if not is_world(record):
            return await self._others.wake(engine, record)
        run, storage = await self._run(engine, record), engine.part(WorldStorage)
        waits = [] if run.is_ended else run.open_waits
        if not waits:
            raise InvocationStatusTransitionError(f"{record.task} {record.id} does not sleep, so it cannot be woken")
        for wait in waits:
            event = {"eventType": rules.WAIT_COMPLETED, "correlationId": wait.id, "specVersion": run.spec}
            try:
                await storage.events_create(run_id=run.id, event=event)
            except WorldError as error:
                if error.status != 409:  # it has just ended
                    raise UsageError(error.message) from error
        await send_to(engine, run, f"wake {record.id} {engine.ids.operation()}")


async def send_to(engine: Engine, run: WorldRun, operation: str) -> None:
    """Send a message to a run, so that it goes on."""
    messages = engine.part(Messages)
    last = await messages.find(run=run.id, limit=1)
    like = last[0].attributes.get("queue") if last else None
    await messages.send(queue_name=queue_for(run.name, like), message={"runId": run.id}, operation_id=operation)


# --- what a run waits for, in words


def _delivery(message: Message, now: float) -> str:
    to = f" to {message.sent_to}" if message.sent_to else ""
    attempt = f"attempt {message.attempt} of {MAX_DELIVERIES}"
    if message.status == "delivering":
        since = "" if message.owned_at is None else f", for {format_duration(round(max(0.0, now - message.owned_at)))}"
        return f"a delivery{to} is under way{since}, {attempt}"
    left = round(message.due_at - now)
    due = f"due in {format_duration(left)}, at {moment_in_words(message.due_at)}" if left > 0 else "due now"
    answer = f"; the last answer was HTTP {message.http_status}" if message.http_status is not None else ""
    refused = f"; {counted(message.refusals, 'connection')} in a row refused" if message.refusals else ""
    return f"it waits for a delivery{to}, {attempt}, {due}{answer}{refused}"


def _waits(call: StepRecord) -> str:
    if not call.is_open:
        return ""
    if call.kind == WAIT:
        return f"it sleeps ({call.id})" + ("" if call.due is None else f" until {moment_in_words(call.due)}")
    if call.kind == HOOK:
        return f"it waits for a payload for the hook {call.name} ({call.id})"
    if call.status == RETRYING and call.due is not None:
        return f"the step {call.name} waits for attempt {call.attempt + 1}, at {moment_in_words(call.due)}"
    return f"the step {call.name} is {call.status}" + (f", attempt {call.attempt}" if call.attempt else "")


# --- calls and events


def _step(codec: Codec, step: WorldStep) -> StepRecord:
    retries = step.status == "pending" and step.retry_after is not None
    status = _ENDED.get(step.status, RUNNING if step.status == "running" else RETRYING if retries else WAITING)
    return StepRecord(
        id=step.id,
        kind=STEP,
        name=short_name(step.name),
        status=status,
        attempt=step.attempt,
        created_at=step.created_at,
        started_at=step.started_at,
        ended_at=step.completed_at,
        due=step.retry_after,
        error=error_of(codec, step.error, step.stack) if step.error else None,
        position=step.position,
        stored_arguments=Stored(_as_call(codec, value_of(codec, step.input)), codec) if step.input else None,
        stored_result=Stored(_encoded(codec, value_of(codec, step.output)), codec) if step.output else None,
    )


def _wait(wait: rules.WorldWait, run: WorldRun) -> StepRecord:
    ended = wait.completed_at if wait.completed_at is not None else run.completed_at
    status = WAITING if ended is None else COMPLETED if wait.completed_at is not None else "cancelled"
    facts: dict[str, Any] = {"created_at": wait.created_at, "started_at": wait.created_at, "ended_at": ended}
    return StepRecord(
        id=wait.id, kind=WAIT, name="sleep", status=status, due=wait.resume_at, position=wait.position, **facts
    )


def _hook(hook: rules.WorldHook, run: WorldRun) -> StepRecord:
    is_open = not hook.is_disposed and not run.is_ended
    return StepRecord(
        id=hook.id,
        kind=HOOK,
        name=hook.token,
        status=WAITING if is_open else COMPLETED,
        created_at=hook.created_at,
        received=hook.received,
        position=hook.position,
    )


def _event(codec: Codec, event: dict[str, Any]) -> LogEvent:
    kind, data = str(event["eventType"]), event.get("eventData") or {}
    field, due = rules.PAYLOAD_FIELDS.get(kind), data.get(rules.DUE_FIELDS.get(kind, ""))
    payload = None if field is None else data.get(field)
    name = data.get("stepName") or data.get("token") or data.get("workflowName") or ""
    value = _shown(payload) if payload is not None else data.get("changes")
    stored = None
    if value is not None:
        is_call = kind in (rules.STEP_CREATED, rules.RUN_CREATED)
        stored = Stored(_as_call(codec, value) if is_call else _encoded(codec, value), codec)
    position = position_of(event["eventId"]) or 0
    return LogEvent(
        cursor=f"0.{position}",
        type=kind,
        at=event["createdAt"].timestamp(),
        position=position,
        correlation=event.get("correlationId", ""),
        name=short_name(str(name)),
        due=None if due is None else due.timestamp(),
        code=str(data.get("errorCode", "")),
        why=str(data.get("cancelReason", "")),
        stored=stored,
    )


def _cursor(after: str | None) -> str | None:
    if after is None or after.startswith("-1."):
        return None
    generation, point, position = after.partition(".")
    if generation != "0" or not point or not position.isdigit():
        raise UsageError(f"after={after!r:.80} is no cursor: give that of the last event of a page, such as '0.17'")
    return position


def short_name(name: str) -> str:
    """Return the last part of a name: of ``step//./shop.ts//charge``, charge."""
    return name.rpartition("//")[2]


# --- values


def value_of(codec: Codec, data: bytes) -> Any:
    """Return a stored payload as a value for people."""
    try:
        return _shown(codec.decode(data, describe=True))
    except NotDecodable as error:
        return f"({error})"


def _shown(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return devl.loads(value)
    except ValueError as error:
        return f"({counted(len(value), 'byte')}: {error})"


def _encoded(codec: Codec, value: Any) -> bytes:
    try:
        return codec.encode(value)
    except NotEncodable:
        return codec.encode(repr(value))


def _as_call(codec: Codec, value: Any) -> bytes:
    args = tuple(value) if isinstance(value, list) else (value,)
    try:
        return codec.encode_call(args, {}, ())
    except NotEncodable:
        return codec.encode_call((repr(value),), {}, ())


def error_of(codec: Codec, data: bytes, stack: str) -> ErrorRecord:
    """Return an error of TypeScript as far as it can be read."""
    value = value_of(codec, data)
    facts = value if isinstance(value, dict) else {"message": value}
    name, message = str(facts.get("name") or "Error"), str(facts.get("message", ""))
    return ErrorRecord(type_name=name, message=message, traceback=str(facts.get("stack") or stack), data=None)
