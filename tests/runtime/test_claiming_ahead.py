"""Claiming ahead: only where it pays, only what will start soon, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace
from tests.runtime.test_worker import Harness, definition, nap, running

from holdfast.model.claims import Claim, Claimed
from holdfast.model.limits import Limit
from holdfast.model.records import InvocationRecord
from holdfast.runtime.claim import KEEP_SECONDS, MAX_TIMES, Reserve
from holdfast.runtime.hints import QUICKEST_SECONDS, Pace
from holdfast.store.contract import Ability
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual


def record(id: str) -> InvocationRecord:
    return InvocationRecord(id=id, app="app", task="t", arguments=b"", created_at=0, due_at=0)


def test_nothing_is_claimed_ahead_before_anything_is_known() -> None:
    assert Reserve(10).room(now=0.0) == 0


@pytest.mark.parametrize(
    ("seconds", "room"),
    [(0.0001, 10 * MAX_TIMES), (0.05, 10 * MAX_TIMES), (0.25, 40), (0.9, 11), (1.1, 0), (60.0, 0)],
)
def test_only_what_will_start_within_a_second_is_claimed_ahead(seconds: float, room: int) -> None:
    reserve = Reserve(10)
    for _ in range(50):
        reserve.learn("t", seconds, now=0.0)
    assert reserve.room(now=0.0) == room


def test_a_reserve_is_filled_up_again_when_half_of_it_is_gone() -> None:
    reserve = Reserve(10)
    reserve.learn("t", 0.001, now=0.0)
    reserve.add(tuple(record(f"{n}") for n in range(100)), now=0.0)
    assert reserve.room(now=0.0) == 0
    assert [r.id for r in reserve.take(49)] == [f"{n}" for n in range(49)]
    assert reserve.room(now=0.0) == 0
    reserve.take(1)
    assert reserve.room(now=0.0) == 50


@pytest.mark.parametrize(("seconds", "at_once"), [(0.001, True), (0.009, True), (0.02, False)])
def test_only_very_short_calls_are_marked_as_running_ahead(seconds: float, at_once: bool) -> None:
    reserve = Reserve(10)
    assert not reserve.begins_at_once(1, now=0.0)
    reserve.learn("t", seconds, now=0.0)
    assert reserve.begins_at_once(100, now=0.0) is at_once


def test_the_slowest_task_of_late_decides() -> None:
    reserve = Reserve(10)
    reserve.learn("slow", 30.0, now=0.0)
    for _ in range(1000):
        reserve.learn("fast", 0.001, now=1.0)
    assert reserve.room(now=1.0) == 0
    assert not reserve.begins_at_once(1, now=1.0)
    reserve.learn("fast", 0.001, now=61.0)
    assert reserve.room(now=61.0) == 10 * MAX_TIMES


def test_slots_of_bounded_calls_are_not_reckoned_with() -> None:
    reserve = Reserve(10)
    reserve.learn("t", 0.25, now=0.0)
    assert [reserve.room(0.0, bounded) for bounded in (0, 5, 9, 10)] == [40, 20, 4, 0]
    assert reserve.begins_at_once(3, 0.0, 0)
    assert not reserve.begins_at_once(3, 0.0, 9)


def test_what_lay_too_long_is_given_back() -> None:
    reserve = Reserve(10)
    reserve.add((record("old"),), now=0.0)
    reserve.add((record("new"),), now=1.0)
    assert reserve.patience(0.5) == KEEP_SECONDS - 0.5
    assert reserve.stale(KEEP_SECONDS - 0.01) == []
    assert [r.id for r in reserve.stale(KEEP_SECONDS)] == ["old"]
    assert len(reserve) == 1


class Costly(MemoryStore):
    """A memory store that says its claims are costly, and counts them."""

    abilities = Ability.COSTLY_CLAIMS
    claims: list[Claim]

    async def claim(self, claim: Claim) -> Claimed:
        self.claims.append(claim)
        return await super().claim(claim)


def costly(clock: VirtualClock) -> Costly:
    store = Costly(clock)
    store.claims = []
    return store


def test_many_short_calls_take_few_claims_and_each_runs_once() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        ids = [await harness.submit("nap", 0.001) for _ in range(1000)]
        runner = harness.worker(nap)
        life = await running(runner)
        ended = await harness.end(*ids)
        assert all(record.attempt == 1 for record in ended)
        assert len(harness.store.claims) < 40  # type: ignore[attr-defined]
        for id in ids:
            assert await harness.story(id) == ["registered", "pending", "running", "success"]
        runner.stop()
        await life

    began = time.monotonic()
    run_virtual(main)
    assert time.monotonic() - began < 30


def test_slow_calls_under_a_limit_make_no_claim_ahead_smaller() -> None:
    """A claim ahead takes no such calls, so their length says nothing about what it brings."""

    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        definitions = [definition(nap), replace(definition(nap), name="slow", limit=Limit(1))]
        runner = harness.worker_of(definitions)
        life = await running(runner)
        await harness.end(await harness.submit("slow", 1.0, limit_key="slow"))
        for _ in range(10):
            await harness.submit("slow", 1.0, limit_key="slow")
        await harness.end(*[await harness.submit("nap", 0.001) for _ in range(1000)])
        assert len([claim for claim in harness.store.claims if not claim.limited]) < 30  # type: ignore[attr-defined]
        assert max(claim.limit for claim in harness.store.claims if not claim.limited) > 50  # type: ignore[attr-defined]
        runner.stop(hurry=True)
        await life

    run_virtual(main)


def test_nothing_is_marked_as_running_ahead_where_a_call_may_run_once() -> None:
    """A crash ends such calls if they are RUNNING, also those that only lay in reserve."""

    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        ids = [await harness.submit("nap", 0.001) for _ in range(300)]
        runner = harness.worker(nap, at_most_once=True)
        life = await running(runner)
        await harness.end(*ids)
        ahead = [claim for claim in harness.store.claims if claim.limit > 20]  # type: ignore[attr-defined]
        assert ahead
        assert not any(claim.start for claim in ahead)
        runner.stop()
        await life

    run_virtual(main)


@pytest.mark.parametrize(("seconds", "room"), [(0.0001, 100), (0.01, 50), (0.085, 0)])
def test_where_a_claim_is_cheap_only_fifty_milliseconds_of_work_are_claimed_ahead(seconds: float, room: int) -> None:
    reserve = Reserve(10, is_small=True)
    reserve.learn("t", seconds, 0.0)
    assert reserve.room(0.0) == room


def test_a_lone_call_is_claimed_and_started_in_one_write() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        runner = harness.worker(nap)
        life = await running(runner)
        for _ in range(3):
            await harness.end(await harness.submit("nap", 0.001))
        lone = harness.store.claims[-1]  # type: ignore[attr-defined]
        assert (lone.limit, lone.start) == (1, True)
        runner.stop()
        await life

    run_virtual(main)


def test_a_stopping_runner_hands_back_what_it_has_not_started() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        runner = harness.worker(nap, concurrency=2)
        life = await running(runner)
        await harness.end(await harness.submit("nap", 0.01))  # now it expects short calls
        ids = [await harness.submit("nap", 1.0) for _ in range(30)]
        await asyncio.sleep(0.5)
        counts = await harness.store.counts("app")
        assert counts.get("pending", 0) + counts["running"] > 2
        runner.stop()
        await life
        counts = await harness.store.counts("app")
        assert set(counts) <= {"success", "registered", "rerouted"}, counts
        assert sum(counts.values()) == len(ids) + 1

    run_virtual(main)


def test_reserved_work_is_given_back_when_the_places_stay_busy() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        runner = harness.worker(nap, concurrency=2)
        life = await running(runner)
        await harness.end(await harness.submit("nap", 0.01))
        for _ in range(30):
            await harness.submit("nap", 3600.0)
        await asyncio.sleep(KEEP_SECONDS + 1)
        counts = await harness.store.counts("app")
        assert counts.get("pending", 0) == 0
        assert counts["running"] == 2, counts
        runner.stop(hurry=True)
        await life

    run_virtual(main)


def test_work_marked_as_running_ahead_and_given_back_has_not_been_tried() -> None:
    """Short calls are expected, long ones come: what waited behind them loses neither its place nor an attempt."""

    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        runner = harness.worker(nap, concurrency=2)
        life = await running(runner)
        for _ in range(30):
            await harness.end(await harness.submit("nap", 0.001))
        ids = await harness.submit_many("nap", 30, 3600.0)
        await asyncio.sleep(KEEP_SECONDS + 1)
        records = [r for r in await harness.store.get("app", ids) if r is not None and r.status == "rerouted"]
        ahead = [r for r in records if "killed" in [entry.status for entry in r.history]]
        assert ahead, "nothing was marked as running ahead"
        assert {r.attempt for r in records} == {0}
        runner.stop(hurry=True)
        await life

    run_virtual(main)


def test_without_hints_one_looks_often_at_first_and_ever_more_seldom() -> None:
    pace = Pace(1.0)
    pace.quicken()
    pauses = [pace.pause(trust=0) for _ in range(40)]
    assert pauses[0] == QUICKEST_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    assert pace.pause(trust=5) == 5.0
