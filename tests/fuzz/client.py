"""Requests to an ASGI app without a server between: any bytes, and a client that hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

App = Any
PATIENCE_SECONDS = 0.02  # for the first events of a stream; then the client hangs up
SLOW_SECONDS = 20.0  # no answer may take so long


class Sent(NamedTuple):
    """A request, as bytes."""

    method: str
    target: bytes  # the path and the query
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""


class Answer(NamedTuple):
    """A response; status 0 if the app sent none. `is_open`: it went on, and the client has hung up."""

    status: int
    headers: dict[str, list[str]]
    body: bytes
    is_open: bool = False

    @property
    def kind(self) -> str:
        """Return the media type."""
        return self.headers.get("content-type", [""])[0].partition(";")[0]


async def answered(app: App, sent: Sent) -> Answer:
    """Send a request and return what the app answers. Raises what the app raises: no app may."""
    path, _, query = sent.target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": sent.method,
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in sent.headers],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8090),
    }
    bodies, messages, gone, begun = [sent.body], list[dict[str, Any]](), asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)
        begun.set()

    async with asyncio.timeout(SLOW_SECONDS):
        work = asyncio.ensure_future(app(scope, receive, send))
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not work.done():
            await asyncio.wait([work], timeout=PATIENCE_SECONDS)
        is_open = not work.done()
        gone.set()
        await work
    return _answer(messages, is_open)


def _answer(messages: Sequence[dict[str, Any]], is_open: bool) -> Answer:
    if not messages:
        return Answer(0, {}, b"")
    headers: dict[str, list[str]] = {}
    for name, value in messages[0]["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    body = b"".join(each.get("body", b"") for each in messages[1:])
    return Answer(messages[0]["status"], headers, body, is_open)
