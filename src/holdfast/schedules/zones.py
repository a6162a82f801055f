"""What a change of the local clock means for a cron expression.

It is treated by its kind, in the spirit of Vixie's cron:

* An expression **that names hours** (no ``*`` in the hour field: ``30 2 * * *``, ``0 9-17 * * *``, ``*/15 2 * * *``) is
  due at each of its local times exactly once: at the first instant at which the local clock shows it *or has jumped
  over it*.
  - Skipped: due at the jump (02:30 when 02:00 becomes 03:00): a nightly job is not lost for a day. Times that are due
    at one instant are one tick: several in the gap, or one in it and one at its end.
  - Doubled: due the first time round only: a nightly job does not run twice.
* An expression **for any hour** (``*`` or ``*/n`` in the hour field: ``*/10 * * * *``, ``15 * * * *``) is an interval.
  It is due whenever the local clock shows a time that fits: in a doubled hour both times round, in a skipped one never,
  so that ``*/10 * * * *`` goes on every ten real minutes.

Only the hour field decides. Vixie's cron also takes ``*/15 2 * * *`` for an interval, and then ``*/15 2 * mar sunL`` is
never due in Rome; here a change of the clock never suppresses an expression for ever.

Instants are whole seconds since the epoch; a wall time is a naive datetime. In no zone of the database do two changes
of the offset lie within two days.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from holdfast.errors import InvalidSchedule
from holdfast.schedules.cron import Expression

_DAY_SECONDS = 86_400
_EPOCH = dt.datetime(1970, 1, 1)
_SECOND = dt.timedelta(seconds=1)

# Zone files of many hosts that are no zones: one differs from host to host, the others may count leap seconds.
_HOST_ZONES = ("localtime", "posixrules", "posix/", "right/")


@functools.lru_cache(maxsize=1024)
def find_zone(name: str) -> ZoneInfo:
    if name.startswith(_HOST_ZONES):
        raise InvalidSchedule(f"Time zone {name!r} is not the same on every host. Give a name such as 'Europe/Rome'.")
    try:
        if name:
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # also a directory, such as "Europe"
        pass
    zones = {zone for zone in available_timezones() if not zone.startswith(_HOST_ZONES)}
    known = {zone.lower(): zone for zone in zones} | {zone.lower().rpartition("/")[2]: zone for zone in zones}
    wanted = name.lower().replace(" ", "_")
    near = [wanted] if wanted in known else difflib.get_close_matches(wanted, known, n=3)
    hint = f" Did you mean {' or '.join(repr(known[zone]) for zone in near)}?" if near else ""
    raise InvalidSchedule(f"Unknown time zone {name!r}.{hint} Give an IANA name such as 'Europe/Rome' or 'UTC'.")


def next_instant(expression: Expression, zone: ZoneInfo, after: int) -> int | None:
    """Return the first instant later than `after` at which `expression` is due in `zone`."""
    return (_next_reached if expression.names_hours else _next_shown)(expression, zone, after)


def _next_reached(expression: Expression, zone: ZoneInfo, after: int) -> int | None:
    local = _local(after, zone)
    wall = _naive(local)
    if local.fold:  # the second time round: the clock has been further already, up to its change
        change = _offset_change(zone, _instant(wall, zone, fold=0), after)
        wall = _naive(_local(change - 1, zone)) if change is not None else wall
    found = expression.after(wall)
    if found is None:
        return None
    shown = _instant(found, zone, fold=0)
    if _naive(_local(shown, zone)) == found:
        return shown
    # In a gap fold=1 reads `found` with the offset after the jump, fold=0 with that before: the jump is in between.
    return _offset_change(zone, _instant(found, zone, fold=1), shown)


def _next_shown(expression: Expression, zone: ZoneInfo, after: int) -> int | None:
    """Walk over stretches of unchanged offset."""
    start = after + 1  # the first instant that may be the answer
    while True:
        just_before = _naive(_local(start, zone)) - _SECOND
        found = expression.after(just_before)
        if found is None:
            return None
        tick = start - 1 + _seconds(found - just_before)  # if the offset stays as it is at `start`
        horizon = min(tick, start + _DAY_SECONDS)
        change = _offset_change(zone, start, horizon)
        if change is not None:
            start = change  # nothing fitted before it
        elif tick == horizon:
            return tick
        else:
            # No time on the wall before `found` fits, and clocks go back by less than a day, so none that was passed
            # comes again: only near `found` does the offset matter.
            start = max(horizon, tick - 2 * _DAY_SECONDS)


def _offset_change(zone: ZoneInfo, start: int, end: int) -> int | None:
    """Return the instant in (start, end] from which another offset holds than at `start`; None if there is none."""
    offset = _local(start, zone).utcoffset()
    if _local(end, zone).utcoffset() == offset:
        return None
    while end - start > 1:
        middle = (start + end) // 2
        if _local(middle, zone).utcoffset() == offset:
            start = middle
        else:
            end = middle
    return end


def _local(instant: int, zone: ZoneInfo) -> dt.datetime:
    return dt.datetime.fromtimestamp(instant, zone)


def _naive(local: dt.datetime) -> dt.datetime:
    return local.replace(tzinfo=None, fold=0)


def _instant(wall: dt.datetime, zone: ZoneInfo, *, fold: int) -> int:
    offset = wall.replace(tzinfo=zone, fold=fold).utcoffset() or dt.timedelta()
    return _seconds(wall - _EPOCH - offset)


def _seconds(length: dt.timedelta) -> int:
    return length // _SECOND
