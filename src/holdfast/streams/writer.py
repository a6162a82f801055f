"""Writing streams: the chunks of all calls of an engine become pages of logs, in groups.

A stream is served by one `OpenStream` per process and epoch of its writer, so the chunks of parallel steps share pages.
Pages of many streams that gather while a write is under way are one `append`. Before its first page:

1. A step makes durable, in the log of its run, that it has begun and writes to this stream. So its next attempt has
   another number, and knows which streams it has to start over.
2. The entry of the stream is put. If it is there, the last page shows where the stream ends.
3. The owner marks its invocation, so that this is kept until its chunks are removed. The write is refused to a zombie;
   and pages of a later owner lie behind the end that was read before, so that this owner collides with them.

A page goes to the tail + 1. If that is taken, the chunks go behind what is there, unless a later owner has written
(`Fenced`) or the stream is closed. No page is dropped while the store is away: it is tried again with the same
operation id. Then buffers fill, and writers wait.

A body's chunk is its own page, whose operation follows from the run and the call. If its owner dies before the log of
the run has it, the next owner finds the page by that operation.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, PayloadLost, StoreError, StreamClosed, StreamError, UsageError
from holdfast.executors.call import Call, Crashed, Outcome, Returned, raised
from holdfast.executors.chunks import CLOSE, ENDED, RESTART, ChunkBuffer, Outgoing
from holdfast.ids import InvocationId
from holdfast.model.changes import Applied, StreamMark
from holdfast.model.log import MAX_PAGE_EVENTS, Appended, AppendVerdict, Behind, Fenced, Page, stream_log
from holdfast.model.records import STREAM, Hint, InvocationRecord
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import Outage, cancel_tasks, is_refusal
from holdfast.runtime.streams import Deliver
from holdfast.streams import rules
from holdfast.streams.records import KIND, StreamEntry, StreamEvent, decode, encode, entry_of, payloads_of
from holdfast.telemetry.events import ChunksRefused, DutyFailed

T = TypeVar("T")

_MAX_IDLE = 1000  # streams that are known although no chunk waits
_PAGES = 100
_TAKEN = "another worker goes on with it"


class ChunkSource(msgspec.Struct, eq=False, kw_only=True):
    """A call that writes chunks, or the body of a run.

    `writer` is the invocation that performs the call, if the streams belong to another one; `owner` is its owner.
    `earlier` are the streams that earlier attempts have written to; None: not known. `before`
    makes durable that a step writes to a stream, and returns whether it may.
    """

    invocation: InvocationId
    epoch: int
    owner: str | None
    call: str = ""
    attempt: int = 1
    writer: str = ""
    earlier: frozenset[str] | None = frozenset()
    before: Callable[[str], Awaitable[bool]] | None = None
    is_marked: bool = False


def source_of(record: InvocationRecord) -> ChunkSource:
    """Return the source of a task's call. A step on another queue writes to the streams of its run."""
    reply = record.reply_to
    if reply is not None and reply.effects_key is not None:
        call = f"{reply.generation}/{reply.call}" if reply.generation else reply.call
        return ChunkSource(
            invocation=reply.run,
            epoch=record.epoch,
            owner=record.owner,
            call=call,
            attempt=record.attempt,
            writer=record.id,
            earlier=None if record.attempt > 1 else frozenset(),
        )
    return ChunkSource(invocation=record.id, epoch=record.epoch, owner=record.owner, attempt=record.attempt)


class CallPort(msgspec.Struct, eq=False):
    """A call that has used streams: its buffer, and the callbacks that wait for it."""

    key: str
    call: Call | None
    source: ChunkSource
    buffer: ChunkBuffer = msgspec.field(default_factory=lambda: ChunkBuffer(lambda: None))
    begun: set[str] = msgspec.field(default_factory=set)  # streams that this call has written to
    waiting: dict[str, list[Outgoing]] = msgspec.field(default_factory=dict)  # until a stream is declared
    restarts: int = 0  # that are not durable yet
    is_preparing: bool = False
    is_cut: bool = False
    ending: tuple[Outcome, Deliver] | None = None


class Pending(msgspec.Struct, eq=False):
    """An event that is to be written. One with an `operation` has its own page."""

    event: StreamEvent
    item: Outgoing
    source: ChunkSource
    port: CallPort | None = None
    operation: str = ""
    done: asyncio.Future[int] | None = None  # gets its index
    search_after: int | None = None  # an earlier owner may have written it, behind this position


class OpenStream(msgspec.Struct, eq=False):
    """A stream as one owner writes it in this process."""

    id: InvocationId
    name: str
    writer: str
    epoch: int
    tail: int | None = None  # its last position; None: not known yet
    last: StreamEvent | None = None
    last_writer: str = ""
    is_busy: bool = False
    failed: Exception | None = None
    pending: deque[Pending] = msgspec.field(default_factory=deque)
    batch: list[Pending] = msgspec.field(default_factory=list)
    page: Page | None = None

    @property
    def log(self) -> InvocationId:
        return stream_log(self.id, self.name)

    def read(self, pages: Sequence[Page]) -> None:
        """Note where the stream ends: behind the last of these pages. Raises `CorruptRecord`."""
        if pages:
            self.tail, self.last, self.last_writer = pages[-1].last, decode(pages[-1])[-1], pages[-1].writer


class ChunkWriter:
    """See `holdfast.runtime.streams.ChunkPort`. A part of the engine; everything happens on its loop, unless the
    docstring says otherwise.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app
        self.calls: dict[str, CallPort] = {}  # by their keys
        self._streams: dict[tuple[str, str, str, int], OpenStream] = {}
        self._news: deque[CallPort] = deque()
        self._is_announced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._outage: Outage | None = None
        self._group: list[OpenStream] = []
        self._pump: asyncio.Task[None] | None = None
        self._spawned: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._outage = self._outage or Outage(self._engine.rng, self._engine.telemetry)

    async def close(self) -> None:
        if self._outage is not None:
            self._outage.give_up_in(0)
        for port in list(self.calls.values()):
            port.buffer.cut(StreamClosed("the app was closed"))
        await cancel_tasks(*[task for task in (self._pump, *self._spawned) if task is not None])

    # --- calls

    def buffer_of(self, call: Call) -> ChunkBuffer:
        """Return the buffer of a call of a task. From any thread."""
        return self._port(call).buffer

    def _port(self, call: Call) -> CallPort:
        record = call.about
        assert isinstance(record, InvocationRecord)
        return self.port_of(call, lambda: source_of(record))

    def port_of(self, call: Call, source: Callable[[], ChunkSource]) -> CallPort:
        """Return the engine's state of a call. From any thread."""
        port = self.calls.get(call.key)
        if port is None:
            port = CallPort(call.key, call, source())
            port.buffer = ChunkBuffer(functools.partial(self._notified, port))
            port = self.calls.setdefault(call.key, port)
        return port

    def begin_again(self, call: Call) -> None:
        port = self._port(call)
        if port.source.writer:
            return  # the streams of its run: with its first chunk
        port.is_preparing = True
        self._spawn(self._prepare_again(port))

    async def _prepare_again(self, port: CallPort) -> None:
        """Find the streams that earlier attempts of a task have written to, and restart them."""

        async def look(again: bool) -> list[str]:
            entries = await self._store.entries(self._app, KIND, subject=port.source.invocation)
            return [entry.name.partition("/")[2] for entry in entries]

        names = await self._until_accepted(f"looking for streams of {port.source.invocation}", look)
        port.source.earlier, port.is_preparing = frozenset(names), False
        self._begin_again(port, names)
        self._notified(port)

    def step_begins_again(self, key: str) -> None:
        """Write a restart to the streams to which earlier attempts of a step have written."""
        if (port := self.calls.get(key)) is not None:
            self._begin_again(port, sorted(port.source.earlier or ()))

    def _begin_again(self, port: CallPort, names: Sequence[str]) -> None:
        for name in names:
            if port.source.before is None:
                self._declared(port, name)
            elif name not in port.begun and name not in port.waiting:
                port.waiting[name] = []
                self._spawn(self._declare(port, name))

    def hold(self, outcomes: Sequence[tuple[str, Outcome]], deliver: Deliver) -> Sequence[tuple[str, Outcome]]:
        """Keep the outcomes of calls until their chunks are durable. From any thread."""
        free = []
        for key, outcome in outcomes:
            if (port := self.calls.get(key)) is None:
                free.append((key, outcome))
            else:
                port.ending = outcome, deliver
                self._notified(port)
        return free

    def cut(self, key: str, why: str = "") -> bool:
        """Take no more chunks of a call. Return whether it was marked. From any thread."""
        port = self.calls.pop(key, None)
        if port is None:
            return False
        port.is_cut = True
        port.buffer.cut(StreamClosed(f"nothing can be written to a stream any more: {why}" if why else ENDED))
        if port.ending is not None:  # its code has ended, and does not wait for chunks any more
            self._notified(port)
        return port.source.is_marked

    def _finish(self, port: CallPort) -> None:
        """Deliver the outcome of a call, if its chunks are durable."""
        is_busy = port.is_preparing or port.waiting or port.restarts or not port.buffer.is_empty
        if port.ending is None or is_busy or port.is_cut:
            return
        (outcome, deliver), error = port.ending, port.buffer.unreported
        port.ending = None
        self.cut(port.key)
        if error is not None and isinstance(outcome, Returned) and port.call is not None:
            if isinstance(error, StoreError) and not isinstance(error, CorruptRecord | PayloadLost):
                outcome = Crashed(f"its chunks could not be written: {error}")  # the runner stops
            else:
                outcome = raised(port.call, error)
        deliver(port.key, outcome, port.source.is_marked)

    # --- from user code to streams

    def _notified(self, port: CallPort) -> None:
        """Look at a call soon. From any thread."""
        self._news.append(port)
        if self._is_announced:
            return
        self._is_announced = True
        loop = self._loop
        if loop is None:
            raise UsageError("streams can be written where a worker runs only")
        call_soon = loop.call_soon if threading.get_ident() == self._thread else loop.call_soon_threadsafe
        try:
            call_soon(self._look)
        except RuntimeError:
            return  # the engine is gone

    def _look(self) -> None:
        # Cleared first: what comes too late for this visit announces itself again.
        self._is_announced = False
        looked_at = dict.fromkeys(self._news.popleft() for _ in range(len(self._news)))
        for port in looked_at:
            if port.is_cut and port.ending is not None:
                (outcome, deliver), port.ending = port.ending, None
                deliver(port.key, outcome, port.source.is_marked)
            if port.is_preparing or port.is_cut:
                continue
            self._serve(port)
            self._finish(port)

    def _serve(self, port: CallPort) -> None:
        """Take the chunks that a call has put. While chunks of it are under way, it is looked at again without a
        hint.
        """
        buffer = port.buffer
        while True:
            for item in buffer.take():
                self._say(port, item)
            buffer.is_served = buffer.is_under_way
            if buffer.is_served or buffer.is_empty:  # else something was put before the line above
                return

    def _say(self, port: CallPort, item: Outgoing) -> None:
        name = item.stream
        if name in port.begun:
            self._add(self._pending(port, item))
        elif name in port.waiting:
            port.waiting[name].append(item)
        elif port.source.before is None:
            self._declared(port, name)
            self._add(self._pending(port, item))
        else:
            port.waiting[name] = [item]
            self._spawn(self._declare(port, name))

    async def _declare(self, port: CallPort, name: str) -> None:
        """Record in the log of its run that a step writes to this stream; then continue with its chunks."""
        assert port.source.before is not None
        may_write = await port.source.before(name)
        waiting = port.waiting.pop(name)
        if not may_write:
            port.buffer.refuse(name, self._fenced(name))
            port.buffer.written(waiting)
            return self._finish(port)
        self._declared(port, name)
        for item in waiting:
            self._add(self._pending(port, item))
        self._finish(port)

    def _declared(self, port: CallPort, name: str) -> None:
        """Let a call begin with this stream, or restart the stream if an earlier attempt wrote to it."""
        source = port.source
        if name in port.begun:
            return
        port.begun.add(name)
        if source.attempt > 1 and (source.earlier is None or name in source.earlier):
            port.restarts += 1
            self._add(self._pending(port, Outgoing(name, RESTART)))

    def _pending(self, port: CallPort, item: Outgoing) -> Pending:
        source = port.source
        event = StreamEvent(item.kind, self._store.now(), source.call, source.attempt, item.data)
        return Pending(event, item, source, port)

    def write_once(
        self, source: ChunkSource, item: Outgoing, operation: str, search_after: int | None
    ) -> asyncio.Future[int]:
        """Write a chunk of a body, as a page with this operation. Return a future of its index; it raises
        `StreamClosed`, and `StoreError` if the runner stops. `search_after`: an earlier owner may have written it,
        behind this position.
        """
        self.open()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        event = StreamEvent(item.kind, self._store.now(), source.call, source.attempt, item.data)
        self._add(Pending(event, item, source, None, operation, done, search_after))
        return done

    # --- streams

    def _add(self, pending: Pending) -> None:
        source, name = pending.source, pending.item.stream
        key = (source.invocation, name, source.writer, source.epoch)
        stream = self._streams.pop(key, None) or OpenStream(source.invocation, name, source.writer, source.epoch)
        self._streams[key] = stream
        if stream.failed is not None:
            return self._reject([pending], stream.failed)
        stream.pending.append(pending)
        self._wake(stream)

    def _forget_idle(self) -> None:
        for key, stream in list(self._streams.items())[: max(0, len(self._streams) - _MAX_IDLE)]:
            if not stream.is_busy and not stream.pending:
                del self._streams[key]

    def _wake(self, stream: OpenStream) -> None:
        """Write the waiting chunks, unless a page of this stream is being written."""
        if stream.is_busy or not stream.pending:
            return
        if stream.tail is None or stream.pending[0].search_after is not None:
            stream.is_busy = True
            return self._spawn(self._ready(stream))
        while stream.pending and (error := self._refusal(stream)):
            self._reject([stream.pending.popleft()], error)
        if not stream.pending:
            return
        stream.is_busy = True
        stream.batch, stream.page = self._next(stream), None
        if any(pending.item.payloads for pending in stream.batch):
            self._spawn(self._keep(stream))
        else:
            self._append(stream)

    def _refusal(self, stream: OpenStream) -> Exception | None:
        return rules.refusal(
            stream.name, stream.last, stream.last_writer, stream.pending[0].event, stream.pending[0].source.writer
        )

    def _next(self, stream: OpenStream) -> list[Pending]:
        """Take the events of the next page: up to an event that closes the stream, or has its own page."""
        waiting = stream.pending
        if waiting[0].operation:
            return [waiting.popleft()]
        sizes: list[int] = []
        for pending in waiting:
            if pending.operation or len(sizes) == MAX_PAGE_EVENTS:
                break
            sizes.append(len(pending.event.data) + 32)
            if pending.event.kind == CLOSE:
                break
        return [waiting.popleft() for _ in range(rules.portion(sizes))]

    async def _ready(self, stream: OpenStream) -> None:
        """Read the end of a stream, or whether the next event is stored already."""
        first = stream.pending[0]
        try:
            if stream.tail is None:
                await self._until_accepted(
                    f"opening the stream {stream.log}", lambda again: self._open(stream, first.source)
                )
            if first.search_after is not None:
                found = await self._until_accepted(
                    f"reading the stream {stream.log}", lambda again: self._search(stream, first)
                )
                first.search_after = None
                if found is not None:
                    stream.pending.popleft()
                    _set_index(first, found)
        except Exception as error:
            return self._fail(stream, error)
        stream.is_busy = False
        self._wake(stream)

    async def _open(self, stream: OpenStream, source: ChunkSource) -> None:
        at = self._store.now()
        wait = rules.look_again_after(self._engine.settings.stream_retention_seconds)
        entry = entry_of(self._app, stream.log, StreamEntry(created_at=at), at + wait)
        is_new = await self._store.put_entry(entry)
        crashpoint("stream.listed")
        pages = () if is_new else await self._store.read_log(self._app, stream.log, limit=1, latest=True)
        writer = InvocationId(stream.writer or stream.id)
        mark = StreamMark(app=self._app, id=writer, epoch=stream.epoch, actor=source.owner or "")
        (verdict,) = await self._store.apply([mark])
        if not isinstance(verdict, Applied):
            raise self._fenced(stream.name)
        source.is_marked = True
        crashpoint("stream.marked")
        stream.read(pages)
        stream.tail = stream.tail or 0

    async def _search(self, stream: OpenStream, wanted: Pending) -> int | None:
        """Return the index of an event that an earlier owner has written; None: it has not."""
        after = wanted.search_after or 0
        while True:
            pages = await self._store.read_log(self._app, stream.log, after=after, limit=_PAGES)
            for page in pages:
                if page.operation == wanted.operation:
                    return page.first - 1
                after = page.last
            if len(pages) < _PAGES:
                return None

    async def _keep(self, stream: OpenStream) -> None:
        """Store the large values of the next page."""
        try:
            await self._until_accepted(f"storing chunks of {stream.log}", lambda again: self._keep_payloads([stream]))
        except Exception as error:
            return self._fail(stream, error)
        crashpoint("chunk.kept")
        self._append(stream)

    async def _keep_payloads(self, streams: Sequence[OpenStream]) -> None:
        payloads: list[Payload] = [p for stream in streams for pending in stream.batch for p in pending.item.payloads]
        if payloads:
            await self._engine.payloads.keep(payloads)

    # --- pages

    def _append(self, stream: OpenStream) -> None:
        self._group.append(stream)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._append_groups())

    async def _append_groups(self) -> None:
        while self._group:
            group: dict[str, OpenStream] = {}
            later = []
            for stream in self._group:  # one page of each log: a zombie may be in this process
                if group.setdefault(stream.log, stream) is not stream:
                    later.append(stream)
            self._group = later
            await self._append_apart(list(group.values()))
            self._forget_idle()

    async def _append_apart(self, group: list[OpenStream]) -> None:
        """Append the next pages of these streams; if one is refused, only that stream is given up."""
        for stream in group:
            stream.page = self._page(stream)
        pages = [stream.page for stream in group if stream.page is not None]

        async def attempt(again: bool) -> Sequence[AppendVerdict]:
            if again:  # the store may have been away for so long that the payloads were collected
                await self._keep_payloads(group)
            crashpoint("chunk.before")
            verdicts = await self._store.append(pages)
            crashpoint("chunk.after")
            return verdicts

        try:
            verdicts = await self._until_accepted(f"writing pages of {len(group)} streams", attempt)
        except Exception as error:
            if len(group) > 1 and is_refusal(error):
                half = len(group) // 2
                await self._append_apart(group[:half])
                return await self._append_apart(group[half:])
            for stream in group:
                self._fail(stream, error)
            return
        news = []
        for stream, page, verdict in zip(group, pages, verdicts, strict=True):
            try:
                if self._take(stream, page, verdict):
                    news.append(stream.log)
            except CorruptRecord as error:
                self._fail(stream, error)
        if news:
            self._engine.hub.send(Hint(STREAM, tuple(news), len(news)))
        for stream in group:
            self._wake(stream)

    def _page(self, stream: OpenStream) -> Page:
        assert stream.tail is not None
        events = [pending.event for pending in stream.batch]
        operation = stream.batch[0].operation or (stream.page.operation if stream.page else "")
        return Page(
            app=self._app,
            run=stream.log,
            first=stream.tail + 1,
            last=stream.tail + len(events),
            epoch=stream.epoch,
            operation=operation or self._engine.ids.operation(),
            at=events[-1].at,
            events=encode(events),
            payloads=payloads_of(events),
            writer=stream.writer,
        )

    def _take(self, stream: OpenStream, page: Page, verdict: AppendVerdict) -> bool:
        """Take the outcome of an append. Return whether the page is in the stream. Raises `CorruptRecord`."""
        if isinstance(verdict, Fenced):
            self._fail(stream, self._fenced(stream.name, verdict.epoch))
            return False
        if isinstance(verdict, Behind):
            if not verdict.pages:
                raise CorruptRecord(f"the stream {stream.log} is damaged at position {page.first}", id=stream.log)
            stream.read(verdict.pages)
            there = next((each for each in verdict.pages if each.operation == page.operation), None)
            if there is None:
                stream.pending.extendleft(reversed(stream.batch))
                stream.batch, stream.is_busy = [], False
                return False
            page = there
        else:
            assert isinstance(verdict, Appended)
            stream.tail, stream.last, stream.last_writer = page.last, stream.batch[-1].event, page.writer
        batch, stream.batch, stream.is_busy = stream.batch, [], False
        for position, pending in enumerate(batch, page.first):
            _set_index(pending, position - 1)
        self._over(batch)
        return True

    # --- refusing

    def _fenced(self, name: str, epoch: int = 0) -> StreamClosed:
        by = f", in epoch {epoch}" if epoch else ""
        return StreamClosed(f"nothing can be written to the stream '{name}' from here any more: {_TAKEN}{by}")

    def _fail(self, stream: OpenStream, error: Exception) -> None:
        """Give up a stream, as far as this owner is concerned."""
        waiting = [*stream.batch, *stream.pending]
        stream.batch, stream.is_busy = [], False
        stream.pending.clear()
        if isinstance(error, StreamError):
            stream.failed = error
        else:  # the next call may be more lucky
            self._streams.pop((stream.id, stream.name, stream.writer, stream.epoch), None)
        self._engine.telemetry.emit(ChunksRefused(stream.log, len(waiting), str(error)))
        self._reject(waiting, error)

    def _reject(self, waiting: Sequence[Pending], error: Exception) -> None:
        for pending in waiting:
            if pending.port is not None:
                pending.port.buffer.refuse(pending.item.stream, error)
            if pending.done is not None and not pending.done.done():
                pending.done.set_exception(error)
        self._over(waiting)

    def _over(self, batch: Sequence[Pending]) -> None:
        """Let the calls of these events continue."""
        by_port: dict[CallPort, list[Outgoing]] = {}
        for pending in batch:
            if (port := pending.port) is not None:
                items = by_port.setdefault(port, [])
                if pending.event.kind == RESTART:
                    port.restarts -= 1
                else:
                    items.append(pending.item)
        for port, items in by_port.items():
            port.buffer.written(items)
            self._notified(port)

    # --- the store

    async def _until_accepted(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        assert self._outage is not None
        return await self._outage.until_accepted(what, attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._engine.telemetry.emit(DutyFailed("streams", "serve a stream", error))

        task = asyncio.get_running_loop().create_task(guarded())
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)


def _set_index(pending: Pending, index: int) -> None:
    if pending.done is not None and not pending.done.done():
        pending.done.set_result(index)
