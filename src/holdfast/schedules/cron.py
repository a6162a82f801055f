"""Cron expressions: text in, and from it the next time that a clock on the wall shows. Time zones are not known here.

Five fields (minute, hour, day of month, month, day of week) or six, with seconds FIRST; five mean second 0. Case does
not matter. A field is a list of parts:

* ``*``, a value, a range ``9-17``; in any field a range whose end is smaller goes on around the end of the field:
  ``22-2`` is 22, 23, 0, 1, 2, ``fri-mon`` is Friday to Monday, ``28-3`` in a month of 30 days is 28, 29, 30, 1, 2, 3;
* any of these with a step: ``*/5``, ``10-40/10``, and ``5/15``, which is from 5 on to the end of the field (for days of
  the week that is Sunday, 7);
* names: jan-dec, sun-sat; Sunday is 0 and 7;
* day of month: ``L`` (the last), ``L-3`` (three days before it), ``15W`` (the weekday, Monday to Friday, nearest to the
  15th within its month), ``LW``;
* day of week: ``5L`` or ``friL`` (the last Friday of the month), ``fri#2`` (the second one);
* ``?`` is ``*``, in the two day fields.

If both day fields name days, a day that fits EITHER of them counts. If one has a ``*`` (``*/2`` too), both must fit.
These are the classic rules.

Which days of a month fit depends only on its length and on the weekday it begins with: 28 shapes, computed when the
expression is read. So an expression that never comes is seen at once (every shape of every month comes within 400
years), and the search goes by months.
"""

from __future__ import annotations

import calendar
import datetime as dt
import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.errors import InvalidSchedule

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_LONGEST = 1000  # characters; more is a mistake

_MONTH_DAY = re.compile(r"(?:l(?:-([0-9]{1,2}))?|([0-9]{1,2})(?=w))(w?)", re.IGNORECASE)  # L, L-3, LW, 15W
_WEEKDAY = re.compile(r"([0-9]|[a-z]{3})(?:#([1-5])|l)", re.IGNORECASE)  # 5L, friL, fri#2
_SATURDAY, _SUNDAY = 6, 0


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    allowed: str
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    @property
    def last(self) -> int:
        return 7 if self.names is _DAYS else self.high


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    _Field("second", 0, 59, "0-59"),
    _Field("minute", 0, 59, "0-59"),
    _Field("hour", 0, 23, "0-23"),
    _Field("day-of-month", 1, 31, "1-31, L (the last day), L-3, LW, 15W"),
    _Field("month", 1, 12, "1-12, jan-dec", _MONTHS),
    _Field("day-of-week", 0, 6, "0-7 (0 and 7 are Sunday), sun-sat, friL (the last Friday), fri#2", _DAYS),
)
_SECOND, _MINUTE, _HOUR, _MONTH_DAYS, _MONTH, _WEEKDAYS = _FIELDS


class MonthShape(NamedTuple):
    """What the days of a month depend on; `first` is the weekday of its first day, Sunday being 0."""

    length: int
    first: int

    def weekday(self, day: int) -> int:
        return (self.first + day - 1) % 7


class Expression(NamedTuple):
    """A cron expression that was read. Values are in order."""

    seconds: list[int]
    minutes: list[int]
    hours: list[int]
    months: list[int]
    days: Mapping[MonthShape, list[int]]
    names_hours: bool  # no * in the hour field: it speaks of hours on the wall, not of an interval

    def after(self, wall: dt.datetime) -> dt.datetime | None:
        """Return the first time on the wall later than `wall` that fits; None if that is beyond the year 9999."""
        date = wall.date()
        fits = date.month in self.months and date.day in self.days[_shape(date.year, date.month)]
        if fits and (time := self._time_after(wall)) is not None:
            return dt.datetime.combine(date, time)
        found = self._date_after(date)
        first = dt.time(self.hours[0], self.minutes[0], self.seconds[0])
        return None if found is None else dt.datetime.combine(found, first)

    def _time_after(self, wall: dt.datetime) -> dt.time | None:
        """Return the first time of day later than that of `wall`."""
        if wall.hour in self.hours:
            if wall.minute in self.minutes and (second := _later(self.seconds, wall.second)) is not None:
                return dt.time(wall.hour, wall.minute, second)
            if (minute := _later(self.minutes, wall.minute)) is not None:
                return dt.time(wall.hour, minute, self.seconds[0])
        hour = _later(self.hours, wall.hour)
        return None if hour is None else dt.time(hour, self.minutes[0], self.seconds[0])

    def _date_after(self, date: dt.date) -> dt.date | None:
        """Return the first date later than `date` that fits: 40 years on at most, for a weekday on 29 February."""
        year, month, day = date.year, date.month, date.day
        while year <= dt.MAXYEAR:
            if month in self.months and (found := _later(self.days[_shape(year, month)], day)) is not None:
                return dt.date(year, month, found)
            year, month, day = (year, month + 1, 0) if month < 12 else (year + 1, 1, 0)
        return None


def _later(values: list[int], than: int) -> int | None:
    return next((value for value in values if value > than), None)


@functools.lru_cache(maxsize=2048)
def _shape(year: int, month: int) -> MonthShape:
    first, length = calendar.monthrange(year, month)  # Monday is 0 there
    return MonthShape(length, (first + 1) % 7)


# --- Reading ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def parse(expression: str) -> Expression:
    """Read `expression`, or raise `InvalidSchedule` that names the field."""
    if len(expression) > _LONGEST:
        raise InvalidSchedule(f"Cron {expression[:50]!r}... is longer than {_LONGEST} characters.")
    alias = expression.strip().lower()
    if alias.startswith("@") and alias not in ALIASES:
        raise InvalidSchedule(f"Cron {expression!r} is not known; with @ there are {', '.join(ALIASES)}.")
    fields = ALIASES.get(alias, expression).split()
    if len(fields) not in (5, 6):
        raise InvalidSchedule(
            f"Cron {expression!r} has {len(fields)} field(s). Write five (minute hour day-of-month month day-of-week, "
            "such as '0 9 * * mon-fri') or six, with seconds first ('30 0 9 * * mon-fri')."
        )
    second, minute, hour, month_day, month, weekday = fields if len(fields) == 6 else ["0", *fields]
    read = functools.partial(_read, expression)
    both = any(text == "?" or "*" in text for text in (month_day, weekday))
    days = {}
    for shape in (MonthShape(length, first) for length in (28, 29, 30, 31) for first in range(7)):
        by_date, by_weekday = set(read(_MONTH_DAYS, month_day, shape)), set(read(_WEEKDAYS, weekday, shape))
        days[shape] = sorted(by_date & by_weekday if both else by_date | by_weekday)
    months = read(_MONTH, month)
    lengths = {calendar.monthrange(year, number)[1] for number in months for year in (2000, 2001)}
    if not any(fitting for shape, fitting in days.items() if shape.length in lengths):
        raise InvalidSchedule(
            f"Cron {expression!r} never comes: no date has day-of-month {month_day!r}, month {month!r} and "
            f"day-of-week {weekday!r}."
        )
    return Expression(read(_SECOND, second), read(_MINUTE, minute), read(_HOUR, hour), months, days, "*" not in hour)


def _read(expression: str, field: _Field, text: str, shape: MonthShape | None = None) -> list[int]:
    """Return the values of a field; those of a day field as days of the month, in a month of that shape."""
    values: set[int] = set()
    for part in ("*" if text == "?" and shape else text).split(","):
        try:
            if shape is None:
                values.update(_values(field, part))
            else:
                values.update((_by_date if field is _MONTH_DAYS else _by_weekday)(part, shape))
        except ValueError as error:
            raise InvalidSchedule(
                f"Cron {expression!r}: in the {field.name} field {text!r}, {error}. Allowed are {field.allowed}, and "
                "*, lists, ranges and steps."
            ) from None
    return sorted(values)


def _by_date(part: str, shape: MonthShape) -> list[int]:
    if not (special := _MONTH_DAY.fullmatch(part)):
        return [day for day in _values(_MONTH_DAYS, part) if day <= shape.length]
    before, date, nearest = special.groups()
    if date:
        _values(_MONTH_DAYS, date)
    elif int(before or 0) > 30:
        raise ValueError(f"{part!r} is before every month")
    day = int(date) if date else shape.length - int(before or 0)
    if not 1 <= day <= shape.length:
        return []
    if nearest and shape.weekday(day) == _SATURDAY:
        day += -1 if day > 1 else 2
    elif nearest and shape.weekday(day) == _SUNDAY:
        day += 1 if day < shape.length else -2
    return [day]


def _by_weekday(part: str, shape: MonthShape) -> list[int]:
    special = _WEEKDAY.fullmatch(part)
    wanted = set(_values(_WEEKDAYS, special[1] if special else part))
    days = [day for day in range(1, shape.length + 1) if shape.weekday(day) in wanted]
    if not special:
        return days
    return days[int(special[2]) - 1 : int(special[2])] if special[2] else days[-1:]


def _values(field: _Field, part: str) -> list[int]:
    span, slash, step = part.partition("/")
    first, dash, last = span.partition("-")
    if span == "*":
        low, high = field.low, field.high
    else:
        low = _value(field, first)
        high = _value(field, last) if dash else field.last if slash else low
    if slash and not (_is_number(step) and 1 <= int(step) < field.size):
        # */90 would be "once per round of the field", which is never meant.
        raise ValueError(f"the step of {part!r} is not 1 to {field.size - 1} (every() has any length)")
    if high < low:
        high += field.size
    return [(value - field.low) % field.size + field.low for value in range(low, high + 1, int(step) if slash else 1)]


def _value(field: _Field, text: str) -> int:
    if text.lower() in field.names:
        return field.names.index(text.lower()) + field.low
    if not text:
        raise ValueError("something is missing")
    if not _is_number(text) or not field.low <= int(text) <= field.last:
        raise ValueError(f"{text!r} is out of range" if _is_number(text) else f"{text!r} is not known")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
