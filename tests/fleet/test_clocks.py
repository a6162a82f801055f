"""Runners whose clocks differ, on a store that has no clock of its own, as SQLite's: stamps prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.support.fleet import (
    APP,
    CORE_APP,
    DEAD_AFTER,
    HEARTBEAT,
    NEVER,
    Fleet,
    Line,
    Member,
    add,
    nap,
    virtually,
)

from holdfast.fleet.core_tasks import QUEUE
from holdfast.fleet.failure_detector import Watch
from holdfast.fleet.runner import RECOVER_RUNNING
from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.records import InvocationRecord, RunnerRecord, WorkerRecord
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.samples import START, runner
from holdfast.testing.virtual import VirtualClock

HOUR = 3600.0
LOOKS = DEAD_AFTER / 8 + 0.3  # between two looks at a stamp


class OwnClocks(MemoryStore):
    """Stamps by the clock of whoever writes, and shows every entry."""

    abilities = Ability.NONE

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.off = 0.0  # of whoever is asking right now

    def now(self) -> float:
        return super().now() + self.off

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        return [(runner, self.now() - runner.heartbeat_at) for runner in await self.roster(app)]


class WrongLine(Line):
    """The line of a runner whose clock is off."""

    def __init__(self, store: OwnClocks, off: float) -> None:
        super().__init__(store)
        self.off = off

    def now(self) -> float:
        return self.store.now() + self.off

    async def heartbeat(
        self, app: str, runner_id: str, workers: Sequence[WorkerRecord] = (), **facts: Any
    ) -> RunnerRecord | None:
        found: RunnerRecord | None = await self.__getattr__("heartbeat")(app, runner_id, workers, **facts)
        if found is not None:
            stamped = replace(found, heartbeat_at=self.now())
            await self.store.enrol(stamped)
        return found

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        found = await self.__getattr__("silent")(app)
        return [(runner, age + self.off) for runner, age in found]


class WrongFleet(Fleet):
    async def joined(self, off: float, *functions: Any, **options: Any) -> Member:
        """Start a runner whose clock is off by so much."""
        assert isinstance(self.store, OwnClocks)
        engine_of, line = self.engine, WrongLine(self.store, off)

        def engine(store: Store) -> Any:
            return engine_of(cast(Store, line))

        self.engine = engine  # type: ignore[method-assign]
        try:
            member = self.member(*functions, **options)
        finally:
            self.engine = engine_of  # type: ignore[method-assign]
        member.line = line
        return await member.start()


def play(scenario: Any) -> None:
    async def run(fleet: Fleet) -> None:
        fleet.__class__ = WrongFleet
        await scenario(fleet)

    virtually(run, OwnClocks)


async def somebody_else(fleet: Fleet) -> None:
    """A runner that lives and does nothing."""
    entry = runner("other", app=APP, heartbeat_at=fleet.clock.now(), can_run_atomic_service=False)
    await fleet.store.enrol(entry)
    while True:
        await asyncio.sleep(HEARTBEAT)
        await fleet.store.heartbeat(APP, "other", ticks=False)


async def claimed_ahead(fleet: Fleet, at: float) -> InvocationRecord:
    """What that runner has claimed by its clock, and not started."""
    record = fleet.new("nap")
    await fleet.store.insert([record])
    claim = Claim(app=APP, lanes=("default|nap",), limit=1, owner="other/0", operation=record.id, at=at, start=False)
    (claimed,) = (await fleet.store.claim(replace(claim, ids=(record.id,)))).records
    return claimed


@pytest.mark.parametrize("off", [HOUR, 20.0, -20.0, -HOUR])
def test_a_dead_runner_is_recovered_in_time_whatever_its_clock_said(off: float) -> None:
    async def scenario(fleet: WrongFleet) -> None:
        fleet.settings = {"recover_running_invocations_cron": NEVER}
        victim = await fleet.joined(off, nap)
        id = await fleet.submit("nap", 60.0, due_at=fleet.clock.now() + min(off, 0.0))  # by its clock it is due
        await fleet.until_status(id, Status.RUNNING)
        for _ in range(2):
            await fleet.joined(0.0, nap)
        await asyncio.sleep(30)
        name = victim.id
        victim.crash()
        assert await fleet.gone(name) <= DEAD_AFTER + LOOKS

        async def again() -> bool:
            record = await fleet.record(id)
            return record.status is Status.RUNNING and record.epoch == 2

        assert await fleet.until(again) <= 20 - DEAD_AFTER - LOOKS

    play(scenario)


def test_what_a_runner_with_a_clock_ahead_has_put_off_does_not_hold_its_recovery_up() -> None:
    """A run of the recovery that is due in an hour, and work that by other clocks is not due yet."""

    async def scenario(fleet: WrongFleet) -> None:
        fleet.settings = {"recover_running_invocations_cron": NEVER}
        victim = await fleet.joined(HOUR, nap)
        id = await fleet.submit("nap", 60.0, due_at=fleet.clock.now() + HOUR / 2)
        await fleet.until_status(id, Status.RUNNING)
        await fleet.joined(0.0, nap)
        await asyncio.sleep(30)
        victim.crash()
        later = fleet.new(RECOVER_RUNNING, app=CORE_APP, queue=QUEUE, due_at=fleet.clock.now() + HOUR)
        await fleet.store.insert([later])

        async def again() -> bool:
            record = await fleet.record(id)
            return record.status is Status.RUNNING and record.epoch == 2

        assert await fleet.until(again) <= 20

    play(scenario)


@pytest.mark.parametrize("offs", [(HOUR, 0.0, 0.0), (-HOUR, 0.0), (HOUR, -HOUR, 0.0), (0.0, 20.0, -20.0)])
def test_living_runners_are_not_declared_dead_whatever_their_clocks_say(offs: tuple[float, ...]) -> None:
    async def scenario(fleet: WrongFleet) -> None:
        members = [await fleet.joined(off, nap) for off in offs]
        names = set(await fleet.roster())
        await asyncio.sleep(5 * DEAD_AFTER)
        assert set(await fleet.roster()) == names
        assert sum(member.line.count("remove_runner") for member in members) == 0

    play(scenario)


def test_a_clock_that_is_set_while_its_runner_lives_proves_nothing() -> None:
    async def scenario(fleet: WrongFleet) -> None:
        members = [await fleet.joined(0.0, nap) for _ in range(3)]
        names = set(await fleet.roster())
        for off in (HOUR, -7.0):
            for member in members[:2]:
                cast(WrongLine, member.line).off = off
            await asyncio.sleep(1.7 * DEAD_AFTER)
            assert set(await fleet.roster()) == names
        name = members[0].id
        members[0].crash()
        for member in members[1:]:
            cast(WrongLine, member.line).off = -2 * HOUR  # and set back in the very moment of a death
        assert await fleet.gone(name) <= DEAD_AFTER + LOOKS

    play(scenario)


@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_claimed_work_is_not_taken_for_stuck_by_a_clock_that_differs(off: float) -> None:
    """Its owner has just claimed it; by the clock of the one that looks, an hour ago or in an hour."""

    async def scenario(fleet: WrongFleet) -> None:
        await fleet.joined(off, add)
        lives = asyncio.create_task(somebody_else(fleet))
        await asyncio.sleep(2 * DEAD_AFTER)
        for _ in range(10):
            record = await claimed_ahead(fleet, at=fleet.clock.now())
            await asyncio.sleep(3.1)  # less than what makes it stuck
            now = await fleet.record(record.id)
            assert (now.status, now.version) == (Status.PENDING, record.version)
            handed_back = changes.handed_back(now, operation=f"{now.id} back", at=fleet.clock.now(), why="")
            await fleet.store.apply([handed_back])
        lives.cancel()

    play(scenario)


def test_claimed_work_that_is_stuck_is_found_though_its_stamp_lies_ahead() -> None:
    async def scenario(fleet: WrongFleet) -> None:
        await fleet.joined(0.0, add)
        lives = asyncio.create_task(somebody_else(fleet))
        record = await claimed_ahead(fleet, at=fleet.clock.now() + HOUR)
        await fleet.until_status(record.id, Status.REROUTED, 3 * DEAD_AFTER)
        lives.cancel()

    play(scenario)


def test_the_duties_go_on_when_the_clock_is_set_back() -> None:
    """Core tasks are recovery's backstop: their schedules are further than the clock, for an hour."""

    async def scenario(fleet: WrongFleet) -> None:
        member = await fleet.joined(0.0, add)
        await asyncio.sleep(60)
        cast(WrongLine, member.line).off = -HOUR
        await asyncio.sleep(10)
        record = fleet.new("nap")
        await fleet.store.insert([record])
        claim = Claim(app=APP, lanes=("default|nap",), limit=1, owner="nobody/0", operation="c", at=fleet.clock.now())
        await fleet.store.claim(claim)
        await fleet.until_status(record.id, Status.REROUTED, 150)

    play(scenario)


# --- the watch itself


def test_a_stamp_counts_as_unchanged_from_the_first_answer_to_the_last_question() -> None:
    watch, entry = Watch(60.0), runner("a", heartbeat_at=START)
    watch.see([entry], asked=10.0, answered=11.0)
    assert watch.unchanged(entry) == 0.0
    watch.see([entry], asked=15.0, answered=19.0)
    assert watch.unchanged(entry) == 4.0
    changed = replace(entry, heartbeat_at=START - HOUR)
    watch.see([changed], asked=20.0, answered=21.0)
    assert watch.unchanged(changed) == 0.0
    assert watch.unchanged(entry) == 0.0, "that is not the entry as it is now"


def test_who_is_gone_is_forgotten() -> None:
    watch = Watch(60.0)
    watch.see([runner("a"), runner("b")], asked=0.0, answered=0.0)
    watch.see([runner("a")], asked=61.0, answered=61.0)
    assert list(watch._seen) == ["a"]
