"""Random bodies of workflows: programs as plain data, and the coroutine function that runs one.

As a program it replays finished logs, and prints what the body did::

    python -m tests.workflows.random_bodies < cases.json
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import msgspec
from tests.workflows.lives import Body, Diverged, Owner, PlainOwner, made_step

from holdfast import App
from holdfast.workflows.api import sleep
from holdfast.workflows.events import Event
from holdfast.workflows.life import current_life

Program = list[Any]
KINDS = (
    *("step", "sleep", "name", "chance", "fail", "seq", "gather", "group", "timeout", "wait", "wait_for"),
    *("lock", "queue", "event", "cancel", "finally", "generator", "keyed", "child", "submit", "garbage"),
)
LEAVES = ("step", "step", "step", "sleep", "name", "chance", "fail", "keyed", "child", "garbage")
PLAIN_KINDS = ("step", "keyed", "child", "submit", "sleep", "chance", "fail", "seq", "finally")
PLAIN_LEAVES = ("step", "step", "sleep", "chance", "fail", "keyed", "child")
VERSIONED = ("wait_for", "group")  # other Python versions run these in another order


def random_program(seed: int | random.Random, *, without: tuple[str, ...] = (), is_plain: bool = False) -> Program:
    """Return a program for an async body, or for a plain one. A `random.Random` may be Hypothesis's own."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    kinds = [kind for kind in (PLAIN_KINDS if is_plain else KINDS) if kind not in without]
    leaves = PLAIN_LEAVES if is_plain else LEAVES
    return ["seq", [_node(rng, kinds, leaves, 3) for _ in range(rng.randint(3, 6))]]


def _node(rng: random.Random, kinds: list[str], leaves: tuple[str, ...], depth: int) -> Program:
    kind = rng.choice(kinds if depth else leaves)
    if kind == "fail" and rng.random() < 0.7:
        kind = "step"
    some = [_node(rng, kinds, leaves, depth - 1) for _ in range(rng.randint(2, 3))] if kind not in LEAVES else []
    match kind:
        case "step" | "chance" | "name" | "fail" | "child":
            return [kind, rng.randint(0, 9)]
        case "keyed":
            return [kind, rng.randint(0, 999)]
        case "garbage":
            return [kind]
        case "submit":
            return [kind, rng.randint(0, 9), some[0], rng.random() < 0.7]
        case "sleep":
            return [kind, rng.choice([0.0, 0.3, 1.0, 5.0])]
        case "timeout" | "wait_for":
            return [kind, rng.choice([0.2, 1.0, 4.0]), some[0]]
        case "wait":
            return [kind, some, rng.choice(["first", "all", "timeout"])]
        case "gather":
            return [kind, some, rng.random() < 0.5]
        case "generator":
            return [kind, some[0], rng.randint(0, 2)]
        case "cancel" | "finally" | "event":
            return [kind, some[0], some[1]]
        case _:
            return [kind, some]


async def _work(number: int) -> int:
    raise AssertionError("the owner of the run answers for it")


work = made_step(_work, name="work")
app = App("memory://", name="tests")


@app.workflow(name="kid", check=False)
async def kid(number: int) -> int:
    raise AssertionError("the owner of the run answers for it")


class _Garbage:
    """A cycle, which the collector alone can end. It notes if that happens in the midst of a body."""

    def __init__(self, trace: list[str]) -> None:
        self.itself, self._trace = self, trace

    def __del__(self) -> None:
        if current_life() is not None:
            self._trace.append("collected in a body")


def plain_body_of(program: Program) -> Callable[[], list[str]]:
    def body() -> list[str]:
        trace: list[str] = []
        _run_plainly(program, trace)
        return trace

    return body


def _run_plainly(node: Program, trace: list[str]) -> None:
    kind, *given = node
    called = cast(Any, work)
    match kind:
        case "step":
            trace.append(f"{called(given[0])}")
        case "keyed":
            trace.append(f"{called.options(key=str(given[0]))(given[0])}")
        case "child":
            trace.append(f"{cast(Any, kid)(given[0])}")
        case "submit":
            handle = kid.submit(given[0])
            _caught_plainly(given[1], trace)
            if given[2]:
                trace.append(f"{handle.result()}")
        case "sleep":
            sleep(given[0])
        case "chance":
            life = current_life()
            assert life is not None
            trace.append(f"{life.random.random()} {life.now}")
        case "fail":
            raise KeyError(given[0])
        case "seq":
            for each in given[0]:
                _caught_plainly(each, trace)
        case "finally":
            try:
                _run_plainly(given[0], trace)
            finally:
                trace.append("finally")
                _run_plainly(given[1], trace)


def _caught_plainly(node: Program, trace: list[str]) -> None:
    try:
        _run_plainly(node, trace)
    except Exception as error:
        trace.append(type(error).__name__)


def body_of(program: Program) -> Body:
    async def body() -> list[str]:
        trace: list[str] = []
        await _run(program, trace)
        return trace

    return body


async def _run(node: Program, trace: list[str]) -> None:
    kind, *given = node
    match kind:
        case "step":
            trace.append(f"{await work(given[0])}")
        case "keyed":
            trace.append(f"{await work.options(key=str(given[0]))(given[0])}")
        case "child":
            trace.append(f"{await kid(given[0])}")
        case "submit":
            handle = kid.submit(given[0])
            await _caught(given[1], trace)
            if given[2]:
                trace.append(f"{await handle}")
        case "garbage":
            for _ in range(20):
                _Garbage(trace)
        case "sleep":
            await asyncio.sleep(given[0])
        case "name":
            task = asyncio.current_task()
            trace.append("" if task is None else task.get_name())
        case "chance":
            life = current_life()
            assert life is not None
            trace.append(f"{life.random.random()} {life.now}")
        case "fail":
            raise KeyError(given[0])
        case "seq":
            for each in given[0]:
                await _caught(each, trace)
        case "gather":
            found = await asyncio.gather(*(_run(each, trace) for each in given[0]), return_exceptions=given[1])
            trace.append(f"gathered {len(found)}")
        case "group":
            async with asyncio.TaskGroup() as group:
                for each in given[0]:
                    group.create_task(_run(each, trace))
        case "timeout":
            async with asyncio.timeout(given[0]):
                await _run(given[1], trace)
        case "wait_for":
            await asyncio.wait_for(_run(given[1], trace), given[0])
        case "wait":
            await _wait(given[0], given[1], trace)
        case "lock":
            await _locked(given[0], trace)
        case "queue":
            await _queued(given[0], trace)
        case "event":
            event = asyncio.Event()
            waiting = asyncio.create_task(_after(event, given[0], trace))
            await _caught(given[1], trace)
            event.set()
            await waiting
        case "cancel":
            task = asyncio.create_task(_run(given[0], trace))
            await _caught(given[1], trace)
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            trace.append(f"cancelled {type(ended).__name__}")
        case "finally":
            try:
                await _run(given[0], trace)
            finally:
                trace.append("finally")
                await _run(given[1], trace)
        case "generator":
            async for each in _generated(given[0], trace):
                if each == given[1]:
                    break  # it is left open


async def _caught(node: Program, trace: list[str]) -> None:
    try:
        await _run(node, trace)
    except Exception as error:
        trace.append(type(error).__name__)


async def _wait(nodes: list[Program], mode: str, trace: list[str]) -> None:
    tasks = [asyncio.create_task(_caught(each, trace)) for each in nodes]
    when = asyncio.FIRST_COMPLETED if mode == "first" else asyncio.ALL_COMPLETED
    try:
        done, pending = await asyncio.wait(tasks, timeout=0.9 if mode == "timeout" else None, return_when=when)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    for task in done:  # in the order of the set, on purpose
        trace.append(f"done {task.get_name()}")
        await work(10)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def _locked(nodes: list[Program], trace: list[str]) -> None:
    lock = asyncio.Lock()

    async def each_of(node: Program) -> None:
        async with lock:
            await _caught(node, trace)

    await asyncio.gather(*map(each_of, nodes))


async def _queued(nodes: list[Program], trace: list[str]) -> None:
    queue: asyncio.Queue[Program | None] = asyncio.Queue(1)

    async def consume() -> None:
        while (node := await queue.get()) is not None:
            await _caught(node, trace)

    consumers = [asyncio.create_task(consume()) for _ in range(2)]
    try:
        for each in [*nodes, None, None]:
            await queue.put(each)
        await asyncio.gather(*consumers)
    finally:
        for task in consumers:
            task.cancel()


async def _after(event: asyncio.Event, node: Program, trace: list[str]) -> None:
    await event.wait()
    await _caught(node, trace)


async def _generated(node: Program, trace: list[str]) -> AsyncIterator[int]:
    try:
        for number in range(2):
            await _caught(node, trace)
            yield number
    finally:
        trace.append("closed")
        with contextlib.suppress(ValueError):
            await work(11)


# --- finished runs, for other processes

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Event])


def finished(
    seed: int | random.Random, *, without: tuple[str, ...] = (), is_plain: bool = False, **chances: float
) -> dict[str, Any]:
    """Return a run, from its program to its result, as plain data."""
    program = random_program(seed, without=without, is_plain=is_plain)
    with _owner_of(program, seed, is_plain=is_plain) as owner:
        result = owner.run(**chances)
    seed = seed if isinstance(seed, int) else -1
    log = base64.b64encode(_encoder.encode(owner.log)).decode()
    about = {"seed": seed, "program": program, "is_plain": is_plain}
    return {**about, "log": log, "commands": owner.commands, "result": result}


@contextlib.contextmanager
def _owner_of(
    program: Program, seed: int | random.Random, *, is_plain: bool, log: list[Event] | None = None
) -> Iterator[Owner]:
    if not is_plain:
        yield Owner(body_of(program), seed, log=log)
        return
    owner = PlainOwner(plain_body_of(program), seed, log=log)
    try:
        yield owner
    finally:
        owner.close()


def replayed(case: dict[str, Any]) -> dict[str, Any]:
    """Return the same run after a replay of its log. Raises `Diverged`."""
    log = _decoder.decode(base64.b64decode(case["log"]))
    with _owner_of(case["program"], 0, is_plain=case["is_plain"], log=log) as owner:
        try:
            life = owner.begin()
            if life.ended is None:
                raise Diverged("the log ends before the body does")
            return {**case, "commands": owner.commands, "result": owner._result(life)}
        finally:
            owner.end()


def differences(cases: list[dict[str, Any]]) -> list[str]:
    """Return what differs when these are replayed here."""
    found = []
    for case in cases:
        try:
            if replayed(case) != case:
                found.append(f"seed {case['seed']}: other commands or another result")
        except Diverged as error:
            found.append(f"seed {case['seed']}: {error}")
    return found


def survives(seed: int | random.Random, *, is_plain: bool = False, **chances: float) -> str:
    """Return how the lives of one run differ under evictions, crashes and a cancel; empty if they do not."""
    try:
        return "; ".join(differences([finished(seed, is_plain=is_plain, **chances)]))
    except Diverged as error:
        return f"seed {seed}: {error}"


if __name__ == "__main__":
    given = json.load(sys.stdin)
    found = differences(given["cases"])
    found += [why for seed in given["seeds"] if (why := survives(seed, **given["chances"]))]
    json.dump({"python": f"{sys.version_info.major}.{sys.version_info.minor}", "found": found}, sys.stdout)
