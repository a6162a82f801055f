"""Each route and each page × each role × each way to be known. The tables are those of the web app, so a new route is
tested by being there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from tests.web.entrance import API_TOKEN, WAYS, Entrance, filled

from holdfast import App
from holdfast.web import api
from holdfast.web.asgi import WebApp
from holdfast.web.pages import table
from holdfast.web.pages.page import PageTable, WebPage
from holdfast.web.principals import Role
from holdfast.web.problems import Problem
from holdfast.web.routing import ApiRoute, Asked, RouteTable
from holdfast.web.rules import TokenGuesses

REACHED = 418


async def reach(asked: Asked) -> object:
    """In the place of what a route does: the request was let in."""
    raise Problem(REACHED, "Reached", "let in")


@pytest.fixture
def entrance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entrance]:
    """The first page is the real one: clients take their token for changes from it."""
    routes = [route._replace(endpoint=reach, body=None) for route in api.ROUTES]  # type: ignore[arg-type]
    pages = [page if page.path == "/" else page._replace(view=reach) for page in table.PAGES]  # type: ignore[arg-type]
    monkeypatch.setattr(api, "TABLE", RouteTable(routes))
    monkeypatch.setattr(table, "TABLE", PageTable(pages))
    with Entrance() as entrance:
        yield entrance


def ask(client: TestClient, route: ApiRoute) -> int:
    return client.request(route.method, f"/api/v1{filled(route.path)}").status_code


def page_of(client: TestClient, page: WebPage) -> int:
    return client.get(filled(page.path)).status_code


@pytest.mark.parametrize(("way", "role"), WAYS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_each_route_and_page_lets_in_who_has_its_role(entrance: Entrance, way: str, role: Role) -> None:
    with entrance.known_by(way, role) as client:
        found = {(each.method, each.path): ask(client, each) for each in api.ROUTES}
        assert found == {(each.method, each.path): REACHED if role >= each.role else 403 for each in api.ROUTES}
        for page in table.PAGES:
            wanted = 403 if role < page.role else 200 if page.path == "/" else REACHED
            assert page_of(client, page) == wanted, page.path


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer x", "Basic YTpi", f"Basic {API_TOKEN}", f"Bearer {API_TOKEN}x"]
)
def test_no_route_and_no_page_lets_in_a_stranger(
    entrance: Entrance, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.web.authentication.TokenGuesses", functools.partial(TokenGuesses, burst=1e6))
    given = {"Authorization": header} if header else {}
    forged = {"X-User": "ann", "X-Role": "admin", "X-Forwarded-For": "10.0.0.7", "Cookie": "holdfast_x=y"}
    with entrance.client(headers=given | forged) as client:
        for route in api.ROUTES:
            assert ask(client, route) == 401, route
        for page in table.PAGES:
            answer = client.get(filled(page.path))
            assert (answer.status_code, answer.headers["location"][:6]) == (303, "/login"), page.path
            assert not answer.content


def test_where_nothing_is_set_up_a_mounted_app_lets_nobody_in() -> None:
    with (
        App("memory://") as app,
        TestClient(WebApp(app), base_url="http://127.0.0.1", follow_redirects=False) as client,
    ):
        for route in api.ROUTES:
            assert ask(client, route) == 403, route
        for page in table.PAGES:
            assert page_of(client, page) == 403, page.path


def test_what_changes_something_says_so_and_is_no_get() -> None:
    """So no address that a page of another site can name changes anything."""
    for route in api.ROUTES:
        if route.method == "GET":
            assert not route.action, route
        else:
            assert route.method in ("POST", "PUT", "PATCH", "DELETE"), route
            assert route.action, f"{route.method} {route.path} leaves no audit record"
            assert route.role >= Role.OPERATOR, route


@pytest.mark.parametrize("way", ["login", "proxy", "host"])
def test_a_change_from_a_browser_needs_the_token_of_its_pages(entrance: Entrance, way: str) -> None:
    changes = [route for route in api.ROUTES if route.method != "GET"]
    with entrance.known_by(way, Role.ADMIN) as client:
        good = client.headers["x-holdfast-csrf"]
        for route in changes:
            path = f"/api/v1{filled(route.path)}"
            for headers in (
                {"x-holdfast-csrf": ""},
                {"x-holdfast-csrf": good[:-1] + ("A" if good[-1] != "A" else "B")},
                {"Origin": "http://evil.example"},
                {"Origin": "null"},
                {"Sec-Fetch-Site": "cross-site"},
                {"Sec-Fetch-Site": "same-site"},
            ):
                assert client.request(route.method, path, headers=headers).status_code == 403, (route, headers)
            assert client.request(route.method, path, headers={"Origin": "http://shop.example"}).status_code == REACHED


def test_a_token_for_changes_is_of_one_session(entrance: Entrance) -> None:
    (route, *_) = [route for route in api.ROUTES if route.method != "GET"]
    with entrance.known_by("login", Role.ADMIN) as one, entrance.known_by("login", Role.OPERATOR) as other:
        one.headers["x-holdfast-csrf"] = other.headers["x-holdfast-csrf"]
        assert ask(one, route) == 403


def test_a_foreign_host_is_refused_where_hosts_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Entrance(allowed_hosts="shop.example") as entrance, entrance.known_by("token", Role.ADMIN) as client:
        for host in ("evil.example", "shop.example.evil.example", "127.0.0.1", "", "shop.example@evil.example"):
            assert client.get("/api/v1", headers={"Host": host}).status_code == 403, host
            assert client.get("/", headers={"Host": host}).status_code == 403, host
            assert client.get("/login", headers={"Host": host}).status_code == 403, host
        assert client.get("/api/v1", headers={"Host": "SHOP.example:8443"}).status_code == 200
