"""Send 100,000 requests of every kind to a web app, in one process: ``python -m tests.fuzz [--requests N] [--seed S]``.

It fails if an answer is a defect (5xx), has a secret in it or in a log line, or is unlike the description of the API;
or if the memory of the process grows by more than 48 MB between the first tenth and the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.outage import ALL, faults_of_outage
from tests.fuzz.running import Report, fuzz
from tests.fuzz.target import FuzzShop

MOST_GROWTH = 48 * 2**20  # bytes


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--store", help="its URL; else a SQLite file in a temporary folder")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = given.store or f"sqlite:///{Path(folder) / 'fuzz.db'}"
        with FuzzShop(url) as shop:
            report = fuzz(shop, given.requests, given.seed, told=_telling())
    report.faults |= {(fault, "while the store does not answer"): (1, "") for fault in faults_of_outage(ALL)}
    return _said(report)


def _telling() -> Callable[[Report], None]:
    began = time.monotonic()

    def tell(report: Report) -> None:
        seconds = time.monotonic() - began
        rss = report.memory[-1] / 2**20
        print(f"{report.sent:,} requests, {seconds:.0f} s, {rss:.0f} MB, {len(report.faults)} faults", flush=True)

    return tell


def _said(report: Report) -> int:
    statuses: Counter[int] = Counter()
    for (status, _), count in report.statuses.items():
        statuses[status] += count
    print("answers:", ", ".join(f"{count:,} × {status}" for status, count in sorted(statuses.items())))
    for (what, where), (count, example) in sorted(report.faults.items(), key=lambda each: -each[1][0]):
        print(f"\n{count} × {where}: {what:.200}\n    {example:.1500}")
    growth = report.growth
    print(f"\nmemory: {growth / 2**20:+.1f} MB since the first tenth (up to {MOST_GROWTH / 2**20:.0f} MB are allowed)")
    return int(bool(report.faults) or growth > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
