"""A group with a callback, and a `map` of as many calls: `python -m benchmarks.groups [MEMBERS] [STORE | URL]`.

A store is one of `benchmarks.targets`: sqlite (the default) or mongo.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.targets import TARGETS, end_orderly
from holdfast import App, group

PATIENCE_SECONDS = 600.0


def measure(members: int, url: str) -> None:
    app = App(url, name=f"groups{members}")

    @app.task
    async def add(x: int, y: int) -> int:
        return x + y

    @app.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    def told(what: str, since: float) -> None:
        print(f"{what:<40} {time.monotonic() - since:6.2f} s")

    began = time.monotonic()
    found = group(add.s(number, 1) for number in range(members)).then(total).submit()
    told(f"group of {members:,}: submit", began)
    began, callback = time.monotonic(), _callback(found)
    with app, app.runner(concurrency=200):
        assert callback.result(PATIENCE_SECONDS) == members * (members + 1) // 2
        told("until the callback has ended", began)
        began = time.monotonic()
        assert len(found.results(PATIENCE_SECONDS)) == members
        told("all results, in order", began)
    began = time.monotonic()
    mapped = add.map([(number, 1) for number in range(members)])
    told(f"map of {members:,}: submit", began)
    began = time.monotonic()
    with app, app.runner(concurrency=200):
        mapped.results(PATIENCE_SECONDS)
        told("until the last one has ended", began)


def _callback(found: Any) -> Any:
    return found.callback


if __name__ == "__main__":
    end_orderly()
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    where = sys.argv[2] if len(sys.argv) > 2 else "sqlite"
    if where not in TARGETS:
        measure(many, where)
    else:
        with TARGETS[where].served() as fresh, fresh() as url:
            measure(many, url)
