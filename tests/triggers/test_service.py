"""No firing is lost and none is doubled: whoever dies, whatever message is lost, over a fleet in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.support.fleet import APP, Fleet, Line, Member, add, nap, virtually

from holdfast.errors import StoreUnavailable
from holdfast.model.records import Entry, InvocationRecord, Source
from holdfast.model.status import FINAL, Status
from holdfast.schedules.records import StoredCall
from holdfast.store.contract import EntryOrder, Store
from holdfast.triggers.dispatch import TriggerDispatcher
from holdfast.triggers.events import KIND, EventRecord, from_entry
from holdfast.triggers.joins import KIND as JOINS
from holdfast.triggers.joins import from_entry as from_join
from holdfast.triggers.outbox import Events
from holdfast.triggers.rules import DATA, Condition, Facts, OnEnd, OnEvent, TriggerRecord
from holdfast.triggers.subscriptions import FRESH_SECONDS, VERSION_KIND, Subscriptions

ENDED = OnEnd(tasks=("add",), statuses=(Status.SUCCESS,))
EVENT = OnEvent(name="made")


def told() -> str:
    return "told"


def trigger(*members: Condition, name: str = "told#1", task: str = "told") -> TriggerRecord:
    clauses = (tuple((each,) for each in members or (ENDED,)),)
    return TriggerRecord(app=APP, name=name, clauses=clauses, call=StoredCall(task=task, arguments=b""))


def fired(fleet: Fleet, task: str = "told") -> list[InvocationRecord]:
    return [record for record in fleet.store._of(APP) if record.task == task]


async def emit(member: Member, name: str = "made", **fields: Any) -> EventRecord:
    store, ids = member.engine.store, member.engine.ids
    event = EventRecord(
        app=APP, id=ids.new(), name=name, payload=DATA.encode(None), at=store.now(), keep_until=store.now() + 7200
    )
    return await member.engine.part(Events).emit(replace(event, **fields))


async def settled(fleet: Fleet) -> None:
    """Nothing is left to tell, and all that was called has ended."""

    async def holds() -> bool:
        events = [from_entry(entry) for entry in await fleet.store.entries(APP, KIND)]
        joins = await fleet.store.entries(APP, JOINS, order=EntryOrder.DUE, limit=10)
        return (
            not any(record.outbox for record in fleet.store._of(APP))
            and not any(event.outbox for event in events)
            and not any(b'"firings"' in entry.body for entry in joins)
            and all(record.status in FINAL for record in fired(fleet))
        )

    await fleet.until(holds, 120)


@pytest.mark.parametrize("how", ["lost", "swallowed"])
@pytest.mark.parametrize("what", ["apply", "get", "insert", "entries", "put_entry"])
def test_a_lost_message_loses_and_doubles_nothing(what: str, how: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add, told, triggers=[trigger(), trigger(EVENT, name="told#2")])
        for _ in range(3):
            getattr(member.line, how)[what] = 1
            before = len(fired(fleet))
            await fleet.end(await fleet.submit("add", 1, 2))
            await fleet.until(lambda before=before: _more(fleet, before), 60)
        getattr(member.line, how)[what] = 1
        try:
            await emit(member)
        except StoreUnavailable:  # it may be there all the same, as with every write
            await emit(member)
        await settled(fleet)
        assert len(fired(fleet)) == 3 + len(await fleet.store.entries(APP, KIND))

    virtually(scenario)


async def _more(fleet: Fleet, before: int) -> bool:
    return len(fired(fleet)) > before


@pytest.mark.parametrize("where", ["get", "insert", "apply"])
def test_one_who_dies_right_after_the_end_leaves_it_to_the_others(where: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.started(add, told, triggers=[trigger()])
        await asyncio.sleep(3)
        await fleet.started(told, nap, triggers=[trigger()])
        id = await fleet.submit("add", 1, 2)

        def die() -> None:
            if any(record.id == id and record.status in FINAL for record in fleet.store._of(APP)):
                first.line.freeze()

        first.line.before[where] = die
        await fleet.end(id)
        await fleet.until(lambda: _more(fleet, 0), 60)
        fleet.members.remove(first)
        await settled(fleet)
        assert len(fired(fleet)) == 1
        assert first.line.is_frozen

    virtually(scenario)


def test_a_trigger_counts_everywhere_within_three_seconds() -> None:
    async def scenario(fleet: Fleet) -> None:
        old = await fleet.started(add)
        await fleet.end(await fleet.submit("add", 1, 1))
        for _ in range(3):
            await emit(old)
        await fleet.started(told, triggers=[trigger(), trigger(EVENT, name="told#2")])
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        await fleet.end(await fleet.submit("add", 1, 2))
        await emit(old)
        await settled(fleet)
        assert len(fired(fleet)) == 2

    virtually(scenario)


def test_the_copy_of_the_triggers_is_as_old_as_the_question_for_it() -> None:
    """The answer may have been on its way for long, and a trigger may have been stored meanwhile."""

    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        subscriptions, entries = member.engine.part(Subscriptions), fleet.store.entries

        async def slowly(*args: Any, **named: Any) -> Any:
            found = await entries(*args, **named)
            await asyncio.sleep(FRESH_SECONDS - 0.5)
            return found

        fleet.store.entries = slowly  # type: ignore[method-assign]
        await subscriptions.refresh()
        assert subscriptions.is_fresh
        await asyncio.sleep(0.6)
        assert not subscriptions.is_fresh

    virtually(scenario)


@pytest.mark.parametrize("seconds", [5.0, 15.0])
def test_a_key_is_free_again_when_its_event_is_not_kept_any_more(seconds: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        first = await emit(member, key="order 7", keep_until=fleet.clock.now() + 10.0)
        await asyncio.sleep(seconds)
        again = await emit(member, key="order 7")
        assert (again.id == first.id) == (seconds < 10.0)

    virtually(scenario)


def test_what_nobody_declares_any_more_rests_and_is_woken() -> None:
    async def scenario(fleet: Fleet) -> None:
        declares = await fleet.started(add, told, triggers=[trigger()])
        await fleet.started(add, told)
        await fleet.end(await fleet.submit("add", 1, 2))
        await settled(fleet)
        assert len(fired(fleet)) == 1
        await declares.stop()
        await asyncio.sleep(90)
        (entry,) = await fleet.store.entries(APP, "trigger")
        assert b'"retired_at":null' not in entry.body
        await fleet.end(await fleet.submit("add", 1, 2))
        await asyncio.sleep(5)
        assert len(fired(fleet)) == 1
        await fleet.started(add, told, triggers=[trigger()])
        await asyncio.sleep(3)
        await fleet.end(await fleet.submit("add", 1, 2))
        await settled(fleet)
        assert len(fired(fleet)) == 2

    virtually(scenario)


def test_a_version_that_a_crash_left_wrong_is_put_right() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add, told, triggers=[trigger()])
        (version,) = await fleet.store.entries(APP, VERSION_KIND)
        await fleet.store.put_entry(replace(version, version=version.version + 1, body=b'"wrong"'))
        await asyncio.sleep(90)
        (after,) = await fleet.store.entries(APP, VERSION_KIND)
        assert after.body == version.body

    virtually(scenario)


@pytest.mark.parametrize("how", ["lost", "swallowed"])
@pytest.mark.parametrize("what", ["insert", "put_entry", "entries", "remove_entry"])
def test_what_has_to_happen_together_fires_once_whatever_is_lost(what: str, how: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add, told, triggers=[trigger(ENDED, EVENT)])
        await fleet.end(await fleet.submit("add", 1, 2))
        await asyncio.sleep(5)
        getattr(member.line, how)[what] += 1
        try:
            await emit(member)
        except StoreUnavailable:
            await emit(member)
        await settled(fleet)
        assert len(fired(fleet)) == 1

    virtually(scenario)


BOTH = trigger(OnEvent(name="paid"), OnEvent(name="packed"))


def facts(fleet: Fleet, name: str, id: str) -> Facts:
    return Facts(source=Source(kind="event", id=id, name=name), at=fleet.clock.now(), payload={})


def waiting_in(entry: Entry) -> list[list[str]]:
    return [[each.source.id for each in group] for group in from_join(entry).members]


def test_what_fires_leaves_firings_that_others_have_completed_meanwhile() -> None:
    """They are in the same record, and whoever completed them may die before it has called anything."""

    async def scenario(fleet: Fleet) -> None:
        one, other = (fleet.engine(fleet.store).part(TriggerDispatcher) for _ in range(2))
        await one.put(BOTH, 0, [0], facts(fleet, "paid", "a1"))
        mine = await one.put(BOTH, 0, [1], facts(fleet, "packed", "b1"))
        await other.put(BOTH, 0, [0], facts(fleet, "paid", "a2"))
        await other.put(BOTH, 0, [1], facts(fleet, "packed", "b2"))  # and it dies
        assert mine is not None
        await one.clear(BOTH, mine)
        (entry,) = await fleet.store.entries(APP, JOINS)
        assert [[each.source.id for each in firing] for firing in from_join(entry).firings] == [["a2", "b2"]]

    virtually(scenario)


def test_a_join_that_is_made_anew_while_it_is_changed_keeps_what_waits_there() -> None:
    """It has the version that was read, and another content."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.engine(fleet.store).part(TriggerDispatcher).put(BOTH, 0, [0], facts(fleet, "paid", "old"))
        (before,) = await fleet.store.entries(APP, JOINS)
        line = Line(fleet.store)

        def made_anew() -> None:
            line.before.clear()
            body = before.body.replace(b"old", b"new")
            fleet.store._entries[APP, JOINS, before.name] = replace(before, body=body)

        line.before["put_entry"] = made_anew
        mine = fleet.engine(cast(Store, line)).part(TriggerDispatcher)
        await mine.put(BOTH, 0, [0], facts(fleet, "paid", "mine"))
        (after,) = await fleet.store.entries(APP, JOINS)
        assert waiting_in(after) == [["new", "mine"], []]

    virtually(scenario)


def test_a_trigger_that_cannot_be_read_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add, told, triggers=[trigger(), trigger(name="bad")])
        (bad,) = [entry for entry in await fleet.store.entries(APP, "trigger") if entry.name == "bad"]
        await fleet.store.put_entry(replace(bad, version=bad.version + 1, body=b"{}"))
        await asyncio.sleep(90)
        await fleet.end(await fleet.submit("add", 1, 2))
        await settled(fleet)
        assert len(fired(fleet)) == 1

    virtually(scenario)
    assert "the trigger 'bad' cannot be read" in caplog.text
