"""Limits in virtual time: never more than N at once, no slot stays empty, and ten thousand who wait cost nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fleet import APP, DEAD_AFTER, POLL, Fleet, Member, definition, virtually

from holdfast.errors import StoreUnavailable
from holdfast.fleet.services import SERVICE, Executions
from holdfast.fleet.slots import ExecutionStatus
from holdfast.model import changes
from holdfast.model.limits import Limit
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.limits import Limits
from holdfast.store.contract import Filter, Order

KEY = "work"
CYCLE = 60.0  # of the services
AT_ONCE = 0.05  # a few times to the store and back
WAITING = Filter(statuses=frozenset({Status.CONCURRENCY_CONTROLLED}))


class Stage:
    """A task that tells who runs when, by key."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def task(self, most: int | None = 1, *, waits: bool = True, name: str = "work") -> TaskDefinition:
        """`most` of None: without a limit."""

        async def work(name: str, seconds: float, key: str = KEY) -> str:
            self.now[key] += 1
            self.most[key] = max(self.most[key], self.now[key])
            self.began[name] = self.fleet.clock.now()
            try:
                await asyncio.sleep(seconds)
            finally:
                self.now[key] -= 1
                self.ended[name] = self.fleet.clock.now()
            return name

        if most is None:
            return replace(definition(work), name=name)
        return replace(definition(work), name=name, limit=Limit(most, waits), limit_by=("key",))

    async def submit(self, name: str, seconds: float = 1.0, key: str = KEY, **facts: Any) -> str:
        return await self.fleet.submit("work", name, seconds, key, **{"limit_key": key, **facts})

    async def all_end(self, within: float = 120.0) -> None:
        async def over() -> bool:
            return all(record.status in FINAL for record in self.fleet.store._of(APP))

        await self.fleet.until(over, within)

    async def running(self, count: int, key: str = KEY, within: float = 5.0) -> float:
        async def so_many() -> bool:
            return self.now[key] == count

        return await self.fleet.until(so_many, within)

    async def waiting(self) -> int:
        return len(await self.fleet.store.find(APP, WAITING, 100_000))

    async def all_wait(self, count: int) -> None:
        async def so_many() -> bool:
            return await self.waiting() == count

        await self.fleet.until(so_many, 5.0)

    @property
    def order(self) -> list[str]:
        return sorted(self.began, key=self.began.__getitem__)

    def gaps(self) -> list[float]:
        """From the end of each to the begin of the next."""
        return [self.began[after] - self.ended[before] for before, after in pairwise(self.order)]


# --- never more than N


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_never_more_than_so_many_run_at_once(most: int) -> None:
    """Three runners with places for more, two keys, and calls that come from all sides while others run."""

    async def scenario(fleet: Fleet) -> None:
        stage, rng = Stage(fleet), random.Random(most)
        for _ in range(3):
            await fleet.started(stage.task(most), concurrency=5)

        async def submitter(number: int) -> None:
            for call in range(15):
                seconds = rng.choice((0.0, 0.05, 0.3, 1.0))
                await stage.submit(f"{number}/{call}", seconds, key=rng.choice(("a", "b")))
                await asyncio.sleep(rng.random() * 0.2)

        await asyncio.gather(*[submitter(number) for number in range(5)])
        await stage.all_end()
        assert stage.most == {"a": most, "b": most}, "the limit is kept, and it is used"
        assert len(stage.began) == 75

    virtually(scenario)


def test_a_dead_runners_work_does_not_run_beside_its_successor() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        first = await fleet.started(stage.task(), concurrency=2)
        await stage.submit("a", 3.0)
        await stage.running(1)
        await stage.submit("b", 1.0)
        await stage.all_wait(1)
        await fleet.started(stage.task(), concurrency=2)
        stage.now.clear()  # of the dead: what it still does is of no effect
        died = fleet.clock.now()
        first.crash()
        await stage.all_end()
        assert stage.most[KEY] == 1
        assert stage.began["a"] - died > DEAD_AFTER - 5, "nobody took its slot while it could be alive"
        assert max(stage.began.values()) - died < DEAD_AFTER + 10

    virtually(scenario)


# --- a slot does not stay empty


def test_a_slot_that_is_given_back_is_filled_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(), concurrency=4)
        for number in range(10):
            await stage.submit(f"{number}", 0.37)
        await stage.all_end()
        assert max(stage.gaps()) < AT_ONCE, "nobody waits for a sweep, or for a look"

    virtually(scenario)


def test_all_slots_that_are_given_back_in_one_write_are_filled_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(3), concurrency=8)
        for number in range(9):
            await stage.submit(f"{number}", 0.37)
        await stage.all_end()
        rounds = sorted(stage.began.values())
        assert all(rounds[n] - rounds[n - 1] < 0.37 + AT_ONCE for n in (3, 6))
        assert rounds[-1] - rounds[0] < 2 * 0.37 + 3 * AT_ONCE

    virtually(scenario)


def test_who_is_handed_back_when_a_runner_stops_leaves_its_slot_to_others() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        first = await fleet.started(stage.task(), concurrency=2)
        long = await stage.submit("long", 500.0)
        await stage.running(1)
        await stage.submit("next", 0.1, priority=5)
        await stage.all_wait(1)
        await fleet.started(stage.task(), concurrency=2)
        await asyncio.sleep(POLL / 2)  # the other one is not to look between two writes of this one
        await first.stop(hurry=True)
        stopped = fleet.clock.now()
        await fleet.until_status(long, Status.RUNNING)
        assert stage.began["next"] - stopped < 2 * POLL, "a look, since runners here hear no hints of others"
        assert stage.began["long"] - stage.ended["next"] < AT_ONCE
        assert "concurrency_controlled_final" not in await fleet.story(long)

    virtually(scenario)


async def in_the_middle_of_its_turn(fleet: Fleet, member: Member) -> None:
    """Wait until this runner has just begun to perform the services."""

    async def its_turn() -> bool:
        trail = await Executions(fleet.store, APP, SERVICE, 0).trail(1)
        turns = [each for each in trail if each.status is ExecutionStatus.RUNNING and each.runner_id == member.id]
        return any(1 < fleet.clock.now() - each.started_at < 10 for each in turns)

    await fleet.until(its_turn, 200.0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_sweep_fills_the_slots_of_one_who_died_before_it_told_anybody(count: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        sweeper = await fleet.started(stage.task(count), concurrency=4)
        other = await fleet.started(stage.task(count), concurrency=4)
        await in_the_middle_of_its_turn(fleet, sweeper)
        sweeper.line.errors["claim"] = StoreUnavailable("not now")
        for number in range(count):
            await stage.submit(f"held {number}", 2.5)
        await stage.running(count)
        for number in range(count):
            await stage.submit(f"next {number}", 0.1)
        await stage.all_wait(count)
        del sweeper.line.errors["claim"]
        # The write that ends the holders reaches the store, and then the process is gone.
        other.line.before["apply"] = other.crash
        await stage.running(0)
        await asyncio.sleep(2 * AT_ONCE)
        assert not await fleet.store.find(APP, Filter(limit_key=KEY), 10, order=Order.SLOT)
        assert await stage.waiting() == count, "nobody has told them yet"
        freed = max(stage.ended.values())
        await stage.all_end(within=5.0)
        began = [stage.began[f"next {number}"] for number in range(count)]
        assert max(began) - freed < 2.0

    virtually(scenario)


def test_a_sweep_helps_one_whose_store_was_away_when_it_wanted_to_tell() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        member = await fleet.started(stage.task(), concurrency=4)
        await asyncio.sleep(5)
        await stage.submit("first", 1.5)
        await stage.running(1)
        await stage.submit("second", 0.1)
        await stage.all_wait(1)
        member.line.swallowed["release_waiters"] = 1
        await stage.all_end(within=10.0)
        assert stage.gaps()[0] < 2.0

    virtually(scenario)


def test_a_sweep_lets_nobody_go_who_would_find_no_slot() -> None:
    """It runs every second; whoever waits while all slots are held stays where it is."""

    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        member = await fleet.started(stage.task(2), concurrency=4)
        ids = [await stage.submit(f"{number}", 60.0) for number in range(5)]
        await stage.running(2)
        await asyncio.sleep(30)
        assert member.line.count("waiting_keys") > 20
        assert [await fleet.story(id) for id in ids[2:]] == [["registered", "concurrency_controlled"]] * 3

    virtually(scenario)


def test_a_sweep_sends_nobody_after_one_that_is_on_its_way() -> None:
    """The first one goes back to the queue, and finds no worker with a free place for a while."""

    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        task = stage.task(1)
        member = await fleet.started(task, concurrency=4)
        holder = await stage.submit("holder", 600.0)
        await stage.running(1)
        waiting = [await stage.submit(f"{number}", 600.0) for number in range(3)]
        for id in waiting:
            await fleet.until_status(id, Status.CONCURRENCY_CONTROLLED)
        member.line.errors["claim"] = StoreUnavailable("not now")
        sweeper = Limits(fleet.engine(fleet.store), {task.name: task.limit})
        record = await fleet.record(holder)
        await fleet.store.apply([changes.completed(record, result=b"", operation="end", at=fleet.clock.now())])
        assert [await sweeper.sweep() for _ in range(3)] == [1, 0, 0]
        ready = [id for id in waiting if (await fleet.record(id)).status is Status.REROUTED]
        assert ready == waiting[:1]

    virtually(scenario)


# --- refused


def test_what_is_not_to_wait_is_refused_and_names_the_holder() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(waits=False))
        first = await stage.submit("first", 3.0)
        await stage.running(1)
        second = await stage.submit("second")
        ended = await fleet.end(second, within=2.0)
        assert ended.status is Status.CONCURRENCY_CONTROLLED_FINAL
        assert first in (ended.history[-1].why or "")
        await fleet.end(first)
        third = await stage.submit("third")
        assert (await fleet.end(third)).status is Status.SUCCESS
        assert "second" not in stage.began

    virtually(scenario)


def test_what_had_begun_once_waits_although_it_was_not_to() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        first = await fleet.started(stage.task(waits=False))
        begun = await stage.submit("begun", 3.0)
        await stage.running(1)
        await first.stop(hurry=True)
        assert (await fleet.record(begun)).status is Status.REROUTED
        await stage.submit("other", 1.0, priority=5)
        await fleet.started(stage.task(waits=False))
        assert (await fleet.end(begun)).status is Status.SUCCESS
        assert "concurrency_controlled" in await fleet.story(begun)
        assert stage.began["begun"] >= stage.ended["other"]

    virtually(scenario)


# --- order


def test_priority_and_then_the_due_time_decide_who_goes_on() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        now = fleet.clock.now()
        await fleet.started(stage.task(), concurrency=4)
        await stage.submit("holder", 3.0)
        await stage.running(1)
        places = {"old": (0, -60), "older": (0, -90), "young": (0, -1), "urgent": (9, -2), "most urgent": (9, -3)}
        for name, (priority, due) in places.items():
            await stage.submit(name, 0.2, priority=priority, due_at=now + due)
        await stage.all_wait(5)
        await stage.all_end()
        assert stage.order == ["holder", "most urgent", "urgent", "older", "old", "young"]

    virtually(scenario)


# --- no herd


def test_ten_thousand_who_wait_cost_as_much_as_twenty() -> None:
    """What one freed slot costs does not depend on how many wait for it, and only one of them goes on."""
    few, many = _calls_for_ten_slots(20), _calls_for_ten_slots(10_000)
    assert abs(sum(few.values()) - sum(many.values())) <= 2, (few, many)
    assert few["release_waiters"] <= 12, "one for each slot, and a sweep now and then"
    assert sum(few.values()) <= 40, few


def _calls_for_ten_slots(waiters: int) -> Counter[str]:
    """What two runners ask of the store while ten of those who wait go on, one after another."""
    found: Counter[str] = Counter()

    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        members = [await fleet.started(stage.task(), concurrency=4) for _ in range(2)]
        await stage.submit("first", 5.0)
        await stage.running(1)
        await fleet.store.insert([fleet.new("work", f"{n}", 0.02, limit_key=KEY) for n in range(waiters)])
        await stage.all_wait(waiters)

        async def ten_went_on() -> bool:
            return len(stage.ended) > 11

        await fleet.until(ten_went_on, 10.0)
        since, until = stage.ended["first"], sorted(stage.ended.values())[10]
        assert until - since < 10 * (0.02 + AT_ONCE)
        names = ("claim", "apply", "release_waiters", "get", "find")
        found.update(
            name for member in members for at, name in member.line.calls if since < at <= until and name in names
        )
        stories = [record.history for record in fleet.store._of(APP)]
        rerouted = sum(entry.status is Status.REROUTED for story in stories for entry in story)
        assert rerouted <= len(stage.began) + 1, "nobody goes on for whom there is no slot"
        for member in members:
            member.line.errors["claim"] = StoreUnavailable("enough")

    virtually(scenario)
    return found


def test_ten_thousand_who_wait_do_not_delay_what_lies_behind_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        await fleet.started(stage.task(), concurrency=4)
        await stage.submit("holder", 300.0)
        await stage.running(1)
        crowd = [fleet.new("work", f"{n}", 0.01, limit_key=KEY) for n in range(10_000)]
        await fleet.store.insert(crowd)
        behind = [await stage.submit(f"behind {n}", 0.0, key=f"other {n}", priority=-5) for n in range(8)]
        since = fleet.clock.now()
        for id in behind:
            await fleet.end(id, within=3.0)
        assert max(stage.ended[f"behind {n}"] for n in range(8)) - since < POLL + 0.5
        later = await stage.submit("later", 0.0, key="later")
        since = fleet.clock.now()
        await fleet.end(later, within=3.0)
        assert stage.ended["later"] - since < POLL + AT_ONCE
        assert await stage.waiting() == 10_000

    virtually(scenario)


# --- a limit that changes


def test_a_lowered_limit_lets_those_who_run_go_on_and_counts_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        old = await fleet.started(stage.task(3), concurrency=4, drain=60.0)
        for number in range(3):
            await stage.submit(f"old {number}", 10.0 + 5 * number)
        await stage.running(3)
        for number in range(3):
            await stage.submit(f"new {number}", 1.0)
        await stage.all_wait(3)
        await fleet.started(stage.task(1), concurrency=4)
        await old.stop()
        assert (stage.most[KEY], stage.now[KEY]) == (3, 0)
        await stage.all_end()
        first = min(stage.began[f"new {number}"] for number in range(3))
        assert first >= max(stage.ended[f"old {number}"] for number in range(3))
        assert all(gap >= 0 for gap in stage.gaps()[-2:]), "one at a time now"

    virtually(scenario)


@pytest.mark.parametrize("most", [3, None])
def test_a_raised_limit_lets_more_in_while_the_old_ones_still_run(most: int | None) -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        old = await fleet.started(stage.task(1), concurrency=4, drain=500.0)
        await stage.submit("old", 300.0)
        await stage.running(1)
        for number in range(5):
            await stage.submit(f"new {number}", 100.0)
        await stage.all_wait(5)
        old.runner.stop()
        await fleet.started(stage.task(most), concurrency=8)
        await stage.running(most or 6, within=CYCLE + 2)  # the turn of who knows the new number
        await asyncio.sleep(20)
        assert stage.now[KEY] == (most or 6)
        assert await stage.waiting() == 6 - (most or 6)

    virtually(scenario)


def test_runners_with_different_limits_each_keep_to_their_own() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Stage(fleet)
        narrow = await fleet.started(stage.task(1), concurrency=4)
        wide = await fleet.started(stage.task(3), concurrency=4)
        ids = [await stage.submit(f"{number}", 0.3) for number in range(40)]
        await stage.all_end()
        assert stage.most[KEY] == 3
        owners = [(await fleet.record(id)).history for id in ids]
        claimed = Counter(entry.owner.partition("/")[0] for story in owners for entry in story if entry.owner)
        assert claimed[wide.id] > 0
        spans = [_span(story) for story in owners]
        for began, ended, owner in spans:
            beside = [other for other in spans if other[0] < began < other[1]]
            most = 1 if owner.startswith(narrow.id) else 3
            assert len(beside) < most, f"{owner} began at {began}, beside {beside}; ended {ended}"

    virtually(scenario)


def _span(story: Any) -> tuple[float, float, str]:
    (running,) = [entry for entry in story if entry.status is Status.RUNNING]
    return running.at, story[-1].at, running.owner
