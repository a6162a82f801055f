"""The store and the watcher of a test: a memory store that records what it saw, and waiting that runs what is due."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import Clock
from holdfast.ids import InvocationId
from holdfast.model.claims import Claim, Claimed
from holdfast.model.records import Entry, InvocationRecord
from holdfast.model.status import AVAILABLE
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import Watcher
from holdfast.schedules.records import KIND as SCHEDULE
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.transactions import StageTransaction, TransactionEnd, joined
from holdfast.triggers.events import KIND as EVENT
from holdfast.triggers.events import EventRecord
from holdfast.triggers.outbox import Events
from holdfast.triggers.rules import TriggerRecord


class StageStore(MemoryStore):
    """Extend the memory store: record submitted calls, and report claims that came back empty."""

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
            if known is session and transaction.ended() is TransactionEnd.NOT_YET:
                return transaction
        self._open.append((session, transaction := joined(session, self, f"transaction {next(self._numbers)}")))
        return transaction

    def take_in(self) -> None:
        """Store what was submitted and emitted in user transactions that have committed, on the user's thread."""
        for each in list(self._open):
            transaction = each[1]
            if (end := transaction.ended()) is not TransactionEnd.NOT_YET:
                self._open.remove(each)
            if end is TransactionEnd.COMMITTED:
                with self._lock:
                    self.submitted += [record for record in transaction.records if self._insert(record)]
                    for entry in transaction.entries.values():
                        self._entries[entry.app, entry.kind, entry.name] = entry
                self.committed_events += [entry for entry in transaction.entries.values() if entry.kind == EVENT]

    def holder_of(self, record: InvocationRecord) -> InvocationRecord | None:
        with self._lock:
            return self._find_conflict(record)

    def entry_like(self, entry: Entry) -> Entry | None:
        with self._lock:
            there = self._entries.get((entry.app, entry.kind, entry.name))
            return None if there is None or (there.keep_until or self.now() + 1) <= self.now() else there

    def next_due(self, app: str, *, ticks: bool = True) -> float | None:
        """Return when the next call falls due, or the next tick of a schedule."""
        with self._lock:
            times = [record.due_at for record in self._of(app) if record.status in AVAILABLE]
            entries = [entry for entry in self._entries.values() if (entry.app, entry.kind) == (app, SCHEDULE)]
            times += [entry.due_at for entry in entries if ticks and entry.due_at is not None]
            return min((time for time in times if time > self.now()), default=None)


Perform = Callable[[Sequence[InvocationId], float | None], Awaitable[None]]


class EagerWatcher(Watcher):
    """Run the calls that a caller waits for: a test has no runner that would."""

    def __init__(self, engine: Engine, perform: Perform) -> None:
        super().__init__(engine)
        self._perform = perform

    async def ends(
        self, ids: Sequence[InvocationId], timeout: float | None, *, fresh: bool = False
    ) -> dict[str, InvocationRecord]:
        await super().ends(ids, 0.0)  # whether they are there at all
        await self._perform(ids, timeout)
        return await super().ends(ids, 0.0)


class EagerEvents(Events):
    """Store what the code declares before an event is emitted: a test has no runner that did."""

    def __init__(self, engine: Engine, declare: Callable[[Engine], Awaitable[None]]) -> None:
        super().__init__(engine)
        self._engine = engine
        self._declare = declare

    async def emit(self, event: EventRecord, own: Sequence[TriggerRecord] = ()) -> EventRecord:
        await self._declare(self._engine)
        return await super().emit(event, own)
