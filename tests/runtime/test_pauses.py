"""Queues that are paused, over a fleet in virtual time: who knows of it when, and what becomes of the work."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.runtime.test_claiming_ahead import costly
from tests.runtime.test_worker import Harness, running
from tests.runtime.test_worker import nap as short_nap
from tests.support.engines import make_worker
from tests.support.fleet import APP, CORE_APP, HEARTBEAT, LATENCY, Fleet, add, definition, nap, virtually

from holdfast.executors.local import InlineExecutor
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import PAUSES, READY, Hint, Serves
from holdfast.model.status import FINAL, Status
from holdfast.runtime import hints as fallback
from holdfast.runtime import pauses
from holdfast.runtime.claim import Permit
from holdfast.runtime.pauses import pause_queue, resume_queue
from holdfast.store.contract import Store
from holdfast.testing.virtual import VirtualClock, run_virtual


def pause_of(queue: str, operation: str = "p") -> QueuePause:
    return QueuePause(app=APP, name=queue, at=0.0, by="ann", reason="", operation=operation)


async def statuses(fleet: Fleet, *ids: str) -> list[Status]:
    return [(await fleet.record(id)).status for id in ids]


def test_a_pause_is_heard_of_with_the_next_heartbeat_at_the_latest_and_so_is_its_end() -> None:
    async def scenario(fleet: Fleet) -> None:
        members = [await fleet.started(add) for _ in range(2)]
        await fleet.end(await fleet.submit("add", 1, 1, queue="mail"))
        await pause_queue(fleet.store, pause_of("mail"))
        await asyncio.sleep(HEARTBEAT + 10 * LATENCY)
        waiting = [await fleet.submit("add", n, n, queue="mail") for n in range(5)]
        other = await fleet.submit("add", 2, 3)
        await fleet.end(other)
        await asyncio.sleep(60)
        assert await statuses(fleet, *waiting) == [Status.REGISTERED] * 5
        assert len(members) == 2
        assert await resume_queue(fleet.store, APP, "mail", "r")
        began = fleet.clock.now()
        for id in waiting:
            assert (await fleet.end(id)).status is Status.SUCCESS
        assert fleet.clock.now() - began < HEARTBEAT + 1.5
        assert await fleet.recoveries() == 0

    virtually(scenario)


def test_a_hint_tells_of_a_pause_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(10)
        await pause_queue(fleet.store, pause_of("default"))
        member.engine.hub.send(Hint(PAUSES, ("default",)))
        await asyncio.sleep(10 * LATENCY)
        id = await fleet.submit("add", 1, 1)
        await asyncio.sleep(30)
        assert await statuses(fleet, id) == [Status.REGISTERED]
        await resume_queue(fleet.store, APP, "default", "r")
        member.engine.hub.send(Hint(PAUSES, ("default",)))
        began = fleet.clock.now()
        await fleet.end(id)
        assert fleet.clock.now() - began < 0.2

    virtually(scenario)


@pytest.mark.parametrize("which", [1, 2], ids=["of a new runner", "for a hint"])
def test_a_pause_that_comes_during_a_look_is_heard_of(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun = pauses.pauses_of, list[str]()

    async def work() -> None:
        begun.append("once")

    async def scenario(fleet: Fleet) -> None:
        fallback.switch("off")
        member, looks = fleet.member(work), 0

        async def and_then_paused(store: Store, app: str) -> list[QueuePause]:
            nonlocal looks
            looks += 1
            found = await read(store, app)
            if looks == which:
                await pause_queue(fleet.store, pause_of("default"))
                member.engine.hub._receive(Hint(PAUSES, ("default",)))
            return found

        monkeypatch.setattr(pauses, "pauses_of", and_then_paused)
        await member.start()
        await asyncio.sleep(1.0)
        if looks < which:
            member.engine.hub._receive(Hint(PAUSES, ()))
        await asyncio.sleep(10 * LATENCY)
        id = await fleet.submit("work")
        member.engine.hub.send(Hint(READY, ()))
        await asyncio.sleep(5.0)
        assert (await statuses(fleet, id), begun) == ([Status.REGISTERED], [])

    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


def test_what_runs_goes_on_and_a_runner_that_starts_takes_nothing_of_a_paused_queue() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.started(nap)
        runs = await fleet.submit("nap", 20)
        await fleet.until_status(runs, Status.RUNNING)
        await pause_queue(fleet.store, pause_of("default"))
        second = await fleet.started(nap)
        await asyncio.sleep(HEARTBEAT + 1)  # by then the first one knows as well
        waits = await fleet.submit("nap", 1)
        assert (await fleet.end(runs)).status is Status.SUCCESS
        await asyncio.sleep(20)
        assert await statuses(fleet, waits) == [Status.REGISTERED]
        for member in (first, second):
            await member.stop()
        assert await statuses(fleet, waits) == [Status.REGISTERED]

    virtually(scenario)


def test_core_tasks_are_not_paused_with_the_queue_of_the_same_name() -> None:
    async def scenario(fleet: Fleet) -> None:
        await pause_queue(fleet.store, pause_of("default"))
        await fleet.started(add)
        await asyncio.sleep(40)
        core = fleet.store._of(CORE_APP)
        assert len(core) > 2
        assert {record.status for record in core if record.created_at < fleet.store.now() - 5} <= FINAL

    virtually(scenario)


@pytest.mark.parametrize("what", ["cut", "errors"])
def test_while_the_store_is_away_the_last_word_holds(what: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await pause_queue(fleet.store, pause_of("mail"))
        await asyncio.sleep(5)
        if what == "cut":
            member.line.cut = True
        else:
            member.line.errors["entries"] = RuntimeError("a bug")
        await asyncio.sleep(5)
        id = await fleet.submit("add", 1, 1, queue="mail")
        await asyncio.sleep(4)
        member.line.cut = False
        member.line.errors.clear()
        await asyncio.sleep(20)
        assert await statuses(fleet, id) == [Status.REGISTERED]
        await resume_queue(fleet.store, APP, "mail", "r")
        await fleet.end(id)

    virtually(scenario)


def test_those_who_wait_for_a_slot_in_a_paused_queue_are_passed_over() -> None:
    """Else one of them would count as on its way for ever, and the slot would stay free."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.started(replace(definition(nap), limit=Limit(1)))
        first = await fleet.submit("nap", 10, limit_key="nap")
        await fleet.until_status(first, Status.RUNNING)
        paused = [await fleet.submit("nap", 1, limit_key="nap", queue="mail") for _ in range(2)]
        other = await fleet.submit("nap", 1, limit_key="nap")
        await fleet.until_status(other, Status.CONCURRENCY_CONTROLLED)
        await pause_queue(fleet.store, pause_of("mail"))
        assert (await fleet.end(other)).status is Status.SUCCESS
        assert not set(await statuses(fleet, *paused)) & FINAL
        await resume_queue(fleet.store, APP, "mail", "r")
        for id in paused:
            await fleet.end(id)

    virtually(scenario)


def test_what_was_claimed_ahead_of_a_paused_queue_goes_back_and_what_runs_goes_on() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, costly(clock))
        permit = Permit(clock)
        permit.grant(float("inf"))
        worker = make_worker(
            harness.engine,
            [definition(short_nap)],
            owner="r/0",
            serves=Serves(tasks=frozenset({"nap"})),
            concurrency=2,
            permit=permit,
            drain_timeout_seconds=30.0,
            make_executor=lambda kind, deliver: InlineExecutor(deliver),
        )
        life = await running(worker)
        await harness.end(await harness.submit("nap", 0.01))  # now it expects short calls
        ids = [await harness.submit("nap", 1.0) for _ in range(30)]
        await asyncio.sleep(0.5)
        counts = await harness.store.counts("app")
        assert counts.get("pending", 0) > 0
        permit.pause(frozenset({"default"}))
        await asyncio.sleep(5)
        counts = await harness.store.counts("app")
        assert set(counts) == {"success", "registered", "rerouted"}, counts
        back = [await harness.record(id) for id in ids]
        assert "its queue is paused" in {record.reason for record in back}
        permit.pause(frozenset())
        for record in await harness.end(*ids):
            assert record.status is Status.SUCCESS
        worker.stop()
        await life

    run_virtual(main)
