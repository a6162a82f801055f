"""Replay as a pure thing: recorded events against the calls that a body makes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.errors import NotDecodable
from holdfast.model.log import MAX_PAGE_BYTES, MAX_PAGE_EVENTS, Page
from holdfast.workflows import events as e
from holdfast.workflows.events import Event
from holdfast.workflows.rules import FINISHED, Deliver, Mismatch, OpenCall, Perform, Replay

CODE = "3.11 aaaa"


def created(call: str, data: bytes = b"1", **more: Any) -> Event:
    name = call.partition("#")[0].partition("@")[0]
    where = more.pop("where", f"/shop.py:{len(call)}")
    return Event(type=e.STEP_CREATED, at=1.0, call=call, name=name, where=where, data=data, **more)


def started(call: str, attempt: int = 1, at: float = 2.0) -> Event:
    return Event(type=e.STEP_STARTED, at=at, call=call, attempt=attempt)


def completed(call: str, **more: Any) -> Event:
    return Event(type=e.STEP_COMPLETED, at=3.0, call=call, **more)


def slept(call: str, due: float = 10.0, kind: str = "sleep", **more: Any) -> Event:
    return Event(type=e.WAIT_COMPLETED, at=due, call=call, name=kind, due=due, **more)


def step(id: str, data: bytes = b"1", where: str = "/new.py:7") -> OpenCall:
    name = id.partition("#")[0].partition("@")[0]
    return OpenCall(id=id, name=name, where=where, data=data, is_keyed="@" in id)


def timer(id: str, due: float = 10.0, kind: str = "sleep") -> OpenCall:
    return OpenCall(id=id, name=kind, where="/new.py:9", due=due)


def replay(*events: Event, code: str = CODE, open: tuple[OpenCall, ...] = (), same: bool = False) -> Replay:
    made = Replay(events, code=code, same=lambda recorded, asked: same)
    for call in open:
        made.opened(call)
    return made


def mismatch(made: Replay) -> str:
    found = made.next()
    assert isinstance(found, Mismatch), found
    return found.why


class TestDelivery:
    def test_ends_are_delivered_in_the_order_of_the_log(self) -> None:
        log = replay(
            *(created("a#1"), created("b#1"), started("a#1"), started("b#1"), completed("b#1"), completed("a#1")),
            open=(step("a#1"), step("b#1")),
        )
        assert log.next() == Deliver(completed("b#1"))
        assert log.next() == Deliver(completed("a#1"))
        assert log.next() is FINISHED
        assert not log.open

    def test_one_event_at_a_time_so_that_the_body_can_call_in_between(self) -> None:
        log = replay(created("a#1"), completed("a#1"), created("b#1"), completed("b#1"), open=(step("a#1"),))
        assert log.next() == Deliver(completed("a#1"))
        log.opened(step("b#1"))
        assert log.next() == Deliver(completed("b#1"))

    def test_numbers_count_calls_of_a_name(self) -> None:
        log = replay()
        assert [log.number("a"), log.number("b"), log.number("a")] == ["a#1", "b#1", "a#2"]

    def test_events_of_a_call_that_the_body_gave_up_are_dropped(self) -> None:
        log = replay(completed("a#1"), slept("wait#1"), completed("b#1"), open=(step("a#1"), timer("wait#1")))
        assert log.next() == Deliver(completed("a#1"))
        log.gave_up("wait#1")
        log.opened(step("b#1"))
        assert log.next() == Deliver(completed("b#1"))

    def test_a_wait_that_is_recorded_as_given_up_ends_no_wait_of_the_body(self) -> None:
        given_up = Event(type=e.WAIT_COMPLETED, at=3.0, call="wait#1", name="sleep", due=10.0, why=e.GIVEN_UP)
        log = replay(completed("a#1"), given_up, open=(step("a#1"), timer("wait#1")))
        assert log.next() == Deliver(completed("a#1"))
        assert log.next() is FINISHED
        assert list(log.open) == ["wait#1"]  # other code may wait for it still
        assert log.settled == {"wait#1"}

    def test_a_call_that_was_answered_cannot_be_given_up(self) -> None:
        log = replay(completed("a#1"), completed("a#1"), open=(step("a#1"),))
        log.next()
        log.gave_up("a#1")
        assert "a#1" in mismatch(log)

    def test_a_recorded_cancel_is_delivered_whatever_is_open(self) -> None:
        cancel = Event(type=e.CANCEL_REQUESTED, at=2.0, why="asked")
        log = replay(cancel, slept("wait#1"), open=(timer("wait#1"),))
        assert log.has_cancel
        assert log.next() == Deliver(cancel)
        assert log.next() == Deliver(slept("wait#1"))

    def test_what_is_open_at_the_end_is_known_by_its_past(self) -> None:
        retrying = Event(type=e.STEP_RETRYING, at=3.0, call="a#1", attempt=1, due=9.0)
        log = replay(created("a#1", child="c"), started("a#1"), retrying, started("a#1", 2, 9.0), open=(step("a#1"),))
        assert log.next() is FINISHED
        past = log.past["a#1"]
        assert (past.created, past.child, past.started_at, past.attempts, past.failures, past.retry_at) == (
            *(True, "c", 2.0, 2, 1),
            None,
        )

    def test_a_backoff_that_is_not_over_is_kept(self) -> None:
        retrying = Event(type=e.STEP_RETRYING, at=3.0, call="a#1", attempt=1, due=9.0)
        log = replay(created("a#1"), started("a#1"), retrying, open=(step("a#1"),))
        assert log.next() is FINISHED
        assert log.past["a#1"].retry_at == 9.0


class TestMismatch:
    def test_both_calls_are_named_with_file_and_line(self) -> None:
        log = replay(created("charge#1", where="/shop.py:12"), open=(step("pack#1", where="/new.py:40"),))
        why = mismatch(log)
        assert "charge#1 at /shop.py:12" in why
        assert "pack#1 at /new.py:40" in why
        assert "step_created" in why

    def test_another_version_of_a_child_is_the_same_call(self) -> None:
        """What is recorded counts, and a child that is open ends in the version that it was made for."""
        recorded = Event(type=e.STEP_CREATED, at=1.0, call="refund#1", name="shop:refund", child="c", data=b"1")
        made = OpenCall(id="refund#1", name="shop:refund@2", data=b"1")
        assert replay(recorded, completed("refund#1"), open=(made,)).next() == Deliver(completed("refund#1"))
        other = OpenCall(id="refund#1", name="shop:return@2", data=b"1")
        assert "a call of shop:refund; the code calls shop:return@2" in mismatch(replay(recorded, open=(other,)))

    def test_of_many_open_calls_a_few_are_named(self) -> None:
        why = mismatch(replay(created("charge#1"), open=tuple(step(f"pack#{number}") for number in range(1, 1001))))
        assert why.endswith("pack#3 at /new.py:7 and 997 more")

    def test_a_body_that_waits_for_nothing_is_told_so(self) -> None:
        assert "the code waits for nothing" in mismatch(replay(created("charge#1")))

    def test_another_python_version_is_named(self) -> None:
        log = replay(created("charge#1", code="3.11 aaaa"), code="3.12 bbbb")
        assert "written on Python 3.11, and this is 3.12" in mismatch(log)

    def test_a_timer_of_another_version_names_the_version_too(self) -> None:
        recorded = slept("wait#1", kind="wait", code="3.11 aaaa")
        why = mismatch(replay(recorded, code="3.12 bbbb", open=(timer("wait#1", kind="timeout"),)))
        assert "written on Python 3.11" in why

    def test_an_id_with_another_name_is_refused(self) -> None:
        recorded = msgspec.structs.replace(created("a#1"), name="b")
        assert "a call of b; the code calls a" in mismatch(replay(recorded, open=(step("a#1"),)))


class TestArguments:
    def test_other_arguments_of_the_same_code_park(self) -> None:
        recorded = created("charge#1", b"left", where="/shop.py:3", code=CODE)
        why = mismatch(replay(recorded, open=(step("charge#1", b"right"),)))
        assert "charge#1 at /shop.py:3" in why
        assert "charge#1 at /new.py:7" in why
        assert "by the same body" in why

    def test_other_arguments_of_other_code_are_a_warning(self) -> None:
        recorded = created("charge#1", b"left", code="3.11 other")
        log = replay(recorded, completed("charge#1"), open=(step("charge#1", b"right"),))
        assert log.next() == Deliver(completed("charge#1"))
        (warning,) = log.warnings
        assert "the recorded result counts" in warning

    def test_the_code_of_the_last_owner_counts(self) -> None:
        """A takeover says which code wrote the events after it."""
        takeover = Event(type=e.TAKEOVER, at=1.0, epoch=2, code=CODE)
        log = replay(
            *(created("a#1", code="3.11 other"), completed("a#1"), takeover, created("b#1", b"left")),
            open=(step("a#1"),),
        )
        log.next()
        log.opened(step("b#1", b"right"))
        assert "by the same body" in mismatch(log)

    def test_equal_values_may_be_written_differently(self) -> None:
        log = replay(created("a#1", b"{1,2}", code=CODE), open=(step("a#1", b"{2,1}"),), same=True)
        assert log.next() is FINISHED
        assert not log.warnings


class TestTimers:
    def test_kind_and_deadline_fit(self) -> None:
        assert replay(slept("wait#1"), open=(timer("wait#1"),)).next() == Deliver(slept("wait#1"))

    @pytest.mark.parametrize("made", [timer("wait#1", kind="timeout"), timer("wait#1", due=11.0)])
    def test_another_kind_or_deadline_does_not(self, made: OpenCall) -> None:
        why = mismatch(replay(slept("wait#1", where="/shop.py:7", seconds=9.0), open=(made,)))
        assert "wait#1 at /shop.py:7, a sleep of 9s until 1970-01-01 00:00:10 UTC" in why
        assert f"wait#1 ({made.name} until 1970-01-01 00:00:{made.due or 0:.0f} UTC) at /new.py:9" in why

    def test_the_same_length_fits_and_the_recorded_deadline_counts(self) -> None:
        made = timer("wait#1", due=11.0)
        made.seconds = 9.0
        recorded = msgspec.structs.replace(slept("wait#1"), seconds=9.0)
        assert replay(recorded, open=(made,)).next() == Deliver(recorded)
        assert made.due == 10.0

    def test_a_timer_that_was_only_set_is_compared_too(self) -> None:
        recorded = Event(type=e.WAIT_CREATED, at=1.0, call="wait#1", name="sleep", due=10.0)
        assert "a sleep until" in mismatch(replay(recorded, open=(timer("wait#1", kind="timeout"),)))

    def test_rounding_is_no_difference(self) -> None:
        assert isinstance(replay(slept("wait#1"), open=(timer("wait#1", due=10.0000001),)).next(), Deliver)


class TestKeyedCalls:
    def test_one_that_was_added_is_performed_before_replay_goes_on(self) -> None:
        log = replay(created("b#1"), completed("b#1"), open=(step("a@new"),))
        assert log.next() == Perform("a@new")
        assert not log.is_over
        assert log.next() == Perform("a@new")  # it still runs
        log.answered(completed("a@new"))
        log.opened(step("b#1"))
        assert log.next() == Deliver(completed("b#1"))
        assert log.next() is FINISHED

    def test_one_that_was_removed_is_skipped(self) -> None:
        log = replay(created("a@x"), completed("a@x"), created("b#1"), completed("b#1"), open=(step("b#1"),))
        assert log.next() == Deliver(completed("b#1"))
        assert log.next() is FINISHED

    def test_one_that_was_moved_ahead_gets_its_recorded_end(self) -> None:
        log = replay(
            *(created("b#1"), completed("b#1"), created("a@x"), completed("a@x"), created("c#1"), completed("c#1")),
            open=(step("a@x"),),
        )
        assert log.next() == Deliver(completed("a@x"))
        log.opened(step("b#1"))
        assert log.next() == Deliver(completed("b#1"))
        log.opened(step("c#1"))
        assert log.next() == Deliver(completed("c#1"))

    def test_one_that_was_moved_behind_gets_its_recorded_end(self) -> None:
        log = replay(created("a@x"), completed("a@x"), created("b#1"), completed("b#1"), open=(step("b#1"),))
        log.next()
        log.opened(step("a@x"))
        assert log.next() == Deliver(completed("a@x"))
        assert log.next() is FINISHED

    def test_one_that_was_moved_keeps_what_its_step_has_set(self) -> None:
        data = Event(type=e.DATA_SET, at=2.0, call="a@x", data=b"d")
        log = replay(created("b#1"), completed("b#1"), created("a@x"), data, completed("a@x"), open=(step("a@x"),))
        assert log.next() == Deliver(completed("a@x"))
        assert log.carried["a@x"] == [data]

    def test_one_that_was_added_before_a_recorded_wait_does_not_move_the_clock(self) -> None:
        log = replay(slept("sleep#1"), open=(step("a@new"),))
        assert log.next() == Perform("a@new", keeps_clock=True)
        later = replay(slept("sleep#1"), created("a@new"), completed("a@new"), open=(step("a@new"),))
        assert later.next() == Deliver(completed("a@new"), keeps_clock=True)

    def test_one_that_was_moved_ahead_of_steps_moves_the_clock_as_in_its_place(self) -> None:
        log = replay(
            *(created("b#1"), completed("b#1"), completed("a@x"), slept("sleep#1")),
            open=(step("a@x"),),
        )
        assert log.next() == Deliver(completed("a@x"))

    def test_one_that_an_earlier_owner_has_begun_is_performed_as_its_next_attempt(self) -> None:
        log = replay(created("b#1"), completed("b#1"), created("a@new"), started("a@new"), open=(step("a@new"),))
        assert log.next() == Perform("a@new")
        assert log.next() == Perform("a@new")
        assert (log.past["a@new"].created, log.past["a@new"].attempts) == (True, 1)

    def test_one_that_was_begun_and_is_called_later_now_was_begun_all_the_same(self) -> None:
        log = replay(created("a@x"), started("a@x"), created("b#1"), completed("b#1"), open=(step("b#1"),))
        assert log.next() == Deliver(completed("b#1"))
        log.opened(step("a@x"))
        assert log.next() is FINISHED
        assert (log.past["a@x"].created, log.past["a@x"].attempts) == (True, 1)

    def test_one_in_its_place_is_delivered_as_any_other(self) -> None:
        log = replay(created("a@x"), completed("a@x"), completed("b#1"), open=(step("a@x"), step("b#1")))
        assert [log.next(), log.next()] == [Deliver(completed("a@x")), Deliver(completed("b#1"))]


class TestOther:
    def test_patches_are_known_from_the_start(self) -> None:
        assert replay(Event(type=e.PATCHED, at=1.0, name="new tax")).patches == {"new tax"}

    def test_what_a_step_has_set_comes_with_its_end(self) -> None:
        data = Event(type=e.DATA_SET, at=2.0, call="a#1", data=b"d")
        log = replay(created("a#1"), data, completed("a#1"), open=(step("a#1"),))
        assert log.next() == Deliver(completed("a#1"))
        assert log.carried["a#1"] == [data]

    def test_it_is_over_although_a_takeover_follows(self) -> None:
        log = replay(completed("a#1"), Event(type=e.TAKEOVER, at=4.0, epoch=2), open=(step("a#1"),))
        assert not log.is_over
        log.next()
        assert log.is_over
        assert log.next() is FINISHED

    def test_an_empty_log_is_over(self) -> None:
        assert replay().is_over
        assert replay().next() is FINISHED

    def test_what_the_body_said_counts_once_for_each_record(self) -> None:
        said = Event(type=e.ATTRIBUTES_SET, at=1.0, data=b"x")
        log = replay(said)
        assert [log.has_said(said), log.has_said(said)] == [True, False]

    def test_inbox_entries_of_the_log_are_known(self) -> None:
        assert replay(completed("a#1", entry="child:1")).entries == {"child:1"}


class TestPages:
    def page(self, *events: Any, first: int = 5, count: int | None = None) -> Page:
        last = first + (len(events) if count is None else count) - 1
        body = msgspec.msgpack.encode(events)
        return Page(
            app="shop", run="r1", generation=0, first=first, last=last, epoch=1, operation="o", at=1.0, events=body
        )

    def test_events_come_back(self) -> None:
        events = [created("a#1"), started("a#1"), completed("a#1")]
        assert e.decode(self.page(*events)) == events

    def test_an_unknown_event_is_refused_by_name_and_position(self) -> None:
        unknown = {"type": "hook_painted", "at": 1.0, "colour": "red"}
        with pytest.raises(NotDecodable, match="'hook_painted' at position 6, which this version"):
            e.decode(self.page(completed("a#1"), unknown))

    def test_damage_names_the_place(self) -> None:
        page = msgspec.structs.replace(self.page(completed("a#1")), events=b"\xc1")
        with pytest.raises(NotDecodable, match="the log of r1, generation 0, position 5, cannot be read"):
            e.decode(page)

    def test_a_page_has_as_many_events_as_it_says(self) -> None:
        with pytest.raises(NotDecodable, match="from 5 to 6, and has 1 events"):
            e.decode(self.page(completed("a#1"), count=2))

    def test_a_page_takes_a_thousand_events_or_a_megabyte(self) -> None:
        small, large = completed("a#1"), completed("a#1", data=bytes(MAX_PAGE_BYTES))
        assert e.portion([small] * (MAX_PAGE_EVENTS + 1)) == MAX_PAGE_EVENTS
        assert e.portion([large, small]) == 1
        assert e.portion([small, large, small]) == 1

    @pytest.mark.parametrize(
        ("events", "expected"),
        [([created("a#1"), started("a#1")], False), ([completed("a#1")], True), ([slept("wait#1")], True)],
    )
    def test_ends_are_progress(self, events: list[Event], expected: bool) -> None:
        assert e.is_progress(events) is expected
