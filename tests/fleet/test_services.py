"""Services in virtual time: one runner performs at a time, whoever crashes or hangs is followed by another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.support.engines import More
from tests.support.fleet import (
    APP,
    CORE_APP,
    DEAD_AFTER,
    NEVER,
    WITHOUT_BACKSTOP,
    Fleet,
    Line,
    Member,
    add,
    nap,
    virtually,
)

from holdfast.clock import moment
from holdfast.errors import StoreUnavailable
from holdfast.fleet.core_tasks import LONGEST_SECONDS, CoreTaskRegistry
from holdfast.fleet.runner import RECOVER_PENDING, RECOVER_RUNNING
from holdfast.fleet.services import SERVICE, Duty, Executions, Services, members_of
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model.records import ROSTER, RunnerRecord
from holdfast.model.status import Status
from holdfast.runtime.claim import Permit, Unlimited
from holdfast.schedules import cron
from holdfast.schedules.declared import CoreSchedules
from holdfast.store.contract import Filter, Store
from holdfast.store.memory.store import MemoryStore

Looks = list[tuple[float, Member]]
CYCLE = 60.0


async def probed(fleet: Fleet, count: int, looks: Looks) -> list[Member]:
    """Runners that write down when they perform."""
    return [await probe(fleet, looks) for _ in range(count)]


async def probe(fleet: Fleet, looks: Looks) -> Member:
    member = fleet.member(add)

    async def look() -> None:
        looks.append((fleet.clock.now(), member))

    member.runner._features += (More(Duty(name="probe", every_seconds=0.0, perform=look)),)
    return await member.start()


async def settled(fleet: Fleet) -> None:
    """They joined one after another; from here on they agree, and it is the middle of somebody's window."""
    await asyncio.sleep(85)
    assert fleet.clock.now() % CYCLE == pytest.approx(45, abs=2)


async def trail(fleet: Fleet) -> list[Execution]:
    """Oldest first."""
    return list(reversed(await Executions(fleet.store, APP, SERVICE, 0).trail(10_000)))


def never_two_at_once(executions: list[Execution], now: float) -> bool:
    """By the trail. Lines of those that were blocked are no executions."""
    spans = sorted((e.started_at, e.ended_at or now) for e in executions if e.status is not ExecutionStatus.BLOCKED)
    return all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_one_runner_performs_at_a_time_and_somebody_always_does(count: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        members = await probed(fleet, count, looks)
        await settled(fleet)
        looks.clear()
        since = fleet.clock.now()
        await asyncio.sleep(4 * CYCLE)
        gaps = [after - before for (before, _), (after, _) in pairwise(looks)]
        margin = 1.0 if count > 1 else 0.0
        assert max(gaps) < 2.1 + margin
        assert len(looks) > 4 * CYCLE * 0.85
        turns = [who for (_, who), (_, after) in pairwise(looks) if who is not after]
        assert abs(len(turns) - {1: 0, 2: 8, 3: 12, 5: 12}[count]) <= 1  # a turn each per cycle, of three at most
        served = Counter(members.index(who) for _, who in looks)
        assert set(served) == set(range(min(count, 3)))  # the oldest
        assert min(served.values()) > 4 * CYCLE / min(count, 3) * 0.8
        executions = await trail(fleet)
        assert never_two_at_once(executions, fleet.clock.now())
        ended = [e for e in executions if e.started_at > since and e.ended_at is not None]
        assert {e.status for e in ended} == {ExecutionStatus.COMPLETED}

    virtually(scenario)


def test_duties_run_once_per_check_interval_or_as_often_as_they_ask() -> None:
    async def scenario(fleet: Fleet) -> None:
        seen: dict[float, list[float]] = {0.0: [], 7.0: [], 30.0: []}
        member = fleet.member(add)

        def watched(every: float) -> Duty:
            async def look() -> None:
                seen[every].append(fleet.clock.now())

            return Duty(name=f"every {every}", every_seconds=every, perform=look)

        member.runner._features += (More(*[watched(every) for every in seen]),)
        await member.start()
        await asyncio.sleep(120)
        assert 115 <= len(seen[0.0]) <= 121
        for every in (7.0, 30.0):
            gaps = [after - before for before, after in pairwise(seen[every])]
            assert all(every <= gap < every + 1.1 for gap in gaps)
            assert gaps

    virtually(scenario)


def test_where_a_newer_version_has_joined_the_older_ones_leave_the_services_to_it() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        await probed(fleet, 2, looks)
        await settled(fleet)
        fleet.store.schema_version = 7
        newer = await probe(fleet, looks)
        await asyncio.sleep(70)  # a cycle, and the rest of a turn
        looks.clear()
        await asyncio.sleep(130)
        assert {member.id for _, member in looks} == {newer.id}

    virtually(scenario)


@pytest.mark.parametrize("how", ["crash", "stop"])
def test_when_a_member_is_gone_the_others_look_at_once(how: str) -> None:
    """Each has a store of its own, so that only a hint can tell them; here the hub of each is told by hand."""

    async def scenario(fleet: Fleet) -> None:
        members = [await fleet.started(add) for _ in range(3)]
        await settled(fleet)
        told: list[str] = []
        for member in members:
            member.engine.hub.on(ROSTER, lambda hint, id=member.id: told.append(id))  # type: ignore[misc]
        gone = members[0]
        name = gone.id
        if how == "stop":
            await gone.stop()
            assert told == [name]  # it says so itself, to all who listen on its channel
            return
        gone.crash()
        await fleet.gone(name)
        (declarer,) = [member for member in members[1:] if member.line.count("remove_runner")]
        (declared,) = [at for at, call in declarer.line.calls if call == "remove_runner"]
        await asyncio.sleep(0.2)
        assert told == [declarer.id]
        assert [at for at, call in declarer.line.calls if call == "roster" and declared < at < declared + 0.2]

    virtually(scenario)


def test_of_a_core_task_one_runs_at_a_time_and_none_for_ever() -> None:
    async def scenario(fleet: Fleet) -> None:
        began: list[float] = []

        async def hang() -> None:
            began.append(fleet.clock.now())
            await asyncio.Event().wait()

        members = [fleet.member(add) for _ in range(2)]
        for member in members:
            core = member.runner._core
            core.add(RECOVER_RUNNING, hang, cron(NEVER))
            core.add(RECOVER_PENDING, hang, cron(NEVER))
            await member.start()
        for member in members:
            await member.runner._core.fire(RECOVER_RUNNING, f"asked for by {member.id}")
            await asyncio.sleep(1)
        assert len(began) == 1
        await asyncio.sleep(LONGEST_SECONDS - 5)
        assert len(began) == 1
        await asyncio.sleep(15)  # the first was ended, and the sweep lets the second go on
        assert len(began) == 2
        found = await fleet.store.find(CORE_APP, Filter(tasks=frozenset({RECOVER_RUNNING})), 9)
        assert sorted(record.status for record in found) == [Status.FAILED, Status.RUNNING]

    virtually(scenario)


def test_a_duty_that_has_more_to_do_is_due_again_at_the_next_check() -> None:
    async def scenario(fleet: Fleet) -> None:
        left, member = [True, True, True, False, True], fleet.member(add)

        async def work() -> bool:
            return left.pop(0)

        member.runner._features += (More(Duty(name="work", every_seconds=3600.0, perform=work)),)
        await member.start()
        await asyncio.sleep(60)
        assert left == [True]

    virtually(scenario)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), RuntimeError("a defect")])
def test_a_duty_that_fails_does_not_stop_the_others(error: Exception) -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []

        async def fail() -> None:
            raise error.with_traceback(None)

        member = fleet.member(add)

        async def look() -> None:
            looks.append((fleet.clock.now(), member))

        member.runner._features += (
            More(
                Duty(name="broken", every_seconds=0.0, perform=fail),
                Duty(name="probe", every_seconds=0.0, perform=look),
            ),
        )
        await member.start()
        await asyncio.sleep(30)
        assert len(looks) >= 28

    virtually(scenario)


# --- handing over


@pytest.mark.parametrize("count", [2, 3])
def test_who_crashes_while_it_performs_is_followed_by_another(count: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        await probed(fleet, count, looks)
        await settled(fleet)
        victim = looks[-1][1]
        victim.crash()
        crashed = fleet.clock.now()
        await asyncio.sleep(60)
        after = [at for at, who in looks if who is not victim and at > crashed]
        # Its execution blocks the gate until its window is over or its death is declared, whichever is first.
        assert after[0] - crashed < DEAD_AFTER + 2 + 10
        late = [at for at in after if at > crashed + DEAD_AFTER + 12]
        assert max(b - a for a, b in pairwise(late)) < 3.1
        executions = await trail(fleet)
        assert never_two_at_once(executions, fleet.clock.now())
        reasons = [e.reason for e in executions if e.runner_id == victim.id and e.status is ExecutionStatus.ABANDONED]
        assert reasons in (["owner gone"], ["overrun"])

    virtually(scenario)


def test_who_stops_while_it_performs_says_so() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        await probed(fleet, 2, looks)
        await settled(fleet)
        leaver = looks[-1][1]
        name = leaver.id
        await leaver.stop(hurry=True)
        stopped = fleet.clock.now()
        last = [e for e in await trail(fleet) if e.runner_id == name][-1]
        assert (last.status, last.reason) == (ExecutionStatus.ABANDONED, "the runner stopped")
        await asyncio.sleep(15)
        assert min(at for at, who in looks if at > stopped) - stopped < 11  # a waiting one looks at the roster

    virtually(scenario)


def test_a_loop_that_hangs_while_its_heart_beats_is_followed_by_others() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        released = asyncio.Event()
        hangs = True

        async def hang() -> None:
            if hangs:
                await released.wait()

        stuck = fleet.member(add)
        stuck.runner._features += (More(Duty(name="hangs", every_seconds=0.0, perform=hang)),)
        await stuck.start()
        began = fleet.clock.now()
        await probed(fleet, 2, looks)

        async def told() -> bool:
            entry = next(runner for runner in await fleet.store.roster(APP) if runner.id == stuck.id)
            return not entry.can_run_atomic_service

        await fleet.until(told, within=15.0)
        await fleet.until(_some(looks), within=75.0)
        window_ends = (began // CYCLE + 1) * CYCLE  # it was alone when it began, so it had the whole cycle
        assert looks[0][0] <= window_ends + 12
        await asyncio.sleep(3 * CYCLE)
        assert len({id(who) for _, who in looks}) == 2
        late = [at for at, _ in looks if at > window_ends + 70]
        assert max(b - a for a, b in pairwise(late)) < 3.1
        assert await fleet.roster() != []
        assert stuck.id in await fleet.roster()  # it lives: only its services are done by others
        blocked = [e for e in await trail(fleet) if e.status is ExecutionStatus.BLOCKED]
        slots = Counter((e.runner_id, e.window_ends_at) for e in blocked)
        assert slots
        assert set(slots.values()) == {1}
        assert all(stuck.id in e.reason for e in blocked)
        assert "overrun" in [e.reason for e in await trail(fleet) if e.runner_id == stuck.id]
        hangs = False
        released.set()

        async def well() -> bool:
            return not await told()

        await fleet.until(well, within=5.0)

    virtually(scenario)


def _some(looks: Looks):  # type: ignore[no-untyped-def]
    async def some() -> bool:
        return bool(looks)

    return some


def test_a_runner_that_leaves_its_slot_unused_sits_out() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        members = await probed(fleet, 3, looks)
        await settled(fleet)
        idle = members[1]
        idle.line.errors["put_entry"] = StoreUnavailable("only this does not get through")

        async def left_out() -> bool:
            entry = next(runner for runner in await fleet.store.roster(APP) if runner.id == idle.id)
            return entry.sits_out_until is not None and entry.sits_out_until > fleet.clock.now()

        await fleet.until(left_out, within=3 * CYCLE)
        looks.clear()
        await asyncio.sleep(CYCLE)
        assert max(b - a for (a, _), (b, _) in pairwise(looks)) < 3.1
        assert {members.index(who) for _, who in looks} == {0, 2}

    virtually(scenario)


# --- a store that fails


@pytest.mark.parametrize("lost", ["put_entry", "entries", "roster", "ask_runner"])
def test_a_lost_reply_does_not_block_the_gate_for_oneself(lost: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        await probed(fleet, 1, looks)
        (member,) = fleet.members
        await asyncio.sleep(CYCLE)
        for _ in range(4):
            member.line.lost[lost] = 1
            await asyncio.sleep(CYCLE)
        assert max(b - a for (a, _), (b, _) in pairwise(looks)) < 3.1
        assert never_two_at_once(await trail(fleet), fleet.clock.now())

    virtually(scenario)


def test_who_cannot_be_heard_performs_nothing_and_goes_on_when_it_is() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        await probed(fleet, 1, looks)
        (member,) = fleet.members
        await asyncio.sleep(20)
        member.line.cut = True
        cut = fleet.clock.now()
        await asyncio.sleep(30)
        assert max(at for at, _ in looks) < cut + DEAD_AFTER * 2 / 3 + 1
        member.line.cut = False
        back = fleet.clock.now()
        await asyncio.sleep(10)
        assert min(at for at, _ in looks if at > back) - back < 4

    virtually(scenario)


@pytest.mark.parametrize("stood_still", [False, True])
def test_a_runner_with_an_old_view_of_the_roster_does_not_reap_who_joined_since(stood_still: bool) -> None:
    """Its view is older than its successor's execution. Where it also stood still, it begins nothing of its own."""

    async def scenario(fleet: Fleet) -> None:
        (old,) = await probed(fleet, 1, [])
        before = await fleet.store.roster(APP)
        await old.stop()
        successor = await fleet.started(add)
        await asyncio.sleep(1)
        running = (await trail(fleet))[-1]
        assert (running.runner_id, running.status) == (successor.id, ExecutionStatus.RUNNING)

        permit = Suspended() if stood_still else Unlimited()
        engine = fleet.engine(cast(Store, OldRoster(fleet.store, before, permit)))
        services = asyncio.create_task(Services(engine, permit, old.id, []).run())
        await asyncio.sleep(3)
        services.cancel()
        mine = [execution for execution in await trail(fleet) if execution.runner_id == old.id]
        assert running in await trail(fleet)
        assert [execution.status for execution in mine[1:]] == ([] if stood_still else [ExecutionStatus.BLOCKED])

    virtually(scenario)


class Suspended(Unlimited):
    """Ends when the roster has been read, as if the process stood still then."""

    ended = False

    def holds(self) -> bool:
        return not self.ended


class OldRoster:
    """A store whose first answer about the roster is an old one."""

    def __init__(self, store: MemoryStore, roster: list[RunnerRecord], permit: Permit) -> None:
        self._store = store
        self._roster = roster
        self._permit = permit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def roster(self, app: str) -> list[RunnerRecord]:
        if isinstance(self._permit, Suspended):
            self._permit.ended = True
        roster, self._roster = self._roster, []
        return roster or await self._store.roster(app)


# --- the trail


def test_the_trail_is_kept_by_age_and_by_number() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings = {
            "atomic_service_interval_minutes": 10 / 60,
            "atomic_service_execution_retention_minutes": 200 / 60,
            "atomic_service_execution_max_records": 12,
        }
        member = await fleet.started(add)
        await asyncio.sleep(400)
        executions = await trail(fleet)
        assert 12 <= len(executions) <= 12 + 7  # a minute's worth gathers before the next look
        fleet.settings = {
            "atomic_service_interval_minutes": 10 / 60,
            "atomic_service_execution_retention_minutes": 0.5,
        }
        await member.stop()
        await fleet.started(add)
        await asyncio.sleep(130)
        executions = await trail(fleet)
        oldest = min(e.ended_at or fleet.clock.now() for e in executions)
        assert fleet.clock.now() - oldest < 30 + 61
        assert len(executions) <= 10

    virtually(scenario)


# --- core tasks


def test_a_tick_fires_once_over_three_runners_and_restarts() -> None:
    async def scenario(fleet: Fleet) -> None:
        rng = random.Random(5)
        members = [await fleet.started(add) for _ in range(3)]
        began = fleet.clock.now()
        for _ in range(20):
            await asyncio.sleep(rng.uniform(5, 40))
            leaver = members.pop(rng.randrange(3))
            if rng.random() < 0.5:
                await leaver.stop(hurry=rng.random() < 0.5)
            else:
                leaver.crash()
            members.append(await fleet.started(add))
        ended = fleet.clock.now()
        runs = fleet.store._of(CORE_APP)
        ticks = list(cron("*/15 * * * * *").ticks(began + CYCLE, ended - CYCLE))
        for name in (RECOVER_RUNNING, RECOVER_PENDING):
            causes = Counter(record.history[0].why for record in runs if record.task == name)
            assert max(causes.values()) == 1
            fired = [tick for tick in ticks if f"tick {moment(tick)} of the schedule '{name}'" in causes]
            # One that falls into a hand-over is passed over, or is covered by a run that waits.
            assert len(fired) >= len(ticks) * 0.6
        late = [record.created_at - record.due_at for record in runs if record.history[0].why.startswith("tick")]
        assert all(lateness >= 0 for lateness in late)
        assert sorted(late)[int(len(late) * 0.6)] < 2.0

    virtually(scenario)


def registry(fleet: Fleet) -> tuple[CoreTaskRegistry, CoreSchedules, Line]:
    line = Line(fleet.store)
    engine = fleet.engine(line)  # type: ignore[arg-type]
    core = CoreTaskRegistry(engine.core)
    return core, CoreSchedules(core), line


def test_two_that_fire_the_same_tick_fire_it_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        registries = []
        for core, each, _ in [registry(fleet) for _ in range(3)]:
            core.add("tidy", _nothing, cron("*/10 * * * * *"))
            registries.append(each)
            await each.register()
            await each.fire_due()
        await asyncio.sleep(11)
        await asyncio.gather(*[each.fire_due() for each in registries])
        assert len(fleet.store._of(CORE_APP)) == 1
        await asyncio.sleep(1)
        await asyncio.gather(*[each.fire_due() for each in registries])
        assert len(fleet.store._of(CORE_APP)) == 1

    virtually(scenario)


def test_several_missed_ticks_are_one_run_and_none_is_before_the_first_look() -> None:
    async def scenario(fleet: Fleet) -> None:
        core, schedules, _ = registry(fleet)
        core.add("tidy", _nothing, cron("*/10 * * * * *"))
        await schedules.register()
        await schedules.fire_due()
        assert fleet.store._of(CORE_APP) == []
        await asyncio.sleep(95)
        await schedules.fire_due()
        (record,) = fleet.store._of(CORE_APP)
        assert record.history[0].why.endswith("of the schedule 'tidy'")

    virtually(scenario)


def test_a_tick_passes_while_a_run_waits_and_not_while_one_runs() -> None:
    async def scenario(fleet: Fleet) -> None:
        core, *_ = registry(fleet)
        core.add("tidy", _nothing, cron("*/10 * * * * *"))
        await core.fire("tidy", "first")
        await core.fire("tidy", "second")
        (record,) = fleet.store._of(CORE_APP)
        fleet.store._put(replace(record, status=Status.RUNNING, owner="x/core"))
        await core.fire("tidy", "third")
        assert [r.history[0].why for r in fleet.store._of(CORE_APP)] == ["first", "third"]

    virtually(scenario)


def test_a_tick_whose_insert_failed_is_fired_at_the_next_look() -> None:
    async def scenario(fleet: Fleet) -> None:
        core, schedules, line = registry(fleet)
        core.add("tidy", _nothing, cron("*/10 * * * * *"))
        await schedules.register()
        await schedules.fire_due()
        await asyncio.sleep(11)
        line.cut = True
        with pytest.raises(StoreUnavailable):
            await schedules.fire_due()
        line.cut = False
        await schedules.fire_due()
        assert len(fleet.store._of(CORE_APP)) == 1

    virtually(scenario)


async def _nothing() -> None:
    pass


# --- costs


def test_an_idle_tick_of_the_services_costs_few_calls_on_average() -> None:
    """Without the runs of core tasks, which tests/store/mongo/test_budget.py counts with everything else."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings = WITHOUT_BACKSTOP
        member = fleet.member(nap)
        record = member.runner._new_record()
        await fleet.store.enrol(record)
        services = member.runner._services(record, Unlimited())
        performing = asyncio.create_task(services.run())
        await asyncio.sleep(5 * CYCLE)
        performing.cancel()
        await asyncio.wait({performing})
        per_tick = member.line.count() / (5 * CYCLE)
        assert 0.1 < per_tick <= 2.4  # waiters, groups, schedules, triggers and outboxes are each one look

    virtually(scenario)


def test_a_waiting_runner_costs_next_to_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        looks: Looks = []
        members = await probed(fleet, 3, looks)
        spare = await fleet.started(add)
        await settled(fleet)
        since = fleet.clock.now()
        await asyncio.sleep(5 * CYCLE)
        assert spare.line.count("roster", since=since) <= 5 * CYCLE / 5 + 5
        assert spare.line.count("put_entry", since=since) == 0
        assert spare.line.count("silent", since=since) <= 5 * CYCLE / 12
        assert len(members) == 3

    virtually(scenario)


def test_nothing_is_performed_if_hardly_anything_is_left_of_the_slot_when_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store took its time: the next runner in turn is about to begin."""

    async def scenario(fleet: Fleet) -> None:
        begin, looks = Executions.begin, Looks()

        async def slow(book: Executions, wanted: Execution) -> Execution | None:
            monkeypatch.setattr(Executions, "begin", begin)
            found = await begin(book, wanted)
            await asyncio.sleep(wanted.window_ends_at - fleet.clock.now() - 0.02)
            return found

        monkeypatch.setattr(Executions, "begin", slow)
        await asyncio.sleep(CYCLE - fleet.clock.now() % CYCLE - 5.0)
        await probed(fleet, 1, looks)
        await asyncio.sleep(10.0)
        *_, first = await Executions(fleet.store, APP, SERVICE, 0).trail(10)
        assert (first.status, first.reason) == (ExecutionStatus.ABANDONED, "no_margin")
        assert min(at for at, _ in looks) > first.window_ends_at - 0.02

    virtually(scenario)


def test_who_drains_or_knows_only_an_older_schema_takes_no_turn() -> None:
    facts = {"app": APP, "host": "h", "pid": 1, "version": "0", "started_at": 0.0, "heartbeat_at": 0.0}
    able = RunnerRecord(id="able", concurrency=1, tasks=(), schema=2, **facts)
    roster = [able, replace(able, id="drains", draining=True), replace(able, id="old", schema=1)]
    assert [member.runner_id for member in members_of(roster) if member.can_run_atomic_service] == ["able"]
