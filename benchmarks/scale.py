"""``make bench-scale``: what claim, submit and listing cost beside 1,000,000 ended invocations and 200,000 that wait.

Four stores of a kind lie side by side: two with three thousand invocations, one with the archive, one with the backlog.
Each operation is done on all of them in turn, again and again, so whatever else the machine does, it does to all. A
round is some repetitions; its ratio is the median of the large store over that of the small one in the same round, and
what counts is the median of the rounds' ratios. The second small store is the control: its ratio shows how far chance
alone leads. Beside time stands what chance cannot touch: how much the store looked at (see `work`).

Then claimers empty a backlog, sixteen against one (see `crowd`). The program fails when a ratio is over 1.25, when
sixteen claimers get less than one, or when they hinder each other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks import crowd
from benchmarks.measure import percentile
from benchmarks.quiet import Quiet
from benchmarks.stock import APP, LANES, PAGE, RARE_QUEUE, RARE_TASK, TASKS, Maker, Stock, end_of, stock
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, Fresh, end_orderly
from benchmarks.work import counter, listen
from holdfast.clock import SystemClock
from holdfast.model.claims import Claim
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.store import open_store
from holdfast.store.contract import Filter, Store

LIMIT = 1.25
BATCH = 50
FEW, AGAIN, ARCHIVE, BACKLOG = "few", "few again", "archive", "backlog"
_PATIENCE_SECONDS = 60.0
_NOTHING = 5  # index entries: sentinels of MongoDB, which end a look that finds nothing


@dataclass(frozen=True)
class Sizes:
    few: int
    archived: int
    backlog: int
    rounds: int
    repetitions: int  # in a round
    warm_ups: int
    crowd: crowd.Sizes

    @property
    def enough(self) -> bool:
        """Whether times can be judged; work always can."""
        return self.rounds > 1


FULL = Sizes(few=2400, archived=1_000_000, backlog=200_000, rounds=9, repetitions=7, warm_ups=3, crowd=crowd.FULL)
QUICK = Sizes(few=600, archived=3000, backlog=1000, rounds=1, repetitions=2, warm_ups=1, crowd=crowd.QUICK)


# --- the operations


class Subject:
    """A store that is measured, with what its operations need."""

    def __init__(self, url: str, store: Store, stock: Stock, rng: random.Random) -> None:
        self.url = url
        self.store = store
        self._stock = stock
        self._rng = rng
        self._maker = Maker(rng, store.now())
        self._held: Sequence[InvocationRecord] = ()

    async def submit(self, count: int) -> None:
        self._maker.clock.set(self.store.now())
        new = [self._maker.new(TASKS[number % len(TASKS)]) for number in range(count)]
        _expect(count, sum(await self.store.insert(new)))

    async def claim(self, count: int) -> None:
        self._held = await self._claim(count, LANES)
        _expect(count, len(self._held))

    async def claim_nothing(self) -> None:
        _expect(0, len(await self._claim(BATCH, ("default|scale:unknown",))))

    async def _claim(self, count: int, lanes: tuple[str, ...]) -> Sequence[InvocationRecord]:
        operation, now = self._maker.ids.operation(), self.store.now()
        wish = Claim(app=APP, lanes=lanes, limit=count, owner="scale/0", operation=operation, at=now)
        return (await self.store.claim(wish)).records

    async def settle(self) -> None:
        self._maker.clock.set(self.store.now())
        await self.store.apply([end_of(record, self._maker) for record in self._held])

    async def listing(self, where: Filter) -> None:
        _expect(PAGE, len(await self.store.find(APP, where, PAGE)))

    def anywhere(self) -> str:
        return self._rng.choice(self._stock.ids)


def _expect(wanted: int, found: int) -> None:
    """All stores have to do the same, or there is nothing to compare."""
    if found != wanted:
        raise RuntimeError(f"{found} instead of {wanted}: what was measured is not what was meant")


Operation = Callable[[Subject], Awaitable[None]]


def _list(*statuses: Status, task: str = "", queue: str = "", anywhere: bool = False) -> Operation:
    async def listing(subject: Subject) -> None:
        where = Filter(
            statuses=frozenset(statuses),
            tasks=frozenset([task] if task else []),
            queues=frozenset([queue] if queue else []),
            before_id=subject.anywhere() if anywhere else None,
        )
        await subject.listing(where)

    return listing


# As many are claimed as are submitted, so a store has as many ready ones at the end as at the beginning. What is rare
# is older than everything else; "anywhere" is another page each time.
OPERATIONS: Sequence[tuple[str, Operation]] = [
    ("submit 1", lambda subject: subject.submit(1)),
    ("submit 100", lambda subject: subject.submit(2 * BATCH)),
    ("claim 1", lambda subject: subject.claim(1)),
    ("settle 1", lambda subject: subject.settle()),
    ("claim 50", lambda subject: subject.claim(BATCH)),
    ("settle 50", lambda subject: subject.settle()),
    ("claim 50", lambda subject: subject.claim(BATCH)),
    ("settle 50", lambda subject: subject.settle()),
    ("claim, nothing there", lambda subject: subject.claim_nothing()),
    ("list", _list()),
    ("list, anywhere", _list(anywhere=True)),
    ("list success", _list(Status.SUCCESS)),
    ("list success, anywhere", _list(Status.SUCCESS, anywhere=True)),
    ("list failed", _list(Status.FAILED)),
    ("list registered", _list(Status.REGISTERED)),
    ("list failed, registered", _list(Status.FAILED, Status.REGISTERED)),
    ("list a task", _list(task=TASKS[0])),
    ("list a task, anywhere", _list(task=TASKS[0], anywhere=True)),
    ("list a rare task", _list(task=RARE_TASK)),
    ("list a rare queue", _list(queue=RARE_QUEUE)),
    ("list success, rare task", _list(Status.SUCCESS, task=RARE_TASK)),
    ("list failed, rare task", _list(Status.FAILED, task=RARE_TASK)),
    ("list failed, rare queue", _list(Status.FAILED, queue=RARE_QUEUE)),
]
NAMES = list(dict.fromkeys(name for name, _ in OPERATIONS))


# --- measuring

Say = Callable[[str], None]
Taken = Mapping[str, Mapping[str, Sequence[float]]]  # by store, by operation: seconds
Work = Mapping[str, Mapping[str, int]]


class Measured(NamedTuple):
    taken: Taken
    work: Work
    stocks: Mapping[str, Stock]


async def measure(fresh: Fresh, sizes: Sizes, quiet: Quiet, say: Say) -> Measured:
    rng = random.Random(1)
    async with AsyncExitStack() as stack:
        subjects: dict[str, Subject] = {}
        stocks: dict[str, Stock] = {}
        kinds = {FEW: (0, 0), AGAIN: (0, 0), ARCHIVE: (sizes.archived, 0), BACKLOG: (0, sizes.backlog)}
        for name, (archived, backlog) in kinds.items():
            say(f"filling: {name}")
            url = stack.enter_context(fresh())
            listen(url)
            store = open_store(url, clock=SystemClock())
            await store.open()
            stack.push_async_callback(store.close)
            stocks[name] = await stock(url, store, few=sizes.few, archived=archived, backlog=backlog, rng=rng)
            subjects[name] = Subject(url, store, stocks[name], rng)
        quiet.wait()
        return Measured(await _time(subjects, sizes, say, rng), await _count(subjects, say), stocks)


async def _time(subjects: Mapping[str, Subject], sizes: Sizes, say: Say, rng: random.Random) -> Taken:
    taken: dict[str, dict[str, list[float]]] = {name: {each: [] for each in NAMES} for name in subjects}
    last = sizes.rounds * sizes.repetitions
    for repetition in range(-sizes.warm_ups, last):
        say(f"repetition {repetition + 1} of {last}")
        for operation, run in OPERATIONS:
            for name in rng.sample(list(subjects), len(subjects)):
                began = time.perf_counter()
                await run(subjects[name])
                if repetition >= 0:
                    taken[name][operation].append(time.perf_counter() - began)
    return taken


async def _count(subjects: Mapping[str, Subject], say: Say) -> Work:
    work: dict[str, dict[str, int]] = {}
    for name, subject in subjects.items():
        say(f"counting: {name}")
        count = counter(subject.url, subject.store)
        work[name] = {operation: await count(partial(run, subject)) for operation, run in OPERATIONS}
    return work


# --- judging


def ratio(large: Sequence[float], small: Sequence[float], rounds: int) -> float:
    """The median of the rounds' ratios, each of which compares medians of the same moments."""
    size = len(small) // rounds
    parts = [slice(first, first + size) for first in range(0, rounds * size, size)]
    return statistics.median(statistics.median(large[part]) / statistics.median(small[part]) for part in parts)


@dataclass(frozen=True)
class Line:
    """One operation on one of the large stores, against the small one."""

    operation: str
    store: str
    time: float | None  # None: it cannot be judged
    control: float
    work: float

    @property
    def flat(self) -> bool:
        """Chance is granted what it needed between the two small stores; work is granted nothing."""
        return self.work <= LIMIT and (self.time is None or self.time <= LIMIT * max(1.0, self.control))


def judge(taken: Taken, work: Work, sizes: Sizes) -> list[Line]:
    return [
        Line(
            operation=name,
            store=store,
            time=ratio(taken[store][name], taken[FEW][name], sizes.rounds) if sizes.enough else None,
            control=ratio(taken[AGAIN][name], taken[FEW][name], sizes.rounds),
            work=work[store][name] / max(_NOTHING, work[FEW][name]),
        )
        for name in NAMES
        for store in (ARCHIVE, BACKLOG)
    ]


def report(taken: Taken, work: Work, lines: Sequence[Line]) -> str:
    rows = []
    for name in NAMES:
        mine = {line.store: line for line in lines if line.operation == name}
        row = [name, _times(taken[FEW][name]), f"{mine[ARCHIVE].control:.2f}", f"{work[FEW][name] or '-'}"]
        for store, line in mine.items():
            row += [_times(taken[store][name]), "-" if line.time is None else f"{line.time:.2f}"]
            row += [f"{work[store][name] or '-'}", "" if line.flat else "OVER"]
        rows.append(row)
    large = [title for store in (ARCHIVE, BACKLOG) for title in (f"{store}: ms", "ratio", "work", "")]
    return table(["p50 (p95)", f"{FEW}: ms", "control", "work", *large], rows)


def _times(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken) * 1000:.2f} ({percentile(taken, 95) * 1000:.2f})"


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    sizes, quiet = (QUICK, Quiet(0.0)) if options.quick else (FULL, Quiet(_PATIENCE_SECONDS))
    say = _progress if sys.stderr.isatty() else _silence
    good = True
    for name in options.stores:
        try:
            with TARGETS[name].served() as fresh:
                good &= _one(name, fresh, sizes, quiet, lambda text, name=name: say(f"{name}: {text}"))  # type: ignore[misc]
        except CannotServe as error:
            print(f"{name}: not measured: {error}")
        say("")
    if quiet.foreign_cores:
        print(f"{statistics.median(quiet.foreign_cores):.2f} cores were used by others")
    return 0 if good else 1


def _one(name: str, fresh: Fresh, sizes: Sizes, quiet: Quiet, say: Say) -> bool:
    taken, work, stocks = asyncio.run(measure(fresh, sizes, quiet, say))
    lines = judge(taken, work, sizes)
    for store, filled in stocks.items():
        print(f"{name}, {store}: {filled.count:,} invocations on {filled.space / 1e6:,.0f} MB")
    print(f"{sizes.rounds} rounds of {sizes.repetitions}; over: a ratio of more than {LIMIT}\n")
    print(report(taken, work, lines), end="\n\n", flush=True)
    good = all(line.flat for line in lines)
    if name == "mongo":  # SQLite lets one write at a time, so there is nothing to gain
        outcomes = crowd.measure(fresh, sizes.crowd, quiet, say)
        print(crowd.report(outcomes), end="\n\n", flush=True)
        good &= not crowd.complaints(outcomes) or not sizes.enough
    return good


def _silence(text: str) -> None:
    pass


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stores", type=_stores, default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes, and times are not judged: does it work?")
    return parser.parse_args(arguments)


def _stores(names: str) -> list[str]:
    chosen = names.split(",")
    if unknown := set(chosen) - {"sqlite", "mongo"}:
        raise argparse.ArgumentTypeError(f"no store '{min(unknown)}'; there are: sqlite, mongo")
    return chosen


if __name__ == "__main__":
    end_orderly()
    sys.exit(main())
