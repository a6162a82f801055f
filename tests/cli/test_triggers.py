"""triggers: what is listed of them."""

from __future__ import annotations

from operator import methodcaller

import pytest
from tests.cli.processes import Command, eventually

from holdfast import App, on_event
from holdfast.cli.reach import with_store
from holdfast.model.records import Entry
from holdfast.triggers import from_event
from holdfast.triggers.rules import KIND


@pytest.fixture
def app(triggered: App) -> App:
    return triggered


@pytest.fixture
def ready(app: App) -> App:
    """With triggers in the store, and nobody who works."""
    with app.runner():
        pass
    return app


def test_triggers_are_told_in_words(ready: App, holdfast: Command) -> None:
    answer = holdfast("triggers")
    assert (answer.code, answer.err) == (0, "")
    rows = [" ".join(line.split()[1:]) for line in answer.out.splitlines()]
    assert rows == [
        "task state decided by when",
        "shop:inspect active code the event 'order.created'",
        "shop:reserve active data the event 'order.created'",
        "shop:thank active data shop:reserve ends as success and the event 'paid' with by='card', within 2h",
    ]
    facts = holdfast("triggers", "--json").json
    assert facts["unreadable"] == {}
    inspect, _, thanks = facts["triggers"]
    assert inspect["evaluator"] == f"trigger:{inspect['name']}"
    assert (thanks["name"], thanks["task"], thanks["state"]) == ("thanks", "shop:thank", "active")
    assert (thanks["decided_by"], thanks["evaluator"], thanks["retired_at"]) == ("data", None, None)
    assert thanks["within_seconds"] == 7200


def test_a_trigger_that_no_code_declares_is_retired(ready: App, holdfast: Command) -> None:
    with App("sqlite:///shop.db") as later:

        @later.task(name="shop:thank")
        def thank() -> None: ...

        @later.task(name="shop:reserve", triggers=[on_event("order.created", arguments={"order": from_event("id")})])
        def reserve(order: int) -> None: ...

        with later.runner():
            eventually(lambda: holdfast("triggers").out.count("retired") == 2, "they rest")
    facts = {each["name"]: each for each in holdfast("triggers", "--json").json["triggers"]}
    assert {each["task"] for each in facts.values() if each["state"] == "retired"} == {"shop:thank", "shop:inspect"}
    assert facts["thanks"]["retired_at"] is not None


def test_there_may_be_none_or_one_that_cannot_be_read(app: App, holdfast: Command) -> None:
    with_store(app, lambda store: store.roster(app.name))
    assert holdfast("triggers").out == "no triggers; a runner stores the triggers of its tasks when it starts\n"
    with_store(app, methodcaller("put_entry", Entry(app=app.name, kind=KIND, name="odd", body=b"{}")))
    answer = holdfast("triggers")
    assert answer.code == 0
    assert answer.err.startswith("note: the trigger 'odd' cannot be read")
    assert list(holdfast("triggers", "--json").json["unreadable"]) == ["odd"]
