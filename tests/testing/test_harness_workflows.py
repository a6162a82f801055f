"""Workflows in `holdfast.testing`: drained, on virtual time, evicted and replayed at each wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import InvocationCancelled, Status, TimedOut, context, sleep
from holdfast.errors import ReplayMismatch
from holdfast.retries import Fixed
from holdfast.testing import Endless, Harness, testing_app


@pytest.fixture
def t() -> Iterator[Harness]:
    with testing_app(start=1_700_000_000.0) as harness:
        yield harness


def declare_charge(t: Harness) -> Any:
    @t.app.step(name="charge")
    async def charge(order: str) -> str:
        return f"receipt {order}"

    return charge


def test_a_drain_runs_a_workflow_with_its_steps_and_reports_them(t: Harness) -> None:
    charge = declare_charge(t)

    @t.app.step(name="pack")
    def pack(order: str) -> str:
        assert threading.current_thread() is threading.main_thread()  # where the test waits
        return f"box {order}"

    @t.app.workflow
    async def checkout(order: str) -> list[str]:
        return [await charge(order), *await asyncio.gather(pack(order), pack(f"{order}b"))]

    run = checkout.submit("42")
    t.assert_submitted(checkout, "42")
    report = t.drain(check=True)
    assert [ran.call for ran in report.succeeded] == ["checkout('42')"]
    assert [step.id for step in report.steps] == ["charge#1", "pack#1", "pack#2"]
    assert [step.call for step in report.steps] == ["charge('42')", "pack('42')", "pack('42b')"]
    assert repr(report).splitlines()[:2] == ["checkout('42') → success", "  charge#1: charge('42')"]
    assert run.result() == ["receipt 42", "box 42", "box 42b"]
    assert len(report) == 1


def test_sleeping_runs_are_woken_at_their_times_in_order(t: Harness) -> None:
    woken: list[tuple[str, float]] = []

    @t.app.step(name="note")
    async def note(name: str) -> None:
        woken.append((name, t.clock.now() - 1_700_000_000))

    @t.app.workflow
    async def drip(name: str, days: int) -> str:
        await sleep(f"{days} days")
        await note(name)
        await sleep("1d")
        return name

    drip.submit("late", 3)
    drip.submit("early", 1)
    report = t.drain()
    assert [ran.call for ran in report.waiting] == ["drip('late', 3)", "drip('early', 1)"]
    assert len(report.left) == 2
    assert "due in 3 days" in repr(report)
    assert len(t.advance("12h").ran) == 0
    report = t.advance("12h")
    assert woken == [("early", 86400.0)]
    assert len(report.waiting) == 1
    report = t.advance("4 days", check=True)
    assert woken == [("early", 86400.0), ("late", 3 * 86400.0)]
    assert [ran.call for ran in report.succeeded] == ["drip('early', 1)", "drip('late', 3)"]
    assert report.left == []


def test_a_body_is_evicted_and_replayed_at_each_wait(t: Harness) -> None:
    lives: list[int] = []
    charge = declare_charge(t)

    @t.app.workflow
    async def checkout() -> str:
        lives.append(len(lives))
        receipt = await charge("42")
        await sleep(0.001)
        await sleep(0.001)
        return str(receipt)

    assert checkout.submit().result() == "receipt 42"
    assert len(lives) == 4  # three here, and one to compare


def test_plain_bodies_work(t: Harness) -> None:
    charge = declare_charge(t)

    @t.app.workflow
    def child(order: str) -> str:
        sleep("1h")
        return str(charge(order))

    @t.app.workflow
    def checkout(order: str) -> str:
        receipt = charge(order)
        sleep("3 days")
        return f"{receipt}, {child(f'{order}c')}"

    run = checkout.submit("42")
    assert len(t.drain().waiting) == 1
    report = t.advance("4 days", check=True)
    assert {ran.call for ran in report.succeeded} == {"checkout('42')", "child('42c')"}
    assert run.result() == "receipt 42, receipt 42c"


def test_retries_of_steps_wait_by_the_clock_of_the_test(t: Harness) -> None:
    tries: list[float] = []

    @t.app.step(name="ship", retries=Fixed(3, "1h"))
    async def ship() -> str:
        tries.append(t.clock.now() - 1_700_000_000)
        if len(tries) < 3:
            raise OSError("no truck")
        return "shipped"

    @t.app.workflow
    async def checkout() -> str:
        return await ship()

    run = checkout.submit()
    report = t.drain()
    assert [str(step.error) for step in report.steps] == ["no truck"]
    report = t.advance("5h", check=True)
    assert tries == [0.0, 3600.0, 7200.0]
    assert [(step.id, step.attempt) for step in report.steps] == [("ship#1", 2), ("ship#1", 3)]
    assert run.result() == "shipped"


def test_children_and_tasks_are_run_and_awaited(t: Harness) -> None:
    @t.app.task
    def mail(to: str) -> str:
        return f"sent {to}"

    @t.app.workflow
    async def invoice(order: str) -> str:
        await sleep("1h")
        return f"invoice {order}"

    @t.app.workflow
    async def checkout(order: str) -> list[str]:
        first, second = await asyncio.gather(invoice(order), invoice(f"{order}b"))
        return [first, second, await mail.options(delay="1h").submit("a@b.c")]

    run = checkout.submit("42")
    report = t.advance("3h", check=True)
    assert len(report.succeeded) == 4
    assert run.result() == ["invoice 42", "invoice 42b", "sent a@b.c"]
    t.assert_submitted(mail, "a@b.c")


def test_wake_ends_a_sleep(t: Harness) -> None:
    @t.app.workflow
    async def nap() -> str:
        await sleep("9 days")
        return "up"

    run = nap.submit()
    t.drain()
    run.wake()
    assert [ran.status for ran in t.drain().ran] == [Status.SUCCESS]
    assert run.result() == "up"


def test_a_cancelled_run_compensates_by_virtual_time(t: Harness) -> None:
    did: list[str] = []

    @t.app.step(name="refund", retries=Fixed(3, "1m"))
    async def refund() -> None:
        did.append("refund")
        if len(did) < 2:
            raise OSError("the bank is closed")

    @t.app.workflow
    async def other() -> None:
        await sleep("1m")
        did.append("other")

    @t.app.workflow
    async def checkout() -> None:
        try:
            await sleep("9 days")
        except asyncio.CancelledError:
            await refund()
            await sleep("1m")
            await other()
            raise

    run = checkout.submit()
    t.drain()
    run.cancel(reason="changed their mind")
    report = t.drain()
    assert did == ["refund", "refund", "other", "other"]  # bodies run once more for each wait
    assert {ran.status for ran in report.ran} == {Status.SUCCESS, Status.CANCELLED}
    with pytest.raises(InvocationCancelled):
        run.result()


def test_a_cancelled_run_that_never_ends_is_ended_when_its_grace_is_over(t: Harness) -> None:
    @t.app.workflow
    async def stubborn() -> None:
        try:
            await sleep("9 days")
        finally:
            await sleep("9 days")

    run = stubborn.submit()
    t.drain()
    run.cancel()
    t.drain()
    assert run.status is Status.CANCELLED
    assert t.clock.now() - 1_700_000_000 == pytest.approx(600, abs=1)


def test_a_failed_workflow_raises_its_own_error(t: Harness) -> None:
    class Declined(Exception):
        pass

    @t.app.workflow
    async def checkout() -> None:
        await sleep("1m")
        raise Declined("no")

    checkout.submit()
    with pytest.raises(Declined, match="no") as caught:
        t.advance("1h", check=True)
    assert "checkout()" in caught.value.__notes__[0]


def test_a_body_that_is_not_deterministic_fails_the_test_with_both_calls(t: Harness) -> None:
    lives: list[int] = []
    charge = declare_charge(t)

    @t.app.step(name="pack")
    async def pack(order: str) -> None: ...

    @t.app.workflow
    async def ended(order: str) -> None:
        lives.append(1)
        await (charge if len(lives) % 2 else pack)(order)

    @t.app.workflow
    async def waits(order: str) -> None:
        lives.append(1)
        await (charge if len(lives) % 2 else pack)(order)
        await sleep("1h")

    ended.submit("42")
    with pytest.raises(ReplayMismatch, match=r"the log has charge#1 at .*_workflows\.py:\d+ .* pack#1 at .*\.py:\d+"):
        t.drain()
    lives.clear()
    run = waits.submit("42")
    with pytest.raises(ReplayMismatch, match=r"the log has charge#1 at .*_workflows\.py:\d+ .* pack#1 at .*\.py:\d+"):
        t.advance("2h")
    assert run.status is Status.PARKED


def test_replays_can_be_turned_off() -> None:
    lives: list[int] = []
    with testing_app(replays=False) as t:

        @t.app.workflow
        async def odd() -> int:
            lives.append(1)
            return len(lives)

        assert odd.submit().result() == 1
    assert lives == [1]


def test_a_step_that_is_cancelled_before_its_turn_does_not_run(t: Harness) -> None:
    ran: list[str] = []

    @t.app.step(name="work")
    async def work(name: str) -> str:
        ran.append(name)
        return name

    @t.app.workflow
    async def race() -> str:
        tasks = [asyncio.create_task(work(name)) for name in "ab"]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return next(iter(done)).result()

    run = race.submit()
    assert run.result() == "a"
    assert ran == ["a"]


def test_workflows_in_async_tests() -> None:
    asyncio.run(in_async_test())


async def in_async_test() -> None:
    async with testing_app() as t:

        @t.app.step(name="here")
        async def here() -> int:
            return id(asyncio.get_running_loop())

        @t.app.workflow
        async def body() -> int:
            await sleep("1d")
            return await here()

        run = await body.asubmit()
        await t.adrain()
        report = await t.aadvance("2d", check=True)
        assert len(report.succeeded) == 1
        assert await run == id(asyncio.get_running_loop())


def test_a_run_times_out_by_the_clock_of_the_test(t: Harness) -> None:
    @t.app.workflow(timeout="1h")
    async def endless() -> None:
        await sleep("9 days")

    run = endless.submit()
    report = t.advance("2h")
    assert [ran.status for ran in report.failed] == [Status.FAILED]
    with pytest.raises(TimedOut):
        run.result()


def test_context_in_bodies_and_steps(t: Harness) -> None:
    @t.app.step(name="note")
    def note() -> str:
        context().data["seen"] = "yes"
        return context().idempotency_key

    @t.app.workflow
    async def body() -> list[str]:
        key = await note()
        await sleep("1h")
        return [key, context().data["seen"], context().now().isoformat()]

    run = body.submit()
    assert run.result() == [f"{run.id}/note#1", "yes", "2023-11-14T23:13:20+00:00"]


def test_a_step_that_waits_for_another_call_runs_it_meanwhile(t: Harness) -> None:
    @t.app.workflow
    async def inner() -> str:
        await sleep("1h")
        return "inner"

    @t.app.step(name="outer-step")
    def outer_step() -> str:
        return inner.submit().result()

    @t.app.workflow
    async def outer() -> str:
        return await outer_step()

    assert outer.submit().result() == "inner"


def test_ctrl_c_in_a_step_ends_the_drain_and_the_run_goes_back(t: Harness) -> None:
    tries: list[int] = []

    @t.app.step(name="work")
    def work() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return len(tries)

    @t.app.workflow
    async def body() -> int:
        return await work()

    run = body.submit()
    with pytest.raises(KeyboardInterrupt):
        t.drain()
    assert run.status is not Status.FAILED
    assert run.result() == 2


def test_a_step_on_another_queue_is_run_too(t: Harness) -> None:
    @t.app.step(name="render", queue="gpu")
    def render(page: int) -> str:
        return f"page {page}"

    @t.app.workflow
    async def book() -> list[str]:
        return list(await asyncio.gather(*[render(page) for page in range(3)]))

    run = book.submit()
    report = t.drain(check=True)
    assert sorted(ran.call for ran in report.succeeded) == ["book()", "render(0)", "render(1)", "render(2)"]
    assert run.result() == ["page 0", "page 1", "page 2"]


def test_a_restarted_run_goes_on_with_its_new_arguments(t: Harness) -> None:
    charge = declare_charge(t)

    @t.app.workflow
    async def monthly(month: int) -> int:
        await charge(str(month))
        await sleep("30 days")
        if month < 3:
            context().restart(month + 1)
        return month

    run = monthly.submit(1)
    report = t.advance("100 days", check=True)
    assert run.result() == 3
    assert [step.call for step in report.steps] == ["charge('1')", "charge('2')", "charge('3')"]


def test_an_endless_body_is_told(t: Harness) -> None:
    charge = declare_charge(t)

    @t.app.workflow
    async def endless() -> None:
        while True:
            await charge("1")
            await sleep("1s")

    endless.submit()
    with pytest.raises(Endless, match="calls were run, and there is more"):
        t.advance("1d", most=50)


def test_asyncio_timeout_in_a_body_follows_the_clock_of_the_test(t: Harness) -> None:
    @t.app.workflow
    async def child() -> None:
        await sleep("2 days")

    @t.app.workflow
    async def impatient() -> str:
        try:
            async with asyncio.timeout(3600):
                await child()
        except TimeoutError:
            return "too late"
        return "in time"

    run = impatient.submit()
    t.advance("2h")
    assert run.result(0) == "too late"


def test_a_run_that_times_out_compensates_by_virtual_time(t: Harness) -> None:
    did: list[str] = []

    @t.app.step(name="refund")
    async def refund() -> None:
        did.append("refund")

    @t.app.workflow(timeout="1h")
    async def checkout() -> None:
        try:
            await sleep("9 days")
        finally:
            await sleep("1m")
            await refund()

    run = checkout.submit()
    report = t.advance("2h")
    assert [ran.status for ran in report.failed] == [Status.FAILED]
    assert did == ["refund"]
    with pytest.raises(TimedOut):
        run.result()


def test_a_plain_body_is_cancelled_too(t: Harness) -> None:
    did: list[str] = []

    @t.app.step(name="refund")
    def refund() -> None:
        did.append("refund")

    @t.app.workflow
    def checkout() -> None:
        try:
            sleep("9 days")
        except asyncio.CancelledError:
            sleep("1m")
            refund()
            raise

    run = checkout.submit()
    t.drain()
    run.cancel()
    t.drain()
    assert run.status is Status.CANCELLED
    assert did == ["refund"]


def test_the_time_limit_of_a_step_takes_real_seconds(t: Harness) -> None:
    @t.app.step(name="slow", timeout=0.1)
    async def slow() -> None:
        await asyncio.sleep(30)

    @t.app.workflow
    async def body() -> str:
        try:
            await slow()
        except TimedOut as error:
            return str(error)
        return "in time"

    assert body.submit().result() == "slow#1 timed out after 0.1 s"


def test_time_begins_anew_with_a_restarted_log(t: Harness) -> None:
    @t.app.step(name="work")
    def work() -> None:
        t.clock.advance(3600)

    @t.app.workflow
    async def again(number: int) -> str:
        began = context().now().isoformat()
        await work()
        if number < 2:
            context().restart(number + 1)
        return began

    run = again.submit(1)
    assert run.result() == "2023-11-14T23:13:20+00:00"  # an hour after the first log; the replay agrees
