"""Send many requests, and gather what is wrong with the answers: each fault once, with an example."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from tests.fuzz.cases import AT_ONCE, Fuzzed, described, others, sweep
from tests.fuzz.judging import faults
from tests.fuzz.target import FuzzShop

from holdfast.web import api
from holdfast.web.openapi import described as description
from holdfast.web.routing import PREFIX

_OF_A_ROUND = 600  # requests of one run of Hypothesis
_TOLD = 5_000


@dataclasses.dataclass
class Report:
    """What came of the requests. `faults` has how many and an example of each, by what it is and the route."""

    sent: int = 0
    statuses: Counter[tuple[int, str]] = dataclasses.field(default_factory=Counter)
    faults: dict[tuple[str, str], tuple[int, str]] = dataclasses.field(default_factory=dict)
    memory: list[int] = dataclasses.field(default_factory=list)  # bytes, after each round

    @property
    def growth(self) -> int:
        """Return by how many bytes the memory has grown since the first tenth of the rounds."""
        return self.memory[-1] - max(self.memory[: len(self.memory) // 10 + 1])


def fuzz(shop: FuzzShop, requests: int, start: int = 0, *, told: Callable[[Report], object] = id) -> Report:
    """Send about so many requests: each route once for each role; then two of three are made from the description."""
    report = Report()
    document = description(api.ROUTES, "0")
    strategies: list[SearchStrategy[Any]] = [
        described(document, shop.known, shop.senders),
        others(shop.known, shop.senders),
    ]
    for fuzzed in sweep(shop.known, shop.senders, start):
        judge(shop, fuzzed, report)
    report.memory.append(resident())
    round = 0
    while report.sent < requests:
        before = report.sent
        strategy = strategies[round % 3 == 2]
        _round(shop, strategy, start + round, min(_OF_A_ROUND, requests - report.sent), report)
        report.memory.append(resident())
        round += 1
        if report.sent // _TOLD != before // _TOLD:
            told(report)
    return report


def _round(shop: FuzzShop, strategy: SearchStrategy[Any], number: int, count: int, report: Report) -> None:
    @seed(number)
    @settings(
        max_examples=math.ceil(count / AT_ONCE),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(drawn: list[Fuzzed]) -> None:
        for fuzzed in drawn:
            judge(shop, fuzzed, report)

    one()


def judge(shop: FuzzShop, fuzzed: Fuzzed, report: Report) -> None:
    """Send a request, and note what is wrong with its answer."""
    where = f"{fuzzed.sent.method} {route_of(fuzzed.sent.target)}"
    try:
        answer = shop.ask(fuzzed.sent)
        found = list(faults(fuzzed, answer, shop.lines.taken(), shop.secrets))
        report.statuses[answer.status, where] += 1
    except Exception as error:
        found = [f"the app raises {error!r:.300}"]
    report.sent += 1
    for what in found:
        count, example = report.faults.get((key := re.sub(r"[0-9a-z]{20,}|\d+", "…", what), where), (0, ""))
        shown = f"{fuzzed.role} {fuzzed.sent.target[:600]!r} {fuzzed.sent.body[:300]!r}"
        headers = "" if fuzzed.case is not None else f" {list(fuzzed.sent.headers)!r:.300}"
        report.faults[key, where] = (count + 1, example or f"{shown}{headers}: {what}")


def route_of(target: bytes) -> str:
    """Return the first parts of a path, which name the route without its record."""
    path = target.partition(b"?")[0].decode("ascii", "replace")
    if not path.startswith(f"{PREFIX}/"):
        return "/".join(path.split("/")[:2])
    parts = path.removeprefix(PREFIX).split("/")
    return PREFIX + "/".join([*parts[:2], *(["…", *parts[3:4]] if len(parts) > 2 else [])])


def resident() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
