"""Hooks over the API: listed, shown, resumed; what does not fit is said before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.shop import WebShop

from holdfast import Invocation

Get = Any


def hook_of(get: Get, run: Invocation[Any]) -> dict[str, Any]:
    """Return the hook of a run, once it is there."""
    found: list[dict[str, Any]] = eventually(lambda: get("/hooks", run=run.id)["hooks"])
    return found[0]


def test_a_hook_is_listed_shown_and_resumed_by_its_name(shop: WebShop, get: Get, client: TestClient) -> None:
    run = shop.approve.submit("41")
    hook = hook_of(get, run)
    assert (hook["run"], hook["token"], hook["metadata"]) == (run.id, "approve:41", {"article": "41"})
    shown = get(f"/hooks/{hook['name']}")
    assert hook.items() <= shown.items()
    assert (shown["run_status"] in ("running", "suspended"), shown["waiting"]) == (True, [])
    assert shown["schema"]["$defs"]["Approval"]["required"] == ["by"]
    answer = client.post(f"/api/v1/hooks/{hook['name']}/resume", json={"payload": {"by": "ann"}, "resume_id": "r1"})
    assert answer.status_code == 200
    assert {"run": run.id, "call": "hook#1", "resume_id": "r1"}.items() <= answer.json().items()
    assert run.result(timeout=patient(30)) == "ann"
    eventually(lambda: client.get(f"/api/v1/hooks/{hook['name']}").status_code == 404)
    again = client.post(f"/api/v1/hooks/{hook['name']}/resume", json={"payload": {"by": "bob"}})
    assert (again.status_code, again.json()["title"]) == (404, "HookNotFound")


def test_a_hook_is_resumed_by_its_token_in_the_body(shop: WebShop, get: Get, client: TestClient) -> None:
    run = shop.approve.submit("43")
    hook_of(get, run)
    answer = client.post("/api/v1/hooks/resume", json={"token": "approve:43", "payload": {"by": "ann", "score": 3}})
    assert answer.json()["run"] == run.id
    assert run.result(timeout=patient(30)) == "ann"


def test_hooks_are_listed_in_pages(shop: WebShop, get: Get) -> None:
    runs = {shop.approve.submit(f"page {number}").id for number in range(5)}
    eventually(lambda: runs <= {hook["run"] for hook in get("/hooks", limit=500)["hooks"]})
    page = get("/hooks", limit=2)
    names = [hook["name"] for hook in page["hooks"]]
    while page["before"] is not None:
        page = get("/hooks", limit=2, before=page["before"])
        names += [hook["name"] for hook in page["hooks"]]
    assert len(names) == len(set(names)) >= 5


@pytest.mark.parametrize(
    ("body", "status", "title", "place"),
    [
        ({"payload": {"by": 7}}, 422, "PayloadDoesNotFit", "body.payload.by"),
        ({"payload": {}}, 422, "PayloadDoesNotFit", "body.payload.by"),
        ({"payload": {"by": "ann", "score": "much"}}, 422, "PayloadDoesNotFit", "body.payload.score"),
        ({"payload": None}, 422, "PayloadDoesNotFit", "body.payload"),
        ({}, 422, "PayloadDoesNotFit", "body.payload"),
        ({"payload": {"by": "ann"}, "resume_id": ""}, 400, "UsageError", "body.resume_id"),
        ({"payload": {"by": "ann"}, "resume_id": 7}, 422, "UsageError", "body.resume_id"),
        ({"payload": {"by": "ann"}, "resume_id": "x" * 300}, 400, "UsageError", "body.resume_id"),
        ({"payloads": {"by": "ann"}}, 422, "UsageError", "body"),
        ({"payload": {"by": "ann"}, "token": "approve:44"}, 422, "UsageError", "body"),
        ([1], 400, "UsageError", "body"),
        ("text", 400, "UsageError", "body"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written(
    shop: WebShop, get: Get, client: TestClient, body: Any, status: int, title: str, place: str
) -> None:
    if not any(hook["token"] == "approve:44" for hook in get("/hooks", limit=500)["hooks"]):
        shop.approve.submit("44")
    hook = eventually(lambda: [each for each in get("/hooks", limit=500)["hooks"] if each["token"] == "approve:44"])[0]
    answer = client.post(f"/api/v1/hooks/{hook['name']}/resume", json=body)
    problem = answer.json()
    assert (answer.status_code, problem["title"], problem["path"]) == (status, title, place)
    run = get(f"/invocations/{hook['run']}")
    assert (run["run"]["inbox"], run["run"]["waits_for"]) == (0, ["hook#1"])


@pytest.mark.parametrize(
    ("content", "kind", "status", "place"),
    [
        (b"{", "application/json", 400, "body"),
        (b"", "application/json", 400, "body"),
        (b"\xff", "application/json", 400, "body"),
        (b"[" * 100_000, "application/json", 400, "body"),
        (b"{}", "text/plain", 415, "body"),
        (b"{}", "application/x-www-form-urlencoded", 415, "body"),
        (b'{"token": "\\u0000"}', "application/json", 400, "body.token"),
        (b'{"token": 7}', "application/json", 422, "body.token"),
        (b'{"token": ""}', "application/json", 400, "body.token"),
        (b'{"token": "unknown"}', "application/json", 404, ""),
        (b'{"token": "' + b"x" * 2**20 + b'"}', "application/json", 413, ""),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else value,
)
def test_a_bad_body_is_said(client: TestClient, content: bytes, kind: str, status: int, place: str) -> None:
    answer = client.post("/api/v1/hooks/resume", content=content, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json().get("path", "")) == (status, place)
    assert len(answer.content) < 1000


@pytest.mark.parametrize("name", ["unknown", "0" * 64, "../x", "%00"])
def test_an_unknown_hook_is_not_found(client: TestClient, name: str) -> None:
    assert client.get(f"/api/v1/hooks/{name}").status_code == 404
    assert client.post(f"/api/v1/hooks/{name}/resume", json={}).status_code == 404


def test_secrets_of_hooks_are_in_no_document(shop: WebShop, get: Get) -> None:
    run, path = shop.webhook()
    secret = path.removeprefix("/hooks/")
    (hook,) = eventually(lambda: get("/hooks", run=run.id)["hooks"])
    assert (hook["token"], hook["origin"], hook["has_url"]) == (None, "random", True)
    told = [get(f"/invocations/{run.id}{part}") for part in ("", "/history", "/why")]
    log = get(f"/invocations/{run.id}/events")["events"]
    assert secret not in str([hook, *told])
    # The step that got the URL has it as its argument: the code has put it there.
    assert secret not in str([event for event in log if event["correlation"] == "hook#1"])
    assert len([event for event in log if event["correlation"] == "hook#1"]) >= 1
