"""What a user is told about an invocation that is damaged: what it is, that it was set aside, and what helps."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.support.patience import patient

from holdfast import App, Invocation
from holdfast.errors import CorruptRecord, EventNotFound, NotDecodable, PayloadLost, UnknownSchedule
from holdfast.model.status import Status
from holdfast.triggers.outbox import Events

HOW = "See docs/operations/damaged-records.md for how to look at it, repair it or remove it"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App(f"sqlite:///{tmp_path}/shop.db", poll_interval_seconds=0.1, inline_limit=1024) as app:
        yield app


@pytest.fixture
def damage(tmp_path: Path) -> Callable[..., None]:
    """Change rows of the store's file behind everybody's back."""

    def change(statement: str, *values: object) -> None:
        connection = sqlite3.connect(tmp_path / "shop.db")
        with connection:
            assert connection.execute(statement, values).rowcount > 0
        connection.close()

    return change


HISTORY = "UPDATE holdfast_invocations SET history = 'nonsense' WHERE id = ?"

ASKED: dict[str, Callable[[Invocation[Any]], object]] = {
    "result": lambda it: it.result(timeout=patient(5)),
    "cancel": lambda it: it.cancel("not wanted"),
    "status": lambda it: it.status,
    "history": lambda it: it.history(),
    "explain": lambda it: it.explain(),
    "wake": lambda it: it.wake(),
    "rerun": lambda it: it.rerun(),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_an_invocation_that_was_set_aside_is_damaged_and_not_unknown(
    app: App, damage: Callable[..., None], ask: Callable[[Invocation[Any]], object]
) -> None:
    @app.task
    def add(number: int) -> int:
        return number

    bad, good = add.submit(1), add.submit(2)
    damage(HISTORY, bad.id)
    with pytest.raises(CorruptRecord) as met:
        ask(bad)
    assert f"the stored invocation {bad.id} cannot be read" in str(met.value)
    assert HOW in str(met.value)
    with app.runner():
        assert good.result(timeout=patient(20)) == 2
    assert [each.id for each in app.runtime.run(app.runtime.ready().store.quarantined(app.name))] == [bad.id]
    with pytest.raises(CorruptRecord) as told:
        ask(bad)
    assert str(told.value).startswith(f"{bad.id} was set aside at ")
    assert HOW in str(told.value)
    assert (told.value.kind, told.value.id) == ("invocation", bad.id)


@pytest.mark.parametrize("ask", [ASKED["result"], ASKED["cancel"]], ids=["result", "cancel"])
def test_on_mongodb_too_it_is_damaged_and_not_unknown(mongo_url: str, ask: Callable[[Invocation[Any]], object]) -> None:
    with App(mongo_url, poll_interval_seconds=0.1) as app, MongoClient[dict[str, Any]](mongo_url) as client:

        @app.task
        def add(number: int) -> int:
            return number

        bad, good = add.submit(1), add.submit(2)
        invocations = client.get_default_database().holdfast_invocations
        invocations.update_one({"_id": f"{app.name}|{bad.id}"}, {"$set": {"history": "nonsense"}})
        with pytest.raises(CorruptRecord, match=f"the stored invocation {bad.id} cannot be read") as met:
            ask(bad)
        assert HOW in str(met.value)
        with app.runner():
            assert good.result(timeout=patient(20)) == 2
        with pytest.raises(CorruptRecord, match=f"{bad.id} was set aside at ") as told:
            ask(bad)
        assert HOW in str(told.value)


def test_all_but_the_damaged_ones_are_cancelled(app: App, damage: Callable[..., None]) -> None:
    @app.task
    def add(number: int) -> int:
        return number

    group = add.map([1, 2, 3])
    damage(HISTORY, group[1].id)
    with pytest.raises(CorruptRecord, match=group[1].id):
        group.cancel("not wanted")
    assert (group[0].status, group[2].status) == (Status.CANCELLED, Status.CANCELLED)


def test_a_damaged_result_is_told_with_the_id_and_what_helps(app: App, damage: Callable[..., None]) -> None:
    @app.task
    def text(length: int) -> str:
        return "x" * length

    small, large = text.submit(1), text.submit(5000)
    with app.runner():
        assert (small.result(timeout=patient(20)), len(large.result(timeout=patient(20)))) == ("x", 5000)
    damage("UPDATE holdfast_invocations SET result = x'ff00' WHERE id = ?", small.id)
    damage("DELETE FROM holdfast_payloads")
    for it, kind in ((small, NotDecodable), (large, PayloadLost)):
        with App(app.url, name=app.name) as other, pytest.raises(kind) as told:  # which has not read it before
            other.invocation(it.id).result(timeout=patient(5))
        assert str(told.value).startswith(f"the result of {text.name} {it.id} cannot be read: ")
        assert f"Restore it from a backup, or run the call again: holdfast rerun {it.id}" in str(told.value)


def test_a_result_that_this_code_does_not_know_is_not_called_damaged(app: App) -> None:
    from dataclasses import make_dataclass

    Parcel = make_dataclass("Parcel", [("size", int)])
    app.register(Parcel)

    @app.task
    def pack() -> object:
        return Parcel(3)

    parcel = pack.submit()
    with app.runner():
        assert parcel.result(timeout=patient(20)) == Parcel(3)
    with App(app.url, name=app.name) as other, pytest.raises(NotDecodable) as told:
        other.invocation(parcel.id).result(timeout=patient(5))
    assert parcel.id in str(told.value)
    assert "is not registered; call app.register()" in str(told.value)
    assert "backup" not in str(told.value)


def test_a_schedule_and_an_event_that_were_set_aside_are_told_of(app: App, damage: Callable[..., None]) -> None:
    @app.task
    def add(number: int) -> int:
        return number

    app.schedules.create("nightly", add, [1], cron="0 3 * * *")
    event = app.emit("order", {})
    damage("UPDATE holdfast_entries SET body = CAST('garbage' AS BLOB) WHERE kind IN ('schedule', 'event')")
    assert app.schedules.list() == []  # whoever reads them sets them aside
    assert app.events() == []
    with pytest.raises(UnknownSchedule, match="could not be read, and was set aside at ") as unknown:
        app.schedules.get("nightly")
    with pytest.raises(EventNotFound, match="A record of that name was set aside at ") as no_event:
        app.runtime.run(app.runtime.ready().part(Events).get(event.id))
    assert HOW in str(no_event.value)
    assert "docs/operations/damaged-records.md" in str(unknown.value)


# --- arguments

DAMAGED_ARGUMENTS = {"no msgpack": b"zzz", "cut off": b"\x92\x91\xcd\x01", "no call": b"\x05"}


@pytest.mark.parametrize("data", DAMAGED_ARGUMENTS.values(), ids=DAMAGED_ARGUMENTS)
def test_the_advice_for_damaged_arguments_is_what_helps(app: App, damage: Callable[..., None], data: bytes) -> None:
    @app.task
    def add(number: int) -> int:
        return number + 1

    bad, good = add.submit(1), add.submit(1)
    damage("UPDATE holdfast_invocations SET arguments = ? WHERE id = ?", data, bad.id)
    with app.runner():
        assert good.result(timeout=patient(20)) == 2
        assert _parked(bad).reason.startswith("its stored arguments are damaged: ")
        why = bad.explain()
        assert "other code" not in why
        assert f"submit the call again and end this one: holdfast cancel {bad.id}" in why
        assert f"docs/operations/damaged-records.md, and then: holdfast wake {bad.id}" in why
        # Both do help: it is repaired and woken; and one that was cancelled is not run again as it is.
        damage("UPDATE holdfast_invocations SET arguments = ? WHERE id = ?", good.record().arguments, bad.id)
        bad.wake()
        assert bad.result(timeout=patient(20)) == 2
    damage("UPDATE holdfast_invocations SET arguments = ? WHERE id = ?", data, bad.id)
    with pytest.raises(NotDecodable, match="its stored arguments are damaged"):
        bad.rerun()


def test_the_advice_for_arguments_that_are_gone_is_what_helps(app: App, damage: Callable[..., None]) -> None:
    @app.task
    def length(text: str) -> int:
        return len(text)

    lost = length.submit("x" * 5000)
    damage("DELETE FROM holdfast_payloads")
    with app.runner():
        _parked(lost)
        why = lost.explain()
        assert "other code" not in why
        assert "Submit a call with the same value, or restore the payload from a backup" in why
        assert f"then: holdfast wake {lost.id}" in why
        assert length.submit("x" * 5000).result(timeout=patient(20)) == 5000
        lost.wake()
        assert lost.result(timeout=patient(20)) == 5000


def test_the_advice_for_arguments_that_do_not_fit_the_code_is_other_code(app: App) -> None:
    @app.task(name="shop:add")
    def add(number: int, more: int) -> int:
        return number + more

    old = add.submit(1, 2)
    with App(app.url, name=app.name, poll_interval_seconds=0.1) as other:

        @other.task(name="shop:add")
        def add_one(number: int) -> int:
            return number + 1

        with other.runner():
            assert "do not fit this code" in _parked(old).reason
    assert "A runner with other code wakes it" in old.explain()


def _parked(invocation: Invocation[Any]) -> Any:
    import time

    deadline = time.monotonic() + 20
    while (record := invocation.record()).status is not Status.PARKED:
        assert time.monotonic() < deadline, record.status
        time.sleep(0.01)
    return record
