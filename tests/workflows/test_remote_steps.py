"""Steps that run elsewhere: in a child process, or as an invocation on another queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.patience import patient
from tests.workflows.fleet import Fleet
from tests.workflows.test_recovery import SQLITE

from holdfast import App, Status, context
from holdfast.errors import TimedOut, UsageError
from holdfast.retries import Fixed
from holdfast.workflows.api import sleep

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def app(url: str) -> Iterator[App]:
    app = App(url, name="remote", poll_interval_seconds=0.1, workflow_linger_seconds=0.2)
    with app:
        yield app


@SQLITE
def test_a_step_in_a_child_process_shares_data_and_attributes_with_its_run(fleet: Fleet) -> None:
    run = fleet.workflow("sharing").submit()
    fleet.start("--workers", "1")
    told, seen, body = run.result(patient(60))
    assert told == ["one after ['body']", "two after ['body', 'one']"]
    assert seen == ["body", "one", "two"]
    assert body not in [*fleet.processes("shares one"), *fleet.processes("shares two")]
    set_by_two = [event.type for event in run.events(correlation="shares#2") if event.type.endswith("_set")]
    assert set_by_two == ["data_set", "attr_set"]


@SQLITE
def test_a_step_on_another_queue_has_the_idempotency_key_of_its_call(app: App) -> None:
    @app.step(name="far")
    def far() -> str:
        return context().idempotency_key

    @app.workflow(name="reach")
    async def reach() -> list[str]:
        return [await far(), await far.options(queue="far")()]

    with app.runner(queues=["default", "far"]):
        run = reach.submit()
        assert run.result(patient(20)) == [f"{run.id}/far#1", f"{run.id}/far#2"]
        step = run.step("far#2")
        record = app.invocation(step.child).record()
        assert (record.queue, record.parent_id, record.root_id) == ("far", run.id, run.id)


@SQLITE
def test_the_context_of_a_step_on_another_queue(app: App) -> None:
    """It has attempt and first start as any step, and says what it does not share."""
    seen = list[tuple[int, float | None]]()

    @app.step(name="far", queue="far", retries=Fixed(1, "0.1s"))
    def far() -> list[str]:
        seen.append((context().attempt, context().started_at))
        if len(seen) == 1:
            raise OSError("not yet")
        told = []
        for use in (lambda: context().data, lambda: context().set(stage="far")):
            with pytest.raises(UsageError, match="the step far runs on another queue") as refused:
                use()
            told.append(str(refused.value))
        return told

    @app.workflow(name="reach")
    async def reach() -> list[str]:
        return await far()

    with app.runner(queues=["default", "far"]):
        run = reach.submit()
        assert "return what the body is to set" in run.result(patient(20))[0]
    assert [attempt for attempt, _ in seen] == [1, 2]
    (first,) = {at for _, at in seen}
    assert first == run.step("far#1").started_at


@SQLITE
def test_options_of_a_call_hold_on_another_queue_too(app: App) -> None:
    calls = list[str]()

    @app.step(name="flaky")
    def flaky() -> int:
        calls.append("flaky")
        if len(calls) < 3:
            raise OSError("not yet")
        return len(calls)

    @app.step(name="slow")
    async def slow() -> None:
        await asyncio.sleep(30)

    @app.workflow(name="reach")
    async def reach() -> str:
        tries = await flaky.options(queue="far", retries=Fixed(5, 0.01))()
        try:
            await slow.options(queue="far", timeout=0.3)()
        except TimedOut:
            return f"timed out after {tries} tries"
        return "never"

    with app.runner(queues=["default", "far"]):
        assert reach.submit().result(patient(20)) == "timed out after 3 tries"


def test_every_owner_of_a_run_sends_a_step_as_the_same_invocation(fleet: Fleet) -> None:
    """The first owner dies when the step is inserted, and the page that says so is not written."""
    run = fleet.workflow("reach").submit("once")
    first = fleet.start("--workers", "0", "--queues", "default", HOLDFAST_CRASH_AT="append.before")
    fleet.until(lambda: first.poll() is not None, "the first owner dies")
    (inserted,) = fleet.app.invocations(parent=run.id)
    fleet.start("--workers", "0", "--queues", "default,far")
    assert run.result(patient(60)) == [f"{run.id}/far#1", inserted.id]
    assert [record.id for record in fleet.app.invocations(parent=run.id)] == [inserted.id]
    assert fleet.lines("far") == ["far once"]


@SQLITE
def test_a_cancelled_step_on_another_queue_is_waited_for_by_the_next_owner_too(fleet: Fleet) -> None:
    run = fleet.workflow("reach_for").submit("slow", 2.0)
    fleet.start("--workers", "0", "--queues", "far")
    first = fleet.start("--workers", "0", "--queues", "default")
    fleet.until(lambda: fleet.lines("far"), "the step begins")
    first.kill()
    fleet.start("--workers", "0", "--queues", "default")
    assert run.result(patient(60)) == "gave up"
    (step,) = fleet.app.invocations(parent=run.id)
    assert step.status in (Status.SUCCESS, Status.CANCELLED), "it has ended before its run went on"
    assert run.step("far#1").child == step.id


@SQLITE
def test_a_run_waits_for_a_step_on_another_queue_that_its_body_has_left_open(app: App, until: Until) -> None:
    release, seen = threading.Event(), list[str]()

    @app.step(name="far")
    def far() -> None:
        release.wait(20)
        seen.append("far")

    @app.workflow(name="reach")
    async def reach() -> str:
        task = asyncio.create_task(far.options(queue="far")())
        await asyncio.sleep(0.05)
        return f"left {task.get_name()}"

    with app.runner(queues=["default", "far"]):
        run = reach.submit()
        until(lambda: run.status is Status.SUSPENDED)
        release.set()
        assert run.result(patient(20)).startswith("left")
        assert seen == ["far"]


def test_a_step_result_of_more_than_15_mb_is_stored_and_replayed(app: App) -> None:
    size = 16_000_000

    @app.step(name="huge")
    def huge() -> bytes:
        return b"x" * size

    @app.workflow(name="large")
    async def large() -> tuple[int, int]:
        found = await huge()
        await sleep(0.5)  # it is suspended, and reads its log again
        far = await huge.options(queue="far")()
        return len(found), len(far)

    with app.runner(queues=["default", "far"]):
        began = time.monotonic()
        run = large.submit()
        assert tuple(run.result(patient(60))) == (size, size)
        assert time.monotonic() - began < 60
        assert len(run.step("huge#1", fetch=True).result) == size
