"""One change stream for everybody in this process who listens for hints of one database.

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
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import ConnectionFailure, NetworkTimeout, OperationFailure

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


class Listener(Protocol):
    """Who hears the events of a stream."""

    def hear(self, event: Mapping[str, Any]) -> None: ...

    def look(self) -> None:
        """Events may have been missed."""
        ...

    def observe(self, event: str, facts: Mapping[str, Any]) -> None: ...


class Stream:
    """The change stream on one collection, for as long as anybody listens."""

    def __init__(self, signals: AsyncCollection[dict[str, Any]], ask_again_seconds: float) -> None:
        self._signals = signals
        self._ask_again = ask_again_seconds
        self._listeners: list[Listener] = []
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._token: Any = None
        self._refused = False  # and said so
        self._pause = _FIRST_PAUSE_SECONDS  # before the stream is taken up again; grows until something arrives
        self.trust = 0

    def join(self, listener: Listener) -> None:
        self._listeners.append(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())
        elif self.trust:
            self._observe("change_stream_open", {}, [listener])
            listener.look()  # something may have happened before it came

    async def leave(self, listener: Listener) -> None:
        """The last one ends it. The driver may turn a cancellation into a network error, so the task is told as well,
        and nobody waits for it for long.
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

    def _observe(self, event: str, facts: Mapping[str, Any], whom: list[Listener] | None = None) -> None:
        for listener in tuple(self._listeners if whom is None else whom):
            listener.observe(event, facts)

    def _everybody_looks(self) -> None:
        for listener in tuple(self._listeners):
            listener.look()

    async def _listen(self) -> None:
        """Follow the stream for as long as somebody listens: no error ends that, since nobody would begin anew."""
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
                        listener.hear(event)
        finally:
            self.trust = 0  # at once: to close the stream may take a while
            with contextlib.suppress(Exception):
                await within(LAST_WORDS_SECONDS, stream.close())

    def _await_seconds(self) -> float:
        """Well below the time after which the driver takes a connection for dead."""
        options = self._signals.database.client.options
        given = [seconds for seconds in (options.pool_options.socket_timeout, options.timeout) if seconds]
        return min([_AWAIT_SECONDS, *(seconds / 2 for seconds in given)])


_streams: dict[tuple[int, str], Stream] = {}  # by client and database


def stream_of(signals: AsyncCollection[dict[str, Any]], ask_again_seconds: float) -> Stream:
    """The stream of this process on that collection."""
    key = (id(signals.database.client), signals.full_name)
    if key not in _streams:
        _streams[key] = Stream(signals, ask_again_seconds)
    return _streams[key]


async def within(seconds: float, asking: Coroutine[Any, Any, T]) -> T:
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
