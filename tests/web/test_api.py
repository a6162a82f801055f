"""The API answers what the command line answers, in pages, and says what is wrong with a request."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from tests.web.shop import HOSTILE, WebShop

from holdfast.showing import as_json
from holdfast.web.api import ROUTES
from holdfast.web.documents import history_of

Get = Any


def test_the_routes_list_themselves(get: Get) -> None:
    assert [each["path"] for each in get("")["routes"]] == [f"/api/v1{route.path}" for route in ROUTES]


def test_invocations_are_listed_in_pages_newest_first(shop: WebShop, get: Get) -> None:
    whole = [each["id"] for each in get("/invocations", limit=500)["invocations"]]
    assert whole == sorted(whole, reverse=True)
    paged: list[str] = []
    page = get("/invocations", limit=2)
    paged += [each["id"] for each in page["invocations"]]
    while page["before"] is not None:
        page = get("/invocations", limit=2, before=page["before"])
        paged += [each["id"] for each in page["invocations"]]
    assert paged == whole


def test_lists_are_filtered(shop: WebShop, get: Get) -> None:
    assert [each["id"] for each in get("/invocations", queue="later")["invocations"]] == [shop.later.id]
    assert [each["id"] for each in get("/invocations", status="failed")["invocations"]] == [shop.failure.id]
    both = get("/invocations", task=["add", "boom"])["invocations"]
    assert {each["task"] for each in both} == {"add", "boom"}
    assert get("/invocations", attribute="stage=packed")["invocations"] == []
    assert get("/invocations", parent=shop.sum.id)["invocations"] == []


def test_one_invocation_is_shown_whole(shop: WebShop, get: Get) -> None:
    shown = get(f"/invocations/{shop.sum.id}")
    assert shown["arguments"] == {"args": [1], "kwargs": {"b": 2}}
    assert shown["result"] == {"value": 3}
    assert shown["explanation"] == "ended with a result."
    assert [each["status"] for each in shown["history"]][-1] == "success"
    failed = get(f"/invocations/{shop.failure.id}")
    assert failed["error"]["message"] == HOSTILE
    assert failed["arguments"]["args"] == [HOSTILE]
    assert get(f"/invocations/{shop.run.id}")["run"]["steps"] == {"completed": 2}


def test_statistics_are_told_and_wrong_questions_are_refused(shop: WebShop, get: Get, client: TestClient) -> None:
    whole = get("/stats", since="2h", step="10m")
    assert whole["total"]["failed"] >= 1
    assert whole["step"] == 600
    assert sum(point["ended"] for point in whole["points"]) == whole["total"]["ended"]
    (group,) = [each for each in whole["failures"] if each["task"] == "boom"]
    assert shop.failure.id in group["ids"]
    assert get("/stats", task=["boom", "add"])["tasks"].keys() == {"boom", "add"}
    assert get("/stats", queue="nowhere")["total"]["ended"] == 0
    for query in ("since=soon", "step=1s", "until=9h", "since=99999999999999w", "since=nan", "since=1e400", "wrong=1"):
        answer = client.get(f"/api/v1/stats?{query}")
        assert answer.status_code in (400, 422), query
        assert answer.headers["content-type"] == "application/problem+json"


def test_history_and_why(shop: WebShop, get: Get) -> None:
    assert get(f"/invocations/{shop.sum.id}/history")["history"] == history_of(shop.sum.record())["history"]
    assert re.search("not due for another (59m|1h,)", get(f"/invocations/{shop.later.id}/why")["explanation"])


def test_steps_are_listed_in_pages(shop: WebShop, get: Get) -> None:
    whole = get(f"/invocations/{shop.run.id}/steps")
    assert [each["id"] for each in whole["steps"]] == ["charge#1", "charge#2"]
    assert whole["after"] is None
    first = get(f"/invocations/{shop.run.id}/steps", limit=1)
    assert first["after"] == "charge#1"
    rest = get(f"/invocations/{shop.run.id}/steps", limit=1, after=first["after"])
    assert ([each["id"] for each in rest["steps"]], rest["after"]) == (["charge#2"], None)
    one = get(f"/invocations/{shop.run.id}/steps/{quote('charge#2')}")
    assert (one["result"], one["arguments"]["args"]) == ({"value": "receipt 42b"}, ["42b"])


def test_events_are_listed_in_pages(shop: WebShop, get: Get) -> None:
    path = f"/invocations/{shop.run.id}/events"
    whole = [each["type"] for each in get(path)["events"]]
    assert (whole[0], whole[-1]) == ("run_created", "run_completed")
    paged: list[str] = []
    page = get(path, limit=3)
    paged += [each["type"] for each in page["events"]]
    while page["after"] is not None:
        page = get(path, limit=3, after=page["after"])
        paged += [each["type"] for each in page["events"]]
    assert paged == whole
    assert {each["correlation"] for each in get(path, correlation="charge#1")["events"]} == {"charge#1"}


UNKNOWN = "0" * 26


@pytest.mark.parametrize(
    ("path", "status", "title", "place"),
    [
        ("/invocations?limit=0", 400, "UsageError", "query.limit"),
        ("/invocations?limit=501", 400, "UsageError", "query.limit"),
        ("/invocations?limit=1e2", 400, "UsageError", "query.limit"),
        pytest.param("/invocations?limit=" + "9" * 5000, 400, "UsageError", "query.limit", id="many digits"),
        ("/invocations?limit=²", 400, "UsageError", "query.limit"),
        ("/invocations?limit=1&limit=2", 400, "UsageError", "query.limit"),
        ("/invocations?before=x", 400, "UsageError", "query.before"),
        ("/invocations?parent=%00", 400, "UsageError", "query.parent"),
        ("/invocations?statuss=failed", 400, "UsageError", "query.statuss"),
        ("/invocations?status=lost", 400, "UsageError", "query.status"),
        ("/invocations?task=%00", 400, "UsageError", "query.task"),
        ("/invocations?attribute=stage", 400, "UsageError", "query.attribute"),
        ("/invocations?attribute=a=1&attribute=a=2", 400, "UsageError", "query.attribute"),
        (f"/invocations/{UNKNOWN}", 404, "InvocationNotFound", ""),
        ("/invocations/nonsense", 404, "InvocationNotFound", ""),
        ("/invocations/%2e%2e%2f%00", 404, "InvocationNotFound", ""),
        ("/invocations/%F0%9F%92%A9/why", 404, "InvocationNotFound", ""),
        pytest.param("/invocations/" + "a" * 10_000, 404, "InvocationNotFound", "", id="a long id"),
        ("/invocations/{run}/steps/charge%239", 404, "StepNotFound", ""),
        ("/invocations/{run}/steps?after=nothing", 400, "UsageError", "query.after"),
        ("/invocations/{run}/events?after=x", 400, "UsageError", "query.after"),
        ("/invocations/{run}/events?correlation=nothing", 404, "StepNotFound", ""),
        ("/invocations/{sum}/steps", 400, "UsageError", ""),
        ("/nothing", 404, "NotFound", ""),
        ("/invocations/", 404, "NotFound", ""),
        ("//invocations", 404, "NotFound", ""),
    ],
)
def test_a_mistake_is_a_problem_that_names_its_place(
    shop: WebShop, client: TestClient, path: str, status: int, title: str, place: str
) -> None:
    answer = client.get("/api/v1" + path.format(run=shop.run.id, sum=shop.sum.id))
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["title"], problem.get("path", "")) == (
        status,
        status,
        title,
        place,
    )
    assert "Traceback" not in answer.text
    assert len(answer.content) < 2000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "NONSENSE"])
def test_another_method_is_told_which_one_to_use(client: TestClient, method: str) -> None:
    answer = client.request(method, "/api/v1/invocations")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/nothing", "/api", "/api/v2/invocations", "/api/v1x", "/hooks/", "/static/../x"])
def test_there_is_nothing_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["title"]) == (404, "NotFound")


def test_a_defect_says_nothing_to_clients(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr("holdfast.web.reading.model.ReadModel.invocations", broken)
    answer = client.get("/api/v1/invocations")
    assert (answer.status_code, answer.json()["title"]) == (500, "InternalError")
    assert "secret detail" not in answer.text
    (line,) = [each for each in caplog.records if each.name == "holdfast.web"]
    assert line.getMessage() == "could not answer GET /api/v1/invocations: ZeroDivisionError('a secret detail')"
    assert line.exc_info is not None


def test_answers_are_ascii_json_and_nothing_in_them_is_run(shop: WebShop, client: TestClient) -> None:
    answer = client.get(f"/api/v1/invocations/{shop.failure.id}")
    assert answer.text.isascii()
    assert as_json(HOSTILE) in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
