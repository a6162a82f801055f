"""Stored schedules: `ScheduleRegistry` creates and changes them, `Scheduler` fires their due ticks.

Each change of a schedule reads, decides, and writes to the version that was read. Running a schedule now, and
submitting a range of its ticks, are calls of their own: with a request, their ids contain it, so repeating the request
does nothing.

The scheduler runs on the runner that performs the services. To fire a tick is to insert its invocation, with an id made
of the schedule's uid and the tick. Then the schedule is moved on, by a compare-and-set. A crash between the two leaves
ticks that will be decided again, and inserting them again does nothing; two runners that decide at once insert the
same. So no tick fires twice, and no tick is skipped unless the schedule allows it. A repetition must find the
invocation: it is kept for an hour at least, and a decision is thrown away when it is half a minute old.

An idle look costs nothing while the next tick is known to be later. A hint announces a changed schedule. The scheduler
also looks every second, or every five where hints are reliable.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast import errors
from holdfast.clock import moment
from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.ids import InvocationId, derived_id
from holdfast.model.records import SCHEDULES, Entry, Hint, InvocationRecord, Origin, Quarantined, Source
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import look_after
from holdfast.runtime.wait import get_readable
from holdfast.schedules.records import (
    KIND,
    CatchUp,
    Overlap,
    Pause,
    Rules,
    ScheduleRecord,
    StoredCall,
    from_entry,
    invocation_of,
    to_entry,
)
from holdfast.schedules.rules import STALE_SECONDS, due, due_at, invocation_id, moved, tick_after
from holdfast.schedules.timing import Schedule as Timing
from holdfast.store.contract import EntryOrder, Store
from holdfast.telemetry.events import ChangedMeanwhile, PutOff, ScheduleFired, TicksMissed

_TRIES = 20
MAX_BACKFILLED = 10_000


async def set_aside(store: Store, app: str, name: str) -> Quarantined | None:
    """Return the last schedule of that name that could not be read."""
    found = [each for each in await store.quarantined(app, name) if each.kind == KIND]
    return max(found, key=lambda each: each.at, default=None)


class ScheduleRegistry:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app

    async def all(self) -> list[ScheduleRecord]:
        """Return all schedules, by name. Unreadable ones are left out; `get` says why."""
        found = []
        for entry in await self._store.entries(self._app, KIND):
            try:
                found.append(from_entry(entry))
            except errors.CorruptRecord:
                continue
        return found

    async def get(self, name: str) -> ScheduleRecord:
        return from_entry(await self._entry(name))

    async def _callable(self, name: str) -> ScheduleRecord:
        record = await self.get(name)
        if record.call.event:
            raise errors.UsageError(
                f"the schedule '{name}' calls nothing by itself: a trigger waits for its ticks and for more"
            )
        return record

    async def _entry(self, name: str) -> Entry:
        entries = await self._store.entries(self._app, KIND, [name])
        if not entries:
            known = [entry.name for entry in await self._store.entries(self._app, KIND)]
            near = [each for each in known if each.startswith(f"{name}#")]
            near = near or difflib.get_close_matches(name, known, n=1)
            hint = f". Did you mean '{near[0]}'?" if near else "; `holdfast schedules` lists them"
            if (aside := await set_aside(self._store, self._app, name)) is not None:
                hint = (
                    f" any more: it could not be read, and was set aside at {moment(aside.at)}. Why: {aside.why}. If "
                    "code declares it, it is stored again by a runner, when one starts or within minutes; else create "
                    "it again. It is kept whole in quarantine: see docs/operations/damaged-records.md"
                )
            raise errors.UnknownSchedule(f"there is no schedule '{name}'{hint}")
        return entries[0]

    def new(
        self,
        name: str,
        timing: Timing,
        call: StoredCall,
        rules: Rules,
        *,
        declared: bool = False,
        pause: Pause | None = None,
    ) -> ScheduleRecord:
        now = self._store.now()
        return ScheduleRecord(
            app=self._app,
            name=name,
            uid=self._engine.ids.new(),
            timing=timing,
            call=call,
            rules=rules,
            declared=declared,
            pause=pause,
            through=now,
            next_at=tick_after(timing, rules, now) if pause is None else None,
            created_at=now,
            changed_at=now,
        )

    async def keep(self, payloads: Sequence[Payload]) -> None:
        """Store the large arguments of a schedule, before the schedule."""
        if payloads:
            await self._engine.payloads.keep(payloads)
            crashpoint("schedule.kept")

    async def create(self, record: ScheduleRecord, payloads: Sequence[Payload] = ()) -> ScheduleRecord:
        """Store a schedule; return it, or an equal stored one. Raises `ScheduleExists` if another has the
        name, `InvalidSchedule` if it would never be due.
        """
        is_over = tick_after(record.timing, record.rules, record.created_at) is None
        await self.keep(payloads)
        for _ in range(_TRIES):
            if not is_over and await self._store.put_entry(to_entry(record)):
                self._send_hint(record.name)
                return record
            there = await self._store.entries(self._app, KIND, [record.name])
            if is_over and not there:
                raise errors.InvalidSchedule(
                    f"the schedule '{record.name}' ({record.timing.describe()}) would never be due: all of its time "
                    "is past. To call the task now, submit it."
                )
            if there:
                found = from_entry(there[0])
                if (found.timing, found.call, found.rules) == (record.timing, record.call, record.rules):
                    return found
                raise errors.ScheduleExists(
                    f"there is a schedule '{record.name}' already ({found.timing.describe()}, {found.call.task}), and "
                    f"it says something else: {_difference(found, record)}. Change it with update, or choose another "
                    "name."
                )
        raise _busy(record.name)

    async def ensure(self, record: ScheduleRecord) -> ScheduleRecord:
        """Store a schedule unless the name is taken. Return the stored one."""
        for _ in range(_TRIES):
            there = await self._store.entries(self._app, KIND, [record.name])
            if there:
                return from_entry(there[0])
            if await self._store.put_entry(to_entry(record)):
                self._send_hint(record.name)
                return record
        raise _busy(record.name)

    async def change(
        self,
        name: str,
        decide: Callable[[ScheduleRecord, float], dict[str, Any]],
        payloads: Sequence[Payload] = (),
    ) -> ScheduleRecord:
        """Write the fields that `decide` returns, if they differ. Return the schedule. `payloads` are the payloads of
        its new call.
        """
        await self.keep(payloads)
        for _ in range(_TRIES):
            entry = await self._entry(name)
            record, now = from_entry(entry), self._store.now()
            fields = decide(record, now)
            if all(getattr(record, field) == value for field, value in fields.items()):
                return record
            changed = moved(record, now, **fields)
            if await self._store.put_entry(to_entry(changed), entry):
                self._send_hint(name)
                return changed
        raise _busy(name)

    async def remove(self, name: str) -> None:
        """Forget it, even if it cannot be read. Its invocations stay. Raises `UnknownSchedule`."""
        for _ in range(_TRIES):
            if await self._store.remove_entry(await self._entry(name)):
                self._send_hint(name)
                return
        raise _busy(name)

    async def run_now(self, name: str, request: str | None = None) -> InvocationRecord:
        """Submit its call, beside its ticks. The same `request` does it once."""
        record, now = await self._callable(name), self._store.now()
        # With a request the time cannot be part of the id: that it is asked for again must not matter.
        id = derived_id("run now", record.uid, request, at=record.created_at) if request else self._engine.ids.new()
        why = f"the schedule '{name}' was asked to run now"
        fresh = replace(called(record, id, self._engine.ids.operation(), now, now, now, why, "run"), dedup_key=None)
        (before,) = await submitted(self._engine, [fresh])
        return before or fresh

    async def backfill(
        self, name: str, after: float, until: float, request: str | None = None
    ) -> list[InvocationRecord]:
        """Submit its call for each tick later than `after` and not later than `until`, in order."""
        record, now = await self._callable(name), self._store.now()
        ticks = ticks_within(record, after, until)
        fresh = [
            replace(
                called(
                    record,
                    derived_id("backfill", record.uid, request, repr(tick), at=tick)
                    if request
                    else self._engine.ids.new(),
                    self._engine.ids.operation(),
                    tick,
                    now,
                    now,
                    f"tick {moment(tick)} of the schedule '{name}', made up for",
                ),
                dedup_key=None,
            )
            for tick in ticks
        ]
        before = await submitted(self._engine, fresh)
        return [there or one for one, there in zip(fresh, before, strict=True)]

    def _send_hint(self, name: str) -> None:
        self._engine.hub.send(Hint(SCHEDULES, (name,)))


async def submitted(engine: Engine, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
    """Submit calls of schedules. Their large arguments are wanted from now on, whatever becomes of the schedule before
    they are stored. Return the holder of each id or dedup key that was taken.
    """
    if digests := sorted({digest for record in records for digest in record.payloads}):
        await engine.store.keep_payloads(engine.app, digests)
    return await engine.submitter.submit(records)


def ticks_within(record: ScheduleRecord, after: float, until: float) -> Sequence[float]:
    if not after < until:
        raise errors.UsageError("the range is empty: its end is not after its beginning")
    ticks = list(record.timing.ticks(after, until, MAX_BACKFILLED + 1))
    if len(ticks) > MAX_BACKFILLED:
        raise errors.UsageError(
            f"there are more than {MAX_BACKFILLED:,} ticks in that range; take a shorter one at a time"
        )
    return ticks


def _difference(there: ScheduleRecord, wanted: ScheduleRecord) -> str:
    """Describe how two schedules of one name differ, in the words of `create`."""
    if there.timing != wanted.timing:
        return f"it is not due {wanted.timing.describe()}"
    if there.call.task != wanted.call.task:
        return f"it does not call {wanted.call.task}"
    if there.call.arguments != wanted.call.arguments:
        return "it has other arguments"
    if there.call != wanted.call:
        return "its call has other options"
    names = {"jitter_seconds": "jitter", "starts_at": "start", "ends_at": "end"}
    fields = [each for each in Rules.__struct_fields__ if getattr(there.rules, each) != getattr(wanted.rules, each)]
    return f"it has another {', '.join(names.get(each, each) for each in fields)}"


def _busy(name: str) -> errors.StoreError:
    return errors.StoreError(f"the schedule '{name}' is changed by others again and again; try again")


# --- firing

LOOK_SECONDS = 1.0  # a schedule that was just made may be due before a hint of it arrives, if one does
_MAX_TRUST = 5  # times as long, where hints arrive
_AT_ONCE = 50
_PUT_OFF_SECONDS = 10.0  # others may be able to read it, and have to be in time for a tick that must not be late
MAX_QUEUED = 1000

Fired = tuple[float, InvocationId]  # a tick, and the invocation or the event that it became
EmitTick = Callable[[ScheduleRecord, float, float], Awaitable[object]]


class Scheduler:
    """`emit` makes an event of a tick that a trigger waits for beside others."""

    def __init__(
        self,
        engine: Engine,
        *,
        emit: EmitTick | None = None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._engine = engine
        self._report = engine.telemetry.emit
        self._store = engine.store
        self._app = engine.app
        self._emit = emit
        self._look_seconds = look_seconds
        self._monotonic = engine.clock.monotonic
        self._look_at = float("-inf")  # by the monotonic clock: that of the store may be set
        self._hinted = False

    def look_soon(self) -> None:
        """Look at once: a schedule has changed."""
        self._look_at, self._hinted = float("-inf"), True

    async def fire_due(self) -> bool:
        """Fire due ticks. Return True if more may be due."""
        if self._monotonic() < self._look_at:
            return False
        now = self._store.now()
        self._hinted = False
        entries = await self._store.entries(self._app, KIND, order=EntryOrder.DUE, limit=_AT_ONCE)
        ready = [entry for entry in entries if entry.due_at is not None and entry.due_at <= now]
        for entry in ready:
            await self._fire_entry(entry, now)
        waits = [entry.due_at - now for entry in entries[len(ready) :] if entry.due_at is not None]
        unasked = look_after(self._look_seconds * max(1, min(self._engine.hub.trust, _MAX_TRUST)))
        wait = 0.0 if ready else min([unasked, *waits])
        self._look_at = float("-inf") if self._hinted else self._monotonic() + wait
        return len(ready) == _AT_ONCE

    async def _fire_entry(self, entry: Entry, now: float) -> None:
        try:
            await self._fire(entry, from_entry(entry), now)
            return
        except errors.StoreUnavailable:
            raise
        except Exception as error:
            why = (
                f"{error}; its ticks wait for a runner that can"
                if isinstance(error, errors.CorruptRecord)
                else str(error)
            )
            self._report(PutOff("schedules", f"schedule '{entry.name}'", why, error))
        # Put off, so that it does not stand in front of the others at every look.
        await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=now + _PUT_OFF_SECONDS), entry)

    async def _fire(self, entry: Entry, record: ScheduleRecord, now: float) -> None:
        decision = due(record, now)
        ticks = (*record.progress.queued, *decision.ticks)
        fires, queued = await self._without_overlap(record, ticks)
        crashpoint("schedule.decided")
        if self._store.now() - now > STALE_SECONDS:
            return
        fired = await (self._submit if not record.call.event else self._emit_ticks)(record, fires, now)
        crashpoint("schedule.inserted")
        if fired:
            self._report(ScheduleFired(record.name, tuple(id for _, id in fired)))
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
            is_wanted = record.rules.catch_up is CatchUp.NONE
            self._report(TicksMissed(record.name, f"{more}{decision.missed}", is_wanted))
        if not await self._store.put_entry(to_entry(moved(record, now, through=now, progress=progress)), entry):
            self._report(ChangedMeanwhile("schedules", f"schedule '{record.name}'"))
        crashpoint("schedule.moved")

    async def _submit(self, record: ScheduleRecord, ticks: Sequence[float], now: float) -> list[Fired]:
        """Submit ticks; return the fired ones, each with its invocation: a dedup key may have been taken."""
        records = [self._invocation(record, tick, now) for tick in ticks]
        before = await submitted(self._engine, records)
        return [
            (tick, one.id)
            for tick, one, other in zip(ticks, records, before, strict=True)
            if other is None or other.id == one.id
        ]

    async def _emit_ticks(self, record: ScheduleRecord, ticks: Sequence[float], now: float) -> list[Fired]:
        """Emit ticks that a trigger waits for as events, whose ids follow from the ticks."""
        assert self._emit is not None
        for tick in ticks:
            await self._emit(record, tick, now)
        return [(tick, invocation_id(record, tick)) for tick in ticks]

    async def _without_overlap(
        self, record: ScheduleRecord, ticks: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return the ticks that fire now, and the ticks that wait for their turn."""
        overlap = record.rules.overlap
        if overlap is Overlap.ALLOW or not ticks:
            return ticks, ()
        if overlap is Overlap.QUEUE:
            fires = ticks[:1] if await self._unfinished(record, ()) is None else ()
            return fires, ticks[len(fires) :][-MAX_QUEUED:]
        before = await self._unfinished(record, ticks[-_AT_ONCE:])
        if before is None:
            return ticks[-1:], ()
        again = [tick for tick in ticks if invocation_id(record, tick) == before.id]
        if overlap is Overlap.SKIP:
            return again, ()
        if again != [ticks[-1]]:
            why = f"the next tick of the schedule '{record.name}' takes its place"
            await self._engine.canceller.cancel([before.id], by="its schedule", reason=why)
        return ticks[-1:], ()

    async def _unfinished(self, record: ScheduleRecord, ticks: Sequence[float]) -> InvocationRecord | None:
        """Return the invocation of the last tick that fired, unless it has ended or is gone. It may belong to one of
        `ticks`, if a crash came before the schedule was moved on.
        """
        last = record.progress.last_id
        ids = [*([] if last is None else [last]), *(invocation_id(record, tick) for tick in ticks)]
        found = await get_readable(self._store, self._app, ids) if ids else ()
        return next((each for each in reversed(found) if each is not None and each.status not in FINAL), None)

    def _invocation(self, record: ScheduleRecord, tick: float, now: float) -> InvocationRecord:
        why = f"tick {moment(tick)} of the schedule '{record.name}'"
        return called(
            record, invocation_id(record, tick), self._engine.ids.operation(), tick, now, due_at(record, tick), why
        )


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
    """Return a new invocation of a schedule's call."""
    return invocation_of(
        record.call,
        operation=operation,
        why=why,
        id=id,
        app=record.app,
        dedup_key=f"schedule:{record.uid}" if record.rules.unique else record.call.dedup_key,
        created_at=now,
        due_at=due_at,
        origin=Origin(trigger=record.name, sources=(Source(kind=kind, id=moment(tick), name=record.name),)),
    )
