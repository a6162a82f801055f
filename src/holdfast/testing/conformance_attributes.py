"""The part of the conformance suite about attributes of invocations.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model import changes, run_changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, AttributeUpdate, Lost
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Filter, Order, Store
from holdfast.testing.samples import ATTRIBUTES, RUN, START, Stage, ids, ids_of, invocation, owned, the, wish

PACKED, ODD = ("stage", "packed"), ("a.b", "$set")


async def _having(store: Store, *pairs: tuple[str, str], order: Order = Order.NEWEST, **more: Any) -> list[Any]:
    return ids_of(await store.find("shop", Filter(attributes=frozenset(pairs), **more), 10, order=order))


def setting(record: InvocationRecord, attributes: dict[str, str], **other: Any) -> AttributeUpdate:
    """Make an owner's write of attributes."""
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner} | other
    return AttributeUpdate(app=record.app, id=record.id, attributes=attributes, **given)


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
            await store.insert([invocation("a", attributes=ATTRIBUTES), invocation("b")])

        async def read(store: Store) -> None:
            assert await _having(store, ODD) == ["a"]
            assert (await the(store, "a")).attributes == ATTRIBUTES
            assert (await the(store, "b")).attributes == {}

        stage.play(write, read, needs=Ability.DURABLE)
