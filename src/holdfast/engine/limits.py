"""Limits: whoever gives back a slot lets the one go on who has waited for it longest.

The write that ends an invocation gives back its slot; after it, and only after it, the first waiter of that key goes
back to the queue, and a hint tells those who serve its lane. One for each slot: the others stay where they are, so ten
thousand who wait cost no more than one. Who comes back and finds the slot taken waits again, at its old place.

A crash between the two writes leaves a free slot and somebody who waits for it. `sweep` finds them: it is the rescuer
of everything that waits for a slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from holdfast.crashpoints import crashpoint
from holdfast.engine.reading import get_readable
from holdfast.errors import StoreError
from holdfast.ids import Ids, InvocationId
from holdfast.lifecycle.eligibility import lane_obstacle, offer_of
from holdfast.lifecycle.limits import Limit, Release, task_of
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import InvocationRecord, work_hint
from holdfast.lifecycle.status import AVAILABLE
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.engine")

FOREIGN_SECONDS = 30.0  # how often those who know no limits look after the keys of others
_AT_ONCE = 100


class Limits:
    """`limits` are those of the tasks that are known here; None for a task that has none."""

    def __init__(
        self, store: Store, hub: Hub, ids: Ids, *, app: str, limits: Mapping[str, Limit | None] | None = None
    ) -> None:
        self._store = store
        self._hub = hub
        self._ids = ids
        self._app = app
        self._limits = limits or {}
        self._freed: Counter[str] = Counter()
        self._pump: asyncio.Task[None] | None = None
        self._gone = 0
        self._sent: dict[str, dict[InvocationId, str]] = {}  # what a sweep let go on, by key: the lanes by id
        self._next_sweep = 0.0

    @property
    def known(self) -> dict[str, Limit]:
        """The tasks that have a limit."""
        return {name: limit for name, limit in self._limits.items() if limit is not None}

    # --- slots that were given back

    def freed(self, records: Iterable[InvocationRecord]) -> None:
        """These, as they were before, have given back their slots. Returns at once."""
        self._freed.update(record.limit_key for record in records if record.slot and record.limit_key)
        if self._freed and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._release_freed())

    async def released(self, records: Iterable[InvocationRecord]) -> int:
        """As `freed`, but waits until others go on; how many did."""
        before = self._gone
        self.freed(records)
        await self.finish()
        return self._gone - before

    async def finish(self) -> None:
        """Wait until everybody has been told."""
        if self._pump is not None and not self._pump.done():
            await asyncio.wait({self._pump})

    async def _release_freed(self) -> None:
        while self._freed:
            freed, self._freed = self._freed, Counter()
            wishes = [Release(limit_key=key, count=count, most=self._most(key)) for key, count in freed.items()]
            try:
                crashpoint("slot.freed")
                await self._release(wishes)
            except StoreError as error:
                log.info("who waits for a slot of %s has to wait for the sweep: %s", ", ".join(freed), error)
            except Exception:  # a defect of ours; the slots that are given back later must not pay for it
                log.exception("after slots of %s were given back", ", ".join(freed))

    def _most(self, key: str) -> int | None:
        limit = self._limits.get(task_of(key))
        return None if limit is None else limit.most

    async def _release(self, wishes: Sequence[Release]) -> Sequence[InvocationRecord]:
        operation, at = self._ids.operation(), self._store.now()
        gone = await self._store.release_waiters(self._app, wishes, operation=operation, at=at)
        if gone:
            self._gone += len(gone)
            self._hub.send(work_hint([(record.lane, record.due_at, record.priority) for record in gone]))
        return gone

    # --- the sweep

    async def sweep(self) -> int:
        """Let go on who waits for a slot that is free: whoever gave it back may have died before it told. Returns how
        many go on.
        """
        now = self._store.now()
        if now < self._next_sweep:
            return 0
        if not self.known:
            self._next_sweep = now + FOREIGN_SECONDS
        held = await self._store.waiting_keys(self._app)
        self._sent = {key: sent for key, sent in self._sent.items() if key in held}
        free = {key: most for key, slots in held.items() if slots < (most := self._most_of_all(key, slots))}
        wishes = [
            Release(limit_key=key, count=most - held[key] - waiting, most=most, without=unserved)
            for key, most in free.items()
            for waiting, unserved in [await self._on_their_way(key)]
        ]
        wishes = [wish for wish in wishes if wish.count > 0]
        if wishes:
            crashpoint("sweep.found")
        gone = await self._release(wishes) if wishes else []
        for record in gone:
            self._sent.setdefault(record.limit_key or "", {})[record.id] = record.lane
        if gone:
            log.info("%s waited for slots that were free: back to the queue", counted(len(gone), "invocation"))
        return len(gone)

    def _most_of_all(self, key: str, held: int) -> int:
        """How many may hold a slot of this key. Of a task that is not known here, one at least; of one that has no
        limit any more, all.
        """
        if task_of(key) not in self._limits:
            return 1
        return held + _AT_ONCE if (most := self._most(key)) is None else most

    async def _on_their_way(self, key: str) -> tuple[int, frozenset[str]]:
        """How many of those that were let go on are still to be taken, and the lanes from which nobody takes them."""
        sent = self._sent.get(key)
        if not sent:
            return 0, frozenset()
        records = await get_readable(self._store, self._app, list(sent))
        ready = [record for record in records if record is not None and record.status in AVAILABLE]
        self._sent[key] = {record.id: record.lane for record in ready}
        if not ready:
            return 0, frozenset()
        paused = frozenset(pause.name for pause in await self._store.pauses(self._app))
        offers = [offer_of(runner, paused) for runner in await self._store.roster(self._app)]
        lanes = {record.lane for record in ready}
        unserved = frozenset(lane for lane in lanes if all(lane_obstacle(lane, offer) for offer in offers))
        return sum(record.lane not in unserved for record in ready), unserved
