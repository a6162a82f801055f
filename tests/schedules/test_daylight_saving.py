"""Cron where clocks change, against an independent calculation: every minute of UTC, shown on the local clock by
zoneinfo, looked at one by one. Nothing here knows how the real thing searches, or reads expressions."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.schedules import Cron, cron

HOUR, DAY = 3600, 86_400
BEGIN, END = (int(dt.datetime(year, 1, 1, tzinfo=dt.UTC).timestamp()) for year in (2018, 2028))
APIA_JUMP = int(dt.datetime(2011, 12, 30, 10, tzinfo=dt.UTC).timestamp())

ZONES = """
UTC Europe/Rome Europe/London Europe/Dublin Europe/Lisbon Europe/Istanbul Europe/Chisinau Europe/Volgograd
Atlantic/Azores America/New_York America/Los_Angeles America/St_Johns America/Havana America/Santiago America/Sao_Paulo
America/Asuncion America/Scoresbysund America/Nuuk America/Mexico_City America/Caracas America/Port-au-Prince
America/Whitehorse Africa/Casablanca Africa/Cairo Africa/Sao_Tome Africa/Juba Asia/Beirut Asia/Gaza Asia/Tehran
Asia/Amman Asia/Kathmandu Asia/Kolkata Asia/Pyongyang Asia/Almaty Asia/Jerusalem Australia/Lord_Howe Australia/Adelaide
Australia/Eucla Pacific/Apia Pacific/Chatham Pacific/Fiji Pacific/Easter Pacific/Norfolk Pacific/Kiritimati
Antarctica/Troll Antarctica/Casey
""".split()  # noqa: SIM905


class Case(NamedTuple):
    """An expression, and what it says in other words: minutes of the day, and which dates."""

    text: str
    minutes: frozenset[int]
    fits: Callable[[dt.date], bool]
    names_hours: bool


def case(text: str, hours: list[int], minutes: list[int], fits: Callable[[dt.date], bool] = lambda _: True) -> Case:
    return Case(text, frozenset(h * 60 + m for h in hours for m in minutes), fits, "*" not in text.split()[1])


ANY = list(range(24))
CASES = [
    case("30 2 * * *", [2], [30]),
    case("0,30 0-3 * * *", [0, 1, 2, 3], [0, 30]),
    case("*/20 1-2 * * *", [1, 2], [0, 20, 40]),
    case("15 23-1 * * sat,sun", [23, 0, 1], [15], lambda date: date.isoweekday() > 5),
    case("0 0 * * *", [0], [0]),
    case("0 3 L * *", [3], [0], lambda date: (date + dt.timedelta(days=1)).day == 1),
    case("10 0 13 * fri", [0], [10], lambda date: date.day == 13 or date.isoweekday() == 5),
    case(
        "5 2 * 3,9-11 sun#2,sunL", [2], [5], lambda date: date.month in (3, 9, 10, 11) and second_or_last_sunday(date)
    ),
    case("0 0-23 * * *", ANY, [0]),
    case("*/15 * * * *", ANY, [0, 15, 30, 45]),
    case("45 * * * sun", ANY, [45], lambda date: date.isoweekday() == 7),
    case("0 */2 * * *", list(range(0, 24, 2)), [0]),
    case("59 */23 * * *", [0, 23], [59]),
]


def second_or_last_sunday(date: dt.date) -> bool:
    week = dt.timedelta(days=7)
    return date.isoweekday() == 7 and (8 <= date.day <= 14 or (date + week).month != date.month)


def by_minute(cases: list[Case]) -> list[list[Case]]:
    return [[case for case in cases if minute in case.minutes] for minute in range(24 * 60)]


def due(cases: list[Case], zone: str, start: int, end: int) -> dict[str, list[float]]:
    """The ticks of each case in (start, end], minute by minute, by the words of the documentation.

    An interval is due when the clock shows a time that fits. Who names hours is due when the clock gets for the first
    time to a time that fits, or past it: it is compared with the latest that the clock has shown so far.
    """
    named, others = (by_minute([case for case in cases if case.names_hours is kind]) for kind in (True, False))
    ticks: dict[str, list[float]] = {case.text: [] for case in cases}
    info, minute, latest = ZoneInfo(zone), dt.timedelta(minutes=1), dt.datetime.max
    for instant in range(start - 30 * HOUR, end + 1, 60):
        wall = reached = dt.datetime.fromtimestamp(instant, info).replace(tzinfo=None, fold=0)
        hits = {case.text for case in others[wall.hour * 60 + wall.minute] if case.fits(wall)}
        while reached > latest:  # just this minute, as a rule; each one in a gap; none the second time round
            hits.update(case.text for case in named[reached.hour * 60 + reached.minute] if case.fits(reached))
            reached -= minute
        latest = wall if latest == dt.datetime.max else max(latest, wall)
        for text in hits if instant > start else ():
            ticks[text].append(float(instant))
    return ticks


def changes(zone: str) -> list[int]:
    """Days on which the zone's offset changes, within the ten years."""
    info = ZoneInfo(zone)
    offsets = [(day, dt.datetime.fromtimestamp(day, info).utcoffset()) for day in range(BEGIN, END, DAY)]
    return [day for (day, before), (_, after) in itertools.pairwise(offsets) if before != after]


def windows(zone: str) -> Iterator[tuple[int, int]]:
    for day in changes(zone):
        yield day - 6 * HOUR, day + 30 * HOUR
    choice = random.Random(zone)
    for _ in range(3):
        start = choice.randrange(BEGIN, END, 60)
        yield start, start + DAY


def check(cases: list[Case], zone: str, start: int, end: int) -> None:
    for text, expected in due(cases, zone, start, end).items():
        assert list(cron(text, timezone=zone).ticks(start, end)) == expected, f"{text} in {zone} from {start}"


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_around_every_change_in_ten_years_no_tick_is_missed_and_none_invented(zone: str) -> None:
    for start, end in windows(zone):
        check(CASES, zone, start, end)


@pytest.mark.torture
@pytest.mark.parametrize("zone", ZONES)
def test_in_every_minute_of_ten_years_no_tick_is_missed_and_none_invented(zone: str) -> None:
    often = ("*/15 * * * *", "0 0-23 * * *")  # a minute more per zone, for what the windows have shown
    check([case for case in CASES if case.text not in often], zone, BEGIN, END)


def test_the_zones_are_many_and_change_in_many_ways() -> None:
    assert len(ZONES) == len(set(ZONES)) >= 40
    assert sum(len(changes(zone)) for zone in ZONES) > 400


def test_a_day_that_never_was() -> None:
    check(CASES, "Pacific/Apia", APIA_JUMP - 30 * HOUR, APIA_JUMP + 30 * HOUR)


# --- Anything, near a change ------------------------------------------------------------------------------------------

CHANGES = [(zone, day) for zone in ZONES for day in changes(zone)] + [("Pacific/Apia", APIA_JUMP - 12 * HOUR)]
numbers = st.lists(st.integers(0, 59), min_size=1, max_size=4, unique=True)
hours = st.lists(st.sampled_from([0, 1, 2, 3, 4, 12, 22, 23]), min_size=1, max_size=4, unique=True)
days = st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True)


def listed(values: list[int] | None) -> str:
    return "*" if values is None else ",".join(map(str, values))


@st.composite
def anything(draw: st.DrawFn) -> Case:
    minutes, weekdays = draw(numbers), draw(st.none() | days)
    named = draw(st.none() | hours)
    text = f"{listed(minutes)} {listed(named)} * * {listed(weekdays)}"
    return case(text, named or ANY, minutes, lambda date: weekdays is None or date.isoweekday() % 7 in weekdays)


@settings(max_examples=100, deadline=None)
@given(expression=anything(), change=st.sampled_from(CHANGES), start=st.integers(-4 * 60, 28 * 60))
def test_the_ticks_of_any_expression_are_those_of_the_definition(
    expression: Case, change: tuple[str, int], start: int
) -> None:
    zone, day = change
    check([expression], zone, day + start * 60, day + start * 60 + 8 * HOUR)


@settings(max_examples=200, deadline=None)
@given(
    expression=anything(),
    change=st.sampled_from(CHANGES),
    start=st.integers(-4 * 60, 28 * 60),
    later=st.floats(0, 8 * HOUR),
)
def test_the_next_tick_does_not_depend_on_where_the_search_began(
    expression: Case, change: tuple[str, int], start: int, later: float
) -> None:
    schedule, after = cron(expression.text, timezone=change[0]), change[1] + start * 60
    ticks = list(schedule.ticks(after, after + 9 * HOUR))
    assert all(one < other for one, other in itertools.pairwise([after, *ticks]))
    expected = next((tick for tick in ticks if tick > after + later), None)
    found = schedule.next_after(after + later)
    assert found is not None
    assert found == expected or (expected is None and found > after + 9 * HOUR)


# --- Examples, to be read ---------------------------------------------------------------------------------------------


def local_ticks(expression: str, zone: str, day: str, hours: int = 24) -> list[str]:
    """In the hours that follow the midnight of `day`, as the local clock shows them."""
    start = dt.datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone)).timestamp()
    ticks = cron(expression, timezone=zone).ticks(start - 1, start + hours * HOUR)
    return [dt.datetime.fromtimestamp(tick, ZoneInfo(zone)).isoformat(timespec="minutes")[5:] for tick in ticks]


@pytest.mark.parametrize(
    ("expression", "zone", "day", "expected"),
    [
        # 02:00 becomes 03:00
        ("30 2 * * *", "Europe/Rome", "2024-03-31", ["03-31T03:00+02:00"]),
        ("0 30 2 * * *", "Europe/Rome", "2024-03-31", ["03-31T03:00+02:00"]),
        ("0 0,30 2,3 * * *", "Europe/Rome", "2024-03-31", ["03-31T03:00+02:00", "03-31T03:30+02:00"]),
        ("*/15 2 * mar sunL", "Europe/Rome", "2024-03-31", ["03-31T03:00+02:00"]),
        # 03:00 becomes 02:00
        ("30 2 * * *", "Europe/Rome", "2024-10-27", ["10-27T02:30+02:00"]),
        ("*/30 2 * * *", "Europe/Rome", "2024-10-27", ["10-27T02:00+02:00", "10-27T02:30+02:00"]),
        ("59 59 2 * * *", "Europe/Rome", "2024-10-27", ["10-27T02:59+02:00"]),
        # midnight becomes 01:00
        ("@daily", "Asia/Beirut", "2024-03-30", ["03-30T00:00+02:00", "03-31T01:00+03:00"]),
        ("0 0 4 11 *", "America/Sao_Paulo", "2018-11-03", ["11-04T01:00-02:00"]),
        # midnight becomes 23:00 of the day before, which has 25 hours
        ("30 23 * * sat", "America/Santiago", "2024-04-06", ["04-06T23:30-03:00"]),
        # 02:00 becomes 01:30, and 02:30
        ("40 1 * * *", "Australia/Lord_Howe", "2024-04-07", ["04-07T01:40+11:00"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2024-10-06", ["10-06T02:30+11:00"]),
        # 30 December never was
        ("0 9 30 12 *", "Pacific/Apia", "2011-12-29", ["12-31T00:00+14:00"]),
    ],
)
def test_an_expression_that_names_hours_loses_nothing_and_repeats_nothing(
    expression: str, zone: str, day: str, expected: list[str]
) -> None:
    until = 24 if zone != "Pacific/Apia" else 60
    assert local_ticks(expression, zone, day, until) == expected


def test_an_interval_keeps_its_real_length() -> None:
    for day in ("2024-03-31", "2024-10-27"):
        start = dt.datetime.fromisoformat(day).replace(tzinfo=ZoneInfo("Europe/Rome")).timestamp()
        for seconds, expression in ((600, "*/10 * * * *"), (3600, "0 * * * *"), (20, "*/20 * * * * *")):
            ticks = list(cron(expression, timezone="Europe/Rome").ticks(start, start + 6 * HOUR))
            assert ticks == [start + seconds * n for n in range(1, 6 * HOUR // seconds + 1)]


def test_an_interval_of_hours_leaves_out_what_is_not_shown_and_has_no_extra_tick() -> None:
    assert local_ticks("0 */2 * * *", "Europe/Rome", "2024-03-31", hours=4) == [
        "03-31T00:00+01:00",
        "03-31T04:00+02:00",
    ]


def test_an_interval_over_a_change_of_half_an_hour_shows_what_the_clock_shows() -> None:
    assert local_ticks("40 * * * *", "Australia/Lord_Howe", "2024-04-07", hours=4) == [
        "04-07T00:40+11:00",
        "04-07T01:40+11:00",
        "04-07T01:40+10:30",
        "04-07T02:40+10:30",
    ]
    assert local_ticks("15 * * * *", "Australia/Lord_Howe", "2024-10-06", hours=4)[:3] == [
        "10-06T00:15+10:30",
        "10-06T01:15+10:30",
        "10-06T03:15+11:00",
    ]


def test_an_interval_comes_again_the_second_time_round_even_if_it_is_then_over_for_a_year() -> None:
    """On Saturday, 6 April 2024, midnight became 23:00 in Santiago; the next is a year away."""
    zone = ZoneInfo("America/Santiago")
    first, again = (dt.datetime(2024, 4, 6, 23, 30, tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
    schedule = Cron("30 */23 */5 4 sat", "America/Santiago")
    following = dt.datetime(2025, 4, 26, 0, 30, tzinfo=zone).timestamp()
    assert list(schedule.ticks(first - 60, limit=3)) == [first, again, following]


def test_asked_within_the_doubled_hour_the_answer_does_not_go_back_in_time() -> None:
    schedule = Cron("30 2 * * *", "Europe/Rome")
    again = dt.datetime(2024, 10, 27, 2, 20, tzinfo=ZoneInfo("Europe/Rome"), fold=1)
    expected = dt.datetime(2024, 10, 28, 2, 30, tzinfo=ZoneInfo("Europe/Rome"))
    assert schedule.next_after(again.timestamp()) == expected.timestamp()
    every_second = Cron("* * 2 * * *", "Europe/Rome")
    assert every_second.next_after(again.timestamp()) == expected.timestamp() - 30 * 60
