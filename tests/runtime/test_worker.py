"""The worker over the memory store, on virtual time: nothing here waits for a real second."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.engines import make_engine, make_worker

from holdfast.codec import Codec, ErrorRecord
from holdfast.errors import StoreError, StoreUnavailable
from holdfast.executors.local import InlineExecutor
from holdfast.ids import Ids
from holdfast.model import changes
from holdfast.model.changes import Change, Verdict
from holdfast.model.claims import Claim, Claimed
from holdfast.model.records import ENDED, Hint, InvocationRecord, Serves, registered
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.worker import Worker
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual

POLL, DRAIN = 1.0, 30.0


class Harness:
    """An engine on a virtual loop, with a store that can be told to fail."""

    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None) -> None:
        self.clock = clock
        self.rng = random.Random(7)
        self.ids = Ids(clock, self.rng)
        self.store = store or MemoryStore(clock)
        self.codec = Codec()
        self.engine = make_engine(self.store, clock, self.rng, poll_interval_seconds=POLL)

    def worker(self, *functions: Callable[..., Any], concurrency: int = 10, **options: Any) -> Worker:
        return self.worker_of([definition(function, **options) for function in functions], concurrency=concurrency)

    def worker_of(self, definitions: list[TaskDefinition], *, concurrency: int = 10) -> Worker:
        names = frozenset(name for each in definitions for name in each.names)
        return make_worker(
            self.engine,
            definitions,
            owner=f"{self.ids.new()}/0",
            serves=Serves(tasks=names),
            concurrency=concurrency,
            drain_timeout_seconds=DRAIN,
            make_executor=lambda kind, deliver: InlineExecutor(deliver),
        )

    async def submit(
        self, task: str, *args: Any, delay: float = 0.0, priority: int = 0, limit_key: str | None = None
    ) -> str:
        now = self.clock.now()
        record = InvocationRecord(
            id=self.ids.new(),
            app="app",
            task=task,
            arguments=self.codec.encode_call(args, {}),
            created_at=now,
            due_at=now + delay,
            priority=priority,
            limit_key=limit_key,
        )
        await self.engine.submitter.submit([registered(record, operation=self.ids.operation(), at=now)])
        return record.id

    async def submit_many(self, task: str, count: int, *args: Any) -> list[str]:
        return [await self.submit(task, *args) for _ in range(count)]

    async def record(self, id: str) -> InvocationRecord:
        (record,) = await self.store.get("app", [id])
        assert record is not None
        return record

    async def story(self, id: str) -> list[str]:
        return [str(entry.status) for entry in (await self.record(id)).history]

    async def end(self, *ids: str, timeout: float = 600) -> list[InvocationRecord]:
        ended = await self.engine.watcher.ends(ids, timeout)
        return [ended[id] for id in ids]


def definition(function: Callable[..., Any], **options: Any) -> TaskDefinition:
    kind = ExecutorKind.LOOP if inspect.iscoroutinefunction(function) else ExecutorKind.THREAD
    return TaskDefinition(
        name=function.__name__, function=function, signature=inspect.signature(function), executor=kind, **options
    )


def virtually(scenario: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        await scenario(Harness(clock))

    run_virtual(main)


async def running(worker: Worker) -> asyncio.Task[Any]:
    """Start it and wait until it looks for work."""
    ready = asyncio.Event()
    task = asyncio.create_task(worker.run(ready.set))
    await ready.wait()
    return task


def add(x: int, y: int) -> int:
    return x + y


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"


def test_a_task_goes_from_submit_to_result() -> None:
    async def scenario(harness: Harness) -> None:
        worker = harness.worker(add)
        life = await running(worker)
        id = await harness.submit("add", 1, 2)
        (record,) = await harness.end(id)
        assert harness.codec.decode(record.result or b"") == 3
        assert await harness.story(id) == ["registered", "pending", "running", "success"]
        assert (record.owner, record.epoch, record.attempt) == (None, 1, 1)
        assert [entry.owner for entry in record.history] == [None, worker.owner, worker.owner, None]
        worker.stop()
        assert (await life).ended == 1

    virtually(scenario)


def test_delayed_work_starts_when_it_is_due_and_not_before() -> None:
    started: list[float] = []

    async def scenario(harness: Harness) -> None:
        def note() -> None:
            started.append(harness.clock.now())

        worker = harness.worker(note)
        life = await running(worker)
        due = harness.clock.now() + 7.25
        await harness.end(await harness.submit("note", delay=7.25))
        assert due <= started[0] < due + 0.01
        worker.stop()
        await life

    virtually(scenario)


def test_priority_goes_before_age() -> None:
    order: list[str] = []

    async def scenario(harness: Harness) -> None:
        def note(name: str) -> None:
            order.append(name)

        ids = [
            await harness.submit("note", "first, low", priority=-5),
            await harness.submit("note", "second"),
            await harness.submit("note", "third"),
            await harness.submit("note", "last, high", priority=9),
        ]
        worker = harness.worker(note, concurrency=1)
        life = await running(worker)
        await harness.end(*ids)
        assert order == ["last, high", "second", "third", "first, low"]
        worker.stop()
        await life

    virtually(scenario)


def test_never_more_than_concurrency_at_once_and_all_places_are_used() -> None:
    async def scenario(harness: Harness) -> None:
        at_once = most = 0

        async def work() -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(1)
            at_once -= 1

        ids = [await harness.submit("work") for _ in range(23)]
        worker = harness.worker(work, concurrency=4)
        life = await running(worker)
        began = harness.clock.now()
        await harness.end(*ids)
        assert most == 4
        assert harness.clock.now() - began == pytest.approx(6.0, abs=0.1)  # 23 seconds of work on 4 places
        worker.stop()
        await life

    virtually(scenario)


def test_unknown_tasks_are_left_alone() -> None:
    async def scenario(harness: Harness) -> None:
        foreign = await harness.submit("somebody_elses")
        worker = harness.worker(add)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("add", 1, 1))
        assert record.status == "success"
        assert await harness.story(foreign) == ["registered"]
        worker.stop()
        await life

    virtually(scenario)


def test_a_lost_hint_costs_one_polling_interval() -> None:
    async def scenario(harness: Harness) -> None:
        worker = harness.worker(add)
        life = await running(worker)
        await asyncio.sleep(10.3)
        now = harness.clock.now()
        record = InvocationRecord(
            id=harness.ids.new(),
            app="app",
            task="add",
            arguments=harness.codec.encode_call((1, 2), {}),
            created_at=now,
            due_at=now,
        )
        await harness.store.insert([registered(record, operation="unannounced", at=now)])
        await harness.end(record.id)
        assert harness.clock.now() - now <= POLL + 0.01
        worker.stop()
        await life

    virtually(scenario)


# --- what cannot run


def test_arguments_that_no_longer_bind_are_parked_and_woken_by_other_code() -> None:
    async def scenario(harness: Harness) -> None:
        id = await harness.submit("greet", "Ada", "Lovelace")

        def greet(name: str) -> str:
            return name

        old = greet

        first = harness.worker(old)
        life = await running(first)
        await asyncio.sleep(1)
        record = await harness.record(id)
        assert record.status == "parked"
        assert "too many positional arguments" in record.reason
        first.stop()
        await life

        again = harness.worker(old)  # the same code: it stays where it is
        life = await running(again)
        await asyncio.sleep(5)
        assert (await harness.record(id)).status == "parked"
        again.stop()
        await life

        def greet(name: str, surname: str) -> str:  # type: ignore[no-redef]
            return f"{name} {surname}"

        mended = harness.worker(greet)
        life = await running(mended)
        (record,) = await harness.end(id)
        assert harness.codec.decode(record.result or b"") == "Ada Lovelace"
        assert await harness.story(id) == [
            *("registered", "pending", "running", "parked"),
            *("rerouted", "pending", "running", "success"),
        ]
        mended.stop()
        await life

    virtually(scenario)


def test_arguments_that_cannot_be_decoded_are_parked() -> None:
    async def scenario(harness: Harness) -> None:
        now = harness.clock.now()
        record = InvocationRecord(
            id=harness.ids.new(), app="app", task="add", arguments=b"\xc1 garbage", created_at=now, due_at=now
        )
        await harness.engine.submitter.submit([registered(record, operation="x", at=now)])
        worker = harness.worker(add)
        life = await running(worker)
        await asyncio.sleep(1)
        stored = await harness.record(record.id)
        assert stored.status == "parked"
        assert "its stored arguments are damaged" in stored.reason
        worker.stop()
        await life

    virtually(scenario)


def test_a_result_that_cannot_be_stored_fails_with_that_reason() -> None:
    async def scenario(harness: Harness) -> None:
        def opaque() -> object:
            return {"lines": [1, object()]}

        worker = harness.worker(opaque)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("opaque"))
        assert record.status == "failed"
        assert "result['lines'][1]" in record.reason
        worker.stop()
        await life

    virtually(scenario)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_whatever_user_code_raises_is_an_outcome(error: BaseException) -> None:
    async def scenario(harness: Harness) -> None:
        def fail() -> None:
            raise error

        worker = harness.worker(fail, add)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("fail"))
        assert record.status == "failed"
        assert record.error is not None
        assert type(error).__name__ in record.error.type_name
        (after,) = await harness.end(await harness.submit("add", 1, 2))
        assert after.status == "success"
        worker.stop()
        await life

    virtually(scenario)


# --- stopping


def test_a_stop_finishes_what_runs_and_takes_nothing_new() -> None:
    async def scenario(harness: Harness) -> None:
        worker = harness.worker(nap, concurrency=1)
        life = await running(worker)
        first, second = await harness.submit("nap", 5), await harness.submit("nap", 5)
        await asyncio.sleep(1)
        worker.stop()
        account = await life
        assert (await harness.record(first)).status == "success"
        assert await harness.story(second) == ["registered"]
        assert (account.started, account.ended, account.interrupted) == (1, 1, 0)
        assert await harness.store.roster("app") == []

    virtually(scenario)


@pytest.mark.parametrize(("hurry", "patience"), [(False, DRAIN), (True, 0.0)])
def test_work_that_outlasts_the_drain_timeout_goes_back_to_the_queue(hurry: bool, patience: float) -> None:
    async def scenario(harness: Harness) -> None:
        worker = harness.worker(nap)
        life = await running(worker)
        id = await harness.submit("nap", 3600)
        await asyncio.sleep(1)
        asked = harness.clock.now()
        worker.stop(hurry=hurry)
        await life
        assert harness.clock.now() - asked == pytest.approx(patience, abs=0.1)
        assert await harness.story(id) == ["registered", "pending", "running", "killed", "rerouted"]
        assert (await harness.record(id)).owner is None

    virtually(scenario)


def test_code_that_ignores_its_cancellation_does_not_hold_up_the_stop() -> None:
    async def scenario(harness: Harness) -> None:
        async def stubborn() -> None:
            for _ in range(3):
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    continue

        worker = harness.worker(stubborn)
        life = await running(worker)
        id = await harness.submit("stubborn")
        await asyncio.sleep(1)
        worker.stop(hurry=True)
        account = await life
        assert account.interrupted == 1
        assert await harness.story(id) == ["registered", "pending", "running", "killed", "rerouted"]

    virtually(scenario)


# --- a store that fails


class Flaky(MemoryStore):
    """Fails the next `failures` calls of `apply` and `claim`: before the write, or after it (the reply is lost)."""

    failures = 0
    after_the_write = False

    def _fails(self) -> bool:
        if self.failures:
            self.failures -= 1
            return True
        return False

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        fails = self._fails()
        if fails and not self.after_the_write:
            raise StoreUnavailable("away")
        verdicts = await super().apply(changes)
        if fails:
            raise StoreUnavailable("the reply was lost")
        return verdicts

    async def claim(self, claim: Claim) -> Claimed:
        fails = self._fails()
        if fails and not self.after_the_write:
            raise StoreUnavailable("away")
        claimed = await super().claim(claim)
        if fails:
            raise StoreUnavailable("the reply was lost")
        return claimed


class FlakyApply(MemoryStore):
    """Fails only the ends: before the write, or after it."""

    failures = 0
    after_the_write = False

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        fails, self.failures = self.failures > 0, max(0, self.failures - 1)
        if fails and not self.after_the_write:
            raise StoreUnavailable("away")
        verdicts = await super().apply(changes)
        if fails:
            raise StoreUnavailable("the reply was lost")
        return verdicts


@pytest.mark.parametrize("failures", [1, 2, 5])
@pytest.mark.parametrize("after_the_write", [False, True])
def test_an_end_is_written_again_until_the_store_answers(failures: int, after_the_write: bool) -> None:
    async def main(clock: VirtualClock) -> None:
        store = FlakyApply(clock)
        harness = Harness(clock, store)
        worker = harness.worker(add)
        life = await running(worker)
        store.failures, store.after_the_write = failures, after_the_write
        id = await harness.submit("add", 1, 2)
        (record,) = await harness.end(id)
        assert store.failures == 0
        assert harness.codec.decode(record.result or b"") == 3
        assert await harness.story(id) == ["registered", "pending", "running", "success"]
        worker.stop()
        await life

    run_virtual(main)


class Picky(MemoryStore):
    """Refuses ends over a size for good, as SQLite does above a gigabyte, and breaks on a result of b'bug'."""

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        for change in changes:
            if isinstance(change.result, bytes) and len(change.result) > 1000:
                raise StoreError("string or blob too big")
            if isinstance(change.error, ErrorRecord) and len(change.error.message) > 1000:
                raise StoreError("error too big")
            if len(change.why) > 1000:
                raise StoreError("reason too big")
            if isinstance(change.result, bytes) and b"bug" in change.result:
                raise RuntimeError("a bug in the store")
        return await super().apply(changes)


def test_a_result_that_the_store_never_takes_fails_its_invocation_and_no_other() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, Picky(clock))

        def make(size: int) -> str:
            return "x" * size if size else "bug"

        ids = [await harness.submit("make", size) for size in (1, 5000, 2, 0, 3)]
        worker = harness.worker(make)
        life = await running(worker)
        records = await harness.end(*ids)
        assert [str(record.status) for record in records] == ["success", "failed", "success", "failed", "success"]
        assert "string or blob too big" in records[1].reason
        worker.stop()
        await life

    run_virtual(main)


def test_an_error_that_the_store_never_takes_is_told_in_few_words() -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, Picky(clock))

        def fail(size: int) -> None:
            raise ValueError("no" * size + "\0")

        worker = harness.worker(fail)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("fail", 5000))
        assert record.status is Status.FAILED
        assert record.error is not None
        assert record.error.type_name.endswith("ValueError")
        assert record.error.message.startswith("nono")
        assert "error too big" in record.reason
        worker.stop()
        await life

    run_virtual(main)


def test_work_that_cannot_be_marked_as_killed_in_so_many_words_is_killed_in_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock, Picky(clock))
        worker = harness.worker(nap)
        life = await running(worker)
        id = await harness.submit("nap", 3600.0)
        await asyncio.sleep(1)
        killed = changes.killed
        monkeypatch.setattr(changes, "killed", lambda record, **more: killed(record, **(more | {"why": "no" * 5000})))
        worker.stop(hurry=True)
        await life
        assert await harness.story(id) == ["registered", "pending", "running", "killed", "rerouted"]

    run_virtual(main)


def test_a_defect_while_an_end_is_announced_does_not_hold_up_the_next_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: VirtualClock) -> None:
        harness = Harness(clock)
        worker = harness.worker(nap)
        life = await running(worker)
        send, broken = harness.engine.hub.send, [True]

        def sometimes(*hints: Hint, **how: bool) -> None:
            if broken and hints[0].kind == ENDED:
                broken.clear()
                raise RuntimeError("a defect")
            send(*hints, **how)

        harness.engine.hub.send = sometimes  # type: ignore[method-assign]
        ids = [await harness.submit("nap", seconds) for seconds in (0.1, 0.2)]
        records = await harness.end(*ids)
        assert [record.status for record in records] == ["success"] * 2
        assert "a defect" in caplog.text
        worker.stop()
        await life

    run_virtual(main)


def test_a_lost_hint_of_the_end_costs_the_waiter_one_polling_interval() -> None:
    async def scenario(harness: Harness) -> None:
        id = await harness.submit("somebody_elses")
        waiting = asyncio.create_task(harness.end(id))
        await asyncio.sleep(10.1)
        ended = harness.clock.now()
        record = await harness.record(id)
        entry = replace(record.history[-1], version=2, status=Status.SUCCESS)
        harness.store._put(replace(record, status=Status.SUCCESS, result=b"x", history=(*record.history, entry)))
        await waiting
        assert harness.clock.now() - ended <= POLL + 0.01

    virtually(scenario)


def test_ends_that_are_heard_of_do_not_put_off_the_look_for_one_whose_hint_was_lost() -> None:
    async def scenario(harness: Harness) -> None:
        ids = [await harness.submit("somebody_elses") for _ in range(20)]
        ended: dict[str, float] = {}

        async def end(id: str, *, hint: bool) -> None:
            record = await harness.record(id)
            entry = replace(record.history[-1], version=2, status=Status.SUCCESS)
            harness.store._put(replace(record, status=Status.SUCCESS, result=b"x", history=(*record.history, entry)))
            if hint:
                harness.engine.hub.send(Hint(ENDED, (id,)))
            ended[id] = harness.clock.now()

        reads: list[tuple[float, tuple[str, ...]]] = []
        get = harness.store.get

        async def noted(app: str, asked: Sequence[str]) -> Sequence[InvocationRecord | None]:
            reads.append((harness.clock.now(), tuple(asked)))
            return await get(app, asked)

        await asyncio.sleep(5)
        waiting = asyncio.create_task(harness.end(*ids))
        await asyncio.sleep(5.05)
        harness.store.get = noted  # type: ignore[method-assign]
        await end(ids[0], hint=False)
        for id in ids[1:]:
            await asyncio.sleep(POLL / 2)
            await end(id, hint=True)
        await waiting
        first = min(at for at, asked in reads if ids[0] in asked and len(asked) > 1)
        assert first - ended[ids[0]] <= POLL + 0.01

    virtually(scenario)


@pytest.mark.parametrize("failures", [1, 2, 5])
@pytest.mark.parametrize("after_the_write", [False, True])
def test_nothing_is_lost_or_done_twice_when_the_store_fails(failures: int, after_the_write: bool) -> None:
    runs: list[int] = []

    async def main(clock: VirtualClock) -> None:
        store = Flaky(clock)
        harness = Harness(clock, store)

        def work(number: int) -> int:
            runs.append(number)
            return number

        worker = harness.worker(work)
        life = await running(worker)
        await asyncio.sleep(1.5)
        store.after_the_write = after_the_write
        store.failures = failures  # the claim meets the first of them, the settle may meet the others
        ids = [await harness.submit("work", number) for number in range(3)]
        records = await harness.end(*ids)
        assert [record.status for record in records] == ["success"] * 3
        assert sorted(runs) == [0, 1, 2]
        for id in ids:
            assert await harness.story(id) == ["registered", "pending", "running", "success"]
        worker.stop()
        await life

    run_virtual(main)


def test_a_zombie_is_refused() -> None:
    async def scenario(harness: Harness) -> None:
        worker = harness.worker(nap)
        life = await running(worker)
        id = await harness.submit("nap", 10)
        await asyncio.sleep(1)
        stolen = replace(await harness.record(id), owner="another/0", epoch=2)
        harness.store._put(stolen)  # recovery gave the invocation to somebody else
        await asyncio.sleep(20)
        record = await harness.record(id)
        assert (record.status, record.owner, record.epoch, record.result) == ("running", "another/0", 2, None)
        worker.stop()
        await life

    virtually(scenario)


def test_final_statuses_are_all_there_are_in_the_end() -> None:
    async def scenario(harness: Harness) -> None:
        def sometimes(number: int) -> int:
            if number % 3 == 0:
                raise ValueError(number)
            return number

        ids = [await harness.submit("sometimes", number) for number in range(100)]
        worker = harness.worker(sometimes)
        life = await running(worker)
        records = await harness.end(*ids)
        assert all(record.status in FINAL for record in records)
        assert await harness.store.counts("app") == {"success": 66, "failed": 34}
        worker.stop()
        await life

    virtually(scenario)


@pytest.mark.parametrize("hurry", [False, True])
def test_a_runner_can_be_stopped_while_the_store_is_away(hurry: bool) -> None:
    async def main(clock: VirtualClock) -> None:
        store = Flaky(clock)
        harness = Harness(clock, store)
        worker = harness.worker(nap)
        life = await running(worker)
        id = await harness.submit("nap", 5)
        await asyncio.sleep(1)
        store.failures = 1_000_000
        await asyncio.sleep(10)  # the nap is over, but its end cannot be written
        asked = clock.now()
        worker.stop(hurry=hurry)
        await life
        assert clock.now() - asked < (3 if hurry else DRAIN + 15)
        assert await harness.story(id) == ["registered", "pending", "running"]

    run_virtual(main)
