"""Recovery in virtual time: the work of the dead goes on, or ends, and nothing is taken from the living."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fleet import APP, CORE_APP, WITHOUT_BACKSTOP, Fleet, add, nap, virtually

from holdfast.errors import CorruptRecord, StoreUnavailable, WorkerLost
from holdfast.fleet import core_tasks
from holdfast.fleet.core_tasks import QUEUE
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.runner import RECOVER_PENDING, RECOVER_RUNNING
from holdfast.model import records
from holdfast.model.claims import Claim
from holdfast.model.records import OUTCOMES, InvocationRecord, RunnerRecord, Terms, WorkerRecord, lane_of, registered
from holdfast.model.status import Status
from holdfast.runtime.worker_duties import AGAIN_SECONDS, AUDIT_SECONDS
from holdfast.schedules import declared as core
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.samples import raw_change

S = Status
GHOST = "ghost/0"


async def held(fleet: Fleet, *path: Status, owner: str = GHOST, id: str | None = None, **facts: Any) -> str:
    """An invocation that this owner claimed, and that walked on from RUNNING (or PENDING) by this path."""
    id = id or await fleet.submit("add", 1, 2, **facts)
    start = path[:1] != (S.PENDING,)
    claim = Claim(
        app=APP,
        lanes=(lane_of("default", "add"),),
        limit=1,
        owner=owner,
        operation=f"claim {id} {owner} {fleet.clock.now()}",
        at=fleet.clock.now(),
        start=start,
        ids=(id,),
    )
    assert len((await fleet.store.claim(claim)).records) == 1
    for number, status in enumerate(path if start else path[1:]):
        record = await fleet.record(id)
        operation = f"{status} {id} {record.version} {number}"
        facts = {"at": fleet.clock.now()}
        await fleet.store.apply([raw_change(record, status, operation=operation, epoch=record.epoch, **facts)])
    assert (await fleet.record(id)).status is (path[-1] if path else S.RUNNING)
    return id


def recovery_of(fleet: Fleet, store: MemoryStore | None = None) -> Recovery:
    there: Store = store or fleet.store
    return Recovery(fleet.engine(there))


BACK = {
    (S.RUNNING,): ["running_recovery", "rerouted"],
    (S.RUNNING, S.PAUSED): ["running_recovery", "rerouted"],
    (S.RUNNING, S.PAUSED, S.RESUMED): ["running_recovery", "rerouted"],
    (S.RUNNING, S.CANCELLING): ["running_recovery", "cancelled"],
    (S.PENDING,): ["pending_recovery", "rerouted"],
    (S.PENDING, S.CANCELLING): ["running_recovery", "cancelled"],
    (S.RUNNING, S.KILLED): ["rerouted"],
    (S.RUNNING, S.CANCELLING, S.KILLED): ["cancelled"],
    (S.RUNNING, S.RUNNING_RECOVERY): ["rerouted"],
    (S.RUNNING, S.CANCELLING, S.RUNNING_RECOVERY): ["cancelled"],
    (S.PENDING, S.PENDING_RECOVERY): ["rerouted"],
    (S.PENDING, S.KILLED): ["rerouted"],
}


@pytest.mark.parametrize("failing", ["", "find", "apply", "owners", "roster"])
@pytest.mark.parametrize("path", BACK, ids=lambda path: "-".join(path))
def test_whatever_a_dead_owner_held_goes_on_within_a_tick(path: tuple[Status, ...], failing: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await held(fleet, *(path if path[0] is S.PENDING else path[1:]))
        walked = await fleet.story(id)
        member = fleet.member(add)
        await member.start()
        if failing:
            member.line.lost[failing] = 2
        record = await fleet.end(id, within=75.0 if failing else 21.0)
        assert await fleet.roster() == [member.id]
        ended = [] if BACK[path][-1] == "cancelled" else ["pending", "running", "success"]
        assert await fleet.story(id) == [*walked, *BACK[path], *ended]
        assert record.owner is None

    virtually(scenario)


@pytest.mark.parametrize("path", BACK, ids=lambda path: "-".join(path))
def test_the_history_names_the_runner_that_performed_a_recovery_and_the_reason(path: tuple[Status, ...]) -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await held(fleet, *(path if path[0] is S.PENDING else path[1:]))
        walked = len(await fleet.story(id))
        member = await fleet.started(add)
        record = await fleet.end(id, within=21.0)
        told = record.history[walked : walked + len(BACK[path])]
        assert {line.by for line in told} == {member.id}
        passing = len(path) > 1 and path[-1] in (S.KILLED, S.PENDING_RECOVERY, S.RUNNING_RECOVERY)
        reasons = (f"its owner {GHOST} is dead", f"{GHOST} claimed it ")  # whichever duty comes first
        reasons = ("left behind on its way back to the queue",) if passing else reasons
        assert all(line.why.startswith(reasons) for line in told), [line.why for line in told]

    virtually(scenario)


@pytest.mark.parametrize("path", [(), (S.PAUSED,), (S.PAUSED, S.RESUMED), (S.KILLED,), (S.RUNNING_RECOVERY,)])
def test_what_is_to_be_run_at_most_once_ends_with_its_first_crash(path: tuple[Status, ...]) -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await held(fleet, *path, at_most_once=True)
        await fleet.started(add)
        record = await fleet.end(id, within=21.0)
        assert (record.status, record.attempt) == ("failed", 1)
        assert record.error is not None
        error = fleet.codec.decode_error(record.error, invocation_id=id)
        assert isinstance(error, WorkerLost)
        assert "at most once" in str(error)

    virtually(scenario)


@pytest.mark.parametrize("path", [(S.PENDING,), (S.PENDING, S.PENDING_RECOVERY), (S.PENDING, S.KILLED)])
def test_what_is_to_be_run_at_most_once_and_never_began_is_run(path: tuple[Status, ...]) -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await held(fleet, *path, at_most_once=True)
        await fleet.started(add)
        record = await fleet.end(id, within=21.0)
        assert (record.status, record.attempt) == ("success", 1)

    virtually(scenario)


@pytest.mark.parametrize("hurry", [False, True])
def test_what_is_to_be_run_at_most_once_ends_when_its_runner_stops_before_it_is_done(hurry: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, drain=5.0)
        id = await fleet.submit("nap", 100.0, at_most_once=True)
        await fleet.until_status(id, S.RUNNING)
        await member.stop(hurry=hurry)
        record = await fleet.record(id)
        assert await fleet.story(id) == ["registered", "pending", "running", "killed", "failed"]
        assert record.error is not None
        assert isinstance(fleet.codec.decode_error(record.error, invocation_id=id), WorkerLost)
        assert "at most once" in record.error.message

    virtually(scenario)


# --- the crash cap


async def crash(fleet: Fleet, id: str, number: int, recovery: Recovery) -> InvocationRecord:
    await held(fleet, owner=f"ghost{number}/0", id=id)
    await recovery.running()
    return await fleet.record(id)


@pytest.mark.parametrize("left_behind", [False, True])
def test_three_crashes_are_forgiven_and_the_fourth_ends_it_with_its_story(left_behind: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        recovery = recovery_of(fleet)
        id = await fleet.submit("add", 1, 2)
        for number in range(3):
            record = await crash(fleet, id, number, recovery)
            assert record.status is S.REROUTED
        if left_behind:  # on its way back to the queue, by somebody else's hand
            await held(fleet, S.RUNNING_RECOVERY, owner="ghost3/0", id=id)
            await asyncio.sleep(6)
            assert await recovery.passed_through() == 1
            record = await fleet.record(id)
        else:
            record = await crash(fleet, id, 3, recovery)
        assert record.status is S.FAILED
        assert record.error is not None
        error = fleet.codec.decode_error(record.error, invocation_id=id)
        assert isinstance(error, WorkerLost)
        assert "crash 4 in a row, and 3 are forgiven" in str(error)
        for number in range(3):
            assert f"ghost{number}/0" in str(error)
        assert record.reason == str(error)

    virtually(scenario)


def test_an_attempt_that_came_to_an_end_of_its_own_starts_the_count_anew() -> None:
    async def scenario(fleet: Fleet) -> None:
        recovery = recovery_of(fleet)
        id = await fleet.submit("add", 1, 2)
        for number in range(3):
            await crash(fleet, id, number, recovery)
        await held(fleet, S.RETRY, id=id)
        for number in range(3, 6):
            record = await crash(fleet, id, number, recovery)
            assert record.status is S.REROUTED
        record = await crash(fleet, id, 6, recovery)
        assert record.status is S.FAILED

    virtually(scenario)


def test_being_stopped_by_its_runner_is_no_crash() -> None:
    async def scenario(fleet: Fleet) -> None:
        recovery = recovery_of(fleet)
        id = await fleet.submit("add", 1, 2)
        for _ in range(9):
            await held(fleet, id=id)
            assert await recovery.of_owner(GHOST, "the runner stopped", ended=True) == 1
        assert (await fleet.record(id)).status is S.REROUTED
        assert (await crash(fleet, id, 0, recovery)).status is S.REROUTED

    virtually(scenario)


@pytest.mark.parametrize("crashes", [1, 3, 4])
def test_a_pill_that_kills_its_runner_is_run_on_others_and_then_ended(crashes: int) -> None:
    begun: list[float] = []

    async def scenario(fleet: Fleet) -> None:
        async def pill() -> str:
            begun.append(fleet.clock.now())
            if len(begun) <= crashes:
                owner = (await fleet.record(id)).owner
                next(member for member in fleet.members if f"{member.id}/0" == owner).crash()
                await asyncio.sleep(1e9)
            return "done"

        for _ in range(5):
            await fleet.started(pill, add)
        await asyncio.sleep(20)
        id = await fleet.submit("pill")
        await asyncio.sleep(2)
        other = await fleet.submit("add", 1, 2)
        record = await fleet.end(id, within=100.0)
        assert (await fleet.record(other)).status == "success"
        assert len(begun) == min(crashes + 1, 4)
        gaps = [after - before for before, after in itertools.pairwise(begun)]
        assert all(gap < 20 for gap in gaps)  # P9
        if crashes < 4:
            assert record.status == "success"
        else:
            assert record.status == "failed"
            assert record.error is not None
            assert "crash 4 in a row" in record.error.message

    virtually(scenario)


# --- who is dead


class WithNewcomer(MemoryStore):
    """Somebody joins and claims right after the first look at owners or roster."""

    newcomer: RunnerRecord | None = None
    work = ""

    async def _join(self) -> None:
        if self.newcomer is not None:
            joining, self.newcomer = self.newcomer, None
            await self.enrol(joining)
            claim = Claim(
                app=APP,
                lanes=(lane_of("default", "add"),),
                limit=1,
                owner=f"{joining.id}/0",
                operation="newcomer",
                at=self.now(),
                ids=(self.work,),
            )
            assert len((await self.claim(claim)).records) == 1

    async def owners(self, app: str) -> Sequence[str]:
        found = await super().owners(app)
        await self._join()
        return found

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        found = await super().roster(app)
        await self._join()
        return found


def test_who_joins_while_recovery_looks_is_not_taken_for_dead() -> None:
    async def scenario(fleet: Fleet) -> None:
        store = fleet.store
        assert isinstance(store, WithNewcomer)
        store.work = await fleet.submit("add", 1, 2)
        now = fleet.clock.now()
        store.newcomer = RunnerRecord(
            id="new", app=APP, host="h", pid=1, version="0", started_at=now, heartbeat_at=now, concurrency=1, tasks=()
        )
        assert await recovery_of(fleet, store).running() == 0
        record = await fleet.record(store.work)
        assert (record.status, record.owner) == (S.RUNNING, "new/0")

    virtually(scenario, WithNewcomer)


def test_nothing_is_taken_from_the_living() -> None:
    async def scenario(fleet: Fleet) -> None:
        members = [await fleet.started(nap) for _ in range(3)]
        ids = [await fleet.submit("nap", 200.0) for _ in range(6)]
        for id in ids:
            await fleet.until_status(id, S.RUNNING)
        await asyncio.sleep(100)
        assert await recovery_of(fleet).running() == 0
        assert await fleet.recoveries() == 0
        ran = [r for r in fleet.store._of(CORE_APP) if r.task == RECOVER_RUNNING and r.status is S.SUCCESS]
        assert len(ran) >= 6  # it was looked for
        assert len(await fleet.roster()) == len(members)

    virtually(scenario)


def test_what_a_worker_held_that_its_living_runner_has_forgotten_is_taken_back_in_time() -> None:
    """Its runner sees to that at once, so nobody else does for half a minute."""

    async def scenario(fleet: Fleet) -> None:
        worker = WorkerRecord(id="2", pid=2, started_at=0.0, running=1)
        now = fleet.clock.now()
        entry = RunnerRecord(
            id="r",
            app=APP,
            host="here",
            pid=1,
            version="test",
            started_at=now,
            heartbeat_at=now,
            concurrency=1,
            queues=None,
            tags=(),
            tasks=("add",),
            workers=(worker,),
        )
        await fleet.store.enrol(entry)
        lost, kept, core = [await held(fleet, owner=f"r/{worker}") for worker in ("1", "2", "core")]
        recovery = recovery_of(fleet)
        await asyncio.sleep(29.0)
        assert await recovery.running() == 0
        await asyncio.sleep(2.0)
        assert await recovery.running() == 1
        record = await fleet.record(lost)
        assert (record.status, record.history[-1].why) == (S.REROUTED, "its worker r/1 is dead")
        assert [(await fleet.record(id)).status for id in (kept, core)] == [S.RUNNING] * 2

    virtually(scenario)


def test_two_recoveries_at_once_do_no_harm() -> None:
    async def scenario(fleet: Fleet) -> None:
        ids = [await held(fleet, owner=f"ghost{number % 3}/0") for number in range(12)]
        slow = [_Yielding(fleet.clock) for _ in range(3)]
        for store in slow:
            store.__dict__.update(fleet.store.__dict__)
        counts = await asyncio.gather(*[recovery_of(fleet, store).running() for store in slow])
        assert sum(counts) == 12
        for id in ids:
            assert await fleet.story(id) == ["registered", "pending", "running", "running_recovery", "rerouted"]

    virtually(scenario)


class _Yielding(MemoryStore):
    """Lets the others in before each call."""

    async def apply(self, changes: Sequence[Any]) -> Sequence[Any]:
        await asyncio.sleep(0.01)
        return await super().apply(changes)

    async def find(self, *args: Any, **more: Any) -> Sequence[InvocationRecord]:
        await asyncio.sleep(0.01)
        return await super().find(*args, **more)


# --- claimed and never started


def test_claimed_work_that_is_not_started_is_taken_back_though_its_owner_lives() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap)
        id = await held(fleet, S.PENDING, owner=f"{member.id}/7")  # of a worker that hangs, say
        helper = await fleet.started(add)
        record = await fleet.end(id, within=21.0)
        assert f"{helper.id}/0" in [entry.owner for entry in record.history]
        assert await fleet.story(id) == [
            *("registered", "pending", "pending_recovery", "rerouted", "pending", "running", "success")
        ]

    virtually(scenario)


def test_the_time_for_which_the_store_was_away_does_not_count_against_claimed_work() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap)
        await asyncio.sleep(20)
        for _ in range(12):  # the moment at which the core task runs is to be found
            id = await held(fleet, S.PENDING, owner=f"{member.id}/7")
            member.line.cut = True
            await asyncio.sleep(10)
            member.line.cut = False
            back = fleet.clock.now()
            record = await fleet.until_status(id, S.REROUTED, within=30.0)
            assert record.changed_at - back >= 5.0
            await asyncio.sleep(0.37)

    virtually(scenario)


# --- core tasks


def test_a_core_task_of_the_dead_is_recovered_by_whoever_declares_the_death() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings = WITHOUT_BACKSTOP
        victim, observer = await fleet.started(add), await fleet.started(nap)
        await asyncio.sleep(20)
        id = await fleet.submit("nap", 100.0)
        user = await held(fleet, owner=f"{victim.id}/0")
        # It holds a run of the recovery itself, and a second one waits behind it for a slot that it will not give back.
        now = fleet.clock.now()
        core = registered(
            InvocationRecord(
                id="recovery-of-the-dead",
                app=CORE_APP,
                task=RECOVER_RUNNING,
                arguments=fleet.codec.encode_call((), {}),
                queue=QUEUE,
                created_at=now,
                due_at=now,
            ),
            operation="x",
            at=now,
        )
        await fleet.store.insert([core])
        await fleet.store.claim(
            Claim(
                app=CORE_APP,
                lanes=(core.lane,),
                limit=1,
                owner=f"{victim.id}/core",
                operation="y",
                at=now,
                ids=(core.id,),
            )
        )
        name = victim.id
        victim.crash()
        await fleet.gone(name)
        declared = fleet.clock.now()
        await fleet.until_status(user, S.REROUTED, within=5.0)

        async def core_ended() -> bool:
            return (await fleet.record(core.id, CORE_APP)).status is S.SUCCESS

        await fleet.until(core_ended, 5.0)
        record = await fleet.record(core.id, CORE_APP)
        story = [str(entry.status) for entry in record.history]
        assert story == [
            *("registered", "pending", "running", "running_recovery", "rerouted", "pending", "running", "success")
        ]
        assert record.history[3].at - declared < 1.0
        assert record.history[4].why == f"its runner {name} on {socket.gethostname()} is dead"
        assert f"{observer.id}/core" in [entry.owner for entry in record.history]
        assert (await fleet.record(id)).status is S.RUNNING  # the observer's own work was left alone

    virtually(scenario)


def test_core_tasks_are_hidden_from_the_app_and_forgotten_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Terms(retention=dict.fromkeys(OUTCOMES, 300.0))
    monkeypatch.setattr(records, "SHORTEST_SECONDS", 300.0)
    monkeypatch.setattr(core_tasks, "TERMS", terms)
    monkeypatch.setattr(core, "TERMS", terms)

    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        await asyncio.sleep(500)
        assert await fleet.store.counts(APP) == {}
        runs = fleet.store._of(CORE_APP)
        assert {record.task for record in runs} == {RECOVER_RUNNING, RECOVER_PENDING}
        assert all(record.status is S.SUCCESS for record in runs if record.changed_at < fleet.clock.now() - 2)
        oldest = min(record.changed_at for record in runs)
        assert 300 - 20 < fleet.clock.now() - oldest < 300 + 130

    virtually(scenario)


def test_a_core_task_whose_schedule_was_set_aside_gets_another_within_two_minutes() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        await asyncio.sleep(5)
        there = await fleet.store.entries(CORE_APP, "schedule")
        assert {entry.name for entry in there} == {RECOVER_RUNNING, RECOVER_PENDING}
        for entry in there:
            await fleet.store.quarantine_entry(entry, CorruptRecord("it is damaged", kind="schedule", id=entry.name))
        gone_at = fleet.clock.now()
        await asyncio.sleep(400)
        later = [record for record in fleet.store._of(CORE_APP) if record.created_at > gone_at]
        assert {record.task for record in later} == {RECOVER_RUNNING, RECOVER_PENDING}

    virtually(scenario)


def test_what_is_to_be_run_at_most_once_and_never_began_goes_back_when_its_worker_is_ended() -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await held(fleet, S.PENDING, at_most_once=True)
        await recovery_of(fleet).of_owner(GHOST, "its runner stops", ended=True)
        assert (await fleet.record(id)).status is S.REROUTED

    virtually(scenario)


# --- the audit


@pytest.mark.parametrize("failing", ["", "find", "apply"])
def test_a_worker_recovers_what_it_owns_and_does_not_know_of(failing: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(1)
        id = await held(fleet, owner=f"{member.id}/0")  # a claim that came too late for its repetition
        owned = fleet.clock.now()
        if failing:
            member.line.errors[failing] = StoreUnavailable("away")
            await asyncio.sleep(2 * AUDIT_SECONDS + 5)
            assert (await fleet.record(id)).status is S.RUNNING
            del member.line.errors[failing]
        record = await fleet.end(id, within=2 * AUDIT_SECONDS + 2)
        assert (record.status, record.attempt) == ("success", 2)
        taken = next(entry.at for entry in record.history if entry.status is S.RUNNING_RECOVERY)
        assert taken - owned > AUDIT_SECONDS  # once strange is not enough
        assert "its owner does not know of it" in [entry.why for entry in record.history]

    virtually(scenario)


def test_what_was_strange_in_another_epoch_is_strange_for_the_first_time() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(1)
        audit = member.runner._workers._running_worker.worker._audit  # type: ignore[union-attr]
        id = await held(fleet, owner=f"{member.id}/0")

        async def is_suspect() -> bool:
            return (id, 1) in audit._suspects

        await fleet.until(is_suspect, AUDIT_SECONDS + 2)
        found = await fleet.record(id)
        fleet.store._put(replace(found, epoch=2))
        await asyncio.sleep(AGAIN_SECONDS + 0.5)
        assert (await fleet.record(id)).epoch == 2
        assert (await fleet.record(id)).status is S.RUNNING
        assert (await fleet.end(id, within=2 * AUDIT_SECONDS)).status is S.SUCCESS

    virtually(scenario)


def test_an_audit_does_not_touch_what_a_worker_knows_of() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(nap, concurrency=10)
        ids = [await fleet.submit("nap", 10.0 * number) for number in range(10)]
        records = [await fleet.end(id, within=200.0) for id in ids]
        assert [record.attempt for record in records] == [1] * 10
        assert await fleet.recoveries() == 0

    virtually(scenario)


def test_a_store_that_is_away_raises_here_and_is_asked_again_by_whoever_called() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        member.line.cut = True
        with pytest.raises(StoreUnavailable):
            await Recovery(member.engine).running()

    virtually(scenario)
