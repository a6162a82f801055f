"""Responses of the World's server: documents, errors, and streams as frames that come while they are written.

A reader that is slow slows its own stream down, and nothing is gathered for it. Chunks that are there together are sent
together. Every 15 s a frame says that the server lives.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from holdfast.errors import StoreError, StoreReadOnly
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.telemetry.events import WebRequestFailed
from holdfast.world import wire
from holdfast.world.delivery import OWN_HEADER
from holdfast.world.errors import WORLD_ERROR, WorldError, bad_request
from holdfast.world.storage import WorldStorage

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

QUIET_SECONDS = 15.0  # between signs of life of a stream
CHUNK, ALIVE, CLOSED, ERROR = 0, 1, 2, 3
_LONGEST_WRITE = 64 * 1024  # bytes of chunks that are sent at once
_START = re.compile(r"-?[0-9]{1,15}")


class WorldResponse:
    """One response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, document: Any, status: int = 200) -> None:
        body = wire.encode(document)
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body))})
        await self._body(body, more=False)

    async def refuse(self, error: WorldError) -> None:
        """Answer with an error, unless an answer has begun."""
        if not self.status:
            with suppress(OSError):
                await self.send(wire.error_document(error), error.status)

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Begin an answer that goes on."""
        await self._start(200, {"content-type": "application/octet-stream", "x-accel-buffering": "no", **headers})
        await self.more(b"")

    async def more(self, body: bytes) -> None:
        await self._body(body, more=True)

    async def end(self) -> None:
        with suppress(OSError):
            await self._body(b"", more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        named = {**headers, OWN_HEADER: "1", "cache-control": "no-store", "x-content-type-options": "nosniff"}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def refusal_of(error: BaseException) -> WorldError:
    """Return what a client learns of an error. Of a defect it learns nothing but that there was one."""
    if isinstance(error, WorldError):
        return error
    if isinstance(error, StoreError):
        said = "it can only be read" if isinstance(error, StoreReadOnly) else f"{type(error).__name__}: {error}"
        return WorldError(WORLD_ERROR, 503, f"the store does not take this now: {said}")
    return WorldError(WORLD_ERROR, 500, "the server failed to answer; its log says why")


def start_of(scope: Scope) -> int:
    """Return the first index that a reader asks for. Raises `WorldError`."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    start = query.get("start", ["0"])
    if len(start) > 1 or not _START.fullmatch(start[0]) or set(query) - {"start"}:
        raise bad_request("start: expected a whole number")
    return int(start[0])


def frame(kind: int, content: bytes = b"") -> bytes:
    """Return a frame of a stream: its kind, its length and its content."""
    return bytes((kind,)) + len(content).to_bytes(4, "big") + content


class StreamResponses:
    """The streams that one server sends."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._open: set[asyncio.Event] = set()

    def end(self) -> None:
        """End all responses: their readers come back, here or elsewhere, with their place."""
        for ended in tuple(self._open):
            ended.set()

    async def send(self, where: tuple[str, str, int], receive: Receive, answer: WorldResponse) -> None:
        """Answer with the frames of a stream, until it is closed, the reader leaves or the server stops."""
        ended = asyncio.Event()
        self._open.add(ended)
        work = [asyncio.create_task(each) for each in (self._send(where, answer), _disconnected(receive), _set(ended))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(ended)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        sending = work[0]
        if not sending.cancelled() and (error := sending.exception()) is not None:
            if not answer.status:
                raise error
            if not isinstance(error, OSError):
                await self._refuse(error, answer)
        if answer.status:
            await answer.end()

    async def _refuse(self, error: BaseException, answer: WorldResponse) -> None:
        refused = refusal_of(error)
        if refused.status == 500:
            known = error if isinstance(error, Exception) else None
            self._runtime.telemetry.emit(WebRequestFailed("GET", "streams.read", repr(error), known))
        with suppress(OSError):
            await answer.more(frame(ERROR, wire.encode(wire.error_document(refused))))

    async def _send(self, where: tuple[str, str, int], answer: WorldResponse) -> None:
        run, name, start = where
        engine = await self._runtime.aready()
        first, chunks = await self._runtime.arun(_opened(engine, run, name, start))
        batches = _Batches(self._runtime, chunks)
        try:
            await answer.begin({"x-holdfast-start": str(first)})
            while True:
                batch = await batches.next(QUIET_SECONDS)
                if batch is None:
                    await answer.more(frame(ALIVE))
                    continue
                if batch:
                    await answer.more(b"".join(frame(CHUNK, chunk) for chunk in batch))
                if batches.is_over:
                    return await answer.more(frame(CLOSED))
        finally:
            await batches.close()


async def _opened(engine: Engine, run: str, name: str, start: int) -> tuple[int, AsyncIterator[bytes]]:
    return await engine.part(WorldStorage).streams_read(run_id=run, name=name, start=start)


class _Batches:
    """Fetches chunks on the engine's loop, those that are there together."""

    def __init__(self, runtime: AppRuntime, chunks: AsyncIterator[bytes]) -> None:
        self._runtime = runtime
        self._chunks = chunks
        self._fetching: asyncio.Task[list[bytes]] | None = None
        self._first: asyncio.Future[bytes] | None = None  # on the engine's loop
        self.is_over = False

    async def next(self, seconds: float) -> list[bytes] | None:
        """Return the next chunks; an empty list at the end, None if there are none yet."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._runtime.arun(self._fetch()))
        await asyncio.wait([self._fetching], timeout=seconds)
        if not self._fetching.done():
            return None
        done, self._fetching = self._fetching, None
        return done.result()

    async def _fetch(self) -> list[bytes]:
        found: list[bytes] = []
        size = 0
        try:
            while size < _LONGEST_WRITE:
                if self._first is None:
                    self._first = asyncio.ensure_future(anext(self._chunks))
                if found:
                    await asyncio.sleep(0)
                    if not self._first.done():
                        return found
                chunk = await asyncio.shield(self._first)
                self._first = None
                found.append(chunk)
                size += len(chunk)
        except StopAsyncIteration:
            self._first, self.is_over = None, True
        return found

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        await self._runtime.arun(self._let_go())

    async def _let_go(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if (close := getattr(self._chunks, "aclose", None)) is not None:
            await close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()
