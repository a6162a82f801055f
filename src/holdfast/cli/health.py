"""Health checks: a tiny server that says whether the runner is heard by its store.

``GET /health`` answers 200 while the runner's heartbeats are written, and 503 while they are not. It says nothing else.
"""

from __future__ import annotations

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from holdfast.embedded import EmbeddedRunner
from holdfast.errors import ConfigurationError


class Health:
    def __init__(self, runner: EmbeddedRunner, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in ("/health", "/"):
                    self.send_error(404)
                    return
                heard = runner.is_heard
                body = b"ok\n" if heard else b"the store does not hear this runner\n"
                self.send_response(200 if heard else 503)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "another program uses that port; choose another, or 0 for a free one" if taken else str(error)
            raise ConfigurationError(f"health checks cannot be answered at {host}:{port}: {why}.") from error
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="holdfast-health", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
