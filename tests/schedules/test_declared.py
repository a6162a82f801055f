"""A worker that has done its share of tasks: it takes no more, and what runs has all the time it needs."""

from __future__ import annotations

import asyncio

from tests.runtime.test_worker import DRAIN, Harness, definition, running, virtually
from tests.support.engines import make_worker

from holdfast.executors.local import InlineExecutor
from holdfast.model.records import Serves
from holdfast.runtime.claim import Unlimited
from holdfast.runtime.worker import Worker


async def last(seconds: float, load: str = "") -> None:
    await asyncio.sleep(seconds)


def worker_for(harness: Harness, max_tasks: int) -> Worker:
    return make_worker(
        harness.engine,
        [definition(last)],
        owner=f"{harness.ids.new()}/1",
        serves=Serves(tasks=frozenset({"last"})),
        concurrency=10,
        permit=Unlimited(),
        drain_timeout_seconds=DRAIN,
        make_executor=lambda place, deliver: InlineExecutor(deliver),
        max_tasks=max_tasks,
    )


def test_it_never_takes_more_than_its_share_though_it_has_places() -> None:
    async def scenario(harness: Harness) -> None:
        ids = await harness.submit_many("last", 5, 0.1)
        account = await worker_for(harness, 3).run()
        assert (account.started, account.ended) == (3, 3)
        statuses = sorted([(await harness.record(id)).status.value for id in ids])
        assert statuses == ["registered", "registered", "success", "success", "success"]

    virtually(scenario)


def test_what_runs_outlives_the_drain_timeout() -> None:
    async def scenario(harness: Harness) -> None:
        id = await harness.submit("last", 100 * DRAIN)
        account = await worker_for(harness, 1).run()
        assert account.interrupted == 0
        assert await harness.story(id) == ["registered", "pending", "running", "success"]
        assert harness.clock.monotonic() >= 100 * DRAIN

    virtually(scenario)


def test_a_stop_limits_it_from_then_on_and_a_hurry_ends_it() -> None:
    async def scenario(harness: Harness) -> None:
        for hurry, longest in ((False, DRAIN), (True, 0.0)):
            id = await harness.submit("last", 100 * DRAIN)
            worker = worker_for(harness, 1)
            life = await running(worker)
            await asyncio.sleep(3 * DRAIN)
            assert not life.done()
            told_at = harness.clock.monotonic()
            worker.stop(hurry=hurry)
            await life
            assert longest <= harness.clock.monotonic() - told_at < longest + 2
            assert (await harness.story(id))[-2:] == ["killed", "rerouted"]
            await asyncio.wait({asyncio.create_task(_take(harness))})

    virtually(scenario)


async def _take(harness: Harness) -> None:
    """What was given back is done by another worker, so that the next round begins with an empty queue."""
    other = worker_for(harness, 1)
    await other.run()
