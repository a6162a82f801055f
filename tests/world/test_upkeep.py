"""Runs that would wait for ever without upkeep: their message is spent, or nobody has sent one. On virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.world.application import Delivered
from tests.world.test_queue import BASE, Post

from holdfast.ids import Ids
from holdfast.model.log import Page
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual
from holdfast.world import devl
from holdfast.world.delivery import Addresses
from holdfast.world.errors import WorldError
from holdfast.world.records import invocation_of, run_name
from holdfast.world.storage import WorldStorage
from holdfast.world.upkeep import MAX_DELIVERIES_EXCEEDED

NAME = "workflow//./shop.ts//checkout"


@pytest.fixture(autouse=True)
def _few_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is spent after three deliveries: 48 take most of an hour."""
    monkeypatch.setattr("holdfast.world.delivery.MAX_DELIVERIES", 3)


class Runs(Post):
    """A server of a World with runs."""

    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None, **settings: Any) -> None:
        super().__init__(clock, store, **settings)
        self.storage = self.engine.part(WorldStorage)
        self._ids = Ids(clock, random.Random(3))

    async def create(self, run: str, kind: str, call: str | None = None, *, spec: int = 5, **data: Any) -> Any:
        event = {"eventType": kind, "specVersion": spec, "eventData": data} | ({"correlationId": call} if call else {})
        return await self.storage.events_create(run_id=run, event=event)

    async def run(self, *, spec: int = 5, is_started: bool = True) -> str:
        run = run_name(self._ids.new())
        await self.create(run, "run_created", spec=spec, deploymentId="d", workflowName=NAME, input=b"devl[[],1]")
        if is_started:
            await self.create(run, "run_started", spec=spec)
        return run

    async def status(self, run: str) -> str:
        return str((await self.storage.runs_get(run_id=run))["status"])

    async def events(self, run: str) -> list[Any]:
        return list((await self.storage.events_list(run_id=run))["data"])


def virtually(scenario: Callable[[Runs], Coroutine[Any, Any, None]], *, serves: bool = True) -> None:
    async def main(clock: VirtualClock) -> None:
        runs = Runs(clock)
        await runs.engine.open()
        await runs.engine.part(Addresses).register(BASE)
        if serves:
            await runs.serve()
        try:
            await scenario(runs)
        finally:
            await runs.stop()

    run_virtual(main)


def delivered_to(runs: Runs, run: str) -> list[Delivered]:
    return [each for each in runs.application.got if each.message.get("runId") == run]


# --- spent messages


@pytest.mark.parametrize("spec", [2, 4, 5, 7])
def test_a_run_whose_message_is_spent_has_failed(spec: int) -> None:
    async def scenario(runs: Runs) -> None:
        runs.application.answer = lambda delivered: (502, b"Bad Gateway")
        run = await runs.run(spec=spec)
        await runs.ended(await runs.send({"runId": run}))
        await asyncio.sleep(1)
        found = await runs.storage.runs_get(run_id=run)
        assert (found["status"], found["errorCode"]) == ("failed", MAX_DELIVERIES_EXCEEDED)
        error = found["error"] if spec < 5 else devl.loads(found["error"])
        assert "HTTP 502: Bad Gateway" in error["message"]
        assert [each["eventType"] for each in await runs.events(run)].count("run_failed") == 1

    virtually(scenario)


def test_a_server_that_dies_between_the_last_delivery_and_the_end_of_the_run_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(runs: Runs) -> None:
        runs.application.answer = lambda delivered: (500, b"")
        run = await runs.run()
        real, refused = runs.storage.events_create, 0

        async def away(**given: Any) -> Any:
            nonlocal refused
            if given["event"]["eventType"] == "run_failed" and (refused := refused + 1) < 4:
                raise WorldError("WorkflowWorldError", 503, "the store does not answer")
            return await real(**given)

        monkeypatch.setattr(runs.storage, "events_create", away)
        record = await runs.ended(await runs.send({"runId": run}))
        assert record.outbox == ("@world",)
        await asyncio.sleep(60)
        assert (await runs.status(run), (await runs.record(record.id)).outbox) == ("failed", ())

    virtually(scenario)


def test_the_message_of_a_run_that_is_gone_ends_alone() -> None:
    async def scenario(runs: Runs) -> None:
        runs.application.answer = lambda delivered: (500, b"")
        ended = await runs.run()
        await runs.create(ended, "run_completed", output=b"devl[1]")
        ids = [await runs.send({"runId": run}, operation=run) for run in (ended, "wrun_of_no_world")]
        for id in ids:
            await runs.ended(id)
        await asyncio.sleep(60)
        assert [(await runs.record(id)).outbox for id in ids] == [(), ()]
        assert await runs.status(ended) == "completed"

    virtually(scenario)


# --- runs that nothing is on the way to


def test_runs_without_a_message_get_one_at_the_start_of_a_server() -> None:
    async def scenario(runs: Runs) -> None:
        created, started, ended = await runs.run(is_started=False), await runs.run(), await runs.run()
        await runs.create(ended, "run_cancelled")
        await asyncio.sleep(20)
        await runs.serve()
        await asyncio.sleep(5)
        for run in (created, started):
            (got,) = delivered_to(runs, run)
            assert got.headers["x-vqs-queue-name"] == f"__wkf_workflow_{NAME}"
        assert delivered_to(runs, ended) == []

    virtually(scenario, serves=False)


def test_a_hook_whose_wake_up_was_lost_is_noticed_within_minutes() -> None:
    async def scenario(runs: Runs) -> None:
        run = await runs.run()
        await runs.create(run, "hook_created", "hook_1", token="t")
        await runs.ended(await runs.send({"runId": run}, queue=f"__ns_wkf_workflow_{NAME}"))
        await asyncio.sleep(600)
        assert len(delivered_to(runs, run)) == 1  # it waits for its hook
        await runs.create(run, "hook_received", "hook_1", token="t", payload=b"devl[1]")
        await asyncio.sleep(130)
        assert len(delivered_to(runs, run)) == 2
        assert delivered_to(runs, run)[1].headers["x-vqs-queue-name"] == f"__ns_wkf_workflow_{NAME}"
        await asyncio.sleep(600)
        assert len(delivered_to(runs, run)) == 2

    virtually(scenario)


def test_a_hook_that_is_resumed_during_a_delivery_is_noticed() -> None:
    async def scenario(runs: Runs) -> None:
        run = await runs.run()
        await runs.create(run, "hook_created", "hook_1", token="t")
        runs.application.seconds = 20.0
        id = await runs.send({"runId": run})
        await asyncio.sleep(15)  # the application has read the log by now
        assert len(delivered_to(runs, run)) == 1
        await runs.create(run, "hook_received", "hook_1", token="t", payload=b"devl[1]")
        await runs.ended(id)  # and the program that resumed the hook died before it sent its message
        await asyncio.sleep(200)
        assert len(delivered_to(runs, run)) == 2
        await asyncio.sleep(600)
        assert len(delivered_to(runs, run)) == 2

    virtually(scenario)


def test_a_run_that_no_message_can_name_keeps_none_from_the_others() -> None:
    async def scenario(runs: Runs) -> None:
        first, last = await runs.run(), ""
        await runs.create(
            run_name(runs._ids.new()), "run_created", deploymentId="d", workflowName="no\nheader", input=b"devl[[],1]"
        )
        last = await runs.run()
        await asyncio.sleep(20)
        await runs.serve()
        await asyncio.sleep(5)
        assert [len(delivered_to(runs, run)) for run in (first, last)] == [1, 1]

    virtually(scenario, serves=False)


def test_a_damaged_log_keeps_no_message_from_other_runs() -> None:
    async def scenario(runs: Runs) -> None:
        first, damaged, last = [await runs.run() for _ in range(3)]
        id = invocation_of(damaged)
        assert id is not None
        await runs.create(damaged, "hook_created", "hook_1", token="t")
        await runs.create(last, "hook_created", "hook_2", token="u")
        page = {"first": 4, "last": 4, "epoch": 0, "operation": "op~1", "at": runs.clock.now(), "events": b"damaged"}
        await runs.store.append([Page(app=runs.engine.app, run=id, **page)])
        listed = await runs.storage.runs_list(status="running")
        assert [each["runId"] for each in listed["data"]] == [last, first]
        assert [each["hookId"] for each in (await runs.storage.hooks_list())["data"]] == ["hook_2"]
        with pytest.raises(WorldError, match="cannot be read"):
            await runs.storage.runs_get(run_id=damaged)
        await asyncio.sleep(20)
        await runs.serve()
        await asyncio.sleep(5)
        assert [len(delivered_to(runs, run)) for run in (first, last)] == [1, 1]

    virtually(scenario, serves=False)


def test_a_sleep_whose_message_was_lost_is_noticed_when_it_is_due() -> None:
    async def scenario(runs: Runs) -> None:
        run = await runs.run()
        due = dt.datetime.fromtimestamp(runs.clock.now() + 3600, dt.UTC)
        await runs.create(run, "wait_created", "wait_1", resumeAt=due)
        await runs.ended(await runs.send({"runId": run}))
        await asyncio.sleep(3500)
        assert len(delivered_to(runs, run)) == 1
        await asyncio.sleep(300)
        assert len(delivered_to(runs, run)) >= 2
        await runs.create(run, "wait_completed", "wait_1")
        await runs.create(run, "run_completed", output=b"devl[1]")
        before = len(delivered_to(runs, run))
        await asyncio.sleep(600)
        assert len(delivered_to(runs, run)) - before <= 1

    virtually(scenario)


def test_a_run_with_a_message_under_way_gets_no_other() -> None:
    async def scenario(runs: Runs) -> None:
        run = await runs.run()
        runs.application.answer = None
        await runs.send({"runId": run})
        await asyncio.sleep(1000)
        assert len(await runs.messages.find(run=run)) == 1

    virtually(scenario)


def test_two_servers_send_one_message_for_a_run() -> None:
    async def main(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        servers = [Runs(clock, store), Runs(clock, store)]
        await servers[0].engine.open()
        run = await servers[0].run()
        await asyncio.sleep(20)
        for server in servers:
            server.application.answer = None
        await asyncio.gather(*[server.serve() for server in servers])
        await asyncio.sleep(300)
        assert len(await servers[0].messages.find(run=run)) == 1
        for server in servers:
            await server.stop()

    run_virtual(main)


# --- any accident leads to an end


@pytest.mark.parametrize("seed", range(6))
def test_every_run_ends_whatever_happens_to_its_messages(seed: int) -> None:
    """An application of one step per delivery, which fails, hangs up or forgets to send its next message."""

    async def main(clock: VirtualClock) -> None:
        chance, store = random.Random(seed), MemoryStore(clock)
        servers = [Runs(clock, store), Runs(clock, store)]
        await servers[0].engine.open()
        await servers[0].engine.part(Addresses).register(BASE)
        steps: dict[str, int] = {}
        application = servers[0].application

        def answer(delivered: Delivered) -> tuple[int, bytes]:
            run, luck = delivered.message["runId"], chance.random()
            if luck < 0.3 and delivered.attempt < 3:
                return chance.choice([500, 503, 404]), b"no luck"
            steps[run] = steps.get(run, 0) + 1
            return 200, b'{"timeoutSeconds": %d}' % chance.choice([0, 1, 50]) if luck < 0.6 else b""

        application.answer = answer
        for server in servers:
            server.application = application
            await server.serve()
        runs = [await servers[0].run() for _ in range(10)]
        for run in runs:
            if chance.random() < 0.7:
                await servers[0].send({"runId": run}, operation=run)
        open = set(runs)
        async with asyncio.timeout(7200):
            while open:
                await asyncio.sleep(1)
                for run in [run for run in open if steps.get(run, 0) >= 5]:
                    with contextlib.suppress(WorldError):
                        await servers[1].create(run, "run_completed", output=b"devl[1]")
                    open.discard(run)
        for run in runs:
            kinds = [each["eventType"] for each in await servers[0].events(run)]
            assert kinds.count("run_completed") == 1
        for server in servers:
            await server.stop()

    run_virtual(main)
