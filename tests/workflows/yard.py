"""The app of the runner processes in these tests: ``holdfast run tests.workflows.yard:app``.

Steps write a line into a shared file, so that a test sees what ran, how often and in which process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast import App, context
from holdfast.errors import WorkerLost
from holdfast.retries import Fixed
from holdfast.workflows.api import sleep

NOTES = "HOLDFAST_TEST_NOTES"


def note(what: str) -> None:
    """Write a line, whole, whoever else writes: what happened, and the process."""
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


def count(what: str) -> int:
    path = Path(os.environ[NOTES])
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(1 for line in lines if line.rpartition(" ")[0] == what)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def share(name: str) -> str:
    run = context()
    before = run.data.get("seen", [])
    run.data["seen"] = [*before, name]
    run.set(stage=name)
    note(f"shares {name}")
    return f"{name} after {before}"


async def survive() -> int:
    """Kill the process, twice."""
    note("apart")
    if count("apart") <= 2:
        die()
    context().data["where"] = os.getpid()
    return os.getpid()


def declare(app: App) -> dict[str, Any]:
    @app.step(name="falls")
    async def falls(number: int, times: int) -> int:
        """Kill the worker, the first few times."""
        note(f"falls {number}")
        if count(f"falls {number}") <= times:
            die()
        return number

    @app.workflow(name="yard:falling")
    async def falling(steps: int, times: int = 1) -> int:
        note("body")
        return sum([await falls(number, times) for number in range(steps)])

    @app.step(name="once", at_most_once=True)
    async def once() -> None:
        note("once")
        die()

    @app.workflow(name="yard:careful")
    async def careful() -> str:
        try:
            await once()
        except WorkerLost as error:
            return f"lost: {error}"
        return "done"

    shares = app.step(name="shares", executor="process")(share)
    apart = app.step(name="apart")(survive)

    @app.workflow(name="yard:sharing")
    async def sharing() -> list[Any]:
        context().data["seen"] = ["body"]
        told = [await shares("one"), await shares("two")]
        return [told, context().data["seen"], os.getpid()]

    @app.workflow(name="yard:suspect")
    async def suspect() -> list[int]:
        note("body")
        found = await apart()
        return [found, context().data["where"], os.getpid()]

    @app.step(name="paces")
    async def paces(number: int, seconds: float) -> int:
        note(f"paces {number}")
        await asyncio.sleep(seconds)
        note(f"paced {number}")
        return number

    @app.workflow(name="yard:walk")
    async def walk(steps: int, seconds: float) -> int:
        return sum([await paces(number, seconds) for number in range(steps)])

    @app.step(name="far", retries=Fixed(2, 0.1))
    def far(what: str) -> list[str]:
        note(f"far {what}")
        while what == "slow" and not context().cancelled:
            time.sleep(0.02)
        return [context().idempotency_key, context().invocation_id]

    @app.workflow(name="yard:reach")
    async def reach(what: str) -> list[str]:
        return await far.options(queue="far")(what)

    @app.workflow(name="yard:reach_for")
    async def reach_for(what: str, seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                await far.options(queue="far")(what)
        except TimeoutError:
            note("gave up")
            return "gave up"
        return "reached"

    @app.workflow(name="yard:child")
    async def child(seconds: float) -> str:
        note("child")
        await sleep(seconds)
        return "grown"

    @app.step(name="falls_over")
    async def falls_over() -> None:
        note("falls over")
        die()

    @app.workflow(name="yard:parent")
    async def parent() -> str:
        """Give up a child, then kill the worker."""
        try:
            async with asyncio.timeout(0.5):
                await child(3600)
        except TimeoutError:
            await falls(7, 1)
        return "went on"

    @app.workflow(name="yard:doomed")
    async def doomed() -> None:
        """Be ended by the crash cap while a child is awaited and another is on its own."""
        child.submit(3600.0)
        awaited = asyncio.create_task(child(3600.0))
        await paces(0, 0.5)  # both are submitted by then
        await asyncio.gather(awaited, falls_over())

    return {
        "falling": falling,
        "careful": careful,
        "sharing": sharing,
        "suspect": suspect,
        "walk": walk,
        "reach": reach,
        "reach_for": reach_for,
        "parent": parent,
        "doomed": doomed,
    }


if NOTES in os.environ and "HOLDFAST_URL" in os.environ:  # in a runner
    app = App()
    declare(app)
