"""A store and a watcher for tests: the memory store, which tells what it saw, and waiting that runs what is due."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import Clock
from holdfast.engine.core import Engine
from holdfast.engine.events import Events
from holdfast.engine.watch import Watcher
from holdfast.ids import InvocationId
from holdfast.lifecycle.claims import Claim, Claimed
from holdfast.lifecycle.events import KIND as EVENT
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.records import Entry, InvocationRecord
from holdfast.lifecycle.schedules import KIND as SCHEDULE
from holdfast.lifecycle.status import AVAILABLE
from holdfast.lifecycle.triggers import TriggerRecord
from holdfast.store.contract import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.transactions import Ended, StageTransaction, joined
from holdfast.wakeup.hub import Hub


class StageStore(MemoryStore):
    """The memory store, which remembers what was submitted and says when a claim came back empty."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.submitted: list[InvocationRecord] = []
        self.nothing: dict[str, asyncio.Event] = {}  # by owner: a claim of it came back empty
        self.committed_events: list[Entry] = []  # whose triggers are yet to be told
        self._open: list[tuple[object, StageTransaction]] = []  # and the sessions that they are of
        self._numbers = itertools.count(1)

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        stored = await super().insert(records)
        self.submitted += [record for record, ours in zip(records, stored, strict=True) if ours]
        return stored

    async def claim(self, claim: Claim) -> Claimed:
        claimed = await super().claim(claim)
        if not claimed.records and not claimed.cut and claim.owner in self.nothing:
            self.nothing[claim.owner].set()
        return claimed

    # --- the user's own transactions

    def joined(self, session: object) -> StageTransaction:
        for known, transaction in self._open:
            if known is session and transaction.ended() is Ended.NOT_YET:
                return transaction
        self._open.append((session, transaction := joined(session, self, f"transaction {next(self._numbers)}")))
        return transaction

    def take_in(self) -> None:
        """Store what was submitted and emitted in transactions that have committed. On the thread of their user."""
        for each in list(self._open):
            transaction = each[1]
            if (end := transaction.ended()) is not Ended.NOT_YET:
                self._open.remove(each)
            if end is Ended.COMMITTED:
                with self._lock:
                    self.submitted += [record for record in transaction.records if self._insert(record)]
                    for entry in transaction.entries.values():
                        self._entries[entry.app, entry.kind, entry.name] = entry
                self.committed_events += [entry for entry in transaction.entries.values() if entry.kind == EVENT]

    def holder_of(self, record: InvocationRecord) -> InvocationRecord | None:
        with self._lock:
            return self._in_the_way(record)

    def entry_like(self, entry: Entry) -> Entry | None:
        with self._lock:
            there = self._entries.get((entry.app, entry.kind, entry.name))
            return None if there is None or (there.keep_until or self.now() + 1) <= self.now() else there

    def next_due(self, app: str, *, ticks: bool = True) -> float | None:
        """When the next one falls due that does not yet, or the next tick of a schedule."""
        with self._lock:
            times = [record.due_at for record in self._of(app) if record.status in AVAILABLE]
            entries = [entry for entry in self._entries.values() if (entry.app, entry.kind) == (app, SCHEDULE)]
            times += [entry.due_at for entry in entries if ticks and entry.due_at is not None]
            return min((time for time in times if time > self.now()), default=None)


Perform = Callable[[Sequence[InvocationId], float | None], Awaitable[None]]


class EagerWatcher(Watcher):
    """Nobody else would do the work that somebody waits for: who waits has it done."""

    def __init__(self, store: Store, hub: Hub, app: str, perform: Perform) -> None:
        super().__init__(store, hub, app, poll_interval_seconds=1.0)
        self._perform = perform

    async def ends(
        self, ids: Sequence[InvocationId], timeout: float | None, *, fresh: bool = False
    ) -> dict[str, InvocationRecord]:
        await super().ends(ids, 0.0)  # whether they are there at all
        await self._perform(ids, timeout)
        return await super().ends(ids, 0.0)


class EagerEvents(Events):
    """Nobody has started, and stored what code declares: who emits does so first."""

    def __init__(self, engine: Engine, declare: Callable[[Engine], Awaitable[None]]) -> None:
        super().__init__(engine.store, engine.subscriptions, engine.teller, app=engine.app)
        self._engine = engine
        self._declare = declare

    async def emit(self, event: EventRecord, own: Sequence[TriggerRecord] = ()) -> EventRecord:
        await self._declare(self._engine)
        return await super().emit(event, own)
