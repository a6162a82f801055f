"""What `bench` measures, one function per measurement.

Each gets the URL of an empty store and the sizes, and answers figures by name. A drain is timed by what the store
kept: when each invocation ended stands in its record, so nothing has to watch while it goes on. The first 5 % are
left out, because they contain the start of the runner.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import workload
from benchmarks.worker import Worker
from benchmarks.workload import PLACES, Workload
from holdfast import App
from holdfast.model.status import Status
from holdfast.store.contract import Ability
from holdfast.task import Submittable

_WARM_UP_SHARE = 0.05
_LOOK_SECONDS = 0.02
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Sizes:
    """How much is done for one figure."""

    submits: int
    mapped: int
    drained: int
    waits: int
    idle_seconds: float
    rounds: int


FULL = Sizes(submits=1000, mapped=5000, drained=4000, waits=300, idle_seconds=5.0, rounds=3)
QUICK = Sizes(submits=100, mapped=500, drained=500, waits=50, idle_seconds=0.5, rounds=1)

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Measurement:
    """One run of something: what it yields (name and unit of each figure), and what a store must be able to do."""

    run: Callable[[str, Sizes], Figures]
    figures: Mapping[str, str]
    needs: Ability = Ability.NONE
    only_for: str = ""  # what the URL begins with


# --- submitting


def submit_one_by_one(url: str, sizes: Sizes) -> Figures:
    with workload.make(url).app as app:
        task = _function(app)
        task.submit(0)
        began = time.perf_counter()
        for number in range(sizes.submits):
            task.submit(number)
        return {"submit, one by one": sizes.submits / (time.perf_counter() - began)}


def submit_by_map(url: str, sizes: Sizes) -> Figures:
    with workload.make(url).app as app:
        task = _function(app)
        task.submit(0)
        began = time.perf_counter()
        task.map(range(sizes.mapped))
        return {"submit, map": sizes.mapped / (time.perf_counter() - began)}


def _function(app: App) -> Submittable[[int], int]:
    return app.get_task("benchmark:function")


# --- draining


def drain_functions(url: str, sizes: Sizes) -> Figures:
    return {"drain 1×10, functions": _drain_here(url, sizes, lambda made: made.function)}


def drain_coroutines(url: str, sizes: Sizes) -> Figures:
    return {"drain 1×10, coroutines": _drain_here(url, sizes, lambda made: made.coroutine)}


def _drain_here(url: str, sizes: Sizes, choose: Callable[[Workload], Submittable[[int], int]]) -> float:
    made = workload.make(url)
    with made.app as app:
        choose(made).map(range(sizes.drained))
        with app.runner(concurrency=PLACES):
            return _drain_rate(app, sizes.drained)


def drain_two_processes(url: str, sizes: Sizes) -> Figures:
    return {"drain 2×10, functions": _drain_elsewhere(url, sizes, 2)}


def drain_one_process(url: str, sizes: Sizes) -> Figures:
    """Not part of the bench: what a neighbour is compared with."""
    return {"drain 1×10, functions, other process": _drain_elsewhere(url, sizes, 1)}


def _drain_elsewhere(url: str, sizes: Sizes, processes: int) -> float:
    with ExitStack() as stack:
        app = stack.enter_context(workload.make(url).app)
        _function(app).map(range(sizes.drained))
        workers = [stack.enter_context(Worker(url)) for _ in range(processes)]
        for worker in workers:
            worker.loaded()
        for worker in workers:
            worker.start()
        return _drain_rate(app, sizes.drained)


def _drain_rate(app: App, tasks: int) -> float:
    """Wait until all are done, looking at so little that it does not matter, then read when each was."""
    give_up = time.monotonic() + _LIMIT_SECONDS
    last = app.invocations(limit=1)[0].id  # the queue is first in, first out: it is not worth counting before this one
    while app.invocation(last).status is not Status.SUCCESS or len(_ends(app, tasks)) < tasks:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{tasks} tasks were not done after {_LIMIT_SECONDS:g} s on {app!r}")
        time.sleep(_LOOK_SECONDS)
    return rate(_ends(app, tasks))


def _ends(app: App, tasks: int) -> list[float]:
    return sorted(record.changed_at for record in app.invocations(status="success", limit=tasks))


def rate(ends: Sequence[float]) -> float:
    """Tasks per second from the moment when 5 % were done, given the moments at which each was, in order."""
    skipped = max(1, math.ceil(len(ends) * _WARM_UP_SHARE))
    return (len(ends) - skipped) / (ends[-1] - ends[skipped - 1])


# --- waiting


def latency_here(url: str, sizes: Sizes) -> Figures:
    with workload.make(url).app as app, app.runner(concurrency=PLACES):
        return _latency("same process", app, sizes.waits)


def latency_elsewhere(url: str, sizes: Sizes) -> Figures:
    with workload.make(url).app as app, Worker(url) as worker:
        worker.loaded()
        worker.start()
        worker.ready()
        return _latency("other process", app, sizes.waits)


def _latency(where: str, app: App, waits: int) -> Figures:
    task = _function(app)
    for number in range(max(1, waits // 10)):
        task.submit(number).result(_LIMIT_SECONDS)
    taken = [_wait(task, number) for number in range(waits)]
    return {
        f"submit → result, {where}, p50": percentile(taken, 50) * 1000,
        f"submit → result, {where}, p99": percentile(taken, 99) * 1000,
    }


def _wait(task: Submittable[[int], int], number: int) -> float:
    began = time.perf_counter()
    task.submit(number).result(_LIMIT_SECONDS)
    return time.perf_counter() - began


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


# --- doing nothing


def idle_cpu(url: str, sizes: Sizes) -> Figures:
    with Worker(url) as worker:
        worker.loaded()
        worker.start()
        worker.ready()
        time.sleep(min(1.0, sizes.idle_seconds))
        before, began = worker.cpu_seconds(), time.perf_counter()
        time.sleep(sizes.idle_seconds)
        used, passed = worker.cpu_seconds() - before, time.perf_counter() - began
        return {"idle runner, CPU": 100 * used / passed}


# --- what MongoDB is asked. The driver may not be there, so it is imported late.


def commands_alone(url: str, sizes: Sizes) -> Figures:
    from benchmarks import mongo

    tasks = max(1, sizes.waits // 10)
    return {"commands, submit → result": mongo.lone(url, tasks).total() / tasks}


def commands_in_drain(url: str, sizes: Sizes) -> Figures:
    from benchmarks import mongo

    return {"commands, map and drain": mongo.drain(url, sizes.mapped // 5).total() / (sizes.mapped // 5)}


def commands_when_idle(url: str, sizes: Sizes) -> Figures:
    from benchmarks import mongo

    seconds = 12 * sizes.idle_seconds  # a minute: core tasks come and go every few seconds
    return {"idle runner, commands": mongo.idle(url, seconds).total() / seconds}


RATE, TIME, SHARE = "tasks/s", "ms", "% of a core"
COMMANDS, COMMAND_RATE = "per task", "per s"
_MONGO = "mongodb://"

MEASUREMENTS: Sequence[Measurement] = [
    Measurement(submit_one_by_one, {"submit, one by one": RATE}),
    Measurement(submit_by_map, {"submit, map": RATE}),
    Measurement(drain_functions, {"drain 1×10, functions": RATE}),
    Measurement(drain_coroutines, {"drain 1×10, coroutines": RATE}),
    Measurement(drain_two_processes, {"drain 2×10, functions": RATE}, Ability.MULTI_PROCESS),
    Measurement(latency_here, {f"submit → result, same process, p{p}": TIME for p in (50, 99)}),
    Measurement(
        latency_elsewhere, {f"submit → result, other process, p{p}": TIME for p in (50, 99)}, Ability.MULTI_PROCESS
    ),
    Measurement(idle_cpu, {"idle runner, CPU": SHARE}),
    Measurement(commands_alone, {"commands, submit → result": COMMANDS}, only_for=_MONGO),
    Measurement(commands_in_drain, {"commands, map and drain": COMMANDS}, only_for=_MONGO),
    Measurement(commands_when_idle, {"idle runner, commands": COMMAND_RATE}, only_for=_MONGO),
]
UNITS: Mapping[str, str] = {name: unit for each in MEASUREMENTS for name, unit in each.figures.items()}


def better(unit: str) -> Callable[..., Any]:
    """Which of several values is the best one."""
    return max if unit == RATE else min
