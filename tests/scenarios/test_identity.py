"""One key is one call for a time, and one of a kind waits: on every store."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast import App, KeyTaken, UsageError
from holdfast.errors import TwinDiffers

pytestmark = [pytest.mark.xdist_group("mongo")]


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


def declare(app: App, **options: Any) -> Any:
    @app.task(name="ship", **options)
    def ship(order: int, label: str = "") -> int:
        return order

    return ship


def test_calls_with_a_key_are_listed_by_their_time(app: App) -> None:
    ship = declare(app)
    ids = [
        ship.options(key=f"order {number}").submit(number).id if number % 2 else ship.submit(number).id
        for number in range(10)
    ]
    assert [record.id for record in app.invocations()] == ids[::-1]


def test_of_many_threads_with_one_key_one_stores_a_call(app: App) -> None:
    ship = declare(app)
    ready = threading.Barrier(8)

    def submit(_: int) -> str:
        ready.wait(20)
        return ship.options(key="order 7").submit(7).id  # type: ignore[no-any-return]

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(submit, range(8)))) == 1
    assert len(app.invocations()) == 1


def test_a_key_is_free_again_a_while_after_the_end(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    ship = declare(app)
    keyed = ship.options(key="order 7", key_for="1h")
    first = keyed.submit(7)
    store = app._ready().store
    now = store.now

    def later(seconds: float) -> None:
        monkeypatch.setattr(store, "now", lambda: now() + seconds)

    later(7200)
    assert keyed.submit(7) == first  # it has not ended
    monkeypatch.setattr(store, "now", now)
    with app.runner():
        assert first.result(timeout=20) == 7
    assert keyed.submit(7) == first
    later(3590)
    assert keyed.submit(7) == first
    with pytest.raises(KeyTaken):
        keyed.submit(8)
    later(3700)
    second = keyed.submit(8)
    assert second != first
    assert (first.record().key, second.record().key) == (None, "order 7")
    assert keyed.submit(8) == second


def test_a_key_that_is_over_is_free_inside_a_transaction_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        keyed = declare(app).options(key="order 7", key_for=0)
        first = keyed.submit(7)
        with app.runner():
            first.result(timeout=20)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            second = keyed.options(session=connection).submit(7)
        assert second != first
        assert second.record().key == "order 7"


def test_one_of_a_kind_waits(app: App) -> None:
    by_task = app.task(name="all", registration_concurrency="task")(_take)
    by_arguments = app.task(name="equal", registration_concurrency="arguments")(_take)
    by_keys = app.task(name="keyed", registration_concurrency="keys", key_arguments=["order"])(_take)
    assert by_task.submit(1).id == by_task.submit(2).id
    assert by_arguments.submit(1).id == by_arguments.submit(order=1, label="").id != by_arguments.submit(2).id
    assert by_keys.submit(1, "a").id == by_keys.submit(1, "b").id != by_keys.submit(2).id
    group = by_arguments.map([3, 3, 4])
    assert group[0] == group[1] != group[2]
    with app.runner():
        group.results(timeout=20)
    assert by_arguments.submit(3).id != group[0].id


def _take(order: int, label: str = "") -> int:
    return order


def test_a_twin_that_differs_may_be_refused(app: App) -> None:
    options: dict[str, Any] = {"registration_concurrency": "keys", "key_arguments": ["order"]}
    strict = app.task(name="strict", on_diff_non_key_args_raise=True, **options)(_take)
    first = strict.submit(1, "a")
    assert strict.submit(1, label="a") == first
    with pytest.raises(TwinDiffers, match=first.id):
        strict.submit(1, "b")


def test_in_async_code(app: App) -> None:
    ship = declare(app, registration_concurrency="task")

    async def both() -> tuple[str, str]:
        one, other = await asyncio.gather(ship.asubmit(1), ship.asubmit(2))
        return one.id, other.id

    one, other = asyncio.run(both())
    assert one == other


def test_what_makes_no_sense_is_refused(app: App) -> None:
    with pytest.raises(UsageError, match="give key= as well"):
        declare(app).options(key_for="1h")
    with pytest.raises(UsageError, match="registration_concurrency='both': expected one of"):
        app.task(name="a", registration_concurrency="both")(_take)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match='registration_concurrency="keys" and key_arguments'):
        app.task(name="b", registration_concurrency="keys")(_take)
    with pytest.raises(UsageError, match="go together"):
        app.task(name="c", key_arguments=["order"])(_take)
