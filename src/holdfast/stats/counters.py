"""Counters: what a process has written is counted in memory, and stored every 10 s, in its own file per minute.

The path of an invocation only appends to a list. Here the list is counted, a few dozen writes at a time. A file has one
writer, so no write waits for another process. It holds all counts of its minute: a repetition, after an answer that was
lost, stores the same again.
"""

from __future__ import annotations

import asyncio

from holdfast.errors import StoreError
from holdfast.model.records import Entry
from holdfast.runtime.engine import COUNTED_AT_ONCE, Engine
from holdfast.runtime.outage import cancel_tasks
from holdfast.stats.records import StatsFile, file_entry
from holdfast.stats.rules import LATE_SECONDS, MINUTE, WORKERS, Cells, count_all, name_of, without_messages
from holdfast.telemetry.events import DutyFailed

FLUSH_SECONDS = 10.0
_LAST_SECONDS = 2.0


class _MinuteFile:
    """The counts of one minute, and what is stored of them."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.has_news = False
        self.stored: Entry | None = None  # as far as is known
        self.pending: Entry | None = None  # that was sent, and whose answer is not known


class Counters:
    """Part of an engine that counts what its outbox writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._kept_seconds = engine.settings.stats_retention_seconds
        self._minutes: dict[int, _MinuteFile] = {}
        self._writer = ""
        self._flushing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def attach(self) -> None:
        """Count from now on what the outbox writes, unless statistics are switched off."""
        if self._kept_seconds:
            self._engine.outbox.written = []
            self._engine.outbox.on_written = self._look

    def _look(self, so_many: int) -> None:
        """Called for the first write after each count, and when there are many."""
        if so_many == COUNTED_AT_ONCE:
            try:
                self._count()
            except Exception as error:  # called in the middle of a write
                self._failed(error)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush_later())

    def _count(self) -> None:
        written = self._engine.outbox.written
        if not written:
            return
        batches = written[:]
        written.clear()
        if self._engine.codec.name_payload is not None:
            batches = [without_messages(batch) for batch in batches]
        count_all(self._cells_of, batches, self._store.now())

    def _cells_of(self, start: int) -> Cells:
        """Return the counts of a minute, which are about to change."""
        minute = self._minutes.setdefault(start, _MinuteFile())
        minute.has_news = True
        return minute.cells

    async def _flush_later(self) -> None:
        while self._minutes or self._engine.outbox.written:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Report it. A defect of ours must not stay in memory for ever: what it was about is dropped."""
        is_defect = not isinstance(error, StoreError)
        if is_defect:
            self._minutes.clear()
        self._engine.telemetry.emit(DutyFailed("stats", f"store counters{'' if is_defect else '; later'}", error))

    async def flush(self) -> None:
        """Store what was counted. Raises `StoreError`, and then the next flush does it."""
        async with self._lock:
            self._count()
            for start in sorted(self._minutes):
                minute = self._minutes[start]
                if self._store.now() > start + MINUTE + LATE_SECONDS:
                    del self._minutes[start]  # it may be folded soon: rather too few than twice as many
                    continue
                if minute.cells:  # a start, say, counts as nothing
                    await self._store_file(start, minute)
                else:
                    minute.has_news = False
                if not minute.has_news and self._store.now() > start + MINUTE + FLUSH_SECONDS:
                    del self._minutes[start]

    async def _store_file(self, start: int, minute: _MinuteFile) -> None:
        while minute.pending is not None or minute.has_news:
            if minute.pending is None:
                minute.has_news = False
                minute.pending = self._entry(start, minute)
            entry = minute.pending
            is_stored = await self._store.put_entry(entry, minute.stored)
            minute.pending = None
            if is_stored:
                minute.stored = entry
                continue
            self._writer = ""  # another name
            if minute.stored is None:  # this minute has a file that is closed: these counts get one of their own
                minute.has_news = True
            else:  # the file was removed: what it had is gone
                minute.stored, minute.cells = None, {}

    def _entry(self, start: int, minute: _MinuteFile) -> Entry:
        if minute.stored is None and not self._writer:
            self._writer = self._engine.ids.new()
        name = minute.stored.name if minute.stored is not None else name_of(start, self._writer)
        file = StatsFile(cells=minute.cells)
        return file_entry(self._engine.app, WORKERS, name, file, kept_seconds=self._kept_seconds, before=minute.stored)

    async def close(self) -> None:
        """Store what was counted, if the store answers in a moment. Nothing is counted after that."""
        if self._flushing is not None:
            await cancel_tasks(self._flushing)
        if self._minutes or self._engine.outbox.written:
            last = asyncio.get_running_loop().create_task(self.flush())
            await asyncio.wait({last}, timeout=_LAST_SECONDS)
            await cancel_tasks(last)
            if not last.cancelled() and (error := last.exception()) is not None:
                self._failed(error)
        self._engine.outbox.written = None
