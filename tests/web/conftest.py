"""An app with ended and waiting calls, and ways to ask for it over HTTP: in this process, and from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.web.shop import TOKEN, WebShop

from holdfast.web import web_app


@pytest.fixture(scope="module")
def shop() -> Iterator[WebShop]:
    """One for all tests of a module: they only read it, or add calls of their own."""
    with WebShop() as shop:
        yield shop


@pytest.fixture
def client(shop: WebShop) -> Iterator[TestClient]:
    """A client with the token."""
    with TestClient(web_app(shop.app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


@pytest.fixture
def get(client: TestClient) -> Any:
    """Get a document of the API."""

    def document(path: str, **query: Any) -> Any:
        answer = client.get(f"/api/v1{path}", params=query)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    return document


@pytest.fixture
def act(client: TestClient) -> Any:
    """Ask for an action of the API."""

    def done(path: str, expected: int = 200, **body: Any) -> Any:
        answer = client.post(f"/api/v1{path}", json=body)
        assert answer.status_code == expected, answer.text
        return answer.json()

    return done
