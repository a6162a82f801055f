"""Whatever submit, a retry, a cancel or a schedule writes, the decoders of the stores read again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.clock import TOO_LATE, parse_moment
from holdfast.executors.call import Raised
from holdfast.model import cancellation as cancelling
from holdfast.model.changes import Change, apply_to
from holdfast.model.claims import claimed
from holdfast.model.decoding import LATEST
from holdfast.model.records import Entry, InvocationRecord, Terms
from holdfast.model.retries import Fixed, dump_policy
from holdfast.runtime.cancel import asked_to_end
from holdfast.runtime.release import change_after
from holdfast.schedules import every, once
from holdfast.schedules import records as schedules
from holdfast.schedules import rules as firing
from holdfast.schedules.records import Rules, ScheduleRecord, StoredCall
from holdfast.store.mongo.documents import from_document, to_document
from holdfast.store.sqlite.rows import from_row, to_row
from holdfast.testing.samples import ERROR, START, invocation, wish
from holdfast.triggers import joins

LONGEST = 1e12  # that a length of time may have
lengths = st.floats(0, LONGEST)
moments = st.floats(START, LATEST)


def check(record: InvocationRecord) -> None:
    row = to_row(record)
    with closing(sqlite3.connect(":memory:")) as connection:
        assert from_row(connection.execute(f"SELECT {', '.join('?' * len(row))}", row).fetchone()) == record
    assert from_document(to_document(record)) == record


def running(at: float, **fields: Any) -> InvocationRecord:
    record = invocation("a", at=at, **fields)
    return apply_to(claimed(wish("claim", at=at), record), record)


@given(moments, lengths, st.none() | lengths, st.floats(0, 1))
@example(START, LONGEST, None, 0.5)
@example(START, 1.0, LONGEST, 0.5)
def test_what_is_to_be_tried_again(at: float, wait: float, asked: float | None, random_unit: float) -> None:
    record = running(at, terms=Terms(retries=dump_policy(Fixed(3, wait))))
    raised = Raised(error=ERROR, why="it raised", kinds=("ValueError",), retry_after=asked)
    change = change_after(record, raised, operation="op", at=at, random_unit=random_unit, fingerprint=None)
    check(apply_to(change, record))


@given(moments, st.none() | lengths, lengths)
@example(START, LONGEST, 10.0)
@example(START, None, LONGEST)
def test_what_is_cancelled(at: float, agreed: float | None, usual: float) -> None:
    terms = Terms(cancel_grace=agreed)
    for record in (invocation("a", at=at, terms=terms), running(at, terms=terms)):
        asked = asked_to_end(record, by="a person", reason="", at=at, usual_grace=usual, children=None)
        change = cancelling.cancel(record, asked, operation="op")
        assert isinstance(change, Change)
        check(apply_to(change, record))


@given(st.floats(0, TOO_LATE, exclude_max=True))
@example(LATEST)
def test_a_moment_that_a_user_may_give(at: float) -> None:
    check(invocation("a", due_at=parse_moment(at)))


@given(moments, st.floats(1, LONGEST), lengths)
@example(START, LONGEST, 0.0)
@example(LATEST - 1e10, 1.0, LONGEST)
def test_a_schedule_and_its_ticks(now: float, interval: float, jitter: float) -> None:
    now = min(now, 2.4e11)
    rules = Rules(jitter_seconds=jitter)
    for timing in (every(interval), once(now + 1)):
        record = ScheduleRecord(
            app="shop",
            name="s",
            uid="u",
            timing=timing,
            call=StoredCall(task="t", arguments=b"", queue="default"),
            rules=rules,
            through=now,
            next_at=firing.tick_after(timing, rules, now),
            created_at=now,
            changed_at=now,
        )
        entry = schedules.to_entry(record)
        assert schedules.from_entry(entry) == record
        msgspec.convert(msgspec.to_builtins(entry), Entry)
        if record.next_at is not None:
            check(invocation("a", due_at=firing.due_at(record, record.next_at)))


@given(moments, lengths)
@example(START, LONGEST)
def test_what_waits_for_others(at: float, within: float) -> None:
    happened = joins.Happened(at=at, source=joins.Source(kind="event", id="e"), picked=b"{}")
    join = joins.Join(app="shop", name="j", trigger="t", clause=0, members=((happened,), ()))
    entry = joins.to_entry(join, within, at)
    msgspec.convert(msgspec.to_builtins(entry), Entry)
