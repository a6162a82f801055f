"""The queue of the World on virtual time: a real runner and a store in memory; only the application is on paper."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from tests.support.engines import make_engine
from tests.world.application import Delivered, OnPaper, taken

from holdfast.archive.retention import Retention
from holdfast.fleet.core_tasks import CoreTaskRegistry
from holdfast.fleet.runner import Runner
from holdfast.fleet.services import Feature
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.foreign import MAX_DELIVERIES
from holdfast.schedules.declared import CoreSchedules
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual
from holdfast.world.deliveries import runner_of_messages
from holdfast.world.delivery import Addresses
from holdfast.world.errors import WorldError
from holdfast.world.queue import Messages, as_message

BASE = "http://127.0.0.1:3000"
FLOW, STEP = "__wkf_workflow_checkout", "__wkf_step_charge"
MESSAGE = {"runId": "wrun_1", "deep": {"n": None}}


class Post:
    """A server of a World, and an application."""

    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None, **settings: Any) -> None:
        self.clock = clock
        self.store = store or MemoryStore(clock)
        self.engine = make_engine(self.store, clock, random.Random(7), **settings)
        self.messages = self.engine.part(Messages)
        self.application = OnPaper(clock.now)
        self.runner: Runner | None = None
        self._running: asyncio.Task[Any] | None = None

    async def serve(self) -> None:
        def features(engine: Engine, core: CoreTaskRegistry) -> Sequence[Feature]:
            return CoreSchedules(core), Retention(engine)

        made = runner_of_messages(self.engine, features, post=self.application.post)
        self.runner = made
        self._running = asyncio.create_task(made.run())
        await asyncio.sleep(0.1)

    async def stop(self) -> None:
        if self.runner is not None and self._running is not None:
            self.runner.stop()
            await self._running

    async def pause(self, seconds: float) -> None:
        """Let time pass while no server runs."""
        await self.stop()
        await asyncio.sleep(seconds)
        await self.serve()

    async def send(self, message: Any = MESSAGE, *, queue: str = FLOW, operation: str = "op", **more: Any) -> str:
        given = {"queue_name": queue, "message": message, "operation_id": operation, "base_url": BASE} | more
        sent = await self.messages.send(**given)
        return str(sent["messageId"])

    async def record(self, id: str) -> InvocationRecord:
        found = await self.messages.get(id)
        assert found is not None
        return found

    async def ended(self, id: str, seconds: float = 1e6) -> InvocationRecord:
        async with asyncio.timeout(seconds):
            while (found := await self.record(id)).status not in FINAL:  # noqa: ASYNC110 - on virtual time
                await asyncio.sleep(0.5)
        return found


def virtually(scenario: Callable[[Post], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main(clock: VirtualClock) -> None:
        post = Post(clock, **settings)
        await post.engine.open()
        await post.serve()
        try:
            await scenario(post)
        finally:
            await post.stop()

    run_virtual(main)


def answering(*answers: tuple[int, bytes]) -> Callable[[Delivered], tuple[int, bytes]]:
    """Answer in turn; the last answer stays."""
    left = list(answers)
    return lambda delivered: left.pop(0) if len(left) > 1 else left[0]


# --- the four tests of the community


def test_a_message_is_delivered_once() -> None:
    async def scenario(post: Post) -> None:
        id = await post.send(headers={"x-trace": "1", "x-vqs-message-attempt": "9"})
        done = await post.ended(id)
        (got,) = post.application.got
        assert (done.status, got.path) == (Status.SUCCESS, f"{BASE}/.well-known/workflow/v1/flow")
        assert got.message == MESSAGE
        assert dict(got.headers) == {
            "x-trace": "1",
            "content-type": "application/json",
            "x-vqs-queue-name": FLOW,
            "x-vqs-message-id": id,
            "x-vqs-message-attempt": "1",
        }

    virtually(scenario)


def test_a_key_is_of_one_message_and_free_again_when_that_is_done() -> None:
    async def scenario(post: Post) -> None:
        first = await post.send(idempotency_key="s1", operation="a", delay_seconds=5)
        assert await post.send(idempotency_key="s1", operation="b") == first
        assert await post.send(idempotency_key="s1", operation="c", queue=STEP) != first
        await post.ended(first)
        again = await post.send(idempotency_key="s1", operation="d")
        assert again != first
        await post.ended(again)
        assert len(post.application.got) == 3

    virtually(scenario)


def test_a_failed_delivery_is_repeated_with_backoff_and_jitter() -> None:
    async def scenario(post: Post) -> None:
        post.application.answer = answering(*[(500, b"oh")] * 9, (200, b""))
        await post.ended(await post.send())
        assert [each.attempt for each in post.application.got] == list(range(1, 11))
        times = post.application.times
        waits = [after - before for before, after in itertools.pairwise(times)]
        for wait, wanted in zip(waits, (1, 2, 4, 8, 16, 32, 60, 60, 60), strict=True):
            assert 0.8 * wanted <= wait <= 1.2 * wanted + 1.1
        assert len({round(wait / wanted, 3) for wait, wanted in zip(waits, (1, 2, 4, 8), strict=False)}) > 1

    virtually(scenario)


def test_delays_over_a_day_are_kept() -> None:
    async def scenario(post: Post) -> None:
        now = post.clock.now()
        id = await post.send(delay_seconds=100_000)
        assert 0 <= (await post.record(id)).due_at - now - 100_000 < 1
        await post.pause(99_990)
        assert post.application.got == []
        post.application.answer = answering((200, b'{"timeoutSeconds": 90000}'), (200, b""))
        await until(lambda: post.application.got)
        await post.pause(89_990)
        await post.ended(id)
        first, second = post.application.times
        assert 100_000 <= first - now < 100_003
        assert 90_000 <= second - first < 90_003

    virtually(scenario)


# --- redelivery is no failure


@pytest.mark.parametrize("seconds", [0, 2.5])
def test_timeout_seconds_is_redelivery_and_no_failure(seconds: float) -> None:
    async def scenario(post: Post) -> None:
        again = json.dumps({"timeoutSeconds": seconds}).encode()
        post.application.answer = answering((503, b""), (200, again), (200, again), (200, b"null"))
        id = await post.send()
        record = await post.ended(id)
        times = post.application.times
        assert [each.attempt for each in post.application.got] == [1, 2, 1, 1]
        assert {each.headers["x-vqs-message-id"] for each in post.application.got} == {id}
        for before, after in itertools.pairwise(times[1:]):
            assert seconds <= after - before < seconds + 2.5
        assert record.failures == 1

    virtually(scenario)


def test_a_thousand_redeliveries_end_no_message() -> None:
    async def scenario(post: Post) -> None:
        count = 0

        def answer(delivered: Delivered) -> tuple[int, bytes]:
            nonlocal count
            count += 1
            return 200, b'{"timeoutSeconds": 0}' if count < 1000 else b"{}"

        post.application.answer = answer
        began = post.clock.now()
        assert (await post.ended(await post.send())).status is Status.SUCCESS
        assert {each.attempt for each in post.application.got} == {1}
        assert post.clock.now() - began < 60

    virtually(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        (404, b""),
        (302, b""),
        (200, b"<html>"),
        (200, b'{"timeoutSeconds": "5"}'),
        (200, b'{"timeoutSeconds": -1}'),
        (200, b'{"timeoutSeconds": -%d}' % 10**400),
        (200, b'{"timeoutSeconds": true}'),
        (200, b'{"timeoutSeconds": NaN}'),
        (200, b"\xff\xfe"),
    ],
)
def test_garbage_is_tried_again(answer: tuple[int, bytes]) -> None:
    async def scenario(post: Post) -> None:
        post.application.answer = answering(answer, (204, b""))
        id = await post.send()
        assert (await post.ended(id)).status is Status.SUCCESS
        assert [each.attempt for each in post.application.got] == [1, 2]

    virtually(scenario)


# --- ends


def test_a_message_ends_after_48_deliveries_that_failed() -> None:
    async def scenario(post: Post) -> None:
        post.application.answer = lambda delivered: (500, b"a bug")
        id = await post.send({"no": "run"})
        record = await post.ended(id)
        assert record.status is Status.FAILED
        assert [each.attempt for each in post.application.got] == list(range(1, MAX_DELIVERIES + 1))
        message = as_message(record)
        assert (message.status, message.http_status) == ("failed", 500)
        assert "HTTP 500: a bug" in message.error

    virtually(scenario)


def test_an_application_that_is_down_for_an_hour_costs_no_delivery() -> None:
    async def scenario(post: Post) -> None:
        post.application.answer = None
        id = await post.send()
        await asyncio.sleep(3600)
        assert post.application.refused > 60
        waiting = as_message(await post.record(id))
        assert (waiting.status, waiting.attempt, waiting.http_status) == ("waiting", 1, None)
        assert "no connection to http://127.0.0.1:3000" in waiting.error
        assert waiting.refusals > 55
        assert waiting.due_at - post.clock.now() < 75
        post.application.answer = taken
        assert (await post.ended(id, 80)).status is Status.SUCCESS
        assert [each.attempt for each in post.application.got] == [1]

    virtually(scenario)


def test_where_nothing_listens_any_more_the_last_registered_address_is_tried() -> None:
    async def scenario(post: Post) -> None:
        reach, gone = post.application.post, "http://127.0.0.1:3000"

        async def only_new(address: Any, *given: Any, **named: Any) -> Any:
            here, post.application.answer = post.application.answer, None if str(address) == gone else taken
            try:
                return await reach(address, *given, **named)
            finally:
                post.application.answer = here

        post.application.post = only_new  # type: ignore[method-assign]
        await post.stop()
        await post.serve()
        await post.engine.part(Addresses).register("http://localhost:4000/base/")
        await post.ended(await post.send())
        (got,) = post.application.got
        assert got.path == "http://localhost:4000/base/.well-known/workflow/v1/flow"
        await post.ended(await post.send({"x": 1}, queue=STEP, operation="2", base_url=None))
        assert post.application.got[1].path.endswith("/step")

    virtually(scenario)


def test_a_message_without_any_address_waits_for_one() -> None:
    async def scenario(post: Post) -> None:
        id = await post.send(base_url=None)
        await asyncio.sleep(10)
        assert "no application has registered" in as_message(await post.record(id)).error
        await post.engine.part(Addresses).register(BASE)
        assert (await post.ended(id, 20)).status is Status.SUCCESS

    virtually(scenario)


def test_a_service_url_comes_first() -> None:
    async def scenario(post: Post) -> None:
        await post.ended(await post.send())
        assert post.application.got[0].path.startswith("https://shop.example:443/app/.well-known")

    virtually(scenario, world_service_url="https://shop.example/app")


# --- sending


def test_a_repeated_send_is_the_same_message_also_after_its_end() -> None:
    async def scenario(post: Post) -> None:
        first = await post.send(operation="a")
        await post.ended(first)
        assert await post.send(operation="a") == first
        assert await post.send(operation="b") != first
        await asyncio.sleep(1)
        assert len(post.application.got) == 2

    virtually(scenario)


def test_a_delay_beyond_all_numbers_is_long() -> None:
    async def scenario(post: Post) -> None:
        found = await post.record(await post.send(delay_seconds=10**400))
        assert found.due_at > post.clock.now() + 30 * 365 * 86_400

    virtually(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        {"queue": "checkout"},
        {"queue": "__wkf_workflow_"},
        {"queue": "__wkf_workflow_a\r\nb: c"},
        {"queue": "__wkf_workflow_" + "x" * 2000},
        {"operation": ""},
        {"idempotency_key": ""},
        {"idempotency_key": 5},
        {"delay_seconds": -1},
        {"delay_seconds": True},
        {"delay_seconds": -(10**400)},
        {"delay_seconds": float("nan")},
        {"headers": {"a\nb": "c"}},
        {"headers": {"a": "b\r\nc"}},
        {"headers": {"a": 1}},
        {"base_url": "localhost:3000"},
        {"base_url": "ftp://localhost"},
        {"base_url": "http://user:pw@localhost"},
        {"base_url": "http://"},
        {"base_url": 5},
    ],
)
def test_what_is_no_request_is_refused(wrong: dict[str, Any]) -> None:
    async def scenario(post: Post) -> None:
        with pytest.raises(WorldError) as refused:
            await post.send(**wrong)
        assert refused.value.status == 400
        assert await post.messages.find() == []

    virtually(scenario)


LOOPBACK = ("http://127.0.0.1:1", "http://[::1]:2", "http://localhost:3")
FOREIGN = (
    *("http://169.254.169.254", "http://app.example.evil", "http://10.0.0.1", "http://[fd00::1]", "http://0.0.0.0"),
    *("http://[::ffff:10.0.0.1]", "http://2130706433.example", "http://metadata.google.internal", "http://192.168.0.1"),
)


def test_only_allowed_hosts_are_delivered_to_and_this_machine_is_one_of_them_or_not() -> None:
    async def scenario(post: Post) -> None:
        addresses = post.engine.part(Addresses)
        for url in ("http://app.example", "http://b:1"):
            await addresses.register(url)
        for url in (*FOREIGN, *LOOPBACK):
            with pytest.raises(WorldError, match="may not go to"):
                await addresses.register(url)

    virtually(scenario, world_hosts="app.example, b")


def test_without_a_list_of_hosts_only_this_machine_is_delivered_to() -> None:
    async def scenario(post: Post) -> None:
        addresses = post.engine.part(Addresses)
        for url in LOOPBACK:
            await addresses.register(url)
        for url in (*FOREIGN, "http://app.example"):
            with pytest.raises(WorldError, match="may not go to"):
                await addresses.register(url)

    virtually(scenario)


# --- again


def test_messages_are_delivered_again_on_request() -> None:
    async def scenario(post: Post) -> None:
        id = await post.send(delay_seconds=5000, idempotency_key="k")
        again = await post.messages.redeliver(await post.record(id), "one")
        assert await post.messages.redeliver(await post.record(id), "one") == again
        await post.ended(again, 5)
        assert (await post.record(id)).status is Status.CANCELLED
        third = await post.messages.redeliver(await post.record(again), "two")
        await post.ended(third, 5)
        assert [each.message for each in post.application.got] == [MESSAGE] * 2

    virtually(scenario)


def test_ended_messages_are_removed_when_their_time_is_over() -> None:
    async def scenario(post: Post) -> None:
        id = await post.send()
        await post.ended(id)
        await post.pause(3590)
        assert await post.messages.get(id) is not None
        await post.pause(20)
        await asyncio.sleep(125)
        assert await post.messages.get(id) is None

    virtually(scenario, world_message_retention_seconds=3600)


def test_a_delivery_of_ten_minutes_is_made_once() -> None:
    async def scenario(post: Post) -> None:
        reach = post.application.post

        async def slow(*given: Any, **named: Any) -> Any:
            await asyncio.sleep(600)
            return await reach(*given, **named)

        post.application.post = slow  # type: ignore[method-assign]
        await post.pause(0)
        id = await post.send()
        await asyncio.sleep(300)
        under_way = as_message(await post.record(id))
        assert (under_way.status, under_way.attempt) == ("delivering", 1)
        assert post.clock.now() - (under_way.owned_at or 0) < 302
        await post.ended(id)
        assert len(post.application.got) == 1

    virtually(scenario)


# --- several servers, and servers that die


def test_a_message_of_a_dead_server_is_delivered_by_another_and_counts() -> None:
    async def main(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        first, second = Post(clock, store), Post(clock, store)
        await first.engine.open()
        hanging = asyncio.Event()

        async def hang(*given: Any, **named: Any) -> Any:
            hanging.set()
            await asyncio.Event().wait()

        first.application.post = hang  # type: ignore[method-assign]
        await first.serve()
        id = await first.send()
        async with asyncio.timeout(30):
            await hanging.wait()
        await killed(first)
        await second.serve()
        assert (await second.ended(id, 60)).status is Status.SUCCESS
        assert [each.attempt for each in second.application.got] == [2]
        await second.stop()

    run_virtual(main)


async def killed(post: Post) -> None:
    """Let all tasks of a server vanish, as a kill does: without a write."""
    assert post._running is not None
    keep = asyncio.current_task()
    store, post.store.apply = post.store.apply, _never  # type: ignore[method-assign]
    remove, post.store.remove_runner = post.store.remove_runner, _never  # type: ignore[method-assign]
    for task in asyncio.all_tasks() - {keep}:
        task.cancel()
    await asyncio.sleep(1)
    post.store.apply, post.store.remove_runner = store, remove  # type: ignore[method-assign]


async def _never(*given: Any, **named: Any) -> Any:
    await asyncio.Event().wait()


def test_a_stop_waits_for_deliveries_and_releases_the_others() -> None:
    async def main(clock: VirtualClock) -> None:
        post = Post(clock)
        await post.engine.open()
        begun: list[bytes] = []

        async def slow(address: Any, path: str, headers: Any, body: bytes, **named: Any) -> Any:
            begun.append(body)
            await asyncio.sleep(json.loads(body)["seconds"])
            return await OnPaper(clock.now).post(address, path, headers, body, **named)

        post.application.post = slow  # type: ignore[method-assign]
        await post.serve()
        quick, long = [await post.send({"seconds": seconds}, operation=f"{seconds}") for seconds in (20, 1000)]
        await until(lambda: len(begun) == 2)
        before = clock.now()
        await post.stop()
        assert 30 <= clock.now() - before < 40
        assert (await post.record(quick)).status is Status.SUCCESS
        released = await post.record(long)
        assert (released.status, released.owner, as_message(released).attempt) == (Status.REROUTED, None, 1)

    run_virtual(main)


async def until(asked: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not asked():  # noqa: ASYNC110 - on virtual time
            await asyncio.sleep(0.05)
