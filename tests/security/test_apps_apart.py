"""S20: an app's name is part of every question, so the ids of another app are not found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import App, hook, stream
from holdfast.errors import HoldfastError


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
        assert one.invocation(done.id).result(timeout=1) == "x"
        assert str(one.invocation(waiting.id).status) == "registered"
