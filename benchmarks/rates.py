"""What rates and limits cost: `python -m benchmarks.rates [--stores sqlite,mongo] [--rounds 3]`.

Each round drains the same plain calls alone, beside a backlog of a task with a limit, and beside one of a task with a
rate; then calls of 1,000 keys, without a rate, under one that is never reached, and under a tight one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.table import table
from benchmarks.targets import TARGETS, Fresh, end_orderly
from holdfast import App

PLAIN, BACKLOG, KEYS, PER_KEY, SLOTS = 5000, 1000, 1000, 3, 20
LIMIT_SECONDS = 300.0
BESIDE = {"alone": {}, "beside a limit": {"limit": 1}, "beside a rate": {"rate": "20/s"}}
KEYED = {
    "1,000 keys, no rate": {},
    "1,000 keys, rate 1000/s": {"rate": "1000/s", "rate_by": "key"},
    "1,000 keys, rate 1/s": {"rate": "1/s", "burst": 1, "rate_by": "key"},
}


class Ends:
    """Tells when so many calls were run."""

    def __init__(self, count: int) -> None:
        self._numbers, self._count = itertools.count(1), count
        self.done = threading.Event()

    def __call__(self) -> None:
        if next(self._numbers) == self._count:
            self.done.set()


def drain(url: str, options: dict[str, object]) -> float:
    """Return the plain calls per second beside a task with these options, whose calls are older."""
    ends = Ends(PLAIN)
    with App(url, name="rates") as app:

        @app.task(name="plain")
        def plain(number: int) -> None:
            ends()

        @app.task(name="bounded", **options)
        def bounded(number: int) -> None:
            time.sleep(0.02)

        if options:
            bounded.map(range(BACKLOG))
        plain.map(range(PLAIN))
        return PLAIN / _seconds(app, ends)


def keys(url: str, options: dict[str, object]) -> float:
    """Return the seconds until three calls of each key have run."""
    ends = Ends(KEYS * PER_KEY)
    with App(url, name="rates") as app:

        @app.task(name="keyed", **options)
        def keyed(key: str) -> None:
            ends()

        keyed.map([(f"k{number}",) for _ in range(PER_KEY) for number in range(KEYS)])
        return _seconds(app, ends)


def _seconds(app: App, ends: Ends) -> float:
    began = time.monotonic()
    with app.runner(concurrency=SLOTS):
        if not ends.done.wait(LIMIT_SECONDS):
            raise RuntimeError(f"the calls were not run after {LIMIT_SECONDS:g} s")
        return time.monotonic() - began


def measure(fresh: Fresh, rounds: int) -> list[list[str]]:
    rows = []
    for figure, unit, cases in ((drain, "/s", BESIDE), (keys, " s", KEYED)):
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, options in cases.items():
                with fresh() as url:
                    found[name].append(figure(url, dict(options)))
        first = next(iter(found.values()))
        for name, values in found.items():
            ratio = statistics.median(each / base for each, base in zip(values, first, strict=True))
            rows.append([name, f"{statistics.median(values):,.2f}{unit}", f"{ratio:.2f}"])
    return rows


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rates", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stores", default="sqlite,mongo", help="separated by commas (sqlite,mongo)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    end_orderly()
    for store in options.stores.split(","):
        with TARGETS[store].served() as fresh:
            say(f"\n{table([store, 'median', 'ratio'], measure(fresh, options.rounds))}")


if __name__ == "__main__":
    main()
