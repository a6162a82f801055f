"""Limits as their users meet them, on every store, with real threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.scenarios import workshop
from tests.support.patience import eventually, patient

from holdfast import App, Invocation, Status
from holdfast.errors import InvocationRefused
from holdfast.executors.call import TOO_LATE
from holdfast.runtime.limits import FRESH_SECONDS, Limits

PATIENCE = patient(30.0)
QUICK: dict[str, Any] = {  # turns at the services of a second or two
    "poll_interval_seconds": 0.2,
    "atomic_service_interval_minutes": 0.05,
    "atomic_service_spread_margin_minutes": 0.002,
    "atomic_service_check_interval_minutes": 0.005,
}
STORES = ["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))]
DURABLE = STORES[1:]


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "mongo":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if kind == "memory" else f"sqlite:///{folder}/shop.db"


@pytest.fixture(params=STORES)
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    with App(url_of(request.param, request, tmp_path), name="shop", poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture(params=DURABLE)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


class Room:
    """What limited calls enter and leave. Each stays until it is let out, or until the doors are open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._let_out: set[object] = set()
        self._open = False
        self.inside: list[tuple[object, object]] = []  # keys and names
        self.most: Counter[object] = Counter()  # by key
        self.entered: list[object] = []

    def visit(self, name: object, key: object = None) -> None:
        with self._changed:
            self.inside.append((key, name))
            self.entered.append(name)
            self.most[key] = max(self.most[key], len([each for each in self.inside if each[0] == key]))
            self._changed.notify_all()
            out = self._changed.wait_for(lambda: self._open or name in self._let_out, PATIENCE)
            self.inside.remove((key, name))
        assert out, f"nobody let {name} out"

    def let_out(self, *names: object) -> None:
        with self._changed:
            self._let_out.update(names)
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_for(self, *names: object) -> None:
        """Until all of these are inside at once."""
        with self._changed:
            there = self._changed.wait_for(lambda: {name for _, name in self.inside} >= set(names), PATIENCE)
        assert there, f"inside are {self.inside}, and not {names}"


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.open()


def until_waiting(*calls: Invocation[Any]) -> None:
    eventually(lambda: all(call.status is Status.CONCURRENCY_CONTROLLED for call in calls))


def waiting(app: App) -> int:
    return len(app.invocations(status="concurrency_controlled", limit=10_000))


# --- never more than N


@pytest.mark.parametrize("most", [1, 2, 3])
def test_never_more_than_so_many_run_at_once(app: App, most: int) -> None:
    """Submitters on six threads, and two runners with more places than slots."""
    inside, peak, full = 0, 0, threading.Condition()

    @app.task(name="work", limit=most)
    def work(number: int) -> int:
        nonlocal inside, peak
        with full:
            inside += 1
            peak = max(peak, inside)
            full.notify_all()
            full.wait_for(lambda: peak >= most, PATIENCE)
        time.sleep(0.01)  # work, while others might come in
        with full:
            inside -= 1
        return number

    with app.runner(concurrency=8), app.runner(concurrency=8), ThreadPoolExecutor(6) as submitters:
        calls = list(submitters.map(work.submit, range(24)))
        assert [call.result(timeout=PATIENCE) for call in calls] == list(range(24))
    assert peak == most


# --- which calls share a limit


def test_all_calls_of_a_task_share_its_limit(app: App, room: Room) -> None:
    @app.task(name="visit", limit=1)
    def visit(name: str) -> None:
        room.visit(name)

    with app.runner(concurrency=8):
        first = visit.submit("a")
        room.wait_for("a")
        others = visit.map(["b", "c"])
        until_waiting(*others)
        assert {call.record().limit_key for call in (first, *others)} == {"visit"}
        room.open()
        others.results(timeout=PATIENCE)
    assert room.most[None] == 1


def test_equal_arguments_share_a_limit_however_they_are_given(app: App, room: Room) -> None:
    @app.task(name="visit", limit_by="*")
    def visit(shop: str, floor: int = 1) -> None:
        room.visit(shop, (shop, floor))

    with app.runner(concurrency=8):
        first = visit.submit("a", 1)
        room.wait_for("a")
        same = [visit.submit("a"), visit.submit(shop="a", floor=1), visit.submit(floor=1, shop="a")]
        other = visit.submit("b")
        upstairs = visit.submit("a", 2)
        eventually(lambda: len(room.inside) == 3)
        until_waiting(*same)
        assert len({call.record().limit_key for call in (first, *same)}) == 1
        assert len({call.record().limit_key for call in (first, other, upstairs)}) == 3
        room.open()
        for call in (first, *same, other, upstairs):
            call.result(timeout=PATIENCE)
    assert set(room.most.values()) == {1}


def test_equal_values_of_some_arguments_share_a_limit(app: App, room: Room) -> None:
    @app.task(name="bill", limit=2, limit_by="customer")
    def bill(amount: int, customer: str = "a") -> int:
        room.visit(amount, customer)
        return amount

    with app.runner(concurrency=8):
        two = [bill.submit(1, "a"), bill.submit(2, customer="a")]
        room.wait_for(1, 2)
        third = bill.submit(3)
        beside = [bill.submit(4, "b"), bill.submit(5, "b"), bill.submit(6, "c")]
        room.wait_for(1, 2, 4, 5, 6)
        until_waiting(third)
        room.let_out(2)
        room.wait_for(1, 3, 4, 5, 6)
        room.open()
        assert [call.result(timeout=PATIENCE) for call in (*two, third, *beside)] == [1, 2, 3, 4, 5, 6]
    assert room.most == {"a": 2, "b": 2, "c": 1}


# --- refused


def test_a_call_that_is_not_to_wait_is_refused_and_names_the_holder(app: App, room: Room) -> None:
    @app.task(name="visit", limit=1, when_full="refuse")
    def visit(name: str) -> str:
        room.visit(name)
        return name

    with app.runner(concurrency=4):
        first = visit.submit("a")
        room.wait_for("a")
        second = visit.submit("b")
        with pytest.raises(InvocationRefused, match=first.id):
            second.result(timeout=PATIENCE)
        assert second.status is Status.CONCURRENCY_CONTROLLED_FINAL
        room.let_out("a")
        assert first.result(timeout=PATIENCE) == "a"
        room.open()
        assert visit.submit("c").result(timeout=PATIENCE) == "c"
    assert room.entered == ["a", "c"]


def test_a_call_that_had_begun_waits_although_it_was_not_to(app: App, room: Room) -> None:
    gates = {name: threading.Event() for name in ("begun", "other")}

    @app.task(name="visit", limit=1, when_full="refuse")
    async def visit(name: str) -> str:
        room.entered.append(name)
        await asyncio.to_thread(gates[name].wait, PATIENCE)
        return name

    with app.runner(concurrency=4, drain_timeout=0):
        begun = visit.submit("begun")
        eventually(lambda: room.entered == ["begun"])
    assert begun.status is Status.REROUTED
    gates["begun"].set()
    other = visit.options(priority=5).submit("other")
    with app.runner(concurrency=4):
        eventually(lambda: begun.status is Status.CONCURRENCY_CONTROLLED)
        gates["other"].set()
        assert other.result(timeout=PATIENCE) == "other"
        assert begun.result(timeout=PATIENCE) == "begun"


# --- slots that are given back


def test_a_slot_that_is_given_back_is_filled_at_once(app: App) -> None:
    """By whoever gave it back: the sweep would need a second for each."""

    @app.task(name="work", limit=1)
    def work(number: int) -> int:
        return number

    with app.runner(concurrency=4):
        assert work.submit(0).result(timeout=PATIENCE) == 0
        began = time.monotonic()
        assert work.map(range(15)).results(timeout=PATIENCE) == list(range(15))
        assert time.monotonic() - began < 7


def test_a_sweep_helps_those_whom_nobody_told(app: App, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(name="visit", limit=1)
    def visit(name: str) -> None:
        room.visit(name)

    monkeypatch.setattr(Limits, "freed", lambda self, records: None)  # as if it died before it could tell
    with app.runner(concurrency=4):
        first = visit.submit("a")
        room.wait_for("a")
        second = visit.submit("b")
        until_waiting(second)
        room.let_out("a")
        first.result(timeout=PATIENCE)
        began = time.monotonic()
        room.wait_for("b")
        assert time.monotonic() - began < 5  # 2 s on a machine that is not busy
        room.open()


def test_priority_and_then_age_decide_who_goes_on(app: App, room: Room) -> None:
    @app.task(name="visit", limit=1)
    def visit(name: str) -> None:
        room.visit(name)

    with app.runner(concurrency=4):
        visit.submit("first")
        room.wait_for("first")
        calls = [
            visit.options(priority=priority).submit(name)
            for name, priority in (("old", 0), ("young", 0), ("urgent", 5), ("low", -5))
        ]
        until_waiting(*calls)
        room.open()
        for call in calls:
            call.result(timeout=PATIENCE)
    assert room.entered == ["first", "urgent", "old", "young", "low"]


# --- many who wait


@contextmanager
def counted(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What is asked of the store, by name."""
    store = type(app.runtime.run(app.runtime.engine()).store)
    asked: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        there = getattr(store, name)

        async def call(self: Any, *args: Any, **named: Any) -> Any:
            asked[name] += 1
            return await there(self, *args, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("claim", "apply", "release_waiters", "get", "find"):
            patch.setattr(store, name, counting(name))
        yield asked


def test_many_who_wait_cost_no_more_than_few_and_delay_nobody(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot is given back ten times, first with 40 and then with 600 who wait for it."""
    gates = {number: threading.Event() for number in (0, 10, 20)}
    reached: list[int] = []

    @app.task(name="work", limit=1)
    def work(number: int) -> None:
        reached.append(number)
        if number in gates:
            gates[number].wait(PATIENCE)

    @app.task(name="other")
    def other() -> str:
        return "done"

    def asked_until(gate: int) -> int:
        with counted(app, monkeypatch) as asked:
            gates[gate - 10].set()
            eventually(lambda: gate in reached)
            return sum(asked.values())

    with app.runner(concurrency=4):
        work.submit(0)
        eventually(lambda: reached == [0])
        work.map(range(1, 41))
        eventually(lambda: waiting(app) == 40)
        few = asked_until(10)
        work.map(range(41, 631))
        eventually(lambda: waiting(app) == 620)
        began = time.monotonic()
        assert other.submit().result(timeout=PATIENCE) == "done"
        assert time.monotonic() - began < 5
        many = asked_until(20)
        assert waiting(app) == 610
        gates[20].set()
    assert few <= 60, "a claim, an end, a release, and a look or two for each"
    assert many <= few + 20


# --- a limit that changes with a deploy


def visits(app: App, room: Room, most: int) -> Any:
    @app.task(name="visit", limit=most)
    def visit(name: str) -> str:
        room.visit(name)
        return name

    return visit


def test_a_raised_limit_lets_more_in(url: str, room: Room) -> None:
    with App(url, name="shop", **QUICK) as old, App(url, name="shop", **QUICK) as new:
        visit = visits(old, room, 1)
        visits(new, room, 3)
        with old.runner(concurrency=4):
            calls = [visit.submit("a")]
            room.wait_for("a")
            calls += visit.map(["b", "c", "d"])
            until_waiting(*calls[1:])
            with new.runner(concurrency=4):
                room.wait_for("a", "b", "c")
                until_waiting(calls[3])
                room.open()
                assert [call.result(timeout=PATIENCE) for call in calls] == ["a", "b", "c", "d"]
    assert room.most[None] == 3


def test_a_lowered_limit_lets_those_who_run_go_on_and_counts_them(url: str, room: Room) -> None:
    with App(url, name="shop", **QUICK) as old, App(url, name="shop", **QUICK) as new, ThreadPoolExecutor(1) as aside:
        visit = visits(new, room, 1)
        visits(old, room, 2)
        leaving = old.runner(concurrency=4).start()
        calls = [visit.submit("a"), visit.submit("b")]
        room.wait_for("a", "b")
        calls += visit.map(["c", "d"])
        until_waiting(*calls[2:])
        gone = aside.submit(leaving.stop)
        eventually(lambda: all(runner.draining for runner in old.runners()))
        with new.runner(concurrency=4):
            room.let_out("b")
            assert calls[1].result(timeout=PATIENCE) == "b"
            eventually(lambda: any(_times_it_waited(call) == 2 for call in calls[2:]))  # sent back, still one too many
            assert sorted(map(str, room.entered)) == ["a", "b"]
            room.let_out("a")
            gone.result(timeout=PATIENCE)
            room.wait_for("c")
            until_waiting(calls[3])  # it may have been sent back for a moment, and comes to wait again
            assert "d" not in room.entered
            room.open()
            assert [call.result(timeout=PATIENCE) for call in calls] == ["a", "b", "c", "d"]


def _times_it_waited(call: Invocation[Any]) -> int:
    return [entry.status for entry in call.history()].count(Status.CONCURRENCY_CONTROLLED)


# --- rates that are changed


def test_a_change_by_a_program_without_the_code_lets_the_next_call_be_looked_at(url: str) -> None:
    with App(url, name="shop", poll_interval_seconds=0.2) as app:

        @app.task(name="work", rate="1/h")
        def work(number: int) -> int:
            return number

        with app.runner():
            first, second = work.map([1, 2])
            first.result(timeout=PATIENCE)
            eventually(lambda: second.status is Status.REROUTED)
        assert second.record().due_at > time.time() + 3000
        heard = time.time() + FRESH_SECONDS
        with App(url, name="shop") as bare:
            bare.limits.set("work", rate="100/s")
        assert heard - 0.1 <= second.record().due_at < heard + 5, "not before all runners go by the new rate"


def test_what_is_left_of_a_rate_is_told_as_it_was_changed(url: str) -> None:
    def given(number: int) -> int:
        return number

    with App(url, name="shop", poll_interval_seconds=0.2) as app:
        work = app.task(name="work", rate="1/h")(given)
        with app.runner():
            first, second = work.map([1, 2])
            first.result(timeout=PATIENCE)
            eventually(lambda: second.status is Status.REROUTED)
        (before,) = app.limits.allowances("work")
    with App(url, name="shop") as app:
        app.task(name="work", rate="1/h")(given)
        app.limits.set("work", rate="10/s", burst=2)
        (after,) = app.limits.allowances("work")
        assert (before.rate, after.rate) == ("1/h", "10/s")
        assert after.next_at < before.next_at - 3000
        assert "the rate 10/s of work" in app.invocation(second.id).explain()


def test_a_change_of_the_rate_leaves_a_burst_that_was_given(url: str) -> None:
    with App(url, name="shop") as app:

        @app.task(name="given", rate="10/s", burst=3)
        def given() -> None: ...

        @app.task(name="plain", rate="10/s")
        def plain() -> None: ...

        def bursts() -> tuple[int | None, ...]:
            return tuple(each.burst for each in app.limits.list())

        assert bursts() == (3, 10)
        for name in ("given", "plain"):
            app.limits.set(name, rate="100/s")
        assert bursts() == (3, 100)
        app.limits.set("plain", burst=7)
        app.limits.set("plain", rate="50/s")
        assert bursts() == (3, 7)
        app.limits.clear("plain")
        assert bursts() == (3, 10)


# --- rates and processes


def test_a_call_whose_process_was_not_ready_takes_another_start(workshop_app: App) -> None:
    task = workshop_app.task(executor="process", rate="1000/s", burst=1, at_most_once=True)(workshop.chatty)
    with workshop_app.runner(concurrency=1):
        call = task.submit(1)
        call.result(timeout=PATIENCE)
    assert call.record().attempt == 1
    assert [line.why for line in call.history() if line.status == "rerouted"] == [TOO_LATE.how]
    assert workshop_app.limits.allowances(task.name)[0].taken == 2
