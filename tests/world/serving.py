"""A server of the World inside the test's process, and a client that speaks its protocol."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.support.patience import patient

from holdfast import App
from holdfast.world import wire
from holdfast.world.errors import WorldError
from holdfast.world.serving import WorldServer

_numbers = itertools.count(1)


class Client:
    """Calls a server by its address, each call on a connection of its own."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url, self._token = url, token

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patient(30))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._token:
            named = {"authorization": f"Bearer {self._token}"} | named
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def call(self, method: str, **fields: Any) -> Any:
        """Return the answer of a method. Raises `WorldError`."""
        status, _, body = self.raw("POST", f"/v1/{method}", wire.encode(fields, keeps_null=True))
        answer = wire.decode(body)
        if status == 200:
            return answer
        error = answer["error"]
        assert error["status"] == status
        raise WorldError(error["name"], status, error["message"], error.get("retryAfter"))

    def create(self, run: str | None, kind: str, call: str | None = None, **data: Any) -> Any:
        event: dict[str, Any] = {"eventType": kind, "specVersion": 5, "eventData": data}
        event |= {} if call is None else {"correlationId": call}
        return self.call("events.create", runId=run, event=event, operationId=f"op{next(_numbers)}")

    def run(self, name: str = "workflow//./shop.ts//checkout") -> str:
        made = self.create(None, "run_created", deploymentId="dpl", workflowName=name, input=b"devl[[1],1]")
        return str(made["run"]["runId"])

    def queue(self, run: str, **fields: Any) -> str:
        given = {"queueName": "__wkf_workflow_checkout", "message": {"runId": run}, "operationId": f"q{next(_numbers)}"}
        return str(self.call("queue", **given | fields)["messageId"])

    @contextmanager
    def stream(self, run: str, name: str, start: int | None = None) -> Iterator[Frames]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patient(30))
        query = "" if start is None else f"?start={start}"
        connection.request("GET", f"/v1/streams/{run}/{name}{query}")
        answer = connection.getresponse()
        try:
            yield Frames(answer)
        finally:
            answer.close()
            connection.close()


class Frames:
    """The frames of a stream, as they come."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.start = int(answer.headers.get("x-holdfast-start", "-1"))

    def next(self) -> tuple[int, bytes] | None:
        """Return kind and content; None at the end of the body."""
        head = self._answer.read(5)
        if len(head) < 5:
            return None
        length = int.from_bytes(head[1:], "big")
        return head[0], self._answer.read(length) if length else b""  # to read nothing would wait for more

    def rest(self) -> list[tuple[int, bytes]]:
        return list(iter(self.next, None))

    def document(self) -> Any:
        return json.loads(self._answer.read())


class Served:
    """A running server."""

    def __init__(self, app: App, server: WorldServer, thread: threading.Thread) -> None:
        self.app, self.server, self._thread = app, server, thread
        self.error: BaseException | None = None
        self.client = Client("")

    def stop(self, *, hurry: bool = False) -> None:
        self.server.stop(hurry=hurry)
        self._thread.join(patient(60))
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def serving(app: App, token: str = "", **options: Any) -> Iterator[Served]:
    """Serve an app on a free port until the end of the block."""
    server, started = WorldServer(app, "127.0.0.1", 0, **options), threading.Event()

    def begin(address: str) -> None:
        served.client = Client(address, token)
        started.set()

    def serve() -> None:
        try:
            server.serve(begin)
        except BaseException as error:
            served.error = error
            started.set()

    thread = threading.Thread(target=serve, name="the World's server")
    served = Served(app, server, thread)
    thread.start()
    try:
        assert started.wait(patient(30))
        if served.error is not None:
            raise served.error
        yield served
    finally:
        server.stop(hurry=True)
        thread.join(patient(60))
