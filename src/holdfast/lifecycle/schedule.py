"""When a recurring task is due.

A schedule is data (`Cron`, `Every`, `Once`: frozen, storable), and its ticks are a fixed, strictly increasing sequence
of instants, in seconds since the epoch, UTC. `next_tick` only looks that sequence up: asked from anywhere, by any
process, it gives the same ticks. The store relies on it, because a tick's invocation gets an id derived from schedule
and instant, so two schedulers that answered differently would run one occasion twice.

Cron expressions have five fields (minute, hour, day of month, month, day of week) or six, with seconds FIRST. Months
and days may be names; lists, ranges, steps, ``L`` (last day), ``LW`` (last weekday), ``5L`` (last Friday) and ``mon#2``
(second Monday) work. As in Debian's cron, if both day fields are restricted a day that fits EITHER of them counts,
unless one begins with ``*`` (``*/2`` does), in which case both must fit.

When the local clock is changed, a job is treated by its kind, as Debian's cron does:

* **Fixed-time jobs**, where none of second, minute and hour begins with ``*`` (``30 2 * * *``, ``0 9-17 * * *``), are
  due at the first instant at which the local clock shows their time, *or has jumped over it*.
  - In a skipped hour: due once, at the moment of the jump (02:30 runs when 02:00 becomes 03:00). A nightly job must not
    be lost for a day. Several times in the gap, or one in it and one at its very end, give one tick, not several.
  - In a doubled hour: due once, the first time round. A nightly job must not run twice.
* **Interval jobs**, where any of these begins with ``*`` (``*/10 * * * *``, ``15 * * * *``, ``*/10 2 * * *``), are due
  whenever the local clock shows a matching time.
  - In a skipped hour: local times that do not exist are left out. ``*/10 * * * *`` goes on every ten real minutes,
    which is what its author wanted; ``*/10 2 * * *`` does not run at all on a day without a second hour.
  - In a doubled hour: due both times round, for the same reason.

The fields are parsed and matched by `cronsim`, on plain wall-clock time only; what a change of the clock means is
decided here. Left to itself cronsim gives, when started inside a doubled hour, times that have already passed; and it
walks aware times in steps of an hour, so that a zone that shifts by 30 minutes (Australia/Lord_Howe) loses ticks,
depending on where the walk began, and one that shifts at midnight gets ticks at times that do not exist. It also treats
every six-field expression as an interval job; here ``0 30 2 * * *`` and ``30 2 * * *`` mean the same: a seconds field
should not make a nightly job vanish.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
import math
import zoneinfo
from typing import Annotated, assert_never

import msgspec
from cronsim import CronSim, CronSimError

from holdfast.clock import Duration, parse_duration
from holdfast.errors import UsageError

# Below this, neighbouring ticks of today would be hard to tell apart as floats, and no scheduler could keep up.
_SHORTEST_INTERVAL_SECONDS = 0.001
_DAY_SECONDS = 86_400
_FIRST_INSTANT, _LAST_INSTANT = -6.2e10, 2.499e11
_EPOCH = dt.datetime(1970, 1, 1)
_SECOND = dt.timedelta(seconds=1)

# Zone files of many hosts that are no zones: one differs from host to host, the others may count leap seconds.
_HOST_ZONES = ("localtime", "posixrules", "posix/", "right/")

_FIELDS = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, L (last day) or LW (last weekday)",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT (0 and 7 are Sunday), 5L (last Friday) or FRI#2 (second Friday)",
}
_SIZES = {"second": 60, "minute": 60, "hour": 24, "day-of-month": 31, "month": 12, "day-of-week": 7}


class Cron(msgspec.Struct, frozen=True, tag="cron", tag_field="kind"):
    """Due when the clock of `timezone` matches `expression`. Made, and checked, by `cron`."""

    expression: str
    timezone: str = "UTC"


class Every(msgspec.Struct, frozen=True, tag="every", tag_field="kind"):
    """Due at `anchor`, then every `seconds`, for ever. Made, and checked, by `every`."""

    seconds: Annotated[float, msgspec.Meta(ge=_SHORTEST_INTERVAL_SECONDS)]
    anchor: float = 0.0


class Once(msgspec.Struct, frozen=True, tag="once", tag_field="kind"):
    """Due at the one instant `at`."""

    at: float


Schedule = Cron | Every | Once


# --- Making schedules -------------------------------------------------------------------------------------------------


def cron(expression: str, *, timezone: str = "UTC") -> Cron:
    """A schedule by cron expression, on the clock of `timezone` (an IANA name such as ``Europe/Rome``)."""
    if not isinstance(timezone, str):
        raise UsageError(f"Time zone {timezone!r} is not a name: give text such as 'Europe/Rome'.")
    _zone(timezone)
    fields = _checked_fields(expression)
    text = " ".join(fields)
    try:
        possible = _wall_after(text, dt.datetime(2000, 1, 1)) is not None
    except CronSimError:  # every field is fine alone, so it is their combination: for instance 31 February
        possible = False
    if not possible:
        day, month, weekday = fields[-3:]
        raise UsageError(
            f"Cron {expression!r} never comes: no date has day-of-month {day!r}, month {month!r} and "
            f"day-of-week {weekday!r}."
        )
    return Cron(text, timezone)


def every(interval: Duration, *, anchor: float | dt.datetime = 0.0) -> Every:
    """A schedule by interval: ticks at `anchor` plus whole multiples of `interval`, never before `anchor`.

    The default anchor is the epoch, so that all processes agree on the ticks without having to agree on a beginning,
    and ``every("1h")`` is due on the hour (UTC).
    """
    seconds = parse_duration(interval)
    if seconds < _SHORTEST_INTERVAL_SECONDS:
        raise UsageError(f"every({interval!r}): an interval is at least a millisecond.")
    return Every(seconds, _instant(anchor, "anchor"))


def once(at: float | dt.datetime) -> Once:
    """A schedule with one tick, at seconds since the epoch or at a datetime with a time zone."""
    return Once(_instant(at, "at"))


def _instant(value: float | dt.datetime, name: str) -> float:
    if isinstance(value, dt.datetime):
        if value.utcoffset() is None:
            raise UsageError(f"{name}={value.isoformat()} has no time zone, so it is no instant: add one, e.g. UTC.")
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}={value!r} is no instant: give seconds since the epoch or a datetime with a zone.")
    return _finite(value, name)


def _finite(value: float, name: str) -> float:
    # Instants that a datetime cannot hold are mistakes (milliseconds taken for seconds, mostly).
    if not _FIRST_INSTANT <= value <= _LAST_INSTANT:
        raise UsageError(f"{name}={value!r} is no instant: it must be seconds since the epoch, in the years 5 to 9890.")
    return float(value)


def _checked_fields(expression: str) -> list[str]:
    """The fields of `expression`, each of which is right when taken alone."""
    if not isinstance(expression, str):
        raise UsageError(f"Cron {expression!r} is not text.")
    fields = expression.split()
    if len(fields) not in (5, 6):
        raise UsageError(
            f"Cron {expression!r} has {len(fields)} field(s). Write five (minute hour day-of-month month day-of-week, "
            "such as '0 9 * * mon-fri') or six, with seconds first ('30 0 9 * * mon-fri')."
        )
    for name, field in zip(list(_FIELDS)[-len(fields) :], fields, strict=True):
        for item in field.split(","):
            problem = _problem(name, item)
            if problem:
                raise UsageError(f"Cron {expression!r}: bad {name} field {field!r}: {problem}")
    return fields


def _problem(name: str, item: str) -> str | None:
    """What is wrong with one item of a field's list, or None."""
    if not _parses(name, item):
        first, _, last = item.partition("-")
        wraps = bool(last) and _parses(name, f"{last}-{first}")
        hint = " A range cannot wrap around the end: write a list." if wraps else ""
        return f"{item!r} is not {_FIELDS[name]}, nor a range, step or * over these.{hint}"
    start, _, step = item.partition("/")
    if step and int(step) > _SIZES[name]:
        # Taken literally this is "once per round of the field", which nobody who writes */90 means.
        return f"the step {step} of {item!r} is longer than the field ({_SIZES[name]}). Perhaps every() is meant."
    if step and start.upper() in ("L", "LW"):
        return f"a step cannot follow {start!r}."  # cronsim would ignore it
    return None


def _parses(name: str, item: str) -> bool:
    """Whether cronsim takes `item` for field `name`, all others being ``*``."""
    alone = ["*"] * len(_FIELDS)
    alone[list(_FIELDS).index(name)] = item
    try:
        CronSim(" ".join(alone), _EPOCH)
    except (CronSimError, ValueError):  # ValueError: thousands of digits
        return False
    return bool(item)  # an empty item would have vanished from the joined text


@functools.lru_cache(maxsize=256)
def _zone(name: str) -> zoneinfo.ZoneInfo:
    if name.startswith(_HOST_ZONES):
        raise UsageError(f"Time zone {name!r} is not the same on every host. Give an IANA name such as 'Europe/Rome'.")
    if name:
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # also a directory, such as "Europe"
            pass
    zones = {zone for zone in zoneinfo.available_timezones() if not zone.startswith(_HOST_ZONES)}
    known = {zone.lower(): zone for zone in zones} | {zone.lower().rpartition("/")[2]: zone for zone in zones}
    wanted = name.lower().replace(" ", "_")
    near = [wanted] if wanted in known else difflib.get_close_matches(wanted, known, n=3)
    hint = f" Did you mean {' or '.join(repr(known[zone]) for zone in near)}?" if near else ""
    raise UsageError(f"Unknown time zone {name!r}.{hint} Give an IANA name such as 'Europe/Rome' or 'UTC'.")


# --- Ticks ------------------------------------------------------------------------------------------------------------


def next_tick(schedule: Schedule, after: float) -> float | None:
    """The first tick strictly later than `after`, or None if there is none."""
    after = _finite(after, "after")
    match schedule:
        case Cron():
            return _next_cron(schedule, after)
        case Every():
            return _next_every(schedule, after)
        case Once():
            return schedule.at if schedule.at > after else None
        case _:
            assert_never(schedule)


def ticks_between(schedule: Schedule, after: float, until: float, limit: int) -> list[float]:
    """The ticks later than `after` and not later than `until`, in order, and at most the first `limit` of them."""
    ticks: list[float] = []
    while len(ticks) < limit:
        tick = next_tick(schedule, after)
        if tick is None or not tick <= until:
            break
        ticks.append(tick)
        after = tick
    return ticks


def _next_every(schedule: Every, after: float) -> float:
    """By multiplication, not by adding up: the millionth tick is as exact as the first."""
    if after < schedule.anchor:
        return schedule.anchor
    count = math.floor((after - schedule.anchor) / schedule.seconds)
    # The division may be off by one rounding; the multiplication decides which ticks exist.
    while count > 0 and schedule.anchor + count * schedule.seconds > after:
        count -= 1
    while (tick := schedule.anchor + count * schedule.seconds) <= after:
        count += 1
    return tick


def _next_cron(schedule: Cron, after: float) -> float | None:
    zone = _zone(schedule.timezone)
    search = _next_fixed_time if _is_fixed_time(schedule.expression) else _next_matching_time
    try:
        tick = search(schedule.expression, zone, math.floor(after))
    except (CronSimError, ValueError) as error:
        raise UsageError(f"Cron {schedule.expression!r} is wrong: {error}. Make schedules with cron().") from error
    return None if tick is None else float(tick)


def _is_fixed_time(expression: str) -> bool:
    times_of_day = expression.split()[:-3]
    return not any(field.startswith("*") for field in times_of_day)


def _next_fixed_time(expression: str, zone: zoneinfo.ZoneInfo, after: int) -> int | None:
    """The first tick of a fixed-time job after `after`.

    A wall time is due at the first instant that shows it or is past it, so later wall times are never due earlier, and
    those up to the wall time of `after` are due by `after`. In a doubled hour some later ones are, too: skip them.
    """
    wall = _wall_after(expression, _wall(after, zone))
    while wall is not None:
        tick = _first_reached(wall, zone)
        if tick > after:
            return tick
        wall = _wall_after(expression, wall)
    return None


def _next_matching_time(expression: str, zone: zoneinfo.ZoneInfo, after: int) -> int | None:
    """The first instant after `after` whose wall time matches: a walk over stretches of unchanged offset."""
    start = after + 1  # the first instant that may be the answer
    while True:
        just_before = _wall(start, zone) - _SECOND
        found = _wall_after(expression, just_before)
        if found is None:
            return None
        tick = start - 1 + _seconds(found - just_before)  # if the offset stays as it is at `start`
        horizon = min(tick, start + _DAY_SECONDS)
        change = _offset_change(zone, start, horizon)
        if change is not None:
            start = change  # nothing matched before it
        elif tick == horizon:
            return tick
        else:
            # No wall time before `found` fits. Clocks go back by less than a day, so none that was passed comes again;
            # only near `found` does the offset matter.
            start = max(horizon, tick - 2 * _DAY_SECONDS)


def _first_reached(wall: dt.datetime, zone: zoneinfo.ZoneInfo) -> int:
    """The first instant at which the local clock shows `wall` or, if it never does, has jumped over it."""
    shown = _instant_of(wall, zone, fold=0)
    if _wall(shown, zone) == wall:
        return shown
    # In a gap fold=1 reads `wall` with the offset after the jump, fold=0 with that before: the jump is in between.
    change = _offset_change(zone, _instant_of(wall, zone, fold=1), shown)
    return shown if change is None else change


def _offset_change(zone: zoneinfo.ZoneInfo, start: int, end: int) -> int | None:
    """The instant in (start, end] from which another offset holds than at `start`; None if both have the same."""
    offset = _offset(start, zone)
    if _offset(end, zone) == offset:
        return None
    while end - start > 1:
        middle = (start + end) // 2
        if _offset(middle, zone) == offset:
            start = middle
        else:
            end = middle
    return end


def _wall_after(expression: str, wall: dt.datetime) -> dt.datetime | None:
    """The first wall time later than `wall` that matches. Naive on purpose: cronsim then does nothing about zones."""
    return next(CronSim(expression, wall), None)


def _wall(instant: int, zone: zoneinfo.ZoneInfo) -> dt.datetime:
    """What the clock on the wall shows."""
    aware = (_EPOCH + dt.timedelta(seconds=instant)).replace(tzinfo=dt.UTC).astimezone(zone)
    return aware.replace(tzinfo=None, fold=0)


def _offset(instant: int, zone: zoneinfo.ZoneInfo) -> int:
    return _seconds(_wall(instant, zone) - _EPOCH) - instant


def _instant_of(wall: dt.datetime, zone: zoneinfo.ZoneInfo, *, fold: int) -> int:
    aware = wall.replace(tzinfo=zone, fold=fold)
    return _seconds(aware.astimezone(dt.UTC).replace(tzinfo=None) - _EPOCH)


def _seconds(length: dt.timedelta) -> int:
    return length // _SECOND
