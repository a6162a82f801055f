"""Schedules: which instants are due, above all when the local clock is changed.

`oracle` computes the ticks of a window by looking at every instant in it, straight from the definition, with none of
the walking that the real thing does.
"""

from __future__ import annotations

import bisect
import datetime as dt
import itertools
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.lifecycle.schedule import Cron, Every, Once, Schedule, cron, every, next_tick, once, ticks_between

HOUR = 3600
MINUTE = dt.timedelta(minutes=1)

# A zone, and a day shortly before one of its changes: by an hour, by 30 minutes, at midnight, of a whole day, none.
CHANGES = [
    ("Europe/Rome", "2024-03-31"),
    ("Europe/Rome", "2024-10-27"),
    ("America/New_York", "2024-03-10"),
    ("America/New_York", "2024-11-03"),
    ("Europe/Dublin", "2024-10-27"),
    ("Australia/Lord_Howe", "2024-04-07"),  # 02:00 becomes 01:30
    ("Australia/Lord_Howe", "2024-10-06"),  # 02:00 becomes 02:30
    ("America/Santiago", "2024-09-08"),  # midnight becomes 01:00
    ("America/Santiago", "2024-04-07"),  # midnight becomes 23:00
    ("Africa/Cairo", "2024-04-26"),  # midnight becomes 01:00
    ("America/Havana", "2024-11-03"),  # 01:00 becomes midnight
    ("Asia/Kathmandu", "2024-06-01"),  # never changes, +05:45
    ("Pacific/Apia", "2011-12-30"),  # a day that never was
    ("Africa/Casablanca", "2024-03-10"),  # Ramadan
    ("UTC", "2024-02-29"),
]
EXPRESSIONS = [
    "30 2 * * *",
    "0,30 1,2 * * *",
    "0 2,3 * * *",
    "45 0-23 * * *",
    "0 0 * * *",
    "15 0,23 * * *",
    "30 1 * * sun",
    "0 9 L * *",
    "*/10 * * * *",
    "40 * * * *",
    "0 * * * *",
    "*/20 2 * * *",
    "*/15 0 * * *",
    "0 */2 * * *",
    "*/30 1 1-15 * *",
    "* * * * *",
    "0 30 2 * * *",
    "30 15 1 * * *",
    "*/20 30 1 * * *",
    "30 */30 * * * *",
]


def at(text: str, zone: str = "UTC") -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def local(instant: float, zone: str) -> str:
    return dt.datetime.fromtimestamp(instant, ZoneInfo(zone)).isoformat(timespec="minutes")


def local_ticks(schedule: Cron, day: str, hours: int = 24) -> list[str]:
    start = at(day, schedule.timezone)
    return [local(tick, schedule.timezone) for tick in ticks_between(schedule, start - 1, start + hours * HOUR, 500)]


def oracle(schedule: Cron, after: int, until: int) -> list[float]:
    """The ticks in (after, until] by definition: look at the local clock at every instant of the window."""
    fields = schedule.expression.split()
    fixed = not any(field.startswith("*") for field in fields[:-3])
    zone = ZoneInfo(schedule.timezone)
    start = after - 3 * HOUR  # longer than any doubled hour
    instants = range(start, until + 1, 60 if len(fields) == 5 else 10)
    walls = [dt.datetime.fromtimestamp(instant, zone).replace(tzinfo=None) for instant in instants]
    matching = list(
        itertools.takewhile(lambda wall: wall <= max(walls), CronSim(schedule.expression, min(walls) - 2 * MINUTE))
    )
    ticks, latest = [], walls[0]  # the latest that the local clock has shown so far
    for instant, wall in zip(instants, walls, strict=True):
        if fixed:  # due if the clock now gets for the first time to a matching time, or past it
            due = bisect.bisect_right(matching, latest) < bisect.bisect_right(matching, wall)
        else:  # due if the clock shows a matching time
            due = bisect.bisect_left(matching, wall) < bisect.bisect_right(matching, wall)
        latest = max(latest, wall)
        if due and instant > after:
            ticks.append(float(instant))
    return ticks


# --- Cron in general --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 9 * * mon-fri", "2024-05-31T09:00", "2024-06-03T09:00"),
        ("0 9 * * MON-FRI", "2024-05-31T08:59:59", "2024-05-31T09:00"),
        ("*/15 * * * *", "2024-05-31T09:01", "2024-05-31T09:15"),
        ("0 0 1 jan,jul *", "2024-05-31", "2024-07-01"),
        ("0 0 L * *", "2024-02-01", "2024-02-29"),
        ("0 0 LW * *", "2024-03-01", "2024-03-29"),
        ("0 0 * * 5L", "2024-05-01", "2024-05-31"),
        ("0 0 * * mon#2", "2024-05-01", "2024-05-13"),
        ("0 0 29 2 *", "2024-03-01", "2028-02-29"),
        ("0 0 13 * fri", "2024-05-13", "2024-05-17"),
        ("15 30 12 * * *", "2024-05-31", "2024-05-31T12:30:15"),
        ("*/20 * * * * *", "2024-05-31T00:00:20", "2024-05-31T00:00:40"),
    ],
)
def test_cron_expressions_mean_what_cron_users_expect(expression: str, after: str, expected: str) -> None:
    assert next_tick(cron(expression), at(after)) == at(expected)


def test_a_tick_is_strictly_later_even_by_a_fraction_of_a_second() -> None:
    schedule = cron("* * * * *")
    assert next_tick(schedule, at("2024-05-31T09:00")) == at("2024-05-31T09:01")
    assert next_tick(schedule, at("2024-05-31T09:00") - 0.25) == at("2024-05-31T09:00")
    assert next_tick(schedule, at("2024-05-31T09:00") + 0.25) == at("2024-05-31T09:01")


def test_cron_follows_the_clock_of_its_zone() -> None:
    schedule = cron("0 9 * * *", timezone="Asia/Tokyo")
    assert next_tick(schedule, at("2024-05-31")) == at("2024-06-01")
    assert schedule == Cron("0 9 * * *", "Asia/Tokyo")


def test_white_space_does_not_make_another_schedule() -> None:
    assert cron("  0 9\t* *  * ") == cron("0 9 * * *")


def test_a_rare_date_is_found_across_decades() -> None:
    assert next_tick(cron("0 0 * 2 mon#5"), at("2072-03-01")) == at("2112-02-29")


def test_a_stored_expression_that_never_comes_has_no_next_tick() -> None:
    for expression in ("0 0 */31 2 mon#5", "* 0 */31 2 mon#5"):
        assert next_tick(Cron(expression, "Europe/Rome"), at("2024-01-01")) is None


# --- Cron and changes of the local clock ------------------------------------------------------------------------------


def test_a_fixed_time_job_in_a_skipped_hour_runs_once_at_the_jump() -> None:
    assert local_ticks(cron("30 2 * * *", timezone="Europe/Rome"), "2024-03-31") == ["2024-03-31T03:00+02:00"]


def test_several_fixed_times_in_and_at_the_end_of_a_gap_give_one_tick() -> None:
    schedule = cron("0,30 2,3 * * *", timezone="Europe/Rome")
    assert local_ticks(schedule, "2024-03-31") == ["2024-03-31T03:00+02:00", "2024-03-31T03:30+02:00"]


def test_a_fixed_time_job_in_a_doubled_hour_runs_once_the_first_time() -> None:
    assert local_ticks(cron("30 2 * * *", timezone="Europe/Rome"), "2024-10-27") == ["2024-10-27T02:30+02:00"]


def test_a_fixed_time_job_asked_for_inside_the_doubled_hour_does_not_go_back_in_time() -> None:
    schedule = cron("30 2 * * *", timezone="Europe/Rome")
    second_time_round = at("2024-10-27T02:30", "Europe/Rome") + HOUR - 10 * 60
    assert local(second_time_round, "Europe/Rome") == "2024-10-27T02:20+01:00"
    assert next_tick(schedule, second_time_round) == at("2024-10-28T02:30", "Europe/Rome")


def test_an_interval_job_leaves_out_what_does_not_exist() -> None:
    schedule = cron("*/30 * * * *", timezone="Europe/Rome")
    assert local_ticks(schedule, "2024-03-31", hours=3)[2:6] == [
        "2024-03-31T01:00+01:00",
        "2024-03-31T01:30+01:00",
        "2024-03-31T03:00+02:00",
        "2024-03-31T03:30+02:00",
    ]
    assert local_ticks(cron("*/30 2 * * *", timezone="Europe/Rome"), "2024-03-31", hours=20) == []


def test_an_interval_job_runs_both_times_round() -> None:
    assert local_ticks(cron("*/30 2 * * *", timezone="Europe/Rome"), "2024-10-27", hours=20) == [
        "2024-10-27T02:00+02:00",
        "2024-10-27T02:30+02:00",
        "2024-10-27T02:00+01:00",
        "2024-10-27T02:30+01:00",
    ]


def test_an_interval_job_keeps_its_real_interval_over_a_change_of_whole_hours() -> None:
    for day in ("2024-03-31", "2024-10-27"):
        start = at(day, "Europe/Rome")
        ticks = ticks_between(cron("*/10 * * * *", timezone="Europe/Rome"), start, start + 6 * HOUR, 100)
        assert ticks == [start + 600 * n for n in range(1, 37)]


def test_a_change_of_half_an_hour_loses_nothing_and_repeats_half_an_hour() -> None:
    assert local_ticks(cron("40 * * * *", timezone="Australia/Lord_Howe"), "2024-04-07", hours=4) == [
        "2024-04-07T00:40+11:00",
        "2024-04-07T01:40+11:00",
        "2024-04-07T01:40+10:30",
        "2024-04-07T02:40+10:30",
    ]
    assert local_ticks(cron("*/10 2 * * *", timezone="Australia/Lord_Howe"), "2024-04-07")[0] == (
        "2024-04-07T02:00+10:30"
    )
    assert local_ticks(cron("*/10 3 * * *", timezone="Australia/Lord_Howe"), "2024-10-06")[0] == (
        "2024-10-06T03:00+11:00"
    )


def test_an_interval_job_confined_to_a_skipped_midnight_hour_does_not_run_that_day() -> None:
    schedule = cron("*/15 0 8 9 *", timezone="America/Santiago")  # on 8 September 2024 midnight became 01:00
    found = next_tick(schedule, at("2024-09-05", "America/Santiago"))
    assert found == at("2025-09-08", "America/Santiago")


def test_a_day_that_never_was_gives_its_job_at_the_jump() -> None:
    schedule = cron("0 9 * * *", timezone="Pacific/Apia")
    assert local_ticks(schedule, "2011-12-29", hours=48) == [
        "2011-12-29T09:00-10:00",
        "2011-12-31T00:00+14:00",
        "2011-12-31T09:00+14:00",
    ]


def test_a_seconds_field_does_not_change_what_a_fixed_time_means() -> None:
    for day in ("2024-03-31", "2024-10-27"):
        five, six = (cron(text, timezone="Europe/Rome") for text in ("30 2 * * *", "0 30 2 * * *"))
        assert local_ticks(five, day) == local_ticks(six, day)


schedules_near_a_change = st.builds(
    lambda expression, change, offset: (cron(expression, timezone=change[0]), int(at(*change[::-1])) + offset * 60),
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(CHANGES),
    st.integers(-3 * 60, 5 * 60),
)


@settings(max_examples=200, deadline=None)
@given(schedules_near_a_change)
def test_ticks_are_those_of_the_definition(case: tuple[Cron, int]) -> None:
    schedule, after = case
    until = after + 5 * HOUR
    assert ticks_between(schedule, after, until, 10_000) == oracle(schedule, after, until)


@settings(max_examples=300, deadline=None)
@given(case=schedules_near_a_change, earlier=st.integers(0, 4 * HOUR), fraction=st.sampled_from([0.0, 0.5]))
def test_the_next_tick_does_not_depend_on_where_the_search_began(
    case: tuple[Cron, int], earlier: int, fraction: float
) -> None:
    schedule, middle = case
    after = middle + fraction
    ticks = ticks_between(schedule, after - earlier, after + 3 * HOUR, 10_000)
    assert ticks == sorted(set(ticks)), "strictly increasing"
    assert all(tick > after - earlier for tick in ticks)
    later = [tick for tick in ticks if tick > after]
    found = next_tick(schedule, after)
    assert found is not None
    assert found == later[0] if later else found > after + 3 * HOUR
    for tick, following in itertools.pairwise(ticks):
        assert next_tick(schedule, (tick + following) / 2) == following
        assert next_tick(schedule, following - 1) == following


@settings(max_examples=100, deadline=None)
@given(
    expression=st.sampled_from([text for text in EXPRESSIONS if len(text.split()) == 5]),
    zone=st.sampled_from(["Europe/Rome", "America/New_York", "Asia/Kathmandu", "UTC"]),
    day=st.dates(dt.date(2000, 1, 1), dt.date(2037, 1, 1)),
)
def test_where_cronsim_can_be_trusted_it_agrees(expression: str, zone: str, day: dt.date) -> None:
    noon = dt.datetime.combine(day, dt.time(12), tzinfo=ZoneInfo(zone))
    theirs = CronSim(expression, noon)
    expected = [next(theirs).timestamp() for _ in range(60)]
    assert ticks_between(cron(expression, timezone=zone), noon.timestamp(), expected[-1], 1000) == expected


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("* * * *", r"4 field\(s\).*minute hour day-of-month month day-of-week.*six, with seconds first"),
        ("", r"0 field\(s\)"),
        ("@daily", r"1 field\(s\)"),
        ("0 0 0 1 1 * 2024", r"7 field\(s\)"),
        ("61 * * * *", "minute field '61'.*0-59"),
        ("1,61 * * * *", "minute field '1,61': '61'"),
        ("1,,2 * * * *", "minute field '1,,2': ''"),
        ("61 * * * * *", "second field '61'"),
        ("0 24 * * *", "hour field '24'.*0-23"),
        ("0 0 32 * *", "day-of-month field '32'"),
        ("0 0 0 * *", "day-of-month field '0'"),
        ("0 0 * foo *", "month field 'foo'.*JAN-DEC"),
        ("0 0 * * 8", "day-of-week field '8'"),
        ("0 0 * * fri-mon", "day-of-week field 'fri-mon'.*cannot wrap"),
        ("0 0 * * mon#6", "day-of-week field 'mon#6'"),
        ("*/0 * * * *", r"minute field '\*/0'"),
        ("*/90 * * * *", "step 90.*longer than the field.*every"),
        ("0 0 L/2 * *", "step cannot follow 'L'"),
        ("9" * 5000 + " * * * *", "minute field"),
        ("0 0 31 2 *", "never comes.*day-of-month '31', month '2'"),
        ("0 0 31 feb,apr *", "never comes"),
        ("0 0 */31 2 mon#5", "never comes.*'mon#5'"),
        (None, "not text"),
    ],
)
def test_a_wrong_cron_expression_is_refused_and_the_field_named(expression: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cron(expression)


@pytest.mark.parametrize(
    ("zone", "message"),
    [
        ("Europe/Roma", "'Europe/Roma'.*Did you mean 'Europe/Rome'"),
        ("rome", r"Did you mean 'Europe/Rome'\?"),
        ("europe/rome", r"Did you mean 'Europe/Rome'\?"),
        ("America/New York", r"Did you mean 'America/New_York'\?"),
        ("Europe", "Unknown time zone 'Europe'"),
        ("../../etc/passwd", "Unknown time zone"),
        ("", "Unknown time zone ''"),
        ("localtime", "'localtime' is not the same on every host"),
        (None, "not a name"),
    ],
)
def test_an_unknown_zone_is_refused_with_a_suggestion(zone: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cron("0 9 * * *", timezone=zone)


@given(st.text(alphabet="0123456789*/-,L#W monfri", max_size=25))
@settings(deadline=None)
def test_any_text_is_either_a_schedule_or_wrong_usage(text: str) -> None:
    try:
        schedule = cron(text)
    except UsageError:
        return
    assert next_tick(schedule, 0.0) is not None


def test_a_stored_expression_that_cannot_be_read_is_wrong_usage_too() -> None:
    for expression in ("61 * * * *", "* *", "9" * 5000 + " * * * *"):
        with pytest.raises(UsageError, match="is wrong"):
            next_tick(Cron(expression), 0.0)


# --- Every and once ---------------------------------------------------------------------------------------------------


def test_every_is_aligned_to_the_epoch_unless_anchored() -> None:
    assert next_tick(every("1h"), at("2024-05-31T09:17")) == at("2024-05-31T10:00")
    anchored = every("90s", anchor=dt.datetime(2024, 5, 31, 9, 0, 10, tzinfo=dt.UTC))
    assert next_tick(anchored, at("2024-05-31T09:00:10")) == at("2024-05-31T09:01:40")


def test_every_begins_at_its_anchor() -> None:
    assert ticks_between(every("1h", anchor=1000.0), 0.0, 5000.0, 10) == [1000.0, 4600.0]


@given(
    seconds=st.floats(0.001, 1e7),
    anchor=st.floats(0, 2e9),
    start=st.floats(0, 4e9),
)
def test_every_gives_exact_multiples_without_drift_or_repetition(seconds: float, anchor: float, start: float) -> None:
    schedule = every(seconds, anchor=anchor)
    ticks = ticks_between(schedule, start, float("inf"), 20)
    assert len(ticks) == len(set(ticks)) == 20
    assert ticks == sorted(ticks)
    assert ticks[0] > start
    first = round((ticks[0] - anchor) / seconds)
    assert ticks == [anchor + (first + n) * seconds for n in range(20)]
    assert first == 0 or anchor + (first - 1) * seconds <= start, "none is left out"


def test_once_is_due_once() -> None:
    schedule = once(dt.datetime(2024, 5, 31, 9, tzinfo=dt.UTC))
    assert ticks_between(schedule, 0.0, float("inf"), 10) == [at("2024-05-31T09:00")]
    assert next_tick(schedule, at("2024-05-31T09:00")) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every(0), "at least a millisecond"),
        (lambda: every("0.1ms"), "at least a millisecond"),
        (lambda: every("5 moons"), "unknown unit"),
        (lambda: every("1h", anchor=float("nan")), "anchor=nan"),
        (lambda: once(dt.datetime(2024, 5, 31)), "no time zone"),
        (lambda: once("tomorrow"), "at='tomorrow'"),  # type: ignore[arg-type]
        (lambda: once(True), "at=True"),
        (lambda: once(1.7e12), "seconds since the epoch"),
        (lambda: next_tick(every(1), float("inf")), "after=inf"),
    ],
)
def test_what_is_no_interval_or_instant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_ticks_between_includes_its_end_but_not_its_beginning_and_heeds_the_limit() -> None:
    assert ticks_between(every(10), 10.0, 40.0, 100) == [20.0, 30.0, 40.0]
    assert ticks_between(every(10), 10.0, 40.0, 2) == [20.0, 30.0]
    assert ticks_between(every(10), 10.0, 40.0, 0) == []
    assert ticks_between(every(10), 10.0, 5.0, 100) == []


@pytest.mark.parametrize("schedule", [cron("0 9 * * *", timezone="Europe/Rome"), every("90s", anchor=5), once(7.0)])
def test_a_schedule_can_be_stored_and_read_back(schedule: Schedule) -> None:
    decoder: msgspec.json.Decoder[Schedule] = msgspec.json.Decoder(Cron | Every | Once)
    assert decoder.decode(msgspec.json.encode(schedule)) == schedule
