"""Attempts of steps at awkward moments: on virtual time, in a fleet of runners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.support.fleet import APP, Fleet, Line, virtually
from tests.support.runs import Declared, submit

from holdfast.errors import RetryLater
from holdfast.ids import InvocationId
from holdfast.model.changes import Push
from holdfast.model.decoding import LATEST
from holdfast.model.records import InboxEntry
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.workflows import events as e
from holdfast.workflows import run
from holdfast.workflows.api import sleep
from holdfast.workflows.children import WAKE
from holdfast.workflows.host import Host


class SlowLog(Line):
    """A line on which pages take their time."""

    async def append(self, pages: object) -> object:
        await asyncio.sleep(0.4)
        return await super().__getattr__("append")(pages)


async def log_of(fleet: Fleet, id: str) -> list[e.Event]:
    pages = await fleet.store.read_log(APP, InvocationId(id), limit=1000)
    return [event for page in pages for event in e.decode(page)]


def test_a_step_that_may_run_once_does_not_begin_after_its_cancel_was_recorded() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop, seen = Declared(), list[str]()

        @shop.app.step(name="once", at_most_once=True)
        async def once() -> None:
            seen.append("once")

        @shop.app.step(name="look", repeatable=True)
        async def look() -> None:
            await asyncio.sleep(0.05)

        @shop.app.step(name="refund")
        async def refund() -> None:
            seen.append("refund")

        @shop.app.workflow(name="order")
        async def order() -> str:
            task = asyncio.create_task(once())
            await look()
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                await refund()
            return "done"

        await fleet.started(*shop.tasks, make_line=SlowLog)
        id = await submit(fleet, order)
        record = await fleet.end(id)
        assert record.status is Status.SUCCESS, record.reason
        assert seen == ["refund"]
        ends = [event for event in await log_of(fleet, id) if event.call == "once#1" and event.type in e.ENDS]
        assert [end.why for end in ends] == ["cancelled"]

    virtually(scenario)


def test_a_run_whose_body_has_returned_ends_after_the_next_attempt_of_its_steps() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.5
        shop, tries = Declared(), list[float]()

        @shop.app.step(name="flaky", retries=Fixed(5, 10.0))
        async def flaky() -> None:
            tries.append(fleet.clock.now())
            if len(tries) < 3:
                raise OSError("not yet")

        @shop.app.step(name="quick")
        async def quick() -> None:
            await asyncio.sleep(0.3)

        @shop.app.workflow(name="order")
        async def order() -> str:
            task = asyncio.create_task(flaky())
            await quick()
            assert not task.done()
            return "done"

        await fleet.started(*shop.tasks)
        id = await submit(fleet, order)
        record = await fleet.end(id)
        assert (record.status, fleet.codec.decode(record.result or b"")) == (Status.SUCCESS, "done")
        assert len(tries) == 3
        assert Status.SUSPENDED in {entry.status for entry in record.history}  # it does not wait in memory

    virtually(scenario)


def test_a_cancelled_run_does_not_wait_for_the_next_attempt_of_a_step_that_nobody_awaits() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop, tries = Declared(), list[int]()

        @shop.app.step(name="flaky", retries=Fixed(5, 10.0))
        async def flaky() -> None:
            tries.append(1)
            raise OSError("not yet")

        @shop.app.workflow(name="order", cancel_grace="60s")
        async def order() -> None:
            task = asyncio.create_task(flaky())
            await sleep(600.0)
            await task

        async def tried() -> bool:
            return bool(tries)

        await fleet.started(*shop.tasks)
        id = InvocationId(await submit(fleet, order))
        await fleet.until(tried)
        await asyncio.sleep(1.0)
        await fleet.engine(fleet.store).canceller.cancel([id], by="a test")
        assert (await fleet.end(id, within=5.0)).status is Status.CANCELLED
        assert tries == [1]

    virtually(scenario)


def test_the_events_of_a_run_are_counted_as_its_log_has_them() -> None:
    """The limit is met while the run goes on, and not by the next owner only."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings |= {"workflow_linger_seconds": 0.1, "workflow_max_events": 100}
        shop, ran = Declared(), list[int]()

        @shop.app.step(name="count")
        async def count(number: int) -> None:
            ran.append(number)

        @shop.app.workflow(name="short")
        async def short() -> str:
            for number in range(30):
                await count(number)
            await sleep(60.0)
            return "done"

        @shop.app.workflow(name="long")
        async def long() -> None:
            for number in range(80):
                await count(number)
            await sleep(60.0)

        await fleet.started(*shop.tasks)
        assert (await fleet.end(await submit(fleet, short))).status is Status.SUCCESS
        ran.clear()
        id = await submit(fleet, long)
        record = await fleet.end(id)
        assert (record.status, record.epoch) == (Status.FAILED, 1)
        assert "workflow_max_events" in record.reason
        assert len(ran) < 40
        assert len(await log_of(fleet, id)) <= 105

    virtually(scenario)


def test_a_step_that_may_run_once_is_not_run_later() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop, tries = Declared(), list[int]()

        @shop.app.step(name="once", at_most_once=True)
        async def once() -> None:
            tries.append(1)
            raise RetryLater(1)

        @shop.app.workflow(name="order")
        async def order() -> str:
            try:
                await once()
            except Exception as error:
                return type(error).__name__
            return "done"

        await fleet.started(*shop.tasks)
        record = await fleet.end(await submit(fleet, order))
        assert fleet.codec.decode(record.result or b"") == "RetryLater"
        assert tries == [1]

    virtually(scenario)


def test_a_long_replay_lets_others_go_on_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of a few milliseconds: here of one event each, since virtual time stands still in a replay."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, replayed, turns = Declared(), list[int](), list[int]()

        @shop.app.step(name="count")
        async def count(number: int) -> int:
            return number

        @shop.app.workflow(name="long")
        async def long() -> None:
            for number in range(50):
                replayed.append(await count(number))
            await sleep(60.0)

        def call_soon(host: Host, function: Callable[[], None]) -> None:
            turns.append(len(replayed))
            host.loop.call_soon(function)

        await fleet.started(*shop.tasks)
        id = await submit(fleet, long)
        await fleet.until_status(id, Status.SUSPENDED)
        replayed.clear()
        monkeypatch.setattr(run, "SLICE_SECONDS", -1.0)
        monkeypatch.setattr(Host, "call_soon", call_soon)
        await fleet.end(id)
        assert set(turns) >= set(range(1, 50))

    virtually(scenario)


def test_calls_that_are_not_awaited_are_named_when_the_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    """To a type checker a plain step is a plain function: its call needs no await there."""

    async def scenario(fleet: Fleet) -> None:
        shop, packed = Declared(), list[str]()

        @shop.app.step(name="pack")
        def pack(order: str) -> None:
            packed.append(order)

        @shop.app.workflow(name="invoice")
        async def invoice() -> None: ...

        @shop.app.workflow(name="order")
        async def order() -> None:
            pack("one")
            invoice()  # type: ignore[unused-coroutine]
            asyncio.create_task(invoice()).cancel()  # that is no mistake
            await asyncio.gather(*[pack(each) for each in ("two", "three")])  # type: ignore[call-overload]

        await fleet.started(*shop.tasks)
        assert (await fleet.end(await submit(fleet, order))).status is Status.SUCCESS
        assert packed == ["two", "three"]
        (why,) = [record.getMessage() for record in caplog.records if record.name == "holdfast.workflows"]
        line = order.definition.function.__code__.co_firstlineno
        assert f"pack ({__file__}:{line + 2}), invoice ({__file__}:{line + 3})" in why

    virtually(scenario)


@pytest.mark.parametrize("how", ["a retry", "a time limit"])
def test_a_moment_beyond_every_calendar_is_the_last_one(how: str) -> None:
    """It would make the record unreadable."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop = Declared()

        @shop.app.step(name="late", retries=Fixed(3, 9e11))
        async def late() -> None:
            raise ValueError

        @shop.app.task(name="never", queue="nobody")
        async def never() -> None: ...

        @shop.app.workflow(name="order", timeout=None if how == "a retry" else 9e11)
        async def order() -> None:
            await (late() if how == "a retry" else never.submit())

        await fleet.started(*shop.tasks, queues=("default",))
        record = await fleet.until_status(await submit(fleet, order), Status.SUSPENDED)
        assert record.wake_at == LATEST

    virtually(scenario)


@pytest.mark.parametrize("is_careful", [False, True])
def test_a_step_that_was_sent_to_another_queue_stays_there_when_the_code_calls_it_back(is_careful: bool) -> None:
    """It may run there: another one here would be a second one at the same time."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        ran: list[str] = []

        def deployed(queue: str | None) -> Declared:
            shop = Declared()

            @shop.app.step(name="charge", queue=queue, at_most_once=is_careful)
            async def charge() -> str:
                ran.append("charge")
                return "paid"

            @shop.app.workflow(name="order")
            async def order() -> str:
                return await charge()

            return shop

        old, new = deployed("far"), deployed(None)
        first = await fleet.started(*old.tasks, queues=("default",))
        id = await submit(fleet, old.app.tasks["order"])
        await fleet.until_status(id, Status.SUSPENDED)
        await first.stop()
        await fleet.started(*new.tasks, queues=("default",))
        await fleet.store.apply([pushed_wake(fleet, id)])
        await asyncio.sleep(10.0)
        assert ran == []
        await fleet.started(*new.tasks, queues=("far",))
        record = await fleet.end(id)
        assert (record.status, ran) == (Status.SUCCESS, ["charge"])

    virtually(scenario)


def pushed_wake(fleet: Fleet, id: str) -> Push:
    entry = InboxEntry(id="wake:1", kind=WAKE, at=fleet.clock.now())
    return Push(app=APP, id=InvocationId(id), entry=entry, operation="w", at=entry.at, why="a test")
