"""The part of the conformance suite about attributes and notes of invocations.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model import changes, run_changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, Applied, Lost, NoteUpdate
from holdfast.model.notes import Notes
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Filter, Order, Store
from holdfast.testing.samples import (
    ATTRIBUTES,
    NOTES,
    RUN,
    START,
    Stage,
    again,
    ids,
    ids_of,
    invocation,
    owned,
    the,
    wish,
)

PACKED, ODD = ("stage", "packed"), ("a.b", "$set")


async def _having(store: Store, *pairs: tuple[str, str], order: Order = Order.NEWEST, **more: Any) -> list[Any]:
    return ids_of(await store.find("shop", Filter(attributes=frozenset(pairs), **more), 10, order=order))


def setting(record: InvocationRecord, attributes: dict[str, str], **other: Any) -> NoteUpdate:
    """Make an owner's write of attributes."""
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner} | other
    return NoteUpdate(app=record.app, id=record.id, attributes=attributes, **given)


def noting(record: InvocationRecord, notes: Notes | None, **other: Any) -> NoteUpdate:
    """Make an owner's write of notes."""
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner} | other
    return NoteUpdate(app=record.app, id=record.id, notes=notes, **given)


class AttributeConformance:
    """See the module."""

    def test_find_by_attributes_in_every_order(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            packed = {"stage": "packed"}
            given = {"a": packed, "b": {}, "c": ATTRIBUTES, "d": {"stage": "sent"}, "e": ATTRIBUTES, "f": packed}
            records = [
                invocation(id, attributes=some, task=f"t{id}", due_at=START + n)
                for n, (id, some) in enumerate(given.items())
            ]
            await store.insert([*records, invocation("x", app="other", attributes=ATTRIBUTES)])
            assert [(await the(store, id)).attributes for id in given] == list(given.values())
            assert await _having(store, PACKED) == ["f", "e", "c", "a"]
            assert await _having(store, PACKED, before_id="e") == ["c", "a"]
            assert await _having(store, PACKED, ODD) == ["e", "c"]
            assert await _having(store, ODD, ("日本", "😀=1"), before_id="e") == ["c"]
            assert await _having(store, ("stage", "PACKED")) == await _having(store, PACKED, ("stage", "sent")) == []
            assert await _having(store, PACKED, tasks=frozenset({"tc", "td"})) == ["c"]
            assert ids_of(await store.find("shop", Filter(attributes=frozenset({PACKED})), 2)) == ["f", "e"]
            lanes = tuple(record.lane for record in records)
            for record in (await store.claim(wish("some", lanes=lanes, limit=4, at=START + 9))).records:
                await store.apply([changes.completed(record, result=b"", operation=f"end {record.id}", at=START)])
            assert await _having(store, PACKED, order=Order.LATEST_END) == ["c", "a"]
            assert await _having(store, PACKED, statuses=frozenset({Status.SUCCESS})) == ["c", "a"]
            assert await _having(store, PACKED, statuses=frozenset({Status.REGISTERED, Status.RUNNING})) == ["f", "e"]
            await store.remove_ended("shop", ids("c"))
            assert await _having(store, PACKED) == ["f", "e", "a"]

        stage.play(scenario)

    def test_an_owner_replaces_attributes(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, attributes={"stage": "new"})
            update = setting(record, ATTRIBUTES)
            assert list(await store.apply([update, update])) == [APPLIED, APPLIED_AGAIN]
            assert await the(store) == replace(record, attributes=ATTRIBUTES), "no edge is walked"
            lost = Lost(Status.RUNNING, "runner/1", 1)
            wrong = [setting(record, {}, epoch=2), setting(record, {}, actor="runner/2")]
            assert list(await store.apply(wrong)) == [lost, lost]
            assert list(await store.apply([replace(update, id=InvocationId("nobody"))])) == [MISSING]
            assert await _having(store, ("stage", "new")) == []
            assert await _having(store, PACKED) == ["a"]
            assert list(await store.apply([setting(record, {})])) == [APPLIED]
            assert (await the(store)).attributes == {}
            assert await _having(store, PACKED) == []

        stage.play(scenario)

    def test_an_owner_replaces_notes(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, attributes={"stage": "new"})
            update = noting(record, NOTES)
            (first,) = await store.apply([update])
            assert first == APPLIED
            assert isinstance((await store.apply([update]))[0], Applied)
            assert await the(store) == replace(record, notes=NOTES), "no edge is walked"
            lost = Lost(Status.RUNNING, "runner/1", 1)
            wrong = [noting(record, None, epoch=2), noting(record, None, actor="runner/2")]
            assert list(await store.apply(wrong)) == [lost, lost]
            assert list(await store.apply([replace(update, id=InvocationId("nobody"))])) == [MISSING]
            assert (await the(store)).notes == NOTES
            both = noting(record, Notes(checkpoint=b"x"), attributes=ATTRIBUTES)
            assert list(await store.apply([both])) == [APPLIED]
            assert await the(store) == replace(record, notes=Notes(checkpoint=b"x"), attributes=ATTRIBUTES)
            assert await _having(store, PACKED) == ["a"]
            assert list(await store.apply([noting(record, None)])) == [APPLIED]
            assert (await the(store)).notes is None

        stage.play(scenario)

    def test_notes_of_many_are_one_write_and_each_stands_by_itself(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(id) for id in "abc"])
            records = (await store.claim(wish(limit=3))).records
            end = changes.completed(records[1], result=b"", operation="end", at=START)
            await store.apply([end])
            verdicts = await store.apply([noting(record, NOTES) for record in records])
            assert [isinstance(verdict, Applied) for verdict in verdicts] == [True, False, True]
            assert [(await the(store, record.id)).notes for record in records] == [NOTES, None, NOTES]

        stage.play(scenario)

    def test_an_end_carries_notes_and_none_comes_after_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            late = noting(record, Notes(checkpoint=b"late"))
            change = replace(again(record), notes=NOTES, attributes=ATTRIBUTES)
            verdicts = await store.apply([change, late])
            assert verdicts[0] == APPLIED
            assert verdicts[1] == Lost(Status.RETRY, None, 1)
            assert await the(store) == changes.apply_to(change, record)
            (second,) = (await store.claim(wish("again", at=START + 40))).records
            assert (second.notes, second.attributes) == (NOTES, ATTRIBUTES), "its next owner has them"
            assert list(await store.apply([late])) == [Lost(Status.RUNNING, second.owner, 2)]
            end = changes.completed(second, result=b"", operation="end", at=START + 1)
            assert list(await store.apply([end])) == [APPLIED]
            assert (await the(store)).notes == NOTES, "an end without notes leaves them"

        stage.play(scenario)

    def test_a_run_is_let_go_with_its_attributes(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, run=RUN, attributes={"stage": "new"})
            facts: dict[str, Any] = {"operation": "suspend", "at": START, "why": "", "wake_at": None}
            change = run_changes.suspended(record, RUN, attributes=ATTRIBUTES, **facts)
            assert list(await store.apply([change])) == [APPLIED]
            assert await the(store) == changes.apply_to(change, record)
            assert await _having(store, PACKED, ODD) == ["a"]
            assert await _having(store, ("stage", "new")) == []

        stage.play(scenario)

    def test_attributes_outlive_the_process(self, stage: Stage) -> None:
        async def write(store: Store) -> None:
            await store.insert([invocation("a", attributes=ATTRIBUTES, notes=NOTES), invocation("b")])

        async def read(store: Store) -> None:
            assert await _having(store, ODD) == ["a"]
            assert (await the(store, "a")).attributes == ATTRIBUTES
            assert (await the(store, "a")).notes == NOTES
            assert (await the(store, "b")).attributes == {}

        stage.play(write, read, needs=Ability.DURABLE)
