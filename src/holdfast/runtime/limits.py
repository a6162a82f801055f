"""Limits: a freed slot of a limit releases the invocation that has waited for it longest.

The write that ends an invocation frees its slot; after it, and only after it, the first waiter of that key goes back to
the queue, and a hint wakes the workers of its lane. One waiter for each slot: the others stay where they are, so ten
thousand waiters cost no more than one. A waiter that comes back and finds the slot taken waits again, at its old place.

A crash between the two writes leaves a free slot and a waiter. `sweep` finds them: it is the rescuer of every
invocation that waits for a slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError
from holdfast.ids import InvocationId
from holdfast.model.eligibility import lane_obstacle, offer_of
from holdfast.model.limits import Limit, Release, task_of
from holdfast.model.records import InvocationRecord, work_hint
from holdfast.model.status import AVAILABLE
from holdfast.runtime.engine import Engine
from holdfast.runtime.pauses import pauses_of
from holdfast.runtime.wait import get_readable
from holdfast.telemetry.events import DutyFailed, WaitersNotReleased, WaitersReleased

FOREIGN_SECONDS = 30.0  # how often a process that knows no limits sweeps the keys of others
_AT_ONCE = 100


class Limits:
    """Release waiters of the limits. `limits` are those of the tasks that are known here; None for a task that has
    none.
    """

    def __init__(self, engine: Engine, limits: Mapping[str, Limit | None] | None = None) -> None:
        self._store = engine.store
        self._hub = engine.hub
        self._ids = engine.ids
        self._app = engine.app
        self._limits = limits or {}
        self._freed: Counter[str] = Counter()
        self._pump: asyncio.Task[None] | None = None
        self._gone = 0
        self._sent: dict[str, dict[InvocationId, str]] = {}  # what a sweep let go on, by key: the lanes by id
        self._next_sweep = 0.0

    @property
    def known(self) -> dict[str, Limit]:
        """Return the tasks that have a limit."""
        return {name: limit for name, limit in self._limits.items() if limit is not None}

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
        return None if limit is None else limit.max_running

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
        if not self.known:
            self._next_sweep = now + FOREIGN_SECONDS
        held = await self._store.waiting_keys(self._app)
        self._sent = {key: sent for key, sent in self._sent.items() if key in held}
        free = {
            key: max_running for key, slots in held.items() if slots < (max_running := self._max_of_all(key, slots))
        }
        wishes = [
            Release(limit_key=key, count=max_running - held[key] - waiting, max_running=max_running, without=unserved)
            for key, max_running in free.items()
            for waiting, unserved in [await self._on_their_way(key)]
        ]
        wishes = [wish for wish in wishes if wish.count > 0]
        if wishes:
            crashpoint("sweep.found")
        gone = await self._release(wishes) if wishes else []
        for record in gone:
            self._sent.setdefault(record.limit_key or "", {})[record.id] = record.lane
        if gone:
            self._hub.telemetry.emit(WaitersReleased(len(gone)))
        return len(gone)

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
