"""Server-sent events: a response that goes on, with a comment every 15 s so that proxies and clients know it lives.

What a client does is seen at once: a client that hangs up frees the reader behind it. A slow client slows its own
reader down, and nothing is gathered for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.web.problems import SAFE_HEADERS, too_many
from holdfast.web.requests import disconnected

HEARTBEAT_SECONDS = 15.0
MOST_STREAMS, MOST_OF_ONE = 1_000, 300  # in one process, and of one principal
_HEARTBEAT = b": \n\n"
_HEADERS = SAFE_HEADERS | {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}


class ServerEvent(NamedTuple):
    """An event. Without a name it is a `message`; its id is what a client sends as Last-Event-ID when it comes back."""

    data: str
    id: str = ""
    name: str = ""

    def encoded(self) -> bytes:
        lines = [f"id: {self.id}"] if self.id else []
        lines += [f"event: {self.name}"] if self.name else []
        lines += [f"data: {line}" for line in self.data.splitlines() or [""]]
        return "".join(f"{line}\n" for line in [*lines, ""]).encode()


Batches = AsyncGenerator[list[ServerEvent], None]


class OpenStreams(set["EventStreamResponse"]):
    """The streams that are being read; the live feeds of clients, too."""

    def admit(self, who: str) -> None:
        """Raise `Problem` if there are too many for another one of this principal. Make the response at once then:
        what is awaited in between may let others in.
        """
        if len(self) >= MOST_STREAMS:
            raise too_many(f"{MOST_STREAMS:,} streams and feeds of this process are being read")
        if sum(each.who == who for each in self) >= MOST_OF_ONE:
            raise too_many(f"{MOST_OF_ONE} streams and feeds of this process are being read by you")

    def topics_of(self, who: str) -> set[str]:
        """Return the topics of the live feed that a principal follows."""
        return {topic for each in self if each.who == who for topic in each.topics}

    def end(self) -> None:
        """End them: their readers come back, here or elsewhere, with their place."""
        for stream in tuple(self):
            stream.end()


class EventStreamResponse(Response):
    """Send batches of events as they come. The iterator is closed when the client hangs up, or after `end`; with
    `patience_seconds`, also when a client has taken nothing for so long; and after `life_seconds`: the client comes
    back, and its rights are looked at again.
    """

    def __init__(
        self,
        batches: Batches,
        streams: OpenStreams,
        *,
        patience_seconds: float | None = None,
        life_seconds: float | None = None,
        who: str = "",
        topics: Collection[str] = (),
    ) -> None:
        super().__init__(headers=_HEADERS)
        self.who, self.topics = who, topics
        del self.headers["content-length"]
        self._batches = batches
        self._streams = streams
        self._patience_seconds = patience_seconds
        self._life_seconds = life_seconds
        self._is_ended = asyncio.Event()

    def end(self) -> None:
        """End it, as a server that stops does: the client comes back with its place."""
        self._is_ended.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.add(self)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": _HEARTBEAT, "more_body": True})
            await _first_of(self._send(send), disconnected(receive), self._ended())
            with suppress(OSError):  # a time limit that is over is one
                async with asyncio.timeout(self._patience_seconds):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.discard(self)

    async def _ended(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._life_seconds):
                await self._is_ended.wait()

    async def _send(self, send: Send) -> None:
        following: asyncio.Task[list[ServerEvent]] | None = None
        try:
            while True:
                if following is None:
                    following = asyncio.create_task(_next(self._batches))
                await asyncio.wait([following], timeout=HEARTBEAT_SECONDS)
                if not following.done():
                    body = _HEARTBEAT
                else:
                    try:
                        body = b"".join(event.encoded() for event in following.result())
                    except StopAsyncIteration:
                        return
                    following = None
                async with asyncio.timeout(self._patience_seconds):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            if following is not None:
                following.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await following
            await self._batches.aclose()


async def _next(batches: Batches) -> list[ServerEvent]:
    return await anext(batches)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Return when the first of these is done, and not before the others have let go of everything."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            raise error
