"""Large values while the store fails or the runner stops: nothing is lost, done twice or held up. On virtual time."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.runtime.test_worker import DRAIN, Harness, running

from holdfast.codec import SizeLimits, references
from holdfast.errors import StoreError, StoreFull, StoreReadOnly, StoreUnauthorised, StoreUnavailable, TaskFailed
from holdfast.model.changes import Change, Verdict
from holdfast.model.records import InvocationRecord, StoredPayload, registered
from holdfast.runtime.payloads import UNWANTED_SECONDS
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual

LARGE = "x" * 500
LIMITS = SizeLimits(inline=64, max_bytes=100_000)


class Troubled(MemoryStore):
    """Raises what it is told to, so many times, in the methods it is told: before they are carried out, or after."""

    trouble: Exception | None = None
    times = 0
    methods: tuple[str, ...] = ()
    after = False
    tries = 0

    def fail(self, error: Exception, *methods: str, times: int = 1_000_000, after: bool = False) -> None:
        self.trouble, self.methods, self.times, self.after, self.tries = error, methods, times, after, 0

    def mend(self) -> None:
        self.times = 0

    def _raise(self, method: str, after: bool) -> None:
        if method in self.methods and self.times and self.after is after:
            self.times -= 1
            self.tries += 1
            assert self.trouble is not None
            raise self.trouble

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        self._raise("keep", after=False)
        found = await super().keep_payloads(app, digests)
        self._raise("keep", after=True)
        return found

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        self._raise("put", after=False)
        await super().put_payloads(app, payloads)
        self._raise("put", after=True)

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        self._raise("get", after=False)
        return await super().get_payload(app, digest)

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        self._raise("apply", after=False)
        verdicts = await super().apply(changes)
        self._raise("apply", after=True)
        return verdicts


class Large(Harness):
    """Everything above 64 bytes lies apart."""

    store: Troubled

    def __init__(self, clock: VirtualClock, store: Troubled) -> None:
        super().__init__(clock, store)
        self.engine.limits = LIMITS
        self.runs: list[Any] = []

    async def submit(self, task: str, *args: Any, delay: float = 0.0, priority: int = 0) -> str:
        now = self.clock.now()
        packed = self.codec.pack_call(args, {}, (), LIMITS)
        record = InvocationRecord(
            id=self.ids.new(), app="app", task=task, arguments=packed.data, created_at=now, due_at=now
        )
        await self.engine.submitter.submit(
            [registered(record, operation=self.ids.operation(), at=now)], packed.payloads
        )
        return record.id

    async def result(self, record: InvocationRecord) -> object:
        payloads = await self.engine.payloads.fetch(references(record.result))
        return self.codec.decode(record.result or b"", payloads)

    def echo(self) -> Callable[[Any], Any]:
        def echo(value: Any) -> Any:
            self.runs.append(value)
            return value

        return echo


def virtually(scenario: Callable[[Large], Coroutine[Any, Any, None]], kind: type[Troubled] = Troubled) -> None:
    async def main(clock: VirtualClock) -> None:
        await scenario(Large(clock, kind(clock)))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task for task in left if not task.done()] == []

    run_virtual(main)


@pytest.fixture(autouse=True)
def _no_task_dies_unheard(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# --- fetching


class Slow(Troubled):
    """It takes two minutes to get a payload."""

    asked = 0

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        self.asked += 1
        await asyncio.sleep(120)
        return await super().get_payload(app, digest)


@pytest.mark.parametrize("hurry", [False, True])
def test_a_runner_that_is_told_to_stop_while_it_fetches_hands_the_work_back_at_once(hurry: bool) -> None:
    async def scenario(harness: Large) -> None:
        runner = harness.worker(harness.echo())
        life = await running(runner)
        ids = [await harness.submit("echo", LARGE), await harness.submit("echo", LARGE + "2")]
        await asyncio.sleep(5)
        asked = harness.clock.now()
        runner.stop(hurry=hurry)
        account = await life
        assert harness.clock.now() - asked < 0.5
        assert (account.started, account.ended, account.interrupted, harness.runs) == (0, 0, 0, [])
        for id in ids:
            assert await harness.story(id) == ["registered", "pending", "running", "killed", "rerouted"]
            record = await harness.record(id)
            assert (record.owner, record.attempt, record.reason) == (None, 0, "the runner stops")
        again = harness.worker(harness.echo())
        life = await running(again)
        for ended in await harness.end(*ids, timeout=9999):
            assert ended.status == "success"
        again.stop()
        await life

    virtually(scenario, Slow)


def test_work_that_fetches_takes_a_place() -> None:
    async def scenario(harness: Large) -> None:
        assert isinstance(harness.store, Slow)
        runner = harness.worker(harness.echo(), concurrency=3)
        life = await running(runner)
        ids = [await harness.submit("echo", f"{LARGE}{number}") for number in range(7)]
        await asyncio.sleep(60)
        assert harness.store.asked == 3
        records = await harness.end(*ids, timeout=99_999)
        assert [record.status for record in records] == ["success"] * 7
        runner.stop()
        await life

    virtually(scenario, Slow)


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), StoreReadOnly("not now"), StoreUnauthorised("not you")], ids=repr
)
def test_a_store_that_fails_while_arguments_are_fetched_is_waited_for(error: StoreError) -> None:
    async def scenario(harness: Large) -> None:
        runner = harness.worker(harness.echo())
        life = await running(runner)
        harness.store.fail(error, "get")
        id = await harness.submit("echo", LARGE)
        await asyncio.sleep(120)
        assert await harness.story(id) == ["registered", "pending", "running"]
        assert harness.store.tries < 60  # it is not asked all the time
        harness.store.mend()
        (record,) = await harness.end(id)
        assert await harness.result(record) == LARGE
        assert (harness.runs, record.attempt) == ([LARGE], 1)
        runner.stop()
        await life

    virtually(scenario)


def test_a_runner_that_is_told_to_stop_while_it_waits_for_the_store_hands_the_work_back() -> None:
    async def scenario(harness: Large) -> None:
        runner = harness.worker(harness.echo())
        life = await running(runner)
        harness.store.fail(StoreUnavailable("away"), "get")
        id = await harness.submit("echo", LARGE)
        await asyncio.sleep(60)
        runner.stop()
        await life
        assert await harness.story(id) == ["registered", "pending", "running", "killed", "rerouted"]
        assert harness.runs == []

    virtually(scenario)


@pytest.mark.parametrize("error", [StoreError("odd page"), KeyError("size"), MemoryError()], ids=repr)
def test_arguments_that_cannot_be_had_park_their_work_and_free_the_place(error: Exception) -> None:
    async def scenario(harness: Large) -> None:
        runner = harness.worker(harness.echo(), concurrency=1)
        life = await running(runner)
        harness.store.fail(error, "get", times=1)
        id = await harness.submit("echo", LARGE)
        await asyncio.sleep(1)
        record = await harness.record(id)
        assert record.status == "parked"
        assert f"its arguments cannot be had: {type(error).__name__}: {error}" in record.reason
        (after,) = await harness.end(await harness.submit("echo", LARGE))
        assert after.status == "success"
        runner.stop()
        await life

    virtually(scenario)


# --- storing a result


@pytest.mark.parametrize("error", [StoreFull("no space"), StoreReadOnly("not now"), StoreUnavailable("away")], ids=repr)
@pytest.mark.parametrize("method", ["keep", "put", "apply"])
@pytest.mark.parametrize("after", [False, True])
def test_trouble_that_passes_costs_a_large_end_nothing_but_time(error: StoreError, method: str, after: bool) -> None:
    async def scenario(harness: Large) -> None:
        def make(number: int) -> str:
            harness.runs.append(number)
            return f"{LARGE}{number}"

        runner = harness.worker(make, concurrency=2)
        life = await running(runner)
        harness.store.fail(error, method, after=after)
        ids = [await harness.submit("make", number) for number in range(3)]
        await asyncio.sleep(300)
        assert harness.store.tries < 3 * 150
        harness.store.mend()
        for number, record in enumerate(await harness.end(*ids)):
            assert await harness.result(record) == f"{LARGE}{number}"
            assert await harness.story(record.id) == ["registered", "pending", "running", "success"]
        assert sorted(harness.runs) == [0, 1, 2]
        runner.stop()
        await life

    virtually(scenario)


def test_a_result_whose_payload_was_collected_while_the_store_refused_its_end_is_stored_again() -> None:
    async def scenario(harness: Large) -> None:
        def make() -> str:
            return LARGE

        runner = harness.worker(make)
        life = await running(runner)
        harness.store.fail(StoreUnavailable("away"), "apply")
        id = await harness.submit("make")
        await asyncio.sleep(60)
        harness.store.methods = ("apply", "keep")  # from now on they wait between the two
        assert len(harness.store._payloads) == 1
        assert await harness.store.collect_payloads("app", harness.clock.now() + 1, 10) == (1, False)
        harness.store.mend()
        (record,) = await harness.end(id)
        assert await harness.result(record) == LARGE
        runner.stop()
        await life

    virtually(scenario)


@pytest.mark.parametrize("error", [StoreError("larger than I can take"), RuntimeError("a defect")], ids=repr)
def test_a_large_result_that_the_store_refuses_for_good_fails_its_invocation_and_no_other(error: Exception) -> None:
    async def scenario(harness: Large) -> None:
        def make(size: int) -> str:
            return "x" * size

        def fail() -> None:
            raise ValueError(LARGE)

        runner = harness.worker(make, fail)
        life = await running(runner)
        ids = [await harness.submit("make", size) for size in (1, 500, 2)]
        ids.append(await harness.submit("fail"))
        harness.store.fail(error, "put")
        one, refused, two, failed = await harness.end(*ids)
        assert [one.status, two.status] == ["success"] * 2
        assert refused.status == "failed"
        assert f"the store refuses the result: {error}" in refused.reason
        assert refused.error is not None
        assert isinstance(harness.codec.decode_error(refused.error), StoreError | TaskFailed)
        assert failed.error is not None
        assert failed.error.type_name == "builtins:ValueError"
        assert failed.error.message.startswith("xxx")
        assert f"the store refuses the error: {error}" in failed.reason
        runner.stop()
        await life

    virtually(scenario)


@pytest.mark.parametrize("error", [StoreFull("no space"), StoreUnavailable("away")], ids=repr)
@pytest.mark.parametrize("hurry", [False, True])
def test_a_runner_can_be_stopped_while_a_large_result_cannot_be_stored(
    error: StoreError, hurry: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(harness: Large) -> None:
        def make() -> str:
            return LARGE

        runner = harness.worker(make)
        life = await running(runner)
        harness.store.fail(error, "put")
        id = await harness.submit("make")
        await asyncio.sleep(60)
        asked = harness.clock.now()
        runner.stop(hurry=hurry)
        await life
        assert harness.clock.now() - asked < (3 if hurry else DRAIN + 15)
        assert await harness.story(id) == ["registered", "pending", "running"]
        assert re.search(rf"could not write .*: {re.escape(str(error))}", caplog.text)

    with caplog.at_level(logging.ERROR, "holdfast"):
        virtually(scenario)


def test_results_are_not_made_faster_than_they_are_stored() -> None:
    """Else a runner's memory would fill with results on their way."""

    class Lazy(Troubled):
        async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
            await asyncio.sleep(10)
            await super().put_payloads(app, payloads)

    async def scenario(harness: Large) -> None:
        most = 0

        def make(number: int) -> str:
            nonlocal most
            harness.runs.append(number)
            most = max(most, len(harness.runs) - len(harness.store._payloads))
            return f"{LARGE}{number}"

        ids = [await harness.submit("make", number) for number in range(12)]
        runner = harness.worker(make, concurrency=3)
        life = await running(runner)
        records = await harness.end(*ids)
        assert [await harness.result(record) for record in records] == [f"{LARGE}{number}" for number in range(12)]
        assert most == 3
        runner.stop()
        await life

    virtually(scenario, Lazy)


def test_the_payload_of_a_zombie_is_collected_after_a_day() -> None:
    async def scenario(harness: Large) -> None:
        async def make() -> str:
            await asyncio.sleep(10)
            return LARGE

        runner = harness.worker(make)
        life = await running(runner)
        id = await harness.submit("make")
        await asyncio.sleep(1)
        harness.store._put(replace(await harness.record(id), owner="another/0", epoch=2))
        await asyncio.sleep(20)
        assert (await harness.record(id)).status == "running"
        assert len(harness.store._payloads) == 1
        runner.stop()
        await life
        assert await harness.engine.payloads.collect() == (0, False)
        await asyncio.sleep(UNWANTED_SECONDS)
        assert await harness.engine.payloads.collect() == (1, False)

    virtually(scenario)
