"""One key is one call for a time, and one of a kind waits: on every store."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.support.crowd import together
from tests.support.patience import patient

from holdfast import App, UsageError
from holdfast.errors import KeyTaken, StoreUnavailable, TwinDiffers


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
    store = app.runtime.ready().store
    now = store.now

    def later(seconds: float) -> None:
        monkeypatch.setattr(store, "now", lambda: now() + seconds)

    later(7200)
    assert keyed.submit(7) == first  # it has not ended
    monkeypatch.setattr(store, "now", now)
    with app.runner():
        assert first.result(timeout=patient(20)) == 7
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
            first.result(timeout=patient(20))
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            second = keyed.options(session=connection).submit(7)
        assert second != first
        assert second.record().key == "order 7"


def test_one_of_a_kind_waits(app: App) -> None:
    by_task = app.task(name="all", unique=True)(_take)
    by_arguments = app.task(name="equal", unique_by="*")(_take)
    by_keys = app.task(name="keyed", unique_by="order")(_take)
    assert by_task.submit(1).id == by_task.submit(2).id
    assert by_arguments.submit(1).id == by_arguments.submit(order=1, label="").id != by_arguments.submit(2).id
    assert by_keys.submit(1, "a").id == by_keys.submit(1, "b").id != by_keys.submit(2).id
    group = by_arguments.map([3, 3, 4])
    assert group[0] == group[1] != group[2]
    with app.runner():
        group.results(timeout=patient(20))
    assert by_arguments.submit(3).id != group[0].id


def _take(order: int, label: str = "") -> int:
    return order


def test_a_twin_that_differs_may_be_refused(app: App) -> None:
    options: dict[str, Any] = {"unique_by": "order"}
    strict = app.task(name="strict", when_different="raise", **options)(_take)
    first = strict.submit(1, "a")
    assert strict.submit(1, label="a") == first
    with pytest.raises(TwinDiffers, match=first.id):
        strict.submit(1, "b")


def test_in_async_code(app: App) -> None:
    ship = declare(app, unique=True)

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
    with pytest.raises(UsageError, match='registration_concurrency="keys" needs key_arguments'):
        app.task(name="b", registration_concurrency="keys")(_take)
    with pytest.raises(UsageError, match="alone changes nothing"):
        app.task(name="c", key_arguments=["order"])(_take)
    with pytest.raises(UsageError, match="give unique= or unique_by="):
        app.task(name="c", when_different="raise")(_take)
    with pytest.raises(UsageError, match="lone surrogate"):
        app.task(name="d")(_take).options(key="\ud800")


_ABSENT = object()


def test_a_key_tells_apart_what_is_equal_to_python(app: App) -> None:
    @app.task(name="switch")
    def switch(value: Any, *more: Any, other: Any = _ABSENT, **rest: Any) -> None:
        pass

    for key, (call, same, others) in {
        "one": ((1,), (1,), [(True,), (1.0,)]),
        "list": (([1, {"a": 0}],), ([1, {"a": 0}],), [([True, {"a": 0}],), ([1, {"a": False}],)]),
        "dict": (({"a": 1, "b": 2},), ({"b": 2, "a": 1},), [({"a": True, "b": 2},)]),
        "more": ((1, b"a" * 100_000, 2), (1, b"a" * 100_000, 2), [(1, b"b" * 100_000, 2), (1, b"a" * 100_000, 2.0)]),
    }.items():
        keyed = switch.options(key=key)
        first = keyed.submit(*call)
        assert keyed.submit(*same) == first
        for other in others:
            with pytest.raises(KeyTaken):
                keyed.submit(*other)
        with pytest.raises(KeyTaken):
            keyed.submit(*call, other=1)


def test_a_twin_that_differs_in_the_type_alone_differs(app: App) -> None:
    options: dict[str, Any] = {"unique_by": "order"}
    strict = app.task(name="strict", when_different="raise", **options)(_take)
    first = strict.submit(1, label=1)
    with pytest.raises(TwinDiffers, match=first.id):
        strict.submit(1, label=True)


def test_other_large_arguments_are_other_arguments(app: App) -> None:
    @app.task(name="store")
    def store(data: bytes) -> int:
        return len(data)

    keyed = store.options(key="file")
    first = keyed.submit(b"a" * 100_000)
    assert keyed.submit(data=b"a" * 100_000) == first
    with pytest.raises(KeyTaken):
        keyed.submit(b"b" * 100_000)


def test_a_submitter_that_dies_after_it_freed_a_key_leaves_it_to_the_next(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = declare(app).options(key="order 7", key_for=0)
    first = keyed.submit(7)
    with app.runner():
        first.result(timeout=patient(20))
    store = app.runtime.ready().store
    insert = store.insert

    async def once(records: Any) -> Any:
        if first.id and (await store.get(app.name, [first.id]))[0].key is None:  # type: ignore[union-attr]
            raise StoreUnavailable("gone")
        return await insert(records)

    monkeypatch.setattr(store, "insert", once)
    with pytest.raises(StoreUnavailable):
        keyed.submit(8)
    monkeypatch.setattr(store, "insert", insert)
    assert (first.record().key, len(app.invocations())) == (None, 1)
    second = keyed.submit(8)
    assert second.record().key == "order 7"
    assert keyed.submit(8) == second


def test_with_a_key_that_alone_says_what_is_the_same(app: App) -> None:
    ship = declare(app, unique=True)
    waiting = ship.submit(1)
    keyed = ship.options(key="order 2")
    assert keyed.submit(2) != waiting
    with app.runner():
        waiting.result(timeout=patient(20))
    assert keyed.submit(2) == keyed.submit(2)
    assert len(app.invocations()) == 2


def test_a_twin_that_is_claimed_at_that_moment_is_followed_by_another(app: App) -> None:
    """Every call gets a handle to one that had not been started when the call began, or to a new one."""
    ran: list[int] = []

    @app.task(name="count", unique=True)
    def count(number: int) -> int:
        ran.append(number)
        return number

    def submit(number: int) -> set[str]:
        return {count.submit(number * 100 + turn).id for turn in range(25)}

    with app.runner(concurrency=4), ThreadPoolExecutor(4) as pool:
        ids = set().union(*pool.map(submit, range(4)))
        last = count.submit(999)
        for id in ids | {last.id}:
            app.invocation(id).result(timeout=patient(20))
    assert len(ran) == len(ids | {last.id}) == len(app.invocations(limit=1000))


def test_twins_in_one_map_inside_a_transaction(tmp_path: Path, mongo_url: str) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        twins = declare(app, unique_by="*")
        app.invocations(limit=1)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            group = twins.options(session=connection).map([1, 1, 2])
        assert group[0] == group[1] != group[2]
        assert len(app.invocations()) == 2
    with App(mongo_url) as app, MongoClient[Any](mongo_url) as client, client.start_session() as session:
        twins = declare(app, unique_by="*")
        app.invocations(limit=1)
        group = session.with_transaction(lambda session: twins.options(session=session).map([1, 1, 2]))
        assert group[0] == group[1] != group[2]
        assert len(app.invocations()) == 2


# --- processes


def submit_keys(url: str, number: int, ready: Callable[[], object]) -> tuple[list[str], str]:
    with App(url) as app:
        ship = declare(app, unique=True)
        app.invocations(limit=1)
        ready()
        keyed = [ship.options(key=f"order {turn}", key_for=3600).submit(turn).id for turn in range(10)]
        return [str(id) for id in keyed], str(ship.submit(99).id)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "mongodb"])
def test_of_eight_processes_with_one_key_one_stores_a_call(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """At first, and once more when the time of the keys is over and all of them want them at once."""
    url = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else request.getfixturevalue("mongo_url")
    with App(url) as app:
        ship = declare(app, unique=True)
        old = [ship.options(key=f"order {turn}", key_for=0).submit(turn) for turn in range(5)]
        with app.runner():
            for invocation in old:
                invocation.result(timeout=patient(20))
        got = together(submit_keys, url)
        assert len({tuple(keyed) for keyed, _ in got}) == len({twin for _, twin in got}) == 1
        records = app.invocations(limit=100)
        assert len(records) == 5 + 10 + 1
        assert sorted(record.key for record in records if record.key) == sorted(f"order {n}" for n in range(10))
