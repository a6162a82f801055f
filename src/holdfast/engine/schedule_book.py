"""The schedules of an app, as people handle them: each change reads, decides, and writes to the version that it read.

Nothing here fires a tick; `Scheduler` does. Running a schedule now, and making up for a range of its ticks, are calls
of their own: their ids contain the request, so a request that is repeated does nothing, and a new one does it again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.engine.schedules import called, moment
from holdfast.engine.submit import Submitter
from holdfast.errors import CorruptRecord, InvalidSchedule, ScheduleExists, StoreError, UnknownSchedule, UsageError
from holdfast.ids import Ids, derived_id
from holdfast.lifecycle.records import SCHEDULES, Entry, Hint, InvocationRecord
from holdfast.lifecycle.schedules import (
    KIND,
    Call,
    Pause,
    Rules,
    ScheduleRecord,
    from_entry,
    moved,
    tick_after,
    to_entry,
)
from holdfast.schedules import Schedule as Timing
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

_TRIES = 20
MOST_BACKFILLED = 10_000


class ScheduleBook:
    def __init__(self, store: Store, submitter: Submitter, hub: Hub, ids: Ids, *, app: str) -> None:
        self._store = store
        self._submitter = submitter
        self._hub = hub
        self._ids = ids
        self._app = app

    async def all(self) -> list[ScheduleRecord]:
        """By name. What cannot be read is left out; `get` says why."""
        found = []
        for entry in await self._store.entries(self._app, KIND):
            try:
                found.append(from_entry(entry))
            except CorruptRecord:
                continue
        return found

    async def get(self, name: str) -> ScheduleRecord:
        return from_entry(await self._entry(name))

    async def _callable(self, name: str) -> ScheduleRecord:
        record = await self.get(name)
        if record.call.event:
            raise UsageError(
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
            raise UnknownSchedule(f"there is no schedule '{name}'{hint}")
        return entries[0]

    def new(
        self, name: str, timing: Timing, call: Call, rules: Rules, *, declared: bool = False, pause: Pause | None = None
    ) -> ScheduleRecord:
        now = self._store.now()
        return ScheduleRecord(
            app=self._app,
            name=name,
            uid=self._ids.new(),
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

    async def create(self, record: ScheduleRecord) -> ScheduleRecord:
        """Store it; if one of that name is there and says the same, that is the answer. Raises `ScheduleExists`, and
        `InvalidSchedule` if it would never be due.
        """
        is_over = tick_after(record.timing, record.rules, record.created_at) is None
        for _ in range(_TRIES):
            if not is_over and await self._store.put_entry(to_entry(record)):
                self._tell(record.name)
                return record
            there = await self._store.entries(self._app, KIND, [record.name])
            if is_over and not there:
                raise InvalidSchedule(
                    f"the schedule '{record.name}' ({record.timing.describe()}) would never be due: all of its time "
                    "is past. To call the task now, submit it."
                )
            if there:
                found = from_entry(there[0])
                if (found.timing, found.call, found.rules) == (record.timing, record.call, record.rules):
                    return found
                raise ScheduleExists(
                    f"there is a schedule '{record.name}' already ({found.timing.describe()}, {found.call.task}), and "
                    f"it says something else: {_difference(found, record)}. Change it with update, or choose another "
                    "name."
                )
        raise _busy(record.name)

    async def ensure(self, record: ScheduleRecord) -> ScheduleRecord:
        """Store it unless one of that name is there, whatever it says; what is there then."""
        for _ in range(_TRIES):
            there = await self._store.entries(self._app, KIND, [record.name])
            if there:
                return from_entry(there[0])
            if await self._store.put_entry(to_entry(record)):
                self._tell(record.name)
                return record
        raise _busy(record.name)

    async def change(self, name: str, decide: Callable[[ScheduleRecord, float], dict[str, Any]]) -> ScheduleRecord:
        """Write what `decide` makes of it, by field. If that is nothing, nothing is written."""
        for _ in range(_TRIES):
            entry = await self._entry(name)
            record, now = from_entry(entry), self._store.now()
            fields = decide(record, now)
            if all(getattr(record, field) == value for field, value in fields.items()):
                return record
            changed = moved(record, now, **fields)
            if await self._store.put_entry(to_entry(changed), entry):
                self._tell(name)
                return changed
        raise _busy(name)

    async def pause(self, name: str, by: str, why: str) -> ScheduleRecord:
        """Let it rest. Pausing what is paused keeps the first pause."""
        return await self.change(name, lambda record, now: {"pause": record.pause or Pause(at=now, by=by, why=why)})

    async def resume(self, name: str) -> ScheduleRecord:
        """Go on from now; the ticks of the pause do not fire."""
        return await self.change(
            name, lambda record, now: {"pause": None, "through": now} if record.pause is not None else {}
        )

    async def remove(self, name: str) -> None:
        """Forget it, even if it cannot be read. Its invocations stay. Raises `UnknownSchedule`."""
        for _ in range(_TRIES):
            if await self._store.remove_entry(await self._entry(name)):
                self._tell(name)
                return
        raise _busy(name)

    async def run_now(self, name: str, request: str | None = None) -> InvocationRecord:
        """Submit its call, beside its ticks. The same `request` does it once."""
        record, now = await self._callable(name), self._store.now()
        # With a request the time cannot be part of the id: that it is asked for again must not matter.
        id = derived_id("run now", record.uid, request, at=record.created_at) if request else self._ids.new()
        why = f"the schedule '{name}' was told to run now"
        fresh = replace(called(record, id, self._ids.operation(), now, now, now, why, "run"), twin=None)
        (before,) = await self._submitter.submit([fresh])
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
                    derived_id("backfill", record.uid, request, repr(tick), at=tick) if request else self._ids.new(),
                    self._ids.operation(),
                    tick,
                    now,
                    now,
                    f"tick {moment(tick)} of the schedule '{name}', made up for",
                ),
                twin=None,
            )
            for tick in ticks
        ]
        before = await self._submitter.submit(fresh)
        return [there or one for one, there in zip(fresh, before, strict=True)]

    def _tell(self, name: str) -> None:
        self._hub.send(Hint(SCHEDULES, (name,)))


def ticks_within(record: ScheduleRecord, after: float, until: float) -> Sequence[float]:
    if not after < until:
        raise UsageError("the range is empty: its end is not after its beginning")
    ticks = list(record.timing.ticks(after, until, MOST_BACKFILLED + 1))
    if len(ticks) > MOST_BACKFILLED:
        raise UsageError(f"there are more than {MOST_BACKFILLED:,} ticks in that range; take a shorter one at a time")
    return ticks


def _difference(there: ScheduleRecord, wanted: ScheduleRecord) -> str:
    """What two of one name do not agree on, in the words of `create`."""
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


def _busy(name: str) -> StoreError:
    return StoreError(f"the schedule '{name}' is changed by others again and again; try again")
