"""A web app with tokens of each role, and clients that are known in each way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from starlette.requests import Request
from starlette.testclient import TestClient

from holdfast import App
from holdfast.access.tokens import AccessTokens
from holdfast.web.asgi import WebApp
from holdfast.web.principals import Role

API_TOKEN = "a-token-of-the-settings-0123456789"
PROXY = "10.0.0.7"
BASE = "http://shop.example"
ROLES = tuple(Role)


async def user_of_host(request: Request) -> tuple[str, str] | None:
    """A host that has logged in its users: here it says so in a header, which no other test sends."""
    name = request.headers.get("x-user-of-host")
    return None if name is None else ("ann", name)


class Entrance:
    """An app on a store in memory with a token for each role; and clients."""

    def __init__(self, **settings: Any) -> None:
        ours = {
            "api_token": API_TOKEN,
            "proxy_address": PROXY,
            "proxy_user_header": "X-User",
            "proxy_role_header": "X-Role",
        }
        self.app = App("memory://", name="shop", **ours | settings)
        self.tokens: dict[Role, str] = {}

    def __enter__(self) -> Self:
        self.app.__enter__()
        tokens = self.app.runtime.ready().part(AccessTokens)
        for role in ROLES:
            _, text = self.app.runtime.run(tokens.create(f"the {role.name.lower()}", role.name.lower(), 3600, "test"))
            self.tokens[role] = text
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.app.__exit__(kind, error, traceback)

    @contextmanager
    def client(self, address: str = "192.0.2.1", **options: Any) -> Iterator[TestClient]:
        web = WebApp(self.app, user=user_of_host)
        with TestClient(
            web,
            base_url=BASE,
            client=(address, 1),
            follow_redirects=False,
            raise_server_exceptions=False,
            **options,
        ) as client:
            yield client

    @contextmanager
    def known_by(self, way: str, role: Role) -> Iterator[TestClient]:
        """Yield a client that is known in this way, as having this role."""
        name = role.name.lower()
        headers = {
            "api_token": {"Authorization": f"Bearer {API_TOKEN}"},
            "token": {"Authorization": f"Bearer {self.tokens[role]}"},
            "proxy": {"X-User": "ann", "X-Role": name},
            "host": {"X-User-Of-Host": name},
        }
        with self.client(PROXY if way == "proxy" else "192.0.2.1", headers=headers.get(way, {})) as client:
            if way == "login":
                assert log_in(client, self.tokens[role]).status_code == 303
            if way in ("login", "proxy", "host"):
                client.headers["x-holdfast-csrf"] = csrf_in(client.get("/").text)
            yield client


WAYS: tuple[tuple[str, Role], ...] = (
    ("api_token", Role.ADMIN),
    *((way, role) for way in ("token", "login", "proxy", "host") for role in ROLES),
)


def log_in(client: TestClient, token: str, next: str = "/", **headers: str) -> Any:
    """Send the form of the page on which to log in."""
    page = client.get("/login", params={"next": next})
    assert page.status_code == 200, page.text
    fields = dict(re.findall(r'name="(csrf|next)" value="([^"]*)"', page.text))
    origin = {"origin": BASE} | headers
    return client.post("/login", data={**fields, "token": token}, headers=origin)


def csrf_in(page: str) -> str:
    found = re.search(r'<meta name="csrf" content="([^"]*)">', page)
    assert found is not None
    return found[1]


def filled(path: str) -> str:
    """Return a path with something for each of its parts."""
    return re.sub(r"{(\w+)(:path)?}", lambda part: "0" * 26 if part[1] == "id" else "x", path)
