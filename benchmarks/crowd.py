"""Claimers that empty one backlog together: how much they get in all, and how often they get in each other's way.

A claimer is an owner with a store of its own, as each runner has one. They are tasks on one loop, or spread over
processes, which are led by lines: ``loaded`` → ``start`` → what was got, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.quiet import Quiet
from benchmarks.stock import APP, LANES, READY, stock
from benchmarks.table import table
from benchmarks.targets import Fresh, end_orderly
from benchmarks.worker import ROOT
from holdfast.clock import SystemClock
from holdfast.ids import Ids
from holdfast.model.claims import Claim
from holdfast.store import open_store
from holdfast.store.contract import Store

MOST_CONFLICTS = 0.2  # per claimed invocation
_COUNTED_SHARE = 0.9  # what is left then is fought for by all, whatever their number
_ANSWER_SECONDS = 120.0

Got = list[tuple[float, int]]  # when, on the clock that all processes share, and how many


@dataclass(frozen=True)
class Sizes:
    backlog: int
    rounds: int


FULL = Sizes(backlog=20_000, rounds=3)
QUICK = Sizes(backlog=800, rounds=1)


@dataclass(frozen=True)
class Crowd:
    """So many claimers in so many processes (0: in this one), each asking for so many at once."""

    claimers: int
    processes: int
    batch: int

    @property
    def name(self) -> str:
        many = "s" if self.claimers > 1 else ""
        where = f"{self.processes} process{'es' if self.processes > 1 else ''}" if self.processes else "one loop"
        return f"{self.claimers} claimer{many}, {where}, batches of {self.batch}"


# Sixteen of a kind are compared with the one before them.
CROWDS = [
    Crowd(claimers=claimers, processes=processes, batch=batch)
    for batch in (50, 10)
    for claimers, processes in ((1, 1), (16, 4))
]


@dataclass(frozen=True)
class Outcome:
    per_second: float
    conflicts: float  # per claimed invocation
    claims: float  # for each batch that there was


# --- claiming


async def claim_all(stores: Sequence[Store], first: int, batch: int) -> Got:
    """Let each store's claimer work until nothing is left."""
    got: Got = []

    async def work(store: Store, number: int) -> None:
        ids, more = Ids(SystemClock(), random.Random()), True
        while more:
            wish = Claim(
                app=APP, lanes=LANES, limit=batch, owner=f"crowd/{number}", operation=ids.operation(), at=store.now()
            )
            claimed = await store.claim(wish)
            got.append((time.monotonic(), len(claimed.records)))
            more = bool(claimed.records) or claimed.next_due_at is not None  # others may have been faster

    await asyncio.gather(*(work(store, first + number) for number, store in enumerate(stores)))
    return got


async def _opened(url: str, count: int) -> list[Store]:
    stores = [open_store(url, clock=SystemClock()) for _ in range(count)]
    for store in stores:
        await store.open()
    return stores


async def _closed(stores: Sequence[Store]) -> None:
    for store in stores:
        await store.close()


async def _here(url: str, crowd: Crowd) -> tuple[float, Got]:
    stores = await _opened(url, crowd.claimers)
    try:
        return time.monotonic(), await claim_all(stores, 0, crowd.batch)
    finally:
        await _closed(stores)


class _Process:
    """Some of the claimers, in a process of their own."""

    def __init__(self, url: str, first: int, count: int, batch: int) -> None:
        command = [sys.executable, "-m", "benchmarks.crowd", url, str(first), str(count), str(batch)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("start\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)
        answer = self._process.stdout.readline() if heard else ""
        if not answer:
            raise RuntimeError(f"the claimers in process {self._process.pid} did not answer; their errors are above")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _elsewhere(url: str, crowd: Crowd) -> tuple[float, Got]:
    each = crowd.claimers // crowd.processes
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_Process(url, number * each, each, crowd.batch)) for number in range(crowd.processes)
        ]
        for process in processes:
            process.answer()  # loaded
        began = time.monotonic()
        for process in processes:
            process.start()
        return began, [(at, count) for process in processes for at, count in json.loads(process.answer())]


async def _serve(url: str, first: int, count: int, batch: int) -> None:
    stores = await _opened(url, count)
    print("loaded", flush=True)
    if await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await claim_all(stores, first, batch)), flush=True)
    await _closed(stores)


# --- measuring


def run(url: str, crowd: Crowd, backlog: int, quiet: Quiet) -> Outcome:
    async def fill() -> None:
        (store,) = await _opened(url, 1)
        await stock(url, store, few=200, archived=0, backlog=backlog - READY, rng=random.Random(1))
        await _closed([store])

    asyncio.run(fill())
    quiet.wait()
    before = write_conflicts(url)
    began, got = _elsewhere(url, crowd) if crowd.processes else asyncio.run(_here(url, crowd))
    total = sum(count for _, count in got)
    if total != backlog:
        raise RuntimeError(f"{total} of {backlog} were claimed by {crowd}")
    return Outcome(
        per_second=rate(began, got),
        conflicts=(write_conflicts(url) - before) / total,
        claims=len(got) / (total / crowd.batch),
    )


def rate(began: float, got: Got) -> float:
    """Invocations per second until nine tenths of them are claimed."""
    wanted, so_far = _COUNTED_SHARE * sum(count for _, count in got), 0
    for at, count in sorted(got):
        so_far += count
        if so_far >= wanted:
            return so_far / (at - began)
    return 0.0


def measure(fresh: Fresh, sizes: Sizes, quiet: Quiet, say: Callable[[str], None]) -> Mapping[Crowd, Sequence[Outcome]]:
    """Each crowd on a store of its own, taking turns."""
    outcomes: dict[Crowd, list[Outcome]] = {crowd: [] for crowd in CROWDS}
    for _ in range(sizes.rounds):
        for crowd in CROWDS:
            say(crowd.name)
            with fresh() as url:
                outcomes[crowd].append(run(url, crowd, sizes.backlog, quiet))
    return outcomes


def complaints(outcomes: Mapping[Crowd, Sequence[Outcome]]) -> dict[Crowd, str]:
    """What is wrong with the crowds, if anything is."""
    found = {}
    for alone, many in zip(CROWDS[::2], CROWDS[1::2], strict=True):
        if _median(outcomes[many], "per_second") <= _median(outcomes[alone], "per_second"):
            found[many] = "less than one alone"
        elif _median(outcomes[many], "conflicts") >= MOST_CONFLICTS:
            found[many] = f"{MOST_CONFLICTS} conflicts or more"
    return found


def report(outcomes: Mapping[Crowd, Sequence[Outcome]]) -> str:
    wrong = complaints(outcomes)
    rows = [
        [
            crowd.name,
            f"{_median(each, 'per_second'):,.0f} ({', '.join(f'{one.per_second:,.0f}' for one in each)})",
            f"{_median(each, 'conflicts'):.3f}",
            f"{_median(each, 'claims'):.2f}",
            wrong.get(crowd, ""),
        ]
        for crowd, each in outcomes.items()
    ]
    return table(["crowd", "claimed/s", "conflicts each", "claims per batch", ""], rows)


def _median(outcomes: Sequence[Outcome], name: str) -> float:
    return float(statistics.median(getattr(outcome, name) for outcome in outcomes))


def write_conflicts(url: str) -> int:
    """How many writes this server has had to repeat so far because another one was faster. SQLite has none."""
    if url.startswith("sqlite:///"):
        return 0
    from pymongo import MongoClient

    with MongoClient[dict[str, Any]](url) as client:
        return int(client.admin.command("serverStatus")["metrics"]["operation"]["writeConflicts"])


if __name__ == "__main__":
    end_orderly()
    asyncio.run(_serve(sys.argv[1], *map(int, sys.argv[2:5])))
