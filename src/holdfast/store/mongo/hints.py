"""Hints between processes by a change stream on a tiny collection.

Each process has one document in `holdfast_signals`. To send hints is to write them into it, with majority (a change
stream shows only what the majority has, and a weaker write would be shown about 95 ms later, measured); every other
process sees the write in its change stream. One document per process means that senders never collide, and the
collection stays as small as the fleet.

Hints are coalesced: the first goes out at once, and while it is being written, and for a short moment after, the
following ones gather. They are best effort, and the one write that is not asked again by `Retry`: one that is not
carried out within a few seconds is given up, counted and reported; it costs latency, never work.
To listen is to join the one stream of this process (see `stream`).
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bson.errors import BSONError
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.lifecycle.records import READY, Hint
from holdfast.store.contract import Observe
from holdfast.store.mongo.retry import text_of
from holdfast.store.mongo.stream import ASK_AGAIN_SECONDS, LAST_WORDS_SECONDS, Stream, stream_of, within

_QUICK_SECONDS, _GATHER_SECONDS = 0.002, 0.02
_SEND_SECONDS = 5.0
_MOST_SUBJECTS = 500  # of one kind in one write; beyond that a hint says: anything


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
        on_hint: Callable[[Hint], None] = lambda hint: None,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._signals = signals
        self._process = process
        self._use = use_change_streams
        self.observe = observe
        self._can_be_heard = can_be_heard
        self._on_hint = on_hint  # called with every hint, those of this process too, before anybody acts on it
        self._ask_again = ask_again_seconds
        self._receivers: dict[str, Callable[[Hint], None]] = {}
        self._waiting: dict[str, Hint] = {}
        self._sent = 0
        self.given_up = 0  # writes of hints that were not carried out
        self._sender: asyncio.Task[None] | None = None
        self._stream: Stream | None = None

    # --- sending

    def send(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            self._on_hint(hint)
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
                await within(_SEND_SECONDS, self._send(hints))
            except Exception as error:  # a lost hint costs latency, never work; and those that gather are to be sent
                self.given_up += 1
                self.observe("hints_not_sent", {"why": text_of(error), "so_far": self.given_up})
            await asyncio.sleep(pause)
            pause = min(pause * 2, _GATHER_SECONDS)  # the more there is to tell, the more of it goes into one write

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

    def hear(self, event: Mapping[str, Any]) -> None:
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
                self.tell(hint)

    def tell(self, hint: Hint) -> None:
        """Tell whoever listens in this process."""
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
        """Send what is left to send, and end. Nobody waits for long: the driver may not hear that it is to end."""
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
