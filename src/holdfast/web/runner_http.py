"""The small server of a runner: `/health/live`, `/health/ready`, `/metrics`; and `/health`, which says why not.

It needs no library but that of `/metrics`. It answers in threads of its own: also when the engine's loop hangs, and
while a runner still waits for its store.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from holdfast.errors import ConfigurationError
from holdfast.fleet.embedded import EmbeddedRunner
from holdfast.metrics.exposition import refuse_without_library
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.settings import Settings
from holdfast.web.health import PATHS, HealthAnswer, HealthChecks
from holdfast.web.rules import is_loopback

_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_SECONDS = 10  # for a client to send its request, and to take the answer


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
            kind = type("_Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
            self._server: ThreadingHTTPServer = kind(where[:2], _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "another program uses that port; choose another, or 0 for a free one" if taken else str(error)
            raise ConfigurationError(f"health checks cannot be answered at {host}:{port}: {why}.") from error
        self._host = host
        is_local = is_loopback(str(self._server.server_address[0]))
        checks = HealthChecks(
            runtime,
            is_local=is_local,
            is_ready=lambda: runner.is_connected,
            heartbeat_age=lambda: runner.heartbeat_age,
        )
        vars(self._server).update(checks=checks, runner=runner)

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


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in PATHS:
            checks: HealthChecks = vars(self.server)["checks"]
            self._send(asyncio.run(checks.answer("GET", path, _Lower(self.headers.items()))))
        elif path in ("/health", "/"):
            self._send(_with_reason(vars(self.server)["runner"]))
        else:
            self.send_error(404)

    def _send(self, answer: HealthAnswer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Lower(dict[str, str]):
    """Headers by their names in small letters."""

    def __init__(self, items: list[tuple[str, str]]) -> None:
        super().__init__((name.lower(), value) for name, value in items)


def _with_reason(runner: EmbeddedRunner) -> HealthAnswer:
    if runner.is_connected:
        return HealthAnswer(200, b"ok\n")
    why = runner.why_disconnected
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
