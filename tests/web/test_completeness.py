"""The HTTP API has all that the command line shows and does. What it has not, says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from starlette.testclient import TestClient
from tests.support.patience import eventually
from tests.web.shop import TOKEN, WebShop

from holdfast import group
from holdfast.cli import program
from holdfast.web import api
from holdfast.web.auditing import TWINS

# For each command the routes with what it shows or does.
ROUTES: dict[str, tuple[str, ...]] = {
    "submit": ("POST /tasks/{name}/submit",),
    "wake": ("POST /invocations/{id}/wake",),
    "cancel": ("POST /invocations/{id}/cancel", "POST /invocations/bulk-cancel"),
    "ps": ("GET /invocations", "GET /invocations/count", "GET /invocations/complete"),
    "show": ("GET /invocations/{id}", "GET /invocations/{id}/values"),
    "why": ("GET /invocations/{id}/why",),
    "history": ("GET /invocations/{id}/history",),
    "rerun": ("POST /invocations/{id}/rerun", "POST /invocations/bulk-rerun", "POST /archive/rerun"),
    "purge": ("POST /invocations/{id}/purge", "POST /invocations/bulk-purge", "POST /archive/purge"),
    "streams": (
        "GET /invocations/{id}/streams",
        "GET /invocations/{id}/streams/{name}",
        "GET /invocations/{id}/streams/{name}/chunks",
    ),
    "tasks": ("GET /tasks", "GET /tasks/{name}"),
    "apps": ("GET /apps",),
    "triggers": ("GET /triggers",),
    "services": ("GET /services",),
    "stats": ("GET /stats",),
    "audit": ("GET /audit",),
    "config": ("GET /config",),
    "doctor": ("GET /doctor",),
    "archive": ("GET /archive",),
    "archive retain": ("POST /archive/retain", "POST /invocations/{id}/retain"),
    "runners": ("GET /runners", "GET /runners/{id}"),
    "runners drain": ("POST /runners/{id}/drain",),
    "runners stop": ("POST /runners/{id}/stop",),
    "groups": ("GET /groups",),
    "groups show": ("GET /groups/{id}",),
    "groups cancel": ("POST /groups/{id}/cancel",),
    "queues": ("GET /queues",),
    "queues pause": ("POST /queues/{name}/pause",),
    "queues resume": ("POST /queues/{name}/resume",),
    "limits": ("GET /limits",),
    "limits list": ("GET /limits",),
    "limits show": ("GET /limits/{name}",),
    "limits set": ("POST /limits/{name}/set",),
    "limits clear": ("POST /limits/{name}/clear",),
    "schedules": ("GET /schedules",),
    "schedules show": ("GET /schedules/{name}",),
    "schedules next": ("GET /schedules/{name}",),
    "schedules create": ("POST /schedules",),
    "schedules update": ("POST /schedules/{name}/update",),
    "schedules pause": ("POST /schedules/{name}/pause",),
    "schedules resume": ("POST /schedules/{name}/resume",),
    "schedules delete": ("POST /schedules/{name}/delete",),
    "schedules run": ("POST /schedules/{name}/run",),
    "schedules backfill": ("POST /schedules/{name}/backfill",),
    "events": ("GET /events",),
    "events show": ("GET /events/{id}",),
    "events emit": ("POST /events",),
    "hooks": ("GET /hooks",),
    "hooks list": ("GET /hooks",),
    "hooks show": ("GET /hooks/{name}",),
    "hooks resume": ("POST /hooks/resume", "POST /hooks/{name}/resume"),
    "workflow steps": ("GET /invocations/{id}/steps", "GET /invocations/{id}/steps/{step:path}"),
    "workflow events": ("GET /invocations/{id}/events",),
    "workflow fork": ("POST /invocations/{id}/fork",),
    "world messages": ("GET /world/messages",),
    "world messages list": ("GET /world/messages",),
    "world messages show": ("GET /world/messages/{id}",),
    "world messages redeliver": ("POST /world/messages/{id}/redeliver",),
    "status render": ("GET /statuses",),
    "store check": ("GET /store/check",),
}
NOT_THERE = {
    "run": "it goes on until it is stopped",
    "worker": "a runner starts it",
    "dev": "it goes on until it is stopped",
    "dev-pages": "`dev` starts it",
    "top": "it is the pages, for a terminal",
    "store keys": "it reads everything",
    "access open": "it is for users of the store, as tokens are",
    "monitor": "it serves the API itself",
    "world serve": "it goes on until it is stopped",
    "world import": "it reads another database from the place of the command",
    "workflow check": "it runs the bodies of workflows, which may not end",
    "workflow replay": "it runs the body of a workflow, which may not end, and has a debugger",
    **dict.fromkeys(
        ("access token", "access token list", "access token create", "access token revoke"),
        "who has a token must not learn of others, nor make some that outlive it",
    ),
    "store prepare": "the store is there when the API answers",
    "store backup": "it writes a file on the machine of the command",
    "store roles": "it prints commands for another program, before there is a store",
}
ONLY_THERE = {
    "GET ": "the list of routes",
    "GET /openapi.json": "the description of the routes",
    "GET /live": "changes as they come, in the place of --watch",
    "GET /health": "the sentence of the first page",
    "GET /store": "facts for the page of the store",
    "GET /store/quarantine": "records for the page of the store",
    "GET /world/runs": "in `ps --kind world`",
    "GET /world/servers": "in `why` of a run of a World",
}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield each command, and each group that is a command by itself."""
    below = getattr(command, "commands", {})
    if not below or (path and "--json" in [each for option in command.params for each in option.opts]):
        yield " ".join(path)
    for name, each in below.items():
        yield from commands(each, (*path, name))


def test_each_command_has_a_route_or_a_reason() -> None:
    there = set(commands(typer.main.get_command(program._make())))
    assert there == ROUTES.keys() | NOT_THERE.keys()
    assert not ROUTES.keys() & NOT_THERE.keys()


def test_each_route_is_there_and_has_a_command() -> None:
    named = {route for routes in ROUTES.values() for route in routes}
    assert named | ONLY_THERE.keys() == {f"{each.method} {each.path}" for each in api.ROUTES}
    assert not named & ONLY_THERE.keys()


def test_what_a_route_changes_is_recorded_as_by_its_command() -> None:
    actions = {f"{each.method} {each.path}": each.action for each in api.ROUTES}
    for command, routes in ROUTES.items():
        for route in routes:
            if actions[route] in TWINS:
                assert TWINS[actions[route]] == command, route


# --- routes that only programs use


def test_a_group_is_shown_and_cancelled(shop: WebShop, get: Any, act: Any, client: TestClient) -> None:
    later = shop.add.options(delay="1h")
    made = group([later.s(1), later.s(2), later.s(3)]).submit()
    others = group([shop.add.s(4)]).submit()
    newest, oldest = sorted([made.id, others.id], reverse=True)  # of one millisecond, perhaps
    assert [each["id"] for each in get("/groups", limit=1)["groups"]] == [newest]
    before = get("/groups", limit=1)["before"]
    assert [each["id"] for each in get("/groups", limit=1, before=before)["groups"]] == [oldest]
    found = get(f"/groups/{made.id}")
    assert (found["size"], found["counted"], sum(found["counts"].values())) == (3, 3, 3)
    assert (found["first"], found["last"]) == (made.ids[0], made.ids[-1])
    assert act(f"/groups/{made.id}/cancel", preview=True)["count"] == 3
    assert not {"cancelled", "cancelling"} & get(f"/groups/{made.id}")["counts"].keys()
    assert act(f"/groups/{made.id}/cancel", reason="no")["counts"] == {"cancelled": 3}
    for id in ("0" * 26, made.id[:20], "x"):
        assert client.get(f"/api/v1/groups/{id}").status_code == 404
        act(f"/groups/{id}/cancel", expected=404)


def test_apps_settings_and_statuses_are_shown(get: Any) -> None:
    (app,) = get("/apps")["apps"]
    assert (app["name"], app["runners"], app["invocations"] >= app["open"] > 0) == ("shop", 1, True)
    found = {each["name"]: each for each in get("/config")["settings"]}
    assert found["api_token"]["value"] == "***"
    assert TOKEN not in str(found)
    assert any(each["subject"] == "stuck work" for each in get("/doctor")["findings"])
    statuses = {each["name"]: each for each in get("/statuses")["statuses"]}
    assert "running" in statuses["pending"]["next"]
    assert get("/statuses", format="svg")["text"].startswith("<svg")


def test_a_cursor_that_is_not_there_is_a_mistake_of_the_request(client: TestClient) -> None:
    answer = client.get("/api/v1/archive", params={"before": "0" * 26})
    assert (answer.status_code, answer.json()["path"]) == (400, "query.before")


def test_a_schedule_has_all_its_options(shop: WebShop, get: Any, act: Any) -> None:
    terms = {"start": "2099-01-01T00:00:00Z", "end": "2099-02-01T00:00:00Z", "jitter": "5s", "unique": True}
    body = {"name": "often", "task": "add", "args": [1], "every": "1h", "queue": "slow", "priority": 7}
    caught = {"catch_up": "all", "catch_up_most": 3}
    act("/schedules", preview=True, **body)
    assert get("/schedules")["schedules"] == []
    act("/schedules", **body, **terms, **caught)
    record = eventually(lambda: shop.app.schedules.get("often"))
    assert (record.call.queue, record.call.priority, record.rules.catch_up_most, record.rules.unique) == (
        *("slow", 7, 3),
        True,
    )
    act("/schedules/often/update", preview=True, every="2h")
    assert get("/schedules/often")["when"] == get("/schedules")["schedules"][0]["when"]
    act("/schedules/often/update", every="2h", end=None, task="add", args=[5])
    changed = shop.app.schedules.get("often")
    assert (changed.timing.describe(), changed.rules.ends_at, changed.rules.starts_at) == (
        "every 2h",
        None,
        record.rules.starts_at,
    )
    assert get("/schedules/often")["arguments"]["args"] == [5]
    for wrong in ({}, {"args": [1]}, {"end": "soon"}, {"every": "never"}, {"cron": "* *", "every": "1h"}):
        for preview in (True, False):
            act("/schedules/often/update", expected=400, preview=preview, **wrong)
    act("/schedules/often/update", expected=400, task="none")
    act("/schedules/none/update", expected=404, every="1h")
