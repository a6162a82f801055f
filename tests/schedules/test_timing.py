"""Intervals, instants, and schedules as data."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidSchedule
from holdfast.schedules import Cron, Every, Once, Schedule, cron, every, once

NINE = dt.datetime(2024, 5, 31, 9, tzinfo=dt.UTC)


def test_every_is_aligned_to_the_epoch_unless_anchored() -> None:
    seventeen_past = NINE.timestamp() + 17 * 60
    assert every("1h").next_after(seventeen_past) == NINE.timestamp() + 3600
    anchored = every("90s", anchor=NINE + dt.timedelta(seconds=10))
    assert anchored.next_after(NINE.timestamp() + 10) == NINE.timestamp() + 100


def test_every_begins_at_its_anchor() -> None:
    assert list(every("1h", anchor=1000.0).ticks(0.0, 5000.0)) == [1000.0, 4600.0]
    assert every("1h", anchor=1000.0).next_after(999.999) == 1000.0
    assert every("1h", anchor=1000.0).next_after(1000.0) == 4600.0


@given(seconds=st.floats(1, 1e7), anchor=st.floats(-1e9, 2e9), start=st.floats(-1e9, 4e9))
def test_every_gives_exact_multiples_without_drift_or_repetition(seconds: float, anchor: float, start: float) -> None:
    schedule = every(seconds, anchor=anchor)
    ticks = list(schedule.ticks(start, limit=20))
    assert len(ticks) == 20
    assert all(one < other for one, other in itertools.pairwise([start, *ticks]))
    first = round((ticks[0] - anchor) / seconds)
    assert ticks == [anchor + (first + n) * seconds for n in range(20)]
    assert first == 0 or anchor + (first - 1) * seconds <= start, "none is left out"


@given(seconds=st.floats(1, 1e5), anchor=st.floats(-1e9, 2e9), count=st.integers(1, 10_000))
def test_every_finds_a_tick_from_the_last_moment_before_it(seconds: float, anchor: float, count: int) -> None:
    """There the division of the elapsed time by the interval rounds up, now and then."""
    tick = anchor + count * seconds
    assert every(seconds, anchor=anchor).next_after(math.nextafter(tick, -math.inf)) == tick


def test_once_is_due_once() -> None:
    schedule = once(NINE)
    assert list(schedule.ticks(0.0)) == [NINE.timestamp()]
    assert schedule.next_after(NINE.timestamp()) is None
    assert once(NINE.astimezone(dt.timezone(dt.timedelta(hours=5)))) == once(NINE.timestamp()) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every(0), "at least a second"),
        (lambda: every("999ms"), "at least a second"),
        (lambda: every(-5), "negative"),
        (lambda: every("-5s"), "negative"),
        (lambda: every(math.nan), "not a number"),
        (lambda: every(math.inf), "too long"),
        (lambda: every("5 moons"), "every.'5 moons'.*unknown unit"),
        (lambda: every(True), "not a length of time"),
        (lambda: every(None), "not a length of time"),  # type: ignore[arg-type]
        (lambda: every("1h", anchor=math.nan), "anchor=nan"),
        (lambda: every("1h", anchor=dt.datetime(2024, 5, 31)), "anchor=2024-05-31T00:00:00 has no time zone"),
        (lambda: Every(0.0), "at least a second"),
        (lambda: Every(math.nan), "at least a second"),
        (lambda: Every(60.0, math.inf), "anchor=inf"),
        (lambda: Once(math.nan), "at=nan"),
        (lambda: once(dt.datetime(2024, 5, 31)), "at=2024-05-31T00:00:00 has no time zone"),
        (lambda: once("tomorrow"), "at='tomorrow'"),  # type: ignore[arg-type]
        (lambda: once(True), "at=True"),
        (lambda: once(1.7e12), "seconds since the epoch"),
        (lambda: once(10**400), "at="),
        (lambda: every(1).next_after(math.inf), "at=inf"),
        (lambda: cron("* * * * *").next_after(math.nan), "at=nan"),
    ],
)
def test_what_is_no_interval_or_instant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        make()


@pytest.mark.parametrize("schedule", [cron("*/10 * * * * *"), every(10)])
def test_ticks_include_their_end_but_not_their_beginning_and_heed_the_limit(schedule: Schedule) -> None:
    assert list(schedule.ticks(10.0, 40.0)) == [20.0, 30.0, 40.0]
    assert list(schedule.ticks(10.0, 40.0, limit=2)) == [20.0, 30.0]
    assert list(schedule.ticks(10.0, 40.0, limit=0)) == []
    assert list(schedule.ticks(10.0, 5.0)) == []


@pytest.mark.parametrize("schedule", [cron("0 9 * * *", timezone="Europe/Rome"), every("90s", anchor=5), once(7.0)])
def test_a_schedule_can_be_stored_and_read_back(schedule: Schedule) -> None:
    decoder: msgspec.json.Decoder[Schedule] = msgspec.json.Decoder(Cron | Every | Once)
    assert decoder.decode(msgspec.json.encode(schedule)) == schedule
    assert msgspec.to_builtins(schedule)["kind"] in ("cron", "every", "once")
    assert msgspec.convert(msgspec.to_builtins(schedule), Cron | Every | Once) == schedule


def test_a_stored_interval_that_is_none_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="at least a second"):
        msgspec.json.decode(b'{"kind": "every", "seconds": 0}', type=Every)


def test_a_schedule_tells_itself() -> None:
    assert cron("0 9 * * mon-fri", timezone="Europe/Rome").describe() == (
        "by cron '0 9 * * mon-fri', on the clock of Europe/Rome"
    )
    assert every("90s").describe() == "every 1m30s"
    assert once(NINE).describe() == "once, at 2024-05-31 09:00:00 UTC"
