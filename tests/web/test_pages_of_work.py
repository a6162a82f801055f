"""Pages and routes about queues, limits, schedules, triggers, events, tasks, hooks and the archive: they show what is
stored, escaped; a preview touches nothing; an action does what its preview says.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.shop import HOSTILE, TOKEN, BusyShop

from holdfast import App
from holdfast.web import web_app
from holdfast.web.pages.filters import fields_of_schema
from holdfast.web.pages.table import NAVIGATION

Get = Any


@pytest.fixture(scope="module")
def shop() -> Iterator[BusyShop]:
    with BusyShop() as shop:
        yield shop


@pytest.fixture
def page(client: TestClient) -> Any:
    """Get a page as text."""

    def text(path: str, expected: int = 200, **query: Any) -> str:
        answer = client.get(path, params=query)
        assert answer.status_code == expected, answer.text
        assert not {"\x1b", "\u202e", "\0"} & set(answer.text), "nothing acts on the text around it"
        return answer.text

    return text


def schedule_of(shop: BusyShop) -> str:
    return str(eventually(lambda: [each.name for each in shop.app.schedules.list()])[0])


def test_each_entry_of_the_navigation_is_a_page(page: Any) -> None:
    for entry in NAVIGATION:
        shown = page(entry.path)
        assert f'href="{entry.path}" aria-current="page"' in shown
        assert "style=" not in shown, "the policy of content security allows no inline styles"


def test_a_queue_is_paused_and_resumed(shop: BusyShop, get: Get, page: Any, act: Any) -> None:
    assert "No runner takes work" in act("/queues/parcels/pause", preview=True)["summary"]
    assert "parcels" not in page("/queues")
    act("/queues/parcels/pause", reason=HOSTILE)
    shown = page("/queues")
    assert "parcels" in shown
    assert "&lt;script&gt;" in shown
    assert "<script>alert" not in shown
    (pause,) = [each["pause"] for each in get("/queues")["queues"] if each["name"] == "parcels"]
    assert (pause["reason"], pause["by"]) == (HOSTILE, "api_token")
    assert act("/queues/parcels/pause", preview=True)["count"] == 0
    assert act("/queues/parcels/resume")["changed"] is True
    assert act("/queues/parcels/resume")["changed"] is False
    act("/queues/%20/pause", expected=400)


def test_a_limit_is_changed_and_cleared(shop: BusyShop, get: Get, page: Any, act: Any) -> None:
    act("/limits/pack/set", preview=True, limit=5)
    before = {each["name"]: each for each in get("/limits")["limits"]}
    assert (before["pack"]["limit"], before["fetch"]["rate"]) == (2, "100/m")
    act("/limits/pack/set", limit=5, reason="a rush")
    change = get("/limits/pack")["limit"]
    assert (change["limit"], change["declared_limit"], change["change"]["reason"]) == (5, 2, "a rush")
    assert "(code: 2)" in page("/limits/pack")
    for preview in (True, False):
        for wrong in ({}, {"limit": 0}, {"rate": "many"}):
            assert act("/limits/pack/set", expected=400, preview=preview, **wrong)["title"] == "UsageError"
        for wrong in ({"limit": "5"}, {"limits": 5}):
            assert act("/limits/pack/set", expected=422, preview=preview, **wrong)["title"] == "UsageError"
    act("/limits/fetch/set", expected=400, limit=3)
    assert act("/limits/pack/clear")["changed"] is True
    assert shop.fetch.submit("Rome").result(timeout=patient(30)) == "Rome"
    assert [each["taken"] for each in get("/limits/fetch")["keys"]] == [1]
    assert '<td class="number">1</td>' in page("/limits/fetch")


def test_a_schedule_is_paused_run_and_backfilled(shop: BusyShop, get: Get, page: Any, act: Any) -> None:
    name = schedule_of(shop)
    at = f"/schedules/{name.replace('#', '%23')}"
    act(f"{at}/pause", preview=True)
    assert get(at)["state"] == "active"
    act(f"{at}/pause", reason="not now")
    assert get(at)["pause"]["why"] == "not now"
    assert "paused" in page(at)
    act(f"{at}/resume")
    times = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-01T02:59:00Z"}
    plan = act(f"{at}/backfill", preview=True, **times)
    made = act(f"{at}/backfill", request="once", **times)
    assert plan["count"] == made["count"] == len(made["ids"]) >= 2
    assert act(f"{at}/backfill", request="once", **times)["ids"] == made["ids"], "a request is done once"
    once = act(f"{at}/run", request="now")
    assert once["id"] == act(f"{at}/run", request="now")["id"]
    act(f"{at}/backfill", expected=400, start="yesterday", end="now")
    act(f"{at}/backfill", expected=422, start="2026-01-01T00:00:00Z")
    act("/schedules/unknown/pause", expected=404)
    page("/schedules/unknown", expected=404)


def test_a_schedule_is_made_and_deleted(get: Get, act: Any) -> None:
    body = {"name": "hourly", "task": "add", "args": [1], "kwargs": {"b": 2}, "every": "1h"}
    act("/schedules", preview=True, **body)
    assert "hourly" not in [each["name"] for each in get("/schedules")["schedules"]]
    act("/schedules", **body)
    assert get("/schedules/hourly")["arguments"] == {"args": [1], "kwargs": {"b": 2}}
    act("/schedules", expected=400, **body | {"task": "nothing"})
    act("/schedules", expected=400, **body | {"name": "other", "every": None})
    act("/schedules/hourly/delete", preview=True)
    act("/schedules/hourly/delete")
    assert "hourly" not in [each["name"] for each in get("/schedules")["schedules"]]


def test_the_last_ticks_of_a_schedule_are_found(shop: BusyShop, get: Get, act: Any) -> None:
    act("/schedules", name="often", task="add", args=[1], every="1s")
    try:
        past = eventually(lambda: [each for each in get("/schedules/often")["past"] if each["status"] == "success"])
        assert {shop.app.invocation(each["id"]).record().task for each in past} == {"add"}
    finally:
        act("/schedules/often/delete")


def test_triggers_are_listed_and_drawn(shop: BusyShop, get: Get, page: Any) -> None:
    found = eventually(lambda: [each for each in get("/triggers")["triggers"] if each["task"] == "pack"])
    assert found[0]["causes"] == ["the event order.created"]
    shown = page("/schedules")
    assert "the event order.created" in shown
    assert "<path" in shown


def test_an_event_is_emitted_and_shown_with_what_it_caused(get: Get, page: Any, act: Any) -> None:
    assert act("/events", name="order.created", preview=True)["items"] == ["pack"]
    assert get("/events", name="order.created")["events"] == []
    made = act("/events", name="order.created", payload={"text": HOSTILE}, key="42")
    assert act("/events", name="order.created", key="42")["id"] == made["id"]
    eventually(lambda: get(f"/events/{made['id']}")["caused"])
    for path in ("/events", f"/events/{made['id']}"):
        assert "<script>alert" not in page(path), path
    page("/events/nothing", expected=404)
    act("/events", expected=400, name="two words")
    page = get("/events", limit=1)
    assert page["before"] == made["id"]
    assert get("/events", limit=1, before=page["before"])["events"] == []


def test_tasks_are_shown_with_options_figures_and_a_form(shop: BusyShop, get: Get, page: Any) -> None:
    listed = {each["name"]: each for each in get("/tasks")["tasks"]}
    assert listed["add"]["signature"] == "(a: int, b: int = 0) -> int"
    assert (listed["pack"]["limit"], listed["fetch"]["rate"]) == ("2", "100/m, burst 2 by place")
    assert listed["add"]["runners"] == {"add": 1}
    shown = page("/tasks/add")
    assert "kwargs.a" in shown
    assert "a: int" in shown
    assert get("/tasks/checkout")["kind"] == "workflow"
    assert "boom" in page("/tasks", since="1h")
    page("/tasks/nothing", expected=404)


def test_a_store_alone_shows_the_tasks_that_runners_know(shop: BusyShop, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = shop.app.runtime
    monkeypatch.setattr(runtime, "tasks", {})
    with TestClient(web_app(shop.app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        shown = client.get("/tasks/add").text
        assert "is not declared by the code" in shown
        assert "/tasks/add/submit" not in shown
        assert client.get("/tasks").status_code == 200


def test_a_hook_has_a_form_made_of_its_type(shop: BusyShop, get: Get, page: Any) -> None:
    run = shop.approve.submit("77")
    hook = eventually(lambda: get("/hooks", run=run.id)["hooks"])[0]
    assert "approve:77" in page("/hooks")
    shown = page(f"/hook/{hook['name']}")
    assert "payload.by" in shown
    assert "payload.score" in shown
    page(f"/hook/{'0' * 64}", expected=404)


def test_a_limit_names_who_holds_it_and_who_waits() -> None:
    app, done = App("memory://", name="shop", api_token=TOKEN), Event()

    @app.task(name="pack", limit=1, limit_by="customer")
    def pack(customer: str) -> None:
        done.wait(patient(30))

    with app, TestClient(web_app(app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        with app.runner(concurrency=2):
            calls = [pack.submit("c-17") for _ in range(2)]
            found = eventually(lambda: (each := client.get("/api/v1/limits/pack").json())["waiters"] and each)
            shown = client.get("/limits/pack").text
            done.set()
        (waiter,), (key,) = found["waiters"], found["waiting"]
        assert {waiter["id"], key["holders"][0]["id"]} == {call.id for call in calls}
        assert waiter["label"] == "customer=c-17"
        assert all(call.id in shown for call in calls)


def test_fields_of_schemas() -> None:
    assert fields_of_schema({})[0]["kind"] == "json"
    assert fields_of_schema({"type": "integer"}) == [
        {"name": "payload", "label": "Payload", "kind": "number", "value": "", "option": "", "as_json": True}
    ]
    assert fields_of_schema({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}})[0]["kind"] == "json"
    shape = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array"}, "c": {"type": "boolean", "default": True}},
    }
    found = {each["label"]: each for each in fields_of_schema(shape)}
    assert (found["a"]["choices"], found["a"]["value"], found["a"]["optional"]) == (["x", "y"], "x", False)
    assert (found["b"]["kind"], found["c"]["kind"], found["c"]["value"]) == ("json", "checkbox", True)


def test_the_archive_is_searched_and_changed(shop: BusyShop, get: Get, page: Any, act: Any) -> None:
    failed = shop.boom.submit("once more")
    eventually(lambda: failed.status == "failed")
    assert failed.id in [each["id"] for each in get("/archive", status="failed", task="boom")["invocations"]]
    assert get("/archive", error="nothing like it")["invocations"] == []
    shown = page("/archive", status="failed")
    assert "once more" in shown
    assert "<script>alert" not in shown
    plan = act("/archive/rerun", task=["boom"], error="once more", preview=True)
    assert plan["count"] == 1
    done = act("/archive/rerun", task=["boom"], error="once more", request="r1")
    assert len(done["items"]) == 1
    assert act("/archive/retain", ids=[failed.id], retention="30d")["count"] == 1
    assert act("/archive/purge", ids=[failed.id], preview=True)["count"] == 1
    assert failed.status == "failed", "a preview removes nothing"
    assert act("/archive/purge", ids=[failed.id])["count"] == 1
    for wrong in ({}, {"since": "soon"}, {"ids": [failed.id], "status": ["failed"]}, {"status": ["running"]}):
        assert act("/archive/rerun", expected=400, **wrong)["title"] == "UsageError"
    act("/archive/retain", expected=400, ids=[failed.id], retention="1s")
    page("/archive", expected=400, since="soon")


def test_the_pages_of_the_archive_follow_each_other(shop: BusyShop, get: Get, page: Any) -> None:
    whole = [each["id"] for each in get("/archive", limit=500)["invocations"]]
    answer, paged = get("/archive", limit=3), []
    while True:
        paged += [each["id"] for each in answer["invocations"]]
        if answer["before"] is None:
            break
        answer = get("/archive", limit=3, before=answer["before"])
    assert set(whole) <= set(paged)
    assert len(paged) == len(set(paged))


def test_a_name_may_have_a_slash_in_it(shop: BusyShop, get: Get, page: Any, act: Any) -> None:
    body = {"task": "add", "args": [1], "every": "1h"}
    act("/schedules", name="a/b%2Fc", **body)
    assert get("/schedules/a%2Fb%252Fc")["name"] == "a/b%2Fc"
    assert "/schedules/a%2Fb%252Fc" in page("/schedules")
    page("/schedules/a%2Fb%252Fc")
    act("/schedules/a%2Fb%252Fc/delete")
