"""Mounted in FastAPI, Starlette and Django, on a real server: everything works, and hostile clients break nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.patience import eventually, patient
from tests.web.hosts import HOSTS
from tests.web.shop import TOKEN, Following, WebShop, served

from holdfast.web import web_app
from holdfast.web.asgi import WebApp


class Host:
    """A served program."""

    def __init__(self, shop: WebShop, web: WebApp, address: str) -> None:
        self.shop, self.web, self.address = shop, web, address
        self.place = address.removeprefix("http://")

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.place, timeout=patient(30))
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def raw(self, *parts: bytes, hang_up: bool = False, is_whole: bool = True) -> bytes:
        """Send bytes as they are, and return the head of the answer. After a request that is not whole, there may be
        none until the client has said that no more will come.
        """
        host, _, port = self.place.partition(":")
        found = b""
        with socket.create_connection((host, int(port)), timeout=patient(30)) as line:
            with contextlib.suppress(OSError):  # a server may refuse, and be gone, before it has read everything
                line.sendall(b"".join(parts))
                if hang_up:
                    return b""
                if not is_whole:
                    line.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while b"\r\n\r\n" not in found and (part := line.recv(65536)):
                    found += part
        return found

    def is_well(self) -> bool:
        status, body = self.ask("GET", "/holdfast/api/v1/invocations?limit=1", Authorization=f"Bearer {TOKEN}")
        return status == 200 and len(json.loads(body)["invocations"]) == 1


@pytest.fixture(scope="module", params=list(HOSTS))
def host(request: pytest.FixtureRequest, shop: WebShop) -> Iterator[Host]:
    web = web_app(shop.app)
    with served(HOSTS[request.param](web), lifespan="auto", access_log=True) as address:
        yield Host(shop, web, address)


def test_the_host_and_the_web_app_answer_side_by_side(host: Host) -> None:
    assert host.is_well()
    assert host.ask("GET", "/own")[1].strip(b'"') == b"the host"
    assert host.ask("GET", "/holdfast/api/v1/invocations")[0] == 401
    assert host.ask("GET", "/holdfast/nothing")[0] == 404
    status, body = host.ask("GET", f"/holdfast/api/v1/invocations/{host.shop.sum.id}", Authorization=f"Bearer {TOKEN}")
    assert (status, json.loads(body)["result"]) == (200, {"value": 3})


def test_a_webhook_is_delivered_and_answered(host: Host) -> None:
    run, path = host.shop.webhook(True)
    status, body = host.ask("POST", f"/holdfast{path}", b'{"ok": true}')
    assert (status, json.loads(body)) == (201, {"number": 1})
    assert run.result(timeout=patient(30)) == [["POST", b'{"ok": true}', ""]]


def test_a_stream_is_followed(host: Host) -> None:
    run = host.shop.speak.submit(["first"], True)
    with Following(host.address, f"/holdfast/api/v1/invocations/{run.id}/streams/words") as client:
        events = (event for event in client.events() if event != {":": ""})
        assert next(events)["data"] == '"first"'
        host.shop.words.put("second")
        assert next(events)["data"] == '"second"'
    eventually(lambda: not host.web.streams)
    host.shop.words.put(None)
    run.result(timeout=patient(30))


def test_no_log_line_has_a_secret_or_a_body(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """The access log of the server is on."""
    caplog.set_level(logging.DEBUG)
    run, path = host.shop.webhook(methods=["GET", "POST"], verify="own")
    secret = path.removeprefix("/hooks/")
    for method, query, body in (
        ("POST", "", b"canary"),
        ("POST", "", b"crash canary"),
        ("GET", "?word=canary", None),
        ("PUT", "?word=canary", b"canary"),
        ("NONSENSE", "", b"canary"),
        ("POST", "", b"canary" * 200_000),
    ):
        assert host.ask(method, f"/holdfast{path}{query}", body, X_Password="canary")[0] in (401, 405, 413)
    assert host.ask("POST", f"/holdfast{path}", b'"canary"', X_Password="open sesame")[0] == 202
    assert run.result(timeout=patient(30)) == ["canary"]
    assert host.ask("POST", f"/holdfast{path}", b'"canary"')[0] == 404
    eventually(lambda: caplog.text.count("/holdfast/hooks/...") >= 8)  # the lines of the server
    assert secret not in caplog.text
    assert "canary" not in caplog.text


HEAD = b"POST /holdfast/hooks/unknown HTTP/1.1\r\nHost: shop\r\n"
API = b"GET /holdfast/api/v1/invocations HTTP/1.1\r\nHost: shop\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([b"\x00\xff\x00\r\n\r\n"], {400}),
        ([b"GET / HTTP/9.9\r\n\r\n"], {400, 404, 505}),
        ([b"POST /holdfast/hooks/\x00 HTTP/1.1\r\nHost: shop\r\n\r\n"], {400, 404}),
        ([b"POST /holdfast/hooks/%zz%ff%00 HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n"], {404}),
        ([b"POST /holdfast/hooks/../api/v1 HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n"], {404}),
        (
            [b"POST http://evil.example/holdfast/hooks/x HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n"],
            {400, 404},
        ),
        ([HEAD, b"Content-Length: -1\r\n\r\n"], {400}),
        ([HEAD, b"Content-Length: 99999999999999999999\r\n\r\n"], {400, 413}),
        ([HEAD, b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx"], {400}),
        ([HEAD, b"Content-Length: 5\r\n\r\nab"], {400, None}),
        ([HEAD, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"], {400, None}),
        ([HEAD, b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"], {400, 404}),
        ([HEAD, b"X-Large: " + b"a" * 200_000 + b"\r\n\r\n"], {400, 431, None}),
        ([HEAD, b"X-Odd: \xff\xfe\r\nContent-Length: 0\r\n\r\n"], {400, 404}),
        ([API, b"Cookie: " + b"a=b; " * 5000 + b"\r\n\r\n"], {200}),
        ([API.replace(b"invocations", b"invocations?task=%ff%00%27--"), b"\r\n"], {400}),
        ([API.replace(TOKEN.encode(), b"\xff" * 40), b"\r\n"], {400, 401}),
        ([API.replace(b"Bearer", b"Bearer\t"), b"\r\n"], {400, 401}),
    ],
    ids=range(18),
)
def test_a_hostile_request_is_refused_and_breaks_nothing(
    host: Host, parts: list[bytes], statuses: set[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    answer = host.raw(*parts, is_whole=None not in statuses)
    assert (int(answer.split()[1]) if answer else None) in statuses
    assert b"Traceback" not in answer
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert host.is_well()


@pytest.mark.parametrize(
    "sent", [b"", b"Content-Length: 1000\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"]
)
def test_a_client_that_hangs_up_breaks_nothing(host: Host, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        host.raw(HEAD, sent, hang_up=True)
        host.raw(API, hang_up=True)
        host.raw(API, b"\r\n", hang_up=True)
    assert host.is_well()
    eventually(lambda: host.web._webhooks._under_way == 0)
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_bodies_that_do_not_come_take_no_room(host: Host) -> None:
    """Each announces a megabyte, and sends little of it. 64 of them once took the room of all for 30 s."""
    address, _, port = host.place.partition(":")
    with contextlib.ExitStack() as lines:
        for number in range(70):
            line = lines.enter_context(socket.create_connection((address, int(port)), timeout=patient(30)))
            line.sendall(HEAD.replace(b"unknown", b"%d" % number) + b"Content-Length: 1000000\r\n\r\nabc")
        eventually(lambda: host.web._webhooks._under_way == 70 * 3)
        run, path = host.shop.webhook()
        assert host.ask("POST", f"/holdfast{path}", b'"yes"')[0] == 202
        assert run.result(timeout=patient(30)) == ["yes"]
    eventually(lambda: host.web._webhooks._under_way == 0)


def test_what_was_sent_whole_is_delivered_even_if_the_sender_hangs_up(host: Host) -> None:
    run, path = host.shop.webhook(True)
    head = f"POST /holdfast{path} HTTP/1.1\r\nHost: shop\r\nContent-Length: 2\r\n\r\nhi".encode()
    host.raw(head, hang_up=True)
    assert run.result(timeout=patient(30)) == [["POST", b"hi", ""]]


def test_a_sender_that_hangs_up_while_an_answer_is_awaited_frees_the_wait(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.web.webhooks.GRACE_SECONDS", 0.05)
    run, path = host.shop.webhook(True, 2, False)
    host.raw(f"POST /holdfast{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi".encode(), hang_up=True)
    bridge = host.shop.app.runtime.opened().bridge
    eventually(lambda: not bridge._calls, seconds=patient(10))  # not 30 s later
    run.cancel()


def test_websockets_are_refused(host: Host) -> None:
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    answer = host.raw(API, upgrade, b"Sec-WebSocket-Version: 13\r\n\r\n")
    assert b"101 " not in answer.split(b"\r\n")[0]
    assert host.is_well()


def test_another_type_of_scope_is_refused() -> Any:
    import asyncio

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    with WebShop() as shop:
        asyncio.run(web_app(shop.app)({"type": "websocket", "path": "/api/v1"}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1000}]
