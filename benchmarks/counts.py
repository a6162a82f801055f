"""``make check-perf``: what a task costs, in things that can be counted and are the same on every machine.

Write transactions, flushes to disk and calls of Python functions per task, on SQLite, commands and index keys, on
MongoDB, and the files of ours that a lone task passes on each, compared with the committed `counts.json`: 10 % more
fails, so that a slow change is noticed where no stopwatch could. Without a mongod its counts are left out. Signals
between processes are counted for a lone task only: how many of them share a command in a drain depends on the time it
takes.

Each workload runs on a fresh file, with n tasks and with none, and the difference divided by n is what counts: opening
a store and starting a runner cancel out. The queue is filled before the runner starts, so that every claim is a full
one. What is left of chance is the moment at which the system takes a thread off its core: it can split a batch, which
adds (by up to 6 % with three busy programs on two cores); what it can save, a look that came too early, is below 1 %.
Therefore the smallest of three rounds counts, and a check stops at the first round that is good. How many ends share a
write in a drain depends on how long writes and calls take, so more than was counted is committed there: a third of the
writes, on MongoDB two thirds of the commands (0.088 per task with ten busy programs, 0.060 with none), and a tenth of
the calls. Of chunks of a stream, which wait for room in
between, three times the writes and a third more calls are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks import targets, workload
from benchmarks.calls import CallCounter
from benchmarks.syncs import CannotCount, SyncCounter
from benchmarks.table import table
from benchmarks.targets import Fresh, end_orderly
from benchmarks.workload import PLACES, Workload
from holdfast.runtime.engine import Engine

COMMITTED = Path(__file__).with_name("counts.json")
TOLERANCE = 0.10
# What waits in real time looks more often on a machine that is slower than usual: see `.ci/run`.
TOLERANCE_HERE = TOLERANCE * float(os.environ.get("HOLDFAST_TEST_PATIENCE", "1"))
ROUNDS = 3
TASKS = 1000
WAITS = 50
WARM_UPS = 20
LONE_COMMANDS = 20
_LIMIT_SECONDS = 60.0

TRANSACTIONS, FLUSHES, CALLS = "write transactions", "flushes to disk", "Python calls"
CHUNKS = "chunks of a stream"
FILES = "one submit → result: files of ours"
MONGO_LONE = "MongoDB, one submit → result: commands"
MONGO_DRAIN = "MongoDB, map and drain: commands without signals"
MONGO_KEYS = "MongoDB, one life: index keys changed"
MONGO_FILES = "MongoDB, one submit → result: files of ours"
_EXACT = frozenset({FILES, MONGO_KEYS})  # no chance is in them: one more is one too many
MONGO = (MONGO_LONE, MONGO_DRAIN, MONGO_KEYS, MONGO_FILES)

Counts = dict[str, float]


# --- counting


class Meter:
    """Counts what one app does, from before its threads start until after they have ended."""

    def __init__(self) -> None:
        self.transactions = 0
        self._stack = ExitStack()
        self._calls = CallCounter()
        self._syncs: SyncCounter | None = SyncCounter()

    def __enter__(self) -> Meter:
        try:
            if self._syncs is not None:
                self._stack.enter_context(self._syncs)
        except CannotCount:
            self._syncs = None
        self._stack.enter_context(self._calls)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch(self, made: Workload) -> None:
        """Hear what the app's store reports. To be called before the app is used."""
        build: Callable[[], Engine] = made.app.runtime.make_engine()

        def make_engine() -> Engine:
            engine = build()
            engine.store._observe = self._observe  # type: ignore[attr-defined]
            return engine

        made.app.runtime.make_engine = lambda given=None: make_engine  # type: ignore[method-assign]

    def _observe(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "commit" and facts["rows"]:
            self.transactions += 1

    @property
    def totals(self) -> Counts:
        counted: Counts = {TRANSACTIONS: self.transactions, CALLS: self._calls.by_function.total()}
        return counted if self._syncs is None else counted | {FLUSHES: self._syncs.count}

    @property
    def functions(self) -> Counter[str]:
        return self._calls.by_function


Run = Callable[[str, int, Meter], None]


def map_tasks(url: str, tasks: int, meter: Meter) -> None:
    with meter:
        made = _make(url)
        meter.watch(made)
        with made.app:
            made.function.map(range(tasks))


def drain_functions(url: str, tasks: int, meter: Meter) -> None:
    with _make(url).app as app:
        app.get_task("benchmark:function").map(range(tasks))
    _drain(url, tasks, meter)


def drain_coroutines(url: str, tasks: int, meter: Meter) -> None:
    with _make(url).app as app:
        app.get_task("benchmark:coroutine").map(range(tasks))
    _drain(url, tasks, meter)


def _drain(url: str, tasks: int, meter: Meter) -> None:
    # The tasks count themselves: nobody else has to ask, and what asks would be counted too.
    left, done = iter(range(tasks - 1)), threading.Event()

    def called() -> None:
        if next(left, None) is None:
            done.set()

    with meter:
        made = _make(url, called)
        meter.watch(made)
        with made.app, made.app.runner(concurrency=PLACES):
            if tasks and not done.wait(_LIMIT_SECONDS):
                raise RuntimeError(f"{tasks} tasks were not done after {_LIMIT_SECONDS:g} s")


def wait_for_each(url: str, tasks: int, meter: Meter) -> None:
    with meter:
        made = _make(url)
        meter.watch(made)
        with made.app, made.app.runner(concurrency=PLACES):
            for number in range(tasks):
                made.function.submit(number).result(_LIMIT_SECONDS)


def _make(url: str, called: Callable[[], None] = lambda: None) -> Workload:
    return workload.make(url, called=called, **_NO_HEARTBEATS)


def write_chunks(url: str, chunks: int, meter: Meter) -> None:
    with meter:
        made = _make(url)
        meter.watch(made)
        with made.app, made.app.runner(concurrency=PLACES):
            made.app.get_task("benchmark:chunks").submit(chunks).result(_LIMIT_SECONDS)


# They depend on how long a run takes.
_NO_HEARTBEATS = {"runner_heartbeat_seconds": 3600, "runner_considered_dead_after_minutes": 1440}

WORKLOADS: Mapping[str, tuple[Run, int]] = {
    "map": (map_tasks, TASKS),
    "drain, functions": (drain_functions, TASKS),
    "drain, coroutines": (drain_coroutines, TASKS),
    "one submit → result": (wait_for_each, WAITS),
    CHUNKS: (write_chunks, 10 * TASKS),
}


def measure(mongo: Fresh | None) -> tuple[Counts, dict[str, Counter[str]]]:
    """One round: the counts per task, and for each workload on SQLite the calls of each function."""
    counts: Counts = {}
    functions: dict[str, Counter[str]] = {}
    for name, (run, tasks) in WORKLOADS.items():
        empty, full = _metered(run, 0), _metered(run, tasks)
        for what, total in full.totals.items():
            counts[f"{name}: {what}"] = round((total - empty.totals[what]) / tasks, 4)
        functions[name] = full.functions
        functions[name].subtract(empty.functions)
    counts[FILES] = len(files_on_path(functions["one submit → result"], WAITS))
    return counts if mongo is None else counts | measure_commands(mongo), functions


def files_on_path(functions: Counter[str], tasks: int) -> set[str]:
    """Return the files with a function that every task calls."""
    return {name.partition(":")[0] for name, calls in functions.items() if calls >= 0.9 * tasks}


def _metered(run: Run, tasks: int) -> Meter:
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="hf-counts-") as folder:
        run(f"sqlite:///{folder}/counts.db", tasks, meter)
    return meter


def measure_commands(fresh: Fresh) -> Counts:
    from benchmarks import mongo  # late: the driver may not be there

    with fresh() as url:
        lone = mongo.lone(url, LONE_COMMANDS, **_NO_HEARTBEATS)
    with fresh() as url:
        start = mongo.without_signals(mongo.drain(url, 1, **_NO_HEARTBEATS))
    with fresh() as url:
        drain = mongo.without_signals(mongo.drain(url, TASKS, **_NO_HEARTBEATS))
    each = (drain.total() - start.total()) / (TASKS - 1)  # a runner's start and end are not a task's
    commands = {MONGO_LONE: round(lone.total() / LONE_COMMANDS, 4), MONGO_DRAIN: round(each, 4)}
    return commands | {MONGO_KEYS: mongo.index_keys(), MONGO_FILES: len(files_on_mongo(fresh))}


def files_on_mongo(fresh: Fresh) -> set[str]:
    """Return the files with a function that every task on MongoDB calls. The first tasks do not count: services begin
    with much to do.
    """
    counted = []
    for tasks in (WARM_UPS, WARM_UPS + WAITS):
        counter = CallCounter()
        with fresh() as url, counter:
            made = _make(url)
            with made.app, made.app.runner(concurrency=PLACES):
                for number in range(tasks):
                    made.function.submit(number).result(_LIMIT_SECONDS)
        counted.append(counter.by_function)
    few, many = counted
    many.subtract(few)
    return files_on_path(many, WAITS)


def smallest(rounds: Sequence[Counts]) -> Counts:
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


# --- comparing


class Verdict(StrEnum):
    SAME = ""
    MORE = "MORE"
    LESS = "less"
    NEW = "NOT COMMITTED"
    GONE = "NOT COUNTED"
    SKIPPED = "cannot be counted here"
    NO_MONGOD = "no mongod here"


_CAN_BE_MISSING = (Verdict.SKIPPED, Verdict.NO_MONGOD)
FAILING = frozenset({Verdict.MORE, Verdict.NEW, Verdict.GONE})


@dataclass(frozen=True)
class Line:
    """One count, committed and now."""

    name: str
    committed: float | None
    now: float | None
    verdict: Verdict

    @property
    def cells(self) -> list[str]:
        ratio = f"{self.now / self.committed:.2f}" if self.now is not None and self.committed else "-"
        return [self.name, _shown(self.committed), _shown(self.now), ratio, self.verdict]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def compare(committed: Counts, now: Counts, tolerance: float = TOLERANCE) -> list[Line]:
    """All that is committed or counted, in the order of the counting."""
    names = [*now, *(name for name in committed if name not in now)]
    blind = {kind for kind in _CAN_BE_MISSING if not any(_kind(name) is kind for name in now)}
    return [
        Line(name, committed.get(name), now.get(name), _verdict(name, committed, now, blind, tolerance))
        for name in names
    ]


def _kind(name: str) -> Verdict | None:
    """With what verdict a count may be missing, if it may."""
    if name in MONGO:
        return Verdict.NO_MONGOD
    return Verdict.SKIPPED if name.endswith(FLUSHES) else None


def _verdict(name: str, all_committed: Counts, all_now: Counts, blind: set[Verdict], tolerance: float) -> Verdict:
    committed, now, kind = all_committed.get(name), all_now.get(name), _kind(name)
    if now is None:
        return kind if kind in blind else Verdict.GONE
    if committed is None:
        return Verdict.NEW
    if now > committed * (1 + (0 if name in _EXACT else tolerance)):
        return Verdict.MORE
    return Verdict.LESS if now < committed / _room(name) * (1 - tolerance) else Verdict.SAME


def passes(lines: Sequence[Line]) -> bool:
    return not any(line.verdict in FAILING for line in lines)


def report(lines: Sequence[Line]) -> str:
    """The table, and what to do about it."""
    found = {line.verdict for line in lines}
    shown = table(
        ["per task, on SQLite if nothing else is said", "committed", "now", "ratio", ""], [line.cells for line in lines]
    )
    advice = [text for verdict, text in _ADVICE.items() if verdict in found]
    return "\n".join([shown, *advice])


_ADVICE = {
    Verdict.MORE: f"A task costs more than {TOLERANCE:.0%} over what is committed. Find out why "
    "(python -m benchmarks.counts --hot shows which functions are called most); if it is worth it, commit the new "
    "numbers: python -m benchmarks.counts --write.",
    Verdict.LESS: f"A task costs over {TOLERANCE:.0%} less than what is committed. Keep it that way: "
    "python -m benchmarks.counts --write, and commit counts.json.",
    Verdict.NEW: "Something is counted that is not in counts.json: python -m benchmarks.counts --write.",
    Verdict.GONE: "Something in counts.json is not counted any more: python -m benchmarks.counts --write.",
    Verdict.SKIPPED: "Flushes to disk are not counted here: this Python's SQLite does not show its functions.",
    Verdict.NO_MONGOD: "MongoDB's commands are not counted here.",
}


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    committed: Counts = json.loads(COMMITTED.read_text("utf-8")) if COMMITTED.exists() else {}
    rounds: list[Counts] = []
    functions: dict[str, Counter[str]] = {}
    with ExitStack() as stack:
        mongo = _served(stack)
        while len(rounds) < (1 if options.hot else ROUNDS):
            counts, functions = measure(mongo)
            rounds.append(counts)
            if options.check and passes(compare(committed, smallest(rounds), TOLERANCE_HERE)):
                break
    lines = compare(committed, smallest(rounds), TOLERANCE_HERE)
    print(report(lines))
    if options.hot:
        print(_hot(functions, options.hot))
    if options.write:
        return _write(smallest(rounds))
    return 0 if passes(lines) or not options.check else 1


def _served(stack: ExitStack) -> Fresh | None:
    try:
        return stack.enter_context(targets.mongo())
    except targets.CannotServe as error:
        print(f"MongoDB's commands are left out: {error}", file=sys.stderr)
        return None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=(__doc__ or "").partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="fail if a task costs over 10 %% more than is committed")
    choice.add_argument("--write", action="store_true", help="make what is counted now the committed numbers")
    choice.add_argument("--hot", type=int, nargs="?", const=20, metavar="N", help="show the N most called functions")
    return parser.parse_args(arguments)


def _write(counts: Counts) -> int:
    for what, kind in {"flushes": Verdict.SKIPPED, "MongoDB's commands": Verdict.NO_MONGOD}.items():
        if not any(_kind(name) is kind for name in counts):
            print(f"Not written: {what} cannot be counted here, and would be missing from the committed numbers.")
            return 1
    roomy = {name: round(count * _room(name), 4) for name, count in counts.items()}
    COMMITTED.write_text(json.dumps(roomy, indent=2, ensure_ascii=False) + "\n", "utf-8")
    print(f"written to {COMMITTED}")
    return 0


def _room(name: str) -> float:
    """Return how many times more than was counted is committed, for counts that depend on how long things take."""
    if name.startswith(CHUNKS):  # how many share a page depends on how long writes take
        return 1.33 if name.endswith(CALLS) else 3.0
    if name == MONGO_DRAIN:
        return 1.67
    if not name.startswith("drain"):
        return 1.0
    return 1.1 if name.endswith(CALLS) else 1.33


def _hot(functions: Mapping[str, Counter[str]], most: int) -> str:
    parts = []
    for name, calls in functions.items():
        tasks = WORKLOADS[name][1]
        rows = [[function, f"{count / tasks:.2f}"] for function, count in calls.most_common(most)]
        parts.append("\n" + table([name, "calls per task"], rows))
    return "\n".join(parts)


if __name__ == "__main__":
    end_orderly()
    sys.exit(main())
