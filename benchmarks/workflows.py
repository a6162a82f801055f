"""``make bench-workflows``: steps per second, replay, and what sleeping runs cost, for each store.

A rate counts recorded steps of no-op functions, from the first submit to the last end, with one runner in this process.
On MongoDB it stands beside lone inserts with majority and journal into the same server, which no store can be faster
than: pairs of both in turns, so that a busy machine slows both. Everything is the median over its rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, end_orderly
from holdfast import App
from holdfast.model.status import Status

_LIMIT_SECONDS = 600.0
_PAIRS = 10
_ROUNDS = 3


class Sizes:
    """How much is done for one figure."""

    def __init__(self, *, quick: bool) -> None:
        self.rounds = 1 if quick else _ROUNDS
        self.pairs = 1 if quick else _PAIRS
        self.steps = 20 if quick else 100
        self.repeatable = 100 if quick else 2_000
        self.runs = 10 if quick else 100
        self.replays = (300,) if quick else (10_000, 50_000)
        self.sleepers = 50 if quick else 1_000


class Workflows:
    """An app with the workflows that are measured."""

    def __init__(self, url: str, **settings: Any) -> None:
        app = self.app = App(url, name="bench-workflows", **settings)

        @app.step(name="effect")
        async def effect(number: int) -> int:
            return number

        @app.step(name="reads", repeatable=True)
        async def reads(number: int) -> int:
            return number

        @app.workflow(name="sequence")
        async def sequence(steps: int) -> int:
            total = 0
            for number in range(steps):
                total += await effect(number)
            return total

        @app.workflow(name="computation")
        async def computation(steps: int) -> int:
            total = 0
            for number in range(steps):
                total += await reads(number)
            return total

        @app.workflow(name="sleeper")
        async def sleeper(steps: int) -> int:
            total = 0
            for number in range(steps):
                total += await reads(number)
            await asyncio.sleep(86_400)
            return total

        self.sequence, self.computation, self.sleeper = sequence, computation, sleeper


# --- rates


def sequential(url: str, sizes: Sizes) -> float:
    """Return the steps per second of one run, from the end of its first step to the end of its last."""
    made = Workflows(url)
    with made.app as app, app.runner():
        made.sequence.submit(3).result(_LIMIT_SECONDS)
        run = made.sequence.submit(sizes.steps)
        run.result(_LIMIT_SECONDS)
        ends = [event.at for event in run.events(limit=10 * sizes.steps) if event.type == "step_completed"]
        return (len(ends) - 1) / (ends[-1] - ends[0])


def repeatable(url: str, sizes: Sizes) -> float:
    made = Workflows(url)
    with made.app as app, app.runner():
        made.computation.submit(3).result(_LIMIT_SECONDS)
        began = time.perf_counter()
        made.computation.submit(sizes.repeatable).result(_LIMIT_SECONDS)
        return sizes.repeatable / (time.perf_counter() - began)


def parallel(url: str, sizes: Sizes) -> float:
    """Return the steps per second of many runs of ten steps, with as many slots as runs."""
    made = Workflows(url)
    with made.app as app, app.runner(concurrency=sizes.runs):
        made.sequence.submit(3).result(_LIMIT_SECONDS)
        began = time.perf_counter()
        made.sequence.map([10] * sizes.runs).results(timeout=_LIMIT_SECONDS)
        return 10 * sizes.runs / (time.perf_counter() - began)


def lone_inserts(url: str, sizes: Sizes) -> float:
    """Return inserts per second of small documents into MongoDB, one after the other, majority and journal."""
    from pymongo import MongoClient
    from pymongo.write_concern import WriteConcern

    with MongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        collection = database.get_collection("lone", write_concern=WriteConcern("majority", j=True))
        collection.insert_one({"n": -1})
        began = time.perf_counter()
        for number in range(sizes.steps):
            collection.insert_one({"n": number, "data": b"x" * 150})
        return sizes.steps / (time.perf_counter() - began)


# --- replay and sleep


def replay_seconds(url: str, steps: int) -> float:
    """Return the seconds that a replay takes: a sleeping run is woken, replays its log, and ends."""
    made = Workflows(url, workflow_max_events=10_000_000)
    with made.app as app, app.runner():
        run = made.sleeper.submit(steps)
        _until(lambda: run.status is Status.SUSPENDED)
        began = time.perf_counter()
        run.wake()
        run.result(_LIMIT_SECONDS)
        return time.perf_counter() - began


def sleeping_bytes(url: str, sizes: Sizes) -> float:
    """Return the bytes that this process grows by for each run that sleeps."""
    made = Workflows(url)
    with made.app as app, app.runner():
        grown = []
        for _ in range(3):  # the first ones grow the heap itself
            before = _resident()
            made.sleeper.map([1] * sizes.sleepers)
            _until(functools.partial(_all_sleep, app))
            gc.collect()
            grown.append((_resident() - before) / sizes.sleepers)
        return max(0.0, grown[-1])


def _all_sleep(app: App) -> bool:
    return not app.invocations(status=("registered", "pending", "running", "rerouted"), limit=1)


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _LIMIT_SECONDS
    while not is_so():
        if time.monotonic() > give_up:
            raise RuntimeError(f"nothing happened for {_LIMIT_SECONDS:g} s")
        time.sleep(0.02)


# --- the program


def measure(name: str, sizes: Sizes, quiet: Quiet) -> dict[str, float]:
    figures: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        figures.setdefault(what, []).append(value)

    with TARGETS[name].served() as fresh:
        for _ in range(sizes.pairs if name == "mongo" else sizes.rounds):
            quiet.wait()
            with fresh() as url:
                rate = sequential(url, sizes)
                note(f"{sizes.steps} steps, one after the other [1/s]", rate)
            if name == "mongo":
                with fresh() as url:
                    lone = lone_inserts(url, sizes)
                note("lone inserts, majority [1/s]", lone)
                note("steps / lone inserts", rate / lone)
        for what, run in (("repeatable steps [1/s]", repeatable), (f"{sizes.runs} runs × 10 steps [1/s]", parallel)):
            for _ in range(sizes.rounds):
                quiet.wait()
                with fresh() as url:
                    note(what, run(url, sizes))
        for events in sizes.replays:
            with fresh() as url:
                note(f"replay of {events:,} events [s]", replay_seconds(url, events // 3))
        with fresh() as url:
            note("a sleeping run [bytes]", sleeping_bytes(url, sizes))
    return {what: statistics.median(values) for what, values in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workflows")
    parser.add_argument("--stores", default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it work at all?")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    end_orderly()
    sizes, quiet = Sizes(quick=options.quick), Quiet(0.0 if options.quick else 60.0)
    results: dict[str, dict[str, float]] = {}
    for name in options.stores.split(","):
        try:
            results[name] = measure(name, sizes, quiet)
        except CannotServe as error:
            print(f"{name}: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(results))
        return
    rows = list(dict.fromkeys(what for figures in results.values() for what in figures))
    cells = [[what, *[_cell(figures.get(what)) for figures in results.values()]] for what in rows]
    print(table(["workflows", *results], cells))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
