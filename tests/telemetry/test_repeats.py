"""A line that repeats is told seldom, by whatever logger of Holdfast."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from holdfast.telemetry.logs import NAMES, REPEATS, ROWS, Repeats

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def log(told: list[str], now: list[float]) -> logging.Logger:
    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger = logging.Logger("holdfast.test")
    logger.addFilter(Repeats(lambda: now[0]))
    logger.addHandler(Listener())
    return logger


def test_a_line_that_repeats_for_an_hour_is_told_some_twenty_times(
    log: logging.Logger, told: list[str], now: list[float]
) -> None:
    for _ in range(36_000):
        log.warning("the loop failed after %.3f s: %s", now[0], OSError(9, "bad"))
        now[0] += 0.1
    assert 20 < len(told) < 30
    assert told[9].endswith("[Errno 9] bad"), "the first ones pass as they are"
    assert re.search(r" \(99 more like this were left out\)$", told[10])
    assert re.search(r" \(2,999 more like this were left out\)$", told[-1])


def test_what_is_over_and_comes_again_is_news(log: logging.Logger, told: list[str], now: list[float]) -> None:
    for _ in range(50):
        log.error("no answer")
    assert len(told) == 10
    now[0] += 121.0
    log.error("no answer")
    assert told[10:] == ["no answer"]


def test_other_lines_and_other_invocations_are_not_held_up(log: logging.Logger, told: list[str]) -> None:
    for number in range(100):
        log.warning("%s failed: %s", "task", "why", extra={"invocation": f"i{number}"})
    assert len(told) == 100
    for number in range(100):
        log.warning("worker %s died", f"r/{number}")
    assert len(told) == 200
    for number in range(100):
        log.warning("worker %s died", f"r/{number}", extra={"series": "deaths"})
    assert len(told) == 210


def test_debug_lines_all_pass_and_memory_is_bounded(log: logging.Logger, told: list[str]) -> None:
    for _ in range(50):
        log.debug("again")
    assert len(told) == 50
    for number in range(5000):
        log.info("line %s", f"{number}")
    (filter,) = log.filters
    assert isinstance(filter, Repeats)
    assert len(filter._throttle._series) == 1000


def test_every_logger_of_holdfast_has_the_filter() -> None:
    with_area = "|".join(kind.__name__ for kind, row in ROWS.items() if not row.logger)
    said = rf"getLogger\(\"holdfast\.([\w.]+)\"\)|\b(?:{with_area})\(\s*\"(\w+)\""
    names = {row.logger for row in ROWS.values() if row.logger} | {
        name for path in SOURCE.rglob("*.py") for found in re.findall(said, path.read_text()) for name in found if name
    }
    assert names == set(NAMES)
    assert all(REPEATS in logging.getLogger(f"holdfast.{name}").filters for name in names)
