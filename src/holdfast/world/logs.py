"""The logs of runs, folded and kept warm in memory, and how events are appended to them.

A `RunLog` is a prefix of the log in the store, so what it says was true once. An event that may follow it is appended
behind it: if another writer was faster, the place is taken, and the log is read on. A refusal may be out of date, so it
is judged again on what was read since.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.log import Appended, Page
from holdfast.model.records import InvocationRecord
from holdfast.runtime.engine import Engine
from holdfast.streams.rules import FEWEST_PAGES, pages_at_once
from holdfast.world.records import decode, encode, payloads_of, run_name, size_of
from holdfast.world.rules import OF_RUNS, PlacedEvent, WorldEvent, WorldRun, fold, new_run

MAX_RUNS = 2000
MAX_BYTES = 64 * 2**20
_TRUSTED_SECONDS = 60.0  # far less than a run is kept after its end
_TRY = "~"  # an operation that a client repeats is another try, whose events have other times


class RunLog:
    """A run as this process knows it: its events, their fold, and which operations wrote them."""

    def __init__(self, id: InvocationId) -> None:
        self.id = id
        self.run: WorldRun = new_run(run_name(id))
        self.events: list[WorldEvent] = []
        self.operations: dict[str, tuple[int, int]] = {}  # first and last position
        self.size = 0
        self.last_page = 0  # where it begins
        self.read_at: float | None = None  # when the store last said where it ends, by the monotonic clock
        self.lock = asyncio.Lock()  # of the writers in this process: they take turns instead of colliding
        self.record: InvocationRecord | None = None  # its invocation, as it was last seen
        self.projected = 0  # the tail up to which the invocation is known to agree
        self.changed = 0  # the last event that changes the invocation

    def clear(self) -> None:
        """Know nothing any more."""
        self.run, self.events, self.operations = new_run(self.run.id), [], {}
        self.size = self.last_page = self.projected = self.changed = 0
        self.record = None

    @property
    def tail(self) -> int:
        return len(self.events)

    def placed(self, after: int = 0, until: int | None = None) -> list[PlacedEvent]:
        """Return the events behind one position, and up to another."""
        return [PlacedEvent(number, event) for number, event in enumerate(self.events[after:until], after + 1)]

    def as_of(self, position: int) -> WorldRun:
        """Return the fold up to a position."""
        return self.run if position == self.tail else fold(new_run(self.run.id), self.placed(until=position))

    def add(self, pages: Sequence[Page]) -> bool:
        """Add pages that follow; those that are known are passed over. Return whether any was new."""
        before = self.tail
        for page in pages:
            if page.last <= self.tail:
                continue
            if page.first != self.tail + 1:
                raise CorruptRecord(f"the log of {self.id} misses position {self.tail + 1}", kind="page", id=self.id)
            events = decode(page)
            fold(self.run, [PlacedEvent(number, event) for number, event in enumerate(events, page.first)])
            self.events += events
            self.operations[asked(page.operation)] = (page.first, page.last)
            self.last_page = page.first
            self.changed = max(
                [self.changed, *[at for at, each in enumerate(events, page.first) if each.type in OF_RUNS]]
            )
            self.size += sum(map(size_of, events))
        return self.tail > before


def asked(operation: str) -> str:
    """Return the operation that a client asked for, of the one that a page has."""
    return operation.rpartition(_TRY)[0]


class WarmLogs:
    """The logs that this process has read of late."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logs: OrderedDict[str, RunLog] = OrderedDict()
        self._size = 0

    def of(self, id: InvocationId) -> RunLog:
        """Return a log as far as it is known; perhaps nothing of it is."""
        log = self._logs.get(id)
        if log is None:
            log = self._logs[id] = RunLog(id)
        self._logs.move_to_end(id)
        return log

    async def fresh(self, id: InvocationId) -> RunLog:
        """Return a log as it is in the store now."""
        log = self.of(id)
        await self.refresh(log)
        return log

    async def refresh(self, log: RunLog) -> bool:
        """Read on. Return whether anything was new. A run that has ended may have been removed, and this process need
        not have seen its end: the last page that is known is read again, and without it nothing of the run is left.
        """
        store, app, limit, has_news = self._engine.store, self._engine.app, FEWEST_PAGES, False
        while True:
            known = log.last_page
            pages = await store.read_log(app, log.id, after=max(0, known - 1), limit=limit + 1)
            if log.last_page < known:
                continue  # another reader has found that it was removed
            if known and (not pages or pages[0].first != known):
                self._size -= log.size if self._logs.get(log.id) is log else 0
                log.clear()
                continue
            has_news |= self._add(log, pages)
            if len(pages) <= limit:
                log.read_at = self._engine.clock.monotonic()
                return has_news
            limit = pages_at_once(pages)

    def is_old(self, log: RunLog) -> bool:
        """Return whether the run may have ended, and been removed, since its log was read."""
        return log.read_at is None or self._engine.clock.monotonic() - log.read_at > _TRUSTED_SECONDS

    async def append(self, log: RunLog, events: Sequence[WorldEvent], operation: str) -> bool:
        """Append events behind what is known. Return whether they are there; if not, the log was read on instead, and
        may have what an earlier try of the operation wrote.
        """
        page = Page(
            app=self._engine.app,
            run=log.id,
            first=log.tail + 1,
            last=log.tail + len(events),
            epoch=0,
            operation=f"{operation}{_TRY}{self._engine.ids.operation()}",
            at=events[-1].at,
            events=encode(events),
            payloads=payloads_of(events),
        )
        crashpoint("world.before")
        (verdict,) = await self._engine.store.append([page])
        crashpoint("world.appended")
        if isinstance(verdict, Appended):
            log.read_at = self._engine.clock.monotonic()
            self._add(log, [page])
            return True
        pages: Sequence[Page] = getattr(verdict, "pages", ())
        if not self._add(log, pages) and not await self.refresh(log):
            raise CorruptRecord(f"the log of {log.id} is damaged at position {page.first}", kind="page", id=log.id)
        return False

    def _add(self, log: RunLog, pages: Sequence[Page]) -> bool:
        before = log.size
        has_news = log.add(pages)
        if self._logs.get(log.id) is log:
            self._size += log.size - before
            self._forget_coldest(log)
        return has_news

    def _forget_coldest(self, keep: RunLog) -> None:
        while (self._size > MAX_BYTES or len(self._logs) > MAX_RUNS) and len(self._logs) > 1:
            id, coldest = next(iter(self._logs.items()))
            if coldest is keep:
                return
            del self._logs[id]
            self._size -= coldest.size

    def clear(self) -> None:
        self._logs.clear()
        self._size = 0
