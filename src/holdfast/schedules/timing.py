"""Schedules as data: `Cron`, `Every`, `Once`, frozen and storable.

The ticks of a schedule are a fixed, strictly increasing sequence of instants, in seconds since the epoch, UTC, and
`next_after` only looks that sequence up: asked from anywhere, by any process, it gives the same ticks. A tick's
invocation has an id made from schedule and instant, so two processes that answered differently would run one occasion
twice.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from holdfast.clock import Duration, format_duration, parse_duration
from holdfast.errors import InvalidSchedule, UsageError
from holdfast.schedules.cron import parse
from holdfast.schedules.zones import find_zone, next_instant

_SHORTEST_SECONDS = 1.0
_FIRST_INSTANT, _LAST_INSTANT = -6.2e10, 2.499e11  # what a datetime can hold, with some room


class _Ticking(msgspec.Struct, frozen=True, tag_field="kind"):
    if TYPE_CHECKING:

        def next_after(self, at: float) -> float | None:
            """Return the first tick strictly later than `at`, or None if there is none."""

    def ticks(self, after: float, until: float = math.inf, limit: int | None = None) -> Iterator[float]:
        """Yield the ticks later than `after` and not later than `until`, in order; at most `limit`."""
        given, tick = 0, self.next_after(after)
        while tick is not None and tick <= until and (limit is None or given < limit):
            yield tick
            given, tick = given + 1, self.next_after(tick)


class Cron(_Ticking, frozen=True, tag="cron"):
    """Due when the clock of `timezone` fits `expression`. Made, and checked, by `cron`."""

    expression: str
    timezone: str = "UTC"

    def next_after(self, at: float) -> float | None:
        tick = next_instant(parse(self.expression), find_zone(self.timezone), math.floor(instant(at, "at")))
        return None if tick is None else float(tick)

    def describe(self) -> str:
        return f"by cron '{self.expression}', on the clock of {self.timezone}"


class Every(_Ticking, frozen=True, tag="every"):
    """Due at `anchor`, then every `seconds`, for ever. Made by `every`."""

    seconds: float
    anchor: float = 0.0

    def __post_init__(self) -> None:
        if not _SHORTEST_SECONDS <= self.seconds < math.inf:
            raise InvalidSchedule(f"An interval of {self.seconds} s: it must be at least a second, and finite.")
        instant(self.anchor, "anchor")

    def next_after(self, at: float) -> float | None:
        """Multiply instead of adding up: the millionth tick is as exact as the first."""
        if instant(at, "at") < self.anchor:
            return self.anchor
        # The division may be off by one rounding; the multiplication decides which ticks exist.
        count = max(0, math.floor((at - self.anchor) / self.seconds) - 1)
        while (tick := self.anchor + count * self.seconds) <= at:
            count += 1
        return tick if tick <= _LAST_INSTANT else None

    def describe(self) -> str:
        anchor = f", counted from {_shown(self.anchor)}" if self.anchor else ""
        return f"every {format_duration(self.seconds)}{anchor}"


class Once(_Ticking, frozen=True, tag="once"):
    """Due once, at the instant `at`. Made by `once`."""

    at: float

    def __post_init__(self) -> None:
        instant(self.at, "at")

    def next_after(self, at: float) -> float | None:
        return self.at if self.at > instant(at, "at") else None

    def describe(self) -> str:
        return f"once, at {_shown(self.at)}"


Schedule = Cron | Every | Once


def cron(expression: str, *, timezone: str = "UTC") -> Cron:
    """Return a schedule by cron expression, on the clock of `timezone` (an IANA name such as ``Europe/Rome``)."""
    if not isinstance(expression, str):
        raise InvalidSchedule(f"Cron {expression!r} is not text.")
    if not isinstance(timezone, str):
        raise InvalidSchedule(f"Time zone {timezone!r} is not a name: give text such as 'Europe/Rome'.")
    find_zone(timezone)
    parse(expression)
    return Cron(" ".join(expression.split()), timezone)


def every(interval: Duration, *, anchor: float | dt.datetime | None = None) -> Every:
    """Return a schedule by interval: ticks at `anchor` plus whole multiples of `interval`, never before `anchor`.

    The default anchor is the epoch, so that all processes agree on the ticks without having to agree on a beginning,
    and ``every("1h")`` is due on the hour (UTC).
    """
    try:
        seconds = parse_duration(interval)
    except UsageError as error:
        raise InvalidSchedule(f"every({interval!r}): {error}") from None
    return Every(seconds, 0.0 if anchor is None else instant(anchor, "anchor"))


def once(at: float | dt.datetime) -> Once:
    """Return a schedule with one tick, at seconds since the epoch or at a datetime with a time zone."""
    return Once(instant(at, "at"))


def instant(value: float | dt.datetime, name: str) -> float:
    if isinstance(value, dt.datetime):
        if value.utcoffset() is None:
            raise InvalidSchedule(f"{name}={value.isoformat()} has no time zone, so it is no instant: add one.")
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSchedule(f"{name}={value!r} is no instant: give seconds since 1970, or a datetime with a zone.")
    if not _FIRST_INSTANT <= value <= _LAST_INSTANT:  # milliseconds taken for seconds, mostly; and NaN
        raise InvalidSchedule(f"{name}={value!r} is no instant: give seconds since the epoch, in the years 5 to 9890.")
    return float(value)


def _shown(instant: float) -> str:
    return dt.datetime.fromtimestamp(instant, dt.UTC).replace(tzinfo=None).isoformat(" ") + " UTC"
