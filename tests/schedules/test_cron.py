"""Cron expressions: what they mean, and what is said about those that mean nothing. All in UTC; clocks that change are
in test_daylight_saving.py."""

from __future__ import annotations

import calendar
import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidSchedule, UsageError
from holdfast.schedules import Cron, cron
from holdfast.schedules.cron import parse


def at(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 9 * * mon-fri", "2024-05-31T09:00", "2024-06-03T09:00"),
        ("0 9 * * MON-Fri", "2024-05-31T08:59:59", "2024-05-31T09:00"),
        ("*/15 * * * *", "2024-05-31T09:01", "2024-05-31T09:15"),
        ("0 0 1 jan,JUL *", "2024-05-31", "2024-07-01"),
        ("0 0 ? * 7", "2024-05-31", "2024-06-02"),
        ("0 0 1 * ?", "2024-05-31", "2024-06-01"),
        ("59 59 23 31 12 ?", "2024-05-31", "2024-12-31T23:59:59"),
        ("15 30 12 * * *", "2024-05-31", "2024-05-31T12:30:15"),
        ("*/20 * * * * *", "2024-05-31T00:00:20", "2024-05-31T00:00:40"),
        ("*/20 * * * * *", "2024-12-31T23:59:40", "2025-01-01"),
        ("0 0 29 2 *", "2024-03-01", "2028-02-29"),
        ("0 0 29 2 *", "2096-03-01", "2104-02-29"),  # 2100 has none
        ("0 0 * 2 mon#5", "2072-03-01", "2112-02-29"),  # the longest wait there is
        ("0 0 31 * *", "2024-01-31", "2024-03-31"),
        ("@hourly", "2024-05-31T09:00", "2024-05-31T10:00"),
        ("@daily", "2024-05-31T09:00", "2024-06-01"),
        ("@Midnight", "2024-05-31T09:00", "2024-06-01"),
        ("@weekly", "2024-05-31T09:00", "2024-06-02"),
        ("@monthly", "2024-05-31T09:00", "2024-06-01"),
        ("@yearly", "2024-05-31T09:00", "2025-01-01"),
        (" @annually ", "2024-05-31T09:00", "2025-01-01"),
        ("0 0 1 1 *", "1969-06-01", "1970-01-01"),
    ],
)
def test_expressions_mean_what_cron_users_expect(expression: str, after: str, expected: str) -> None:
    assert cron(expression).next_after(at(after)) == at(expected)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("*", list(range(60))),
        ("7", [7]),
        ("30,5,30", [5, 30]),
        ("10-13", [10, 11, 12, 13]),
        ("*/25", [0, 25, 50]),
        ("10-40/10", [10, 20, 30, 40]),
        ("5/15", [5, 20, 35, 50]),
        ("58-2", [0, 1, 2, 58, 59]),
        ("50-10/10", [0, 10, 50]),
        ("45-14/15", [0, 45]),
        ("1-3,*/20", [0, 1, 2, 3, 20, 40]),
        ("07", [7]),
        ("4-4", [4]),
    ],
)
def test_the_parts_of_a_field(text: str, minutes: list[int]) -> None:
    assert parse(f"{text} * * * *").minutes == minutes
    assert parse(f"{text} * * * * *").seconds == minutes


def test_ranges_go_around_the_end_of_every_field() -> None:
    found = parse("0 22-2 * nov-feb *")
    assert (found.hours, found.months) == ([0, 1, 2, 22, 23], [1, 2, 11, 12])
    assert parse("0 22-4/3 * 9-3/3 *")[2:4] == ([1, 4, 22], [3, 9, 12])


# An independent calculation of days: straight from the words of the docstring, by a date's own weekday and neighbours.

SUNDAY_TO_SATURDAY = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]


def weekday(date: dt.date) -> str:
    return SUNDAY_TO_SATURDAY[date.isoweekday() % 7]


def days_left(date: dt.date) -> int:
    return calendar.monthrange(date.year, date.month)[1] - date.day


def nearest_workday(date: dt.date, wanted: int) -> bool:
    """Whether `date` is the workday nearest to day `wanted` of its month; an earlier one is nearer than a later."""
    if wanted > date.day + days_left(date):
        return False
    month = [date.replace(day=day) for day in range(1, date.day + days_left(date) + 1)]
    workdays = [day for day in month if weekday(day) not in ("sat", "sun")]
    saturday = weekday(date.replace(day=wanted)) == "sat"
    order = sorted(workdays, key=lambda day: (abs(day.day - wanted), day.day if saturday else -day.day))
    return order[0] == date


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ("L * *", lambda date: days_left(date) == 0),
        ("L-3 * ?", lambda date: days_left(date) == 3),
        ("L-30 * *", lambda date: days_left(date) == 30),
        ("l,15 * *", lambda date: days_left(date) == 0 or date.day == 15),
        ("15W * *", lambda date: nearest_workday(date, 15)),
        ("1W * *", lambda date: nearest_workday(date, 1)),
        ("31w * *", lambda date: nearest_workday(date, 31)),
        ("LW * *", lambda date: nearest_workday(date, date.day + days_left(date))),
        ("28-3 * *", lambda date: date.day >= 28 or date.day <= 3),
        ("*/10 * *", lambda date: date.day in (1, 11, 21, 31)),
        ("20/5 * *", lambda date: date.day in (20, 25, 30)),
        ("* feb *", lambda date: date.month == 2),
        ("* * 0", lambda date: weekday(date) == "sun"),
        ("* * 7", lambda date: weekday(date) == "sun"),
        ("* * 5-7", lambda date: weekday(date) in ("fri", "sat", "sun")),
        ("* * 7-2", lambda date: weekday(date) in ("sun", "mon", "tue")),
        ("* * 0-7", lambda date: True),
        ("* * mon-sun", lambda date: True),
        ("* * fri-mon", lambda date: weekday(date) in ("fri", "sat", "sun", "mon")),
        ("* * fri-tue/2", lambda date: weekday(date) in ("fri", "sun", "tue")),
        ("* * mon/3", lambda date: weekday(date) in ("mon", "thu", "sun")),
        ("* * 0/3", lambda date: weekday(date) in ("sun", "wed", "sat")),
        ("* * 7/3", lambda date: weekday(date) == "sun"),
        ("* * 5L", lambda date: weekday(date) == "fri" and days_left(date) < 7),
        ("* * SUNl", lambda date: weekday(date) == "sun" and days_left(date) < 7),
        ("* * fri#2", lambda date: weekday(date) == "fri" and 8 <= date.day <= 14),
        ("* * 7#5", lambda date: weekday(date) == "sun" and date.day >= 29),
        ("* * mon#1,tue#3", lambda date: (weekday(date), (date.day + 6) // 7) in (("mon", 1), ("tue", 3))),
        ("13 * fri", lambda date: date.day == 13 or weekday(date) == "fri"),
        ("L * friL", lambda date: days_left(date) == 0 or (weekday(date) == "fri" and days_left(date) < 7)),
        ("*/2 * fri", lambda date: date.day % 2 == 1 and weekday(date) == "fri"),
        ("13 * */2", lambda date: date.day == 13 and weekday(date) in ("sun", "tue", "thu", "sat")),
        ("1-7 6,dec mon", lambda date: date.month in (6, 12) and (date.day <= 7 or weekday(date) == "mon")),
    ],
)
def test_days_are_those_of_an_independent_calculation(fields: str, fits: Callable[[dt.date], bool]) -> None:
    first = dt.date(2019, 12, 31)
    dates = [first + dt.timedelta(days=n) for n in range(1, 13 * 366)]
    expected = [dt.datetime.combine(date, dt.time(), dt.UTC).timestamp() for date in dates if fits(date)]
    assert expected
    assert list(cron(f"0 0 {fields}").ticks(at(first.isoformat()), at(dates[-1].isoformat()))) == expected


some_values = st.lists(st.integers(0, 59), min_size=1, max_size=5, unique=True)


@settings(max_examples=200, deadline=None)
@given(seconds=some_values, minutes=some_values, after=st.integers(0, 4_000_000_000))
def test_within_an_hour_no_time_is_missed_and_none_invented(seconds: list[int], minutes: list[int], after: int) -> None:
    text = f"{','.join(map(str, seconds))} {','.join(map(str, minutes))} * * * *"
    expected = [t for t in range(after + 1, after + 3601) if t % 60 in seconds and t // 60 % 60 in minutes]
    assert list(cron(text).ticks(after, after + 3600)) == expected


def test_a_tick_is_strictly_later_even_by_a_fraction_of_a_second() -> None:
    schedule, nine = cron("* * * * *"), at("2024-05-31T09:00")
    assert schedule.next_after(nine) == nine + 60
    assert schedule.next_after(nine - 0.25) == nine
    assert schedule.next_after(nine + 0.25) == nine + 60


def test_white_space_does_not_make_another_schedule() -> None:
    assert cron("  0 9\t* *  * ") == cron("0 9 * * *") == Cron("0 9 * * *", "UTC")


def test_the_end_of_time_is_no_error() -> None:
    assert cron("0 0 29 2 *").next_after(2.499e11) is not None
    assert parse("0 0 1 1 *").after(dt.datetime(9999, 6, 1)) is None
    assert parse("0 0 29 2 *").after(dt.datetime(9996, 3, 1)) is None


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("* * * *", r"'\* \* \* \*' has 4 field\(s\).*minute hour day-of-month.*six, with seconds first"),
        ("", r"0 field\(s\)"),
        ("0 0 0 1 1 * 2024", r"7 field\(s\)"),
        ("@reboot", "'@reboot'.*@yearly.*@hourly"),
        ("@", "'@'"),
        ("61 * * * *", "'61 .*': in the minute field '61', '61' is out of range. Allowed are 0-59"),
        ("1,61 * * * *", "minute field '1,61', '61'"),
        ("61 * * * * *", "second field '61'"),
        ("-1 * * * *", "minute field '-1', something is missing"),
        ("1,,2 * * * *", "minute field '1,,2', something is missing"),
        (", * * * *", "minute field ',', something is missing"),
        ("5- * * * *", "minute field '5-', something is missing"),
        ("/5 * * * *", "minute field '/5', something is missing"),
        ("1-2-3 * * * *", "minute field '1-2-3', '2-3' is not known"),
        ("*-5 * * * *", r"minute field '\*-5', '\*' is not known"),
        ("** * * * *", r"'\*\*' is not known"),
        ("5/ * * * *", "step of '5/' is not 1 to 59"),
        ("5/2/2 * * * *", "step of '5/2/2'"),
        ("*/x * * * *", r"step of '\*/x'"),
        ("*/0 * * * *", r"step of '\*/0' is not 1 to 59"),
        ("*/-5 * * * *", r"step of '\*/-5'"),
        ("*/60 * * * *", r"step of '\*/60' is not 1 to 59.*every\(\)"),
        ("0 */24 * * *", r"hour field '\*/24', the step of '\*/24' is not 1 to 23"),
        ("? * * * *", "minute field .*'?' is not known"),
        ("L * * * *", "minute field"),
        ("0 24 * * *", "hour field '24', '24' is out of range. Allowed are 0-23"),
        ("0 mon * * *", "hour field 'mon', 'mon' is not known"),
        ("0 0 32 * *", "day-of-month field '32'"),
        ("0 0 0 * *", "day-of-month field '0', '0' is out of range"),
        ("0 0 32W * *", "day-of-month field '32W'.*out of range"),
        ("0 0 0W * *", "day-of-month field '0W'.*out of range"),
        ("0 0 L-31 * *", "day-of-month field 'L-31'"),
        ("0 0 L/2 * *", "'L/2', 'L' is not known"),
        ("0 0 W * *", "'W' is not known"),
        ("0 0 fri * *", "day-of-month field 'fri', 'fri' is not known"),
        ("0 0 5#2 * *", "day-of-month field"),
        ("0 0 * 0 *", "month field '0'"),
        ("0 0 * 13 *", "month field '13'.*1-12, jan-dec"),
        ("0 0 * foo *", "month field 'foo', 'foo' is not known"),
        ("0 0 * feb#2 *", "month field 'feb#2'"),
        ("0 0 * * 8", "day-of-week field '8', '8' is out of range.*0 and 7 are Sunday"),
        ("0 0 * * L", "day-of-week field 'L', 'L' is not known"),
        ("0 0 * * mon#0", "day-of-week field 'mon#0'"),
        ("0 0 * * mon#6", "day-of-week field 'mon#6'"),
        ("0 0 * * 8L", "day-of-week field '8L'.*out of range"),
        ("0 0 * * jan", "'jan' is not known"),
        ("٣ * * * *", "'٣' is not known"),
        ("² * * * *", "'²' is not known"),
        pytest.param("9" * 900 + " * * * *", "minute field", id="900 digits"),
        pytest.param("9" * 5000 + " * * * *", "longer than 1000", id="5000 digits"),
        ("0 0 31 2 *", "'0 0 31 2 .*never comes: no date has day-of-month '31', month '2'"),
        ("0 0 30 2 ?", "never comes"),
        ("0 0 31 feb,apr,jun,sep,nov *", "never comes"),
        ("0 0 31W 4 *", "never comes"),
        ("0 0 L-29 2 *", "never comes"),
        ("0 0 */30 2 mon#5", "never comes.*'mon#5'"),
        ("0 0 1 * *,mon#5 extra x", "7 field"),
        (None, "not text"),
        (5, "not text"),
    ],
)
def test_a_wrong_expression_is_refused_and_the_field_named(expression: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message.replace("'?'", r"'\?'")):
        cron(expression)


def test_a_wrong_schedule_is_wrong_usage_and_a_wrong_value() -> None:
    assert issubclass(InvalidSchedule, UsageError)
    assert issubclass(InvalidSchedule, ValueError)


@pytest.mark.parametrize("expression", ["0 0 29 2 *", "0 0 31 2,3 *", "0 0 31 2 mon", "0 0 * 2 mon#5", "0 0 29W 2 *"])
def test_what_is_rare_is_not_refused(expression: str) -> None:
    assert cron(expression).next_after(0.0) is not None


@given(st.text(alphabet="0123456789*/-,L#W? monfrijanfeb@", max_size=25))
@settings(deadline=None, max_examples=500)
def test_any_text_is_either_a_schedule_or_refused(text: str) -> None:
    try:
        schedule = cron(text)
    except InvalidSchedule:
        return
    assert schedule.next_after(0.0) is not None


def test_a_stored_expression_that_cannot_be_read_is_refused_when_asked() -> None:
    for schedule in (Cron("61 * * * *"), Cron("* *"), Cron("* * * * *", "Mars/Base")):
        with pytest.raises(InvalidSchedule):
            schedule.next_after(0.0)


@pytest.mark.parametrize(
    ("zone", "message"),
    [
        ("Europe/Roma", "'Europe/Roma'.*Did you mean 'Europe/Rome'"),
        ("rome", r"Did you mean 'Europe/Rome'\?"),
        ("europe/rome ", r"Did you mean 'Europe/Rome'"),
        ("America/New York", r"Did you mean 'America/New_York'\?"),
        ("Europe", "Unknown time zone 'Europe'"),
        ("../../etc/passwd", "Unknown time zone"),
        ("/etc/localtime", "Unknown time zone"),
        ("a\0b", "Unknown time zone"),
        pytest.param("x" * 5000, "Unknown time zone", id="5000 letters"),
        ("", "Unknown time zone ''"),
        ("localtime", "'localtime' is not the same on every host"),
        (None, "not a name"),
    ],
)
def test_an_unknown_zone_is_refused_with_a_suggestion(zone: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        cron("0 9 * * *", timezone=zone)


@pytest.mark.parametrize(
    "expression", ["* * * * * *", "0 0 29 2 *", "* * * 2 mon#5", "0-59 0-59 1 * * *", "0 0 31W * ?"]
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Rome", "Australia/Lord_Howe"])
def test_an_answer_takes_less_than_20_ms(expression: str, zone: str) -> None:
    """The best of five: what is measured is the work, not what else the machine does."""
    schedule = cron(expression, timezone=zone)

    def took(after: float) -> float:
        begun = time.perf_counter()
        assert schedule.next_after(after) is not None
        return time.perf_counter() - begun

    for day in range(0, 40 * 366, 97):
        assert min(took(1.5e9 + day * 86_400) for _ in range(5)) < 0.02
