"""Clocks, moments and durations.

No decision in Holdfast reads a clock: time is an argument. The composition root passes a `Clock` around, so that tests
and the simulation move time instead of waiting for it. Moments are seconds since the epoch in UTC (`float`); durations
are seconds.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from typing import Protocol

from holdfast.errors import UsageError


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the seconds since the epoch, UTC. May jump when the host's clock is set."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never run backwards, and that count while the machine is suspended."""
        ...


class SystemClock:
    """The host's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return _elapsed()


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# CLOCK_MONOTONIC stands still while Linux is suspended: a laptop that slept for an hour would believe that its
# heartbeat is fresh. macOS has no CLOCK_BOOTTIME; there CLOCK_MONOTONIC itself counts suspension.
_elapsed = _boottime if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


# --- durations ------------------------------------------------------------------------------------------------

Duration = float | int | str | dt.timedelta
"""A length of time as people write it: ``90``, ``1.5``, ``"5m"``, ``"1h30m"``, ``"3 days"``, or a `timedelta`."""

_UNIT_WORDS: dict[float, tuple[str, ...]] = {
    0.001: ("ms", "msec", "msecs", "millisecond", "milliseconds"),
    1.0: ("s", "sec", "secs", "second", "seconds"),
    60.0: ("m", "min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
    86400.0: ("d", "day", "days"),
    604800.0: ("w", "week", "weeks"),
}
_SECONDS_PER = {word: seconds for seconds, words in _UNIT_WORDS.items() for word in words}
_CALENDAR_UNITS = frozenset({"mo", "mon", "month", "months", "y", "yr", "yrs", "year", "years"})

# Some 31 000 years. Longer is a mistake, and up to here a float still resolves a millisecond.
_LONGEST_SECONDS = 1e12

_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_BARE_NUMBER = re.compile(_NUMBER)
_PART = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>[^\W\d_]*)")
_SEPARATOR = re.compile(r"\A(?:\s|,|\band\b)*", re.IGNORECASE)


def parse_duration(value: Duration, *, unit: float = 1.0) -> float:
    """Return the seconds of a duration.

    A number without a unit, as a number or as text, counts in `unit` seconds: a setting named ``…_minutes`` passes
    ``60.0``. Units are ms, s, m (or min), h, d, w and their words, in either case, so ``"5M"`` is five minutes. Months
    and years are refused because they have no fixed length. A length is never negative.
    """
    if isinstance(value, bool) or not isinstance(value, float | int | str | dt.timedelta):
        raise UsageError(f"{_shortened(value)} is not a length of time: give a number, text like '5m', or a timedelta.")
    if isinstance(value, dt.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = _parse_text(value, unit)
    else:
        try:
            seconds = float(value) * unit
        except OverflowError:
            seconds = math.inf if value > 0 else -math.inf
    if math.isnan(seconds):
        raise UsageError(f"{_shortened(value)} is not a length of time: it is not a number.")
    if seconds < 0:
        raise UsageError(f"{_shortened(value)} is not a length of time: it is negative.")
    if seconds > _LONGEST_SECONDS:
        raise UsageError(
            f"{_shortened(value)} is too long: a length of time is at most {_LONGEST_SECONDS:.0e} seconds."
        )
    return abs(seconds)  # turns -0.0 into 0.0


def length_of(name: str, value: Duration) -> float:
    """Return the seconds of a duration; an error names the option."""
    try:
        return parse_duration(value)
    except UsageError as error:
        raise UsageError(f"{name}={error}") from None


TOO_LATE = 253_402_300_800.0  # the year 10000, which no date can express


def reached(name: str, now: float, seconds: float) -> float:
    """Return the moment this many seconds from now. Raises `UsageError` that names the option beyond the year 9999."""
    if (moment := now + seconds) >= TOO_LATE:
        raise UsageError(f"{name}={format_duration(seconds)} leads beyond the year 9999")
    return moment


def parse_moment(at: object, name: str = "at") -> float:
    """Return the seconds since the epoch of an aware datetime, or of a number of seconds."""
    if isinstance(at, dt.datetime):
        if at.tzinfo is None:
            raise UsageError(f"{name}={at!r} has no time zone, so the moment is ambiguous; use an aware datetime")
        if (moment := at.timestamp()) < 0:
            raise UsageError(f"{name}={at!r} lies before 1970; what is due at once needs no {name}=")
        if moment >= TOO_LATE:
            raise UsageError(f"{name}={at!r} lies beyond the year 9999")
        return moment
    if isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < TOO_LATE:
        return float(at)
    raise UsageError(f"{name}={at!r}: expected an aware datetime or seconds since the epoch, up to the year 9999")


def _parse_text(text: str, unit: float) -> float:
    rest = text.strip()
    if not rest:
        raise UsageError(
            f"{_shortened(text)} is not a length of time: it is empty. Give a number with a unit, like '5m'."
        )
    if _BARE_NUMBER.fullmatch(rest):
        return float(rest) * unit
    total = 0.0
    while True:
        part = _PART.match(rest)
        if part is None:
            raise _unreadable(text, rest)
        total += float(part["number"]) * _unit_seconds(text, part["number"], part["unit"])
        rest = rest[part.end() :]
        if not rest:
            return total
        rest = _SEPARATOR.sub("", rest, count=1)


def _unit_seconds(text: str, number: str, unit: str) -> float:
    known = "ms, s, m (min), h, d, w, or their words such as 'minutes'"
    if not unit:
        raise UsageError(f"{_shortened(text)}: {_shortened(number)} has no unit. Units are {known}.")
    seconds = _SECONDS_PER.get(unit.lower())
    if seconds is None:
        calendar = " Months and years have no fixed length ('m' and 'M' are minutes)."
        why = calendar if unit.lower() in _CALENDAR_UNITS else ""
        raise UsageError(f"{_shortened(text)}: unknown unit {_shortened(unit)}.{why} Units are {known}.")
    return seconds


def _unreadable(text: str, rest: str) -> UsageError:
    if rest.startswith("-"):
        return UsageError(f"{_shortened(text)} is not a length of time: it is negative.")
    where = f"cannot read {_shortened(rest)}" if rest else "something is missing at its end"
    return UsageError(f"{_shortened(text)} is not a length of time: {where}. Write it like '1h30m' or '3 days'.")


def _shortened(value: object) -> str:
    """Return the value for a message, but not ten thousand digits of it (which Python may refuse to print)."""
    try:
        text = repr(value)
    except ValueError:
        return "A number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def format_duration(seconds: float) -> str:
    """Format a duration, to the millisecond: ``250ms``, ``1m30s``, ``3d``. `parse_duration` reads it back."""
    if not math.isfinite(seconds):
        raise UsageError(f"{seconds} is not a length of time.")
    sign = "-" if seconds < 0 else ""
    whole_seconds, milliseconds = divmod(round(abs(seconds) * 1000), 1000)
    if whole_seconds == 0:
        return f"{sign}{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{count}{name}" for count, name in ((days, "d"), (hours, "h"), (minutes, "m")) if count]
    if rest or milliseconds:
        parts.append(f"{rest + milliseconds / 1000:g}s")
    return sign + "".join(parts)


def moment(at: float) -> str:
    """Return a moment in ISO 8601, UTC."""
    return dt.datetime.fromtimestamp(at, dt.UTC).isoformat(timespec="seconds" if at == int(at) else "milliseconds")
