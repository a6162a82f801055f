"""The server of ``holdfast monitor``: uvicorn on a loopback address, or elsewhere with a token.

A signal stops it: no new connections, streams end (their readers come back with their place), and requests that are
under way have a few seconds. Its access log is off, since paths of webhooks are secrets; see `WebRequestServed`.
"""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from holdfast.access.rules import TokenRecord
from holdfast.access.tokens import AccessTokens
from holdfast.errors import ConfigurationError
from holdfast.metrics.exposition import refuse_without_library
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.telemetry.events import WebServing
from holdfast.web.asgi import ServedApp, WebApp
from holdfast.web.rules import is_loopback

GRACE_SECONDS = 5
HEAD_SECONDS = 10.0  # for a client to begin a request, and to send its head
MOST_WAITING = 500  # connections that have sent no head; of more, the oldest are closed


def serve(app: ServedApp, host: str, port: int, *, started: Callable[[str], object] = lambda address: None) -> None:
    """Serve an app until SIGINT or SIGTERM. `started` gets the address, once it is taken.

    Raises `ConfigurationError` for an address that cannot be taken, or that is open to others without a token, and
    `MissingExtra` if metrics are on and could not be written.
    """
    refuse_open_address(host, app.runtime)
    if app.runtime.settings.metrics:
        refuse_without_library()
    with listening(host, port, "the web app") as taken:
        address = address_in_words(host, taken.getsockname()[1])
        app.runtime.telemetry.emit(WebServing(address))
        serve_at(app, taken, started=lambda: started(address))


def serve_at(app: ServedApp, taken: socket.socket, *, started: Callable[[], object]) -> None:
    """Serve an app at an address that is taken, until SIGINT or SIGTERM. `started` is called before the first
    request is answered.
    """
    with _stop_on_signals():
        web = WebApp(app, is_local=is_loopback(taken.getsockname()[0]))
        config = uvicorn.Config(
            web,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client could name any address; those of proxy_address are believed by the app
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        started()
        _Server(config, web).run(sockets=[taken])


def refuse_open_address(host: str, runtime: AppRuntime) -> None:
    """Raise `ConfigurationError` if others reach this address, and they need no login."""
    settings = runtime.settings
    if is_loopback(host) or settings.api_token or (settings.proxy_address and settings.proxy_user_header):
        return
    if not runtime.run(_tokens(runtime)):
        raise ConfigurationError(
            f"--host {host} can be reached by others, and there is neither a token nor a proxy with a login, so they "
            "could read and change everything. Make a token: holdfast access token create NAME --role viewer; "
            "or set HOLDFAST_API_TOKEN, or proxy_address and proxy_user_header; or stay on 127.0.0.1. "
            "See docs/operations/access.md."
        )


async def _tokens(runtime: AppRuntime) -> Sequence[TokenRecord]:
    return await (await runtime.engine()).part(AccessTokens).list()


class WaitingConnections:
    """Bounds connections that wait for a request: in time, and in number. Clients that send nothing, or a head in small
    pieces, must not take all places. A connection whose client still reads an answer does not wait.
    """

    def __init__(self) -> None:
        self._since: dict[Any, tuple[Any, float]] = {}  # the last request of each, and since when the next is awaited

    def late(self, connections: Iterable[Any], now: float) -> list[Any]:
        """Return those that are to be closed."""
        last = {each: each.cycle for each in connections if not each.transport.get_write_buffer_size()}
        waiting = {each: cycle for each, cycle in last.items() if cycle is None or cycle.response_complete}
        before, self._since = self._since, {}
        for each, cycle in waiting.items():
            known = before.get(each)
            self._since[each] = known if known is not None and known[0] is cycle else (cycle, now)
        oldest = sorted(self._since, key=lambda each: self._since[each][1])
        spare = len(oldest) - MOST_WAITING
        return [each for n, each in enumerate(oldest) if n < spare or now - self._since[each][1] >= HEAD_SECONDS]


class _Server(uvicorn.Server):
    """Ends the streams of the app first: their readers would hold up a stop."""

    def __init__(self, config: uvicorn.Config, web: WebApp) -> None:
        super().__init__(config)
        self._web = web
        self._waiting = WaitingConnections()

    async def on_tick(self, counter: int) -> bool:
        """Close what waits for too long. uvicorn calls this ten times a second, and has no such bound."""
        for each in self._waiting.late(tuple(self.server_state.connections), self._web.monotonic()):
            each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._web.streams.end()
        await super().shutdown(sockets)


@contextmanager
def listening(host: str, port: int, what: str) -> Iterator[socket.socket]:
    """Take the address before anything is said about it. `what` is to be served there."""
    try:
        (family, _, _, _, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        taken = socket.create_server(where[:2], family=family)
        # Connections inherit it. asyncio does it for sockets that name their protocol, and these do not.
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError, UnicodeError) as error:
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another program uses that port; choose another, or 0 for a free one" if is_taken else str(error)
        raise ConfigurationError(f"{what} cannot be served at {host}:{port}: {why}.") from error
    with taken:
        yield taken


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Let uvicorn's own handlers be the only effect of a signal: after its stop it raises the signal once more."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def address_in_words(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
