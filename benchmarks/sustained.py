"""``make bench-sustained``: ten minutes at full rate through one queue on each store, a lone call before and after.

A default MongoDB keeps removed index entries for five minutes; whatever grows with what passed through the queue shows
only in a run that is longer. The run is divided into ten parts, minutes by default. The program fails when the last
part did less than 0.9 of the second one, or when a lone call (submit → result, p50) takes more than 1.3 times as long
after the run as before it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import workload
from benchmarks.bench import describe_machine
from benchmarks.measure import percentile
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, Target, end_orderly
from benchmarks.workload import PLACES
from holdfast.task import Submittable

PARTS = 10
LEAST_RATE, MOST_LATENCY = 0.9, 1.3
_BATCH = 500
_BACKLOG = 2000  # kept waiting, so that every claim is a full one
_LOOK_SECONDS = 0.002
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Figures:
    """What one store did: tasks per second in each part, and the p50 of a lone call in milliseconds."""

    rates: Sequence[float]
    before: float
    after: float

    @property
    def rate_ratio(self) -> float:
        return self.rates[-1] / self.rates[1] if self.rates[1] else 0.0  # nothing was done: that is too slow

    @property
    def latency_ratio(self) -> float:
        return self.after / self.before

    @property
    def good(self) -> bool:
        return self.rate_ratio >= LEAST_RATE and self.latency_ratio <= MOST_LATENCY


class Ends:
    """Counts the tasks that were called."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.count = 0

    def __call__(self) -> None:
        self.count = next(self._numbers)  # two threads may write it in the wrong order; the next one mends that


def measure(url: str, seconds: float, waits: int, say: Callable[[str], None]) -> Figures:
    """Run at full rate for so long in this process: it submits, and its runner works."""
    ends = Ends()
    made = workload.make(url, called=ends)
    with made.app as app, app.runner(concurrency=PLACES):
        before = _lone(made.function, waits)
        rates = _run(made.function, ends, seconds, say)
        return Figures(rates, before, _lone(made.function, waits))


def _run(task: Submittable[[int], int], ends: Ends, seconds: float, say: Callable[[str], None]) -> list[float]:
    submitted = ends.count
    stop = threading.Event()

    def feed() -> None:
        nonlocal submitted
        while not stop.is_set():
            if submitted - ends.count < _BACKLOG:
                task.map(range(_BATCH))
                submitted += _BATCH
            else:
                stop.wait(_LOOK_SECONDS)

    feeder = threading.Thread(target=feed)
    feeder.start()
    rates: list[float] = []
    try:
        began = last = time.monotonic()
        done = ends.count
        for part in range(1, PARTS + 1):
            time.sleep(max(0.0, began + seconds * part / PARTS - time.monotonic()))
            now, count = time.monotonic(), ends.count
            rates.append((count - done) / (now - last))
            last, done = now, count
            say(f"part {part} of {PARTS}: {rates[-1]:,.0f}/s")
    finally:
        stop.set()
        feeder.join()
    _wait(lambda: ends.count >= submitted)
    return rates


def _wait(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _LIMIT_SECONDS
    while not holds():
        if time.monotonic() > give_up:
            raise RuntimeError(f"the queue was not empty after {_LIMIT_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)


def _lone(task: Submittable[[int], int], waits: int) -> float:
    taken = []
    for number in range(waits + waits // 10 + 1):
        began = time.perf_counter()
        task.submit(number).result(_LIMIT_SECONDS)
        taken.append(time.perf_counter() - began)
    return percentile(taken[-waits:], 50) * 1000


def report(seconds: float, results: dict[str, Figures]) -> str:
    names = [f"{part * seconds / PARTS:g} s" for part in range(1, PARTS + 1)]
    rows = [
        [
            store,
            *(f"{rate:,.0f}" for rate in found.rates),
            f"{found.rate_ratio:.2f}",
            f"{found.before:.1f}",
            f"{found.after:.1f}",
            f"{found.latency_ratio:.2f}",
            "" if found.good else "TOO SLOW",
        ]
        for store, found in results.items()
    ]
    return table(["tasks/s until", *names, "last / second", "lone ms before", "after", "ratio", ""], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    results: dict[str, Figures] = {}
    for target in options.stores:
        try:
            with target.served() as fresh, fresh() as url:
                say = _silence if options.quiet else _teller(target.name)
                results[target.name] = measure(url, options.seconds, options.waits, say)
        except CannotServe as error:
            print(f"{target.name}: not measured: {error}")
    machine = describe_machine()
    facts = f"Python {machine['python']}, SQLite {machine['sqlite']}, fsync p50 {machine['fsync_p50_us']} µs"
    print(f"{machine['cores']} cores, {machine['system']}, {facts}\n\n{report(options.seconds, results)}")
    return 0 if results and all(found.good for found in results.values()) else 1


def _silence(text: str) -> None:
    pass


def _teller(store: str) -> Callable[[str], None]:
    return lambda text: print(f"{store}: {text}", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sustained", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stores", type=_targets, default="sqlite,mongo", help="which ones, separated by commas")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long on each store (600)")
    parser.add_argument("--waits", type=int, default=200, help="lone calls before and after (200)")
    parser.add_argument("--quiet", action="store_true", help="print the table only")
    return parser.parse_args(arguments)


def _targets(names: str) -> list[Target]:
    unknown = set(names.split(",")) - set(TARGETS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no store '{min(unknown)}'; there are: {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names.split(",")]


if __name__ == "__main__":
    end_orderly()
    sys.exit(main())
