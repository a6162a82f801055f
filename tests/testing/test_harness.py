"""`holdfast.testing`: the real app, in memory, on a clock that stands still."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from tests.support.patience import patient

from holdfast import App, ResultTimeout, Retries, Status, UsageError
from holdfast.errors import BlockingCall, KeyTaken
from holdfast.retries import Fixed, Forever, Timetable
from holdfast.testing import Endless, Harness, testing_app


class Declined(Exception):
    pass


@pytest.fixture
def t() -> Iterator[Harness]:
    with testing_app() as harness:
        yield harness


def declare(app: App, done: list[Any], **options: Any) -> Any:
    @app.task(name="charge", **options)
    def charge(order: int, amount: int = 10) -> str:
        done.append((order, amount))
        if amount > 1000:
            raise Declined(f"order {order}")
        return f"receipt {order}"

    return charge


# --- running


def test_nothing_runs_before_it_is_drained(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done)
    invocation = charge.submit(1)
    assert (done, invocation.status) == ([], Status.REGISTERED)
    report = t.drain()
    assert (done, invocation.status, invocation.result(0)) == ([(1, 10)], Status.SUCCESS, "receipt 1")
    assert [ran.call for ran in report.succeeded] == ["charge(1)"]
    assert len(t.drain()) == 0


def test_order_is_that_of_the_queue_also_for_what_comes_meanwhile(t: Harness) -> None:
    seen: list[int] = []

    @t.app.task
    def step(number: int) -> None:
        seen.append(number)
        if number == 1:
            step.options(priority=50).submit(9)

    step.map([1, 2, 3])
    step.options(priority=10).submit(0)
    t.drain(check=True)
    assert seen == [0, 1, 9, 2, 3]


def test_user_code_runs_on_the_thread_and_in_the_context_of_the_test(t: Harness) -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[tuple[int, str]] = []

    @t.app.task
    def look() -> None:
        seen.append((threading.get_ident(), colour.get()))

    look.submit()
    colour.set("red")
    t.drain(check=True)
    with sqlite3.connect(":memory:") as connection:  # bound to its thread

        @t.app.task
        def ask() -> int:
            return int(connection.execute("SELECT 7").fetchone()[0])

        assert ask.submit().result() == 7
    connection.close()
    assert seen == [(threading.get_ident(), "red")]


def test_delays_and_retries_pass_as_the_clock_moves(t: Harness) -> None:
    times: list[float] = []
    start = t.clock.now()

    @t.app.task(retries=Fixed(2, 30))
    def fragile() -> None:
        times.append(t.clock.now() - start)
        raise Declined("again")

    late = fragile.options(delay="1h").submit()
    assert len(t.drain()) == 0
    assert [len(t.advance("59m")), len(t.advance("59s"))] == [0, 0]
    report = t.advance("29s")
    assert [(ran.status, type(ran.error)) for ran in report.retried] == [(Status.RETRY, Declined)]
    report = t.drain(until="1h")
    assert [ran.status for ran in report.ran] == [Status.RETRY, Status.FAILED]
    assert times == pytest.approx([3600, 3630, 3660], abs=0.01)
    assert t.clock.now() == pytest.approx(start + 3600 + 28 + 3600)
    assert (late.status, len(late.record().errors)) == (Status.FAILED, 2)
    with pytest.raises(Declined, match="again") as caught:
        report.raise_errors()
    assert f"in fragile(), {late.id}" in caught.value.__notes__


def test_a_timetable_counts_from_when_the_first_attempt_was_due(t: Harness) -> None:
    times: list[float] = []
    start = t.clock.now()

    @t.app.task(retries=Timetable({"1m": "20s"}))
    def fragile() -> None:
        times.append(t.clock.now() - start)
        raise Declined("again")

    late = fragile.options(delay="1h").submit()
    t.advance("2h")
    assert times == pytest.approx([3600, 3620, 3640, 3660, 3680], abs=0.1)
    assert "the timetable ends at 1m" in late.record().reason


def test_until_may_be_a_moment(t: Harness) -> None:
    done: list[Any] = []
    at = dt.datetime.fromtimestamp(t.clock.now(), dt.UTC) + dt.timedelta(days=40)
    declare(t.app, done).options(at=at).submit(1)
    assert len(t.drain(until=at - dt.timedelta(seconds=1)).left) == 1
    assert len(t.drain(until=at)) == 1
    with pytest.raises(UsageError, match="is over"):
        t.drain(until=at - dt.timedelta(days=1))


def test_check_raises_the_error_itself_or_all_of_them(t: Harness) -> None:
    charge = declare(t.app, [])
    charge.submit(1, 5000)
    charge.submit(2)
    with pytest.raises(Declined, match="order 1"):
        t.drain(check=True)
    charge.map([(3, 5000), (4, 5000)])
    with pytest.raises(ExceptionGroup) as caught:
        t.drain(check=True)
    assert [str(error) for error in caught.value.exceptions] == ["order 3", "order 4"]


def test_a_report_can_be_read(t: Harness) -> None:
    charge = declare(t.app, [])
    charge.submit(1, amount=5000)
    charge.options(delay=90).submit(2)
    text = repr(t.drain())
    assert "charge(1, amount=5000) → failed (Declined: order 1)" in text
    assert "is registered, due in 0:01:30" in text


def test_what_never_ends_is_told(t: Harness) -> None:
    @t.app.task
    def ever() -> None:
        ever.submit()

    ever.submit()
    with pytest.raises(Endless, match=r"20 calls were run.*ever\(\)"):
        t.drain(most=20)

    @t.app.task(retries=Forever(Fixed(1)))
    def never() -> None:
        raise Declined

    with testing_app(t.app) as other:
        never.submit()
        with pytest.raises(Endless):
            other.drain(until="1h", most=100)


# --- the semantics are the real ones


def test_keys_are_real(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done)
    keyed = charge.options(key="order 1", key_for="1h")
    assert keyed.submit(1) == (first := keyed.submit(1))
    with pytest.raises(KeyTaken):
        keyed.submit(1, 99)
    t.drain(check=True)
    t.advance("59m")
    assert keyed.submit(1) == first
    t.advance("2m")
    assert keyed.submit(1) != first


def test_limits_and_refusals_are_real(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done, limit=1)
    charge.map([1, 2, 3])
    assert len(t.drain(check=True).succeeded) == 3

    @t.app.task(unique=True)
    def index() -> None: ...

    assert index.submit() == index.submit()
    t.assert_submitted(index)


def test_large_values_are_real(t: Harness) -> None:
    @t.app.task
    def size(data: bytes) -> bytes:
        return data * 2

    invocation = size.submit(b"x" * 300_000)
    assert len(invocation.result()) == 600_000
    t.assert_submitted(size, b"x" * 300_000)


def test_arguments_that_cannot_be_stored_are_refused_as_everywhere(t: Harness) -> None:
    charge = declare(t.app, [])
    with pytest.raises(TypeError):
        charge.submit()
    with pytest.raises(Exception, match="order"):
        charge.submit(object())


def test_work_of_another_code_is_parked(t: Harness) -> None:
    invocation = declare(t.app, []).submit(1, 2)
    del t.app.runtime.tasks["charge"]

    @t.app.task(name="charge")
    def charge(customer: str) -> None: ...

    report = t.drain()
    assert (invocation.status, len(report), len(report.left)) == (Status.PARKED, 0, 1)


# --- waiting


def test_who_waits_has_it_done_and_time_passes(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done)
    start = t.clock.now()
    first, second = charge.options(delay="10m").submit(1), charge.options(delay="1h").submit(2)
    assert first.result(timeout=3600) == "receipt 1"
    assert t.clock.now() == pytest.approx(start + 600)
    with pytest.raises(ResultTimeout, match="not due"):
        second.result(timeout=patient(60))
    assert t.clock.now() == pytest.approx(start + 660)
    assert second.result() == "receipt 2"
    assert charge.map([3, 4]).results() == ["receipt 3", "receipt 4"]


def test_only_as_much_is_run_as_is_waited_for(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done)
    group = charge.map([1, 2, 3])
    assert group[1].result() == "receipt 2"
    assert [order for order, _ in done] == [1, 2]


def test_what_cannot_end_is_not_waited_for(t: Harness) -> None:
    invocation = declare(t.app, []).submit(1)
    del t.app.runtime.tasks["charge"]
    with pytest.raises(ResultTimeout, match="nothing is left to run"):
        invocation.result()


def test_a_task_may_wait_for_another(t: Harness) -> None:
    @t.app.task(retries=Retries(3))
    def child(number: int) -> int:
        if len(t.submitted(child)) == number and child_failed.setdefault(number, True):
            child_failed[number] = False
            raise Declined
        return number * 2

    child_failed: dict[int, bool] = {}

    @t.app.task
    def parent() -> int:
        return child.submit(1).result() + child.submit(2).result()

    @t.app.task
    async def aparent() -> int:
        return await (await child.asubmit(5)) + await (await achild.asubmit())

    @t.app.task
    async def achild() -> int:
        await asyncio.sleep(0)
        return 100

    assert parent.submit().result() == 6
    assert aparent.submit().result() == 110
    one = parent.submit()
    report = t.drain(check=True)
    assert one.status is Status.SUCCESS
    assert report.ran[0].call == "parent()"


# --- async


def test_coroutines_run_on_one_loop_when_a_plain_test_drains(t: Harness) -> None:
    loops = []

    @t.app.task
    async def look() -> None:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())

    look.map([(), ()])
    t.drain(check=True)
    look.submit().result()
    assert len(loops) == 3
    assert len(set(loops)) == 1


def test_in_an_async_test_coroutines_run_on_its_loop() -> None:
    async def test() -> None:
        async with testing_app() as t:
            loops = []

            @t.app.task
            async def look(number: int) -> int:
                loops.append(asyncio.get_running_loop())
                return number

            @t.app.task
            def plain(number: int) -> int:
                return look.submit(number).result() + 1  # on a thread, where that is allowed

            one = await look.asubmit(1)
            plain.submit(5)
            report = await t.adrain(check=True)
            assert len(report) == 3
            assert await one == 1
            assert await look.options(delay="1h").submit(2) == 2
            assert (await t.aadvance("1h")).ran == []
            t.assert_submitted(look, number=2)
            assert set(loops) == {asyncio.get_running_loop()}
            assert len(loops) == 3
            with pytest.raises(BlockingCall):
                t.drain()

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["plain", "coroutine", "waits for it"])
def test_ctrl_c_ends_a_drain_and_what_ran_can_be_run_again(t: Harness, kind: str) -> None:
    presses = [True]

    def pressed() -> bool:
        if presses and presses.pop():
            signal.raise_signal(signal.SIGINT)
            return True
        return False

    @t.app.task(retries=3)
    def plain() -> str:
        pressed()
        return "done"

    @t.app.task(retries=3)
    async def coroutine() -> str:
        if pressed():
            await asyncio.sleep(3600)
        return "done"

    @t.app.task
    def above() -> str:
        return plain.submit().result()

    task: Any = {"plain": plain, "coroutine": coroutine, "waits for it": above}[kind]
    first, later = task.submit(), plain.options(delay="1h").submit()
    began = t.clock.now()
    with pytest.raises(KeyboardInterrupt):
        t.drain(until="2h")
    assert t.clock.now() == began
    assert (first.status, later.status) == (Status.REROUTED, Status.REGISTERED)
    assert first.history()[-2].status is Status.KILLED
    assert first.record().errors == ()
    t.drain(until="2h", check=True)
    assert (first.result(), later.result()) == ("done", "done")


def test_ctrl_c_while_a_result_is_awaited(t: Harness) -> None:
    @t.app.task
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    began = t.clock.now()
    with pytest.raises(KeyboardInterrupt):
        press.submit().result(timeout=patient(60))
    assert t.clock.now() == began


@pytest.mark.parametrize("kind", ["coroutine", "plain", "awaited", "nested"])
def test_what_a_cancelled_drain_was_running_goes_back(kind: str) -> None:
    async def test() -> None:
        async with testing_app() as t:
            begun, freed, seen = asyncio.Event(), threading.Event(), list[str]()
            loop = asyncio.get_running_loop()

            @t.app.on_worker_stop
            def stop() -> None:
                seen.append("stop")

            @t.app.task
            async def coroutine() -> str:
                begun.set()
                await asyncio.sleep(0 if freed.is_set() else 3600)
                return "done"

            @t.app.task
            def plain() -> str:
                loop.call_soon_threadsafe(begun.set)
                freed.wait(60)
                return "done"

            @t.app.task
            async def above() -> str:
                return await (await coroutine.asubmit())

            task: Any = {"plain": plain, "nested": above}.get(kind, coroutine)
            first, later = await task.asubmit(), await plain.options(delay="1h").asubmit()
            began = t.clock.now()
            drain = asyncio.ensure_future(first.aresult() if kind == "awaited" else t.adrain(until="2h"))
            await begun.wait()
            drain.cancel()
            with pytest.raises(asyncio.CancelledError):
                await drain
            freed.set()
            assert (t.clock.now(), seen) == (began, ["stop"])
            assert (await later.arecord()).status is Status.REGISTERED
            for record in t.app.invocations():
                if record.id != later.id:
                    assert (record.status, record.history[-2].status) == (Status.REROUTED, Status.KILLED)
            await t.adrain(until="2h", check=True)
            assert await first.aresult() == "done"

    asyncio.run(test())


# --- hooks


def test_hooks_span_a_drain_and_its_waits(t: Harness) -> None:
    seen: list[str] = []

    @t.app.lifespan
    @asynccontextmanager
    async def pool() -> AsyncIterator[None]:
        seen.append("open")
        yield
        seen.append("close")

    @t.app.on_worker_start
    def start() -> None:
        seen.append("start")

    @t.app.task
    def child() -> None:
        seen.append("child")

    @t.app.task
    def parent() -> None:
        child.submit().result()
        seen.append("parent")

    parent.submit()
    t.drain(check=True)
    assert seen == ["open", "start", "child", "parent", "close"]


def test_a_hook_that_fails_fails_the_drain(t: Harness) -> None:
    @t.app.on_worker_start
    def start() -> None:
        raise Declined("no pool")

    declare(t.app, []).submit(1)
    with pytest.raises(Declined, match="no pool"):
        t.drain()


# --- what was submitted


def test_assertions_bind_arguments_as_calls_do(t: Harness) -> None:
    charge = declare(t.app, [])
    charge.submit(1)
    charge.submit(order=1, amount=10)
    charge.submit(2, 20)
    assert [each.status for each in t.assert_submitted(charge, 1, times=2)] == [Status.REGISTERED] * 2
    t.assert_submitted(charge, 2, amount=20)
    t.assert_submitted("charge", ANY, 20)
    t.assert_submitted(charge, times=3)
    t.assert_submitted(charge, 1, times=None)
    t.assert_not_submitted(charge, 3)
    t.drain()
    assert [each.status for each in t.submitted(charge)] == [Status.SUCCESS] * 3
    t.forget_submitted()
    t.assert_not_submitted(charge)
    with pytest.raises(TypeError):
        t.assert_submitted(charge, nonsense=1)


def test_what_does_not_hold_is_told_with_what_comes_near(t: Harness) -> None:
    charge = declare(t.app, [])

    @t.app.task(queue="mail")
    def mail(to: str) -> None: ...

    with pytest.raises(AssertionError, match="Nothing was submitted at all"):
        t.assert_submitted(charge, 1)
    mail.options(key="a", delay="5m").submit("a")
    with pytest.raises(AssertionError) as caught:
        t.assert_submitted(charge, 1)
    assert str(caught.value).splitlines() == [
        "charge(1) was submitted never, and not once as expected.",
        "Other tasks were:",
        "  mail('a')  [registered, queue mail, key 'a', delay 5m]",
    ]
    charge.submit(7, amount=7)
    charge.submit(1, amount=20)
    with pytest.raises(AssertionError) as caught:
        t.assert_submitted(charge, 1, amount=99)
    assert str(caught.value).splitlines() == [
        "charge(1, amount=99) was submitted never, and not once as expected.",
        "Of this task there are, the nearest first:",
        "  charge(1, amount=20)  [registered]  differs in amount: 20 instead of 99",
        "  charge(7, amount=7)  [registered]  differs in order: 7 instead of 1, amount: 7 instead of 99",
    ]
    with pytest.raises(AssertionError, match=r"charge\(1, 20\) was submitted once, and not never"):
        t.assert_not_submitted(charge, 1, 20)
    with pytest.raises(AssertionError, match=r"whatever its arguments\) was submitted twice, and not once"):
        t.assert_submitted(charge)


# --- the app of a user


def test_an_app_is_as_before_after_the_block(tmp_path: Path) -> None:
    done: list[Any] = []
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        charge = declare(app, done)
        real = charge.submit(1)
        url = app.url
        with testing_app(app) as t:
            assert app.invocations() == []
            charge.submit(2)
            app.close()  # as the code under test may do
            assert len(app.invocations()) == 1
            t.drain(check=True)
        assert (app.url, [record.id for record in app.invocations()]) == (url, [real.id])
        with app.runner():
            assert real.result(timeout=patient(20)) == "receipt 1"
    assert done == [(2, 10), (1, 10)]


def test_an_app_that_was_never_used_is_not_opened(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/shop.db")
    charge = declare(app, [])
    with testing_app(app) as t:
        charge.submit(1)
        t.drain(check=True)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_a_test_are_the_same() -> None:
    def once() -> list[Any]:
        with testing_app(start=1_800_000_000) as t:
            charge = declare(t.app, [], retries=Retries(3))
            ids = [charge.submit(1, 5000).id, *[each.id for each in charge.map([2, 3])]]
            report = t.drain(until="1h")
            return [ids, repr(report), t.app.invocation(ids[0]).history()]

    assert once() == once()


def test_hundreds_of_calls_take_a_moment(t: Harness) -> None:
    done: list[Any] = []
    charge = declare(t.app, done)
    charge.map(range(300))
    assert len(t.drain(check=True).succeeded) == len(done) == 300
