"""S20: an app's name is part of every question, so the ids of another app are not found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from holdfast import App, hook, stream
from holdfast.errors import HoldfastError
from holdfast.web.api import ROUTES
from holdfast.web.asgi import WebApp


@pytest.fixture(params=["sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("mongo_url")) if request.param == "mongodb" else f"sqlite:///{tmp_path}/s.db"


def test_nothing_of_one_app_is_found_or_changed_by_the_other(url: str) -> None:
    with App(url, name="one", poll_interval_seconds=0.1) as one, App(url, name="two") as two:

        @one.task(name="work")
        def work(text: str) -> str:
            stream("out").write(text)
            return text

        @one.workflow(name="wait")
        def wait() -> Any:
            return hook("token-of-one").wait()

        done, waiting = work.submit("x"), work.options(key="k", delay=3600).submit("y")
        run = wait.submit()
        one.emit("ordered", {"a": 1})
        one.schedules.create("nightly", work, ["z"], every="1h")
        with one.runner():
            assert done.result(timeout=60) == "x"
            while not one.hooks():
                pass
        refused: list[Callable[[], object]] = [
            lambda: two.invocation(done.id).status,
            lambda: two.invocation(done.id).result(timeout=1),
            lambda: two.invocation(done.id).rerun(),
            lambda: two.invocation(waiting.id).cancel(),
            lambda: two.invocation(run.id).explain(),
            lambda: list(two.invocation(done.id).stream("out")),
            lambda: two.resume_hook("token-of-one", 1),
            lambda: two.schedules.pause("nightly"),
        ]
        for act in refused:
            with pytest.raises(HoldfastError):
                act()
        assert [*two.invocations(), *two.hooks(), *two.schedules.list(), *two.events()] == []
        assert two.purge(status="success").removed == 0
        ids = [{"id": each.id} for each in (done, waiting, run, *one.events())]
        names = [{"name": each} for each in ("nightly", one.hooks()[0].name)]
        crossed(two, *ids, *names, {"id": run.id, "step": "hook#1"}, {"id": done.id, "name": "out"})
        assert one.schedules.get("nightly").pause is None
        assert one.invocation(done.id).result(timeout=1) == "x"
        assert str(one.invocation(waiting.id).status) == "registered"


def crossed(app: App, *named: dict[str, str]) -> None:
    """Ask all routes of an app for names and ids of another one, as an admin."""
    asked = set()
    with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
        for route in ROUTES:
            wanted = set(re.findall(r"{(\w+)", route.path))
            for each in (each for each in named if wanted and wanted == each.keys()):
                path = re.sub(r"{(\w+)(:path)?}", lambda part, each=each: quote(each[part[1]], safe=""), route.path)
                body = BODIES.get(route.action, {}) if route.method == "POST" else None
                answer = client.request(route.method, f"/api/v1{path}", json=body)
                asked.add(route.path)
                is_name = route.path.startswith(("/queues/", "/limits/"))  # of no record: any may be asked for
                assert answer.status_code == 404 or is_name, f"{route.method} {path}: {answer.text}"
    assert asked == {route.path for route in ROUTES if "{" in route.path}


BODIES = {
    "archive.retain": {"retention": "1h"},
    "hook.resume": {"payload": 1},
    "schedule.backfill": {"start": "2026-01-01T00:00:00Z", "end": "2026-01-02T00:00:00Z"},
    "schedule.update": {"every": "2h"},
    "workflow.fork": {"step": "hook#1"},
}
