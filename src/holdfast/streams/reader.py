"""Reading streams: from an index on, in order, live, at the reader's own pace.

A reader holds the pages of one read and nothing else: a megabyte or two, and large values one at a time. It ends where
the stream is closed, or its invocation has ended; if chunks that it has not read were removed, it raises `StreamGone`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from holdfast.codec import Payloads, references
from holdfast.errors import CorruptRecord, InvocationNotFound, NotDecodable, PayloadLost, StreamGone
from holdfast.executors.chunks import CHUNK, CLOSE, RESTART
from holdfast.ids import InvocationId
from holdfast.model.log import Page, stream_log
from holdfast.model.status import FINAL
from holdfast.runtime import streams as shown
from holdfast.runtime.app_runtime import AppRuntime, refuse_on_loop
from holdfast.runtime.engine import Engine
from holdfast.runtime.streams import Chunk, StreamInfo, StreamTail
from holdfast.runtime.wait import get_all
from holdfast.streams import rules
from holdfast.streams.following import LiveTails
from holdfast.streams.records import KIND, StreamEntry, StreamEvent, decode, read_entry

_KINDS = {CHUNK: shown.CHUNK, RESTART: shown.RESTART, CLOSE: shown.CLOSED}


class PlacedChunk(msgspec.Struct, frozen=True):
    """An event of a stream at its position."""

    position: int
    event: StreamEvent
    writer: str = ""


class Cursor(msgspec.Struct):
    """The place of a reader."""

    first: int = 0  # the first index that is wanted
    position: int = 0  # the last that was read: the end of a page
    held: list[PlacedChunk] = msgspec.field(default_factory=list)  # a close, which may be the end
    void: dict[rules.Caller, int] = msgspec.field(default_factory=dict)  # what lies before is of an earlier attempt
    limit: int = rules.FEWEST_PAGES  # of one read
    has_begun: bool = False
    is_live: bool = False
    is_over: bool = False

    @property
    def wanted(self) -> int:
        """Return the position of the next item."""
        return max(self.position, self.first) + 1


class LogReader:
    """See `holdfast.runtime.streams.StreamReader`."""

    def __init__(
        self,
        runtime: AppRuntime,
        id: InvocationId,
        name: str,
        start: int = 0,
        stop: int | None = None,
        attempts: str = rules.ALL,
        *,
        decode: Callable[[bytes, Payloads], Any] | None = None,
    ) -> None:
        self._runtime = runtime
        self._decode = decode or runtime.codec.decode
        self._id = id
        self.name = rules.valid_stream(name)
        rules.check_range(start, stop, attempts)
        self._start, self._stop, self._attempts = start, stop, attempts
        self._log = stream_log(id, self.name)

    def __repr__(self) -> str:
        return f"<StreamReader {self._log}>"

    # --- iteration

    def __iter__(self) -> Iterator[Chunk]:
        refuse_on_loop("'for … in stream'", "'async for … in stream'")
        cursor, run = Cursor(), self._runtime.run
        while not cursor.is_over:
            for placed in run(self._more(cursor)):
                fetched = run(self._fetch(placed)) if references(placed.event.data) else {}
                yield self._chunk(placed, fetched)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        cursor, run = Cursor(), self._runtime.arun
        while not cursor.is_over:
            for placed in await run(self._more(cursor)):
                fetched = await run(self._fetch(placed)) if references(placed.event.data) else {}
                yield self._chunk(placed, fetched)

    async def batches(self, *, fetch: bool = True) -> AsyncGenerator[list[Chunk], None]:
        """Yield the items as they come, as many at a time as are there. A large value comes alone; without `fetch` it
        is not read, and `decode` returns a placeholder.
        """
        cursor, run = Cursor(), self._runtime.arun
        while not cursor.is_over:
            batch: list[Chunk] = []
            for placed in await run(self._more(cursor)):
                if not (fetch and references(placed.event.data)):
                    batch.append(self._chunk(placed, {}))
                    continue
                if batch:
                    yield batch
                yield [self._chunk(placed, await run(self._fetch(placed)))]
                batch = []
            if batch:
                yield batch

    def values(self) -> ValueReader:
        """Return an iterator of the values of the chunks alone."""
        return ValueReader(self)

    def stored(self) -> LogReader:
        """Return an iterator that ends at the present end of the stream."""
        return self._until(self.tail())

    async def astored(self) -> LogReader:
        return self._until(await self.atail())

    def _until(self, tail: StreamTail) -> LogReader:
        items = tail.index + 1
        start, stop = rules.first_index(self._start, items), items if self._stop is None else min(self._stop, items)
        return LogReader(self._runtime, self._id, self.name, start, stop, self._attempts, decode=self._decode)

    def tail(self) -> StreamTail:
        """Return the index of the last item, and whether the stream is closed."""
        return self._runtime.run(self._tail())

    async def atail(self) -> StreamTail:
        return await self._runtime.arun(self._tail())

    def _chunk(self, placed: PlacedChunk, payloads: dict[str, bytes]) -> Chunk:
        # Decoded here, on the caller's thread: that may run user code, and take a while.
        event, index = placed.event, placed.position - 1
        try:
            value = self._decode(event.data, payloads) if event.kind == CHUNK else None
        except NotDecodable as error:
            raise NotDecodable(f"the chunk {index} of the stream {self._log} cannot be read: {error}") from error
        kind = _KINDS[event.kind]
        return Chunk(index=index, value=value, kind=kind, attempt=event.attempt, step=event.call, at=event.at)

    # --- on the engine's loop

    async def _fetch(self, placed: PlacedChunk) -> dict[str, bytes]:
        engine = await self._runtime.engine()
        try:
            return await engine.payloads.fetch(references(placed.event.data))
        except PayloadLost as error:
            await self._check_gone(engine, placed.position)
            raise PayloadLost(f"the chunk {placed.position - 1} of the stream {self._log}: {error}") from error

    async def _more(self, cursor: Cursor) -> list[PlacedChunk]:
        """Return the next items, at least one, unless the stream `is_over`."""
        engine = await self._runtime.engine()
        try:
            if not cursor.has_begun:
                await self._begin(engine, cursor)
            while not cursor.is_over:
                pages = await self._next_pages(engine, cursor)
                if not pages:
                    cursor.is_over = True
                    await self._check_end(engine, cursor)
                    if pages is not None:  # other readers were given some
                        raise CorruptRecord(f"the stream {self._log} misses position {cursor.wanted}", id=self._log)
                elif items := self._wanted(cursor, pages):
                    return items
        except CorruptRecord:
            await self._check_gone(engine, cursor.wanted)
            raise
        except InvocationNotFound:
            if not cursor.is_live:
                raise
            raise StreamGone(f"the stream {self._log} was removed, with its invocation") from None
        return []

    async def _next_pages(self, engine: Engine, cursor: Cursor) -> Sequence[Page] | None:
        """Return pages, and wait for them; None or nothing: there will be none."""
        if not cursor.is_live or cursor.held:
            pages = await self._read_apart(engine, cursor)
            if pages or cursor.held:
                return pages or None
            cursor.is_live = True
        return await engine.part(LiveTails).of(self._id, self.name).after(cursor.position, cursor.limit)

    async def _read_apart(self, engine: Engine, cursor: Cursor) -> Sequence[Page]:
        """Read the next pages; if one of them is damaged, one by one."""
        try:
            return await self._read(engine, after=cursor.position, limit=cursor.limit)
        except CorruptRecord:
            return await self._read(engine, after=cursor.position, limit=1)

    async def _read(self, engine: Engine, **where: Any) -> Sequence[Page]:
        return await engine.store.read_log(engine.app, self._log, **where)

    def _wanted(self, cursor: Cursor, pages: Sequence[Page]) -> list[PlacedChunk]:
        """Return the items of pages that the reader wants, and note where it is."""
        items, cursor.held = cursor.held, []
        for page in pages:
            try:
                events = _events_of(page, cursor.position)
            except CorruptRecord:
                if not items:
                    raise
                break  # the items before it are yielded first
            items += [PlacedChunk(position, event, page.writer) for position, event in enumerate(events, page.first)]
            cursor.position = page.last
            if self._stop is not None and cursor.position >= self._stop:
                break
        cursor.limit = rules.pages_at_once(pages)
        if items[-1].event.kind == CLOSE:
            cursor.held = [items.pop()]
        if self._stop is not None and cursor.position >= self._stop:
            cursor.is_over = True
            items = [item for item in items if item.position <= self._stop]
        return [
            item
            for item in items
            if item.position > cursor.first and item.position > cursor.void.get((item.writer, item.event.call), 0)
        ]

    # --- beginning

    async def _begin(self, engine: Engine, cursor: Cursor) -> None:
        cursor.has_begun = True
        await get_all(engine.store, engine.app, [self._id])
        cursor.first = self._start
        if self._start < 0:
            cursor.first = rules.first_index(self._start, (await self._end(engine))[0])
        if self._stop is not None and cursor.first >= self._stop:
            cursor.is_over = True
        if cursor.first:
            found = await self._read(engine, until=cursor.first + 1, limit=1, latest=True)
            if found:
                cursor.position = found[0].first - 1
        if self._attempts == rules.LAST:
            cursor.void = await self._restarts(engine, cursor.position)

    async def _restarts(self, engine: Engine, after: int) -> dict[rules.Caller, int]:
        """Return where each call begins its last attempt, as far as it has restarted behind this position."""
        found: dict[rules.Caller, int] = {}
        limit = rules.FEWEST_PAGES
        while pages := await self._read(engine, after=after, limit=limit):
            limit = rules.pages_at_once(pages)
            for page in pages:
                # The marker itself is of no use, where what lies before it is left out.
                found |= rules.restarts(page.first, page.writer, decode(page))
            after = pages[-1].last
        return found

    async def _end(self, engine: Engine) -> tuple[int, bool]:
        """Return how many items there are, and whether the last event closes the stream."""
        found = await self._read(engine, limit=1, latest=True)
        if not found:
            await self._check_gone(engine, 1)
            return 0, False
        is_closed = decode(found[0])[-1].kind == CLOSE
        return found[0].last - is_closed, is_closed

    async def _check_end(self, engine: Engine, cursor: Cursor) -> None:
        """Raise `StreamGone` unless the reader has come to the end of what was written."""
        last = cursor.position and await self._read(engine, until=cursor.position, limit=1, latest=True)
        if not last:  # the page that was read last was removed, and so may others be that were not read
            await self._check_gone(engine, cursor.wanted)

    async def _check_gone(self, engine: Engine, position: int) -> None:
        """Raise `StreamGone` if the event at this position was removed, or is being removed with its invocation."""
        entry = await _entry(engine, self._log)
        if entry is None or not entry.gone:
            (record,) = await engine.store.get(engine.app, [self._id])
            kept = None if record is None else record.retain_until
            if record is None or (entry is not None and kept is not None and kept <= engine.store.now()):
                raise StreamGone(f"the stream {self._log} was removed, with its invocation")
        elif position <= entry.last:
            raise StreamGone(
                f"the stream {self._log} was removed, from index {position - 1} to {entry.last - 1}: its time to be "
                "kept is over (stream_retention_seconds)"
            )

    async def _tail(self) -> StreamTail:
        engine = await self._runtime.engine()
        (record,) = await get_all(engine.store, engine.app, [self._id])
        items, is_closed = await self._end(engine)
        return StreamTail(index=items - 1, is_closed=is_closed or record.status in FINAL)


class ValueReader:
    """See `holdfast.runtime.streams.StreamValues`."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def __iter__(self) -> Iterator[Any]:
        return (chunk.value for chunk in self._reader if chunk.kind == shown.CHUNK)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for chunk in self._reader:
            if chunk.kind == shown.CHUNK:
                yield chunk.value


def _events_of(page: Page, position: int) -> list[StreamEvent]:
    """Return the events of the page behind this position. Raises `CorruptRecord` if the page begins further behind."""
    if page.first != position + 1:
        why = f"the stream {page.run} goes on at position {page.first}, and {position + 1} is missing"
        raise CorruptRecord(why, kind="page", id=page.run)
    return decode(page)


async def _entry(engine: Engine, log: str) -> StreamEntry | None:
    found = await engine.store.entries(engine.app, KIND, [log])
    return read_entry(found[0]) if found else None


class StreamReading:
    """See `holdfast.runtime.streams.StreamReads`."""

    def reader(
        self, runtime: AppRuntime, id: InvocationId, name: str, start: int, stop: int | None, attempts: str
    ) -> LogReader:
        return LogReader(runtime, id, name, start, stop, attempts)

    async def streams(self, engine: Engine, id: InvocationId) -> list[StreamInfo]:
        """Return the streams of an invocation, by name. Raises `InvocationNotFound`."""
        (record,) = await get_all(engine.store, engine.app, [id])
        found = []
        for each in await engine.store.entries(engine.app, KIND, subject=id):
            entry = read_entry(each)
            pages = await engine.store.read_log(engine.app, InvocationId(each.name), limit=1, latest=True)
            closed = bool(pages) and decode(pages[0])[-1].kind == CLOSE
            items = pages[0].last - closed if pages else entry.last
            found.append(
                StreamInfo(
                    name=each.name.partition("/")[2],
                    created_at=entry.created_at,
                    items=items,
                    is_closed=closed or record.status in FINAL,
                    is_gone=entry.gone,
                )
            )
        return found
