"""What Holdfast asks of MongoDB: the commands of a lone task, of a drain and of an idle runner in this process.

A lone task pays for everything itself, its signals to other processes too, so there is a pause after each: signals
that follow one another quickly share a command. How many do in a drain depends on how long it takes; everything else
in it does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from benchmarks import workload
from benchmarks.commands import CommandCounter, Sent
from benchmarks.workload import PLACES
from holdfast.store.mongo.connection import database_name
from holdfast.store.mongo.schema import SIGNALS

_PAUSE_SECONDS = 0.06  # longer than signals are gathered
_SETTLE_SECONDS = 0.3
_WARM_UPS = 3
_LIMIT_SECONDS = 60.0


def lone(url: str, tasks: int, **settings: object) -> Counter[Sent]:
    """The commands of so many tasks, one after the other, each from submit to result."""
    commands = CommandCounter(database_name(url))
    made = workload.make(url, called=lambda: None, **settings)
    with made.app, made.app.runner(concurrency=PLACES):
        for number in range(_WARM_UPS):
            made.function.submit(number).result(_LIMIT_SECONDS)
        time.sleep(_SETTLE_SECONDS)
        with commands:
            for number in range(tasks):
                made.function.submit(number).result(_LIMIT_SECONDS)
                time.sleep(_PAUSE_SECONDS)
        return commands.for_tasks


def drain(url: str, tasks: int, **settings: object) -> Counter[Sent]:
    """The commands from `map` until the runner that did all these tasks has left."""
    commands = CommandCounter(database_name(url))
    left, done = iter(range(tasks - 1)), threading.Event()

    def called() -> None:  # the tasks count themselves: to ask would be counted too
        if next(left, None) is None:
            done.set()

    made = workload.make(url, called=called, **settings)
    with made.app as app:
        app.runners()  # opens the store
        with commands:
            made.function.map(range(tasks))
            with app.runner(concurrency=PLACES):
                if not done.wait(_LIMIT_SECONDS):
                    raise RuntimeError(f"{tasks} tasks were not done after {_LIMIT_SECONDS:g} s")
        return commands.for_tasks


def idle(url: str, seconds: float) -> Counter[Sent]:
    """The commands of a runner that has nothing to do."""
    commands = CommandCounter(database_name(url))
    with workload.make(url).app as app, app.runner(concurrency=PLACES):
        time.sleep(_SETTLE_SECONDS + min(1.0, seconds))
        with commands:
            time.sleep(seconds)
        return commands.all


def without_signals(commands: Counter[Sent]) -> Counter[Sent]:
    return Counter({sent: count for sent, count in commands.items() if sent[1] != SIGNALS})
