"""Schedules: what is due is submitted, by whoever performs the services.

To fire a tick is to insert its invocation, whose id follows from the schedule's uid and the tick. Then the schedule is
moved on, by a write to what was read. A crash between the two leaves ticks that will be decided again, and
inserting them again does nothing; two who decide at once insert the same. So no tick fires twice, and none is passed
over unless the schedule says so.

What a repetition finds must still be there: an invocation is kept for an hour at least, and a decision is thrown away
when it is half a minute old.

An idle look costs nothing while the next tick is known to be later; a hint tells of a schedule that has changed, and
every second somebody looks anyway, or every five where hints come through a channel that can be relied upon.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from holdfast.codec import Codec
from holdfast.crashpoints import crashpoint
from holdfast.engine.outages import Seldom
from holdfast.engine.reading import get_readable
from holdfast.engine.submit import Submitter
from holdfast.errors import CorruptRecord, StoreUnavailable
from holdfast.ids import Ids, InvocationId
from holdfast.lifecycle.decoding import ahead
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.firing import STALE_SECONDS, due, due_at, invocation_id
from holdfast.lifecycle.records import Entry, InvocationRecord, Origin, Source, registered
from holdfast.lifecycle.schedules import KIND, Call, CatchUp, Overlap, ScheduleRecord, from_entry, moved, to_entry
from holdfast.lifecycle.status import FINAL
from holdfast.store.contract import Store
from holdfast.wakeup.fallback import look_after

log = logging.getLogger("holdfast.schedules")

LOOK_SECONDS = 1.0  # a schedule that was just made may be due before a hint of it arrives, if one does
_MOST_TRUST = 5  # times as long, where hints arrive
_AT_ONCE = 50
_PUT_OFF_SECONDS = 10.0  # others may be able to read it, and have to be in time for a tick that must not be late
MOST_QUEUED = 1000
_TICK_KEPT_SECONDS = 86_400.0
_codec = Codec()

Cancel = Callable[[InvocationRecord, str], Awaitable[object]]
Fired = tuple[float, InvocationId]  # a tick, and the invocation or the event that it became
Emit = Callable[[EventRecord], Awaitable[object]]


class Scheduler:
    """`cancel` ends an invocation that a later tick takes the place of, with a reason."""

    def __init__(
        self,
        store: Store,
        submitter: Submitter,
        ids: Ids,
        *,
        app: str,
        cancel: Cancel,
        monotonic: Callable[[], float],
        emit: Emit | None = None,
        look_seconds: float = LOOK_SECONDS,
        trust: Callable[[], int] = lambda: 1,
    ) -> None:
        self._store = store
        self._submitter = submitter
        self._ids = ids
        self._app = app
        self._cancel = cancel
        self._emit = emit
        self._look_seconds = look_seconds
        self._trust = trust
        self._monotonic = monotonic
        self._look_at = float("-inf")  # by the monotonic clock: that of the store may be set
        self._told = False
        self._seldom = Seldom(monotonic)

    def look_soon(self) -> None:
        """A schedule has changed."""
        self._look_at, self._told = float("-inf"), True

    async def fire_due(self) -> bool:
        """Fire what is due; whether there may be more."""
        if self._monotonic() < self._look_at:
            return False
        now = self._store.now()
        self._told = False
        entries = await self._store.due_entries(self._app, KIND, _AT_ONCE)
        ready = [entry for entry in entries if entry.due_at is not None and entry.due_at <= now]
        for entry in ready:
            await self._see_to(entry, now)
        waits = [entry.due_at - now for entry in entries[len(ready) :] if entry.due_at is not None]
        unasked = look_after(self._look_seconds * max(1, min(self._trust(), _MOST_TRUST)))
        wait = 0.0 if ready else min([unasked, *waits])
        self._look_at = float("-inf") if self._told else self._monotonic() + wait
        return len(ready) == _AT_ONCE

    async def _see_to(self, entry: Entry, now: float) -> None:
        try:
            await self._fire(entry, from_entry(entry), now)
            return
        except StoreUnavailable:
            raise
        except CorruptRecord as error:
            why = f"{error}; its ticks wait for somebody who can"
        except Exception as error:
            why = f"the schedule '{entry.name}' is put off: {error}"
            log.debug("%s", why, exc_info=True)
        if self._seldom.is_due(entry.name):
            log.error("%s", why)
        # Put off, so that it does not stand in front of the others at every look.
        await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=now + _PUT_OFF_SECONDS), entry)

    async def _fire(self, entry: Entry, record: ScheduleRecord, now: float) -> None:
        decision = due(record, now)
        ticks = (*record.progress.queued, *decision.ticks)
        fires, queued = await self._without_overlap(record, ticks)
        crashpoint("schedule.decided")
        if self._store.now() - now > STALE_SECONDS:
            return
        fired = await (self._submit if not record.call.event else self._tell)(record, fires, now)
        crashpoint("schedule.inserted")
        last_tick, last_id = fired[-1] if fired else (record.progress.last_tick, record.progress.last_id)
        progress = replace(
            record.progress,
            last_tick=last_tick,
            last_id=last_id,
            fired=record.progress.fired + len(fired),
            skipped=record.progress.skipped + len(ticks) - len(fired) - len(queued),
            missed=record.progress.missed + decision.missed,
            queued=tuple(queued),
        )
        if decision.missed:
            more = "at least " if decision.more else ""
            level = logging.INFO if record.rules.catch_up is CatchUp.NONE else logging.WARNING
            log.log(level, "schedule '%s': %s%d ticks were missed", record.name, more, decision.missed)
        if not await self._store.put_entry(to_entry(moved(record, now, through=now, progress=progress)), entry):
            log.debug("schedule '%s' was changed at the same time", record.name)
        crashpoint("schedule.moved")

    async def _submit(self, record: ScheduleRecord, ticks: Sequence[float], now: float) -> list[Fired]:
        """Those that fired, each with its invocation: a twin may have been in the way."""
        records = [self._invocation(record, tick, now) for tick in ticks]
        before = await self._submitter.submit(records)
        return [
            (tick, one.id)
            for tick, one, other in zip(ticks, records, before, strict=True)
            if other is None or other.id == one.id
        ]

    async def _tell(self, record: ScheduleRecord, ticks: Sequence[float], now: float) -> list[Fired]:
        """A tick that is one of several things a trigger waits for is an event, whose id follows from the tick."""
        assert self._emit is not None
        told = []
        for tick in ticks:
            id, payload = invocation_id(record, tick), _codec.encode({"tick": moment(tick)})
            keep_until = now + _TICK_KEPT_SECONDS
            name = record.call.event
            await self._emit(
                EventRecord(
                    app=record.app, id=id, name=name, payload=payload, at=tick, keep_until=keep_until, kind="tick"
                )
            )
            told.append((tick, id))
        return told

    async def _without_overlap(
        self, record: ScheduleRecord, ticks: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Which of these ticks fire now, and which wait for their turn."""
        overlap = record.rules.overlap
        if overlap is Overlap.ALLOW or not ticks:
            return ticks, ()
        if overlap is Overlap.QUEUE:
            fires = ticks[:1] if await self._unfinished(record, ()) is None else ()
            return fires, ticks[len(fires) :][-MOST_QUEUED:]
        before = await self._unfinished(record, ticks[-_AT_ONCE:])
        if before is None:
            return ticks[-1:], ()
        again = [tick for tick in ticks if invocation_id(record, tick) == before.id]
        if overlap is Overlap.SKIP:
            return again, ()
        if again != [ticks[-1]]:
            await self._cancel(before, f"the next tick of the schedule '{record.name}' takes its place")
        return ticks[-1:], ()

    async def _unfinished(self, record: ScheduleRecord, ticks: Sequence[float]) -> InvocationRecord | None:
        """The invocation of the last tick that fired, unless it has ended or is gone. It may be that of one of these
        ticks: whoever fired it could not write that down.
        """
        last = record.progress.last_id
        ids = [*([] if last is None else [last]), *(invocation_id(record, tick) for tick in ticks)]
        found = await get_readable(self._store, self._app, ids) if ids else ()
        return next((each for each in reversed(found) if each is not None and each.status not in FINAL), None)

    def _invocation(self, record: ScheduleRecord, tick: float, now: float) -> InvocationRecord:
        why = f"tick {moment(tick)} of the schedule '{record.name}'"
        return called(record, invocation_id(record, tick), self._ids.operation(), tick, now, due_at(record, tick), why)


def called(
    record: ScheduleRecord,
    id: InvocationId,
    operation: str,
    tick: float,
    now: float,
    due_at: float,
    why: str,
    kind: str = "tick",
) -> InvocationRecord:
    """The call of a schedule, as a new invocation."""
    call = record.call
    fresh = InvocationRecord(
        id=id,
        app=record.app,
        task=call.task,
        arguments=call.arguments,
        queue=call.queue,
        tags=call.tags,
        priority=call.priority,
        at_most_once=call.at_most_once,
        limit_key=call.limit_key,
        terms=call.terms,
        twin=f"schedule:{record.uid}" if record.rules.unique else call.twin,
        created_at=now,
        due_at=due_at,
        origin=Origin(trigger=record.name, sources=(Source(kind=kind, id=moment(tick), name=record.name),)),
    )
    return registered(expiring(fresh, call), operation=operation, at=now, why=why)


def expiring(record: InvocationRecord, call: Call) -> InvocationRecord:
    """With the moment by which it has to be started, if its call says how long that may take."""
    if call.expires_seconds is None:
        return record
    start_by = ahead(max(record.created_at, record.due_at), call.expires_seconds)
    return replace(record, start_by=start_by, terms=replace(record.terms, start_by=start_by))


def moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).isoformat(timespec="seconds" if at == int(at) else "milliseconds")
