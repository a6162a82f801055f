"""What was true before an answer came, and is not when it comes: one case after the other, in virtual time.

tests/runtime/test_worker_awaits.py lets things happen at every await, and asks whether anything is lost. Here it is
asked what exactly is done, where nothing would be lost by doing the wrong thing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.fleet.test_recovery import held
from tests.runtime.test_worker import DRAIN, Harness, running
from tests.runtime.test_worker import virtually as virtually_alone
from tests.runtime.test_worker_awaits import EarlyMemory
from tests.support.fleet import (
    APP,
    DEAD_AFTER,
    LATENCY,
    PLAIN,
    WITHOUT_BACKSTOP,
    Fleet,
    Line,
    Member,
    definition,
    nap,
    virtually,
)
from tests.support.patience import patient

from holdfast.codec import SizeLimits, references
from holdfast.errors import StoreError, StoreUnavailable
from holdfast.fleet.recovery import Recovery
from holdfast.ids import InvocationId
from holdfast.model.changes import Change, Verdict
from holdfast.model.claims import Claim
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import CANCEL, ENDED, PAUSES, READY, Cancellation, Hint, Terms
from holdfast.model.retries import Fixed, dump_policy
from holdfast.model.status import Status
from holdfast.runtime import hints as fallback
from holdfast.runtime import wait
from holdfast.runtime.claim import MAX_TIMES, Permit
from holdfast.runtime.pauses import pause_queue, resume_queue
from holdfast.runtime.worker import Worker
from holdfast.runtime.worker_duties import AUDIT_SECONDS
from holdfast.store.contract import Ability, Filter, Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock

PLACES = 2


class SlowClaims(Line):
    """Claims are carried out at once, and their answers take their time."""

    seconds = 0.0
    under_way = most_under_way = 0

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name in PLAIN or name != "claim":
            return there

        async def claim(*args: Any, **named: Any) -> Any:
            is_ours = args[0].app == APP
            self.under_way += is_ours
            self.most_under_way = max(self.most_under_way, self.under_way)
            answer = await there(*args, **named)
            if is_ours:
                await asyncio.sleep(self.seconds)
            self.under_way -= is_ours
            return answer

        return claim


def worker_of(member: Member) -> Worker:
    return member.runner._workers._running_worker.worker  # type: ignore[union-attr]


# --- many pages


def test_each_page_goes_on_where_the_one_before_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "_PAGE", 2)

    async def scenario(fleet: Fleet) -> None:
        ids = [await fleet.submit("work") for _ in range(5)]
        found: list[str] = []
        async for page in wait.pages(fleet.store, APP, Filter()):
            found += [record.id for record in page]
            if len(found) > len(ids):
                break
        assert sorted(found) == sorted(ids)

    virtually(scenario)


# --- somebody else has it by now


def test_who_gives_way_leaves_alone_what_has_begun_anew_elsewhere() -> None:
    """It was cancelled when its owner wanted to write a retry; the owner reads it, and finds it in another epoch."""

    async def scenario(fleet: Fleet) -> None:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()
            raise ValueError("once more")

        member = await fleet.started(work)
        id = await fleet.submit("work", terms=Terms(retries=dump_policy(Fixed(3, 1.0))))
        record = await fleet.until_status(id, Status.RUNNING)
        reads = 0

        def taken_meanwhile() -> None:
            nonlocal reads
            reads += 1
            found = fleet.store._records[APP, id]
            fleet.store._put(replace(found, epoch=record.epoch + 1, owner="other/0"))

        member.line.before["get"] = taken_meanwhile
        await fleet.engine(fleet.store).canceller.cancel([id], by="a test")
        gate.set()
        await asyncio.sleep(1.0)
        assert reads == 1, "its owner was refused, and has looked why"
        found = await fleet.record(id)
        assert (found.status, found.owner) == (Status.CANCELLING, "other/0")
        fleet.store._put(replace(found, status=Status.CANCELLED, owner=None))

    virtually(scenario)


def test_a_cancel_is_for_the_epoch_that_it_names() -> None:
    async def scenario(fleet: Fleet) -> None:
        gate, calls = asyncio.Event(), 0

        async def work() -> str:
            nonlocal calls
            calls += 1
            await gate.wait()
            return "done"

        member = await fleet.started(work)
        record = await fleet.until_status(await fleet.submit("work"), Status.RUNNING)
        now = fleet.clock.now()
        asked = Cancellation(by="a test", at=now, until=now + 5.0)
        other = replace(record, epoch=record.epoch + 1, status=Status.CANCELLING, cancellation=asked)
        worker_of(member)._is_to_end(other)
        await asyncio.sleep(10.0)
        gate.set()
        assert (await fleet.end(record.id)).status is Status.SUCCESS, await fleet.story(record.id)
        assert calls == 1

    virtually(scenario)


def test_what_a_claim_brings_after_a_death_is_not_begun_though_the_permit_holds() -> None:
    """Others have taken the runner for dead in error: its heartbeats go on, and one tells it, before the claim does."""

    async def scenario(fleet: Fleet) -> None:
        began: list[str] = []

        async def work() -> None:
            (found,) = [record for record in fleet.store._of(APP) if record.status is Status.RUNNING]
            began.append(str(found.owner))

        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(work, make_line=SlowClaims)
        await asyncio.sleep(3.0)
        assert isinstance(member.line, SlowClaims)
        before, member.line.seconds = member.id, 4.0
        id = await fleet.submit("work")
        await fleet.until_status(id, Status.RUNNING)
        (entry,) = await fleet.store.roster(APP)
        assert await fleet.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at)
        permit = member.runner._permit
        await fleet.until_status(id, Status.REROUTED, within=6.0)
        assert permit is not None
        assert permit.holds(), "the case is about that"
        member.line.seconds = 0.0
        assert (await fleet.end(id)).status is Status.SUCCESS
        assert before != member.id
        assert began == [f"{member.id}/0"]

    virtually(scenario)


def test_a_runner_that_was_declared_dead_writes_no_end_of_what_ran() -> None:
    """Whoever declared it may not have come to its work yet: that is theirs, and is told as a crash."""

    async def scenario(fleet: Fleet) -> None:
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(600.0)
            finally:
                ended.append("work")

        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(work)
        record = await fleet.until_status(await fleet.submit("work"), Status.RUNNING)
        (entry,) = await fleet.store.roster(APP)
        assert await fleet.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at)
        await asyncio.sleep(5.0)
        assert ended == ["work"]
        assert entry.id != member.id
        found = await fleet.record(record.id)
        assert (found.status, found.owner) == (Status.RUNNING, record.owner)

    virtually(scenario)


class HangingEnds(Line):
    """An end is on its way for a minute."""

    hangs = False

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "apply":
            return there

        async def apply(changes: Sequence[Change]) -> Any:
            if self.hangs and any(change.app == APP for change in changes):
                await asyncio.sleep(60.0)
            return await there(changes)

        return apply


def test_a_runner_that_was_declared_dead_begins_anew_without_waiting_for_its_last_words() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def work() -> None:
            pass

        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(work, make_line=HangingEnds)
        assert isinstance(member.line, HangingEnds)
        member.line.hangs = True
        await fleet.until_status(await fleet.submit("work"), Status.RUNNING)
        await asyncio.sleep(0.5)
        (entry,) = await fleet.store.roster(APP)
        assert await fleet.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at)
        await asyncio.sleep(5.0)
        assert await fleet.roster() == [member.id] != [entry.id]
        member.line.hangs = False
        assert await fleet.end(await fleet.submit("work"), within=5.0)

    virtually(scenario)


def test_what_a_claim_ahead_brings_after_a_death_goes_back() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def short() -> None:
            await asyncio.sleep(0.012)

        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(short, concurrency=PLACES, make_line=SlowClaims)
        before = member.id
        for _ in range(200):
            await fleet.submit("short")
        worker = worker_of(member)
        assert isinstance(member.line, SlowClaims)

        async def has_claimed_ahead() -> bool:
            return len(worker._reserve) > 0

        async def claims_ahead() -> bool:
            return worker._prefetching is not None

        await fleet.until(has_claimed_ahead, 5.0)
        member.line.seconds = 5.0
        await fleet.until(claims_ahead, 5.0)
        known = worker._known()
        assert known is None, "it cannot tell: a claim is under way"
        known = worker._reserve.ids() | worker._settler.busy | worker._running.records.keys()
        (entry,) = await fleet.store.roster(APP)
        assert await fleet.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at)
        await asyncio.sleep(3.0)
        assert member.id != before
        member.line.seconds = 0.0
        await asyncio.sleep(3.0)
        held = {record.id for record in fleet.store._of(APP) if record.owner == f"{before}/0"}
        assert held <= known, "what it knew of is left to those who have declared it dead, and nothing else"

    virtually(scenario, EarlyMemory)


def test_what_a_claim_brings_after_its_time_has_expired() -> None:
    async def scenario(fleet: Fleet) -> None:
        calls = 0

        async def work() -> None:
            nonlocal calls
            calls += 1

        member = await fleet.started(work, make_line=SlowClaims)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = 3.0
        start_by = fleet.clock.now() + 2.5
        id = await fleet.submit("work", start_by=start_by, terms=Terms(start_by=start_by))
        record = await fleet.end(id)
        assert record.status is Status.FAILED
        assert record.error is not None
        assert record.error.type_name == "holdfast.errors:Expired"
        assert not calls

    virtually(scenario)


def test_what_ends_while_a_worker_looks_what_it_has_lost_is_not_lost() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def work() -> None:
            await asyncio.sleep(600.0)

        member = await fleet.started(work)
        record = await fleet.until_status(await fleet.submit("work"), Status.RUNNING)
        worker = worker_of(member)
        assert not await worker.has_lost()

        def ends() -> None:
            fleet.store._put(replace(record, status=Status.SUCCESS, owner=None))
            worker._running.records.clear()

        member.line.before["get"] = ends
        assert not await worker.has_lost()

    virtually(scenario)


# --- large ends that take their time


class SlowResults(Line):
    """Large results take their time, or get lost while their end cannot be written."""

    seconds = 0.0
    failures = 0

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name not in ("put_payloads", "apply"):
            return there

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(self.seconds)
            return await there(*args)

        async def apply(changes: Sequence[Change]) -> Any:
            if self.failures and any(change.name in ("completed", "failed") for change in changes):
                self.failures -= 1
                self.store._payloads.clear()
                raise StoreUnavailable("away for a day")
            return await there(changes)

        return apply if name == "apply" else slowly


@pytest.mark.parametrize("what", ["slow", "collected"])
def test_a_large_result_is_there_when_its_end_is(what: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        async def weighty() -> str:
            return "x" * 500

        member = fleet.member(weighty, make_line=SlowResults)
        member.engine.limits = SizeLimits(inline=64, max_bytes=2**20)
        line = member.line
        assert isinstance(line, SlowResults)
        line.seconds, line.failures = (3 * AUDIT_SECONDS, 0) if what == "slow" else (0.0, 2)
        await member.start()
        record = await fleet.end(await fleet.submit("weighty"))
        story = await fleet.story(record.id)
        assert story == ["registered", "pending", "running", "success"], "no audit takes it for forgotten"
        assert record.result is not None
        assert await member.engine.payloads.fetch(references(record.result))

    virtually(scenario)


def test_a_stop_waits_for_a_large_result_that_is_being_stored() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def weighty() -> str:
            return "x" * 500

        member = fleet.member(weighty, make_line=SlowResults)
        member.engine.limits = SizeLimits(inline=64, max_bytes=2**20)
        line = member.line
        assert isinstance(line, SlowResults)
        line.seconds = 3.0
        await member.start()
        id = await fleet.submit("weighty")
        await fleet.until_status(id, Status.RUNNING)
        await asyncio.sleep(0.1)
        await member.stop()
        assert (await fleet.record(id)).status is Status.SUCCESS, await fleet.story(id)

    virtually(scenario)


# --- slots


class SlowReleases(Line):
    """Who waits for a slot is let go on a second later."""

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "release_waiters":
            return there

        async def release_waiters(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(1.0)
            return await there(*args, **named)

        return release_waiters


@pytest.mark.parametrize("meanwhile", ["other slots", "a stop"])
def test_slots_that_are_given_back_while_others_are_let_go_on_are_not_forgotten(meanwhile: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        gates = {key: asyncio.Event() for key in "abc"}

        async def work(key: str) -> None:
            await gates[key].wait()

        limited = replace(definition(work), limit=Limit(1), limit_by=("key",))
        member = await fleet.started(limited, make_line=SlowReleases)
        member.line.errors["waiting_keys"] = StoreUnavailable("no sweep helps")
        running = [await fleet.submit("work", key, limit_key=f"work:{key}") for key in "abc"]
        for id in running:
            await fleet.until_status(id, Status.RUNNING)
        waiting = [await fleet.submit("work", key, limit_key=f"work:{key}") for key in "abc"]
        for id in waiting:
            await fleet.until_status(id, Status.CONCURRENCY_CONTROLLED)
        gates["a"].set()
        await asyncio.sleep(0.5)
        gates["b"].set()
        await asyncio.sleep(0.2)
        gates["c"].set()
        if meanwhile == "a stop":
            await member.stop()
        else:
            await asyncio.sleep(3.0)
        for id in waiting:
            assert (await fleet.record(id)).status is not Status.CONCURRENCY_CONTROLLED, await fleet.story(id)

    virtually(scenario)


def test_a_slot_of_the_dead_is_given_to_who_waits_for_it_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def work() -> None:
            await asyncio.sleep(600.0)

        limited = replace(definition(work), limit=Limit(1))
        member = await fleet.started(limited)
        first = await fleet.until_status(await fleet.submit("work", limit_key="work"), Status.RUNNING)
        id = await fleet.submit("work", limit_key="work")
        await fleet.until_status(id, Status.CONCURRENCY_CONTROLLED)
        member.crash()
        await Recovery(fleet.engine(fleet.store)).recover([first], "a test")
        assert (await fleet.record(id)).status is not Status.CONCURRENCY_CONTROLLED

    virtually(scenario)


def test_what_was_claimed_anew_since_a_look_does_not_stand_still() -> None:
    """It is PENDING as before, and that is all that is the same."""

    async def scenario(fleet: Fleet) -> None:
        recovery = Recovery(fleet.engine(fleet.store))
        ids = [await held(fleet, Status.PENDING, owner="r/1") for _ in range(2)]
        before = [await fleet.record(id) for id in ids]
        assert await recovery.still_as_they_were(before) == before
        await recovery.recover([before[0]], "a test")
        await held(fleet, Status.PENDING, owner="r/1", id=ids[0])
        assert [record.id for record in await recovery.still_as_they_were(before)] == [ids[1]]

    virtually(scenario)


class OwnClocks(MemoryStore):
    """A store whose stamps prove nothing: each runner has a clock of its own."""

    abilities = MemoryStore.abilities & ~Ability.SHARED_CLOCK


@pytest.mark.parametrize("away", [True, False], ids=["the store was away", "all the time"])
def test_what_stands_still_is_taken_back_only_if_the_store_was_there_meanwhile(away: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(nap)
        runner = member.runner
        id = await held(fleet, Status.PENDING, owner=f"{member.id}/9")
        await asyncio.sleep(runner._recovery.max_pending + 1.0)
        steady = iter([1e6, 0.0 if away else 1e6])
        runner._steady = lambda: next(steady)
        assert await runner.recover_pending() == (0 if away else 1)
        assert (await fleet.record(id)).status is (Status.PENDING if away else Status.REROUTED)

    virtually(scenario, OwnClocks)


# --- news that come during a look


class SlowReads(Line):
    """What is read is a second old when it comes."""

    names: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name not in self.names:
            return there

        async def read(*args: Any, **named: Any) -> Any:
            answer = await there(*args, **named)
            await asyncio.sleep(1.0)
            return answer

        return read


@pytest.fixture
def hints_alone() -> Iterator[None]:
    fallback.switch("off")
    yield
    fallback.switch(None)


@pytest.mark.usefixtures("hints_alone")
def test_a_queue_that_is_resumed_while_its_pause_is_read_is_open() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap, make_line=SlowReads)
        assert isinstance(member.line, SlowReads)
        member.line.names, hub = frozenset({"entries"}), member.engine.hub
        pause = QueuePause(app=APP, name="default", at=0.0, by="a test", reason="", operation="p")
        await pause_queue(fleet.store, pause)
        hub.send(Hint(PAUSES, ("default",)))
        await asyncio.sleep(0.5)
        await resume_queue(fleet.store, APP, "default", "r")
        hub.send(Hint(PAUSES, ("default",)))
        await asyncio.sleep(3.0)
        assert member.runner._permit is not None
        assert member.runner._permit.paused == frozenset()

    virtually(scenario)


@pytest.mark.usefixtures("hints_alone")
def test_what_ends_while_a_client_reads_it_is_read_once_more() -> None:
    async def scenario(fleet: Fleet) -> None:
        line = SlowReads(fleet.store)
        line.names = frozenset({"get"})
        client = fleet.engine(cast(Store, line))
        id = await fleet.submit("work")
        waiting = asyncio.create_task(client.watcher.ends([id], 60.0))
        await asyncio.sleep(0.5)
        await fleet.engine(fleet.store).canceller.cancel([id], by="a test")
        client.hub.send(Hint(ENDED, (id,)))
        await asyncio.wait({waiting}, timeout=patient(5.0))
        assert waiting.done()
        assert (await waiting)[id].status is Status.CANCELLED

    virtually(scenario)


@pytest.mark.usefixtures("hints_alone")
def test_a_runner_that_drains_says_so_at_once() -> None:
    """Others take over its turn at the services, and whoever looks wants to know."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap)
        await fleet.until_status(await fleet.submit("nap", 5.0), Status.RUNNING)
        await asyncio.sleep(0.1)
        beats = member.line.count("heartbeat")
        member.runner.stop()
        await asyncio.sleep(0.05)
        (entry,) = await fleet.store.roster(APP)
        assert entry.draining
        assert member.line.count("heartbeat") == beats + 1

    virtually(scenario)


# --- a stop while a runner starts


@pytest.mark.parametrize("hurry", [False, True], ids=["a stop", "a hurried stop"])
def test_a_stop_at_any_moment_of_the_start_ends_a_runner(hurry: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        for step in range(40):
            member = fleet.member(nap)
            life = asyncio.create_task(member.runner.run())
            await asyncio.sleep(step * LATENCY / 2)
            member.runner.stop(hurry=hurry)
            await asyncio.wait({life}, timeout=patient(5.0))
            assert life.done(), f"after {step} steps"
            assert not await fleet.roster()

    virtually(scenario)


# --- cancels that come too late, or too early


def test_a_cancel_that_loses_to_a_claim_asks_the_owner() -> None:
    async def scenario(fleet: Fleet) -> None:
        id = await fleet.submit("work")
        line = Line(fleet.store)

        def claimed() -> None:
            found = fleet.store._records[APP, id]
            line.before.clear()
            fleet.store._put(replace(found, status=Status.RUNNING, owner="r/1", epoch=found.epoch + 1))

        line.before["apply"] = claimed
        (after,) = await fleet.engine(cast(Store, line)).canceller.cancel([id], by="a test")
        assert (after.status, after.owner) == (Status.CANCELLING, "r/1")
        assert (await fleet.record(id)).status is Status.CANCELLING

    virtually(scenario)


def test_children_that_are_submitted_after_the_cancel_of_their_parent_follow_it() -> None:
    """Its code has time to clean up, and knows what it does."""

    async def scenario(fleet: Fleet) -> None:
        asked = asyncio.Event()

        async def parent() -> None:
            try:
                await asyncio.sleep(600.0)
            except asyncio.CancelledError:
                asked.set()
                await asyncio.sleep(1.0)
                raise

        member = await fleet.started(parent)
        above = await fleet.submit("parent")
        await fleet.until_status(above, Status.RUNNING)
        await member.engine.canceller.cancel([above], by="a test")
        await asked.wait()
        child = await fleet.submit("of nobody here", parent_id=above)
        await fleet.until_status(above, Status.CANCELLED)
        await fleet.until_status(child, Status.CANCELLED, within=1.0)

    virtually(scenario)


def test_a_cancel_reaches_every_generation_that_is_to_follow() -> None:
    """What a child is declared to do with its own children, it does, whoever cancels it."""

    async def scenario(fleet: Fleet) -> None:
        above = await fleet.submit("of nobody here")
        kind = await fleet.submit("of nobody here", parent_id=above)
        loose = await fleet.submit("of nobody here", parent_id=above, terms=Terms(cancel_children=False))
        followers = [kind, loose]
        for parent in (kind, kind):
            followers.append(await fleet.submit("of nobody here", parent_id=parent))
        followers.append(await fleet.submit("of nobody here", parent_id=followers[-1]))
        spared = await fleet.submit("of nobody here", parent_id=loose)
        await fleet.engine(fleet.store).canceller.cancel([InvocationId(above)], by="a test", reason="enough")
        for id in followers:
            found = await fleet.record(id)
            assert found.status is Status.CANCELLED
            assert f"its parent {found.parent_id} was cancelled" in found.reason
        assert (await fleet.record(spared)).status is Status.REGISTERED

    virtually(scenario)


def test_a_cancel_does_not_reach_the_children_of_a_call_that_has_returned() -> None:
    """It was asked to end, and returned before it had to: its result counts, and so do its children."""

    async def scenario(fleet: Fleet) -> None:
        async def parent() -> str:
            try:
                await asyncio.sleep(600.0)
            except asyncio.CancelledError:
                return "done all the same"
            return "in time"

        member = await fleet.started(parent)
        above = InvocationId(await fleet.submit("parent"))
        await fleet.until_status(above, Status.RUNNING)
        child = await fleet.submit("of nobody here", parent_id=above)
        canceller = member.engine.canceller
        await canceller.cancel([above], by="a test", children=False)
        await fleet.until_status(above, Status.SUCCESS)
        (after,) = await canceller.cancel([above], by="a test", children=True)
        assert after.cancellation is not None
        assert (after.status, (await fleet.record(child)).status) == (Status.SUCCESS, Status.REGISTERED)

    virtually(scenario)


# --- and hints


def test_a_hint_during_a_claim_waits_for_its_answer() -> None:
    """Else several claims ahead would each fill the same room."""

    async def scenario(fleet: Fleet) -> None:
        async def short() -> None:
            await asyncio.sleep(0.012)

        member = await fleet.started(short, concurrency=PLACES, make_line=SlowClaims)
        for _ in range(200):
            await fleet.submit("short")
        worker = worker_of(member)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = 0.1
        most = 0
        for _ in range(100):
            member.engine.hub.send(Hint(READY, ()))
            await asyncio.sleep(0.01)
            most = max(most, len(worker._reserve))
        assert member.line.most_under_way == 1
        assert PLACES < most <= PLACES * MAX_TIMES

    virtually(scenario, EarlyMemory)


def test_a_hint_during_a_claim_that_finds_little_is_not_forgotten() -> None:
    """The claim was carried out before the call was submitted that the hint is about."""

    async def scenario(fleet: Fleet) -> None:
        fallback.switch("off")
        member = await fleet.started(nap, make_line=SlowClaims)
        await asyncio.sleep(1.0)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = 0.5
        for pause in (0.1, 0.0):  # the second hint comes while the first one's claim is under way
            record = fleet.new("nap", 0.1)
            await fleet.store.insert([record])
            member.engine.hub.send(Hint(READY, (record.lane,), 3))  # two of which others are faster to take
            await asyncio.sleep(pause)
        assert (await fleet.end(record.id, within=3.0)).status is Status.SUCCESS

    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


# --- a permit that ends meanwhile


def test_what_a_claim_brings_after_the_permit_has_ended_goes_back() -> None:
    """The store answers the claim late, and no heartbeat: others may have declared the runner dead by now."""

    async def scenario(fleet: Fleet) -> None:
        began: list[str] = []

        async def work() -> None:
            began.append("once")

        member = await fleet.started(work, make_line=SlowClaims)
        await asyncio.sleep(3.0)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = DEAD_AFTER * 0.8
        id = await fleet.submit("work")
        await fleet.until_status(id, Status.RUNNING)
        member.line.errors["heartbeat"] = StoreUnavailable("not today")
        found = await fleet.until_status(id, Status.REROUTED, within=DEAD_AFTER)
        assert (found.owner, found.reason, began) == (None, "its runner cannot reach the store", [])

    virtually(scenario)


def test_nothing_is_claimed_again_after_the_permit_has_ended() -> None:
    """The claim got no answer. The store is back for claims, and not for the heartbeats of this runner."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(nap)
        member.line.errors |= dict.fromkeys(("claim", "heartbeat"), StoreUnavailable("not today"))
        id = await fleet.submit("nap", 0.1)
        await asyncio.sleep(DEAD_AFTER)
        del member.line.errors["claim"]
        await asyncio.sleep(DEAD_AFTER)
        assert await fleet.story(id) == ["registered"]
        del member.line.errors["heartbeat"]
        assert (await fleet.end(id)).status is Status.SUCCESS

    virtually(scenario)


# --- a cancel of what lies in reserve


@pytest.mark.parametrize("beside", [True, False], ids=["while another runs", "and nothing runs"])
def test_a_cancel_of_reserved_work_is_heard_and_ends_it_at_once(beside: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        fallback.switch("off")
        gate = asyncio.Event()

        async def work(number: int) -> None:
            await gate.wait()

        member = await fleet.started(work, concurrency=1)
        if beside:
            member.engine.hub.send(Hint(READY, ()))
            first = await fleet.submit("work", 0)
            await fleet.until_status(first, Status.RUNNING)
        worker = worker_of(member)
        worker._free = lambda: 0  # type: ignore[method-assign]  # so that it stays in reserve
        id = await fleet.submit("work", 1)
        wish = Claim(
            app=APP,
            lanes=("default|work",),
            limit=1,
            owner=worker.owner,
            operation="ahead",
            at=fleet.clock.now(),
            start=False,
        )
        claimed = await fleet.store.claim(wish)
        assert [record.id for record in claimed.records] == [id]
        worker._reserve.add(claimed.records, asyncio.get_running_loop().time())
        await member.engine.canceller.cancel([id], by="a test")
        await fleet.until_status(id, Status.CANCELLED, within=0.3)
        assert not worker._reserve.ids()
        gate.set()

    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


# --- a stop meanwhile


def test_nothing_that_lies_in_reserve_is_begun_after_a_stop() -> None:
    """A claim ahead is under way when it comes, and calls end before that is answered."""

    async def scenario(fleet: Fleet) -> None:
        began = 0

        async def short() -> None:
            nonlocal began
            began += 1
            await asyncio.sleep(0.012)

        member = await fleet.started(short, concurrency=PLACES, make_line=SlowClaims)
        for _ in range(60):
            await fleet.submit("short")
        worker = worker_of(member)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = 0.3

        async def claims_ahead() -> bool:
            return worker._prefetching is not None and len(worker._reserve) >= 3 * PLACES

        await fleet.until(claims_ahead, 5.0)
        before = began
        await member.stop()
        assert began - before <= PLACES, "only those whose starts were being written"
        assert not [record for record in fleet.store._of(APP) if record.owner]

    virtually(scenario, EarlyMemory)


class SlowStarts(Line):
    """That something is started is written at once, and told later."""

    seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "apply":
            return there

        async def apply(changes: Sequence[Change]) -> Any:
            answer = await there(changes)
            if any(change.name == "started" and change.app == APP for change in changes):
                await asyncio.sleep(self.seconds)
            return answer

        return apply


def test_a_cancel_of_what_is_being_started_is_heard() -> None:
    """It has left the reserve, and its worker does not know yet that it may begin."""

    async def scenario(fleet: Fleet) -> None:
        fallback.switch("off")
        seconds = 0.012

        async def work() -> None:
            await asyncio.sleep(seconds)

        member = await fleet.started(work, concurrency=PLACES, make_line=SlowStarts)
        for _ in range(60):
            await fleet.submit("work")
        worker = worker_of(member)
        assert isinstance(member.line, SlowStarts)
        member.line.seconds = 0.2
        member.engine.hub.send(Hint(READY, ()))

        async def are_started() -> bool:
            return worker._starting == PLACES and not worker._running

        await fleet.until(are_started, 5.0)
        seconds = 60.0
        running = [record for record in fleet.store._of(APP) if record.status is Status.RUNNING]
        (started,) = [record for record in running if not worker._holds(record.id)][:1]
        await fleet.engine(fleet.store).canceller.cancel([started.id], by="a test")
        member.engine.hub._receive(Hint(CANCEL, (started.id,)))
        assert (await fleet.end(started.id, within=3.0)).status is Status.CANCELLED

    try:
        virtually(scenario, EarlyMemory)
    finally:
        fallback.switch(None)


@pytest.mark.parametrize("meanwhile", ["a stop", "a hurried stop", "a pause"])
def test_what_is_being_started_is_not_left_behind_whatever_comes_meanwhile(meanwhile: str) -> None:
    """The store has it as RUNNING already: it is run, or handed back."""

    async def scenario(fleet: Fleet) -> None:
        calls: Counter[int] = Counter()

        async def short(number: int) -> int:
            calls[number] += 1
            await asyncio.sleep(0.012)
            return number

        member = await fleet.started(short, concurrency=PLACES, make_line=SlowStarts)
        ids = [await fleet.submit("short", number) for number in range(30)]
        worker = worker_of(member)
        assert isinstance(member.line, SlowStarts)
        member.line.seconds = 0.2

        async def are_started() -> bool:
            return worker._starting == PLACES and not worker._running

        await fleet.until(are_started, 5.0)
        before = len(calls)
        if meanwhile == "a pause":
            worker._permit.pause(frozenset({"default"}))
            await asyncio.sleep(1.0)
        else:
            await member.stop(hurry=meanwhile == "a hurried stop")
        found = [await fleet.record(id) for id in ids]
        assert not [record for record in found if record.owner]
        done = [number for number, record in enumerate(found) if record.status is Status.SUCCESS]
        assert dict(calls) == dict.fromkeys(done, 1)
        assert len(calls) - before == (0 if meanwhile == "a hurried stop" else PLACES)

    virtually(scenario, EarlyMemory)


class SlowPayloads(Line):
    """Large arguments take a second on their way."""

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "get_payload":
            return there

        async def get_payload(*args: Any) -> Any:
            answer = await there(*args)
            await asyncio.sleep(4.0)
            return answer

        return get_payload


@pytest.mark.parametrize("meanwhile", ["a cancel", "a stop", "a hurried stop", "a death", "a permit that is over"])
def test_what_waits_for_its_arguments_is_not_begun_if_it_may_not_be(meanwhile: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        calls = 0

        async def weighty(load: str) -> None:
            nonlocal calls
            calls += 1

        fleet.settings = WITHOUT_BACKSTOP
        member = await fleet.started(weighty, make_line=SlowPayloads)
        small, codec = SizeLimits(inline=64, max_bytes=2**20), fleet.codec
        packed = codec.pack_call(("x" * 500,), {}, (), small, {})
        record = replace(fleet.new("weighty"), arguments=packed.data)
        client = fleet.engine(fleet.store)
        await client.submitter.submit([record], packed.payloads)
        await fleet.until_status(record.id, Status.RUNNING)
        if meanwhile == "a cancel":
            await client.canceller.cancel([record.id], by="a test")
        elif meanwhile == "a death":
            (entry,) = await fleet.store.roster(APP)
            assert await fleet.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at)
        elif meanwhile == "a permit that is over":
            worker_of(member)._permit._until = float("-inf")
            worker_of(member)._permit.grant = lambda until: None  # type: ignore[method-assign]
        else:
            member.runner.stop(hurry=meanwhile == "a hurried stop")
        await asyncio.sleep(4.5)
        assert not calls
        found = await fleet.record(record.id)
        if meanwhile == "a cancel":
            assert found.status is Status.CANCELLED
        elif meanwhile == "a death":
            assert "running" in await fleet.story(record.id)  # left to those who have declared it
        else:
            assert (found.status, found.owner) == (Status.REROUTED, None), await fleet.story(record.id)
            assert found.reason == ("the runner stops" if "stop" in meanwhile else "its runner cannot reach the store")

    virtually(scenario)


def test_arguments_that_arrive_for_an_earlier_life_begin_nothing() -> None:
    """A run may be let go and be claimed again by its worker while they are on their way."""

    async def scenario(fleet: Fleet) -> None:
        calls = 0

        async def weighty(load: str) -> None:
            nonlocal calls
            calls += 1
            await asyncio.sleep(60.0)

        member = await fleet.started(weighty, make_line=SlowPayloads)
        small = SizeLimits(inline=64, max_bytes=2**20)
        packed = fleet.codec.pack_call(("x" * 500,), {}, (), small, {})
        record = replace(fleet.new("weighty"), arguments=packed.data)
        await fleet.engine(fleet.store).submitter.submit([record], packed.payloads)
        first = await fleet.until_status(record.id, Status.RUNNING)
        await asyncio.sleep(1.0)
        second = replace(first, epoch=first.epoch + 1)
        fleet.store._put(second)
        worker_of(member).begin([second])
        await asyncio.sleep(6.0)
        assert calls == 1

    virtually(scenario)


# --- a place that is free again


def test_a_run_gets_no_slot_that_is_promised_to_what_a_claim_will_bring() -> None:
    async def scenario(fleet: Fleet) -> None:
        gates = {"a": asyncio.Event(), "b": asyncio.Event()}

        async def held(name: str) -> None:
            await gates[name].wait()

        member = await fleet.started(held, concurrency=2, make_line=SlowClaims)
        worker, granted = worker_of(member), list[int]()
        first = await fleet.submit("held", "a")
        await fleet.until_status(first, Status.RUNNING)
        await asyncio.sleep(3.0)
        assert isinstance(member.line, SlowClaims)
        member.line.seconds = 0.5
        second = await fleet.submit("held", "b")
        await fleet.until_status(second, Status.RUNNING)  # its claim is not answered yet
        worker.want_slots(first, 1, granted.append)  # as the owner of a run does
        await asyncio.sleep(1.0)
        assert (granted, worker._running.taken) == ([], 2)
        gates["b"].set()
        await fleet.end(second)
        await asyncio.sleep(0.1)
        assert granted == [1]
        gates["a"].set()

    virtually(scenario)


@pytest.mark.parametrize("outcome", ["a result", "an error"])
def test_a_place_is_free_as_soon_as_a_large_end_is_stored(outcome: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        async def weighty(number: int) -> str:
            if outcome == "an error":
                raise ValueError(f"{number}" * 500)
            return f"{number}" * 500

        member = fleet.member(weighty, concurrency=1)
        member.engine.limits = SizeLimits(inline=64, max_bytes=2**20)
        await member.start()
        ids = [await fleet.submit("weighty", number) for number in range(3)]
        for id in ids:
            await fleet.end(id, within=3.0)

    virtually(scenario)


def test_a_place_is_taken_until_a_large_end_is_stored() -> None:
    """Else memory could fill with results faster than the store takes them."""

    async def scenario(fleet: Fleet) -> None:
        began: list[int] = []
        stored = asyncio.Event()

        async def weighty(number: int) -> str:
            began.append(number)
            return f"{number}" * 500

        member = fleet.member(weighty, concurrency=1)
        member.engine.limits = SizeLimits(inline=64, max_bytes=2**20)
        keep = member.engine.payloads.keep

        async def slowly(payloads: Any) -> None:
            await stored.wait()
            await keep(payloads)

        member.engine.payloads.keep = slowly  # type: ignore[method-assign]
        await member.start()
        ids = [await fleet.submit("weighty", number) for number in range(2)]
        await asyncio.sleep(5.0)
        stored.set()
        assert len(began) == 1
        for id in ids:
            await fleet.end(id, within=3.0)

    virtually(scenario)


class Unwilling(EarlyMemory):
    """Refuses the first starts that it is asked to write, again and again."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.refused: set[str] = set()
        self.is_willing = False

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        for change in changes:
            if change.name == "started" and change.app == APP and len(self.refused) < PLACES:
                self.refused.add(change.id)
            if change.name == "started" and change.id in self.refused and not self.is_willing:
                raise StoreError(f"{change.id} shall not start")
        return await super().apply(changes)


def test_a_start_that_the_store_refuses_takes_no_place() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def short() -> None:
            await asyncio.sleep(0.012)

        store = fleet.store
        assert isinstance(store, Unwilling)
        await fleet.started(short, concurrency=PLACES)
        ids = [await fleet.submit("short") for _ in range(30)]

        async def the_others_ended() -> bool:
            return sum(record.status is Status.SUCCESS for record in store._of(APP)) == len(ids) - PLACES

        await fleet.until(the_others_ended, 10.0)
        assert len(store.refused) == PLACES
        store.is_willing = True
        for id in ids:
            assert (await fleet.end(id)).status is Status.SUCCESS

    virtually(scenario, Unwilling)


def test_the_only_place_is_free_at_once_when_a_start_is_refused() -> None:
    """Nothing else happens here that would wake the worker."""

    async def scenario(fleet: Fleet) -> None:
        async def short() -> None:
            await asyncio.sleep(0.012)

        store = fleet.store
        assert isinstance(store, Unwilling)
        await fleet.started(short, concurrency=1)
        ids = [await fleet.submit("short") for _ in range(30)]

        async def the_others_ended() -> bool:
            return sum(record.status is Status.SUCCESS for record in store._of(APP)) == len(ids) - PLACES

        assert await fleet.until(the_others_ended, 10.0) < 2.0

    virtually(scenario, Unwilling)


# --- being told to end


@pytest.mark.parametrize("what", ["stop", "retire", "fence"])
def test_an_idle_worker_ends_when_it_is_told_and_not_when_it_would_have_looked(what: str) -> None:
    async def scenario(harness: Harness) -> None:
        fallback.switch("off")
        worker = harness.worker(nap)
        life = await running(worker)
        await asyncio.sleep(20.0)
        getattr(worker, what)()
        told = harness.clock.monotonic()
        await life
        assert harness.clock.monotonic() - told < 0.1

    try:
        virtually_alone(scenario)
    finally:
        fallback.switch(None)


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [(False, False, DRAIN), (True, False, 0.0), (False, True, 5.0), (True, True, 0.0)],
    ids=["two stops", "a hurry, then a stop", "a stop, then a hurry", "two hurries"],
)
def test_a_second_stop_does_not_put_the_end_off(first: bool, second: bool, seconds: float) -> None:
    async def scenario(harness: Harness) -> None:
        id = await harness.submit("nap", 100 * DRAIN)
        worker = harness.worker(nap)
        life = await running(worker)
        await asyncio.sleep(1.0)
        told = harness.clock.monotonic()
        worker.stop(hurry=first)
        if seconds:
            await asyncio.sleep(5.0)
        worker.stop(hurry=second)
        await life
        assert seconds <= harness.clock.monotonic() - told < seconds + 2.0
        assert (await harness.story(id))[-2:] == ["killed", "rerouted"]

    virtually_alone(scenario)


# --- permits


def test_a_grant_rings_once_when_starting_is_allowed_again_and_never_shortens() -> None:
    async def scenario(fleet: Fleet) -> None:
        permit, rung, passed_on = Permit(fleet.clock), list[float](), list[float]()
        permit.on_grant(lambda: rung.append(fleet.clock.monotonic()))
        permit.on_each_grant(passed_on.append)
        now = fleet.clock.monotonic()
        permit.grant(now - 1.0)
        assert not rung, "it was over when it came"
        permit.grant(now + 10.0)
        assert rung == [now]
        permit.grant(now + 5.0)
        await asyncio.sleep(7.0)
        assert permit.holds(), "a grant that comes late takes nothing back"
        assert rung == [now], "and who holds one is not told of the next"
        await asyncio.sleep(5.0)
        assert not permit.holds()
        permit.grant(now + 20.0)
        assert len(rung) == 2, "it was over, and comes again"
        assert passed_on == [now - 1.0, now + 10.0, now + 10.0, now + 20.0]

    virtually(scenario)
