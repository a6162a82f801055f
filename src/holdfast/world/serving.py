"""The server of ``holdfast world serve``: uvicorn, on the engine's own loop.

There it needs no hand-over between threads for each call. A signal, the end of a parent process, or `stop` ends it: no
new connections, streams end (their readers come back with their place), deliveries under way have 30 s and are released
after that. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from holdfast.errors import ConfigurationError
from holdfast.runtime.hints import first_of
from holdfast.settings import Settings
from holdfast.telemetry.events import WebServing
from holdfast.web.rules import is_loopback
from holdfast.web.serving import address_in_words, listening
from holdfast.world.asgi import AppWithWorld, WorldApp
from holdfast.world.deliveries import DRAIN_SECONDS
from holdfast.world.delivery import Addresses

GRACE_SECONDS = 5  # for requests under way
_KEEP_ALIVE_SECONDS = 75


class WorldServer:
    """One server: `serve` takes the address, and returns when it has stopped."""

    def __init__(self, app: AppWithWorld, host: str, port: int, *, is_child: bool = False) -> None:
        self._runtime = app.runtime
        refuse_open_address(host, self._runtime.settings)
        self._app, self._host, self._port = app, host, port
        self._is_child = is_child  # of its only client: it delivers nothing before `start`, and then to any address
        self._stopping: asyncio.Event | None = None
        self._is_asked = self._is_hurried = False
        self._hurry: Callable[[], None] = lambda: None

    def serve(self, started: Callable[[str], object] = lambda address: None) -> None:
        """Serve until `stop`. `started` gets the address, once messages are delivered and requests answered.

        Raises `ConfigurationError` for an address that cannot be taken, and what keeps deliveries from starting.
        """
        with listening(self._host, self._port, "the World") as taken:
            self._runtime.ready()
            self._runtime.run(self._serve(taken, started))

    async def _serve(self, taken: socket.socket, started: Callable[[str], object]) -> None:
        where = taken.getsockname()
        world = WorldApp(self._app, is_local=is_loopback(where[0]), waits_for_start=self._is_child)
        server = uvicorn.Server(
            uvicorn.Config(
                world,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._stopping, deliveries = asyncio.Event(), world.deliveries
        (await self._runtime.engine()).part(Addresses).allows_any = self._is_child
        if not self._is_child:
            await world.start()
        # It sets no handlers of signals, since this is not the main thread.
        serving = asyncio.create_task(server.serve(sockets=[taken]))
        delivering = asyncio.create_task(deliveries.ended())
        address = address_in_words(self._host, where[1])
        self._runtime.telemetry.emit(WebServing(address))
        started(address)
        if self._is_asked:
            self._stopping.set()
        try:
            await first_of(serving, delivering, self._stopping)
            # First the deliveries: what an application does for them may call this server until it is done.
            self._hurry = lambda: deliveries.stop(hurry=True)
            deliveries.stop(hurry=self._is_hurried)
            await asyncio.wait({delivering}, timeout=DRAIN_SECONDS + GRACE_SECONDS)
        finally:
            world.end_streams()
            server.should_exit = True
            deliveries.stop(hurry=True)
            await asyncio.wait({serving, delivering})
        serving.result()
        delivering.result()

    def stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop, from any thread or signal handler; `hurry`: deliveries under way are released at once."""
        self._is_asked, self._is_hurried = True, self._is_hurried or hurry
        if self._stopping is not None:
            self._runtime.opened().bridge.call(self._ask)

    def _ask(self) -> None:
        assert self._stopping is not None
        self._stopping.set()
        if self._is_hurried:
            self._hurry()


def refuse_open_address(host: str, settings: Settings) -> None:
    """Raise `ConfigurationError` if others reach this address, and no token is set."""
    if not is_loopback(host) and not settings.world_token:
        raise ConfigurationError(
            f"--host {host} can be reached by others, and the setting world_token is empty, so anybody could run and "
            "read everything. Set HOLDFAST_WORLD_TOKEN to 16 characters or more, such as the output of "
            "'openssl rand -hex 32'; or stay on 127.0.0.1."
        )


@contextmanager
def stop_on_signals(stop: Callable[[bool], Any]) -> Iterator[None]:
    """Call `stop` for SIGINT and SIGTERM; from the second on with True, to hurry."""
    count = 0

    def asked(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        stop(count > 1)

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
