"""Limits: a freed slot of a limit releases the invocation that has waited for it longest.

The write that ends an invocation frees its slot. Only after it, the first waiter of that key goes back to the queue,
and a hint goes to the workers of its lane. One waiter for each slot: the others stay where they are, so ten thousand
waiters cost no more than one. A waiter that comes back and finds the slot taken waits again, at its old place.

A crash between the two writes leaves a free slot and a waiter. `sweep` finds them: it is the rescuer of every
invocation that waits for a slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, StoreError
from holdfast.ids import InvocationId
from holdfast.model.decoding import RATE
from holdfast.model.eligibility import lane_obstacle, offer_of
from holdfast.model.limits import Limit, Release, task_of
from holdfast.model.rates import CHANGE, Bucket, LimitChange, Rate, bucket_of, change_in, is_rate_key, name_of_rate
from holdfast.model.records import Entry, InvocationRecord, work_hint
from holdfast.model.status import AVAILABLE
from holdfast.runtime.engine import Engine
from holdfast.runtime.pauses import pauses_of
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import Store
from holdfast.telemetry.events import DutyFailed, WaitersNotReleased, WaitersReleased

FOREIGN_SECONDS = 30.0  # how often a process that knows no limits sweeps the keys of others
_AT_ONCE = 100
FRESH_SECONDS = 2.0  # for which changes that were read are taken to be in force


class Limits:
    """Release waiters of the limits. `limits` are those of the tasks that are known here; None for a task that has
    none. So are `rates`, each with the name under which it is changed.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Mapping[str, Limit | None] | None = None,
        rates: Mapping[str, tuple[str, Rate] | None] | None = None,
    ) -> None:
        self._store = engine.store
        self._hub = engine.hub
        self._ids = engine.ids
        self._app = engine.app
        self._limits = limits or {}
        self._rates = rates or {}
        self.is_bounded = any(self._limits.values()) or any(self._rates.values())
        self._changed = engine.part(ChangedLimits)
        self._seen: Mapping[str, LimitChange] = {}  # the changes that the last sweep went by
        self._next_looks: dict[str, float] = {}  # by the key of a rate: when its waiters may have been forgotten
        self._freed: Counter[str] = Counter()
        self._pump: asyncio.Task[None] | None = None
        self._gone = 0
        self._sent: dict[str, dict[InvocationId, str]] = {}  # what a sweep let go on, by key: the lanes by id
        self._next_sweep = 0.0

    @property
    def known(self) -> dict[str, Limit]:
        """Return the limits in force of the tasks that have one."""
        return {name: self._changed.limit(name, limit) for name, limit in self._limits.items() if limit is not None}

    @property
    def rates(self) -> dict[str, Rate]:
        """Return the rates in force of the tasks that have one."""
        return {task: self._changed.rate(*named) for task, named in self._rates.items() if named is not None}

    async def refresh(self) -> None:
        """Read the changes that were made at run time. A process without limits and rates needs none."""
        if self.is_bounded:
            await self._changed.refresh()

    # --- slots that were given back

    def freed(self, records: Iterable[InvocationRecord]) -> None:
        """Release waiters for the slots that these records, as they were before, have freed. Returns at once."""
        self._freed.update(record.limit_key for record in records if record.slot and record.limit_key)
        if self._freed and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._release_freed())

    async def released(self, records: Iterable[InvocationRecord]) -> int:
        """Do as `freed`, and wait for it. Return how many waiters were released."""
        before = self._gone
        self.freed(records)
        await self.finish()
        return self._gone - before

    async def finish(self) -> None:
        """Wait until all waiters are released."""
        if self._pump is not None and not self._pump.done():
            await asyncio.wait({self._pump})

    async def _release_freed(self) -> None:
        while self._freed:
            freed, self._freed = self._freed, Counter()
            wishes = [
                Release(limit_key=key, count=count, max_running=self._max_running(key)) for key, count in freed.items()
            ]
            try:
                crashpoint("slot.freed")
                await self._release(wishes)
            except StoreError as error:
                self._hub.telemetry.emit(WaitersNotReleased(", ".join(freed), str(error)))
            except Exception as error:  # a defect of ours; the slots that are given back later must not pay for it
                self._hub.telemetry.emit(DutyFailed("engine", f"release waiters of {', '.join(freed)}", error))

    def _max_running(self, key: str) -> int | None:
        limit = self._limits.get(task_of(key))
        return None if limit is None else self._changed.limit(task_of(key), limit).max_running

    async def _release(self, wishes: Sequence[Release]) -> Sequence[InvocationRecord]:
        operation, at = self._ids.operation(), self._store.now()
        gone = await self._store.release_waiters(self._app, wishes, operation=operation, at=at)
        if gone:
            self._gone += len(gone)
            self._hub.send(work_hint([(record.lane, record.due_at, record.priority) for record in gone]))
        return gone

    # --- the sweep

    async def sweep(self) -> int:
        """Release waiters of free slots: the process that freed a slot may have died before it released one. Return how
        many.
        """
        now = self._store.now()
        if now < self._next_sweep:
            return 0
        if not self.is_bounded:
            self._next_sweep = now + FOREIGN_SECONDS
        held = dict(await self._store.waiting_keys(self._app))
        if not held:
            self._sent = {}
            return 0
        await self.refresh()
        if self._seen != self._changed.changes:  # under another rate a waiter may be late by now
            self._seen, self._next_looks = self._changed.changes, {}
        rated = {key: held.pop(key) for key in list(held) if is_rate_key(key)}
        self._sent = {key: sent for key, sent in self._sent.items() if key in held or key in rated}
        free = {
            key: max_running for key, slots in held.items() if slots < (max_running := self._max_of_all(key, slots))
        }
        wishes = [
            Release(limit_key=key, count=max_running - held[key] - waiting, max_running=max_running, without=unserved)
            for key, max_running in free.items()
            for waiting, unserved in [await self._on_their_way(key)]
        ]
        wishes = [wish for wish in wishes if wish.count > 0] + await self._forgotten(rated, now)
        if wishes:
            crashpoint("sweep.found")
        gone = await self._release(wishes) if wishes else []
        for record in gone:
            self._sent.setdefault(record.limit_key or "", {})[record.id] = record.lane
        if gone:
            self._hub.telemetry.emit(WaitersReleased(len(gone)))
        return len(gone)

    async def _forgotten(self, keys: Collection[str], now: float) -> list[Release]:
        """Return the releases of waiters of rates: of buckets whose next waiter is overdue, and of waiters that their
        bucket does not know. The latter come from two claims at once, and no other claim releases them.
        """
        self._next_looks = {key: at for key, at in self._next_looks.items() if key in keys}
        looks = sorted(key for key in keys if self._next_looks.get(key, now) <= now)[:_AT_ONCE]
        found = {each.name: each for each in await self._store.entries(self._app, RATE, looks)} if looks else {}
        rates = dict(filter(None, self._rates.values()))
        wishes = []
        for key in looks:
            bucket = _readable_bucket(found.get(key))
            name = name_of_rate(key)
            if bucket is not None and name in rates:
                bucket = bucket.under(self._changed.rate(name, rates[name]))
            count = 1 if bucket is None else min(_AT_ONCE, max(1, bucket.left(now)))
            if name in self._rates and name not in rates:
                count = _AT_ONCE  # the task has no rate any more
            elif bucket is not None and bucket.waiting and now < bucket.stalled_at():
                self._next_looks[key] = bucket.stalled_at()
                continue
            waiting, unserved = await self._on_their_way(key)
            if (count := count - waiting) > 0:
                wishes.append(Release(limit_key=key, count=count, without=unserved, dues=(now,) * count))
        return wishes

    def _max_of_all(self, key: str, held: int) -> int:
        """Return how many may hold a slot of this key: at least one for a task that is not known here; all for a task
        that has no limit any more.
        """
        if task_of(key) not in self._limits:
            return 1
        return held + _AT_ONCE if (max_running := self._max_running(key)) is None else max_running

    async def _on_their_way(self, key: str) -> tuple[int, frozenset[str]]:
        """Return how many of the released waiters are still to be claimed, and the lanes that no runner serves."""
        sent = self._sent.get(key)
        if not sent:
            return 0, frozenset()
        records = await get_readable(self._store, self._app, list(sent))
        ready = [record for record in records if record is not None and record.status in AVAILABLE]
        self._sent[key] = {record.id: record.lane for record in ready}
        if not ready:
            return 0, frozenset()
        paused = frozenset(pause.name for pause in await pauses_of(self._store, self._app))
        offers = [offer_of(runner, paused) for runner in await self._store.roster(self._app)]
        lanes = {record.lane for record in ready}
        unserved = frozenset(lane for lane in lanes if all(lane_obstacle(lane, offer) for offer in offers))
        return sum(record.lane not in unserved for record in ready), unserved


def _readable_bucket(entry: Entry | None) -> Bucket | None:
    try:
        return None if entry is None else bucket_of(entry)
    except CorruptRecord:  # the next claim writes it again
        return None


# --- changes at run time: entries of the store, which outlive deploys. A process that claims calls under limits or
# rates reads them every 2 s, before a claim. While the store is away, what was known last holds.


class ChangedLimits:
    """The changes of one app; a part of its engine."""

    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self._app = engine.app
        self._clock = engine.clock
        self._stale_at = float("-inf")
        self.changes: Mapping[str, LimitChange] = {}

    async def refresh(self) -> None:
        """Read the changes, unless they were read lately."""
        if self._clock.monotonic() >= self._stale_at:
            self.changes = await changes_of(self._store, self._app)
            self._stale_at = self._clock.monotonic() + FRESH_SECONDS

    def limit(self, task: str, declared: Limit) -> Limit:
        """Return the limit of a task that is in force."""
        change = self.changes.get(task)
        return declared if change is None or change.limit is None else replace(declared, max_running=change.limit)

    def rate(self, name: str, declared: Rate) -> Rate:
        """Return the rate of a task, or of a name that tasks share, that is in force."""
        change = self.changes.get(name)
        return declared if change is None else change.rate_after(declared)


async def changes_of(store: Store, app: str) -> dict[str, LimitChange]:
    """Return the changes in force, by task or shared name. Entries that cannot be read are quarantined."""
    found: dict[str, LimitChange] = {}
    for entry in await store.entries(app, CHANGE):
        try:
            found[entry.name] = change_in(entry)
        except CorruptRecord as error:
            await store.quarantine_entry(entry, error)
    return found
