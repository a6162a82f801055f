"""What the runners of the fault tests run. Each call writes into a ledger when it begins and ends."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import functools
import os
import resource
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, cast

from tests.support.witness import What, Witness

from holdfast import App, all_of, chain, context, group, hook, on_event, on_result, on_status, stream
from holdfast.retries import Fixed
from holdfast.triggers import Trigger, from_event, from_result
from holdfast.webhooks import WebhookRequest

LEDGERS = "HOLDFAST_TEST_LEDGERS"
TRIGGERS = "HOLDFAST_TEST_TRIGGERS"
PADDING = "x" * 100_000  # more than lies in a record
LOOK_SECONDS = 0.02


def role() -> str:
    """What this process is, by its command."""
    commands = {"run": "runner", "worker": "worker"}
    return next((commands[word] for word in sys.argv[1:2] if word in commands), "client")


@functools.cache
def witness() -> Witness:
    return Witness.in_folder(os.environ[LEDGERS], role())


def released() -> bool:
    """Whether the test lets go of what waits in user code, everywhere or in this process."""
    folder = Path(os.environ[LEDGERS])
    return (folder / "release").exists() or (folder / f"release {os.getpid()}").exists()


# --- good ones


def work(token: str, seconds: float = 0.0, padding: str = "") -> str:
    with witness().execution(token) as execution:
        time.sleep(seconds)
        return execution.returns(f"{token} {execution.stamp} {padding}")


def work_slowly(token: str) -> str:
    return work(token, 0.3)


def hold(token: str) -> str:
    """Runs until the test says so."""
    with witness().execution(token) as execution:
        while not released():
            time.sleep(LOOK_SECONDS)
        return execution.returns(f"{token} {execution.stamp}")


async def await_release(token: str) -> str:
    with witness().execution(token) as execution:
        while not released():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        return execution.returns(f"{token} {execution.stamp}")


FALTERING = "faltering"


def falter(token: str) -> str:
    """Fails at first."""
    if context().attempt == 1:
        raise OSError(f"{token} fails at first")
    return token


def paced(token: str) -> str:
    """Few in a second, on all runners together."""
    return work(token)


def limited(token: str, seconds: float = 0.0) -> str:
    """One at a time, on all runners together."""
    with witness().execution(token) as execution, witness().lease("limited", 1, token=token):
        time.sleep(seconds)
        return execution.returns(f"{token} {execution.stamp}")


# --- tasks that wait for others


def declare_family(app: App) -> None:
    """Parents on a thread, on the loop and in a coroutine's group, each with a child. A child has a key: a parent that
    runs again waits for the same one.
    """
    child = app.task(name="child")(work_slowly)

    @app.task(name="parent")
    def parent(token: str) -> str:
        with witness().execution(token) as execution:
            told = child.options(key=f"{token} child").submit(f"{token} child").result(60)
            return execution.returns(f"{token} {execution.stamp} {bool(told)}")

    @app.task(name="async_parent")
    async def async_parent(token: str) -> str:
        with witness().execution(token) as execution:
            children = [await child.options(key=f"{token} child {n}").asubmit(f"{token} child {n}") for n in range(2)]
            told = await asyncio.gather(*children)
            return execution.returns(f"{token} {execution.stamp} {len(told)}")


# --- chains and groups


def after(told: object, token: str) -> str:
    """Follows others: what it is told comes of them."""
    with witness().execution(token) as execution:
        return execution.returns(f"{token} {execution.stamp} {bool(told)}")


FOLLOWING = ["one", "one second", "one third", "two", "two failed", "three 0", "three 1", "three 2", "three done"]
"""What runs of a chain, of a call that fails, and of a group, see `submit_chains` and `submit_group`."""


def submit_chains(app: App) -> list[str]:
    work, last, fail = (app.get_task(name) for name in ("work", "after", "fail"))
    run = chain(work.s("one"), last.s(token="one second"), last.s(token="one third")).submit()
    return [run.id, fail.s("two").on_error(last.s(token="two failed")).submit().id]


def submit_group(app: App) -> str:
    work, last = app.get_task("work"), app.get_task("after")
    return group([work.s(f"three {number}") for number in range(3)]).then(last.s(token="three done")).submit().id or ""


def fail(token: str) -> None:
    with witness().execution(token):
        raise ValueError(token)


# --- what code says of itself


def tell(token: str) -> str:
    """Say something in each attempt, and write down what the attempt before has left."""
    here = context()
    with witness().execution(token) as execution:
        note_step(f"{token} {here.attempt} found {here.last_checkpoint}")
        here.checkpoint(here.attempt)
        here.progress(here.attempt, total=3)
        here.set(token=token, attempt=str(here.attempt))
        time.sleep(0.5)  # the runner writes that meanwhile
        return execution.returns(f"{token} {execution.stamp}")


# --- what triggers call


def packed(order: str) -> dict[str, str]:
    """What the event says: more than lies in a record."""
    return {"order": order, "told": f"{order} packed", "padding": PADDING}


def order(token: str) -> dict[str, str]:
    """Its end calls `after_order`, and `after_both` once the order is packed."""
    with witness().execution(token) as execution:
        return execution.returns({"token": token, "after": f"{token} ended", "both": f"{token} ended and packed"})


def after_order(token: str) -> str:
    with witness().execution(token) as execution:
        return execution.returns(f"{token} {execution.stamp}")


# --- workflows


def note_step(name: str) -> str:
    """Write down that this step ran."""
    with (Path(os.environ[LEDGERS]) / "steps.txt").open("a") as file:
        file.write(f"{name}\n")
    return name


def visit(token: str) -> str:
    with witness().execution(token) as execution:
        return execution.returns(f"{token} {execution.stamp}")


EFFECTS = "effects"


def buy_step(token: str) -> str:
    """Write by the transaction of the step. No name is unique: twice would be seen."""
    session = context().session
    if isinstance(session, sqlite3.Connection):
        session.execute(f"INSERT INTO {EFFECTS} VALUES (?, ?)", (context().app, f"{token} bought"))
    else:
        effects = session.client.get_default_database()[EFFECTS]
        effects.insert_one({"app": context().app, "name": f"{token} bought"}, session=session)
    return note_step(f"{token} bought")


async def sell_step(token: str) -> str:
    session = context().session
    if isinstance(session, sqlite3.Connection):
        session.execute(f"INSERT INTO {EFFECTS} VALUES (?, ?)", (context().app, f"{token} sold"))
    else:
        effects = session.client.get_default_database()[EFFECTS]
        await effects.insert_one({"app": context().app, "name": f"{token} sold"}, session=session)
    return note_step(f"{token} sold")


def declare_trades(app: App) -> None:
    """Workflows with a plain and a coroutine step that are transactional."""
    options: Any = {"transactional": True}
    buy, sell = app.step(name="buy", **options)(buy_step), app.step(name="sell", **options)(sell_step)
    last = app.step(name="look")(visit)

    @app.workflow(name="trade")
    async def trade(token: str, is_async: bool = False) -> str:
        for step in (sell, buy) if is_async else (buy, sell):
            await cast(Any, step)(token)
        return str(await cast(Any, last)(token))


def run_step(name: str, *, failures: int = 0) -> str:
    """Write down which attempt of which call this is."""
    about = context()
    call = about.idempotency_key.rpartition("/")[2]
    with witness().step(call, id=about.invocation_id, attempt=about.attempt, epoch=about.epoch) as execution:
        if about.attempt <= failures:
            raise OSError(f"{name} fails at first")
        return execution.returns(name)


async def stop_at(name: str) -> str:
    return run_step(name)


def stop_at_plainly(name: str) -> str:
    return run_step(name)


async def stop_twice(name: str) -> str:
    return run_step(name, failures=1)


def stop_elsewhere(token: str) -> str:
    with witness().execution(token) as execution:
        return execution.returns(token)


JOURNEY = ["1", "2", "3", "4", "far", "5", "late", "6"]
JOURNEY_PAGES = 13
"""How many pages the log of a journey and of its child have, if no step of its `gather` shares one with its sister."""


def declare_journey(app: App) -> None:
    """A workflow with everything: its log has some twenty events."""
    stop, plain = app.step(name="stop")(stop_at), app.step(name="plain")(stop_at_plainly)
    twice = app.step(name="twice", retries=Fixed(2, 0.05))(stop_twice)
    far = app.step(name="far", queue="far")(stop_elsewhere)

    @app.workflow(name="detour")
    async def detour(name: str) -> str:
        return str(await cast(Any, plain)(name))

    @app.workflow(name="journey")
    async def journey(token: str) -> list[str]:
        seen = [await stop("1")]
        seen += await asyncio.gather(stop("2"), cast(Any, plain)("3"))
        seen.append(await twice("4"))
        async with asyncio.timeout(60):
            seen.append(await cast(Any, far)(f"{token} far"))
        await asyncio.sleep(0.3)
        seen.append(await detour("5"))
        try:
            async with asyncio.timeout(0.05):
                await asyncio.sleep(60)
        except TimeoutError:
            seen.append("late")
        seen.append(await stop("6"))
        return seen


WORDS = 6
"""That a chant has in each stream, and a chapter."""


def _word(token: str, number: int, step: str) -> str:
    about = context()
    padding = PADDING if number == 2 else ""
    facts = {"id": about.invocation_id, "step": step, "attempt": about.attempt, "epoch": about.epoch}
    return witness().says(f"{token} {number} {padding}", "words", **facts)


def chant(token: str) -> str:
    """Write a few words, each in a page of its own."""
    with witness().execution(token) as execution:
        for number in range(WORDS):
            stream("words").write(_word(token, number, ""))
            stream("words").flush()
        return execution.returns(f"{token} {execution.stamp}")


async def write_chapter(token: str) -> str:
    about = context()
    call = about.idempotency_key.rpartition("/")[2]
    with witness().step(call, id=about.invocation_id, attempt=about.attempt, epoch=about.epoch) as execution:
        for number in range(WORDS):
            await stream("words").write(_word(token, number, call))
            await stream("words").flush()
        return execution.returns(token)


TITLES = ["begun", "first", "second", "done"]


def declare_streams(app: App) -> None:
    """A workflow whose body and steps write to streams."""
    chapter = app.step(name="chapter")(write_chapter)

    @app.workflow(name="novel")
    async def novel(token: str) -> str:
        async with stream("titles") as out:
            await out.write(TITLES[0])
            for title in TITLES[1:3]:
                await chapter(f"{token} {title}")
                await out.write(title)
            await out.write(TITLES[3])
        return token


def bodies(app: App) -> dict[str, Any]:
    """The code of the workflows of an app, by their names."""
    return {name: task.definition.function for name, task in app.tasks.items() if task.definition.is_workflow}


def declare_workflows(app: App) -> None:
    """A workflow that has steps, sleeps for longer than it lingers, and waits for a child."""
    declare_trades(app)
    declare_streams(app)
    note, last = app.step(name="note")(note_step), app.step(name="visit")(visit)
    declare_journey(app)
    declare_vigil(app)

    @app.workflow(name="errand")
    async def errand(what: str) -> str:
        return str(await cast(Any, note)(what))

    @app.workflow(name="trip")
    async def trip(token: str) -> str:
        await cast(Any, note)(f"{token} first")
        await asyncio.sleep(0.4)
        assert await errand(f"{token} errand") == f"{token} errand"
        return str(await cast(Any, last)(token))


def declare_vigil(app: App) -> None:
    """A workflow with two hooks: it disposes of the first, and answers a request to the second, which stays open."""
    note, last = app.step(name="ask")(note_step), app.step(name="watch")(visit)

    @app.workflow(name="vigil")
    async def vigil(token: str) -> str:
        first = hook(f"{token} first", str)
        await cast(Any, note)(f"{token} asked")
        said = await first
        first.dispose()
        second = hook(f"{token} second", WebhookRequest)
        await (await second).respond(200, said)
        return str(await cast(Any, last)(token))


# --- poison


def exits(token: str) -> None:
    _last_words(token)
    os._exit(3)


def segfaults(token: str) -> None:
    _last_words(token)
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def devours(token: str) -> None:
    """As a library does that was written for a machine with more memory."""
    _last_words(token)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**32, hard))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    while True:
        ctypes.memset(libc.malloc(2**28), 1, 1)


def _last_words(token: str) -> None:
    """That it begins, and that this process dies of it."""
    span = f"{token}-{os.getpid()}-{time.monotonic_ns()}"
    witness().write(What.EXEC_START, token=token, span=span)
    with witness().fault("kill", pid=os.getpid()):
        pass


ALL = (work, after, fail, hold, await_release, limited, paced, chant, tell, exits, segfaults, devours)
PACE, PACED_BURST = 2, 2
OPTIONS: dict[str, dict[str, Any]] = {"limited": {"limit": 1}, "paced": {"rate": f"{PACE}/s", "burst": PACED_BURST}}
PACKED = "packed"
CALLED: dict[str, Trigger] = {
    "after_order": on_status("order", arguments={"token": from_result("after")}),
    "after_event": on_event(PACKED, arguments={"token": from_event("told")}),
    "after_both": all_of(
        on_event(PACKED, correlate="order"),
        on_result("order", correlate="token", arguments={"token": from_result("both")}),
    ),
}
"""Tasks that are called by triggers."""


def declare(app: App, *, with_triggers: bool) -> None:
    """All tasks of these stories. Runners know those with triggers only if a story is about them."""
    for function in ALL:
        app.task(name=function.__name__, **OPTIONS.get(function.__name__, {}))(function)
    declare_workflows(app)
    declare_family(app)
    app.task(name=FALTERING, retries=Fixed(2, 0.01))(falter)
    if with_triggers:
        app.task(name="order")(order)
        for name, trigger in CALLED.items():
            app.task(name=name, triggers=[trigger])(after_order)
