"""Two rare things at once: limits of time, cancels with their grace, retirement, large arguments, lost slots."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from msgspec.structs import replace
from tests.fleet.test_recovery import held, recovery_of
from tests.runtime.test_meanwhile import SlowStarts, worker_of
from tests.runtime.test_worker import Harness
from tests.runtime.test_worker import virtually as virtually_alone
from tests.runtime.test_worker_awaits import EarlyMemory
from tests.schedules.test_declared import worker_for
from tests.support.fleet import APP, Fleet, Member, virtually

from holdfast.codec import SizeLimits
from holdfast.executors.call import INTERRUPTED, NOT_BEGUN, Raised
from holdfast.executors.context import cancelled
from holdfast.model.records import Terms
from holdfast.model.retries import Fixed, dump_policy, exception_names
from holdfast.model.status import Status
from holdfast.runtime.execute import CallStopper

SMALL = SizeLimits(inline=64, max_bytes=2**20)


class Patient:
    """A coroutine that takes its time to clean up, and a runner for it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seen: list[str] = []
        self.began = 0

    async def start(self, cleanup_seconds: float, *, concurrency: int = 1) -> Member:
        async def work(seconds: float) -> str:
            self.began += 1
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError as error:
                self.seen.append(type(error).__name__)
                await asyncio.sleep(cleanup_seconds)
                raise
            except Exception as error:
                self.seen.append(type(error).__name__)
                raise
            return "done"

        return await self.fleet.started(work, concurrency=concurrency)

    async def submit(self, seconds: float = 60.0, **terms: Any) -> str:
        id = await self.fleet.submit("work", seconds, terms=Terms(**terms))
        await self.fleet.until_status(id, Status.RUNNING)
        return id

    async def another_runs(self) -> None:
        """The one place is free."""
        id = await self.fleet.submit("work", 0.1)
        assert (await self.fleet.end(id, 20.0)).status is Status.SUCCESS


def test_a_timeout_that_falls_into_the_grace_of_a_cancel_changes_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Patient(fleet)
        member = await stage.start(cleanup_seconds=5.0)
        id = await stage.submit(timeout=3.0, soft_timeout=2.0, retries=dump_policy(Fixed(2, 0.0)))
        await asyncio.sleep(0.5)
        await member.engine.canceller.cancel([id], by="a test")
        record = await fleet.end(id)
        assert record.status is Status.CANCELLED, await fleet.story(id)
        assert stage.seen == ["CancelledError"], "neither the timeout nor the soft one is thrown into its cleaning up"
        await stage.another_runs()

    virtually(scenario)


def test_a_call_that_cleans_up_for_longer_than_a_look_is_asked_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Patient(fleet)
        member = await stage.start(cleanup_seconds=7.0)
        id = await stage.submit(cancel_grace=30.0)
        asked_at = fleet.clock.now()
        for _ in range(2):
            await member.engine.canceller.cancel([id], by="a test")
            await asyncio.sleep(1.0)
        record = await fleet.end(id)
        assert (record.status, stage.seen) == (Status.CANCELLED, ["CancelledError"])
        assert record.changed_at - asked_at >= 7.0, "it was cancelled again while it cleaned up"

    virtually(scenario)


def test_a_cancelled_call_that_could_not_be_stopped_leaves_nothing_behind_when_it_ends() -> None:
    async def scenario(fleet: Fleet) -> None:
        gate = asyncio.Event()

        async def stubborn() -> None:
            while not gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await gate.wait()

        member = await fleet.started(stubborn)
        id = await fleet.submit("stubborn", terms=Terms(cancel_grace=0.1))
        await fleet.until_status(id, Status.RUNNING)
        await member.engine.canceller.cancel([id], by="a test")
        assert "still runs" in (await fleet.end(id, 5.0)).reason
        running = worker_of(member)._running
        assert (running.abandoned, id in cancelled) == ({id}, True)
        gate.set()
        await asyncio.sleep(1.0)
        assert (running.abandoned, id in cancelled) == (set(), False)

    virtually(scenario)


def test_a_cancel_while_a_timeout_is_being_enforced_ends_it_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Patient(fleet)
        member = await stage.start(cleanup_seconds=0.8)
        id = await stage.submit(timeout=1.0, retries=dump_policy(Fixed(2, 0.0)))
        await asyncio.sleep(1.2)  # it is cleaning up
        await member.engine.canceller.cancel([id], by="a test")
        record = await fleet.end(id)
        assert record.status is Status.CANCELLED, await fleet.story(id)
        assert stage.began == 1
        await stage.another_runs()

    virtually(scenario)


@pytest.mark.parametrize("what", ["timeout", "cancel"])
def test_a_stop_while_one_is_being_ended_hands_nothing_over_that_is_over(what: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        stage = Patient(fleet)
        member = await stage.start(cleanup_seconds=0.5)
        id = await stage.submit(**({"timeout": 1.0} if what == "timeout" else {}))
        if what == "cancel":
            await member.engine.canceller.cancel([id], by="a test")
        await asyncio.sleep(1.2 if what == "timeout" else 0.1)
        await member.stop()
        expected = Status.FAILED if what == "timeout" else Status.CANCELLED
        assert (await fleet.record(id)).status is expected, await fleet.story(id)

    virtually(scenario)


def test_a_worker_that_retires_counts_calls_that_wait_for_large_arguments() -> None:
    async def scenario(harness: Harness) -> None:
        harness.engine.limits = SMALL
        fetch = harness.store.get_payload

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(0.5)
            return await fetch(*args)

        harness.store.get_payload = slowly  # type: ignore[method-assign]
        ids = []
        for number in range(5):
            packed = harness.codec.pack_call((0.1,), {"load": "x" * 200 + str(number)}, (), SMALL, {})
            record = replace((await _made(harness, 0.1)), arguments=packed.data)
            await harness.engine.submitter.submit([record], packed.payloads)
            ids.append(record.id)
        account = await worker_for(harness, 3).run()
        assert account.started == 3
        statuses = sorted([(await harness.record(id)).status.value for id in ids])
        assert statuses.count("success") == 3
        assert statuses.count("registered") == 2, "it has not even taken them"
        assert not [id for id in ids if (await harness.record(id)).owner is not None]

    virtually_alone(scenario)


def test_a_worker_that_retires_counts_calls_whose_starts_are_being_written() -> None:
    """Its slots are free meanwhile, and there is more in reserve."""

    async def scenario(fleet: Fleet) -> None:
        async def short() -> None:
            await asyncio.sleep(0.012)

        member = await fleet.started(short, concurrency=4, make_line=SlowStarts)
        for _ in range(60):
            await fleet.submit("short")
        worker = worker_of(member)
        assert isinstance(member.line, SlowStarts)
        member.line.seconds = 0.2

        async def are_started() -> bool:
            return worker._starting == 4 and not worker._running and len(worker._reserve) > 4

        await fleet.until(are_started, 5.0)
        worker._max_tasks = worker.account.started + 6
        await asyncio.sleep(2.0)
        assert worker.is_stopping
        assert worker.account.started == worker._max_tasks

    virtually(scenario, EarlyMemory)


async def _made(harness: Harness, seconds: float) -> Any:
    fleet = Fleet(harness.clock)
    fleet._ids = harness.ids
    return fleet.new("last", seconds)


def test_a_pause_and_a_cancel_of_the_same_reserved_work() -> None:
    """Handing back and ending meet: each invocation ends once, and nobody owns it afterwards."""

    async def scenario(fleet: Fleet) -> None:
        stage = Patient(fleet)
        member = await stage.start(cleanup_seconds=0.0, concurrency=2)
        ids = [await fleet.submit("work", 0.05) for _ in range(10)]
        await asyncio.sleep(1.05)
        await asyncio.gather(
            member.engine.canceller.cancel(ids, by="a test"), member.engine.canceller.cancel(ids, by="another")
        )
        for id in ids:
            assert (await fleet.end(id)).status in (Status.CANCELLED, Status.SUCCESS)
        assert not [record for record in fleet.store._of(APP) if record.owner]

    virtually(scenario)


@pytest.mark.parametrize("first", ["timeout", "cancel"])
def test_one_that_is_late_and_cancelled_before_it_began_is_cancelled(first: str) -> None:
    """Its place takes it back since its time is over, and says so a moment later: meanwhile it is cancelled."""

    async def scenario(fleet: Fleet) -> None:
        told, given_up = list[str](), list[str]()
        stopping = CallStopper(lambda what, id: told.append(what), lambda id, outcome: given_up.append(id))
        record = fleet.new("work", terms=Terms(timeout=1.0))
        stopping.watch(record)
        if first == "timeout":
            await asyncio.sleep(1.0)
        stopping.cancel(record, 10.0)
        await asyncio.sleep(2.0)
        assert stopping.ended(record, NOT_BEGUN) is NOT_BEGUN
        assert told == (["force", "cancel"] if first == "timeout" else ["cancel"])
        await asyncio.sleep(60.0)
        assert not given_up
        assert not stopping.watched

    virtually(scenario)


def test_a_worker_that_was_killed_for_one_attempt_is_not_charged_to_the_next() -> None:
    """The call that was past its time ended after all, and its worker had claimed its retry before it was killed."""

    async def scenario(fleet: Fleet) -> None:
        terms = Terms(timeout=1.0)
        late, again = [await held(fleet, owner="r/1", terms=terms) for _ in range(2)]
        recovery, epoch = recovery_of(fleet), (await fleet.record(late)).epoch
        await recovery.of_owner("r/1", "killed", ended=True, overdue={late: epoch, again: epoch - 1}, for_another=True)
        ends = [await fleet.record(id) for id in (late, again)]
        assert [record.status for record in ends] == [Status.FAILED, Status.REROUTED]
        assert not ends[1].errors

    virtually(scenario)


@pytest.mark.parametrize("status", [Status.PENDING, Status.CANCELLING])
def test_what_had_not_begun_or_was_being_cancelled_does_not_time_out_with_its_worker(status: Status) -> None:
    async def scenario(fleet: Fleet) -> None:
        path = (Status.PENDING,) if status is Status.PENDING else (Status.CANCELLING,)
        id = await held(fleet, *path, owner="r/1", terms=Terms(timeout=1.0))
        epoch = (await fleet.record(id)).epoch
        await recovery_of(fleet).of_owner("r/1", "killed", ended=True, overdue={id: epoch}, for_another=True)
        expected = Status.REROUTED if status is Status.PENDING else Status.CANCELLED
        assert (await fleet.record(id)).status is expected, await fleet.story(id)

    virtually(scenario)


@pytest.mark.parametrize("first", ["timeout", "cancel"])
def test_what_became_of_one_attempt_says_nothing_about_the_next(first: str) -> None:
    """The same id comes once more, to the same worker."""

    async def scenario(fleet: Fleet) -> None:
        stopping = CallStopper(lambda what, id: None, lambda id, outcome: None)
        record = fleet.new("work", terms=Terms(timeout=1.0))
        stopping.watch(record)
        if first == "cancel":
            stopping.cancel(record, 0.5)
        await asyncio.sleep(1.1)
        stopping.ended(record, INTERRUPTED)
        error = Raised(fleet.codec.encode_error(ValueError("no")), "no", kinds=exception_names(ValueError))
        for outcome in (error, INTERRUPTED):
            stopping.watch(record)
            assert stopping.ended(record, outcome) is outcome
        stopping.cancel(record, 10.0)
        assert stopping.ended(record, error) is error, "it was asked this time, and not forced"

    virtually(scenario)


@pytest.mark.parametrize("given_up", [1, 2])
def test_a_worker_gives_way_when_code_that_cannot_be_stopped_has_all_of_its_slots(given_up: int) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await Patient(fleet).start(0.0, concurrency=2)
        worker = worker_of(member)
        worker._leaves_unfinished = True  # as a worker process does
        for number in range(given_up):
            worker._running.abandoned.add(f"{number}~1")
            worker.on_given_up(is_loop_blocked=False)
        assert worker.is_stopping is (given_up == 2)
        worker._running.abandoned.clear()

    virtually(scenario)
