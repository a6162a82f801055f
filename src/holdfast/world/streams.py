"""The streams of World runs: pages of chunks with several writers, as those of the app's own streams.

A write is one page, or several if it is large, at the tail of the stream's log. Each names the operation of the write,
so a write that is repeated because its answer was lost happens once. What is written after the close is dropped: every
reader has ended there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from holdfast.codec import Payload, references
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, InvocationNotFound
from holdfast.executors.chunks import CHUNK, CLOSE
from holdfast.ids import InvocationId, derived_id
from holdfast.model.log import Appended, Page, stream_log
from holdfast.model.records import STREAM, Hint
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Wakeup, look_after
from holdfast.store.contract import EntryOrder
from holdfast.streams import rules
from holdfast.streams.following import LiveTails
from holdfast.streams.records import KIND, StreamEntry, StreamEvent, decode, encode, entry_of, payloads_of, read_entry
from holdfast.world.errors import RUN_EXPIRED, WorldError, bad_request
from holdfast.world.logs import asked
from holdfast.world.records import Answer, invocation_of
from holdfast.world.requests import MAX_LIMIT, USUAL_LIMIT, position

UNKNOWN = "-"  # in the place of a run, where only the name of the stream is known
MAX_OPEN = 1000
MAX_CHUNKS = 10_000
_REPEATED_WITHIN_SECONDS = 300.0  # a client gives up repeating a write long before
_PAGES_BACK = 20
_ENTRIES_AT_ONCE = 500
_MAX_OPERATIONS = 2000


class WorldStream:
    """A stream as this process knows it, up to `tail`."""

    def __init__(self, log: InvocationId) -> None:
        self.log = log
        self.tail = 0
        self.is_closed = False
        self.is_known = False
        self.operations: OrderedDict[str, None] = OrderedDict()
        self.lock = asyncio.Lock()

    def add(self, pages: Sequence[Page]) -> None:
        for page in pages:
            if page.last > self.tail:
                self.tail = page.last
                self.is_closed = decode(page)[-1].kind == CLOSE
            self.operations[asked(page.operation)] = None
        while len(self.operations) > _MAX_OPERATIONS:
            self.operations.popitem(last=False)


class WorldStreams:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._streams: OrderedDict[str, WorldStream] = OrderedDict()

    # --- writing

    async def write(self, run: object, name: object, chunks: object, operation: str) -> None:
        """Append chunks. They are durable when it returns."""
        id, name = owner_of(run), valid_name(name)
        if not isinstance(chunks, Sequence) or isinstance(chunks, str | bytes):
            raise bad_request(f"chunks={chunks!r:.80}: expected a list of bytes or texts")
        if len(chunks) > MAX_CHUNKS:
            raise bad_request(f"{len(chunks):,} chunks; at most {MAX_CHUNKS:,} can be written at once")
        now, events, payloads = self._store.now(), list[StreamEvent](), list[Payload]()
        for chunk in chunks:
            if not isinstance(chunk, bytes | str):
                raise bad_request(f"a chunk is {chunk!r:.80}: expected bytes or a text")
            data = chunk.encode("utf-8", "surrogatepass") if isinstance(chunk, str) else chunk
            packed = self._engine.codec.pack(data, self._engine.limits, at="chunk")
            events.append(StreamEvent(CHUNK, now, data=packed.data))
            payloads += packed.payloads
        if payloads:
            await self._engine.payloads.keep(payloads)
        if events:
            await self._write(id, name, events, operation)

    async def close(self, run: object, name: object, operation: str) -> None:
        """Close a stream. Doing so again changes nothing."""
        await self._write(owner_of(run), valid_name(name), [StreamEvent(CLOSE, self._store.now())], operation)

    async def _write(self, id: InvocationId, name: str, events: Sequence[StreamEvent], operation: str) -> None:
        stream = self._stream(stream_log(id, name))
        async with stream.lock:
            if not stream.is_known:
                await self._open(stream)
            part = 0
            while events:
                count = rules.portion([len(event.data) + 32 for event in events])
                if not await self._append(stream, events[:count], f"{operation}.{part}"):
                    return
                events, part = events[count:], part + 1

    def _stream(self, log: InvocationId) -> WorldStream:
        stream = self._streams.get(log)
        if stream is None:
            stream = self._streams[log] = WorldStream(log)
            while len(self._streams) > MAX_OPEN:
                self._streams.popitem(last=False)
        self._streams.move_to_end(log)
        return stream

    async def _open(self, stream: WorldStream) -> None:
        """Put the stream's entry; read where it ends, and which writes may be repeated now."""
        now = self._store.now()
        due_at = now + rules.look_again_after(self._engine.settings.stream_retention_seconds)
        is_new = await self._store.put_entry(
            entry_of(self._engine.app, stream.log, StreamEntry(created_at=now), due_at)
        )
        crashpoint("world.listed")
        until: int | None = None
        while not is_new:
            pages = await self._read(stream.log, until=until, limit=_PAGES_BACK, latest=True)
            stream.add(pages)
            if len(pages) < _PAGES_BACK or pages[-1].at < now - _REPEATED_WITHIN_SECONDS:
                break
            until = pages[-1].first - 1
        stream.is_known = True

    async def _append(self, stream: WorldStream, events: Sequence[StreamEvent], operation: str) -> bool:
        """Append a page behind the tail. Return whether it is there; if not, the stream is closed."""
        while operation not in stream.operations:
            if stream.is_closed:
                return False
            page = Page(
                app=self._engine.app,
                run=stream.log,
                first=stream.tail + 1,
                last=stream.tail + len(events),
                epoch=0,
                operation=f"{operation}~{self._engine.ids.operation()}",
                at=events[-1].at,
                events=encode(events),
                payloads=payloads_of(events),
            )
            crashpoint("world.chunk")
            (verdict,) = await self._store.append([page])
            crashpoint("world.chunked")
            if isinstance(verdict, Appended):
                stream.add([page])
                self._engine.hub.send(Hint(STREAM, (stream.log,), 1))
                return True
            pages: Sequence[Page] = getattr(verdict, "pages", ())
            if not pages:
                raise CorruptRecord(f"the stream {stream.log} is damaged at position {page.first}", id=stream.log)
            stream.add(pages)
        return True

    # --- reading

    async def _read(
        self, log: InvocationId, *, after: int = 0, until: int | None = None, limit: int, latest: bool = False
    ) -> Sequence[Page]:
        """Read pages. Raises `WorldError` if they were removed because their time was over."""
        try:
            pages = await self._store.read_log(
                self._engine.app, log, after=after, until=until, limit=limit, latest=latest
            )
        except CorruptRecord:
            await self._check_gone(log)
            raise
        if not pages:
            await self._check_gone(log)
        return pages

    async def _check_gone(self, log: InvocationId) -> None:
        for entry in await self._store.entries(self._engine.app, KIND, [log]):
            if read_entry(entry).gone:
                why = "its chunks were removed, as stream_retention_seconds says"
                raise WorldError(RUN_EXPIRED, 410, f"the stream {log} is gone: {why}")

    async def _end(self, log: InvocationId) -> tuple[int, bool]:
        """Return how many chunks there are, and whether there will be no more."""
        pages = await self._read(log, limit=1, latest=True)
        if not pages:
            return 0, False
        is_closed = decode(pages[0])[-1].kind == CLOSE
        return pages[0].last - is_closed, is_closed

    async def _owner(self, run: object, name: str) -> InvocationId | None:
        """Return the invocation of a stream that is to be read. Without a run, the name decides: clients before version
        5 name a stream after its run, and of others the entry is searched. None: there is no such stream yet.
        """
        if run != UNKNOWN:
            return owner_of(run)
        named = invocation_of(name[:31].replace("strm_", "wrun_", 1))
        if named is not None and (await self._store.get(self._engine.app, [named]))[0] is not None:
            return named
        before: str | None = None
        while True:  # streams of the latest runs first
            order, limit = EntryOrder.LATEST, _ENTRIES_AT_ONCE
            entries = await self._store.entries(self._engine.app, KIND, order=order, limit=limit, before=before)
            if found := [each for each in entries if each.name.endswith(f"/{name}")]:
                return InvocationId(found[0].name.partition("/")[0])
            if len(entries) < limit:
                return None
            before = entries[-1].name

    async def info(self, run: object, name: object) -> Answer:
        name = valid_name(name)
        id = await self._owner(run, name)
        count, is_closed = (0, False) if id is None else await self._end(stream_log(id, name))
        return {"tailIndex": count - 1, "done": is_closed}

    async def names(self, run: object) -> list[str]:
        id = owner_of(run)
        entries = await self._store.entries(self._engine.app, KIND, subject=id)
        return sorted(entry.name.partition("/")[2] for entry in entries)

    async def chunks(self, run: object, name: object, limit: object, cursor: object) -> Answer:
        """Return a page of what is there now, with the indexes of the chunks."""
        name = valid_name(name)
        id = await self._owner(run, name)
        limit = USUAL_LIMIT if limit is None else limit
        if type(limit) is not int or limit < 1:
            raise bad_request(f"limit={limit!r:.40}: expected a whole number from 1 to {MAX_LIMIT:,}")
        if cursor is not None and not isinstance(cursor, str):
            raise bad_request(f"cursor={cursor!r:.80}: expected a text")
        limit, after = min(limit, MAX_LIMIT), position(cursor) if cursor else 0
        if id is None:
            return {"data": [], "cursor": None, "hasMore": False, "done": False}
        log = stream_log(id, name)
        count, is_closed = await self._end(log)
        data: list[Answer] = []
        async for index, chunk in self._stored(log, after, count):
            data.append({"index": index, "data": chunk})
            if len(data) == limit:
                break
        has_more = after + len(data) < count
        return {
            "data": data,
            "cursor": str(after + len(data)) if has_more and data else None,
            "hasMore": has_more and bool(data),
            "done": is_closed,
        }

    async def _stored(self, log: InvocationId, after: int, until: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the chunks behind a position, up to another, with their indexes."""
        place = await self._page_before(log, after)
        limit = rules.FEWEST_PAGES
        while place < until and (pages := await self._read(log, after=place, limit=limit)):
            limit, place = rules.pages_at_once(pages), pages[-1].last
            for page in pages:
                for number, event in enumerate(decode(page), page.first):
                    if after < number <= until and event.kind == CHUNK:
                        yield number - 1, await self._value(event)

    async def _page_before(self, log: InvocationId, position: int) -> int:
        """Return the end of the page before the one that has the next position."""
        if not position:
            return 0
        pages = await self._read(log, until=position + 1, limit=1, latest=True)
        return pages[0].first - 1 if pages and pages[0].last > position else position

    async def read(self, run: object, name: object, start: object) -> tuple[int, AsyncIterator[bytes]]:
        """Return the index of the first chunk, and the chunks from there on, as they come."""
        name = valid_name(name)
        if type(start) is not int:
            raise bad_request(f"start={start!r:.40}: expected an index, a whole number; below 0 it counts from the end")
        while (id := await self._owner(run, name)) is None:
            await self._until_written()
        first = start if start >= 0 else rules.first_index(start, (await self._end(stream_log(id, name)))[0])
        return first, self._live(id, name, first)

    async def _live(self, id: InvocationId, name: str, first: int) -> AsyncIterator[bytes]:
        log = stream_log(id, name)
        count, _ = await self._end(log)
        place = await self._page_before(log, min(first, count))
        while (pages := await self._next_pages(id, name, place)) is not None:
            if not pages:
                await self._check_gone(log)
                raise CorruptRecord(f"the stream {log} misses position {place + 1}", id=log)
            for page in pages:
                if page.first != place + 1:
                    raise CorruptRecord(f"the stream {log} misses position {place + 1}", id=log)
                for number, event in enumerate(decode(page), page.first):
                    if event.kind == CHUNK and number > first:
                        yield await self._value(event)
                    elif event.kind == CLOSE:
                        return
                place = page.last

    async def _next_pages(self, id: InvocationId, name: str, place: int) -> Sequence[Page] | None:
        """Return the next pages, and wait for them; None: the stream has ended with its run."""
        try:
            return await self._engine.part(LiveTails).of(id, name).after(place, rules.FEWEST_PAGES)
        except InvocationNotFound:
            return await self._pages_without_run(stream_log(id, name), place)

    async def _until_written(self) -> None:
        """Wait until a stream may have come."""
        wakeup = Wakeup()
        unsubscribe = self._engine.hub.on(STREAM, lambda hint: wakeup.notify())
        try:
            await wakeup.wait(look_after(rules.LONGEST_LOOK_SECONDS))
        finally:
            unsubscribe()

    async def _pages_without_run(self, log: InvocationId, place: int) -> Sequence[Page]:
        """Wait for pages of a stream whose run is not there: it may come yet, and health checks have none."""
        wakeup, pause = Wakeup(), rules.FIRST_LOOK_SECONDS
        unsubscribe = self._engine.hub.on(STREAM, lambda hint: wakeup.notify())
        try:
            while not (pages := await self._read(log, after=place, limit=rules.FEWEST_PAGES)):
                await wakeup.wait(look_after(pause))
                pause = min(pause * 2, rules.LONGEST_LOOK_SECONDS)
            return pages
        finally:
            unsubscribe()

    async def _value(self, event: StreamEvent) -> bytes:
        wanted = references(event.data)
        value = self._engine.codec.decode(event.data, await self._engine.payloads.fetch(wanted) if wanted else {})
        return value if isinstance(value, bytes) else str(value).encode()


def owner_of(run: object) -> InvocationId:
    """Return the invocation that a stream belongs to. A health check names a run that never was."""
    if not isinstance(run, str) or not 0 < len(run) <= 256:
        raise bad_request(f"runId={run!r:.80}: expected a text of 1 to 256 characters")
    return invocation_of(run) or derived_id("world stream", run)


def valid_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 256 or "/" in name or not name.isprintable():
        raise bad_request(f"name={name!r:.80}: expected a text of 1 to 256 characters, without a slash")
    return name
