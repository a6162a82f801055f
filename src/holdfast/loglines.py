"""Lets a log line that repeats pass ever more seldom, whoever writes it.

Whatever is repeated without end may fail without end, and a line for each time fills a disk. Places that expect it
log seldom by themselves (`engine.outages`). This is for all the others: a filter on every logger of Holdfast, in the
command line and in a user's program alike. The first lines of a series pass, then one after 10 s, 30 s, … 5 minutes,
and each of those tells how many were left out. DEBUG lines all pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_AT_FIRST = 10  # lines of a series that pass
_FIRST_PAUSE_SECONDS, _LONGER, _LONGEST_PAUSE_SECONDS = 10.0, 3, 300.0
_OVER_SECONDS = 120.0  # without such a line: the next one begins a new series
_MOST_SERIES = 1000
_MOST_LETTERS = 200  # of an argument: what is longer repeats if it begins alike

NAMES = (
    *("archive", "core", "engine", "recovery", "retention", "runner"),
    *("schedules", "services", "store", "triggers", "worker"),
)
"""The loggers of Holdfast, below `holdfast`. A filter on a logger does not see what those below it are told."""


class _Series(NamedTuple):
    lines: int
    passed_at: float
    pause: float
    seen_at: float
    left_out: int


class Repeats(logging.Filter):
    """Refuses what repeats too often. Lines are alike if they differ in nothing but numbers; one about an invocation is
    like another about the same one only. `extra={"series": name}` makes all lines of that name alike.
    """

    def __init__(self, time: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._time = time
        self._lock = threading.RLock()  # a signal handler may log in the middle of it
        self._series: dict[tuple[object, ...], _Series] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        with self._lock:
            left_out = self._passes(_key(record), self._time())
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} more like this were left out)", ()
        return left_out is not None

    def _passes(self, key: tuple[object, ...], now: float) -> int | None:
        """Return how many were left out since the last one that passed; None if this one does not."""
        before = self._series.pop(key, None)  # and in again, at the end: the oldest are forgotten
        if before is None or now - before.seen_at > _OVER_SECONDS:
            passed, series = 0, _Series(1, now, _FIRST_PAUSE_SECONDS, now, 0)
        elif before.lines < _AT_FIRST:
            passed, series = 0, before._replace(lines=before.lines + 1, passed_at=now, seen_at=now)
        elif now - before.passed_at >= before.pause:
            pause = min(before.pause * _LONGER, _LONGEST_PAUSE_SECONDS)
            passed, series = before.left_out, before._replace(passed_at=now, pause=pause, seen_at=now, left_out=0)
        else:
            passed, series = None, before._replace(seen_at=now, left_out=before.left_out + 1)
        self._series[key] = series
        if len(self._series) > _MOST_SERIES:
            del self._series[next(iter(self._series))]
        return passed

    def forget(self) -> None:
        """Begin anew: for tests, whose clock is another one."""
        with self._lock:
            self._series.clear()


def _key(record: logging.LogRecord) -> tuple[object, ...]:
    series = getattr(record, "series", None)
    if series is not None:
        return record.name, record.levelno, series
    given = record.args if isinstance(record.args, tuple) else (record.args,)
    told = tuple(_text(each)[:_MOST_LETTERS] for each in given if not isinstance(each, int | float))
    return record.name, record.levelno, record.msg, told, getattr(record, "invocation", None)


def _text(argument: object) -> str:
    try:
        return argument if isinstance(argument, str) else repr(argument)
    except Exception:  # of a user's object
        return type(argument).__name__


REPEATS = Repeats()


def limit_repeats() -> None:
    """Have the filter on every logger of Holdfast. Called when the package is imported."""
    for name in NAMES:
        logging.getLogger(f"holdfast.{name}").addFilter(REPEATS)
