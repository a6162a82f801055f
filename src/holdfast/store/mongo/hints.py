"""Hints between processes by a change stream on a tiny collection.

Each process has one document in `holdfast_signals`. To send hints is to write them into it, with majority (a change
stream shows only what the majority has, and a weaker write would be shown about 95 ms later, measured); every other
process sees the write in its change stream. One document per process means that senders never collide, and the
collection stays as small as the fleet.

Hints are coalesced: the first goes out at once, and while it is being written, and for a short moment after, the
following ones gather. Where there is no change stream (a standalone, a role that may not, a setting), the channel
says that it is not `alive`, and those who wait look more often instead. When a stream breaks, it is taken up again
after its last event, or anew if that is too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure, PyMongoError

from holdfast.lifecycle.records import Hint
from holdfast.store.contract import Observe
from holdfast.store.mongo.retry import is_transient

_QUICK_SECONDS, _GATHER_SECONDS = 0.002, 0.02
_TRUST = 8  # polling intervals: an open stream is reliable, and an idle fleet should cost next to nothing
_AWAIT_MILLISECONDS = 10_000
_MOST_SUBJECTS = 500  # of one kind in one write; beyond that a hint says: anything
_LAST_WORDS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_NO_CHANGE_STREAMS = frozenset(
    {40573, 40324, 13, 20, 303, 8000}
)  # standalone, unknown stage, unauthorised, not offered


class StreamHints:
    """See `holdfast.lifecycle.records.HintChannel`."""

    def __init__(
        self, signals: AsyncCollection[dict[str, Any]], process: str, *, use_change_streams: bool, observe: Observe
    ) -> None:
        self._signals = signals
        self._process = process
        self._use = use_change_streams
        self._observe = observe
        self._receivers: dict[str, Callable[[Hint], None]] = {}
        self._waiting: dict[str, Hint] = {}
        self._sent = 0
        self._closing = False
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._token: Any = None
        self._pause = _FIRST_PAUSE_SECONDS  # before the stream is taken up again; grows until something arrives
        self.trust = 0

    # --- sending

    def send(self, hints: Sequence[Hint]) -> None:
        if not self._use:
            return  # nobody could hear it
        for hint in hints:
            before = self._waiting.get(hint.kind)
            self._waiting[hint.kind] = hint if before is None else before.joined(hint, _MOST_SUBJECTS)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        pause = _QUICK_SECONDS
        while self._waiting:
            hints, self._waiting = list(self._waiting.values()), {}
            body = [{"kind": hint.kind, "subjects": list(hint.subjects), "count": hint.count} for hint in hints]
            self._sent += 1
            # Replaced, not updated: an update that sets a field to what it was is left out of the change event.
            document = {"hints": body, "at": dt.datetime.now(dt.UTC), "n": self._sent}
            with contextlib.suppress(PyMongoError):  # a lost hint costs latency, never work
                await self._signals.replace_one({"_id": self._process}, document, upsert=True)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _GATHER_SECONDS)  # the more there is to tell, the more of it goes into one write

    # --- listening

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        self._receivers[kind] = receive
        if self._use and self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        while not self._closing:
            try:
                await self._follow()
            except OperationFailure as error:
                if error.code in _NO_CHANGE_STREAMS:
                    self._observe("no_change_streams", {"why": str(error)[:200]})
                    return
                self._token = None  # most likely it has left the log; begin anew, and let everybody look once
                self._broken(error)
            except PyMongoError as error:
                self._broken(error)
                if not is_transient(error):
                    self._token = None
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _broken(self, error: PyMongoError) -> None:
        self.trust = 0
        if self._closing:
            return
        self._observe("change_stream_broken", {"why": str(error)[:200]})
        self._everybody_looks()

    async def _follow(self) -> None:
        match = [{"$match": {"operationType": {"$in": ["insert", "replace"]}}}]
        stream = await self._signals.watch(match, resume_after=self._token, max_await_time_ms=_AWAIT_MILLISECONDS)
        async with stream:
            self.trust = _TRUST
            self._observe("change_stream_open", {})
            self._everybody_looks()  # something may have happened before it was open
            async for event in stream:
                self._token, self._pause = stream.resume_token, _FIRST_PAUSE_SECONDS
                self._hear(event)

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
        for kind, receive in self._receivers.items():
            receive(Hint(kind, ()))

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
