"""The storage of a World: its methods take the fields of `docs/reference/world-http.md`, in snake case, by name.

Answers are plain dicts with the keys of the contract in camel case, as `docs/reference/world-http.md` names them. Bytes
are `bytes`, in requests and answers; a time is an aware `datetime` in UTC, to the millisecond. A field without a value
is left out; only `cursor` may be None, and a payload that was given as null. `pagination` is a dict of `limit`,
`cursor` and `sortOrder` ("asc", "desc").

Every method raises `WorldError`, and nothing else that a caller has to know.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from holdfast.codec import Payloads, references
from holdfast.errors import (
    CodecError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from holdfast.ids import InvocationId
from holdfast.runtime.engine import Engine
from holdfast.world import rules
from holdfast.world.errors import (
    WORLD_ERROR,
    WorldError,
    conflict,
    event_not_found,
    hook_not_found,
    run_not_found,
    step_not_found,
)
from holdfast.world.hooks import WorldHooks
from holdfast.world.listing import WorldLists
from holdfast.world.logs import RunLog, WarmLogs
from holdfast.world.projection import PROJECTED, Projection
from holdfast.world.records import (
    Answer,
    Encoded,
    error_fields,
    event_fields,
    hook_fields,
    position_of,
    run_fields,
    step_fields,
    wait_fields,
)
from holdfast.world.requests import (
    MAX_LIMIT,
    Fields,
    Wanted,
    paging,
    position,
    text,
    valid_new_run,
    valid_run,
    wanted,
    why_not_of_now,
    with_data,
)
from holdfast.world.rules import Accepted, PlacedEvent, Unchanged, WorldEvent, WorldRun, judge
from holdfast.world.streams import WorldStreams

P = ParamSpec("P")
T = TypeVar("T")

MAX_PRELOAD_EVENTS, MAX_PRELOAD_BYTES = 10_000, 4 * 2**20


def translated(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Let a method raise `WorldError` for errors of the store and for damaged records."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except (StoreUnavailable, StoreFull, StoreReadOnly) as error:
            raise WorldError(WORLD_ERROR, 503, f"the store does not answer: {error}") from error
        except (StoreError, CodecError) as error:
            raise WorldError(WORLD_ERROR, 500, str(error)) from error

    return call


class WrittenEvent(msgspec.Struct, frozen=True):
    """The outcome of an event: the last position of its page (0: none), and whether a step was created with it."""

    log: RunLog
    first: int = 0
    last: int = 0
    step_created: bool = False


class WorldStorage:
    """A part of the engine: ``engine.part(WorldStorage)``. Everything happens on the engine's loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logs = WarmLogs(engine)
        self._hooks = WorldHooks(engine, self._logs)
        self._projection = Projection(engine, self._logs, self._hooks)
        self._streams = WorldStreams(engine)
        self._listing = WorldLists(engine, self._logs, self._projection)

    # --- events

    @translated
    async def events_create(
        self,
        *,
        run_id: str | None,
        event: Fields,
        params: Fields | None = None,
        operation_id: str | None = None,
    ) -> Answer:
        """Write an event; return it with the run, step, hook or wait that it changed. `event` has `eventType`,
        `correlationId`, `eventData` and `specVersion`; `params` are those of the protocol.

        Called again with the same `operation_id`, it writes nothing, and answers as the first time.
        """
        asked = wanted(event, params, self._engine.codec, self._engine.limits)
        operation = self._operation(operation_id)
        log = self._logs.of(self._run_of(run_id, asked.event))
        async with log.lock:
            if run_id is not None and asked.event.type == rules.RUN_CREATED:
                await self._check_age(log)
            written = await self._write(log, asked, operation)
            if asked.event.type in PROJECTED:
                await self._projection.bring_if_possible(log)
            elif asked.event.type == rules.HOOK_DISPOSED and written.last:
                await self._hooks.release(log, asked.event.call, log.run.hooks[asked.event.call].token)
            answer = self._answer(written, asked)
        return await self._resolved(answer)

    def _operation(self, given: object) -> str:
        return self._engine.ids.operation() if given is None else text("operationId", given, rules.MAX_ID)

    def _run_of(self, run: object, event: WorldEvent) -> InvocationId:
        if run is None and event.type == rules.RUN_CREATED:
            return self._engine.ids.new()
        if isinstance(run, str) and event.type == rules.RUN_CREATED:
            return valid_new_run(run)
        return valid_run(run)

    async def _check_age(self, log: RunLog) -> None:
        """Refuse to create a run whose id has a time far from now. For a run that exists, its guards refuse that."""
        if (refusal := why_not_of_now(log.run.id, log.id, self._engine.store.now())) is not None:
            await self._logs.refresh(log)
            if not log.run.exists:
                raise refusal

    async def _write(self, log: RunLog, asked: Wanted, operation: str) -> WrittenEvent:
        """Judge an event on the log and append it. On a collision, read on and judge again."""
        event, is_fresh, is_kept, owner, claimed = asked.event, False, False, "", False
        while True:
            if (place := log.operations.get(operation)) is not None:
                return self._written(log, *place)
            if self._logs.is_old(log) and event.type != rules.RUN_CREATED:
                is_fresh = await self._read_on(log)
                continue
            event = msgspec.structs.replace(event, at=max(round(self._engine.store.now(), 3), log.run.updated_at))
            judged, judged_at = judge(log.run, event, now=event.at, token_owner=owner), log.tail
            if not isinstance(judged, Accepted):
                if not is_fresh:
                    is_fresh = await self._read_on(log)
                    continue
                if claimed:
                    await self._hooks.release_unless_open(log, event.call, str(event.facts["token"]))
                return self._refused(log, judged)
            if not log.run.exists:
                await self._create_run(log, judged, operation)
            if event.type == rules.HOOK_CREATED and not claimed and not owner:
                owner = await self._hooks.claim(log, event.call, str(event.facts["token"]), event.at)
                claimed = not owner
                continue
            if asked.payloads and not is_kept:
                await self._engine.payloads.keep(asked.payloads)
                is_kept = True
            if log.tail != judged_at:
                continue  # a reader has read on meanwhile: its events may forbid this one
            await self._logs.append(log, judged.events, operation)
            is_fresh = False  # and the log says whether the event is there, and where: readers may have read on

    async def _read_on(self, log: RunLog) -> bool:
        await self._logs.refresh(log)
        return True

    async def _create_run(self, log: RunLog, judged: Accepted, operation: str) -> None:
        if log.record is None:
            if len(judged.events) > 1:
                refusal = why_not_of_now(log.run.id, log.id, self._engine.store.now())
                if refusal is not None:
                    raise refusal
            await self._projection.insert(log, judged.events[0], operation)

    def _written(self, log: RunLog, first: int, last: int) -> WrittenEvent:
        kinds = {event.type for event in log.events[first - 1 : last]}
        return WrittenEvent(log, first, last, step_created={rules.STEP_CREATED, rules.STEP_STARTED} <= kinds)

    def _refused(self, log: RunLog, judged: Unchanged | WorldError) -> WrittenEvent:
        if isinstance(judged, WorldError):
            raise judged
        return WrittenEvent(log, judged.position, judged.position)

    def _answer(self, written: WrittenEvent, asked: Wanted) -> Answer:
        log, event, all_data = written.log, asked.event, asked.with_data
        run = log.as_of(written.last) if written.last else log.run
        answer: Answer = {}
        if written.last:
            placed = PlacedEvent(written.last, log.events[written.last - 1])
            answer["event"] = event_fields(run.id, placed, all_data)
        if written.step_created:
            answer["stepCreated"] = True
        answer |= self._entity(run, event, all_data)
        return answer | self._news(written, asked)

    def _entity(self, run: WorldRun, event: WorldEvent, all_data: bool) -> Answer:
        """Return the run, step, hook or wait that an event is about, as it was after the event."""
        if event.type in rules.OF_RUNS:
            return {"run": run_fields(run, all_data)}
        if event.type in rules.OF_STEPS and (step := run.steps.get(event.call)):
            return {"step": step_fields(run, step, all_data)}
        if event.type in (rules.HOOK_CREATED, rules.HOOK_RECEIVED) and (hook := run.hooks.get(event.call)):
            return {"hook": hook_fields(run, hook, self._engine.app, all_data)}
        if event.type in rules.OF_WAITS and (wait := run.waits.get(event.call)):
            return {"wait": wait_fields(run, wait)}
        return {}

    def _news(self, written: WrittenEvent, asked: Wanted) -> Answer:
        """Return the events that the writer may not know: since its cursor, those that its event was pushed past, or
        the whole log for a run that starts.
        """
        log, params = written.log, asked.params
        since, count = params.get("sinceCursor"), params.get("eventCount")
        if isinstance(since, str) and since:
            return self._events_after(log, position(since), MAX_LIMIT)
        if type(count) is int and 0 <= count < written.first - 1:
            passed = log.placed(count, written.first - 1)
            events = [event_fields(log.run.id, placed) for placed in passed]
            return {"events": events, "cursor": str(written.first - 1), "hasMore": False}
        if asked.event.type == rules.RUN_STARTED and not params.get("skipPreload"):
            is_small = log.tail <= MAX_PRELOAD_EVENTS and log.size <= MAX_PRELOAD_BYTES
            return self._events_after(log, 0, MAX_PRELOAD_EVENTS) if is_small else {}
        return {}

    def _events_after(self, log: RunLog, after: int, limit: int) -> Answer:
        found = log.placed(after, after + limit)
        events = [event_fields(log.run.id, placed) for placed in found]
        return {
            "events": events,
            "cursor": str(found[-1].position) if found else None,
            "hasMore": after + limit < log.tail,
        }

    @translated
    async def events_get(self, *, run_id: str, event_id: str, resolve_data: str = "all") -> Answer:
        all_data = with_data(resolve_data)
        log = await self._log(run_id)
        number = position_of(event_id)
        if number is None or not 0 < number <= log.tail:
            raise event_not_found(f"the event {event_id!r:.80} of {run_id}")
        placed = PlacedEvent(number, log.events[number - 1])
        return await self._resolved(event_fields(log.run.id, placed, all_data))

    @translated
    async def events_list(self, *, run_id: str, pagination: Fields | None = None, resolve_data: str = "all") -> Answer:
        """Return a page of the events of a run; by default as many as a page may have, first ones first."""
        page, all_data = paging(pagination, ascending=True, usual=MAX_LIMIT), with_data(resolve_data)
        log = await self._log(run_id)
        return await self._resolved(self._listing.events_of_run(log, page, all_data))

    @translated
    async def events_list_by_correlation_id(
        self,
        *,
        correlation_id: str,
        run_id: str | None = None,
        pagination: Fields | None = None,
        resolve_data: str = "all",
    ) -> Answer:
        """Return a page of the events of a step, hook or wait. Without a run, the logs of all runs are read: for
        interactive use only.
        """
        call = text("correlationId", correlation_id, rules.MAX_ID)
        page, all_data = paging(pagination, ascending=True), with_data(resolve_data)
        if run_id is None:
            return await self._resolved(await self._listing.events_of_call(call, page, all_data))
        log = await self._log(run_id)
        found = [placed for placed in log.placed() if placed.event.call == call]
        return await self._resolved(self._listing.events(log, found, page, all_data))

    # --- runs

    @translated
    async def runs_get(self, *, run_id: str, resolve_data: str = "all") -> Answer:
        all_data = with_data(resolve_data)
        log = await self._log(run_id)
        return await self._resolved(run_fields(log.run, all_data))

    @translated
    async def runs_list(
        self,
        *,
        workflow_name: str | None = None,
        status: str | Sequence[str] | None = None,
        pagination: Fields | None = None,
        resolve_data: str = "all",
    ) -> Answer:
        page, all_data = paging(pagination), with_data(resolve_data)
        name = None if workflow_name is None else text("workflowName", workflow_name, rules.MAX_NAME)
        return await self._resolved(await self._listing.runs(name, status, page, all_data))

    @translated
    async def runs_set_attributes(
        self,
        *,
        run_id: str,
        changes: Sequence[Fields],
        allow_reserved_attributes: bool = False,
        operation_id: str | None = None,
    ) -> Answer:
        """Change the attributes of a run; return ``{"attributes": …}``."""
        data: Answer = {"changes": changes, "writer": {"type": "workflow"}}
        if allow_reserved_attributes:
            data["allowReservedAttributes"] = True
        event = {"eventType": rules.ATTR_SET, "eventData": data}
        answer = await self.events_create(run_id=run_id, event=event, operation_id=operation_id)
        return {"attributes": answer["run"]["attributes"]}

    # --- steps

    @translated
    async def steps_get(self, *, run_id: str | None, step_id: str, resolve_data: str = "all") -> Answer:
        all_data, id = with_data(resolve_data), text("stepId", step_id, rules.MAX_ID)
        log = await self._log(run_id) if run_id is not None else await self._listing.run_of_step(id)
        step = None if log is None else log.run.steps.get(id)
        if log is None or step is None:
            raise step_not_found(id, run_id or "any run")
        return await self._resolved(step_fields(log.run, step, all_data))

    @translated
    async def steps_list(self, *, run_id: str, pagination: Fields | None = None, resolve_data: str = "all") -> Answer:
        page, all_data = paging(pagination), with_data(resolve_data)
        log = await self._log(run_id)
        steps = [(step.position, step_fields(log.run, step, all_data)) for step in log.run.steps.values()]
        return await self._resolved(self._listing.page(steps, page))

    # --- hooks

    @translated
    async def hooks_get(self, *, hook_id: str, resolve_data: str = "all") -> Answer:
        all_data, id = with_data(resolve_data), text("hookId", hook_id, rules.MAX_ID)
        return await self._hook(await self._hooks.by_id(id), id, all_data)

    @translated
    async def hooks_get_by_token(self, *, token: str, resolve_data: str = "all") -> Answer:
        all_data, token = with_data(resolve_data), text("token", token, rules.MAX_TOKEN)
        return await self._hook(await self._hooks.by_token(token), "of this token", all_data)

    async def _hook(self, found: tuple[RunLog, rules.WorldHook] | None, name: str, all_data: bool) -> Answer:
        if found is None:
            raise hook_not_found(name)
        log, hook = found
        return await self._resolved(hook_fields(log.run, hook, self._engine.app, all_data))

    @translated
    async def hooks_list(
        self, *, run_id: str | None = None, pagination: Fields | None = None, resolve_data: str = "all"
    ) -> Answer:
        page, all_data, app = paging(pagination), with_data(resolve_data), self._engine.app
        if run_id is None:
            return await self._resolved(await self._listing.hooks(self._hooks, page, all_data))
        log = await self._log(run_id)
        hooks = [(hook.position, hook_fields(log.run, hook, app, all_data)) for hook in log.run.open_hooks]
        return await self._resolved(self._listing.page(hooks, page))

    # --- streams

    @translated
    async def streams_write(
        self, *, run_id: str, name: str, chunks: Sequence[bytes | str], operation_id: str | None = None
    ) -> Answer:
        """Append chunks to a stream; they are durable when it returns. What comes after the close is dropped."""
        await self._streams.write(run_id, name, chunks, self._operation(operation_id))
        return {}

    @translated
    async def streams_close(self, *, run_id: str, name: str, operation_id: str | None = None) -> Answer:
        await self._streams.close(run_id, name, self._operation(operation_id))
        return {}

    @translated
    async def streams_list(self, *, run_id: str) -> Answer:
        """Return ``{"names": [...]}``."""
        return {"names": await self._streams.names(run_id)}

    @translated
    async def streams_get_chunks(
        self, *, run_id: str, name: str, limit: int | None = None, cursor: str | None = None
    ) -> Answer:
        return await self._streams.chunks(run_id, name, limit, cursor)

    @translated
    async def streams_get_info(self, *, run_id: str, name: str) -> Answer:
        """Return ``{"tailIndex": …, "done": …}``; -1 is the tail of a stream without chunks."""
        return await self._streams.info(run_id, name)

    @translated
    async def streams_read(self, *, run_id: str, name: str, start: int = 0) -> tuple[int, AsyncIterator[bytes]]:
        """Return the index of the first chunk, and the chunks from there on, live. Iteration ends when the stream is
        closed, or its run has ended; it may raise `WorldError`. `start` below 0 counts from the end.
        """
        first, chunks = await self._streams.read(run_id, name, start)
        return first, _translated_chunks(chunks)

    # --- for the server and the command line

    async def run(self, run_id: str) -> WorldRun:
        """Return a run as its log has it now. Raises `WorldError`."""
        return (await self._log(run_id)).run

    async def token_owner(self, run_id: str, hook_id: str, token: str) -> str:
        """Return the run that has a token, unless it is this hook of this run; empty if the token is free."""
        return await self._hooks.owner(valid_run(run_id), hook_id, token)

    async def import_run(self, id: InvocationId, parts: Sequence[Sequence[WorldEvent]], operation: str) -> None:
        """Write the whole log of a run that another World began, page by page, and then its invocation.

        Called again after a crash, it goes on. Raises `WorldError` if there is another log, or a token is taken.
        """
        log = await self._logs.fresh(id)
        for number, events in enumerate(parts):
            if f"{operation}:{number}" not in log.operations:
                await self._logs.append(log, events, f"{operation}:{number}")
        wanted_operations = [f"{operation}:{number}" for number in range(len(parts))]
        if list(log.operations) != wanted_operations or log.tail != sum(map(len, parts)):
            raise conflict("it is in this store already, with other events")
        for hook in log.run.open_hooks:
            if owner := await self._hooks.claim(log, hook.id, hook.token, hook.created_at):
                raise conflict(f"the token of its hook {hook.id} belongs to {owner}")
        await self._projection.insert(log, log.events[0], operation)
        await self._projection.bring(log)

    async def sweep(self, limit: int = 200) -> bool:
        """Repair projections that lag behind their logs. Return True if there may be more to look at in this round."""
        return await self._projection.sweep(limit)

    async def close(self) -> None:
        """Clear the cache of logs."""
        self._logs.clear()

    # ---

    async def _log(self, run_id: object) -> RunLog:
        """Return the log of a run that is there, as the store has it now; repair its invocation if it lags."""
        id = valid_run(run_id)
        log = await self._logs.fresh(id)
        if not log.run.exists:
            raise run_not_found(str(run_id))
        if log.projected < log.changed:
            await self._projection.bring_if_possible(log)
        return log

    async def _resolved(self, answer: Answer) -> Answer:
        """Put payloads in the places of what is `Encoded`."""
        found: list[Encoded] = []
        _collect(answer, found)
        if not found:
            return answer
        missing = [reference for encoded in found for reference in references(encoded.data)]
        fetched: Payloads = await self._engine.payloads.fetch(missing) if missing else {}
        decode = self._engine.codec.decode

        def value(encoded: Encoded) -> Any:
            decoded = decode(encoded.data, fetched)
            return error_fields(decoded, encoded.stack, encoded.code) if encoded.is_error else decoded

        resolved: Answer = _replaced(answer, value)
        return resolved


def _collect(part: Any, found: list[Encoded]) -> None:
    if isinstance(part, Encoded):
        found.append(part)
    elif isinstance(part, dict):
        for each in part.values():
            _collect(each, found)
    elif isinstance(part, list):
        for each in part:
            _collect(each, found)


def _replaced(part: Any, value: Callable[[Encoded], Any]) -> Any:
    if isinstance(part, Encoded):
        return value(part)
    if isinstance(part, dict):
        return {name: _replaced(each, value) for name, each in part.items()}
    return [_replaced(each, value) for each in part] if isinstance(part, list) else part


async def _translated_chunks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    chunk = translated(chunks.__anext__)
    while True:
        try:
            next_chunk = await chunk()
        except StopAsyncIteration:
            return
        yield next_chunk
