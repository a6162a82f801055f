"""Chunks on their way from the code of a call to the streams that they belong to.

A call that writes to streams has a `ChunkBuffer`. Its code puts chunks there, from any thread; one consumer takes them:
the engine, or, in a process for tasks, a thread that sends them to the parent. A chunk is in the buffer until it is
durable. With more than `MAX_CHUNKS` or `MAX_BYTES` in it, its writers wait.

Nothing is locked: an exception may be raised in a thread anywhere (a timeout, Ctrl-C), and must leave no lock behind.
Appending to a deque is atomic, so a chunk is in the buffer or was never written. Everything else is counted by the
consumer alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from holdfast.codec import Payload
from holdfast.errors import StreamClosed, UsageError

CHUNK, RESTART, CLOSE = 0, 1, 2
ENDED = "nothing can be written to a stream any more: the call that wrote to it has ended"
MAX_CHUNKS, MAX_BYTES = 1000, 2**20
_TOO_MANY = 20  # times as much, in code that does not wait
_LOOK_SECONDS = 0.2  # a waiting thread is open to exceptions that are raised in it


class Outgoing(NamedTuple):
    """An item that a call writes to a stream: a chunk, or the close."""

    stream: str
    kind: int = CHUNK
    data: bytes = b""
    payloads: tuple[Payload, ...] = ()

    @property
    def size(self) -> int:
        return len(self.data) + sum(len(payload.data) for payload in self.payloads)


class ChunkBuffer:
    """The chunks of one call. `notify` wakes the consumer, from any thread."""

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        self._queue: deque[Outgoing] = deque()
        self._queued_bytes = 0  # about: only waiting goes by it
        self._wanted: deque[Future[None]] = deque()  # flushes that the consumer has not seen
        self._waiting: deque[Future[None]] = deque()  # for room
        self._closed: set[str] = set()  # by this call
        self._errors: dict[str, Exception] = {}
        self._reported: set[str] = set()  # streams whose errors were raised in the call
        self._cut: Exception | None = None
        self.is_served = False  # the consumer polls: it need not be notified of each chunk
        # Of the consumer:
        self._taken: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._under_way = self._bytes_under_way = 0
        self._flushes: list[tuple[dict[str, int], Future[None]]] = []

    # --- for the code of the call

    def put(self, item: Outgoing) -> Future[None] | None:
        """Take a chunk. Return the future to wait for before the next chunk, or None. Raises `StreamClosed`."""
        self._check(item.stream)
        if item.stream in self._closed:
            if item.kind == CLOSE:
                return None
            raise StreamClosed(f"the stream '{item.stream}' was closed by this call: nothing can be written to it")
        if self._is_above(_TOO_MANY):
            raise UsageError(
                f"more than {_TOO_MANY * MAX_CHUNKS:,} chunks or {_TOO_MANY * MAX_BYTES // 2**20} MiB wait for the "
                "store, and the code goes on writing: await write(…), so that it waits for room"
            )
        if item.kind == CLOSE:
            self._closed.add(item.stream)
        self._queue.append(item)
        self._queued_bytes += item.size
        if not self.is_served:
            self._notify()
        if not self._is_above():
            return None
        room: Future[None] = Future()
        self._waiting.append(room)
        self._notify()  # again: it may have become free before the wait was known
        return room

    def flush(self, stream: str) -> Future[None]:
        """Return a future that is done when all chunks of this call are durable. It fails if a chunk of this stream was
        refused.
        """
        self._check(stream)
        return _checked(self.flushed(), lambda: self._check(stream))

    def flushed(self) -> Future[None]:
        """Return a future that is done when each chunk is durable or refused."""
        flushed: Future[None] = Future()
        self._wanted.append(flushed)
        self._notify()
        return flushed

    def _check(self, stream: str) -> None:
        error = self._cut or self._errors.get(stream)
        if error is not None:
            self._reported.add(stream)
            raise error

    def _is_above(self, times: int = 1) -> bool:
        count, size = len(self._queue) + self._under_way, self._queued_bytes + self._bytes_under_way
        return count > times * MAX_CHUNKS or size > times * MAX_BYTES

    # --- for the consumer

    def take(self) -> list[Outgoing]:
        """Return the chunks that were put. They count as buffered until they are `written`."""
        wanted = [self._wanted.popleft() for _ in range(len(self._wanted))]
        items = [self._queue.popleft() for _ in range(len(self._queue))]
        for item in items:
            self._taken[item.stream] += 1
            self._under_way += 1
            self._bytes_under_way += item.size
        self._queued_bytes = sum(item.size for item in tuple(self._queue))
        for flushed in wanted:  # which were asked for after all of these had been put
            self._flushes.append((dict(self._taken), flushed))
        self._settle()
        return items

    def written(self, items: Iterable[Outgoing]) -> None:
        """Note that these chunks are durable, or refused."""
        for item in items:
            self._done[item.stream] += 1
            self._under_way -= 1
            self._bytes_under_way -= item.size
        self._settle()

    def _settle(self) -> None:
        for flush in list(self._flushes):
            wanted, flushed = flush
            if all(self._done[stream] >= count for stream, count in wanted.items()):
                self._flushes.remove(flush)
                _resolve(flushed)
        if not self._is_above():
            for _ in range(len(self._waiting)):
                _resolve(self._waiting.popleft())

    @property
    def is_empty(self) -> bool:
        """Return whether each chunk is durable or refused."""
        return not self._queue and not self._under_way

    @property
    def is_under_way(self) -> bool:
        """Return whether chunks were taken that are not durable yet."""
        return self._under_way > 0

    def refuse(self, stream: str, error: Exception) -> None:
        """Take no more chunks of this stream: they cannot be stored."""
        self._errors.setdefault(stream, error)

    def forward(self, item: Outgoing) -> tuple[Future[None] | None, Exception | None]:
        """Put chunks that a process for tasks has sent. Return the future to wait for, and the error if they were
        refused. This does not raise the error in the task's code: see `mark_reported`.
        """
        error = self._cut or self._errors.get(item.stream)
        if error is not None:
            return None, error
        return self.put(item), None

    @property
    def reported(self) -> tuple[str, ...]:
        """Return the streams whose errors were raised in the call."""
        return tuple(self._reported)

    def mark_reported(self, streams: Iterable[str]) -> None:
        """Note that the errors of these streams were raised in the call, in another process."""
        self._reported.update(streams)

    def cut(self, error: Exception) -> None:
        """Refuse all further chunks, drop the chunks that were not taken, and free waiting writers."""
        self._cut = error
        self._queue.clear()
        for waiting in (self._wanted, self._waiting):
            for _ in range(len(waiting)):
                _resolve(waiting.popleft())
        for _, flushed in self._flushes:
            _resolve(flushed)
        self._flushes.clear()

    @property
    def unreported(self) -> Exception | None:
        """Return the error by which chunks were refused, unless it was raised in the call."""
        return next((error for stream, error in self._errors.items() if stream not in self._reported), None)


def _resolve(future: Future[None]) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(None)


def _checked(future: Future[None], check: Callable[[], None]) -> Future[None]:
    """Return a future that follows `future`, and fails if `check` raises when that is done."""
    checked: Future[None] = Future()

    def done(_: Future[None]) -> None:
        try:
            check()
        except Exception as error:
            if not checked.done():
                checked.set_exception(error)
        else:
            _resolve(checked)

    future.add_done_callback(done)
    return checked


# --- one face for both colours


class NothingToAwait(Coroutine[Any, Any, None]):
    """The return value of a write in a plain function: awaiting it does nothing, and not awaiting it is no mistake."""

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, *error: Any) -> Any:
        raise StopIteration

    def close(self) -> None:
        pass

    def __await__(self) -> Any:
        return iter(())


def waited_for(future: Future[None] | None) -> Awaitable[None]:
    """Wait, on a thread without an event loop; on a thread with a loop, return an awaitable."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        while future is not None and not is_over(future):
            pass
        return NothingToAwait()
    return NothingToAwait() if future is None else asyncio.wrap_future(future)


def is_over(future: Future[None]) -> bool:
    """Wait for a moment. Return whether it is over; raises its error."""
    try:
        future.result(_LOOK_SECONDS)
    except TimeoutError:
        return future.done()
    return True
