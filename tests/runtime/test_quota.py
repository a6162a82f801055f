"""max_waiting: a flood of submits is refused, nothing of a refused submit is stored, and room comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, group
from holdfast.errors import QueueFull
from holdfast.runtime.quota import FRESH_SECONDS

MOST = 1000


@pytest.fixture(params=["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "mongo":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/shop.db"


def shop(url: str, most: int = MOST, **settings: Any) -> App:
    app = App(url, name="shop", max_waiting=most, poll_interval_seconds=0.1, **settings)
    app.task(name="add")(add)
    app.task(name="total")(sum)
    return app


def add(x: int) -> int:
    return x


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with shop(url) as made:
        yield made


def waiting(app: App) -> int:
    store = app.runtime.ready().store
    return sum(app.runtime.run(store.counts("shop")).values())


def test_a_flood_of_submits_stops_at_the_quota(app: App) -> None:
    task, refused = app.tasks["add"], 0
    for start in range(0, 100_000, 300):
        try:
            task.map(range(start, start + 300))
        except QueueFull:
            refused += 1
    assert waiting(app) == 900
    assert refused == 334 - 3
    for number in range(MOST - 900):
        task.submit(number)
    with pytest.raises(QueueFull):
        task.submit(1)
    with pytest.raises(QueueFull):
        asyncio.run(task.asubmit(1))
    with pytest.raises(QueueFull):
        group(task.s(number) for number in range(3)).then(app.tasks["total"]).submit()
    assert waiting(app) == MOST
    assert list(app.groups()) == []


def test_what_ended_makes_room(url: str) -> None:
    with shop(url, most=5) as app:
        task = app.tasks["add"]
        with app.runner():
            for number in range(20):  # four times as many as may wait
                call = task.submit(number)
                assert call.result(timeout=patient(30)) == number


def test_calls_for_later_wait_too(url: str) -> None:
    with shop(url, most=3) as app:
        task = app.tasks["add"]
        for _ in range(3):
            task.options(delay="1h").submit(1)
        with pytest.raises(QueueFull, match="3 calls of 'shop' wait"):
            task.submit(1)


def test_another_process_is_noticed_at_the_next_look(url: str) -> None:
    if url == "memory://":
        pytest.skip("a store of one process")
    with shop(url, most=10) as one, shop(url, most=10) as other:
        clock, quota = one.runtime.ready().clock, one.runtime.ready().quota
        before = clock.monotonic()
        one.tasks["add"].submit(1)
        assert quota.fresh_until >= before + FRESH_SECONDS
        quota.fresh_until = float("inf")
        other.tasks["add"].map(range(9))
        one.tasks["add"].submit(2)  # it has counted before: the overshoot
        assert waiting(one) == 11
        quota.fresh_until = clock.monotonic()  # as FRESH_SECONDS later
        with pytest.raises(QueueFull):
            one.tasks["add"].submit(3)


def test_what_the_engine_submits_is_let_through(url: str) -> None:
    with shop(url, most=2) as app:
        task = app.tasks["add"]
        linked = task.s(1).then(task.s()).submit()
        task.submit(5)
        with pytest.raises(QueueFull):
            task.submit(6)
        with app.runner():
            assert linked.result(timeout=patient(30)) == 1


def test_without_the_setting_nothing_is_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop(url, most=0) as app:
        engine = app.runtime.ready()
        monkeypatch.setattr(type(engine.store), "counts", None)
        app.tasks["add"].map(range(50))
