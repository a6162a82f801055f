"""Hints between processes by a change stream on a tiny collection.

Each process has one document in `holdfast_signals`. To send hints is to write them into it, with majority (a change
stream shows only what the majority has, and a weaker write would be shown about 95 ms later, measured); every other
process sees the write in its change stream. One document per process means that senders never collide, and the
collection stays as small as the fleet.

Hints are coalesced: the first goes out at once, and while it is being written, and for a short moment after, the
following ones gather. They are best effort, and the one write that is not asked again by `Retry`: one that is not
carried out within a few seconds is given up, counted and reported; it costs latency, never work.

The stream is a cursor of ours and not the driver's, which takes itself up again without a word: while that looks for a
server, nobody would know that hints do not come. Each answer is waited for a little longer than the server may take, so
a connection that swallows everything is found out within ten seconds; a cut one is at once. From then on `trust` is 0
and those who wait look more often instead. Whatever the reason, the stream is taken up again after its last event, or
anew where that cannot be. Where there is none (a standalone, a role that may not), it is asked for again every few
minutes: a role may be granted, and a standalone become a replica set.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bson.errors import BSONError
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import ConnectionFailure, NetworkTimeout, OperationFailure

from holdfast.lifecycle.records import Hint
from holdfast.store.contract import Observe

T = TypeVar("T")

_QUICK_SECONDS, _GATHER_SECONDS = 0.002, 0.02
_TRUST = 8  # polling intervals: an open stream is reliable, and an idle fleet should cost next to nothing
_AWAIT_SECONDS, _GRACE_SECONDS = 8.0, 2.0  # how long the server waits for an event, and we beyond that for its answer
_SEND_SECONDS = 5.0
_MOST_SUBJECTS = 500  # of one kind in one write; beyond that a hint says: anything
_LAST_WORDS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
ASK_AGAIN_SECONDS = 300.0  # where change streams are not to be had
_NO_CHANGE_STREAMS = frozenset(
    {40573, 40324, 13, 20, 303, 8000}
)  # standalone, unknown stage, unauthorised, not offered


class StreamHints:
    """See `holdfast.lifecycle.records.HintChannel`."""

    def __init__(
        self,
        signals: AsyncCollection[dict[str, Any]],
        process: str,
        *,
        use_change_streams: bool,
        observe: Observe,
        can_be_heard: Callable[[], bool] = lambda: True,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._signals = signals
        self._process = process
        self._use = use_change_streams
        self._observe = observe
        self._can_be_heard = can_be_heard
        self._ask_again = ask_again_seconds
        self._receivers: dict[str, Callable[[Hint], None]] = {}
        self._waiting: dict[str, Hint] = {}
        self._sent = 0
        self.given_up = 0  # writes of hints that were not carried out
        self._closing = False
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._token: Any = None
        self._refused = False  # and said so
        self._pause = _FIRST_PAUSE_SECONDS  # before the stream is taken up again; grows until something arrives
        self.trust = 0

    # --- sending

    def send(self, hints: Sequence[Hint]) -> None:
        if not self._use or not self._can_be_heard():
            return
        for hint in hints:
            before = self._waiting.get(hint.kind)
            self._waiting[hint.kind] = hint if before is None else before.joined(hint, _MOST_SUBJECTS)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        pause = _QUICK_SECONDS
        while self._waiting:
            hints, self._waiting = list(self._waiting.values()), {}
            try:
                await _within(_SEND_SECONDS, self._send(hints))
            except Exception as error:  # a lost hint costs latency, never work; and those that gather are to be sent
                self.given_up += 1
                self._observe("hints_not_sent", {"why": _text(error), "so_far": self.given_up})
            await asyncio.sleep(pause)
            pause = min(pause * 2, _GATHER_SECONDS)  # the more there is to tell, the more of it goes into one write

    async def _send(self, hints: list[Hint]) -> None:
        try:
            await self._write(hints)
        except (BSONError, ValueError, OverflowError):  # one has a name that no document can hold
            await self._write([Hint(hint.kind, ()) for hint in hints])

    async def _write(self, hints: list[Hint]) -> None:
        body = [{"kind": hint.kind, "subjects": list(hint.subjects), "count": hint.count} for hint in hints]
        self._sent += 1
        # Replaced, not updated: an update that sets a field to what it was is left out of the change event.
        document = {"hints": body, "at": dt.datetime.now(dt.UTC), "n": self._sent}
        await self._signals.replace_one({"_id": self._process}, document, upsert=True)

    # --- listening

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        self._receivers[kind] = receive
        if self._use and self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        """Follow the stream for as long as the store is open: no error ends that, since nobody would begin anew."""
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
                    self._token = None  # it has left the log, or leads to what cannot be read: begin anew
                self._broken(error)
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _not_to_be_had(self, error: OperationFailure) -> None:
        if not self._refused:
            self._refused = True
            self._observe("no_change_streams", {"why": _text(error)})
            self._everybody_looks()  # there may have been one until now

    def _broken(self, error: Exception) -> None:
        if not self._closing:
            self._observe("change_stream_broken", {"why": _text(error)})
            self._everybody_looks()

    async def _follow(self) -> None:
        after = {} if self._token is None else {"resumeAfter": self._token}
        stages = [{"$changeStream": after}, {"$match": {"operationType": {"$in": ["insert", "replace"]}}}]
        patience = self._await_seconds()
        opening = self._signals.aggregate(stages, maxAwaitTimeMS=int(patience * 1000))
        stream = await _within(_AWAIT_SECONDS + _GRACE_SECONDS, opening)
        try:
            self.trust = _TRUST
            self._refused = False
            self._observe("change_stream_open", {})
            self._everybody_looks()  # something may have happened before it was open
            while stream.alive:
                event = await _within(patience + _GRACE_SECONDS, stream.try_next())
                if event is not None:
                    self._token, self._pause = event["_id"], _FIRST_PAUSE_SECONDS
                    self._hear(event)
        finally:
            self.trust = 0  # at once: to close the stream may take a while
            with contextlib.suppress(Exception):
                await _within(_LAST_WORDS_SECONDS, stream.close())

    def _await_seconds(self) -> float:
        """Well below the time after which the driver takes a connection for dead."""
        options = self._signals.database.client.options
        given = [seconds for seconds in (options.pool_options.socket_timeout, options.timeout) if seconds]
        return min([_AWAIT_SECONDS, *(seconds / 2 for seconds in given)])

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("documentKey", {}).get("_id") == self._process:
            return
        bodies = (event.get("fullDocument") or {}).get("hints")
        for body in bodies if isinstance(bodies, list) else ():
            try:
                hint = Hint(str(body["kind"]), tuple(body["subjects"]), int(body["count"]))
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if (receive := self._receivers.get(hint.kind)) and all(isinstance(name, str) for name in hint.subjects):
                receive(hint)

    def _everybody_looks(self) -> None:
        for kind, receive in tuple(self._receivers.items()):
            try:
                receive(Hint(kind, ()))
            except Exception as error:  # the others shall look nevertheless
                self._observe("hint_not_taken", {"kind": kind, "why": _text(error)})

    async def close(self) -> None:
        """Send what is left to send, and end. The driver may turn a cancellation into a network error, so the tasks are
        told as well, and nobody waits for them for long.
        """
        self._closing = True
        if self._sender is not None:
            await asyncio.wait({self._sender}, timeout=_LAST_WORDS_SECONDS)
        tasks = [task for task in (self._listener, self._sender) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
        self._listener = self._sender = None
        self.trust = 0


async def _within(seconds: float, asking: Coroutine[Any, Any, T]) -> T:
    """The answer, or `NetworkTimeout`. Who is late is told to end, and nobody waits for that: it may take a while."""
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


_left: set[asyncio.Future[Any]] = set()  # those that are to end, so that they are not collected before


def _forget(task: asyncio.Future[Any]) -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # nobody asks for it any more


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
