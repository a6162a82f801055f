"""Rates in virtual time: never above rate × time + burst, no start stays unused, and what waits costs nothing."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.fleet import APP, Fleet, definition, virtually
from tests.support.windows import excess

from holdfast.model import changes
from holdfast.model.cancellation import cancel
from holdfast.model.changes import MoveUp
from holdfast.model.claims import blocked
from holdfast.model.limits import Limit
from holdfast.model.rates import CHANGE, LimitChange, Rate, rate_key, rate_of
from holdfast.model.records import Cancellation, Entry, Terms
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.store.contract import Filter

WAITING = Filter(statuses=frozenset({Status.CONCURRENCY_CONTROLLED}))
SWEEP = 3.0  # seconds within which a forgotten waiter goes on


class Stage:
    """A task that tells when each call began, by key."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.began: dict[str, list[float]] = defaultdict(list)
        self.order: list[str] = []

    def task(self, rate: Rate | None, *, name: str = "work", **facts: Any) -> TaskDefinition:
        async def work(name: str, seconds: float, key: str) -> str:
            self.began[key].append(self.fleet.clock.now())
            self.order.append(name)
            await asyncio.sleep(seconds)
            return name

        return replace(definition(work), name=name, rate=rate, **facts)

    async def submit(self, name: str, seconds: float = 0.0, key: str = "", task: str = "work", **facts: Any) -> str:
        shared = rate_key("work", key)
        facts = {"limit_key": shared, "terms": Terms(rate_key=shared)} | facts
        return await self.fleet.submit(task, name, seconds, key, **facts)

    async def all_end(self, within: float = 120.0) -> None:
        async def over() -> bool:
            return all(record.status in FINAL for record in self.fleet.store._of(APP))

        await self.fleet.until(over, within)

    async def begun(self, count: int, key: str = "", within: float = 60.0) -> None:
        async def so_many() -> bool:
            return len(self.began[key]) >= count

        await self.fleet.until(so_many, within)

    def seconds(self, key: str = "") -> float:
        return max(self.began[key]) - min(self.began[key])


@pytest.mark.parametrize(("text", "burst"), [("20/s", 1), ("20/s", 5), ("100/m", None), ("300/s", 3), ("2/s", None)])
def test_no_window_has_more_than_rate_and_burst_on_three_runners(text: str, burst: int | None) -> None:
    async def scenario(fleet: Fleet) -> None:
        stage, rate = Stage(fleet), rate_of(text, burst)
        for _ in range(3):
            await fleet.started(stage.task(rate), concurrency=3)
        for number in range(40):
            await stage.submit(f"{number}", 0.01)
        await stage.all_end()
        per_second = rate.count / rate.seconds
        assert excess(stage.began[""], per_second, rate.burst) <= 0
        least = (40 - rate.burst) / per_second
        slack = 1.6 if rate.burst < 3 else 1.2  # with a small burst the guard and the round trips cost starts
        assert least <= stage.seconds() <= least * slack + 1.0

    virtually(scenario)


def test_calls_that_come_from_all_sides_get_their_starts_in_order() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage, rng = Stage(fleet), random.Random(7)
        for _ in range(2):
            await fleet.started(stage.task(rate_of("5/s", 2)))
        for number in range(60):
            await stage.submit(f"{number:02}")
            await asyncio.sleep(rng.random() * 0.2)
        await stage.all_end()
        assert excess(stage.began[""], 5, 2) <= 0
        assert stage.order == sorted(stage.order)

    virtually(scenario)


def test_what_waits_is_neither_claimed_nor_looked_at_again() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        member = await fleet.started(stage.task(rate_of("1/s", 1)))
        for number in range(200):
            await stage.submit(f"{number:03}")
        await stage.begun(20)
        assert len(await fleet.store.find(APP, WAITING, 1000)) > 170
        since = fleet.clock.now()
        await stage.begun(30)
        assert member.line.count("claim", since=since) <= 50
        assert max(len(record.history) for record in fleet.store._of(APP)) <= 6

    virtually(scenario)


def test_a_limited_task_does_not_hold_up_another() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(rate_of("1/s")), stage.task(None, name="free"), concurrency=2)
        for number in range(100):
            await stage.submit(f"slow {number}")
        for number in range(100):
            await stage.submit(f"free {number}", task="free", key="free", limit_key=None, terms=Terms())
        await stage.begun(100, "free", within=5.0)
        assert len(stage.began[""]) <= 7

    virtually(scenario)


def test_a_thousand_keys_have_their_own_rates() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        for _ in range(2):
            await fleet.started(stage.task(rate_of("1/s", 1)), concurrency=50)
        keys = [f"k{number}" for number in range(1000)]
        for turn in range(3):
            for key in keys:
                await stage.submit(f"{turn}", key=key)
        await stage.all_end(within=60.0)
        assert max(excess(stage.began[key], 1, 1) for key in keys) <= 0
        assert max(stage.seconds(key) for key in keys) < 6.0

    virtually(scenario)


def test_the_work_of_a_dead_runner_takes_starts_again() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        first = await fleet.started(stage.task(rate_of("1/s", 4)), concurrency=8)
        for number in range(8):
            await stage.submit(f"{number}", 30.0)
        await stage.begun(4)
        await fleet.started(stage.task(rate_of("1/s", 4)), concurrency=8)
        first.crash()
        await stage.all_end(within=200.0)
        assert len(stage.began[""]) > 8
        assert excess(stage.began[""], 1, 4) <= 0

    virtually(scenario)


def test_retries_take_starts() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(rate_of("2/s", 1)), concurrency=8)
        id = await stage.submit("first", 5.0)
        await stage.begun(1)
        record = await fleet.record(id)
        for number in range(3):
            await stage.submit(f"{number}")
        await fleet.store.apply(
            [changes.recovered(record, by="test", operation="end", at=fleet.clock.now(), why="a test says so")]
        )
        await stage.begun(5, within=20.0)
        assert excess(stage.began[""], 2, 1) <= 0

    virtually(scenario)


def test_a_cancelled_call_that_was_next_stops_nobody() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(rate_of("30/m", 1)))
        await asyncio.sleep(3.0)  # for the turn at the services
        ids = [await stage.submit(f"{number}") for number in range(4)]
        await stage.begun(1)
        await fleet.until_status(ids[1], Status.REROUTED)
        record = await fleet.record(ids[1])
        asked = Cancellation(at=fleet.clock.now(), by="test", reason="", until=fleet.clock.now())
        await fleet.store.apply([cancel(record, asked, operation="cancel")])
        await stage.begun(3, within=4.0 + 2 * SWEEP)
        assert stage.order == ["0", "2", "3"]
        assert excess(stage.began[""], 0.5, 1) <= 0

    virtually(scenario)


def test_a_waiter_that_its_bucket_does_not_know_goes_on_beside_steady_traffic() -> None:
    """On MongoDB a claim may put a call off while another one finds that nobody waits any more."""

    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(rate_of("5/s", 2)))
        await asyncio.sleep(3.0)  # for the turn at the services
        await stage.submit("first")
        await stage.begun(1)
        record = await fleet.record(await stage.submit("forgotten", due_at=fleet.clock.now() + 0.05))
        away = blocked(record, operation="late", at=fleet.clock.now(), why="it waits for a start")
        await fleet.store.apply([away])
        for number in range(20):
            await stage.submit(f"{number}")
            await asyncio.sleep(0.4)
        assert stage.order.index("forgotten") <= 2 + SWEEP / 0.4

    virtually(scenario)


def changed(fleet: Fleet, version: int, **facts: Any) -> Entry:
    body = msgspec.json.encode(LimitChange(at=fleet.clock.now(), by="test", **facts))
    return Entry(app=APP, kind=CHANGE, name="work", body=body, version=version)


def test_a_change_at_run_time_reaches_all_runners_and_outlives_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        member = await fleet.started(stage.task(rate_of("1/s", 1)))
        for number in range(200):
            await stage.submit(f"{number:03}")
        await stage.begun(5)
        assert await fleet.store.put_entry(fast := changed(fleet, 1, rate="10/s", burst=2))
        await stage.begun(60, within=12.0)
        await member.stop()
        await fleet.started(stage.task(rate_of("1/s", 1)))
        await stage.begun(100, within=12.0)
        assert await fleet.store.remove_entry(fast)
        await asyncio.sleep(3.0)
        before = len(stage.began[""])
        await asyncio.sleep(10.0)
        assert 8 <= len(stage.began[""]) - before <= 11
        moved = [abs(int(name) - place) for place, name in enumerate(stage.order)]
        assert max(moved) < 10, "those of the second in which the rate changed"

    virtually(scenario)


@pytest.mark.parametrize("after", [5.0, 5.5, 6.0, 6.5])
def test_a_call_that_was_put_off_before_runners_heard_of_a_change_goes_on_by_it(after: float) -> None:
    """A change lets calls that wait in the queue be looked at, perhaps by a runner that still goes by the old rate."""

    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(rate_of("1/h", 1)))
        for number in range(3):
            await stage.submit(f"{number}")
        await asyncio.sleep(after)
        assert await fleet.store.put_entry(changed(fleet, 1, rate="10/s"))
        (late,) = await fleet.store.find(APP, Filter(statuses=frozenset({Status.REROUTED})), 10)
        await fleet.store.apply([MoveUp(app=APP, id=late.id, due_at=fleet.clock.now())])
        await stage.begun(3, within=10.0)

    virtually(scenario)


def test_waiters_of_a_task_that_has_no_rate_any_more_go_on() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        member = await fleet.started(stage.task(rate_of("1/h", 1)))
        for number in range(50):
            await stage.submit(f"{number:03}")
        await stage.begun(1)
        await member.stop()
        await fleet.started(stage.task(None))
        await stage.begun(49, within=30.0)  # the last one is due in an hour

    virtually(scenario)


def test_a_task_without_a_rate_that_has_the_name_of_a_shared_one_changes_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        paced = replace(stage.task(rate_of("1/s", 1), name="paced"), rate_name="work")
        await fleet.started(paced, stage.task(None, name="work"))
        for number in range(100):
            await stage.submit(f"{number:03}", task="paced")
        await stage.begun(20)
        assert max(len(record.history) for record in fleet.store._of(APP)) <= 6, "waiters are let go on and put off"

    virtually(scenario)


def test_a_call_under_a_limit_and_a_rate_keeps_to_both() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        for _ in range(2):
            await fleet.started(stage.task(rate_of("4/s", 2), limit=Limit(3)), concurrency=5)
        for number in range(30):
            await stage.submit(f"{number:02}", 0.5, limit_key="work")
        await stage.all_end(within=60.0)
        assert excess(stage.began[""], 4, 2) <= 0
        assert stage.seconds() < 14.0

    virtually(scenario)
