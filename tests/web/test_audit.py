"""Actions over HTTP leave audit records: stored before the action, ended after it. Previews and reads leave none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from holdfast import App, crashpoints
from holdfast.errors import StoreUnavailable, UsageError
from holdfast.web import api, auditing
from holdfast.web.asgi import WebApp
from holdfast.web.principals import Role
from holdfast.web.routing import Act, ApiRoute, Asked, Render, RouteTable

DONE: list[str] = []


class PauseAct(Act, kw_only=True, forbid_unknown_fields=True):
    ids: list[str] = []
    status: tuple[str, ...] = ()
    task: tuple[str, ...] = ()


async def pause(asked: Asked) -> Render | Response:
    name = asked.path.get("name") or " ".join(asked.body.ids)
    if name == "unknown":
        raise UsageError("there is no queue 'unknown'")
    if name == "broken":
        raise ZeroDivisionError("canary")
    if name == "refused":
        return Response("no", status_code=409)
    if not asked.body.preview:
        DONE.append(name)
    return lambda: {"queue": name, "summary": f"{name} rests"}


ROUTES = (
    *api.ROUTES,
    ApiRoute(
        *("POST", "/drill/{name}/pause", pause, "pause"),
        role=Role.OPERATOR,
        action="drill.pause",
        body=PauseAct,
    ),
    ApiRoute("POST", "/drill/pause", pause, "pause", action="drill.pause", body=PauseAct),
)


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://") as app:
        yield app


@pytest.fixture
def client(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(api, "TABLE", RouteTable(ROUTES))
    monkeypatch.setitem(auditing.TWINS, "drill.pause", "drill")
    DONE.clear()
    with TestClient(
        WebApp(app, is_local=True), base_url="http://127.0.0.1:8080", raise_server_exceptions=False
    ) as client:
        yield client


def act(client: TestClient, path: str, **body: Any) -> int:
    return client.post(f"/api/v1/drill/{path}", json=body).status_code


def records(client: TestClient, **query: Any) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["records"]
    return found


def test_an_action_leaves_a_record(client: TestClient) -> None:
    assert act(client, "mail it/pause".replace(" ", "%20"), reason="the printer is on fire") == 200
    (record,) = records(client)
    assert (record["who"], record["via"], record["source"]) == ("local", "local", "testclient")
    assert (record["action"], record["target"]) == ("drill.pause", "mail it")
    assert record["twin"] == "holdfast drill 'mail it'"
    assert (record["reason"], record["outcome"]) == ("the printer is on fire", "done")
    assert record["detail"] == "mail it rests"
    assert act(client, "pause", ids=["a", "b"]) == 200
    (record,) = records(client, limit=1)
    assert (record["target"], record["targets"], record["twin"]) == ("2 names", ["a", "b"], "holdfast drill a b")
    assert len(records(client, action="drill")) == len(records(client, action="pause")) == 2
    assert act(client, "pause", status=["failed"], task=["shop:a", "shop:b"]) == 200
    (record,) = records(client, limit=1)
    assert record["target"] == "status=failed task=shop:a task=shop:b"
    assert record["twin"] == "holdfast drill --status=failed --task=shop:a --task=shop:b"
    assert len(records(client, target="a")) == len(records(client, target="b")) == 1
    assert records(client, target="a b") == []
    assert records(client, since="2030-01-01T00:00:00Z") == []
    assert client.get("/api/v1/audit?since=noon").status_code == 400


def test_an_action_on_many_is_recorded_with_each_of_them(client: TestClient) -> None:
    ids = [f"{number:026d}" for number in range(500)]
    assert client.post("/api/v1/invocations/bulk-cancel", json={"ids": ids, "reason": "a drill"}).status_code == 200
    (record,) = records(client)
    assert (record["target"], record["targets"]) == ("500 invocations", ids)
    assert record["twin"] == "holdfast cancel (with 500 names)"
    assert records(client, target=ids[499]) == [record]
    page = client.get("/audit").text
    assert "<summary>500 invocations</summary>" in page
    assert all(f"<li>{id}</li>" in page for id in ids)
    for path, most in (("invocations/bulk-cancel", 500), ("archive/rerun", 2_000)):
        assert client.post(f"/api/v1/{path}", json={"ids": ["0" * 26] * (most + 1)}).status_code == 422
    assert len(records(client)) == 1, "a request that is refused for its size leaves no record"


def test_a_preview_and_a_wrong_request_leave_none(client: TestClient) -> None:
    assert act(client, "mail/pause", preview=True) == 200
    assert act(client, "mail/pause", reason=7) == 422
    assert act(client, "mail/pause", resaon="7") == 422
    assert client.get("/api/v1/stats").status_code == 200
    assert (records(client), DONE) == ([], [])


def test_a_failure_is_recorded_without_what_the_exception_says(client: TestClient) -> None:
    assert act(client, "unknown/pause") == 400
    assert act(client, "broken/pause") == 500
    assert act(client, "refused/pause") == 409
    assert [(each["target"], each["outcome"], each["detail"]) for each in records(client)] == [
        ("refused", "failed", ""),
        ("broken", "failed", "ZeroDivisionError"),
        ("unknown", "failed", "UsageError: there is no queue 'unknown'"),
    ]


def test_without_a_record_nothing_is_done(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*args: Any) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.access.audit.AuditLog.begin", away)
        assert act(client, "mail/pause") == 503
    assert (records(client), DONE) == ([], [])


def test_a_crash_in_between_leaves_begun(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(name: str) -> None:
        raise SystemError(name)

    assert records(client) == []
    monkeypatch.setattr(crashpoints, "strike", crash)
    crashpoints.arm("audit.begun")
    try:
        assert act(client, "mail/pause") == 500
    finally:
        crashpoints.arm(None)
    assert DONE == []
    assert [each["outcome"] for each in records(client)] == ["begun"]
