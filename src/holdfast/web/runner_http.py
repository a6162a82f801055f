"""The small server of a runner: `/health/live`, `/health/ready`, `/metrics`; and `/health`, which says why not to
programs of this machine and to clients with the token of the metrics.

It needs no library but that of `/metrics`. It answers in threads of its own: also when the engine's loop hangs, and
while a runner still waits for its store.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from holdfast.errors import ConfigurationError
from holdfast.fleet.embedded import EmbeddedRunner
from holdfast.metrics.exposition import refuse_without_library
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.settings import Settings
from holdfast.web.health import PATHS, HealthAnswer, HealthChecks, refuse_scrape
from holdfast.web.rules import is_loopback, names_this_machine

_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_SECONDS = 10  # for a client to send its request, and to take the answer
MOST_CONNECTIONS = 16  # that are served at once, each by a thread
_WAIT_SECONDS = 0.1  # for a place, before the oldest connection is cut


def address_of(settings: Settings) -> tuple[str, int] | None:
    """Return the address in the setting runner_http; None without one. Raises `ConfigurationError`."""
    if not settings.runner_http:
        return None
    found = _PLACE.fullmatch(settings.runner_http)
    if found is None:
        raise ConfigurationError(
            f"runner_http = {settings.runner_http!r:.80} is no address: it is a host and a port, such as 127.0.0.1:9000"
        )
    return found["host"].strip("[]"), int(found["port"])


class RunnerHttp:
    """Answer for a runner, inside of ``with``. Raises `ConfigurationError`, `MissingExtra`."""

    def __init__(self, runtime: AppRuntime, runner: EmbeddedRunner, host: str, port: int) -> None:
        _refuse_open(runtime.settings, host)
        try:
            (family, _, _, _, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            kind = type("_Server", (_BoundedServer,), {"address_family": family})
            self._server: _BoundedServer = kind(where[:2], _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "another program uses that port; choose another, or 0 for a free one" if taken else str(error)
            raise ConfigurationError(f"health checks cannot be answered at {host}:{port}: {why}.") from error
        self._host = host
        is_local = is_loopback(str(self._server.server_address[0]))
        settings = runtime.settings

        def may_know(headers: Mapping[str, str]) -> bool:
            token = settings.metrics_token
            is_near = is_local and names_this_machine(headers.get("host", ""))
            return is_near or (bool(token) and refuse_scrape(headers, token=token, is_local=is_local) is None)

        checks = HealthChecks(
            runtime,
            is_local=is_local,
            is_ready=lambda: runner.is_connected,
            heartbeat_age=lambda: runner.heartbeat_age,
        )
        vars(self._server).update(checks=checks, runner=runner, may_know=may_know)

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="holdfast-health", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    """Serve a bounded number of connections at once. Another one waits a moment; then the oldest is cut, so that
    clients that send nothing do not keep a probe out.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: dict[Any, None] = {}  # oldest first
        self._is_stopped = False
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._places.acquire(timeout=_WAIT_SECONDS):
            if self._is_stopped:
                return self.shutdown_request(request)
            oldest = next(iter(tuple(self._open)), None)
            if oldest is not None:
                self._open.pop(oldest, None)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def _let_go(self, request: Any) -> None:
        self._open.pop(request, None)
        self._places.release()

    def shutdown(self) -> None:
        self._is_stopped = True
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        path, headers = self.path.partition("?")[0], _Lower(self.headers.items())
        if path in PATHS:
            checks: HealthChecks = vars(self.server)["checks"]
            self._send(asyncio.run(checks.answer("GET", path, headers)))
        elif path in ("/health", "/"):
            self._send(_health_of(vars(self.server)["runner"], tells=vars(self.server)["may_know"](headers)))
        else:
            self._send(HealthAnswer(404, b"there is nothing at this address\n"))

    do_HEAD = do_GET

    def _send(self, answer: HealthAnswer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Lower(dict[str, str]):
    """Headers by their names in small letters."""

    def __init__(self, items: list[tuple[str, str]]) -> None:
        super().__init__((name.lower(), value) for name, value in items)


def _health_of(runner: EmbeddedRunner, *, tells: bool) -> HealthAnswer:
    """Return whether the runner is connected. The store's error may name hosts and users."""
    if runner.is_connected:
        return HealthAnswer(200, b"ok\n")
    why = runner.why_disconnected if tells else "the log of the runner says why"
    text = f"the store does not answer the heartbeats of this runner{': ' if why else ''}{why}\n"
    return HealthAnswer(503, text.encode(errors="backslashreplace"))


def _refuse_open(settings: Settings, host: str) -> None:
    """Raise `ConfigurationError` if others could read the metrics, and `MissingExtra` without the library."""
    if not settings.metrics:
        return
    refuse_without_library()
    if not settings.metrics_token and not is_loopback(host):
        raise ConfigurationError(
            f"{host} can be reached by others, and the setting metrics_token is empty, so every client could "
            "read the metrics. Set HOLDFAST_METRICS_TOKEN to 16 characters or more, such as the output of "
            "'openssl rand -hex 32'; or stay on 127.0.0.1."
        )
