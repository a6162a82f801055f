"""Mounted in FastAPI, Starlette and Django, the web app knows the host's own users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from tests.web.entrance import csrf_in
from tests.web.hosts import HOSTS, with_users

from holdfast import App
from holdfast.access.tokens import AccessTokens
from holdfast.web import web_app

BASE = "https://shop.example"


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://") as app:
        yield app


@pytest.fixture(params=list(HOSTS))
def host(request: pytest.FixtureRequest, app: App) -> Iterator[TestClient]:
    with TestClient(with_users(request.param, app), base_url=BASE, follow_redirects=False) as client:
        yield client


def log_in(host: TestClient, name: str, role: str) -> None:
    """As a user of the host."""
    if host.get(f"/log-in/{name}/{role}").status_code != 200:  # Django has a page for that
        host.cookies.set("own-session", f"{name}:{role}")


def test_a_user_of_the_host_has_the_role_that_the_host_says(host: TestClient) -> None:
    assert host.get("/own").status_code == 200
    assert host.get("/holdfast/api/v1").status_code == 401
    answer = host.get("/holdfast/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/holdfast/login")
    log_in(host, "ann", "viewer")
    assert host.get("/holdfast/api/v1").status_code == 200
    assert host.get("/holdfast/api/v1/audit").status_code == 403
    page = host.get("/holdfast/")
    assert "ann · viewer" in page.text
    assert "Log out" not in page.text, "that is for the host"
    log_in(host, "bob", "admin")
    assert host.get("/holdfast/api/v1/audit").status_code == 200


def test_a_change_needs_the_token_of_the_pages(host: TestClient) -> None:
    log_in(host, "ann", "operator")
    csrf, path = csrf_in(host.get("/holdfast/").text), "/holdfast/api/v1/hooks/resume"
    body = {"token": "unknown"}
    assert host.post(path, json=body).status_code == 403
    assert host.post(path, json=body, headers={"x-holdfast-csrf": csrf, "origin": "http://evil"}).status_code == 403
    answer = host.post(path, json=body, headers={"x-holdfast-csrf": csrf, "origin": BASE})
    assert (answer.status_code, answer.json()["title"]) == (404, "HookNotFound")
    log_in(host, "bob", "operator")
    assert host.post(path, json=body, headers={"x-holdfast-csrf": csrf}).status_code == 403, "it is of another user"


def test_tokens_are_good_beside_users_of_the_host(app: App, host: TestClient) -> None:
    tokens = app.runtime.ready().part(AccessTokens)
    _, text = app.runtime.run(tokens.create("ci", "viewer", 3_600, "test"))
    tokens.known = tokens.known._replace(stale_at=float("-inf"))
    assert host.get("/holdfast/api/v1", headers={"Authorization": f"Bearer {text}"}).status_code == 200


def test_a_wrong_role_is_an_error_of_the_host(app: App) -> None:
    web = web_app(app, user=lambda request: ("ann", "emperor"))
    with TestClient(web, base_url=BASE) as client:
        answer = client.get("/api/v1")
        assert (answer.status_code, answer.json()["title"]) == (500, "ConfigurationError")
