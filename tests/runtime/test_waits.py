"""Tasks that wait for others, over the memory store and on virtual time."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.runtime.test_worker import Harness, definition, running
from tests.support.engines import make_engine, make_worker

from holdfast.errors import CircularWait, StoreUnavailable
from holdfast.executors.local import InlineExecutor
from holdfast.executors.waiting import Wait
from holdfast.fleet.recovery import Recovery
from holdfast.ids import InvocationId
from holdfast.model.changes import Change, Verdict
from holdfast.model.explain import RunWait
from holdfast.model.limits import Limit
from holdfast.model.records import PLAIN, InvocationRecord, RunState, Serves, registered
from holdfast.model.status import Status
from holdfast.runtime import waits
from holdfast.runtime.app_runtime import explained
from holdfast.runtime.waiting import held
from holdfast.runtime.waits import place_for
from holdfast.runtime.worker import Worker
from holdfast.store.contract import Filter
from holdfast.store.memory.store import MemoryStore
from holdfast.telemetry.tasks import here
from holdfast.testing.samples import runner
from holdfast.testing.virtual import VirtualClock, run_virtual

ANY = Filter()
WALK = ["registered", "pending", "running", "paused", "resumed", "success"]


class Family(Harness):
    """A worker with tasks that are given as coroutine functions, and what they need to wait for each other."""

    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None, **settings: Any) -> None:
        super().__init__(clock, store)
        if settings:
            self.engine = make_engine(self.store, clock, self.rng, **settings)
        self.running: set[str] = set()  # invocations whose code runs
        self.most = 0
        self.lines: list[str] = []

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a note of when its code runs."""

        @functools.wraps(function)
        async def run(*args: Any) -> Any:
            self.go_on()
            try:
                return await function(*args)
            finally:
                self.running.discard(self.mine)

        return run

    @property
    def mine(self) -> InvocationId:
        call: Any = here.get()
        return InvocationId(call.about.id)

    def go_on(self) -> None:
        self.running.add(self.mine)
        self.most = max(self.most, len(self.running))

    async def start(self, *functions: Callable[..., Any], concurrency: int = 1, **options: Any) -> Worker:
        made = [definition(self.counted(function), **options.pop(function.__name__, {})) for function in functions]
        worker = make_worker(
            self.engine,
            made,
            owner=f"{self.ids.new()}/0",
            serves=Serves(tasks=frozenset(each.name for each in made)),
            concurrency=concurrency,
            drain_timeout_seconds=5.0,
            make_executor=lambda kind, deliver: InlineExecutor(deliver),
        )
        self.life = await running(worker)
        return worker

    async def child(self, task: str, *args: Any, **fields: Any) -> InvocationId:
        """Submit a call as a task does."""
        call: Any = here.get()
        now = self.clock.now()
        given: dict[str, Any] = {"due_at": now, "arguments": self.codec.encode_call(args, {})} | fields
        parent = None if call is None else call.about.id
        record = InvocationRecord(id=self.ids.new(), app="app", task=task, created_at=now, parent_id=parent, **given)
        await self.engine.submitter.submit([registered(record, operation=self.ids.operation(), at=now)])
        return record.id

    async def wait(self, *ids: InvocationId, timeout: float | None = None) -> list[InvocationRecord]:
        """Wait in a task for these, as `Invocation.result` does."""
        call: Any = here.get()
        wait = Wait(call.waits, call, ids)
        wait.beside = frozenset({wait})
        self.running.discard(self.mine)
        try:
            ended = await held(wait, self.engine.watcher.ends(ids, timeout))
        finally:
            self.go_on()
        return [ended[id] for id in ids if id in ended]

    async def until(self, id: str, status: Status, within: float = 60.0) -> InvocationRecord:
        limit = self.clock.now() + within
        while (record := await self.record(id)).status is not status:
            assert self.clock.now() < limit, await self.story(id)
            await asyncio.sleep(0.01)
        return record


def virtually(scenario: Callable[[Family], Coroutine[Any, Any, None]], **given: Any) -> None:
    async def main(clock: VirtualClock) -> None:
        made = {**given, "store": given["store"](clock)} if "store" in given else given
        await scenario(Family(clock, **made))

    run_virtual(main)


async def end(family: Family, worker: Worker) -> None:
    worker.stop()
    await family.life


def test_as_many_parents_as_slots_go_on() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await asyncio.sleep(0.1)
            await family.wait(await family.child("nap"))
            await asyncio.sleep(0.1)

        async def nap() -> None:
            await asyncio.sleep(1)

        worker = await family.start(parent, nap, concurrency=4)
        parents = [await family.child("parent") for _ in range(12)]
        await family.end(*parents)
        assert [await family.story(id) for id in parents] == [WALK] * 12
        assert worker.waits.paused == 0
        await end(family, worker)

    virtually(scenario)


def test_never_more_code_than_slots_runs() -> None:
    """Children of unequal length end while others have the slots: parents wait for their turn, and go on before new
    work.
    """

    async def scenario(family: Family) -> None:
        async def parent(seconds: float) -> None:
            for length in (seconds, 0.5):
                await family.wait(await family.child("nap", length))
                await asyncio.sleep(0.3)

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)

        worker = await family.start(parent, nap, concurrency=3)
        drawn = random.Random(5)
        ids = [await family.child("parent", drawn.uniform(0.1, 3)) for _ in range(9)]
        ids += [await family.child("nap", drawn.uniform(0.1, 3)) for _ in range(9)]
        await family.end(*ids)
        assert family.most == 3
        await end(family, worker)

    virtually(scenario)


def test_a_child_goes_before_others_of_its_priority_and_not_before_higher_ones() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await asyncio.sleep(1)  # meanwhile others are submitted
            await family.wait(await family.child("work", "child"))
            family.lines.append("parent")

        async def work(name: str) -> None:
            family.lines.append(name)
            await asyncio.sleep(1)

        ids = [await family.child("parent")]
        worker = await family.start(parent, work)
        await family.until(ids[0], Status.RUNNING)
        ids += [await family.child("work", f"other {n}") for n in range(3)]
        ids += [await family.child("work", "urgent", priority=9)]
        await family.end(*ids)
        assert family.lines[:2] == ["urgent", "child"]
        assert family.lines.index("parent") < family.lines.index("other 1"), "before more new work"
        assert family.most == 1
        await end(family, worker)

    virtually(scenario)


def test_all_children_go_before_others_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MAX_LOOKED_AT", 8)

    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await asyncio.sleep(1)  # meanwhile others are submitted
            await family.wait(*[await family.child("work", "child") for _ in range(60)])
            family.lines.append("parent")

        async def work(name: str) -> None:
            family.lines.append(name)
            await asyncio.sleep(0.2)

        ids = [await family.child("parent")]
        worker = await family.start(parent, work)
        await family.until(ids[0], Status.RUNNING)
        ids += [await family.child("work", "other") for _ in range(100)]
        await family.end(*ids)
        before = family.lines[: family.lines.index("parent")]
        assert before.count("child") == 60
        assert before.count("other") <= 6
        await end(family, worker)

    virtually(scenario)


def test_the_log_of_a_run_that_is_waited_for_is_read_once_while_nothing_changes() -> None:
    async def scenario(family: Family) -> None:
        reads: list[str] = []

        async def read_waits(engine: Any, record: InvocationRecord) -> Sequence[RunWait]:
            reads.append(record.id)
            return [RunWait("a child", "child")]

        async def parent(run: str) -> None:
            await family.wait(InvocationId(run), timeout=60.0)

        family.engine.read_waits = read_waits
        now, id = family.clock.now(), family.ids.new()
        run = InvocationRecord(id=id, app="app", task="run", arguments=b"", created_at=now, due_at=now, run=RunState())
        suspended = replace(registered(run, operation=family.ids.operation(), at=now), status=Status.SUSPENDED)
        await family.store.insert([suspended])
        worker = await family.start(parent)
        await family.end(await family.child("parent", id))
        assert reads == [id]
        await end(family, worker)

    virtually(scenario)


def test_places_in_the_queue() -> None:
    def one(**fields: Any) -> InvocationRecord:
        return InvocationRecord(
            id=InvocationId("a"), app="app", task="t", arguments=b"", created_at=0.0, due_at=50_000.0, **fields
        )

    assert 49_999 < place_for(one(), one()) < 50_000
    assert 49_999 < place_for(one(priority=3), one()) < 50_000
    assert place_for(one(), one(priority=3)) < 0, "older work of its priority may wait"
    assert place_for(one(queue="gpu"), one()) < 0


def test_a_short_wait_is_told_to_nobody() -> None:
    async def scenario(family: Family) -> None:
        async def parent(id: str) -> None:
            await family.wait(InvocationId(id))

        async def nothing() -> None:
            pass

        worker = await family.start(parent, nothing, concurrency=2)
        (child,) = [record.id for record in await family.end(await family.child("nothing"))]
        (record,) = await family.end(await family.child("parent", child))
        assert await family.story(record.id) == ["registered", "pending", "running", "success"]
        await end(family, worker)

    virtually(scenario)


def test_a_slot_of_a_limit_is_kept() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap"))

        async def nap() -> None:
            await asyncio.sleep(3)

        worker = await family.start(parent, nap, concurrency=4, parent={"limit": Limit(1)})
        first = await family.child("parent", limit_key="parent")
        await family.until(first, Status.PAUSED)
        second = await family.child("parent", limit_key="parent")
        await family.until(second, Status.CONCURRENCY_CONTROLLED)
        assert (await family.record(first)).slot == "parent#0"
        await family.end(first, second)
        await end(family, worker)

    virtually(scenario)


# --- circles


async def failures(family: Family, ids: Sequence[InvocationId]) -> list[str]:
    ended = await family.end(*ids)
    return [record.error.message for record in ended if record.error is not None]


def test_a_circle_is_refused_with_its_path() -> None:
    async def scenario(family: Family) -> None:
        async def first() -> None:
            family.lines.append("first")
            (record,) = await family.wait(await family.child("second", here.get().about.id))  # type: ignore[union-attr]
            assert record.error is not None
            raise ValueError(record.error.message)

        async def second(above: str) -> None:
            await family.wait(InvocationId(above))

        worker = await family.start(first, second)
        began = family.clock.now()
        top = await family.child("first")
        (message,) = await failures(family, [top])
        (below,) = [record.id for record in await family.store.find("app", ANY, 9) if record.task == "second"]
        assert f"{below} (second) → {top} (first) → {below}" in message
        assert "CircularWait" in (await family.record(below)).error.type_name  # type: ignore[union-attr]
        assert family.clock.now() - began < 5
        await end(family, worker)

    virtually(scenario)


def test_waiting_for_oneself_is_refused_at_once() -> None:
    async def scenario(family: Family) -> None:
        async def narcissus() -> None:
            with pytest.raises(CircularWait, match="waits for its own end"):
                await family.wait(here.get().about.id)  # type: ignore[union-attr]

        worker = await family.start(narcissus)
        (record,) = await family.end(await family.child("narcissus"))
        assert [line.status for line in record.history][-2:] == ["running", "success"]
        await end(family, worker)

    virtually(scenario)


def test_a_circle_through_a_slot_of_a_limit_is_refused() -> None:
    async def scenario(family: Family) -> None:
        async def deep(levels: int) -> None:
            if levels:
                await family.wait(await family.child("deep", levels - 1, limit_key="deep"))

        worker = await family.start(deep, concurrency=4, deep={"limit": Limit(2)})
        ids = [await family.child("deep", 3, limit_key="deep")]
        messages = await failures(family, ids)
        assert messages == []  # a failed child is no failure of a parent that does not ask for its result
        refused = [record for record in await family.store.find("app", ANY, 9) if record.error is not None]
        assert len(refused) == 1
        assert ", for a slot of deep, held by → " in refused[0].error.message  # type: ignore[union-attr]
        await end(family, worker)

    virtually(scenario)


def test_a_circle_that_closes_on_both_sides_at_once_is_broken_once() -> None:
    async def scenario(family: Family) -> None:
        async def partner() -> None:
            await asyncio.sleep(1)
            mine = family.mine
            await family.wait(*[id for id in ids if id != mine])

        worker = await family.start(partner, concurrency=2)
        began = family.clock.now()
        ids = [await family.child("partner") for _ in range(2)]
        assert len(await failures(family, ids)) == 1, "the other one goes on"
        assert family.clock.now() - began < 1 + 5
        await end(family, worker)

    virtually(scenario)


def test_a_wait_behind_a_full_limit_is_no_circle() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap", limit_key="nap"))

        async def nap() -> None:
            await asyncio.sleep(12)

        worker = await family.start(parent, nap, concurrency=4, nap={"limit": Limit(1)})
        ids = [await family.child("nap", limit_key="nap"), await family.child("parent"), await family.child("parent")]
        assert await failures(family, ids) == []
        await end(family, worker)

    virtually(scenario)


# --- what else may happen meanwhile


def test_a_paused_parent_is_cancelled_and_cleans_up_with_a_slot() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            try:
                await family.wait(await family.child("nap"))
            except asyncio.CancelledError:
                family.lines.append("cleans up")
                await asyncio.sleep(0.5)
                raise

        async def nap() -> None:
            await asyncio.sleep(2)

        worker = await family.start(parent, nap)
        id = await family.child("parent")
        await family.until(id, Status.PAUSED)
        await family.engine.canceller.cancel([id], by="a test", children=False)
        await family.end(id)
        assert family.lines == ["cleans up"]
        assert family.most == 1
        assert (await family.story(id))[-3:] == ["paused", "cancelling", "cancelled"]
        await end(family, worker)

    virtually(scenario)


def test_a_paused_parent_whose_time_is_over_fails() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap", due_at=family.clock.now() + 900))

        async def nap() -> None:
            pass

        worker = await family.start(parent, nap)
        timed = definition(parent).time
        terms = replace(timed, timeout=5.0).added_to((await family.record(await family.child("nap"))).terms)
        id = await family.child("parent", terms=terms)
        (record,) = await family.end(id)
        assert record.reason.startswith("TimedOut")
        assert await family.story(id) in (
            [*WALK[:-1], "failed"],
            [*WALK[:-2], "resumed", "failed"],
        )
        await end(family, worker)

    virtually(scenario)


def test_a_paused_parent_of_a_dead_owner_is_recovered() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap", key="once"))

        async def nap() -> None:
            await asyncio.sleep(1000)

        worker = await family.start(parent, nap, concurrency=2)
        id = await family.child("parent")
        record = await family.until(id, Status.PAUSED)
        worker.fence()
        await family.life
        assert await Recovery(family.engine).of_owner(str(record.owner), "it is dead") == 2
        story = await family.story(id)
        assert story[-3:] == ["paused", "running_recovery", "rerouted"]
        assert (await family.record(id)).awaited is None

    virtually(scenario)


class Counted(MemoryStore):
    """A store that notes its writes of waits."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.written: list[list[str]] = []

    async def apply(self, changes: Sequence[Any]) -> Sequence[Verdict]:
        names = [change.name if isinstance(change, Change) else type(change).__name__ for change in changes]
        if {"paused", "resumed", "MoveUp", "WaitNote"} & set(names):
            self.written.append(names)
        return await super().apply(changes)


def test_a_wait_is_two_writes_and_those_of_many_go_out_together() -> None:
    async def scenario(family: Family) -> None:
        async def parent(wakes: float) -> None:
            await family.wait(await family.child("nap", wakes))

        async def nap(wakes: float) -> None:
            await asyncio.sleep(wakes - family.clock.now())

        store: Any = family.store
        worker = await family.start(parent, nap, concurrency=40)
        await family.end(await family.child("parent", family.clock.now() + 3))
        assert store.written == [["paused"], ["resumed"]]
        store.written.clear()
        wakes = family.clock.now() + 3
        await family.end(*[await family.child("parent", wakes) for _ in range(20)])
        assert sorted(name for names in store.written for name in names) == ["paused"] * 20 + ["resumed"] * 20
        assert len(store.written) <= 6
        await end(family, worker)

    virtually(scenario, store=Counted)


class AwayWhenResumed(MemoryStore):
    """A store that does not answer a few writes of RESUMED, and notes when it did."""

    left = 4

    async def apply(self, changes: Sequence[Any]) -> Sequence[Verdict]:
        if self.left and any(isinstance(each, Change) and each.name == "resumed" for each in changes):
            self.left -= 1
            raise StoreUnavailable("it is away")
        return await super().apply(changes)


def test_code_goes_on_when_the_store_has_its_resume() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> str:
            mine = family.mine
            await family.wait(await family.child("nap"))
            return str((await family.record(mine)).status)

        async def nap() -> None:
            await asyncio.sleep(1)

        worker = await family.start(parent, nap)
        (record,) = await family.end(await family.child("parent"))
        assert family.codec.decode(record.result or b"") == "resumed"
        await end(family, worker)

    virtually(scenario, store=AwayWhenResumed)


def test_beyond_the_bound_a_slot_is_kept_and_why_says_so() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap"))

        async def nap() -> None:
            await asyncio.sleep(5)

        worker = await family.start(parent, nap, concurrency=3)
        first = await family.child("parent")
        await family.until(first, Status.PAUSED)
        second = await family.child("parent")
        await asyncio.sleep(1)
        kept = await family.record(second)
        await family.store.enrol(runner(worker.owner.partition("/")[0], app="app", heartbeat_at=family.clock.now()))
        assert kept.status is Status.RUNNING
        said = (await explained(family.store, kept, lambda name: None, 15.0)).text
        (child,) = kept.awaited.ids if kept.awaited else ("",)
        assert (
            f"It waits for {child} (nap, running). It keeps its slot meanwhile: its worker has 1 waiting call" in said
        )
        said = (await explained(family.store, await family.record(first), lambda name: None, 15.0)).text
        assert "It waits for " in said
        assert "slot meanwhile" not in said
        await family.end(first, second)
        assert (await family.record(second)).awaited is None
        await end(family, worker)

    virtually(scenario, waiting_coroutines=1)


def test_a_worker_that_stops_gives_back_what_waits() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("elsewhere"))

        worker = await family.start(parent)
        id = await family.child("parent")
        await family.until(id, Status.PAUSED)
        await end(family, worker)
        assert (await family.story(id))[-2:] == ["killed", "rerouted"]

    virtually(scenario)


def test_a_wait_has_its_slot_again_whatever_it_ends_with() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            assert await family.wait(await family.child("nap", 9.0), timeout=1.0) == []
            family.lines.append("timed out")
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(1):
                    await family.wait(await family.child("nap", 9.0))
            family.lines.append("given up")

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)

        worker = await family.start(parent, nap)
        await family.end(await family.child("parent"))
        assert family.lines == ["timed out", "given up"]
        assert family.most == 1
        await end(family, worker)

    virtually(scenario)


class SlowPauses(MemoryStore):
    """A store that pauses a call at once, and answers three seconds later."""

    async def apply(self, changes: Sequence[Any]) -> Sequence[Verdict]:
        verdicts = await super().apply(changes)
        if any(isinstance(each, Change) and each.name == "paused" for each in changes):
            await asyncio.sleep(3)
        return verdicts


def test_an_end_that_meets_a_pause_under_way_is_written_after_it() -> None:
    async def scenario(family: Family) -> None:
        async def parent() -> None:
            await family.wait(await family.child("nap", due_at=family.clock.now() + 900))

        async def nap() -> None:
            pass

        worker = await family.start(parent, nap)
        terms = replace(PLAIN, timeout=1.5)
        (record,) = await family.end(await family.child("parent", terms=terms))
        assert record.reason.startswith("TimedOut")
        assert record.attempt == 1
        assert [line.status for line in record.history][-3:] == ["paused", "resumed", "failed"]
        await end(family, worker)

    virtually(scenario, store=SlowPauses)


def test_code_that_was_seen_to_wait_may_have_gone_on_since() -> None:
    """A look sees two waits; one of them ends, and then the look is told: code runs, and the slot is kept."""

    async def scenario(family: Family) -> None:
        async def parent(short: str, long: str) -> None:
            call: Any = here.get()
            waits = [Wait(call.waits, call, [id]) for id in (short, long)]
            tasks = [asyncio.create_task(held(w, family.engine.watcher.ends(list(w.ids), None))) for w in waits]
            await asyncio.wait(tasks[:1])
            call.waits.only_waits(frozenset(waits))
            await asyncio.sleep(1)
            family.lines.append(str((await family.record(family.mine)).status))
            call.waits.only_waits(frozenset(waits[1:]))
            await asyncio.sleep(0.5)
            family.lines.append(str((await family.record(family.mine)).status))
            await asyncio.wait(tasks)

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)

        worker = await family.start(parent, nap, concurrency=4)
        children = [await family.child("nap", 0.5), await family.child("nap", 9.0)]
        await family.end(await family.child("parent", *children))
        assert family.lines == ["running", "paused"]
        await end(family, worker)

    virtually(scenario)
