"""Lengths of time: what people write, and what they are shown."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import SystemClock, format_duration, parse_duration
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        (0, 0.0),
        ("90", 90.0),
        (" 90 ", 90.0),
        (".5", 0.5),
        ("5m", 300.0),
        ("5M", 300.0),
        ("5 min", 300.0),
        ("3 days", 259200.0),
        ("1 Day", 86400.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1 hour, 30 minutes and 5 seconds", 5405.0),
        ("1 HOUR AND 1 minute", 3660.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("2 weeks", 1209600.0),
        ("1w2d", 777600.0),
        (dt.timedelta(minutes=2), 120.0),
    ],
)
def test_lengths_of_time_are_read_as_people_write_them(written: Any, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


def test_the_unit_argument_scales_only_what_has_no_unit() -> None:
    assert parse_duration(2, unit=60.0) == 120.0
    assert parse_duration("2", unit=60.0) == 120.0
    assert parse_duration("2s", unit=60.0) == 2.0
    assert parse_duration(dt.timedelta(seconds=2), unit=60.0) == 2.0


def test_negative_zero_becomes_plain_zero() -> None:
    assert str(parse_duration(-0.0)) == "0.0"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("5 fortnights", "unknown unit 'fortnights'.*ms, s, m"),
        ("1 month", "unknown unit 'month'.*no fixed length.*'M' are minutes"),
        ("2y", "no fixed length"),
        ("1h 30", "'30' has no unit"),
        ("-5m", "negative"),
        ("1h -5m", "negative"),
        ("-5", "negative"),
        (-1, "negative"),
        (-(10**400), "negative"),
        (dt.timedelta(seconds=-1), "negative"),
        (float("nan"), "not a number"),
        (float("inf"), "too long"),
        ("nan", "cannot read 'nan'"),
        ("inf", "cannot read 'inf'"),
        (True, "not a length of time"),
        (None, "not a length of time"),
        (10**400, "too long"),
        pytest.param(10**10000, "thousands of digits is too long", id="unprintable"),
        ("9" * 400, "too long"),
        ("9" * 400 + "w", "too long"),
        (dt.timedelta.max, "too long"),
        ("soon", "cannot read 'soon'"),
        ("m5", "cannot read 'm5'"),
        ("5m,", "missing at its end"),
        ("5m and", "missing at its end"),
        ("5m; 3s", "cannot read '; 3s'"),
    ],
)
def test_what_is_not_a_length_of_time_is_refused_with_the_reason(written: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_duration(written)


@given(st.text(max_size=30))
def test_any_text_is_either_read_or_refused_as_wrong_usage(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except UsageError:
        return
    assert 0 <= seconds <= 1e12


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.0001, "0s"),
        (0.25, "250ms"),
        (1.5, "1.5s"),
        (59.9996, "1m"),
        (90, "1m30s"),
        (90.25, "1m30.25s"),
        (3600, "1h"),
        (259200, "3d"),
        (90061, "1d1h1m1s"),
        (-90, "-1m30s"),
    ],
)
def test_lengths_of_time_are_shown_compactly(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_what_has_no_length_is_not_shown(seconds: float) -> None:
    with pytest.raises(UsageError):
        format_duration(seconds)


@given(st.one_of(st.floats(0, 1e5), st.floats(0, 1e11)))
def test_what_is_shown_reads_back_to_the_millisecond(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=0.000_6)


def test_the_system_clocks_run_forward() -> None:
    clock = SystemClock()
    assert clock.now() > 1_700_000_000
    assert clock.monotonic() <= clock.monotonic()
