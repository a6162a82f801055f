"""What no client gets: files of the machine, exceptions, scripts of others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.testclient import TestClient
from tests.web.entrance import API_TOKEN, BASE, Entrance

from holdfast import App
from holdfast.access.tokens import AccessTokens
from holdfast.errors import StoreUnavailable
from holdfast.web import api
from holdfast.web.asgi import WebApp
from holdfast.web.pages import table
from holdfast.web.pages.page import PageTable
from holdfast.web.routing import RouteTable

_UP = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%252f", "%252e%252e%252f", "..\\", "..%5c", "..%c0%af", "..;/")
_TARGETS = ("asgi.py", "templates/base.html", "pages/templates/base.html", "../../../../etc/passwd")
TRAVERSALS = [up * deep + target for up, deep, target in itertools.product(_UP, (1, 3), _TARGETS)]
TRAVERSALS += ["/etc/passwd", "//etc/passwd", "%2fetc%2fpasswd", "app.css/", "app.css%00", "app.css%00.js", "./app.css"]
TRAVERSALS += ["", ".", "..", "%00", "APP.CSS", "app.css/..", "static/app.css", "app.js/../app.css%00"]
TRAVERSALS += ["file:///etc/passwd", "C:/windows/win.ini", "con", "aux.css", "~root", "app.css::$DATA", "app.css;a=b"]
CANARY = "canary-of-an-exception"


@pytest.fixture
def client() -> Iterator[TestClient]:
    with (
        App("memory://") as app,
        TestClient(
            WebApp(app, is_local=True), base_url="http://127.0.0.1:8080", raise_server_exceptions=False
        ) as client,
    ):
        yield client


def test_no_path_leads_out_of_the_list_of_files(client: TestClient) -> None:
    assert len(set(TRAVERSALS)) >= 100
    for text in TRAVERSALS:
        for path in (text, unquote(text), unquote(unquote(text))):
            status, body = asyncio.run(got(client.app, f"/static/{path}"))
            assert status == 404, path
            assert b"root:" not in body
            assert b"import" not in body
    for name, kind in table.FILES.items():
        answer = client.get(f"/static/{name}")
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert answer.headers["content-type"].startswith(kind)


async def got(web: Any, path: str) -> tuple[int, bytes]:
    """Ask as a server does that takes nothing out of a path: a client would."""
    status, body = 0, b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, body
        status, body = message.get("status", status), body + message.get("body", b"")

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", b"127.0.0.1")]}
    await web({**scope, "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080)}, receive, send)
    return status, body


async def fail(asked: Any) -> Any:
    raise RuntimeError(CANARY)


async def fail_while_drawing(asked: Any) -> Any:
    def draw() -> dict[str, Any]:
        raise RuntimeError(CANARY)

    return draw


@pytest.mark.parametrize("broken", [fail, fail_while_drawing])
def test_no_exception_reaches_a_client(client: TestClient, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    routes = [route._replace(endpoint=broken, body=None) for route in api.ROUTES]
    monkeypatch.setattr(api, "TABLE", RouteTable(routes))
    monkeypatch.setattr(table, "TABLE", PageTable([page._replace(view=broken) for page in table.PAGES]))
    answers = [client.request(each.method, f"/api/v1{each.path.replace('{id}', '0' * 26)}") for each in api.ROUTES]
    answers += [client.get(page.path) for page in table.PAGES]
    for answer in answers:
        assert answer.status_code == 500, answer.url
        assert answer.json()["detail"] == "the server failed to answer; its log says why"
        assert CANARY not in answer.text
        assert "Traceback" not in answer.text


def test_a_stranger_is_not_told_why_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the `api_token` is known without the store."""

    async def away(tokens: AccessTokens, *, again: bool = False) -> None:
        raise StoreUnavailable(f"the store at {CANARY}:27017 does not answer")

    with Entrance() as entrance, entrance.client() as client:
        monkeypatch.setattr(AccessTokens, "refresh", away)
        monkeypatch.setattr(AccessTokens, "is_fresh", False)
        client.headers["Authorization"] = "Bearer hf_aaaaaaaa_" + "a" * 43
        form = {"csrf": "x", "token": f"hf_aaaaaaaa_{'a' * 43}"}
        client.cookies.set("holdfast_form", "x")
        answers = [client.get(path) for path in ("/api/v1", "/api/v1/nothing", "/")]
        answers.append(client.post("/login", data=form, headers={"Origin": BASE}))
        for answer in answers:
            assert (answer.status_code, answer.json()["title"]) == (503, "StoreUnavailable")
            assert CANARY not in answer.text
        routes = [route._replace(endpoint=unavailable, body=None) for route in api.ROUTES]
        monkeypatch.setattr(api, "TABLE", RouteTable(routes))
        known = client.get("/api/v1", headers={"Authorization": f"Bearer {API_TOKEN}"})
        assert (known.status_code, CANARY in known.text) == (503, True)


async def unavailable(asked: Any) -> Any:
    raise StoreUnavailable(f"the store at {CANARY}:27017 does not answer")


def test_every_answer_has_the_headers_that_keep_others_out(client: TestClient) -> None:
    for path in ("/", "/login", "/api/v1", "/api/v1/nothing", "/nothing", "/static/app.css", "/static/nothing"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert "access-control-allow-origin" not in headers
        if not path.startswith("/static/app"):
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["cache-control"] == "no-store"
