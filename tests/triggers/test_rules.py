"""Which happenings a condition holds for, what arguments are made of them, and circles."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.codec import Codec
from holdfast.errors import CorruptRecord
from holdfast.model.records import Entry, Source
from holdfast.model.status import Status
from holdfast.schedules.records import StoredCall
from holdfast.triggers.rules import (
    DATA,
    Argument,
    Facts,
    OnEnd,
    OnEvent,
    TriggerRecord,
    combine,
    cycles,
    fired_id,
    from_entry,
    picked,
    to_entry,
)

ERROR = Codec().encode_error(KeyError("no order 7"))
EVENT = Facts(source=Source(kind="event", id="e1", name="made"), at=5.0, payload={"n": 1, "order": {"id": [4, 5]}})
ENDED = Facts(
    source=Source(kind="end", id="i1", name="pay"),
    at=6.0,
    status=Status.SUCCESS,
    args=(7,),
    kwargs={"region": "eu"},
    result={"total": 9, "ok": True},
)
FAILED = replace(ENDED, status=Status.FAILED, result=None, error=ERROR)


def end(**facts: Any) -> OnEnd:
    data = {name: DATA.encode(value) for name, value in facts.items() if name in ("called_with", "where", "equals")}
    given = {"statuses": (Status.SUCCESS,), "parameters": ("order", "region", "fast")} | facts | data
    return OnEnd(tasks=("pay", "old:pay"), defaults=DATA.encode({"region": "us", "fast": False}), **given)


@pytest.mark.parametrize(
    ("condition", "facts", "holds"),
    [
        (OnEvent(name="made"), EVENT, True),
        (OnEvent(name="made"), ENDED, False),
        (OnEvent(name="gone"), EVENT, False),
        (OnEvent(name="made", where=DATA.encode({"order.id.1": 5})), EVENT, True),
        (OnEvent(name="made", where=DATA.encode({"order.id.2": 5})), EVENT, False),
        (OnEvent(name="made", where=DATA.encode({"n": True})), EVENT, False),
        (OnEvent(name="made", where=DATA.encode({"n": 1, "x": 2})), EVENT, False),
        (OnEvent(name="made", where=DATA.encode({"n.x": 1})), EVENT, False),
        (end(), ENDED, True),
        (end(), EVENT, False),
        (end(), replace(ENDED, source=Source(kind="end", id="i", name="old:pay")), True),
        (end(), FAILED, False),
        (end(statuses=(Status.FAILED, Status.CANCELLED)), FAILED, True),
        (end(called_with={"order": 7}), ENDED, True),
        (end(called_with={"order": 8}), ENDED, False),
        (end(called_with={"region": "eu", "fast": False}), ENDED, True),
        (end(where={"total": 9}), ENDED, True),
        (end(where={"ok": 1}), ENDED, False),
        (end(equals={"total": 9, "ok": True}), ENDED, True),
        (end(equals=None), ENDED, False),
        (end(equals=None), replace(ENDED, result=None), True),
        (end(statuses=(Status.FAILED,), errors=("builtins:KeyError",)), FAILED, True),
        (end(statuses=(Status.FAILED,), errors=("LookupError",)), FAILED, True),
        (end(statuses=(Status.FAILED,), errors=("ValueError",)), FAILED, False),
        (end(statuses=(Status.FAILED,), message="order [0-9]"), FAILED, True),
        (end(statuses=(Status.FAILED,), message="^order"), FAILED, False),
        (end(statuses=(Status.CANCELLED,), errors=("KeyError",)), replace(ENDED, status=Status.CANCELLED), False),
    ],
)
def test_it_holds_or_not(condition: OnEvent | OnEnd, facts: Facts, holds: bool) -> None:
    assert condition.holds(facts) is holds


def trigger(*arguments: Argument, task: str = "t", on: str = "pay", **fields: Any) -> TriggerRecord:
    clauses = (((end(), OnEvent(name="made"), end(statuses=(Status.FAILED,))),),)
    record = TriggerRecord(app="app", name="t#1", clauses=clauses, call=StoredCall(task=task, arguments=b""))
    return replace(record, arguments=arguments, **fields)


@pytest.mark.parametrize(
    ("argument", "facts", "value"),
    [
        (Argument(name="a", part="event", path="order.id"), EVENT, [4, 5]),
        (Argument(name="a", part="event"), EVENT, EVENT.payload),
        (Argument(name="a", part="event", of="other"), EVENT, None),
        (Argument(name="a", part="arguments", path="order"), ENDED, 7),
        (Argument(name="a", part="arguments", path="fast"), ENDED, False),
        (Argument(name="a", part="result", path="total"), ENDED, 9),
        (Argument(name="a", part="result"), FAILED, None),
        (Argument(name="a", part="error", path="type"), FAILED, "builtins:KeyError"),
        (Argument(name="a", part="cause", path="arguments.region"), ENDED, "eu"),
        (Argument(name="a", part="cause", path="id"), EVENT, "e1"),
        (Argument(name="a", value=DATA.encode(3)), EVENT, 3),
    ],
)
def test_arguments_are_found(argument: Argument, facts: Facts, value: Any) -> None:
    record = trigger(argument)
    found, missing = combine(record, [picked(record, facts)])
    assert (found, missing) == (({"a": value}, []) if value is not None else ({}, ["a"]))


def test_a_whole_goes_by_the_names_that_the_task_takes() -> None:
    whole = trigger(Argument(part="event"), takes=("n", "z"))
    assert combine(whole, [picked(whole, EVENT)]) == ({"n": 1}, [])
    anything = replace(whole, takes=None)
    assert combine(anything, [picked(anything, EVENT)]) == (EVENT.payload, [])


def test_the_first_who_has_it_gives_it() -> None:
    record = trigger(Argument(name="a", part="event", path="n"))
    assert combine(record, [{"a": 1}, {"a": 2}]) == ({"a": 1}, [])


def test_an_id_follows_from_what_it_fires_for_and_from_nothing_else() -> None:
    record, sources = trigger(), [EVENT.source, ENDED.source]
    assert fired_id(record, 0, sources, 5.0) == fired_id(replace(record, version=9), 0, sources, 5.0)
    assert fired_id(record, 0, sources[:1], 5.0) == fired_id(record, 1, sources[:1], 5.0), "one happening counts once"
    different = [
        fired_id(record, 0, sources, 5.0),
        fired_id(record, 1, sources, 5.0),
        fired_id(record, 0, sources[:1], 5.0),
        fired_id(record, 0, [replace(EVENT.source, kind="end")], 5.0),
        fired_id(replace(record, name="t#2"), 0, sources[:1], 5.0),
    ]
    assert len(set(different)) == len(different)


def test_what_is_stored_comes_back_or_is_refused() -> None:
    record = trigger(Argument(name="a", value=b"\x01"))
    assert from_entry(to_entry(record)) == record
    for body in (b"{}", b"[", to_entry(trigger()).body.replace(b'"pay"', b"5")):
        with pytest.raises(CorruptRecord, match="the trigger 't#1' cannot be read"):
            from_entry(Entry(app="app", kind="trigger", name="t#1", body=body))


def chain(task: str, *causes: str) -> TriggerRecord:
    conditions = tuple(OnEnd(tasks=(cause,), statuses=(Status.SUCCESS,)) for cause in causes)
    return TriggerRecord(app="app", name=task, clauses=((conditions,),), call=StoredCall(task=task, arguments=b""))


def test_circles_are_found_once_each() -> None:
    assert cycles([chain("b", "a"), chain("c", "b")]) == []
    assert cycles([chain("a", "a")]) == [("a", "a")]
    assert cycles([chain("b", "a"), chain("c", "b"), chain("a", "c", "x")]) == [("a", "b", "c", "a")]
    assert len(cycles([chain("b", "a", "c"), chain("a", "b"), chain("c", "b")])) == 2
