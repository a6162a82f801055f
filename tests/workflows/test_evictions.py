"""A `finally` around every wait, under eviction by the engine: plain code in it runs, calls of Holdfast do nothing.

A run that waits for longer than it lingers is suspended, and its body leaves memory: its `finally` blocks run then,
and again in each later life. Steps, sleeps and children in them raise, and nothing of them is recorded, until the body
comes there by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.support import checker
from tests.support.checker import Bounds, Ledgers
from tests.support.fleet import APP, Fleet, virtually
from tests.support.patience import patient
from tests.support.wire import Wire

from holdfast import App, context
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.workflows import events as e
from holdfast.workflows.api import sleep
from holdfast.workflows.life import _lives

LINGER_SECONDS = 0.02
LONG_SECONDS = 3.0


class House:
    """An app whose workflows wait in every way, each with a `finally` around it."""

    def __init__(self) -> None:
        self.app = App("memory://", name=APP)
        self.plain: Counter[str] = Counter()  # side effects in `finally` blocks
        self.raised: Counter[str] = Counter()  # what calls of Holdfast raised there
        self.ran: Counter[str] = Counter()  # steps
        self.waits: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {}
        self._declare()

    def _declare(self) -> None:
        app = self.app

        @app.step(name="undo")
        async def undo(number: int) -> int:
            self.ran["undo"] += 1
            return number

        @app.step(name="fails", retries=Fixed(1, LONG_SECONDS))
        async def fails() -> str:
            self.ran["fails"] += 1
            if self.ran["fails"] == 1:
                raise OSError("at first")
            return "done"

        @app.workflow(name="child")
        async def child() -> str:
            await asyncio.sleep(LONG_SECONDS)
            return "grown"

        async def calls() -> None:
            """Everything that a body may ask for."""
            for name, call in {
                "step": lambda: undo(1),
                "sleep": lambda: sleep(1),
                "asyncio.sleep": lambda: asyncio.sleep(1),
                "child": lambda: child(),
                "future": lambda: asyncio.get_running_loop().create_future(),
            }.items():
                try:
                    asked: Any = call()
                    if name == "future":
                        continue
                    await asked
                except BaseException as error:
                    self.raised[f"{name}: {type(error).__name__}"] += 1
                    if not isinstance(error, Exception):
                        raise

        def guarded(name: str, wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
            @app.workflow(name=name)
            async def body() -> Any:
                try:
                    return await wait()
                finally:
                    self.plain[name] += 1
                    try:
                        await undo(0)
                    except BaseException as error:
                        self.raised[type(error).__name__] += 1
                        raise
                    finally:
                        self.plain[f"{name}, inner"] += 1
                        context().now()

            self.waits[name] = body

        async def gathered() -> list[str]:
            return list(await asyncio.gather(child(), asyncio.sleep(LONG_SECONDS, "rested")))

        async def grouped() -> str:
            async with asyncio.TaskGroup() as group:
                found = group.create_task(asyncio.sleep(LONG_SECONDS, "rested"))
            return found.result()

        async def limited() -> str:
            async with asyncio.timeout(60):
                return await asyncio.sleep(LONG_SECONDS, "rested")

        async def late() -> str:
            try:
                async with asyncio.timeout(LONG_SECONDS):
                    await asyncio.sleep(60)
            except TimeoutError:
                return "late"
            return ""

        async def first() -> int:
            tasks = [asyncio.create_task(asyncio.sleep(LONG_SECONDS + number)) for number in range(2)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return len(done)

        async def locked() -> str:
            lock, event, queue = asyncio.Lock(), asyncio.Event(), asyncio.Queue[str]()

            async def hold() -> None:
                async with lock:
                    await asyncio.sleep(LONG_SECONDS)
                    event.set()
                    queue.put_nowait("given")

            holding = asyncio.create_task(hold())
            await event.wait()
            async with lock:
                await holding
                return await queue.get()

        async def submitted() -> str:
            return await child.submit()

        guarded("sleep", lambda: sleep(LONG_SECONDS))
        guarded("asyncio.sleep", lambda: asyncio.sleep(LONG_SECONDS))
        guarded("awaited-child", lambda: child())
        guarded("submitted-child", submitted)
        guarded("retry", lambda: fails())
        guarded("gather", gathered)
        guarded("group", grouped)
        guarded("timeout", limited)
        guarded("late-timeout", late)
        guarded("wait", first)
        guarded("lock-event-queue", locked)

        @app.workflow(name="stubborn")
        async def stubborn() -> str:
            try:
                await sleep(LONG_SECONDS)
            finally:
                try:
                    await calls()
                finally:
                    self.plain["stubborn"] += 1
            return "done"

        self.stubborn = stubborn


RESULTS = {
    "sleep": None,
    "asyncio.sleep": None,
    "awaited-child": "grown",
    "submitted-child": "grown",
    "retry": "done",
    "gather": ["grown", "rested"],
    "group": "rested",
    "timeout": "rested",
    "late-timeout": "late",
    "wait": 1,
    "lock-event-queue": "given",
}


async def suspended(house: House, fleet: Fleet, name: str) -> str:
    """Run it until it is suspended."""
    fleet.settings = {"workflow_linger_seconds": LINGER_SECONDS}
    Wire(fleet)
    await fleet.started(*[task.definition for task in house.app.tasks.values()])
    client = fleet.engine(fleet.store)
    record, _ = house.app.tasks[name].prepared(client, (), {})
    await client.submitter.submit([record])
    await fleet.until_status(record.id, Status.SUSPENDED)
    return record.id


async def log_of(fleet: Fleet, id: str) -> list[e.Event]:
    return [event for page in await fleet.store.read_log(APP, id, limit=1000) for event in e.decode(page)]


@pytest.mark.parametrize("name", RESULTS)
def test_a_finally_around_a_wait(name: str) -> None:
    house = House()

    async def scenario(fleet: Fleet) -> None:
        id = await suspended(house, fleet, name)
        await asyncio.sleep(0.1)  # its worker has let go of it
        assert not [life for life in _lives.values() if life.about.invocation_id == id], "it is still in memory"
        assert (house.plain[name], house.plain[f"{name}, inner"]) == (1, 1)
        assert house.raised == {"Evicted": 1}
        assert house.ran["undo"] == 0
        assert "undo#1" not in {event.call for event in await log_of(fleet, id)}
        record = await fleet.end(id)
        lives = 1 + sum(entry.status is Status.SUSPENDED for entry in record.history)
        assert record.status is Status.SUCCESS, record
        assert fleet.codec.decode(record.result or b"") == RESULTS[name]
        assert (house.plain[name], house.plain[f"{name}, inner"]) == (lives, lives)
        assert (house.ran["undo"], house.raised["Evicted"]) == (1, lives - 1)
        ends = [event for event in await log_of(fleet, id) if event.call == "undo#1" and event.type in e.ENDS]
        assert len(ends) == 1
        found = await checker.dump(fleet.store, APP, clock=fleet.clock)
        bodies = {
            task: each.definition.function for task, each in house.app.tasks.items() if each.definition.is_workflow
        }
        wrong = checker.check(found, Ledgers(), bounds=Bounds(final_seconds=None), bodies=bodies)
        assert wrong == [], "\n".join(map(str, wrong))

    virtually(scenario)


def test_every_call_in_a_finally_is_refused_while_a_body_is_evicted() -> None:
    house = House()

    async def scenario(fleet: Fleet) -> None:
        id = await suspended(house, fleet, "stubborn")
        await asyncio.sleep(0.1)
        assert house.plain["stubborn"] == 1
        assert house.raised == {"step: Evicted": 1}  # and it passes: it is no Exception
        assert {event.call for event in await log_of(fleet, id)} == {"wait#1"}
        record = await fleet.end(id)
        assert record.status is Status.SUCCESS, record
        assert house.ran["undo"] == 1

    virtually(scenario)


def test_a_runner_that_ends_evicts_what_it_has_in_memory() -> None:
    """A body that waits and was not suspended yet: the runner hands it over, and its `finally` is not recorded."""
    house = House()

    async def scenario(fleet: Fleet) -> None:
        fleet.settings = {"workflow_linger_seconds": 60.0}
        Wire(fleet)
        definitions = [task.definition for task in house.app.tasks.values()]
        member = await fleet.started(*definitions)
        client = fleet.engine(fleet.store)
        record, _ = house.app.tasks["sleep"].prepared(client, (), {})
        await client.submitter.submit([record])
        await fleet.until_status(record.id, Status.RUNNING)
        await asyncio.sleep(1.0)
        assert house.plain["sleep"] == 0
        await member.stop()
        assert house.plain["sleep"] == 1
        assert (house.ran["undo"], house.raised["Evicted"]) == (0, 1)
        await fleet.started(*definitions)
        assert (await fleet.end(record.id)).status is Status.SUCCESS
        assert house.ran["undo"] == 1

    virtually(scenario)


def test_a_finally_of_a_plain_body(tmp_path: Path) -> None:
    """A plain body waits on a thread of its own, which its eviction ends."""
    app = App(f"sqlite:///{tmp_path / 'store.db'}", poll_interval_seconds=0.1, workflow_linger_seconds=0.05)
    seen: list[str] = []

    @app.step(name="undo")
    def undo() -> None:
        seen.append("undo")

    @app.workflow(name="plain")
    def plain() -> str:
        try:
            sleep(1.0)
        finally:
            seen.append("finally")
            try:
                undo()
            except BaseException as error:
                seen.append(type(error).__name__)
                raise
        return "done"

    with app, app.runner():
        assert plain.submit().result(timeout=patient(20)) == "done"
    assert seen == ["finally", "Evicted", "finally", "undo"]
