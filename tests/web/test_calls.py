"""Actions over HTTP: submit, cancel, rerun, purge and fork, of one invocation and of all that a search means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from holdfast import App, context
from holdfast.model.status import FINAL
from holdfast.retries import Fixed
from holdfast.testing import testing_app
from holdfast.web.asgi import WebApp

Post = Any
UNKNOWN = "0" * 26


@pytest.fixture(params=["memory://", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[App]:
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.param
    app = App(url, name="shop", api_token="")

    @app.task(name="shop:add")
    def add(a: int, b: int = 0) -> int:
        return a + b

    @app.task(name="shop:boom", retries=Fixed(1, 0))
    def boom(text: str, customer: str = "c-1") -> None:
        context().set(customer=customer)
        raise TimeoutError(text)

    @app.step(name="shop:charge")
    async def charge(order: str) -> str:
        return f"receipt {order}"

    @app.workflow(name="shop:checkout")
    async def checkout(order: str) -> str:
        return f"{await charge(order)}, {await charge(order)}"

    yield app
    app.close()


@pytest.fixture
def client(app: App) -> Iterator[TestClient]:
    with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def post(client: TestClient) -> Post:
    def ask(path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        answer = client.post(f"/api/v1{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    return ask


@pytest.fixture
def search(client: TestClient) -> Any:
    """Return the ids that a search means."""

    def ids(q: str, **query: Any) -> list[str]:
        answer = client.get("/api/v1/invocations", params={"q": q, **query})
        assert answer.status_code == 200, answer.text
        return [each["id"] for each in answer.json()["invocations"]]

    return ids


def drain(app: App) -> None:
    runner = app.runner()
    runner.start()
    try:
        for each in app.invocations(limit=500):
            if each.record().due_at <= each.record().created_at + 1:
                app.invocation(each.id).runtime if False else None
                _ended(app, each.id)
    finally:
        runner.end()


def _ended(app: App, id: str) -> None:
    from tests.web.shop import eventually

    eventually(lambda: app.invocation(id).status in FINAL)
