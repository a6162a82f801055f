"""The World over HTTP: an ASGI application, for `holdfast world serve` or to mount. It needs no library.

One request is one call of the protocol (docs/reference/world-http.md). Deliveries begin with the first request that is
allowed, or when the server starts the application, and end with it, or when the app is closed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

from holdfast._version import __version__
from holdfast.errors import StoreError, StoreReadOnly
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.telemetry.events import WebRequestFailed, WebRequestServed
from holdfast.web.rules import is_loopback, is_same, names_this_machine
from holdfast.world import wire
from holdfast.world.deliveries import Deliveries
from holdfast.world.delivery import OWN_HEADER
from holdfast.world.errors import TOO_LARGE, UNAUTHORIZED, WORLD_ERROR, WorldError, bad_request
from holdfast.world.http_client import Address, address_of
from holdfast.world.methods import METHODS, keywords_of
from holdfast.world.rules import NEWEST_SPEC, OLDEST_SPEC
from holdfast.world.storage import WorldStorage

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PREFIX = "/v1"
BODY_SECONDS = 60.0  # for a client to send a body
QUIET_SECONDS = 15.0  # between signs of life of a stream
CHUNK, ALIVE, CLOSED, ERROR = 0, 1, 2, 3
_STREAM = re.compile(r"/v1/streams/(?P<run>[^/]+)/(?P<name>[^/]+)")
_START = re.compile(r"-?[0-9]{1,15}")
_BEARER = re.compile(r"(?i)bearer +(?P<token>[\x21-\x7e]+) *")
_LONGEST_WRITE = 64 * 1024  # bytes of chunks that are sent at once


class ServedApp(Protocol):
    """An app, as far as the World knows it."""

    @property
    def runtime(self) -> AppRuntime: ...


class WorldApp:
    """Serve the World of one app. `is_local` is for the own server on a loopback address: there, programs of this
    machine need no token. With `waits_for_start`, nothing is delivered before the first call of `start`.
    """

    def __init__(self, app: ServedApp, *, is_local: bool = False, waits_for_start: bool = False) -> None:
        self._runtime = app.runtime
        self._is_local = is_local
        self._waits_for_start = waits_for_start
        self._starting: asyncio.Lock | None = None
        self.deliveries = Deliveries(app.runtime)
        self._streams: set[asyncio.Event] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        began, route = self._runtime.clock.monotonic(), "nothing"
        answer = _Answer(send)
        try:
            route = await self._answer(scope, receive, answer)
        except _Gone:
            return
        except Exception as error:
            refused = self._refusal(error)
            if refused is None or refused.status == 500:
                self._runtime.telemetry.emit(WebRequestFailed(scope["method"], route, repr(error), error))
            refused = refused or WorldError(WORLD_ERROR, 500, "the server failed to answer; its log says why")
            await answer.refuse(refused)
        finally:
            if answer.status and self._runtime.telemetry.wants(WebRequestServed):
                seconds = self._runtime.clock.monotonic() - began
                self._runtime.telemetry.emit(WebRequestServed(scope["method"], route, answer.status, seconds * 1000))

    # --- life

    async def start(self) -> None:
        """Begin to deliver messages, unless that is done. From any loop."""
        if self.deliveries.is_running:
            return
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if not self.deliveries.is_running:
                await self._runtime.arun(self.deliveries.start())

    async def _start_by(self, method: str) -> None:
        if not self._waits_for_start or method == "start":
            await self.start()

    async def stop(self) -> None:
        """End streams, and deliveries when those under way have had their time."""
        self.end_streams()
        await self._runtime.arun(self.deliveries.stopped())

    def end_streams(self) -> None:
        """End streams that are read: their readers come back, here or elsewhere, with their place."""
        for ended in tuple(self._streams):
            ended.set()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Follow a server that runs this application alone."""
        while True:
            message = await receive()
            try:
                await (self.start() if message["type"] == "lifespan.startup" else self.stop())
            except Exception as error:
                await send({"type": f"{message['type']}.failed", "message": str(error)})
                return
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    # --- requests

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> str:
        """Answer a request; return the name of its route, which has nothing of a user in it."""
        method, path = scope["method"], _path_of(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path == f"{PREFIX}/health" and method == "GET":
            versions = list(range(OLDEST_SPEC, NEWEST_SPEC + 1))
            await answer.send({"name": "holdfast", "version": __version__, "specVersions": versions})
            return "health"
        self._refuse_stranger(headers)
        if (found := _STREAM.fullmatch(path)) is not None and method == "GET":
            await self._start_by("streams.read")
            await self._read_stream(unquote(found["run"]), unquote(found["name"]), scope, receive, answer)
            return "streams.read"
        name = path.removeprefix(f"{PREFIX}/")
        if method != "POST" or name not in METHODS:
            raise WorldError(
                WORLD_ERROR, 400, f"there is no call at this address: POST {PREFIX}/METHOD, or see /health"
            )
        given = keywords_of(METHODS[name], wire.decode(await self._body(headers, receive)))
        if (base_url := given.get("base_url")) is not None:
            refuse_itself(base_url, scope, headers)
        await self._start_by(name)
        answered = await self._runtime.arun(self._called(name, given))
        await answer.send(answered)
        return name

    async def _called(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return await METHODS[name].call(await self._runtime.engine(), given)

    def _refuse_stranger(self, headers: Mapping[str, str]) -> None:
        """Raise `WorldError` (401) unless the request may be answered. Without a token, only programs of this machine
        are, and no page of a site in its browser.
        """
        if token := self._runtime.settings.world_token:
            given = _BEARER.fullmatch(headers.get("authorization", ""))
            if given is None or not is_same(given["token"], token):
                raise WorldError(
                    UNAUTHORIZED, 401, "give the token of the setting world_token: Authorization: Bearer …"
                )
        elif not self._is_local:
            raise WorldError(UNAUTHORIZED, 401, "set world_token (HOLDFAST_WORLD_TOKEN): others can reach this server")
        elif not names_this_machine(headers.get("host", "")) or "origin" in headers or "sec-fetch-site" in headers:
            raise WorldError(UNAUTHORIZED, 401, "without a world_token, only programs of this machine are answered")

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        limit = self._runtime.settings.world_body_limit
        too_large = WorldError(TOO_LARGE, 413, f"a body may have up to {limit:,} bytes (world_body_limit)")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:18]) > limit:
            raise too_large
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise bad_request(f"the body did not come within {BODY_SECONDS:g} s") from None

    def _refusal(self, error: Exception) -> WorldError | None:
        """Return what a client learns of an error; None for one that is a defect."""
        if isinstance(error, WorldError):
            return error
        if isinstance(error, StoreError):
            said = "it can only be read" if isinstance(error, StoreReadOnly) else f"{type(error).__name__}: {error}"
            return WorldError(WORLD_ERROR, 503, f"the store does not take this now: {said}")
        return None

    # --- streams

    async def _read_stream(self, run: str, name: str, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Answer with the frames of a stream, until it is closed, the reader leaves or the server stops."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        start = query.get("start", ["0"])[0]
        if not _START.fullmatch(start) or set(query) - {"start"}:
            raise bad_request("start: expected a whole number")
        storage = (await self._runtime.aready()).part(WorldStorage)
        first, chunks = await self._runtime.arun(storage.streams_read(run_id=run, name=name, start=int(start)))
        ended = asyncio.Event()
        self._streams.add(ended)
        await answer.begin({"x-holdfast-start": str(first)})
        work = [
            asyncio.create_task(each)
            for each in (self._send_frames(chunks, answer), _disconnected(receive), _set(ended))
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(ended)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            if (close := getattr(chunks, "aclose", None)) is not None:
                await self._runtime.arun(close())
        sending = work[0]
        if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, OSError):
            refused = self._refusal(error) if isinstance(error, Exception) else None
            if refused is None:
                self._runtime.telemetry.emit(WebRequestFailed("GET", "streams.read", repr(error), error))
                refused = WorldError(WORLD_ERROR, 500, "the server failed to read the stream; its log says why")
            await answer.more(frame(ERROR, wire.encode(wire.error_document(refused))))
        await answer.end()

    async def _send_frames(self, chunks: AsyncIterator[bytes], answer: _Answer) -> None:
        batches = _Batches(self._runtime, chunks)
        try:
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


class _Batches:
    """Fetches chunks on the engine's loop, those that are there together."""

    def __init__(self, runtime: AppRuntime, chunks: AsyncIterator[bytes]) -> None:
        self._runtime = runtime
        self._chunks = chunks
        self._next: asyncio.Task[list[bytes]] | None = None
        self._first: asyncio.Task[bytes] | None = None  # on the engine's loop
        self.is_over = False

    async def next(self, seconds: float) -> list[bytes] | None:
        """Return the next chunks; an empty list at the end, None if there are none yet."""
        if self._next is None:
            self._next = asyncio.create_task(self._runtime.arun(self._fetch()))
        await asyncio.wait([self._next], timeout=seconds)
        if not self._next.done():
            return None
        done, self._next = self._next, None
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
            self.is_over = True
        return found

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._runtime.arun(self._let_go())

    async def _let_go(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)


def frame(kind: int, content: bytes = b"") -> bytes:
    """Return a frame of a stream: its kind, its length and its content."""
    return bytes((kind,)) + len(content).to_bytes(4, "big") + content


class _Gone(Exception):
    """The client has left."""


class _Answer:
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def _path_of(scope: Scope) -> str:
    """Return the path below the place where this application is mounted, as it was sent."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else str(scope["path"])
    root = str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def refuse_itself(base_url: Any, scope: Scope, headers: Mapping[str, str]) -> None:
    """Raise `WorldError` (400) if a base URL leads to the server that it is sent to."""
    try:
        address = address_of(base_url)
    except ValueError as error:
        raise bad_request(f"baseUrl: {error}") from None
    server = scope.get("server") or ("", None)
    asked = _asked(headers.get("host", ""))
    is_own_port = address.port == server[1]
    is_here = is_own_port and (is_loopback(address.host) or address.host == str(server[0]).lower())
    if is_here or (asked is not None and (asked.host, asked.port) == (address.host, address.port)):
        raise bad_request(f"baseUrl: {address} is this server itself; give the address of the application")


def _asked(authority: str) -> Address | None:
    try:
        return address_of(f"http://{authority}")
    except ValueError:
        return None
