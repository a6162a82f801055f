"""What Holdfast asks of MongoDB: the commands of a lone task, of a drain and of an idle runner in this process.

A lone task pays for everything itself, its signals to other processes too, so there is a pause after each: signals
that follow one another quickly share a command. How many do in a drain depends on how long it takes; everything else
in it does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks import workload
from benchmarks.commands import CommandCounter, Sent
from benchmarks.workload import PLACES
from holdfast.ids import InvocationId
from holdfast.model.changes import apply_to, completed
from holdfast.model.claims import Claim, claimed
from holdfast.model.records import InvocationRecord, registered
from holdfast.store.mongo.connection import database_name
from holdfast.store.mongo.documents import to_document
from holdfast.store.mongo.schema import INDEXES, INVOCATIONS, SIGNALS

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


def index_keys() -> int:
    """How many index keys a plain invocation adds and removes from its insert to its end, by the definitions alone."""
    made = InvocationRecord(id=InvocationId("a"), app="a", task="t", arguments=b"", created_at=1.0, due_at=1.0)
    record = registered(made, operation="submit", at=1.0)
    claim = Claim(app="a", lanes=(record.lane,), limit=1, owner="r/1", operation="claim", at=2.0)
    taken = apply_to(claimed(claim, record), record)
    ended = apply_to(completed(taken, result=b"", operation="end", at=3.0), taken)
    there = [set(), *(_keys(to_document(each)) for each in (record, taken, ended))]
    return sum(len(before ^ after) for before, after in pairwise(there))


def _keys(document: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The index keys of an invocation."""
    keys = {("_id_", str(document["_id"]))}
    for index in [each for each in INDEXES if each.collection == INVOCATIONS]:
        partial = index.options.get("partialFilterExpression", {})
        if all(_matches(document.get(name), rule) for name, rule in partial.items()):
            keys.add((index.name, *(repr(document.get(name)) for name, _ in index.keys)))
    return keys


def _matches(value: object, rule: object) -> bool:
    """Whether a field is there, or has the value: what the conditions of our indexes ask for."""
    return value is not None if isinstance(rule, dict) else value == rule


def without_signals(commands: Counter[Sent]) -> Counter[Sent]:
    return Counter({sent: count for sent, count in commands.items() if sent[1] != SIGNALS})
