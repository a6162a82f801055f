"""Happenings that wait for each other: each is used once, in order, and forgotten in time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.model.records import Source
from holdfast.schedules.records import StoredCall
from holdfast.triggers import joins
from holdfast.triggers.joins import MAX_WAITING, Happened, Join, added, fresh, name_of, tidied
from holdfast.triggers.rules import DATA, Facts, OnEvent, TriggerRecord

NOW = 1_800_000_000.0
TRIGGER = TriggerRecord(
    app="app",
    name="t",
    clauses=(((OnEvent(name="a", correlate="id"),), (OnEvent(name="b", correlate="order.id"),)),),
    call=StoredCall(task="t", arguments=b""),
    within_seconds=60.0,
)
EMPTY = fresh(TRIGGER, 0, "name")


def one(id: str, at: float = NOW) -> Happened:
    return Happened(source=Source(kind="event", id=id), at=at, picked=DATA.encode({}))


def put(join: Join, id: str, member: int, at: float = NOW) -> Join:
    return added(join, one(id, at), [member], TRIGGER.within_seconds, at)


def ids(join: Join) -> list[list[str]]:
    return [[each.source.id for each in firing] for firing in join.firings]


def event(name: str, payload: Any) -> Facts:
    return Facts(source=Source(kind="event", id="e", name=name), at=NOW, payload=payload)


def test_one_for_each_member_is_a_firing() -> None:
    join = put(put(put(put(EMPTY, "a1", 0), "a2", 0), "b1", 1), "b2", 1)
    assert ids(join) == [["a1", "b1"], ["a2", "b2"]]
    assert join.members == ((), ())


def test_what_was_told_before_is_not_taken_again() -> None:
    waiting = put(EMPTY, "a1", 0)
    assert put(waiting, "a1", 0) == waiting
    fired = put(waiting, "b1", 1)
    assert put(fired, "a1", 0) == fired
    done = replace(fired, firings=())
    assert put(put(done, "a1", 0), "b1", 1) == done


def test_what_nobody_came_for_in_time_is_dropped() -> None:
    join = put(put(EMPTY, "a1", 0), "b1", 1, NOW + 61)
    assert ids(join) == []
    assert [[each.source.id for each in group] for group in join.members] == [[], ["b1"]]
    assert tidied(join, 60.0, NOW + 200).is_empty


def test_what_was_used_is_forgotten_after_an_hour_and_the_record_is_empty() -> None:
    join = replace(put(put(EMPTY, "a1", 0), "b1", 1), firings=())
    assert not tidied(join, 60.0, NOW + 3000).is_empty
    assert tidied(join, 60.0, NOW + 3601).is_empty


def test_so_many_wait_and_no_more() -> None:
    join = EMPTY
    for number in range(MAX_WAITING + 5):
        join = put(join, f"a{number}", 0)
    assert (len(join.members[0]), join.members[0][0].source.id, join.dropped) == (MAX_WAITING, "a5", 5)


def test_what_has_the_same_value_in_common_meets() -> None:
    assert name_of(TRIGGER, 0, event("a", {"id": 7})) == name_of(TRIGGER, 0, event("b", {"order": {"id": 7}}))
    assert name_of(TRIGGER, 0, event("a", {"id": 7})) != name_of(TRIGGER, 0, event("a", {"id": "7"}))
    assert name_of(TRIGGER, 0, event("a", {"ID": 7})) is None
    assert name_of(TRIGGER, 0, event("a", {"id": None})) is not None


def test_it_survives_being_stored() -> None:
    join = put(put(put(EMPTY, "a1", 0), "b1", 1), "a2", 0)
    entry = joins.to_entry(replace(join, version=3), 60.0, NOW)
    assert joins.from_entry(entry) == replace(join, version=3)
    assert entry.due_at == NOW + joins.SWEPT_AFTER_SECONDS


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=60))
def test_each_is_used_once_however_often_it_is_told(told: list[tuple[str, int]]) -> None:
    join = EMPTY
    for letter, number in told:
        join = put(join, f"{letter}{number}", "ab".index(letter))
    used = [id for firing in ids(join) for id in firing]
    assert len(used) == len(set(used))
    there = {letter: list(dict.fromkeys(f"{le}{n}" for le, n in told if le == letter)) for letter in "ab"}
    pairs = min(len(there["a"]), len(there["b"]))
    assert ids(join) == [list(pair) for pair in zip(there["a"][:pairs], there["b"][:pairs], strict=True)]


def test_the_time_between_happenings_counts_and_not_when_somebody_was_told() -> None:
    waiting = put(EMPTY, "a1", 0)
    told_late = added(waiting, one("b1", NOW + 10), [1], TRIGGER.within_seconds, NOW + 7200)
    assert ids(told_late) == [["a1", "b1"]]
    too_old = added(put(EMPTY, "a1", 0), one("b0", NOW - 61), [1], TRIGGER.within_seconds, NOW + 1)
    assert (ids(too_old), [len(group) for group in too_old.members]) == ([], [1, 0])


def test_one_that_is_for_two_members_is_used_once() -> None:
    join = added(put(EMPTY, "a1", 0), one("both", NOW + 1), [0, 1], TRIGGER.within_seconds, NOW + 1)
    assert ids(join) == [["a1", "both"]]
    assert ids(put(join, "b2", 1, NOW + 2)) == [["a1", "both"]]


def both(join: Join, id: str, at: float = NOW) -> Join:
    """A happening that either member is for."""
    return added(join, one(id, at), [0, 1], TRIGGER.within_seconds, at)


def test_the_same_event_twice_needs_two_events() -> None:
    first = both(EMPTY, "e1")
    assert ids(first) == []
    second = both(first, "e2", NOW + 1)
    assert ids(second) == [["e1", "e2"]]
    assert second.members == ((), ())
    assert ids(both(both(second, "e3", NOW + 2), "e4", NOW + 3)) == [["e1", "e2"], ["e3", "e4"]]


def test_one_that_two_members_want_goes_where_another_one_cannot() -> None:
    join = put(both(EMPTY, "either"), "a1", 0, NOW + 1)
    assert ids(join) == [["a1", "either"]]


def test_the_same_event_twice_within_its_time() -> None:
    late = both(both(EMPTY, "e1"), "e2", NOW + 61)
    assert (ids(late), [[each.source.id for each in group] for group in late.members]) == ([], [["e2"], ["e2"]])


@given(st.lists(st.sampled_from([(0,), (1,), (0, 1)]), max_size=30))
def test_none_is_used_twice_and_none_waits_that_could_fire(wanted: list[tuple[int, ...]]) -> None:
    join = EMPTY
    for number, members in enumerate(wanted):
        join = added(join, one(f"e{number:02}"), members, TRIGGER.within_seconds, NOW)
    used = [id for firing in ids(join) for id in firing]
    assert len(used) == len(set(used))
    waiting = [{each.source.id for each in group} for group in join.members]
    assert not all(waiting) or len(waiting[0] | waiting[1]) == 1
