"""Hints between processes by a change stream on a tiny collection.

Each process has one document in `holdfast_signals`, and sends hints by replacing it, with majority: a change stream
shows only what the majority has, and a weaker write would be shown about 95 ms later. Every other process sees the
write in its change stream. Senders never collide, and the collection stays as small as the fleet. Hints are coalesced:
the first is sent at once, and the following ones gather while it is written and for a moment after. They are best
effort, and the one write that `Retrier` does not retry: a write that takes longer than a few seconds is given up,
counted and reported.

All stores of a process that use one database share one `ChangeStream`. Its cursor is ours and not the driver's, which
resumes without a word: while that looks for a server, hints would be missing unnoticed. Each answer is waited for a
little longer than the server may take, so that a dead connection is found within ten seconds. From then on `trust` is
0, and waiting processes poll more often. The stream is resumed after its last event, or opened again where that fails.
Where there is none (a standalone, a role that may not), it is asked for again every few minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from bson.errors import BSONError
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import ConnectionFailure, NetworkTimeout, OperationFailure

from holdfast.model.records import READY, Hint
from holdfast.store.contract import Observe
from holdfast.store.mongo.retry import text_of

T = TypeVar("T")

_TRUST = 8  # polling intervals: an open stream is reliable, and an idle fleet should cost next to nothing
_AWAIT_SECONDS, _GRACE_SECONDS = 8.0, 2.0  # how long the server waits for an event, and we beyond that for its answer
LAST_WORDS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
ASK_AGAIN_SECONDS = 300.0  # where change streams are not to be had
_NO_CHANGE_STREAMS = frozenset(
    {40573, 40324, 13, 20, 303, 8000}
)  # standalone, unknown stage, unauthorised, not offered


class ChangeStream:
    """The change stream on one collection, open while it has listeners."""

    def __init__(self, signals: AsyncCollection[dict[str, Any]], ask_again_seconds: float) -> None:
        self._signals = signals
        self._ask_again = ask_again_seconds
        self._listeners: list[StreamHints] = []
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._token: Any = None
        self._refused = False  # and said so
        self._pause = _FIRST_PAUSE_SECONDS  # before the stream is taken up again; grows until something arrives
        self.trust = 0

    def join(self, listener: StreamHints) -> None:
        self._listeners.append(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())
        elif self.trust:
            self._observe("change_stream_open", {}, [listener])
            listener.look()  # something may have happened before it came

    async def leave(self, listener: StreamHints) -> None:
        """Remove a listener; the last one closes the stream. The driver may turn a cancellation into a network error,
        so a flag ends the task as well, and it is not waited for long.
        """
        self._listeners.remove(listener)
        if self._listeners or self._task is None:
            return
        self._closing = True
        for key in [key for key, stream in _streams.items() if stream is self]:
            del _streams[key]
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=LAST_WORDS_SECONDS)
        self.trust = 0

    def _observe(self, event: str, facts: Mapping[str, Any], whom: list[StreamHints] | None = None) -> None:
        for listener in tuple(self._listeners if whom is None else whom):
            listener.observe(event, facts)

    def _everybody_looks(self) -> None:
        for listener in tuple(self._listeners):
            listener.look()

    async def _listen(self) -> None:
        """Follow the stream while it has listeners. No error ends that, since nothing would start it again."""
        while not self._closing:
            try:
                await self._follow()
                self._token = None  # it ends by itself when the collection is dropped, and cannot go on from there
            except Exception as error:
                if isinstance(error, OperationFailure) and error.code in _NO_CHANGE_STREAMS:
                    self._not_to_be_had(error)
                    await asyncio.sleep(self._ask_again)
                    continue
                if not isinstance(error, ConnectionFailure):
                    self._token = None  # it has left the log, or leads to what cannot be read: start over
                self._broken(error)
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _not_to_be_had(self, error: OperationFailure) -> None:
        if not self._refused:
            self._refused = True
            self._observe("no_change_streams", {"why": text_of(error)})
            self._everybody_looks()  # there may have been one until now

    def _broken(self, error: Exception) -> None:
        if not self._closing:
            self._observe("change_stream_broken", {"why": text_of(error)})
            self._everybody_looks()

    async def _follow(self) -> None:
        after = {} if self._token is None else {"resumeAfter": self._token}
        stages = [{"$changeStream": after}, {"$match": {"operationType": {"$in": ["insert", "replace"]}}}]
        patience = self._await_seconds()
        opening = self._signals.aggregate(stages, maxAwaitTimeMS=int(patience * 1000))
        stream = await within(_AWAIT_SECONDS + _GRACE_SECONDS, opening)
        try:
            self.trust = _TRUST
            self._refused = False
            self._observe("change_stream_open", {})
            self._everybody_looks()  # something may have happened before it was open
            while stream.alive:
                event = await within(patience + _GRACE_SECONDS, stream.try_next())
                if event is not None:
                    self._token, self._pause = event["_id"], _FIRST_PAUSE_SECONDS
                    for listener in tuple(self._listeners):
                        listener.take(event)
        finally:
            self.trust = 0  # at once: to close the stream may take a while
            with contextlib.suppress(Exception):
                await within(LAST_WORDS_SECONDS, stream.close())

    def _await_seconds(self) -> float:
        """Return a wait well below the time after which the driver takes a connection for dead."""
        options = self._signals.database.client.options
        given = [seconds for seconds in (options.pool_options.socket_timeout, options.timeout) if seconds]
        return min([_AWAIT_SECONDS, *(seconds / 2 for seconds in given)])


_streams: dict[tuple[int, str], ChangeStream] = {}  # by client and database


def stream_of(signals: AsyncCollection[dict[str, Any]], ask_again_seconds: float) -> ChangeStream:
    """Return the stream of this process on a collection."""
    key = (id(signals.database.client), signals.full_name)
    if key not in _streams:
        _streams[key] = ChangeStream(signals, ask_again_seconds)
    return _streams[key]


async def within(seconds: float, asking: Coroutine[Any, Any, T]) -> T:
    """Return the answer, or raise `NetworkTimeout`. A late call is cancelled and not waited for."""
    task = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            _left.add(task)
            task.add_done_callback(_forget)
            task.cancel()
    raise NetworkTimeout(f"no answer within {seconds:g} s")


_left: set[asyncio.Future[Any]] = set()  # that are to end, so that they are not collected before


def _forget(task: asyncio.Future[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # no caller asks for it any more


# --- sending and receiving

_QUICK_SECONDS, _GATHER_SECONDS = 0.002, 0.02
_SEND_SECONDS = 5.0
_MAX_SUBJECTS = 500  # of one kind in one write; beyond that a hint says: anything


class StreamHints:
    """See `holdfast.model.records.HintChannel`."""

    def __init__(
        self,
        signals: AsyncCollection[dict[str, Any]],
        process: str = "",
        *,
        use_change_streams: bool,
        observe: Observe,
        has_listeners: Callable[[], bool] = lambda: True,
        on_hint: Callable[[Hint], None] = lambda hint: None,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._signals = signals
        self._process = process or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._use = use_change_streams
        self.observe = observe
        self._has_listeners = has_listeners
        self._on_hint = on_hint  # called with every hint, those of this process too, before any listener acts on it
        self._ask_again = ask_again_seconds
        self._receivers: dict[str, Callable[[Hint], None]] = {}
        self._waiting: dict[str, Hint] = {}
        self._sent = 0
        self.given_up = 0  # writes of hints that were not carried out
        self._sender: asyncio.Task[None] | None = None
        self._stream: ChangeStream | None = None

    # --- sending

    def send(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            self._on_hint(hint)
        if not self._use or not self._has_listeners():
            return
        for hint in hints:
            before = self._waiting.get(hint.kind)
            self._waiting[hint.kind] = hint if before is None else before.joined(hint, _MAX_SUBJECTS)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        pause = _QUICK_SECONDS
        while self._waiting:
            hints, self._waiting = list(self._waiting.values()), {}
            try:
                await within(_SEND_SECONDS, self._send(hints))
            except Exception as error:  # a lost hint costs latency, never work; gathered hints are still sent
                self.given_up += 1
                self.observe("hints_not_sent", {"why": text_of(error), "so_far": self.given_up})
            await asyncio.sleep(pause)
            pause = min(pause * 2, _GATHER_SECONDS)  # the more hints there are, the more of them share a write

    async def _send(self, hints: list[Hint]) -> None:
        try:
            await self._write(hints)
        except (BSONError, ValueError, OverflowError):  # one has a name that no document can hold
            await self._write([Hint(hint.kind, ()) for hint in hints])

    async def _write(self, hints: list[Hint]) -> None:
        body = [_written(hint) for hint in hints]
        self._sent += 1
        # Replaced, not updated: an update that sets a field to what it was is left out of the change event.
        document = {"hints": body, "at": dt.datetime.now(dt.UTC), "n": self._sent}
        await self._signals.replace_one({"_id": self._process}, document, upsert=True)

    # --- listening

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        self._receivers[kind] = receive
        if self._use and self._stream is None:
            self._stream = stream_of(self._signals, self._ask_again)
            self._stream.join(self)

    @property
    def trust(self) -> int:
        return 0 if self._stream is None else self._stream.trust

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("documentKey", {}).get("_id") == self._process:
            return
        bodies = (event.get("fullDocument") or {}).get("hints")
        for body in bodies if isinstance(bodies, list) else ():
            try:
                hint = _read(body)
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if hint.kind in self._receivers and all(isinstance(name, str) for name in hint.subjects):
                self._on_hint(hint)
                self.deliver(hint)

    def deliver(self, hint: Hint) -> None:
        """Deliver a hint to its receiver in this process."""
        if receive := self._receivers.get(hint.kind):
            receive(hint)

    def look(self) -> None:
        self._on_hint(Hint(READY, ()))
        for kind, receive in tuple(self._receivers.items()):
            try:
                receive(Hint(kind, ()))
            except Exception as error:  # the others shall look nevertheless
                self.observe("hint_not_taken", {"kind": kind, "why": text_of(error)})

    async def close(self) -> None:
        """Send the remaining hints, and end. It waits only a moment: the driver may miss the cancellation."""
        if (sender := self._sender) is not None:
            await asyncio.wait({sender}, timeout=LAST_WORDS_SECONDS)
            sender.cancel()
            await asyncio.wait({sender}, timeout=LAST_WORDS_SECONDS)
        self._sender, stream, self._stream = None, self._stream, None
        if stream is not None:
            await stream.leave(self)


def _written(hint: Hint) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": hint.kind, "subjects": list(hint.subjects), "count": hint.count}
    if hint.since is not None:
        body |= {"since": hint.since, "priorities": list(hint.priorities)}
    return body


def _read(body: Mapping[str, Any]) -> Hint:
    """Return the hint, as far as it can be read: without a proper time it says nothing about the time."""
    kind, subjects, count = str(body["kind"]), tuple(body["subjects"]), int(body["count"])
    since, priorities = body.get("since"), body.get("priorities")
    if not isinstance(since, int | float) or not isinstance(priorities, list):
        return Hint(kind, subjects, count)
    return Hint(kind, subjects, count, float(since), tuple(map(int, priorities)))
