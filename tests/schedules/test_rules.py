"""Which ticks fire, by the schedule and the time alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.model.records import Entry
from holdfast.schedules import Cron, Every, Once
from holdfast.schedules.records import CatchUp, Pause, Progress, Rules, ScheduleRecord, StoredCall, from_entry, to_entry
from holdfast.schedules.rules import ON_TIME_SECONDS, due, due_at, invocation_id, moved, tick_after

START = 1_700_000_000.0 - 1_700_000_000 % 3600


TEN_SECONDS = Every(10.0)


def schedule(timing: Any = TEN_SECONDS, through: float = START, **fields: Any) -> ScheduleRecord:
    rules = fields.pop("rules", Rules())
    given: dict[str, Any] = {
        "app": "shop",
        "name": "nightly",
        "uid": "u1",
        "call": StoredCall(task="shop:clean", arguments=b"\x90"),
        "through": through,
        "next_at": tick_after(timing, rules, through),
    }
    return ScheduleRecord(timing=timing, rules=rules, **given | fields)


def test_what_is_not_due_does_not_fire() -> None:
    assert due(schedule(), START + 9.9).ticks == ()
    assert due(schedule(), START + 10).ticks == (START + 10,)


def test_a_new_schedule_does_not_fire_what_is_past() -> None:
    """A 1 January cron that is registered in November stays silent."""
    yearly = schedule(Cron("0 0 1 1 *"))
    assert due(yearly, START + 3600).ticks == ()
    assert yearly.next_at is not None
    assert yearly.next_at > START


@pytest.mark.parametrize(
    ("catch_up", "fires", "missed"),
    [(CatchUp.NONE, 6, 354), (CatchUp.LAST, 6, 354), (CatchUp.ALL, 360, 0)],
)
def test_after_an_hour_without_a_runner(catch_up: CatchUp, fires: int, missed: int) -> None:
    found = due(schedule(rules=Rules(catch_up=catch_up, catch_up_most=1000)), START + 3600)
    assert len(found.ticks) == fires
    assert found.ticks[-1] == START + 3600
    assert found.missed == missed or found.more


@pytest.mark.parametrize(("catch_up", "fires"), [(CatchUp.NONE, 0), (CatchUp.LAST, 1), (CatchUp.ALL, 3)])
def test_ticks_that_were_missed_by_far(catch_up: CatchUp, fires: int) -> None:
    hourly = schedule(Cron("0 * * * *"), rules=Rules(catch_up=catch_up))
    found = due(hourly, START + 3 * 3600 + 1800)
    assert len(found.ticks) == fires
    assert (len(found.ticks) + found.missed, found.more) == (3, False)
    if fires:
        assert found.ticks[-1] == START + 3 * 3600


def test_of_too_many_the_last_are_caught_up() -> None:
    """Seven that were missed, and the six of the last minute, which were not."""
    found = due(schedule(rules=Rules(catch_up=CatchUp.ALL, catch_up_most=7)), START + 3600)
    assert found.ticks == tuple(START + 3600 - 10 * n for n in range(12, -1, -1))
    assert found.missed > 0
    assert found.missed == 360 - 13 or found.more


def test_what_is_on_time_fires_whatever_the_most_is() -> None:
    found = due(schedule(Every(1.0), rules=Rules(catch_up=CatchUp.ALL, catch_up_most=1)), START + 3.5)
    assert (found.ticks, found.missed, found.more) == ((START + 1, START + 2, START + 3), 0, False)


def test_a_year_of_seconds_costs_no_more_than_a_minute() -> None:
    found = due(schedule(Every(1.0)), START + 366 * 86400)
    assert len(found.ticks) == ON_TIME_SECONDS
    assert found.more


def test_start_and_end_are_ticks_too() -> None:
    rules = Rules(starts_at=START + 20, ends_at=START + 40, catch_up=CatchUp.ALL)
    record = schedule(rules=rules)
    assert record.next_at == START + 20
    assert due(record, START + 100).ticks == (START + 20, START + 30, START + 40)
    assert moved(record, START + 100, through=START + 100).next_at is None


def test_a_pause_rests_and_what_it_had_passed_is_not_caught_up() -> None:
    paused = moved(schedule(), START + 5, pause=Pause(at=START + 5))
    assert paused.next_at is None
    assert due(paused, START + 3600).ticks == ()
    resumed = moved(paused, START + 3600, pause=None, through=START + 3600)
    assert resumed.next_at == START + 3610


def test_through_never_goes_back() -> None:
    record = schedule(through=START + 100)
    assert moved(record, START, through=START).through == START + 100
    slower = moved(record, START, timing=Every(3600.0))
    assert slower.next_at == START + 3600


def test_an_id_follows_from_schedule_and_tick() -> None:
    record = schedule()
    assert invocation_id(record, START) == invocation_id(replace(record, name="x", version=7), START)
    assert invocation_id(record, START) != invocation_id(record, START + 10)
    assert invocation_id(record, START) != invocation_id(replace(record, uid="u2"), START)
    assert invocation_id(record, int(START)) == invocation_id(record, START)


def test_jitter_is_the_same_for_all_and_within_its_bounds() -> None:
    record = schedule(rules=Rules(jitter_seconds=5))
    delays = [due_at(record, START + n) - START - n for n in range(200)]
    assert delays == [due_at(record, START + n) - START - n for n in range(200)]
    assert all(0 <= delay <= 5 for delay in delays)
    assert len({round(delay, 6) for delay in delays}) > 190
    assert due_at(schedule(), START) == START


TIMINGS = st.one_of(
    st.floats(1, 5000).map(lambda seconds: Every(seconds)),
    st.sampled_from(["*/7 * * * *", "0 3 * * *", "30 2 * * sun", "*/10 * * * * *"]).map(
        lambda text: Cron(text, "Europe/Rome")
    ),
    st.floats(START, START + 1e6).map(Once),
)


@given(TIMINGS, st.lists(st.floats(0, 8_000), min_size=1, max_size=8))
def test_with_all_ticks_caught_up_each_fires_once(timing: Any, waits: list[float]) -> None:
    record = schedule(timing, rules=Rules(catch_up=CatchUp.ALL, catch_up_most=100_000))
    now, fired = START, list[float]()
    for wait in waits:
        now += wait
        fired += due(record, now).ticks
        record = moved(record, now, through=now)
    assert fired == list(timing.ticks(START, now))


@given(TIMINGS, st.floats(0, 1e6), st.sampled_from(CatchUp))
def test_what_fires_are_ticks_and_the_last_ones(timing: Any, wait: float, catch_up: CatchUp) -> None:
    found = due(schedule(timing, rules=Rules(catch_up=catch_up, catch_up_most=5)), START + wait)
    there = list(timing.ticks(START, START + wait, limit=2_000_000)) if wait < 1e5 else None
    if there is not None:
        assert list(found.ticks) == there[len(there) - len(found.ticks) :]
        if catch_up is CatchUp.LAST and there:
            assert found.ticks


def test_a_schedule_is_stored_whole() -> None:
    record = schedule(
        Cron("0 9 * * mon-fri", "Europe/Rome"),
        rules=Rules(jitter_seconds=3, ends_at=START + 1e6),
        progress=Progress(last_tick=START, last_id="x", queued=(START, START + 0.1)),
        pause=Pause(at=START, by="ann", why="ß"),
    )
    assert from_entry(to_entry(record)) == record


@pytest.mark.parametrize("body", [b"", b"{}", b'{"app": 1}'])
def test_what_cannot_be_read_says_so(body: bytes) -> None:
    with pytest.raises(CorruptRecord, match="the schedule 'nightly' cannot be read"):
        from_entry(Entry(app="shop", kind="schedule", name="nightly", body=body))
