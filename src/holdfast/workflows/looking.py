"""Looking into runs: their steps, their events, what they wait for; and waking those that sleep.

Steps are folded from the log: nothing is stored beside it, so nothing can differ from it. A quick step is written when
it has ended, so a step that runs is seen after a second. Events of the run itself are made from its invocation.

A cursor names a place between two events, in all generations of the log: ``1.17`` is after position 17 of generation 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import format_duration
from holdfast.codec import Codec, Payloads, references
from holdfast.errors import (
    CorruptRecord,
    InboxFull,
    InvocationStatusTransitionError,
    LogEventNotFound,
    NotDecodable,
    StepNotFound,
    UsageError,
)
from holdfast.executors.context import STEP as STEP_TASK
from holdfast.ids import InvocationId
from holdfast.model.changes import Full, Missing, Push
from holdfast.model.explain import Explanation, RunWait, moment_in_words
from holdfast.model.log import MAX_PAGE_EVENTS
from holdfast.model.names import counted
from holdfast.model.records import InboxEntry, InvocationRecord
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import (
    CANCELLED,
    CHILD,
    COMPLETED,
    FAILED,
    HOOK,
    RETRYING,
    RUNNING,
    STEP,
    STREAM,
    WAIT,
    WAITING,
    LogEvent,
    StepRecord,
    Stored,
    of_run,
)
from holdfast.runtime.wait import get_readable, missing
from holdfast.workflows import events as e
from holdfast.workflows.children import WAKE, push_all
from holdfast.workflows.events import Event

MAX_EVENTS = 10_000
_PAGES = 500
_MAX_NAMED = 3


class Placed(NamedTuple):
    """An event at its position."""

    position: int
    event: Event


# --- reading


async def read(engine: Engine, record: InvocationRecord, generation: int, *, after: int = 0) -> list[Placed]:
    """Return the events of a log after a position. Raises `NotDecodable`, `CorruptRecord`."""
    found: list[Placed] = []
    async for placed in _pages(engine, record.id, generation, after):
        found += placed
    return found


async def _pages(engine: Engine, run: InvocationId, generation: int, after: int) -> AsyncIterator[list[Placed]]:
    """Yield the events of each page, the part after the position."""
    # A page may begin before the position. No page has more events than this, so none is missed.
    start = max(0, after - MAX_PAGE_EVENTS)
    while True:
        pages = await engine.store.read_log(engine.app, run, generation=generation, after=start, limit=_PAGES)
        for page in pages:
            events = enumerate(e.decode(page), page.first)
            yield [Placed(position, event) for position, event in events if position > after]
            start = page.first
        if len(pages) < _PAGES:
            return


def generation_of(record: InvocationRecord) -> int:
    return 0 if record.run is None else record.run.generation


# --- steps: pure


class _Folding(msgspec.Struct):
    """What is known so far about a call."""

    record: StepRecord
    data: bytes = b""
    result: bytes = b""


def fold(log: Iterable[Placed]) -> list[_Folding]:
    """Return the calls of a log, in the order in which it first speaks of them."""
    calls: dict[str, _Folding] = {}
    for position, event in log:
        if not event.call or event.type in e.CARRIED:
            continue
        call = calls.get(event.call)
        if call is None:
            kind = _KINDS.get(event.type, STEP)
            name = event.name or event.call.partition("#")[0].partition("@")[0]
            name = hook_label(event) if kind == HOOK else name
            call = calls[event.call] = _Folding(
                StepRecord(id=event.call, kind=kind, name=name, status=WAITING, position=position)
            )
        _take(call, event)
    return list(calls.values())


_KINDS = dict.fromkeys((e.WAIT_CREATED, e.WAIT_COMPLETED), WAIT) | dict.fromkeys(e.HOOKS, HOOK)
_KINDS[e.STREAM_WRITTEN] = STREAM
SECRET_TOKEN = "(secret token)"


def hook_label(event: Event) -> str:
    """Return the token of a new hook for people; it is not shown if it is a secret."""
    facts = Codec().decode(event.data) if event.type == e.HOOK_CREATED else {}
    return str(facts.get("token") or SECRET_TOKEN)


def _take(call: _Folding, event: Event) -> None:
    known, facts = call.record, dict[str, object]()
    match event.type:
        case e.STEP_CREATED:
            call.data = event.data
            facts = {"created_at": event.at, "where": event.where, "child": event.child}
            if event.child and not is_step_elsewhere(event):
                facts["kind"] = CHILD
        case e.STEP_STARTED:
            facts = {"status": RUNNING, "attempt": event.attempt, "due": None}
            facts["started_at"] = known.started_at or event.at
        case e.STEP_RETRYING:
            facts = {"status": RETRYING, "attempt": event.attempt, "due": event.due, "error": event.error}
        case e.STEP_COMPLETED:
            call.result = event.data
            facts = {"status": COMPLETED, "ended_at": event.at, "error": None, "due": None}
            facts["attempt"] = event.attempt or known.attempt
        case e.STEP_FAILED:
            facts = {"status": FAILED if event.error is not None else CANCELLED, "ended_at": event.at, "due": None}
            facts |= {"error": event.error, "why": event.why, "attempt": event.attempt or known.attempt}
        case e.WAIT_CREATED:
            facts = {"created_at": event.at, "started_at": event.at, "due": event.due, "where": event.where}
        case e.WAIT_COMPLETED:
            status = CANCELLED if event.why == e.GIVEN_UP else COMPLETED
            facts = {"status": status, "ended_at": event.at, "due": event.due, "why": event.why}
        case e.HOOK_CREATED:
            facts = {"created_at": event.at, "where": event.where}
        case e.HOOK_RECEIVED:
            facts = {"received": known.received + 1}
        case e.HOOK_DISPOSED:
            facts = {"status": COMPLETED, "ended_at": event.at, "why": "disposed of"}
        case e.HOOK_CONFLICT:
            facts = {"status": FAILED, "ended_at": event.at, "where": event.where, "why": event.why}
        case e.STREAM_WRITTEN:
            facts = {"status": COMPLETED if event.error is None else FAILED, "error": event.error}
            facts |= {"created_at": event.at, "ended_at": event.at, "where": event.where}
    call.record = msgspec.structs.replace(known, **facts)


def is_step_elsewhere(event: Event) -> bool:
    """Return whether a created call is a step on another queue, and not a child: a step's call has its whole name."""
    return event.name == event.call.partition("#")[0].partition("@")[0]


def nearest(id: str, known: Sequence[str]) -> str:
    """Return the id that was probably meant; empty if none is like it. For ``charge#9`` that is the last of charge."""
    name, _, number = id.partition("#")
    numbers = {each: each.partition("#")[2] for each in known if each.partition("#")[0] == name}
    numbered = {each: int(text) for each, text in numbers.items() if text.isdecimal()}
    if numbered and number.isdecimal():
        return min(numbered, key=lambda each: abs(numbered[each] - int(number)))
    return next(iter(difflib.get_close_matches(id, known, n=1, cutoff=0.4)), "")


def no_step(record: InvocationRecord, id: str, known: Sequence[str]) -> StepNotFound:
    if not known:
        return StepNotFound(f"{record.task} {record.id} has no step '{id}': its log has no step yet")
    near = nearest(id, known)
    listed = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    hint = f" Did you mean '{near}'?" if near else ""
    return StepNotFound(f"{record.task} {record.id} has no step '{id}'.{hint} There are: {listed}.")


# --- the feature


class Looking:
    """See `holdfast.runtime.runs.RunLooks`."""

    async def calls(self, engine: Engine, record: InvocationRecord, *, fetch: bool = False) -> list[StepRecord]:
        """Return the steps, children and waits of a run's current log."""
        folded = fold(await read(engine, of_run(record), generation_of(record)))
        wanted = [call for call in folded if call.record.kind != STREAM]
        return await self._finished(engine, record, wanted, fetch)

    async def steps(self, engine: Engine, record: InvocationRecord, *, fetch: bool = False) -> list[StepRecord]:
        return [call for call in await self.calls(engine, record, fetch=fetch) if call.kind not in (WAIT, HOOK)]

    async def step(self, engine: Engine, record: InvocationRecord, id: str, *, fetch: bool = False) -> StepRecord:
        folded = fold(await read(engine, of_run(record), generation_of(record)))
        found = [call for call in folded if call.record.id == id]
        if not found:
            raise no_step(record, id, [call.record.id for call in folded])
        (step,) = await self._finished(engine, record, found, fetch)
        return step

    async def _finished(
        self, engine: Engine, record: InvocationRecord, folded: Sequence[_Folding], fetch: bool
    ) -> list[StepRecord]:
        """Return steps with their values, and with what the invocations say that perform them elsewhere."""
        ids = [InvocationId(call.record.child) for call in folded if call.record.child]
        found = await get_readable(engine.store, engine.app, ids) if ids else []
        children = {child.id: child for child in found if child is not None}
        wanted = [ref for call in folded for data in (call.data, call.result) for ref in references(data)]
        payloads = await engine.payloads.fetch(wanted) if fetch and wanted else {}
        return [self._step(engine, record, call, children, payloads) for call in folded]

    def _step(
        self,
        engine: Engine,
        record: InvocationRecord,
        call: _Folding,
        children: dict[InvocationId, InvocationRecord],
        payloads: Payloads,
    ) -> StepRecord:
        step, child = call.record, children.get(InvocationId(call.record.child))
        facts: dict[str, object] = {"queue": "" if step.kind in (WAIT, HOOK) else record.queue}
        if child is not None:
            facts |= {"queue": child.queue, "attempt": child.attempt}
            facts["started_at"] = next((line.at for line in child.history if line.status is Status.RUNNING), None)
            if not child.task.startswith(STEP_TASK):
                facts["kind"] = CHILD
            if step.is_open and child.status in OWNED:
                facts["status"] = RUNNING
        elif step.child:
            facts["queue"] = ""
        if step.kind in (WAIT, HOOK) and step.is_open and record.status in FINAL:  # it has ended with its run
            facts |= {"status": COMPLETED if step.kind == HOOK else CANCELLED, "ended_at": record.changed_at}
        if call.data:
            facts["stored_arguments"] = Stored(call.data, engine.codec, payloads)
        if step.status == COMPLETED and call.result:
            facts["stored_result"] = Stored(call.result, engine.codec, payloads)
        return msgspec.structs.replace(step, **facts)

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
        of_run(record)
        if type(limit) is not int or not 0 <= limit <= MAX_EVENTS:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to {MAX_EVENTS:,}")
        last = generation_of(record)
        if generation is not None and not 0 <= generation <= last:
            raise LogEventNotFound(f"{record.task} {record.id} has generations 0 to {last} of its log, no {generation}")
        place = _Place(-1, 0) if after is None else _place(after)
        found: list[LogEvent] = []
        for each in range(last + 1) if generation is None else (generation,):
            if len(found) >= limit:
                break
            found += await self._of_generation(engine, record, each, place, correlation, limit - len(found))
        if correlation is not None and not found and after is None:
            known = [call.record.id for call in fold(await read(engine, record, last))]
            if correlation not in known:
                raise no_step(record, correlation, known)
        return await self._with_values(engine, found, fetch)

    async def _of_generation(
        self,
        engine: Engine,
        record: InvocationRecord,
        generation: int,
        place: _Place,
        correlation: str | None,
        limit: int,
    ) -> list[LogEvent]:
        if place.generation > generation:
            return []
        after = place.position if place.generation == generation else -1
        found: list[LogEvent] = []
        if generation == 0 and correlation is None:
            found += [event for event in beginning(engine, record) if _place(event.cursor) > place]
        tail = 0
        async for placed in _pages(engine, record.id, generation, max(0, after)):
            tail = max([tail, *[position for position, _ in placed]])
            found += [
                log_event(engine, position, generation, event)
                for position, event in placed
                if correlation in (None, event.call)
            ]
            if len(found) >= limit:
                return found[:limit]
        if generation == generation_of(record) and correlation is None:
            found += [event for event in end(engine, record) if _place(event.cursor) > place]
        return found[:limit]

    async def _with_values(self, engine: Engine, found: list[LogEvent], fetch: bool) -> list[LogEvent]:
        wanted = [ref for event in found if event.stored for ref in references(event.stored.data)] if fetch else []
        if not wanted:
            return found
        payloads = await engine.payloads.fetch(list(dict.fromkeys(wanted)))
        return [
            event
            if event.stored is None
            else msgspec.structs.replace(event, stored=Stored(event.stored.data, event.stored.codec, payloads))
            for event in found
        ]

    # --- waiting

    async def waits_for(self, engine: Engine, record: InvocationRecord) -> Sequence[RunWait]:
        """Return what a run waits for, and since when; nothing if its log does not say."""
        if record.run is None or record.status in FINAL:
            return []
        try:
            calls = await self.calls(engine, record)
        except (CorruptRecord, NotDecodable):  # the next owner parks it, and says so
            return []
        now = engine.store.now()
        return [RunWait(_waits(call, now), call.child) for call in calls if call.is_open]

    async def explain(self, engine: Engine, record: InvocationRecord) -> Explanation | None:
        return None

    async def wake(self, engine: Engine, record: InvocationRecord) -> None:
        """End the sleeps of a run, and its waits for the next attempt of a step."""
        calls = await self.calls(engine, record)
        if not any(call.is_open and (call.kind == WAIT or call.status == RETRYING) for call in calls):
            open = [_waits(call, engine.store.now()) for call in calls if call.is_open]
            waits = "; ".join(open) or record.reason or f"it is {record.status}"
            raise InvocationStatusTransitionError(
                f"{record.task} {record.id} does not sleep, so it cannot be woken: {waits}"
            )
        at = engine.store.now()
        entry = InboxEntry(id=f"wake:{engine.ids.new()}", kind=WAKE, at=at)
        push = Push(
            app=record.app, id=record.id, entry=entry, operation=engine.ids.operation(), at=at, why="woken by hand"
        )
        (verdict,) = await push_all(engine, [push])
        if isinstance(verdict, Missing):
            raise await missing(engine.store, engine.app, record.id)
        if isinstance(verdict, Full):
            raise InboxFull(f"the inbox of {record.task} {record.id} is full; try again when the run has gone on")


# --- events: pure


class _Place(NamedTuple):
    """After which position of which generation; generation -1 is before everything."""

    generation: int
    position: int


_CURSOR = re.compile(r"(-1|\d{1,9})\.(\d{1,9})")


def _place(cursor: str) -> _Place:
    found = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise UsageError(f"after={cursor!r:.80} is no cursor: give that of the last event of a page, such as '0.17'")
    return _Place(int(found[1]), int(found[2]))


def log_event(engine: Engine, position: int, generation: int, event: Event) -> LogEvent:
    return LogEvent(
        cursor=f"{generation}.{position}",
        type=event.type,
        at=event.at,
        generation=generation,
        position=position,
        correlation=event.call,
        name=event.name,
        where=event.where,
        attempt=event.attempt,
        due=event.due,
        error=event.error,
        child=event.child,
        code=event.code,
        why=f"index {event.index}" if event.type == e.STREAM_WRITTEN and event.error is None else event.why,
        stored=Stored(event.data, engine.codec) if event.data and event.type != e.STREAM_WRITTEN else None,
    )


def beginning(engine: Engine, record: InvocationRecord) -> Iterator[LogEvent]:
    """Yield run_created and run_started, as the invocation has them. Their cursors are before the log."""
    stored = None if record.run is not None and record.run.generation else Stored(record.arguments, engine.codec)
    yield LogEvent(cursor="-1.1", type="run_created", at=record.created_at, name=record.task, stored=stored)
    started = record.run.started_at if record.run is not None and not record.run.generation else None
    first = next((line.at for line in record.history if line.status is Status.RUNNING), started)
    if first is not None:
        yield LogEvent(cursor="-1.2", type="run_started", at=first, name=record.task)


_ENDS = {Status.SUCCESS: "run_completed", Status.FAILED: "run_failed", Status.CANCELLED: "run_cancelled"}


def end(engine: Engine, record: InvocationRecord) -> Iterator[LogEvent]:
    """Yield run_completed, run_failed or run_cancelled, behind everything else."""
    if record.status in FINAL:
        yield LogEvent(
            cursor=f"{generation_of(record)}.{_BEHIND}",
            type=_ENDS.get(record.status, "run_failed"),
            at=record.changed_at,
            generation=generation_of(record),
            name=record.task,
            error=record.error,
            why=record.reason,
            stored=None if record.result is None else Stored(record.result, engine.codec),
        )


_BEHIND = 999_999_999


def _waits(call: StepRecord, now: float) -> str:
    """Say what a call waits for, and since when."""
    since = call.started_at or call.created_at
    long = "" if since is None else f", for {_rounded(now - since)}"
    place = f" ({call.where})" if call.where else ""
    if call.kind == WAIT:
        until = "" if call.due is None else f" until {_moment(call.due, now)}"
        return f"{call.id}: a {call.name}{until}{place}{long}"
    if call.kind == HOOK:
        so_far = f", after {counted(call.received, 'payload')}" if call.received else ""
        since_when = "" if since is None else f", since {moment_in_words(since)}"
        return f"{call.id}: a payload for the hook {call.name}{so_far}{place}{since_when}"
    if call.status == RETRYING:
        when = "" if call.due is None else f" at {_moment(call.due, now)}"
        error = f", after {call.error}" if call.error else ""
        first = "" if since is None else f"; the first was {_rounded(now - since)} ago"
        return f"{call.id}: attempt {call.attempt + 1}{when}{error}{place}{first}"
    if call.child:
        what = "the child" if call.kind == CHILD else f"the step on the queue '{call.queue}', as"
        return f"{call.id}: {what} {call.child}, {call.status}{long}{place}"
    return f"{call.id}: the step is {call.status}, attempt {max(1, call.attempt)}{place}{long}"


def _moment(at: float, now: float) -> str:
    return f"{moment_in_words(at)}, {f'in {_rounded(at - now)}' if at > now else 'which is over'}"


def _rounded(seconds: float) -> str:
    return format_duration(max(0.0, round(seconds)))
