"""The life of a runner, in virtual time: joining, beating, being cut off, dying, beginning anew, leaving."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fleet import (
    APP,
    CORE_APP,
    DEAD_AFTER,
    HEARTBEAT,
    SWALLOWED_SECONDS,
    WITHOUT_BACKSTOP,
    Fleet,
    Line,
    add,
    nap,
    virtually,
)

from holdfast.errors import StoreReadOnly, StoreUnavailable
from holdfast.fleet.failure_detector import FailureDetector
from holdfast.model.claims import Claim
from holdfast.model.queues import QueuePause
from holdfast.model.records import DRAIN, STOP, RunnerRecord
from holdfast.model.status import Status
from holdfast.runtime import pauses
from holdfast.store.contract import Store

# --- joining and leaving


@pytest.mark.parametrize("failures", [0, 4])
def test_a_runner_joins_before_its_first_claim(failures: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        member.line.lost["enrol"] = failures
        id = await fleet.submit("add", 1, 2)
        await member.start()
        await fleet.end(id)
        names = [name for _, name in member.line.calls]
        joined = max(place for place, name in enumerate(names) if name == "enrol")
        assert names.count("enrol") == failures + 1
        assert "claim" not in names[:joined]
        assert await fleet.roster() == [member.id]

    virtually(scenario)


@pytest.mark.parametrize("hurry", [False, True])
def test_a_runner_leaves_after_everything_is_handed_back(hurry: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap)
        id = await fleet.submit("nap", 20.0)
        await fleet.until_status(id, Status.RUNNING)
        owned: list[str] = []

        def leaving() -> None:
            found = [record for app in (APP, CORE_APP) for record in fleet.store._of(app)]
            owned.extend(record.id for record in found if record.owner is not None)

        member.line.before["remove_runner"] = leaving
        await member.stop(hurry=hurry)
        assert member.line.count("remove_runner") == 1
        assert owned == []
        assert member.line.calls[-1][1] == "remove_runner"
        assert await fleet.roster() == []
        assert (await fleet.record(id)).status == ("rerouted" if hurry else "success")

    virtually(scenario)


def test_a_store_that_refuses_a_joining_runner_is_not_asked_for_ever() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        member.line.errors["enrol"] = StoreReadOnly("it may not write")
        with pytest.raises(StoreReadOnly):
            await asyncio.wait_for(member.start(), 60)
        assert member.line.count() == 1

    virtually(scenario)


def test_a_store_that_refuses_the_crew_ends_the_runner() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        member.line.errors["find"] = StoreReadOnly("it may not even look")
        with pytest.raises(StoreReadOnly):
            await member.start()

    virtually(scenario)


@pytest.mark.parametrize("stage", ["enrol", "find", "lanes"])
def test_a_runner_that_is_stopped_while_it_waits_for_the_store_ends_quietly(stage: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        member.line.errors[stage] = StoreUnavailable("away")
        starting = asyncio.create_task(member.start())
        await asyncio.sleep(20)
        assert not starting.done()
        asked = fleet.clock.now()
        account = await member.stop()
        assert account.started == 0
        assert fleet.clock.now() - asked < 1
        await starting
        assert await fleet.roster() == []

    virtually(scenario)


def test_a_runner_that_joins_late_is_not_taken_for_dead() -> None:
    """Its entry tells of when it joined, not of when it first tried to."""

    async def scenario(fleet: Fleet) -> None:
        observer = await fleet.started(add)
        late = fleet.member(add)
        late.line.cut = True
        joining = asyncio.create_task(late.start())
        await asyncio.sleep(40)
        late.line.cut = False
        await joining
        first = late.id
        await asyncio.sleep(60)
        assert late.id == first
        assert await fleet.roster() == [first, observer.id] or await fleet.roster() == [observer.id, first]

    virtually(scenario)


# --- the heartbeat


def test_heartbeats_come_every_two_seconds_in_one_write() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(60)
        beats = [at for at, name in member.line.calls if name == "heartbeat"]
        assert 29 <= len(beats) <= 31
        gaps = [after - before for before, after in itertools.pairwise(beats)]
        assert all(gap == pytest.approx(HEARTBEAT, abs=0.01) for gap in gaps)
        (entry,) = await fleet.store.roster(APP)
        assert fleet.clock.now() - entry.heartbeat_at <= HEARTBEAT + 0.01
        assert [worker.id for worker in entry.workers] == ["0"]

    virtually(scenario)


@pytest.mark.parametrize("replies", [1, 3, 6])
def test_a_lost_reply_of_a_heartbeat_costs_nothing(replies: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        first, other = await fleet.started(nap), await fleet.started(add)
        id = await fleet.submit("nap", 60.0)
        await fleet.until_status(id, Status.RUNNING)
        name = first.id
        first.line.lost["heartbeat"] = replies
        record = await fleet.end(id)
        assert first.line.lost["heartbeat"] == 0
        assert (first.id, record.attempt) == (name, 1)
        assert other.line.count("remove_runner") == 0

    virtually(scenario)


@pytest.mark.parametrize("beats", [1, 3])
def test_a_heartbeat_that_is_swallowed_does_not_hold_up_the_next(beats: int) -> None:
    """A connection that is open on this side only keeps its sender waiting for longer than the dead-after time."""

    async def scenario(fleet: Fleet) -> None:
        first, other = await fleet.started(nap), await fleet.started(add)
        id = await fleet.submit("nap", 40.0)
        await fleet.until_status(id, Status.RUNNING)
        await asyncio.sleep(20)
        name = first.id
        first.line.swallowed["heartbeat"] = beats
        record = await fleet.end(id)
        assert first.line.swallowed["heartbeat"] == 0
        assert (first.id, record.attempt) == (name, 1)
        assert other.line.count("remove_runner") == 0

    virtually(scenario)


class OneLateBeat(Line):
    """The answer to one heartbeat comes after those of several that follow."""

    seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "heartbeat":
            return there

        async def heartbeat(*args: Any, **named: Any) -> Any:
            answer, (late, self.seconds) = await there(*args, **named), (self.seconds, 0.0)
            await asyncio.sleep(late)
            return answer

        return heartbeat


def test_an_answer_that_comes_after_later_ones_says_nothing() -> None:
    """Beats were steady, so this runner may still judge others, and its permit is no shorter."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add, make_line=OneLateBeat)
        await asyncio.sleep(20)
        line = member.line
        assert isinstance(line, OneLateBeat)
        line.seconds = 4 * HEARTBEAT
        steady = [float("-inf")]
        for _ in range(30):
            await asyncio.sleep(HEARTBEAT / 4)
            assert member.runner.is_connected
            steady.append(member.runner._steady())
        assert line.seconds == 0.0
        assert steady == sorted(steady), "it grows all the time"
        assert steady[-1] > 20

    virtually(scenario)


@pytest.mark.parametrize("seconds", [HEARTBEAT, 4 * HEARTBEAT])
def test_after_missed_beats_steadiness_begins_anew(seconds: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(60)
        member.line.errors["heartbeat"] = StoreUnavailable("not heard")
        await asyncio.sleep(seconds)
        del member.line.errors["heartbeat"]
        await asyncio.sleep(2 * HEARTBEAT)
        steady = member.runner._steady()
        assert steady > 60 if seconds == HEARTBEAT else 0.0 < steady <= 2 * HEARTBEAT

    virtually(scenario)


@pytest.mark.parametrize("seconds", [1.0, 600.0, -600.0])
def test_after_the_clock_was_set_steadiness_begins_anew(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all have sent heartbeats by the new time, the living look silent."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(60)
        now = fleet.store.now
        monkeypatch.setattr(fleet.store, "now", lambda: now() + seconds)
        await asyncio.sleep(1.5 * HEARTBEAT)
        steady = member.runner._steady()
        assert steady > 60 if seconds == 1.0 else 0.0 <= steady <= 1.5 * HEARTBEAT

    virtually(scenario)


def test_a_stop_before_there_are_workers_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)

        async def stopped_meanwhile(store: Store, app: str) -> list[QueuePause]:
            member.runner.stop()
            return []

        monkeypatch.setattr(pauses, "pauses_of", stopped_meanwhile)
        began = fleet.clock.now()
        await member.runner.run()
        assert fleet.clock.now() - began < 1.0
        assert await fleet.roster() == []

    virtually(scenario)


def test_swallowed_heartbeats_do_not_pile_up() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        member.line.swallowed["heartbeat"] = 1000
        since = fleet.clock.now()
        await asyncio.sleep(100)
        assert member.line.count("heartbeat", since=since) <= 100 / SWALLOWED_SECONDS * (DEAD_AFTER / HEARTBEAT + 1)
        member.line.swallowed["heartbeat"] = 0
        await asyncio.sleep(SWALLOWED_SECONDS + HEARTBEAT)
        assert member.runner.is_connected

    virtually(scenario)


def test_a_defect_in_what_a_heartbeat_tells_does_not_stop_the_heart(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        member.line.errors["heartbeat"] = RuntimeError("a defect")
        await asyncio.sleep(5)
        del member.line.errors["heartbeat"]
        since = fleet.clock.now()
        await asyncio.sleep(20)
        assert member.line.count("heartbeat", since=since) >= 9

    virtually(scenario)
    assert "a defect" in caplog.text


# --- death


def test_death_is_declared_after_the_dead_after_time_and_not_before() -> None:
    async def scenario(fleet: Fleet) -> None:
        observer, victim = await fleet.started(nap), await fleet.started(nap, concurrency=20)
        await asyncio.sleep(20)
        ids = [await fleet.submit("nap", 30.0) for _ in range(8)]
        for id in ids:
            await fleet.until_status(id, Status.RUNNING)
        held = [id for id in ids if (await fleet.record(id)).owner == f"{victim.id}/0"]
        assert held
        victim.crash()
        name = victim.id
        entry = next(runner for runner in await fleet.store.roster(APP) if runner.id == name)
        await fleet.gone(name)
        assert DEAD_AFTER < fleet.clock.now() - entry.heartbeat_at < DEAD_AFTER + 0.5
        await asyncio.sleep(1.5)
        for id in held:
            story = await fleet.story(id)
            assert story[:5] == ["registered", "pending", "running", "running_recovery", "rerouted"]
        assert observer.line.count("remove_runner") == 1

    virtually(scenario)


def test_a_runner_that_is_heard_while_its_death_is_declared_lives_on() -> None:
    async def scenario(fleet: Fleet) -> None:
        observer, victim = await fleet.started(nap), await fleet.started(nap)
        await asyncio.sleep(20)
        name = victim.id
        victim.line.freeze()
        observer.line.before["remove_runner"] = lambda: heard(fleet, name)
        await asyncio.sleep(DEAD_AFTER + 1.0)
        assert observer.line.count("remove_runner") == 1
        assert name in await fleet.roster()

    def heard(fleet: Fleet, name: str) -> None:
        entry = fleet.store._runners[APP, name]
        fleet.store._runners[APP, name] = replace(entry, heartbeat_at=fleet.clock.now())

    virtually(scenario)


def test_whoever_promises_or_expects_less_is_granted_it() -> None:
    """In a deploy that changes the settings, two kinds of runners live side by side."""
    quick = {"runner_heartbeat_seconds": 0.2, "runner_considered_dead_after_minutes": 2.0 / 60}

    async def scenario(fleet: Fleet) -> None:
        slow = await fleet.started(nap)
        fleet.settings = quick
        hasty, victim = await fleet.started(nap), await fleet.started(nap)
        await asyncio.sleep(60)
        assert [member.line.count("remove_runner") for member in fleet.members] == [0, 0, 0]
        for member, patience in ((victim, 2.0), (slow, DEAD_AFTER)):
            member.crash()
            entry = next(runner for runner in await fleet.store.roster(APP) if runner.id == member.id)
            await fleet.gone(member.id)
            # Those who beat more seldom may be silent for longer, and are looked at first.
            assert patience < fleet.clock.now() - entry.heartbeat_at < patience + HEARTBEAT
        assert hasty.line.count("remove_runner") == 2

    virtually(scenario)


def test_an_observer_that_was_not_steady_itself_declares_nobody_dead() -> None:
    async def scenario(fleet: Fleet) -> None:
        victim = await fleet.started(add)
        name = victim.id
        await asyncio.sleep(10)
        victim.crash()
        await asyncio.sleep(12)
        late = await fleet.started(add)
        joined = fleet.clock.now()
        await fleet.gone(name)
        assert fleet.clock.now() - joined >= DEAD_AFTER - 0.01
        assert fleet.clock.now() - joined < DEAD_AFTER + 1
        assert await fleet.roster() == [late.id]

    virtually(scenario)


@pytest.mark.parametrize(
    ("silence", "steady", "declared"),
    [(14.9, 1000.0, False), (15.1, 14.9, False), (15.1, 15.1, True), (1000.0, 14.9, False), (0.0, 1000.0, False)],
)
def test_both_the_silence_and_the_observers_own_steadiness_count(silence: float, steady: float, declared: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        seen: list[str] = []

        async def bury(runner: RunnerRecord) -> None:
            seen.append(runner.id)

        now = fleet.clock.now() - silence
        facts = {"host": "h", "pid": 1, "version": "0", "started_at": now, "heartbeat_at": now}
        await fleet.store.enrol(RunnerRecord(id="silent", app=APP, concurrency=1, tasks=(), **facts))  # type: ignore[arg-type]
        heartbeat: Any = SimpleNamespace(steady_seconds=lambda: steady, answered_seconds=lambda: steady)
        detector = FailureDetector(fleet.engine(fleet.store), heartbeat, bury)
        await detector._look()
        assert seen == (["silent"] if declared else [])
        assert await fleet.roster() == ([] if declared else ["silent"])

    virtually(scenario)


@pytest.mark.parametrize(
    ("watched", "heard", "declared"),
    [(14.9, 1000.0, False), (15.1, 14.9, False), (15.1, 0.0, False), (15.1, 15.1, True)],
)
@pytest.mark.parametrize("ahead", [0.0, 3600.0], ids=["", "a stamp that lies ahead"])
def test_a_stamp_that_does_not_change_counts_while_the_observer_is_heard(
    watched: float, heard: float, declared: bool, ahead: float
) -> None:
    """Where clocks prove nothing: it was not heard itself, so perhaps nobody was."""

    async def scenario(fleet: Fleet) -> None:
        async def bury(runner: RunnerRecord) -> None:
            pass

        now = fleet.clock.now() + ahead
        facts = {"host": "h", "pid": 1, "version": "0", "started_at": now, "heartbeat_at": now}
        await fleet.store.enrol(RunnerRecord(id="silent", app=APP, concurrency=1, tasks=(), **facts))  # type: ignore[arg-type]
        heartbeat: Any = SimpleNamespace(steady_seconds=lambda: 0.0, answered_seconds=lambda: heard)
        detector = FailureDetector(fleet.engine(fleet.store), heartbeat, bury)
        await detector._look()
        await asyncio.sleep(watched)
        await detector._look()
        assert await fleet.roster() == ([] if declared else ["silent"])

    virtually(scenario)


@pytest.mark.parametrize("seconds", [4.0, 14.0, 16.0, 60.0, 300.0])
def test_an_outage_of_the_store_is_nobodys_death(seconds: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        members = [await fleet.started(nap) for _ in range(3)]
        names = [member.id for member in members]
        await asyncio.sleep(30)
        ids = [await fleet.submit("nap", 10.0 + seconds) for _ in range(6)]
        for id in ids:
            await fleet.until_status(id, Status.RUNNING)
        for member in members:
            member.line.cut = True
        await asyncio.sleep(seconds)
        for member in members:  # they do not come back in the same moment
            await asyncio.sleep(0.7)
            member.line.cut = False
        records = [await fleet.end(id) for id in ids]
        assert [record.attempt for record in records] == [1] * 6
        await asyncio.sleep(60)
        assert [member.id for member in members] == names
        assert sum(member.line.count("remove_runner") for member in members) == 0
        assert await fleet.recoveries() == 0

    virtually(scenario)


@pytest.mark.parametrize("lost", ["remove_runner", "owners", "find", "insert"])
def test_a_death_that_was_hard_to_declare_is_seen_to_all_the_same(lost: str) -> None:
    """Whoever declared it, or may have, goes on until the recovery is under way; no cron helps here."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings = WITHOUT_BACKSTOP
        observer, victim = await fleet.started(nap), await fleet.started(add, nap)
        await asyncio.sleep(20)
        id = await fleet.submit("add", 1, 2, due_at=fleet.clock.now() + 1e6)
        record = fleet.new("nap", 5.0)
        await fleet.store.insert([record])
        await fleet.until_status(record.id, Status.RUNNING)
        if (await fleet.record(record.id)).owner != f"{victim.id}/0":
            observer, victim = victim, observer
        name = victim.id
        victim.crash()
        observer.line.lost[lost] = 2
        await fleet.gone(name)
        await fleet.end(record.id, within=15.0)
        assert await fleet.story(id) == ["registered"]

    virtually(scenario)


def test_a_recovery_that_the_store_leaves_without_an_answer_is_tried_again_at_once() -> None:
    """The death is seen to: a run of the core task is stored. That run fails, and no cron helps."""
    asked = itertools.count(1)

    def answers() -> None:
        if next(asked) in (2, 3):  # the first look for owners comes before the run is stored
            raise StoreUnavailable("no answer")

    async def scenario(fleet: Fleet) -> None:
        fleet.settings = WITHOUT_BACKSTOP
        victim = await fleet.started(nap)
        id = await fleet.submit("nap", 5.0)
        await fleet.until_status(id, Status.RUNNING)
        observer = await fleet.started(nap)
        observer.line.before["owners"] = answers
        victim.crash()
        await fleet.gone(victim.id)
        await fleet.until_status(id, Status.RUNNING, within=1.0)
        assert (await fleet.record(id)).epoch == 1
        await fleet.end(id, within=10.0)
        assert next(asked) > 4

    virtually(scenario)


# --- after one's own death


def test_a_runner_that_was_declared_dead_is_fenced_and_begins_anew() -> None:
    ended: list[str] = []

    async def scenario(fleet: Fleet) -> None:
        async def work(name: str, seconds: float) -> str:
            try:
                await asyncio.sleep(seconds)
                ended.append(f"{name} done")
            except asyncio.CancelledError:
                ended.append(f"{name} cancelled")
                raise
            return name

        frozen = await fleet.started(work)
        short, long = await fleet.submit("work", "short", 20.0), await fleet.submit("work", "long", 500.0)
        await fleet.until_status(short, Status.RUNNING)
        await fleet.until_status(long, Status.RUNNING)
        name = frozen.id
        other = await fleet.started(work)
        await asyncio.sleep(16)
        frozen.line.freeze()
        await fleet.gone(name)
        await fleet.until_status(short, Status.RUNNING, within=3)
        await asyncio.sleep(10)  # the frozen one's own short run ends meanwhile, and its end waits on the line
        verdicts: list[object] = []
        apply = fleet.store.apply

        async def noted(changes: list[object]) -> object:
            answer = await apply(changes)  # type: ignore[arg-type]
            verdicts.extend(answer)
            return answer

        fleet.store.apply = noted  # type: ignore[method-assign, assignment]
        frozen.line.thaw()
        await asyncio.sleep(5)
        fleet.store.apply = apply  # type: ignore[method-assign]
        assert frozen.id != name
        assert set(await fleet.roster()) == {frozen.id, other.id}
        assert "long cancelled" in ended
        record = await fleet.end(short)
        assert (record.status, record.epoch, record.attempt) == ("success", 2, 2)
        assert (await fleet.record(long)).owner == f"{other.id}/0"
        # The new life works: the other one's places are all taken by now.
        await fleet.stop(other)
        (again,) = [await fleet.end(await fleet.submit("work", "again", 1.0))]
        assert f"{frozen.id}/0" in [entry.owner for entry in again.history]

    virtually(scenario)


def test_a_claim_that_was_under_way_when_its_runner_died_is_not_begun() -> None:
    begun: list[float] = []

    async def scenario(fleet: Fleet) -> None:
        def work() -> None:
            begun.append(fleet.clock.now())

        member, other = await fleet.started(work), await fleet.started(add)
        await asyncio.sleep(20)
        name = member.id
        member.line.freezes_at_claim = True
        await fleet.gone(name)
        id = await fleet.submit("work", due_at=fleet.clock.now() - 60)
        thawed = fleet.clock.now()
        member.line.thaw()  # a claim of the dead one goes through, and then its heartbeat
        record = await fleet.end(id)
        owners = [entry.owner for entry in record.history if entry.status is Status.RUNNING]
        assert owners == [f"{name}/0", f"{member.id}/0"]
        assert len(begun) == 1
        assert begun[0] > thawed
        assert other.line.count("remove_runner") == 1

    virtually(scenario)


# --- cut off


def test_a_claim_is_not_repeated_by_a_runner_that_may_be_dead() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await fleet.started(nap)
        await asyncio.sleep(20)
        name = member.id
        member.line.cut = True
        await fleet.gone(name)
        ids = [await fleet.submit("add", 1, 2) for _ in range(3)]
        member.line.errors["heartbeat"] = StoreUnavailable("the heartbeat is the last to be heard")
        member.line.cut = False
        await asyncio.sleep(20)
        for id in ids:
            assert await fleet.story(id) == ["registered"]
        del member.line.errors["heartbeat"]
        for id in ids:
            assert await fleet.end(id)
            assert await fleet.story(id) == ["registered", "pending", "running", "success"]

    virtually(scenario)


def test_a_runner_that_is_cut_off_stops_starting_work_and_starts_again_when_it_is_heard() -> None:
    begun: list[float] = []

    async def scenario(fleet: Fleet) -> None:
        def work() -> None:
            begun.append(fleet.clock.now())

        member = await fleet.started(work)
        await asyncio.sleep(20)
        heartbeat = member.line.store.heartbeat
        quiet = True

        async def unheard(*args: object, **named: object) -> object:
            if quiet:
                raise StoreUnavailable("heartbeats do not get through")
            return await heartbeat(*args, **named)  # type: ignore[arg-type]

        fleet.store.heartbeat = unheard  # type: ignore[method-assign, assignment]
        (entry,) = await fleet.store.roster(APP)
        silent_since = entry.heartbeat_at
        for _ in range(25):
            await fleet.submit("work")
            await asyncio.sleep(1)
        assert begun[-1] < silent_since + DEAD_AFTER * 2 / 3 + 0.01
        assert begun[-1] > silent_since + DEAD_AFTER * 2 / 3 - 2
        assert not member.runner.is_connected
        await asyncio.sleep(0.43)
        member.runner._workers._running_worker.worker._wakeup.notify()  # type: ignore[union-attr]  # it looks at odd moments from now on
        quiet = False
        heard = fleet.clock.now()
        done = len(begun)

        async def all_done() -> bool:
            return len(begun) == 25

        await fleet.until(all_done, within=HEARTBEAT + 1)
        (entry,) = await fleet.store.roster(APP)
        assert heard <= entry.heartbeat_at <= begun[done] < entry.heartbeat_at + 0.1

    virtually(scenario)


def test_reserved_work_is_not_started_without_a_permit() -> None:
    """What was claimed ahead goes back to the queue when its runner is not heard any more."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, concurrency=3)
        await asyncio.sleep(3)
        worker = member.runner._workers._running_worker.worker  # type: ignore[union-attr]
        ids = [await fleet.submit("nap", 30.0) for _ in range(2)]
        for id in ids:
            await fleet.until_status(id, Status.RUNNING)
        id = await fleet.submit("nap", 1.0)
        now = fleet.clock.now()
        wish = Claim(
            app=APP, lanes=("default|nap",), limit=1, owner=worker.owner, operation="ahead", at=now, start=False
        )
        claimed = await fleet.store.claim(wish)
        worker._reserve.add(claimed.records, asyncio.get_running_loop().time())
        assert [record.id for record in claimed.records] == [id]
        worker._permit._until = float("-inf")
        worker._permit.grant = lambda until: None
        worker.end([])
        worker._wakeup.notify()
        await fleet.until_status(id, Status.REROUTED, within=5)
        assert await fleet.story(id) == ["registered", "pending", "rerouted"]

    virtually(scenario)


# --- wishes


@pytest.mark.parametrize("wish", [DRAIN, STOP])
def test_wishes_in_the_roster_entry_are_obeyed(wish: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, drain=60.0)
        id = await fleet.submit("nap", 20.0)
        await fleet.until_status(id, Status.RUNNING)
        began = fleet.clock.now()
        assert await fleet.store.ask_runner(APP, member.id, wish=wish)
        assert member.life is not None
        await asyncio.wait_for(member.life, 100)
        took = fleet.clock.now() - began
        assert await fleet.roster() == []
        if wish == DRAIN:
            assert (await fleet.record(id)).status == "success"
            assert 15 < took < 25
        else:
            assert (await fleet.record(id)).status == "rerouted"
            assert took < HEARTBEAT + 2

    virtually(scenario)


def test_a_drain_can_be_hurried_up_and_shows_on_the_roster() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, drain=600.0)
        id = await fleet.submit("nap", 500.0)
        await fleet.until_status(id, Status.RUNNING)
        await fleet.store.ask_runner(APP, member.id, wish=DRAIN)
        await asyncio.sleep(5)
        (entry,) = await fleet.store.roster(APP)
        assert entry.draining
        waiting = await fleet.submit("nap", 1.0)
        await asyncio.sleep(5)
        assert await fleet.story(waiting) == ["registered"]
        await fleet.store.ask_runner(APP, member.id, wish=STOP)
        assert member.life is not None
        await asyncio.wait_for(member.life, 5)
        assert (await fleet.record(id)).status == "rerouted"

    virtually(scenario)


def test_a_line_is_what_it_says() -> None:
    """The harness itself: a frozen line goes on where it was, a lost reply was a write."""

    async def scenario(fleet: Fleet) -> None:
        line = Line(fleet.store)
        line.lost["insert"] = 1
        record = fleet.new("add", 1, 2)
        with pytest.raises(StoreUnavailable):
            await line.insert([record])
        assert (await fleet.record(record.id)).status == "registered"
        line.freeze()
        asking = asyncio.create_task(line.get(APP, [record.id]))
        await asyncio.sleep(100)
        assert not asking.done()
        line.thaw()
        assert (await asking)[0].id == record.id

    virtually(scenario)


# --- the worker for core tasks


class BreaksForCoreTasks(Line):
    """Its claims of core tasks raise what nobody expects, until it is told that this is over."""

    broken = True

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "claim":
            return there

        async def claim(claim: Claim) -> Any:
            if self.broken and claim.app == CORE_APP:
                self.calls.append((self.store.now(), "broken"))
                raise NotADirectoryError(20, "Not a directory")
            return await there(claim)

        return claim


def test_a_worker_for_core_tasks_that_breaks_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Else nothing is recovered any more while its runner seems to be well."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, make_line=BreaksForCoreTasks)
        dying = await fleet.started(nap)
        id = await fleet.submit("nap", 1.0, owner=f"{dying.id}/1", status=Status.RUNNING)
        dying.crash()
        await asyncio.sleep(60)
        assert 4 < member.line.count("broken") < 30, "ever more seldom"
        assert isinstance(member.line, BreaksForCoreTasks)
        member.line.broken = False
        assert (await fleet.end(id)).status is Status.SUCCESS

    virtually(scenario)
    assert "could not run core tasks" in caplog.text


def test_a_runner_stops_while_its_worker_for_core_tasks_is_broken() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, make_line=BreaksForCoreTasks)
        await asyncio.sleep(60)
        asked = fleet.clock.now()
        await member.stop()
        assert fleet.clock.now() - asked < 1
        assert await fleet.roster() == []

    virtually(scenario)
