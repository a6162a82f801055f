"""Applications as deliveries meet them: over real HTTP, and without a network on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from holdfast.world.http_client import HttpAddress, NoConnection, Reply


@dataclasses.dataclass
class Delivered:
    """A request that an application got."""

    at: float
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def message(self) -> Any:
        return json.loads(self.body)

    @property
    def attempt(self) -> int:
        return int(self.headers["x-vqs-message-attempt"])


Answers = Callable[[Delivered], tuple[int, bytes]]


def taken(delivered: Delivered) -> tuple[int, bytes]:
    return 200, b""


class OnPaper:
    """An application without a network. `answer` decides; None: nothing listens there."""

    def __init__(self, now: Callable[[], float], answer: Answers | None = taken) -> None:
        self._now = now
        self.answer = answer
        self.seconds = 0.0  # that an answer takes
        self.got: list[Delivered] = []
        self.refused = 0

    async def post(
        self, address: HttpAddress, path: str, headers: Mapping[str, str], body: bytes, *, seconds: float
    ) -> Reply:
        if self.answer is None:
            self.refused += 1
            raise NoConnection(f"no connection to {address}")
        self.got.append(delivered := Delivered(self._now(), f"{address}{path}", headers, body))
        status, answered = self.answer(delivered)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return Reply(status, {}, answered)

    @property
    def times(self) -> list[float]:
        return [each.at for each in self.got]


class Application:
    """An application on a free port of this machine, until the end of the block."""

    def __init__(self, answer: Answers = taken) -> None:
        self.got: list[Delivered] = []
        self.answer = answer
        ours = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                delivered = Delivered(0.0, self.path, headers, body)
                ours.got.append(delivered)
                status, answered = ours.answer(delivered)
                with contextlib.suppress(OSError):  # the server is gone: a test has killed it
                    self.send_response(status)
                    self.send_header("content-length", str(len(answered)))
                    self.end_headers()
                    self.wfile.write(answered)
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
