"""The store and the watcher of a test: a memory store that records what it saw, and waiting that runs what is due."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import Clock
from holdfast.codec import Payload
from holdfast.ids import InvocationId
from holdfast.model.claims import Claim, Claimed
from holdfast.model.log import Page, stream_log
from holdfast.model.records import Entry, InvocationRecord
from holdfast.model.status import AVAILABLE, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import Watcher
from holdfast.schedules.records import KIND as SCHEDULE
from holdfast.store.memory.store import MemoryStore
from holdfast.streams.following import LiveTail, LiveTails
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
        self.committed_events: list[Entry] = []  # its triggers are yet to be called
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
                    for page in transaction.pages:
                        self._append(page)
                self.committed_events += [entry for entry in transaction.entries.values() if entry.kind == EVENT]

    def holder_of(self, record: InvocationRecord) -> InvocationRecord | None:
        with self._lock:
            return self._find_conflict(record)

    def entry_like(self, entry: Entry) -> Entry | None:
        with self._lock:
            there = self._entries.get((entry.app, entry.kind, entry.name))
            return None if there is None or (there.keep_until or self.now() + 1) <= self.now() else there

    def pages_from(self, page: Page) -> Sequence[Page]:
        """Return the pages of its log from its first position on, if that is taken."""
        with self._lock:
            log = self._logs.get((page.app, page.run, page.generation), [])
            there = [each for each in log if each.first >= page.first]
            return there if there and there[0].first == page.first else []

    def next_due(self, app: str, *, ticks: bool = True) -> float | None:
        """Return when the next call falls due, a sleeping run is to be woken, or a schedule has its next tick."""
        with self._lock:
            records = self._of(app)
            times = [record.due_at for record in records if record.status in AVAILABLE]
            asleep = [record.wake_at for record in records if record.status is Status.SUSPENDED]
            times += [time for time in asleep if time is not None]
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
        self, ids: Sequence[InvocationId], timeout: float | None, *, fresh: bool = False, expected: bool = False
    ) -> dict[str, InvocationRecord]:
        await super().ends(ids, 0.0, expected=expected)  # whether they are there at all
        await self._perform(ids, timeout)
        return await super().ends(ids, 0.0, expected=expected)


class EagerTails(LiveTails):
    """Run the calls whose streams a caller reads: a test has no runner that would."""

    def __init__(self, engine: Engine, perform: Perform) -> None:
        super().__init__(engine)
        self._perform = perform

    def of(self, id: InvocationId, name: str) -> LiveTail:
        return EagerTail(self._engine, id, stream_log(id, name), self._perform)


class EagerTail(LiveTail):
    def __init__(self, engine: Engine, id: InvocationId, log: InvocationId, perform: Perform) -> None:
        super().__init__(engine, id, log, lambda: None)
        self._perform = perform

    async def after(self, position: int, limit: int) -> Sequence[Page] | None:
        if not await self._has_ended():
            await self._perform([self._id], None)
        return await self._engine.store.read_log(self._engine.app, self._log, after=position, limit=limit) or None


class EagerEvents(Events):
    """Store what the code declares before an event is emitted: a test has no runner that did."""

    def __init__(self, engine: Engine, declare: Callable[[Engine], Awaitable[None]]) -> None:
        super().__init__(engine)
        self._engine = engine
        self._declare = declare

    async def emit(
        self, event: EventRecord, own: Sequence[TriggerRecord] = (), large: Sequence[Payload] = ()
    ) -> EventRecord:
        await self._declare(self._engine)
        return await super().emit(event, own, large)
