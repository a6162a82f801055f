"""The owner of a run, and what changes while it reads, writes, waits or leaves: on virtual time, in a fleet of runners.

Each test is about something that happens at an awkward moment. What a body may do: test_loop.py. Crashes at each point
of each write: tests/faults.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace
from tests.support.fleet import APP, Fleet, Line, virtually
from tests.support.patience import patient
from tests.support.runs import Declared, submit

from holdfast import context, hook
from holdfast.errors import WorkerLost
from holdfast.ids import InvocationId
from holdfast.model.changes import PARENT, Change, Push
from holdfast.model.claims import Claim
from holdfast.model.log import Page
from holdfast.model.records import INBOX, WAITS, Hint, InboxEntry, InvocationRecord, ReplyTo, RunState
from holdfast.model.state_writes import MAX_INBOX_ENTRIES
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.runtime import hints as fallback
from holdfast.runtime.definition import ExecutorKind
from holdfast.store.memory.store import MemoryStore
from holdfast.workflows import events as e
from holdfast.workflows.api import sleep
from holdfast.workflows.children import WAKE
from holdfast.workflows.hooks_records import name_of
from holdfast.workflows.hooks_resuming import Sent, resumed
from holdfast.workflows.looking import Looking
from holdfast.workflows.service import IDLE_SECONDS, Waits

PROMPT_SECONDS = patient(3.0)
LONG_SECONDS = 3600.0  # the longest time for which a run may linger

Meanwhile = Callable[[], Awaitable[object]]


class Meddled(Line):
    """A line on which something happens once, before a change arrives, or when the answer of a read is on its way."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.on_change: dict[str, Meanwhile] = {}  # by the name of the change
        self.on_answer: dict[str, Meanwhile] = {}  # by the name of the read
        self.append_seconds = 0.0

    async def apply(self, changes: Sequence[Change | Push]) -> Any:
        for change in changes:
            if isinstance(change, Change) and (happen := self.on_change.pop(change.name, None)):
                await happen()
        return await super().__getattr__("apply")(changes)

    async def append(self, pages: Sequence[Page]) -> Any:
        await asyncio.sleep(self.append_seconds)
        return await super().__getattr__("append")(pages)

    async def read_log(self, *args: Any, **named: Any) -> Any:
        return await self._answered("read_log", *args, **named)

    async def find(self, *args: Any, **named: Any) -> Any:
        return await self._answered("find", *args, **named)

    async def _answered(self, name: str, *args: Any, **named: Any) -> Any:
        answer = await super().__getattr__(name)(*args, **named)
        if happen := self.on_answer.pop(name, None):
            await happen()
        return answer


async def log_of(fleet: Fleet, id: str) -> list[Page]:
    return list(await fleet.store.read_log(APP, id, generation=0, after=0, limit=100))


async def events_of(fleet: Fleet, id: str) -> list[str]:
    return [event.type for page in await log_of(fleet, id) for event in e.decode(page)]


async def push_wake(fleet: Fleet, id: str) -> None:
    entry = InboxEntry(id="wake:1", kind=WAKE, at=fleet.clock.now())
    await fleet.store.apply([Push(app=APP, id=id, entry=entry, operation="w", at=entry.at, why="a test")])


def sleeper(shop: Declared, seconds: float) -> Any:
    @shop.app.workflow(name="sleeper")
    async def sleeper() -> str:
        await sleep(seconds)
        return "rested"

    return sleeper


# --- writing


def test_a_step_begins_when_all_that_led_to_it_is_in_the_log() -> None:
    """Results of repeatable steps are delivered before they are durable; what follows from them is not."""

    async def scenario(fleet: Fleet) -> None:
        shop, seen = Declared(), list[list[str]]()

        @shop.app.step(name="price", repeatable=True)
        async def price() -> int:
            return 7

        @shop.app.step(name="charge")
        async def charge(amount: int) -> str:
            seen.append(await events_of(fleet, context().invocation_id))
            return f"paid {amount}"

        @shop.app.workflow(name="checkout")
        async def checkout() -> str:
            return await charge(await price())

        member = await fleet.started(*shop.tasks, make_line=Meddled)
        assert isinstance(member.line, Meddled)
        member.line.append_seconds = 1.0
        record = await fleet.end(await submit(fleet, checkout))
        assert record.status is Status.SUCCESS
        assert [e.STEP_COMPLETED in events for events in seen] == [True]

    virtually(scenario)


def test_steps_that_end_while_a_page_is_written_share_the_next_one() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop = Declared()

        @shop.app.step(name="pack")
        async def pack(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return seconds

        @shop.app.workflow(name="order")
        async def order() -> list[float]:
            return await asyncio.gather(pack(0.0), pack(0.2), pack(0.4))

        member = await fleet.started(*shop.tasks, make_line=Meddled)
        assert isinstance(member.line, Meddled)
        member.line.append_seconds = 1.0
        record = await fleet.end(await submit(fleet, order))
        assert (record.status, record.epoch) == (Status.SUCCESS, 1)
        ends = [
            [event.type for event in e.decode(page)].count(e.STEP_COMPLETED) for page in await log_of(fleet, record.id)
        ]
        assert ends == [1, 2]

    virtually(scenario)


# --- letting go


def test_a_message_that_comes_while_a_run_is_suspended_is_not_missed() -> None:
    """The write that suspends it is refused, since its inbox has moved; then it goes on."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop = Declared()
        workflow = sleeper(shop, 600.0)
        member = await fleet.started(*shop.tasks, make_line=Meddled)
        assert isinstance(member.line, Meddled)
        id = await submit(fleet, workflow)
        member.line.on_change["suspended"] = lambda: push_wake(fleet, id)
        record = await fleet.end(id, within=PROMPT_SECONDS)
        assert not member.line.on_change
        assert await fleet.story(record.id) == ["registered", "pending", "running", "success"]

    virtually(scenario)


def test_a_run_that_messages_keep_busy_stays_in_memory() -> None:
    """It lingers from the last message on. To suspend a second after its first wait cost a replay every second."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 1.0
        shop = Declared()

        @shop.app.workflow(name="listens")
        async def listens() -> list[int]:
            numbers = hook("numbers", int)
            return [await numbers for _ in range(5)]

        await fleet.started(*shop.tasks)
        client = fleet.engine(fleet.store)
        id = await submit(fleet, listens)
        for number in range(4):
            await asyncio.sleep(0.6)
            await resumed(client, name_of("numbers"), Sent(client, number), None)
        assert await fleet.story(id) == ["registered", "pending", "running"]
        await fleet.until_status(id, Status.SUSPENDED)
        await resumed(client, name_of("numbers"), Sent(client, 4), None)
        record = await fleet.end(id)
        assert fleet.codec.decode(record.result or b"") == [0, 1, 2, 3, 4]

    virtually(scenario)


def test_a_run_that_is_loaded_while_its_worker_stops_is_handed_over() -> None:
    """And does not keep the worker until the drain timeout."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop = Declared()
        workflow = sleeper(shop, 60.0)
        member = await fleet.started(*shop.tasks, make_line=Meddled)
        assert isinstance(member.line, Meddled)
        id = await submit(fleet, workflow)

        async def stops() -> None:
            member.runner.stop()
            await asyncio.sleep(0.5)

        member.line.on_answer["read_log"] = stops
        await fleet.until_status(id, Status.RUNNING)
        began = fleet.clock.now()
        assert member.life is not None
        await member.life
        assert fleet.clock.now() - began < PROMPT_SECONDS
        assert (await fleet.story(id))[-2:] == ["suspended", "rerouted"]
        await fleet.started(*shop.tasks)
        assert (await fleet.end(id)).status is Status.SUCCESS

    virtually(scenario)


def test_a_run_that_is_suspended_while_the_services_look_is_woken_in_time() -> None:
    """The look has found no run that sleeps, and the next one is a minute away."""

    async def scenario(fleet: Fleet) -> None:
        line = Meddled(fleet.store)
        engine = fleet.engine(line)  # type: ignore[arg-type]
        waits, now = Waits(engine), fleet.clock.now()

        async def is_suspended() -> None:
            engine.hub.send(Hint(WAITS, (), 1, now + 5.0))

        line.on_answer["find"] = is_suspended
        await waits.sweep()
        looks = line.count("find")
        for seconds, more in ((4.0, 0), (1.5, 1), (10.0, 1), (IDLE_SECONDS, 2)):
            await asyncio.sleep(seconds)
            await waits.sweep()
            assert line.count("find") - looks == more

    virtually(scenario)


# --- owners


def test_an_owner_that_was_taken_for_dead_writes_no_log_beside_the_new_one() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop = Declared()
        gates = [asyncio.Event(), asyncio.Event()]
        attempts: list[int] = []

        @shop.app.step(name="charge")
        async def charge() -> int:
            attempts.append(len(attempts))
            number = attempts[-1]
            await gates[number].wait()
            return number

        @shop.app.workflow(name="checkout")
        async def checkout() -> int:
            return await charge()

        async def begun(count: int) -> bool:
            return len(attempts) == count

        one = await fleet.started(*shop.tasks)
        id = await submit(fleet, checkout)
        await fleet.until(lambda: begun(1))
        await asyncio.sleep(2.0)  # its start is written by then
        await fleet.started(*shop.tasks)
        one.crash()
        await fleet.until(lambda: begun(2))
        gates[0].set()
        one.line.thaw()
        await asyncio.sleep(0.5)
        gates[1].set()
        record = await fleet.end(id)
        assert (record.status, record.epoch) == (Status.SUCCESS, 2)
        assert fleet.codec.decode(record.result or b"") == 1
        pages = await log_of(fleet, id)
        epochs = [page.epoch for page in pages]
        assert epochs == sorted(epochs)
        assert attempts == [0, 1]

    virtually(scenario)


def test_a_run_that_was_cancelled_without_an_owner_is_told_by_its_next_one() -> None:
    """And not by the owner's next look for what is to end: those are switched off."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, said = Declared(), list[str]()

        @shop.app.workflow(name="order")
        async def order() -> None:
            try:
                await sleep(600.0)
            except asyncio.CancelledError:
                said.append("cancelled")
                raise

        one = await fleet.started(*shop.tasks)
        id = InvocationId(await submit(fleet, order))
        await fleet.until_status(id, Status.SUSPENDED)
        await one.stop()
        await fleet.engine(fleet.store).canceller.cancel([id], by="a test")
        assert (await fleet.record(id)).status is Status.REROUTED
        fallback.switch("off")
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        await fleet.started(*shop.tasks)
        assert (await fleet.end(id, within=PROMPT_SECONDS)).status is Status.CANCELLED
        assert said == ["cancelled"]

    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


def test_a_run_that_waits_for_its_child_leaves_it_the_only_slot() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop = Declared()

        @shop.app.workflow(name="child")
        async def child() -> str:
            return "done"

        @shop.app.workflow(name="parent")
        async def parent() -> str:
            return await child()

        await fleet.started(*shop.tasks, concurrency=1)
        record = await fleet.end(await submit(fleet, parent), within=PROMPT_SECONDS)
        assert (record.status, record.epoch) == (Status.SUCCESS, 1)

    virtually(scenario)


# --- messages of another time


def test_the_end_of_a_child_from_before_a_restart_answers_no_call_of_the_new_log() -> None:
    """Calls are numbered from the start again, so that both have the same name."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop = Declared()

        @shop.app.workflow(name="child")
        async def child(name: str) -> str:
            await sleep(10.0)
            return name

        @shop.app.workflow(name="parent")
        async def parent(name: str) -> str:
            if name == "second":
                return await child(name)
            task = asyncio.create_task(child(name))
            await sleep(1.0)
            assert not task.done()
            context().restart("second")
            raise AssertionError("it went on after its restart")

        await fleet.started(*shop.tasks)
        record = await fleet.end(await submit(fleet, parent, "first"))
        assert record.status is Status.SUCCESS, record.error
        assert fleet.codec.decode(record.result or b"") == "second"
        first = await children_of(fleet, record.id)
        assert sorted(str(each.status) for each in first) == ["cancelled", "success"]

    virtually(scenario)


def test_the_sleeps_of_a_restarted_run_are_as_long_as_those_before() -> None:
    """The time of a body begins with its log, not with the first start of its run."""

    async def scenario(fleet: Fleet) -> None:
        shop = Declared()

        @shop.app.workflow(name="weekly")
        async def weekly(left: int) -> str:
            await sleep(100.0)
            if left:
                context().restart(left - 1)
            return "done"

        await fleet.started(*shop.tasks)
        began = fleet.clock.now()
        record = await fleet.end(await submit(fleet, weekly, 2), within=600.0)
        assert record.status is Status.SUCCESS
        assert 300.0 <= fleet.clock.now() - began < 310.0

    virtually(scenario)


async def children_of(fleet: Fleet, id: str) -> list[InvocationRecord]:
    return [record for record in fleet.store._of(APP) if record.parent_id == id]


def test_a_child_that_is_not_awaited_ends_with_its_run() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop = Declared()

        @shop.app.workflow(name="child")
        async def child() -> None:
            await sleep(600.0)

        @shop.app.workflow(name="parent")
        async def parent() -> str:
            task = asyncio.create_task(child())
            await sleep(0.5)
            return f"done, and the child is {task.done()}"

        await fleet.started(*shop.tasks)
        id = await submit(fleet, parent)
        assert (await fleet.end(id)).status is Status.SUCCESS
        (below,) = await children_of(fleet, id)
        assert (await fleet.end(below.id, within=PROMPT_SECONDS)).status is Status.CANCELLED

    virtually(scenario)


def test_a_wake_reaches_a_retry_that_an_earlier_owner_has_put_off() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, tries = Declared(), list[int]()

        @shop.app.step(name="ship", retries=Fixed(3, "1h"))
        async def ship() -> str:
            tries.append(1)
            if len(tries) == 1:
                raise OSError("no truck")
            return "shipped"

        @shop.app.workflow(name="order")
        async def order() -> str:
            return await ship()

        await fleet.started(*shop.tasks)
        id = await submit(fleet, order)
        suspended = await fleet.until_status(id, Status.SUSPENDED)
        client = fleet.engine(fleet.store)
        await Looking().wake(client, suspended)
        record = await fleet.end(id, within=PROMPT_SECONDS)
        assert (record.status, len(tries)) == (Status.SUCCESS, 2)

    virtually(scenario)


# --- two things at once


def test_a_result_that_may_be_repeated_does_not_overtake_one_that_is_being_written() -> None:
    """A replay delivers by the log: the body would see another order."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, orders = Declared(), list[tuple[str, ...]]()

        @shop.app.step(name="charge")
        async def charge() -> str:
            return "charge"

        @shop.app.step(name="look", repeatable=True)
        async def look() -> str:
            await asyncio.sleep(0.5)
            return "look"

        @shop.app.workflow(name="order")
        async def order() -> list[str]:
            seen: list[str] = []

            async def note(call: Coroutine[Any, Any, str]) -> None:
                seen.append(await call)

            await asyncio.gather(note(charge()), note(look()))
            orders.append(tuple(seen))
            await sleep(60.0)
            return seen

        member = await fleet.started(*shop.tasks, make_line=Meddled)
        assert isinstance(member.line, Meddled)
        member.line.append_seconds = 1.0
        record = await fleet.end(await submit(fleet, order))
        assert (record.status, record.epoch) == (Status.SUCCESS, 2)
        assert orders == [("charge", "look")] * 2

    virtually(scenario)


def test_a_run_that_is_suspended_is_woken_for_its_timeout() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop = Declared()

        @shop.app.workflow(name="order", timeout="20s")
        async def order() -> None:
            await sleep(600.0)

        await fleet.started(*shop.tasks)
        id = await submit(fleet, order)
        await fleet.until_status(id, Status.SUSPENDED)
        record = await fleet.end(id, within=25.0)
        assert record.status is Status.FAILED
        assert "timed out after 20 s" in record.reason

    virtually(scenario)


def test_a_step_that_may_run_once_is_not_run_again_by_the_next_owner() -> None:
    async def scenario(fleet: Fleet) -> None:
        shop, calls = Declared(), list[int]()

        @shop.app.step(name="charge", at_most_once=True)
        async def charge() -> None:
            calls.append(1)
            await asyncio.sleep(600.0)

        @shop.app.workflow(name="checkout")
        async def checkout() -> str:
            try:
                await charge()
            except WorkerLost:
                return "ask the bank"
            return "paid"

        async def begun() -> bool:
            return bool(calls)

        one = await fleet.started(*shop.tasks)
        id = await submit(fleet, checkout)
        await fleet.until(begun)
        one.crash()
        await fleet.started(*shop.tasks)
        record = await fleet.end(id)
        assert fleet.codec.decode(record.result or b"") == "ask the bank"
        assert calls == [1]

    virtually(scenario)


def test_a_run_that_goes_on_takes_its_slot_again() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop, began = Declared(), list[str]()

        @shop.app.step(name="pack")
        async def pack() -> None:
            began.append("pack")
            await asyncio.sleep(30.0)

        @shop.app.workflow(name="order")
        async def order() -> None:
            await sleep(5.0)
            await pack()

        @shop.app.task(name="other")
        async def other() -> None:
            began.append("other")

        async def packs() -> bool:
            return began == ["pack"]

        await fleet.started(*shop.tasks, concurrency=1)
        await submit(fleet, order)
        await fleet.until(packs)
        id = await submit(fleet, other)
        await asyncio.sleep(20.0)
        assert began == ["pack"]
        assert (await fleet.end(id)).status is Status.SUCCESS

    virtually(scenario)


def test_a_body_goes_on_when_there_is_a_slot_for_it() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop, said = Declared(), list[str]()

        @shop.app.workflow(name="order")
        async def order() -> None:
            said.append("order waits")
            await sleep(5.0)
            said.append("order goes on")

        @shop.app.task(name="other")
        async def other() -> None:
            said.append("other begins")
            await asyncio.sleep(30.0)
            said.append("other ends")

        async def waits() -> bool:
            return said == ["order waits"]

        await fleet.started(*shop.tasks, concurrency=1)
        id = await submit(fleet, order)
        await fleet.until(waits)
        await submit(fleet, other)
        assert (await fleet.end(id)).status is Status.SUCCESS
        assert said == ["order waits", "other begins", "other ends", "order goes on"]

    virtually(scenario)


def test_who_was_taken_for_dead_does_not_hand_over_the_run_of_the_new_owner() -> None:
    """It reads the run once more before it learns of its own death."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = LONG_SECONDS
        shop = Declared()
        workflow = sleeper(shop, 600.0)
        one = await fleet.started(*shop.tasks)
        id = await submit(fleet, workflow)
        await fleet.until_status(id, Status.RUNNING)
        two = await fleet.started(*shop.tasks)
        one.crash()

        async def is_taken() -> bool:
            found = await fleet.record(id)
            return found.status is Status.RUNNING and (found.owner or "").startswith(two.id)

        await fleet.until(is_taken)
        one.line.swallowed["heartbeat"] = 100
        one.line.thaw()
        one.engine.hub.send(Hint(INBOX, (id,)))
        await asyncio.sleep(0.5)
        one.runner.stop()
        await asyncio.sleep(5.0)
        assert await is_taken()
        assert (await fleet.record(id)).epoch == 2

    virtually(scenario)


def test_the_end_of_a_child_waits_in_its_outbox_while_the_inbox_of_its_parent_is_full() -> None:
    async def scenario(fleet: Fleet) -> None:
        engine, now = fleet.engine(fleet.store), fleet.clock.now()
        full = tuple(InboxEntry(id=f"m{number}", kind="x", at=now) for number in range(MAX_INBOX_ENTRIES))
        parent = fleet.new("parent", run=RunState(inbox=full, pushed=len(full)))
        to = ReplyTo(run=parent.id, call="child#1", generation=0)
        child = fleet.new("child", reply_to=to, outbox=(PARENT,), status=Status.SUCCESS, parent_id=parent.id)
        await fleet.store.insert([parent, child])
        refused = await engine.outbox.dispatch([child])  # type: ignore[attr-defined]
        assert set(refused) == {child.id}
        assert (await fleet.record(child.id)).outbox == (PARENT,)
        fleet.store._put(replace(await fleet.record(parent.id), run=RunState(pushed=len(full))))
        await engine.outbox.dispatch([await fleet.record(child.id)])  # type: ignore[attr-defined]
        found = (await fleet.record(parent.id)).run
        assert found is not None
        assert [entry.id for entry in found.inbox] == [f"child:{child.id}"]
        assert (await fleet.record(child.id)).outbox == ()

    virtually(scenario)


def test_the_timeout_of_a_run_counts_from_its_first_start_however_often_it_is_restarted() -> None:
    """Also when its history has been cut, and its first start is not in it any more."""

    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 5.0
        shop = Declared()

        @shop.app.workflow(name="order", timeout="300s")
        async def order(number: int) -> None:
            await sleep(1.0)
            context().restart(number + 1)

        await fleet.started(*shop.tasks)
        id = await submit(fleet, order, 0)
        record = await fleet.end(id, within=400.0)
        assert record.status is Status.FAILED
        assert "timed out after 300 s" in record.reason
        assert record.changed_at - record.created_at < 320.0
        assert record.run is not None
        assert record.run.generation > 100
        assert [line.version for line in record.history] != list(range(1, record.version + 1)), "it is cut"

    virtually(scenario)


def test_a_started_run_that_is_cancelled_in_the_reserve_compensates() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings["workflow_linger_seconds"] = 0.1
        shop, seen = Declared(), list[str]()

        @shop.app.step(name="refund")
        async def refund() -> None:
            seen.append("refunded")

        @shop.app.workflow(name="order")
        async def order() -> None:
            try:
                await sleep(600.0)
                await sleep(600.0)
            except asyncio.CancelledError:
                await refund()
                raise

        member = await fleet.started(*shop.tasks, concurrency=1)
        id = await submit(fleet, order)
        await fleet.until_status(id, Status.SUSPENDED)
        worker: Any = member.runner._workers._running_worker.worker  # type: ignore[union-attr]
        worker._free = lambda: 0  # so that it stays in reserve
        await push_wake(fleet, id)
        wish = Claim(
            app=APP,
            lanes=("default|order",),
            limit=1,
            owner=worker.owner,
            operation="ahead",
            at=fleet.clock.now(),
            start=False,
        )
        claimed = await fleet.store.claim(wish)
        assert [(record.id, record.status) for record in claimed.records] == [(id, Status.PENDING)]
        worker._reserve.add(claimed.records, asyncio.get_running_loop().time())
        await member.engine.canceller.cancel([InvocationId(id)], by="a test")
        await fleet.until_status(id, Status.REROUTED)
        assert not worker._reserve.ids()
        await fleet.started(*shop.tasks)
        record = await fleet.end(id)
        assert record.status is Status.CANCELLED
        assert seen == ["refunded"]

    virtually(scenario)


def test_work_of_a_run_that_is_cancelled_before_it_begins_leaves_nothing_behind() -> None:
    """A worker that ends cancels what it has just begun. A coroutine around the cancelled one would never be awaited,
    and Python says so when it is collected: at any later time, in any other test.
    """

    async def scenario(fleet: Fleet) -> None:
        shop = Declared()
        workflow = sleeper(shop, 0.5)
        member = await fleet.started(*shop.tasks)
        id = await submit(fleet, workflow)
        await fleet.until_status(id, Status.RUNNING)
        worker: Any = member.runner._workers._running_worker.worker  # type: ignore[union-attr]
        executor = worker._running._executors[ExecutorKind.WORKFLOW]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            executor.update(
                id, await fleet.record(id), {"handled": (), "tail": 0, "started_at": 0.0, "has_hooks": False}
            )
            await executor.finish()
            gc.collect()
        assert [str(each.message) for each in said] == []

    virtually(scenario)
