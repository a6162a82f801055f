"""The World over HTTP: an ASGI application, for `holdfast world serve` or to mount. It needs no library.

One request is one call of the protocol (docs/reference/world-http.md). Deliveries begin with the first request that is
allowed, or when the server starts the application, and end with it, or when the app is closed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import unquote

from holdfast._version import __version__
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.telemetry.events import WebRequestFailed, WebRequestServed
from holdfast.web.rules import is_loopback, is_same, names_this_machine
from holdfast.world import wire
from holdfast.world.deliveries import Deliveries
from holdfast.world.errors import TOO_LARGE, UNAUTHORIZED, WORLD_ERROR, WorldError, bad_request
from holdfast.world.http_client import HttpAddress, address_of
from holdfast.world.methods import METHODS, keywords_of
from holdfast.world.reading import Receive, Scope, Send, StreamResponses, WorldResponse, refusal_of, start_of
from holdfast.world.rules import NEWEST_SPEC, OLDEST_SPEC

PREFIX = "/v1"
BODY_SECONDS = 60.0  # for a client to send a body
_STREAM = re.compile(r"/v1/streams/(?P<run>[^/]+)/(?P<name>[^/]+)")
_BEARER = re.compile(r"(?i)bearer +(?P<token>[\x21-\x7e]+) *")


class AppWithWorld(Protocol):
    """An app, as far as the World knows it."""

    @property
    def runtime(self) -> AppRuntime: ...


class WorldApp:
    """Serve the World of one app. `is_local` is for the own server on a loopback address: there, programs of this
    machine need no token. With `waits_for_start`, nothing is delivered before the first call of `start`.
    """

    def __init__(self, app: AppWithWorld, *, is_local: bool = False, waits_for_start: bool = False) -> None:
        self._runtime = app.runtime
        self._is_local = is_local
        self._waits_for_start = waits_for_start
        self._starting: asyncio.Lock | None = None
        self.deliveries = Deliveries(app.runtime)
        self._reading = StreamResponses(app.runtime)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        began, route = self._runtime.clock.monotonic(), "nothing"
        answer = WorldResponse(send)
        try:
            route = await self._answer(scope, receive, answer)
        except _Gone:
            return
        except Exception as error:
            refused = refusal_of(error)
            if refused.status == 500:
                self._runtime.telemetry.emit(WebRequestFailed(scope["method"], route, repr(error), error))
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
        self._reading.end()

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

    async def _answer(self, scope: Scope, receive: Receive, answer: WorldResponse) -> str:
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
            where = unquote(found["run"]), unquote(found["name"]), start_of(scope)
            await self._reading.send(where, receive, answer)
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
        return await METHODS[name].call(self._runtime, await self._runtime.engine(), given)

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


class _Gone(Exception):
    """The client has left."""


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


def _asked(authority: str) -> HttpAddress | None:
    try:
        return address_of(f"http://{authority}")
    except ValueError:
        return None
