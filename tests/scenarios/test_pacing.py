"""Debounce and throttle: of calls that come too often, one runs. On every store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.crowd import together
from tests.support.patience import patient

from holdfast import App, Invocation, Status, UsageError
from holdfast.testing import Harness, testing_app


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else str(request.getfixturevalue("mongo_url"))


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}
    with App(urls.get(request.param) or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture
def t() -> Iterator[Harness]:
    with testing_app() as harness:
        yield harness


def declare(app: App, seen: list[Any], **options: Any) -> Any:
    @app.task(name="index", **options)
    def index(shop: str, price: int = 0) -> int:
        seen.append((shop, price))
        return price

    return index


# --- debounce


def test_what_is_debounced_does_not_expire_for_being_called_again(t: Harness) -> None:
    seen: list[Any] = []
    endless = declare(t.app, seen, debounce="10s", expires="15s")
    with pytest.raises(UsageError, match="debounce_max_wait= that is shorter than expires="):
        endless.submit("north")  # another call after 8 s would make it due after 18 s
    with pytest.raises(UsageError, match="debounce_max_wait="):
        endless.options(debounce="10s", debounce_max_wait="15s").submit("north")
    index = endless.options(debounce="10s", debounce_max_wait="12s")
    first = index.submit("north", 1)
    t.advance("8s")
    assert index.submit("north", 2).id == first.id
    t.advance("20s", check=True)
    assert (seen, first.status) == ([("north", 2)], Status.SUCCESS)


def test_the_last_call_wins_after_it_is_quiet(t: Harness) -> None:
    seen: list[Any] = []
    index = declare(t.app, seen, debounce="5s")
    handles = {index.submit("north", 1)}
    for price in (2, 3, 4):
        t.advance("4s")
        handles.add(index.submit("north", price))
    assert (len(handles), seen) == (1, [])
    t.advance("4.9s")
    assert seen == []
    t.advance("0.2s")
    assert seen == [("north", 4)]
    (one,) = handles
    assert one.result() == 4
    assert [line.status for line in one.history()][:4] == [Status.REGISTERED] * 4
    assert index.submit("north", 5) != one
    assert t.drain(until="5s").ran[0].args == ("north", 5)


def test_it_does_not_wait_longer_than_is_said(t: Harness) -> None:
    seen: list[Any] = []
    index = declare(t.app, seen, debounce="5s", debounce_max_wait="12s")
    for second in range(30):
        index.submit("north", second)
        t.advance("1s")
    assert [price for _, price in seen] == [11, 23]


def test_a_kind_is_a_task_some_arguments_or_a_name(t: Harness) -> None:
    index = declare(t.app, [], debounce="5s", unique_by="shop")
    assert index.submit("north", 1) == index.submit("north", 2) != index.submit("south", 1)
    plain = t.app.task(name="plain")(_work)
    one, two = (plain.options(debounce="5s", debounce_key=name) for name in ("a", "b"))
    assert one.submit(1) == one.submit(2) != two.submit(1)
    every = plain.options(debounce="5s")
    assert every.submit(1) == every.submit(2) != one.submit(3)
    assert plain.submit(1) != every.submit(3)


def _work(number: int) -> int:
    return number


def test_handles_of_all_callers_are_of_the_one_that_runs(app: App) -> None:
    seen: list[Any] = []
    index = declare(app, seen, debounce=0.3)
    with app.runner():
        handles = [index.submit("north", price) for price in range(5)]
        results = [handle.result(timeout=patient(20)) for handle in handles]
    assert results[-1] == 4
    assert len(seen) == len(set(handles))  # one, if this was quick enough


def test_many_in_one_map(app: App) -> None:
    index = declare(app, [], debounce="1h")
    group = index.map([("north", 1), ("north", 2), ("north", 3)])
    assert len(set(group)) == 1
    assert app.runtime.codec.decode_call(group[0].record().arguments)[0] == ("north", 3)
    assert len(app.invocations()) == 1
    assert "debounced" in group[0].history()[-1].why


def test_large_arguments_are_replaced_by_large_ones(app: App) -> None:
    @app.task(name="size", debounce=0.2)
    def size(data: bytes) -> bytes:
        return data[:1] + b"%d" % len(data)

    size.submit(b"a" * 100_000)
    last = size.submit(b"b" * 200_000)
    with app.runner():
        assert last.result(timeout=patient(20)) == b"b200000"


def test_one_that_waits_for_a_slot_is_debounced_too(app: App) -> None:
    free, seen = threading.Event(), []

    @app.task(name="index", debounce=0.05, limit=1)
    def index(number: int) -> int:
        seen.append(number)
        assert number or free.wait(20)
        return number

    with app.runner(concurrency=4):
        first = index.submit(0)
        _wait_for(first, Status.RUNNING)
        second = index.submit(1)
        _wait_for(second, Status.CONCURRENCY_CONTROLLED)
        assert index.submit(2) == second
        free.set()
        assert (first.result(timeout=patient(20)), second.result(timeout=patient(20))) == (0, 2)
    assert seen == [0, 2]


def _wait_for(invocation: Invocation[Any], status: Status) -> None:
    patience = threading.Event()
    for _ in range(2000):
        if invocation.status is status:
            return
        patience.wait(0.01)
    raise AssertionError(f"{invocation.id} is {invocation.status}, not {status}")


def test_calls_from_many_threads_lose_none_that_came_last(app: App) -> None:
    """Whatever races: after the last call of all, something runs with arguments that nobody replaced."""
    seen: list[Any] = []
    index = declare(app, seen, debounce=0.02)
    ready = threading.Barrier(4)

    def submit(thread: int) -> set[Invocation[Any]]:
        ready.wait(20)
        return {index.submit("north", thread * 100 + turn) for turn in range(25)}

    with app.runner(concurrency=4):
        with ThreadPoolExecutor(4) as pool:
            handles = set().union(*pool.map(submit, range(4)))
        last = index.submit("north", 999)
        assert last.result(timeout=patient(20)) == 999
        for handle in handles:
            handle.result(timeout=patient(20))
    assert seen[-1] == ("north", 999)
    stored = {handle.id for handle in handles | {last}}
    assert len(seen) == len(stored) == len(app.invocations(limit=1000))
    lasts = {app.runtime.codec.decode_call(record.arguments)[0] for record in app.invocations(limit=1000)}
    assert lasts == set(seen)  # what was stored last is what ran


# --- throttle


def test_the_first_call_runs_and_the_next_ones_are_it(t: Harness) -> None:
    seen: list[Any] = []
    index = declare(t.app, seen, throttle="10s")
    first = index.submit("north", 1)
    t.drain()
    assert seen == [("north", 1)]
    t.advance("9s")
    assert index.submit("south", 2) == first
    t.advance("2s")
    assert index.submit("north", 3) != first
    t.drain()
    assert seen == [("north", 1), ("north", 3)]


def test_while_none_could_start_none_is_added(t: Harness) -> None:
    index = declare(t.app, [], throttle="10s", unique_by="shop")
    first = index.submit("north", 1)
    assert index.submit("south", 1) != first
    t.clock.advance(60)
    assert index.submit("north", 2) == first  # it still waits
    t.drain()
    second = index.submit("north", 3)
    assert second != first
    t.drain()
    assert index.submit("north", 4) == second


def test_throttle_on_every_store(app: App) -> None:
    index = declare(app, [], throttle="1h")
    named = app.task(name="named")(_work).options(throttle="1h", throttle_key="a")
    ready = threading.Barrier(8)

    def submit(_: int) -> str:
        ready.wait(20)
        return index.submit("north").id  # type: ignore[no-any-return]

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(submit, range(8)))
    assert len(ids) == 1
    with app.runner():
        assert index.submit("north", 7).result(timeout=patient(20)) == 0
        assert {index.submit("south", 8).id} == ids
        assert named.submit(1).result(timeout=patient(20)) == named.submit(2).result(timeout=patient(20)) == 1


# --- processes


def hammer(url: str, number: int, ready: Callable[[], object]) -> None:
    with App(url) as app:
        index = declare(app, [], debounce="1h", unique_by="shop")
        app.invocations(limit=1)
        ready()
        for turn in range(10):
            index.submit(f"shop {turn % 2}", number * 100 + turn)


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite", "mongodb"], indirect=True)
def test_calls_of_eight_processes_are_one_of_each_kind(url: str) -> None:
    with App(url) as app:
        app.invocations(limit=1)
        together(hammer, url)
        records = app.invocations(limit=100)
        assert len(records) == 2
        for record in records:
            assert record.version == 40  # every call is in it, and none twice
            (shop, price), _ = app.runtime.codec.decode_call(record.arguments)
            assert price % 100 in ({8} if shop == "shop 0" else {9})  # the last of one of them


# --- what contradicts itself


def test_contradictions_are_refused(app: App) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            app.task(name="wrong", **options)(_work)

    refused("debounce= and throttle= contradict", debounce=1, throttle=1)
    refused("unique= contradicts", debounce=1, unique=True)
    refused("contradicts when_different", throttle=1, when_different="raise")
    refused("the limit that a call is under would change", debounce=1, limit_by="*")
    refused("debounce_max_wait= needs debounce=", debounce_max_wait=5)
    refused("debounce=0: expected a length of time", debounce=0)
    refused("no parameter 'nonsense'", debounce=1, unique_by="nonsense")
    refused("alone changes nothing", key_arguments=["number"])
    app.task(name="keys", debounce=1, limit_by="number", unique_by="number")(_work)

    paced = app.task(name="paced", debounce=1)(_work)
    plain = app.task(name="plain")(_work)
    twins = app.task(name="twins", unique=True)(_work)
    for match, call in (
        ("key= contradict", lambda: paced.options(key="a")),
        ("key= contradict", lambda: plain.options(throttle=1).options(key="a")),
        ("leave delay= and at= out", lambda: paced.options(delay=5)),
        ("cannot be part of session=", lambda: paced.options(session=object())),
        ("debounce_key= needs debounce=", lambda: plain.options(debounce_key="a")),
        ("throttle_key='': expected a text", lambda: plain.options(throttle=1, throttle_key="")),
        ("both set its dedup key", lambda: twins.options(throttle=1)),
    ):
        with pytest.raises(UsageError, match=match):
            call()
    plain.options(throttle=1, delay=5)
