"""Keyed steps that a new version of a body has before what the log has: on virtual time, in a fleet."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.support.fleet import APP, Fleet, virtually
from tests.support.runs import Declared, submit

from holdfast.errors import WorkerLost
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.runtime.engine import Engine
from holdfast.workflows import events as e
from holdfast.workflows.api import sleep
from holdfast.workflows.replaying import read_run, replayed

NAP_SECONDS = 40.0


class Versions:
    """Two versions of a workflow: the second one has a keyed step before the recorded sleep."""

    def __init__(self, **bill: Any) -> None:
        self.ran: Counter[str] = Counter()
        self.bill_seconds = 0.0
        self.fails = 0
        self.caught: list[str] = []
        self.old, self.new = Declared(), Declared()
        self.old_order = self._declare(self.old, bill, has_bill=False)
        self.new_order = self._declare(self.new, bill, has_bill=True)

    def _declare(self, shop: Declared, options: dict[str, Any], *, has_bill: bool) -> Any:
        @shop.app.step(name="charge")
        async def charge() -> None:
            self.ran["charge"] += 1

        @shop.app.step(name="bill", **options)
        async def bill() -> str:
            self.ran["bill"] += 1
            await asyncio.sleep(self.bill_seconds)
            if self.ran["bill"] <= self.fails:
                raise OSError("no paper")
            return "billed"

        @shop.app.step(name="ship")
        async def ship() -> None:
            self.ran["ship"] += 1

        @shop.app.step(name="refund")
        async def refund() -> None:
            self.ran["refund"] += 1

        @shop.app.workflow(name="order", cancel_grace="60s")
        async def order() -> str:
            try:
                await charge()
                if has_bill:
                    try:
                        await bill.options(key="k")()
                    except WorkerLost:
                        self.caught.append("lost")
                await sleep(NAP_SECONDS)
                await ship()
                await sleep(NAP_SECONDS)
            except asyncio.CancelledError:
                await refund()
                raise
            return "done"

        return order

    async def left(self, fleet: Fleet, *, with_bill: bool = False) -> str:
        """Run one of the versions until it sleeps; then its runner ends."""
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, order = (self.new, self.new_order) if with_bill else (self.old, self.old_order)
        member = await fleet.started(*shop.tasks)
        id = await submit(fleet, order)
        await fleet.until_status(id, Status.SUSPENDED)
        await member.stop()
        return id

    async def billing(self) -> bool:
        return self.ran["bill"] > 0


def ends_of(events: list[e.Event], call: str) -> int:
    return sum(event.call == call and event.type in e.ENDS for event in events)


async def log_of(fleet: Fleet, id: str) -> list[e.Event]:
    return [event for page in await fleet.store.read_log(APP, InvocationId(id), limit=1000) for event in e.decode(page)]


async def fits(fleet: Fleet, engine: Engine, record: InvocationRecord, versions: Versions) -> None:
    stored = await read_run(engine, record)
    report = replayed(stored, versions.new_order.definition, engine)
    report.raise_mismatch()
    assert report.has_ended, report


@pytest.mark.parametrize("seconds", [0.0, 0.2, 7.0])
@pytest.mark.parametrize("options", [{}, {"repeatable": True}, {"at_most_once": True}, {"queue": "far"}], ids=str)
def test_an_added_step_runs_once_and_the_recorded_sleeps_stay(options: dict[str, Any], seconds: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions(**options)
        versions.bill_seconds = seconds
        id = await versions.left(fleet)
        member = await fleet.started(*versions.new.tasks, concurrency=1, queues=["default", "far"])
        record = await fleet.end(id, within=4 * NAP_SECONDS)
        assert record.status is Status.SUCCESS, record.reason
        assert versions.ran == {"charge": 1, "bill": 1, "ship": 1}
        assert ends_of(await log_of(fleet, id), "bill@k") == 1
        assert sum(entry.status is Status.SUSPENDED for entry in record.history) >= 2  # it was replayed again
        await fits(fleet, member.engine, record, versions)

    virtually(scenario)


def test_a_step_that_was_removed_leaves_the_recorded_sleep_as_it_was() -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions()
        versions.bill_seconds = 3.0
        id = await versions.left(fleet, with_bill=True)
        due = (await fleet.record(id)).wake_at
        assert due is not None
        await fleet.started(*versions.old.tasks)
        record = await fleet.end(id, within=4 * NAP_SECONDS)
        assert record.status is Status.SUCCESS, record.reason
        assert versions.ran == {"charge": 1, "bill": 1, "ship": 1}
        (slept, _) = [event for event in await log_of(fleet, id) if event.type == e.WAIT_COMPLETED]
        assert slept.due == due

    virtually(scenario)


def test_an_added_step_is_tried_again_when_it_fails() -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions(retries=Fixed(3, 2.0))
        versions.fails, versions.bill_seconds = 2, 0.05
        id = await versions.left(fleet)
        await fleet.started(*versions.new.tasks)
        record = await fleet.end(id, within=4 * NAP_SECONDS)
        assert record.status is Status.SUCCESS, record.reason
        assert versions.ran == {"charge": 1, "bill": 3, "ship": 1}

    virtually(scenario)


def test_a_cancel_while_an_added_step_runs_reaches_the_body() -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions()
        versions.bill_seconds = 5.0
        id = await versions.left(fleet)
        await fleet.started(*versions.new.tasks)
        await fleet.until(versions.billing)
        client = fleet.engine(fleet.store)
        await client.canceller.cancel([InvocationId(id)], by="a test")
        record = await fleet.end(id, within=30.0)
        assert record.status is Status.CANCELLED
        assert versions.ran == {"charge": 1, "bill": 1, "refund": 1}
        assert [event.type for event in await log_of(fleet, id)].count(e.CANCEL_REQUESTED) == 1

    virtually(scenario)


def test_a_runner_that_stops_hands_over_between_the_attempts_of_an_added_step() -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions(retries=Fixed(3, 20.0))
        versions.fails = 1
        id = await versions.left(fleet)
        one = await fleet.started(*versions.new.tasks)
        await fleet.until(versions.billing)
        await asyncio.sleep(1.0)
        began = fleet.clock.now()
        await one.stop()
        assert fleet.clock.now() - began < 5.0
        await fleet.started(*versions.new.tasks)
        record = await fleet.end(id, within=4 * NAP_SECONDS)
        assert record.status is Status.SUCCESS, record.reason
        assert versions.ran == {"charge": 1, "bill": 2, "ship": 1}
        retrying = [event for event in await log_of(fleet, id) if event.type == e.STEP_RETRYING]
        assert len(retrying) == 1

    virtually(scenario)


def test_an_added_step_that_may_run_once_is_not_run_again_by_the_next_owner() -> None:
    async def scenario(fleet: Fleet) -> None:
        versions = Versions(at_most_once=True)
        versions.bill_seconds = 600.0
        id = await versions.left(fleet)
        one = await fleet.started(*versions.new.tasks)
        await fleet.until(versions.billing)
        one.crash()
        await fleet.started(*versions.new.tasks)
        record = await fleet.end(id, within=10 * NAP_SECONDS)
        assert record.status is Status.SUCCESS, record.reason
        assert versions.ran == {"charge": 1, "bill": 1, "ship": 1}
        assert set(versions.caught) == {"lost"}

    virtually(scenario)
