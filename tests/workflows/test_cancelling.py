"""Cancels of runs and of the calls that a body makes, on a real runner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Status, context
from holdfast.errors import InvocationCancelled, InvocationStatusTransitionError
from holdfast.model.cancellation import cancel as request_to_end
from holdfast.model.changes import Lost, Push
from holdfast.model.records import Cancellation
from holdfast.model.state_writes import pushed
from holdfast.runtime.cancel import CancellationListener
from holdfast.runtime.payloads import PayloadStore
from holdfast.workflows.api import sleep
from holdfast.workflows.events import GIVEN_UP
from holdfast.workflows.executor import WorkflowExecutor

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def app(url: str) -> Iterator[App]:
    app = App(url, name="cancels", poll_interval_seconds=0.1, workflow_linger_seconds=0.2)
    with app:
        yield app


SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@SQLITE
def test_a_cancel_during_a_step_that_cannot_be_interrupted_reaches_the_body(app: App, until: Until) -> None:
    release, seen = threading.Event(), list[str]()

    @app.step(name="stubborn")
    def stubborn() -> str:
        seen.append("began")
        release.wait(20)
        return "charged"

    @app.step(name="refund")
    def refund() -> bool:
        seen.append("refunded")
        return context().cancelled

    @app.workflow(name="pays")
    async def pays() -> str:
        try:
            seen.append(f"paid: {await stubborn()}")
        except asyncio.CancelledError:
            seen.append("cancelled")
            seen.append(f"the refund is cancelled: {await refund()}")
            raise
        await sleep(3600)
        return "done"

    with app.runner():
        run = pays.submit()
        until(lambda: seen)
        run.cancel()
        until(lambda: run.status is Status.CANCELLING)
        until(lambda: [event.type for event in run.events()].count("cancel_requested"))
        assert seen == ["began"], "the body waits for the end of its step"
        release.set()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen == ["began", "cancelled", "refunded", "the refund is cancelled: False"]
    assert [event.type for event in run.events(correlation="stubborn#1")][-1] == "step_completed"
    assert run.status is Status.CANCELLED


@SQLITE
def test_a_timeout_around_a_step_that_cannot_be_interrupted_is_raised(app: App) -> None:
    @app.step(name="stubborn")
    def stubborn() -> str:
        while not context().cancelled:
            time.sleep(0.01)
        return "charged"

    @app.workflow(name="pays")
    async def pays() -> str:
        try:
            async with asyncio.timeout(0.3):
                return await stubborn()
        except TimeoutError:
            return "too late"

    with app.runner():
        assert pays.submit().result(patient(20)) == "too late"


@SQLITE
def test_a_plain_body_is_cancelled_in_the_step_that_it_waits_for(app: App, until: Until) -> None:
    release, seen = threading.Event(), list[str]()

    @app.step(name="stubborn")
    def stubborn() -> str:
        seen.append("began")
        release.wait(20)
        return "charged"

    @app.workflow(name="pays")
    def pays() -> str:
        stubborn()
        seen.append("went on")
        return "done"

    with app.runner():
        run = pays.submit()
        until(lambda: seen)
        run.cancel()
        until(lambda: [event.type for event in run.events()].count("cancel_requested"))
        release.set()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen == ["began"]


@SQLITE
def test_a_step_that_does_not_end_is_abandoned_after_its_grace(
    app: App, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.workflows.host.STUBBORN_SECONDS", 0.2)
    release, seen = threading.Event(), list[str]()

    @app.step(name="deaf", cancel_grace=0.3)
    def deaf() -> None:
        seen.append("began")
        while not release.is_set():  # it cannot be stopped in one long call of the system
            release.wait(30)

    @app.workflow(name="pays")
    async def pays() -> None:
        await deaf()

    with app.runner():
        run = pays.submit()
        until(lambda: seen)
        asked = time.monotonic()
        run.cancel()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
        assert 0.4 < time.monotonic() - asked < 10
        last = run.events(correlation="deaf#1")[-1]
        assert (last.type, last.error) == ("step_failed", None)
        assert "still runs" in last.why
        release.set()


def test_a_cancel_that_meets_a_claim_is_not_lost(app: App, until: Until) -> None:
    """The canceller reads a suspended run, and a runner claims it before the push is written."""
    seen = list[str]()

    @app.workflow(name="naps")
    async def naps() -> None:
        try:
            await sleep(3600)
            seen.append("woken")
            await asyncio.gather(sleep(0.05), hold())
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    @app.step(name="hold")
    async def hold() -> None:
        seen.append("holds")
        await asyncio.sleep(30)

    with app.runner():
        run = naps.submit()
        until(lambda: run.status is Status.SUSPENDED)
        asleep = run.record()
        run.wake()
        until(lambda: "holds" in seen)
        push = request_to_end(
            asleep, Cancellation(by="a person", at=asleep.changed_at, until=asleep.changed_at + 60), operation="late"
        )
        assert isinstance(push, Push)

        async def late() -> Any:
            return await (await app.runtime.engine()).store.apply([push])

        before = run.record()
        (verdict,) = app.runtime.run(late())
        assert verdict == Lost(before.status, before.owner, before.epoch)
        assert pushed(push, before) == verdict
        assert run.record().cancellation is None
        run.cancel()  # which reads again, and asks the owner
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen == ["woken", "holds", "cancelled"]


@SQLITE
def test_a_wake_of_a_run_that_runs_a_step_is_refused(app: App, until: Until) -> None:
    release = threading.Event()

    @app.step(name="works")
    def works() -> None:
        release.wait(20)

    @app.workflow(name="busy")
    async def busy() -> str:
        await works()
        return "done"

    with app.runner():
        run = busy.submit()
        until(lambda: run.status is Status.RUNNING)
        until(lambda: run.steps())
        before = run.record()
        with pytest.raises(InvocationStatusTransitionError, match=r"does not sleep.*works#1: the step is running"):
            run.wake()
        assert run.record() == before
        release.set()
        assert run.result(patient(20)) == "done"


@SQLITE
def test_a_wake_that_ends_nothing_is_in_the_log_so_that_no_later_sleep_ends_by_it(app: App, until: Until) -> None:
    @app.step(name="works")
    async def works() -> None:
        await asyncio.sleep(0)

    @app.workflow(name="naps")
    async def naps() -> str:
        try:
            async with asyncio.timeout(3600):
                await asyncio.sleep(3600 * 2)
        except TimeoutError:
            return "timed out"
        return "slept"

    from holdfast.model.records import InboxEntry

    with app.runner():
        run = naps.submit()
        until(lambda: run.status is Status.SUSPENDED)
        record = run.record()
        entries = [InboxEntry(id=f"wake:{number}", kind="wake", at=record.changed_at) for number in (1, 2)]
        pushes = [
            Push(app=record.app, id=record.id, entry=entry, operation=entry.id, at=record.changed_at)
            for entry in entries
        ]

        async def push() -> Any:
            return await (await app.runtime.engine()).store.apply(pushes)

        app.runtime.run(push())
        assert run.result(patient(20)) == "slept"
        assert [event.type for event in run.events()].count("woken") == 1


# --- a cancel while a runner stops, or before the body has begun


def payer(app: App, seen: list[str]) -> Any:
    """A workflow that is cancelled while it works, and then compensates for a while."""

    @app.step(name="charge")
    async def charge() -> None:
        seen.append("charged")

    @app.step(name="work")
    async def work() -> None:
        seen.append("works")
        await asyncio.sleep(60)

    @app.step(name="call_back")
    async def call_back() -> None:
        seen.append("calls back")
        await asyncio.sleep(0.8)

    @app.step(name="refund")
    async def refund() -> None:
        seen.append("refunded")

    @app.workflow(name="pays", cancel_grace="60s")
    async def pays() -> None:
        await charge()
        try:
            await work()
        except asyncio.CancelledError:
            await call_back()
            await refund()
            raise

    return pays


@pytest.fixture
def hasty(url: str) -> Iterator[App]:
    """An app whose runners end what they run soon after they are told to stop."""
    app = App(url, name="cancels", poll_interval_seconds=0.1, workflow_linger_seconds=0.2, drain_timeout_seconds=0.2)
    with app:
        yield app


def test_a_run_that_compensates_while_its_runner_stops_is_compensated_by_the_next_one(hasty: App, until: Until) -> None:
    seen = list[str]()
    pays = payer(hasty, seen)
    with hasty.runner():
        run = pays.submit()
        until(lambda: "works" in seen)
        run.cancel()
        until(lambda: "calls back" in seen)
    assert run.status is Status.REROUTED
    with hasty.runner():
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen == ["charged", "works", "calls back", "calls back", "refunded"]


@SQLITE
def test_a_cancel_that_a_stopping_worker_has_not_heard_of_is_heard_by_the_next_one(
    hasty: App, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    pays = payer(hasty, seen)
    with monkeypatch.context() as deaf:
        deaf.setattr(CancellationListener, "_hinted", lambda self, hint: None)
        with hasty.runner():
            run = pays.submit()
            until(lambda: "works" in seen)
            run.cancel()
    assert seen == ["charged", "works"]
    assert run.status is Status.REROUTED
    with hasty.runner():
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen[-2:] == ["calls back", "refunded"]


@SQLITE
@pytest.mark.parametrize("is_started", [True, False])
def test_a_cancel_while_large_arguments_are_fetched(
    app: App, until: Until, monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    """A run that has started compensates; one that has not is over."""
    seen, fetches, slow = list[str](), threading.Event(), threading.Event()
    fetch = PayloadStore.fetch

    async def fetch_slowly(self: PayloadStore, wanted: Any) -> Any:
        if slow.is_set():
            fetches.set()
            await asyncio.sleep(1.0)
        return await fetch(self, wanted)

    monkeypatch.setattr(PayloadStore, "fetch", fetch_slowly)

    @app.step(name="refund")
    async def refund() -> None:
        seen.append("refunded")

    @app.workflow(name="pays")
    async def pays(big: bytes) -> None:
        seen.append("began")
        try:
            await sleep(1.5)
            await sleep(3600)
        except asyncio.CancelledError:
            await refund()
            raise

    with app.runner():
        if not is_started:
            slow.set()
        run = pays.submit(b"x" * 3_000_000)
        if is_started:
            until(lambda: run.status is Status.SUSPENDED)
            slow.set()
        until(fetches.is_set)
        run.cancel()
        slow.clear()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert ("refunded" in seen) is is_started
    assert ("began" in seen) is is_started


@SQLITE
def test_a_run_that_cannot_compensate_since_its_code_is_another_one_fails(hasty: App, until: Until) -> None:
    seen, is_new = list[str](), False

    @hasty.step(name="other")
    async def other() -> None:
        seen.append("other")

    @hasty.step(name="work")
    async def work() -> None:
        seen.append("works")

    @hasty.workflow(name="pays")
    async def pays() -> None:
        await (other() if is_new else work())
        await sleep(3600)

    with hasty.runner():
        run = pays.submit()
        until(lambda: run.status is Status.SUSPENDED)
    is_new = True
    run.cancel()
    with hasty.runner():
        until(lambda: run.status in (Status.FAILED, Status.CANCELLED))
    assert run.status is Status.FAILED
    assert "could not compensate" in run.record().reason


@SQLITE
@pytest.mark.parametrize("how", ["ends", "sleeps"])
def test_a_cancel_while_the_log_is_read_reaches_the_body(
    app: App, until: Until, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    seen, reads, slow = list[str](), threading.Event(), threading.Event()
    read = WorkflowExecutor._read

    async def read_slowly(self: WorkflowExecutor, record: Any, run: Any) -> Any:
        found = await read(self, record, run)
        if slow.is_set():
            reads.set()
            await asyncio.sleep(1.5)
        return found

    monkeypatch.setattr(WorkflowExecutor, "_read", read_slowly)

    @app.step(name="charge")
    async def charge() -> None:
        seen.append("charged")

    @app.step(name="refund")
    async def refund() -> None:
        seen.append("refunded")

    @app.workflow(name="pays")
    async def pays() -> None:
        try:
            await sleep(1.5)
            await charge()
            if how == "sleeps":
                await sleep(3600)
        except asyncio.CancelledError:
            await refund()
            raise

    with app.runner():
        run = pays.submit()
        until(lambda: run.status is Status.SUSPENDED)
        slow.set()
        until(reads.is_set)
        run.cancel()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
        assert [event.type for event in run.events()].count("cancel_requested") == 1
    assert seen[-1] == "refunded"


@SQLITE
def test_a_runner_that_stops_while_a_log_is_read_never_begins_the_body(
    hasty: App, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reads, slow = list[str](), threading.Event(), threading.Event()
    read = WorkflowExecutor._read

    async def read_slowly(self: WorkflowExecutor, record: Any, run: Any) -> Any:
        if slow.is_set():
            reads.set()
            await asyncio.sleep(1.0)
        return await read(self, record, run)

    monkeypatch.setattr(WorkflowExecutor, "_read", read_slowly)

    @hasty.workflow(name="naps")
    async def naps() -> str:
        seen.append("began")
        await sleep(1.0)
        return "rested"

    with hasty.runner():
        run = naps.submit()
        until(lambda: run.status is Status.SUSPENDED)
        slow.set()
        until(reads.is_set)
    assert run.status is Status.REROUTED
    slow.clear()
    assert seen == ["began"]
    with hasty.runner():
        assert run.result(patient(20)) == "rested"
    assert seen == ["began", "began"]


def test_the_grace_of_a_run_without_an_owner_begins_when_its_body_is_asked(app: App, until: Until) -> None:
    seen = list[str]()

    @app.step(name="refund")
    async def refund() -> None:
        await asyncio.sleep(0.3)
        seen.append("refunded")

    @app.workflow(name="pays", cancel_grace="1s")
    async def pays() -> None:
        try:
            await sleep(3600)
        except asyncio.CancelledError:
            await refund()
            raise

    with app.runner():
        run = pays.submit()
        until(lambda: run.status is Status.SUSPENDED)
    run.cancel()
    time.sleep(1.5)
    with app.runner():
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    assert seen == ["refunded"]


@SQLITE
def test_a_sleep_beside_a_step_is_seen_and_woken(app: App, until: Until) -> None:
    release = threading.Event()

    @app.step(name="works")
    def works() -> None:
        release.wait(20)

    @app.workflow(name="both")
    async def both() -> str:
        working = asyncio.ensure_future(works())
        await sleep(3600)
        release.set()
        await working
        return "done"

    with app.runner():
        run = both.submit()
        until(lambda: any(event.type == "wait_created" for event in run.events()))
        assert "wait#1: a sleep until" in run.explain()
        run.wake()
        assert run.result(patient(20)) == "done"
    events = [event.type for event in run.events(correlation="wait#1")]
    assert events == ["wait_created", "wait_completed"]


@SQLITE
def test_a_sleep_of_a_run_that_compensates_is_seen_and_woken(app: App, until: Until) -> None:
    @app.workflow(name="compensates")
    async def compensates() -> None:
        try:
            await sleep(3600)
        finally:
            await sleep(300)

    with app.runner():
        run = compensates.submit()
        until(lambda: run.status is Status.SUSPENDED)
        run.cancel("not wanted")
        until(lambda: len([event for event in run.events() if event.type == "wait_created"]) == 2)
        said = run.explain()
        assert "wait#2: a sleep until" in said
        assert "wait#1" not in said, "the body has given it up"
        run.wake()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
    ends = [(event.correlation, event.why) for event in run.events() if event.type == "wait_completed"]
    assert ends == [("wait#1", GIVEN_UP), ("wait#2", "woken")]
