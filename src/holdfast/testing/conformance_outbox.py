"""The part of the conformance suite about triggers: the origin of an invocation, and its outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.errors import InvocationStatusTransitionError
from holdfast.model import changes
from holdfast.model.changes import Applied, Lost
from holdfast.model.records import FOREVER, RETENTION_SECONDS, InvocationRecord, Origin, Source, Terms
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Ability, Filter, Order, Store
from holdfast.testing.samples import (
    ODD_NAMES,
    START,
    Stage,
    delivery,
    ids,
    ids_of,
    in_status,
    invocation,
    raw_change,
    the,
    wish,
)

_ORIGINS = [
    Origin(),
    Origin(trigger="paid", sources=(Source(kind="event", id="e1", name="order.paid"),), depth=1, path=("shop:pay",)),
    Origin(trigger="$set", sources=tuple(Source(kind="end", id=name) for name in ODD_NAMES), path=tuple(ODD_NAMES)),
]
_OVER = START + RETENTION_SECONDS + 60


async def end(store: Store, id: str, outbox: tuple[str, ...] = ("t",), *, at: float = START, **fields: Any) -> None:
    """Insert an invocation that ended at this time, with these triggers in its outbox."""
    await store.insert([invocation(id, **fields)])
    (claimed,) = (await store.claim(wish(f"claim {id}", app=fields.get("app", "shop"), ids=(id,)))).records
    change = changes.completed(claimed, result=b"r", operation=f"end {id}", at=at)
    await store.apply([replace(change, outbox=outbox) if outbox else change])


async def outboxes(store: Store, app: str, at: float, limit: int) -> Sequence[InvocationRecord]:
    """Return invocations with an outbox that ended by this time."""
    return await store.find(app, Filter(until=at + 0.5), limit, order=Order.OUTBOX, set_aside=True)


async def waiting(store: Store, before: float = START, limit: int = 10, app: str = "shop") -> list[str | None]:
    return ids_of(await outboxes(store, app, before, limit))


async def all_of(store: Store) -> set[str | None]:
    return set(ids_of(await store.find("shop", Filter(), 100)))


class OutboxConformance:
    @pytest.mark.parametrize("origin", [None, *_ORIGINS])
    def test_what_led_to_an_invocation_comes_back(self, stage: Stage, origin: Origin | None) -> None:
        async def write(store: Store) -> None:
            await store.insert([invocation("a", origin=origin)])
            assert (await the(store)).origin == origin
            (claimed,) = (await store.claim(wish())).records
            assert claimed.origin == origin
            await store.apply([changes.completed(claimed, result=b"r", operation="end", at=START)])

        async def read(store: Store) -> None:
            assert (await the(store)).origin == origin

        stage.play(write, read, needs=Ability.DURABLE)

    # --- the outbox

    @pytest.mark.parametrize("version", [None, 3], ids=["whatever its version", "of that version"])
    def test_every_end_can_leave_an_outbox(self, stage: Stage, version: int | None) -> None:
        async def scenario(store: Store) -> None:
            for status in sorted(FINAL - {Status.CONCURRENCY_CONTROLLED_FINAL}):
                await store.insert([invocation(status)])
                (record,) = (await store.claim(wish(f"claim {status}", ids=(status,)))).records
                path = (Status.CANCELLING, status) if status is Status.CANCELLED else (status,)
                how: dict[str, Any] = {"operation": f"end {status}", "epoch": 1, "version": version}
                change = raw_change(record, *path, outbox=tuple(ODD_NAMES), **how)
                assert await store.apply([change]) == [Applied()]
                ended = await the(store, status)
                assert (ended.status, ended.outbox) == (status, tuple(ODD_NAMES))
                assert ended.retain_until == START + 5 + RETENTION_SECONDS
                (verdict,) = await store.apply([change])
                assert isinstance(verdict, Applied)

        stage.play(scenario)

    def test_in_a_batch_each_has_its_own(self, stage: Stage) -> None:
        boxes: list[tuple[str, ...]] = [(), ("t",), ("t", "u"), (), ("v",)]

        async def write(store: Store) -> None:
            await store.insert([invocation(f"{number}") for number in range(len(boxes))])
            held = (await store.claim(wish())).records
            ends = [changes.completed(r, result=b"r", operation=f"end {r.id}", at=START) for r in held]
            told = [replace(end, outbox=box) if box else end for end, box in zip(ends, boxes, strict=True)]
            assert await store.apply(told) == [Applied()] * len(told)

        async def read(store: Store) -> None:
            there = [(await the(store, f"{number}")).outbox for number in range(len(boxes))]
            assert there == boxes
            assert [record.outbox for record in await outboxes(store, "shop", START, 10)] == [
                ("t",),
                ("t", "u"),
                ("v",),
            ]

        stage.play(write, read, needs=Ability.DURABLE)

    def test_a_lost_change_leaves_no_outbox(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await in_status(store, Status.RUNNING)
            change = changes.completed(replace(record, epoch=7), result=b"r", operation="end", at=START)
            (verdict,) = await store.apply([replace(change, outbox=("t",))])
            assert isinstance(verdict, Lost)
            assert (await the(store)).outbox == ()
            assert await waiting(store, START + 60) == []

        stage.play(scenario)

    def test_only_an_end_can_leave_an_outbox_and_it_is_not_empty(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await in_status(store, Status.RUNNING)
            over = changes.completed(record, result=b"r", operation="end", at=START)
            again = changes.killed(record, operation="kill", at=START, why="stop")
            for change, outbox in ((again, ("t",)), (again, ()), (over, ())):
                with pytest.raises(InvocationStatusTransitionError, match="outbox"):
                    replace(change, outbox=outbox)

        stage.play(scenario)

    def test_outboxes_come_oldest_end_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "c", at=START + 1)
            await end(store, "b", at=START + 2)
            await end(store, "a", at=START + 2)
            await end(store, "d", at=START + 3)
            await end(store, "none", ())
            await end(store, "x", app="another")
            await store.insert([invocation("live")])
            assert await waiting(store, START) == []
            assert await waiting(store, START + 2) == ["c", "a", "b"]
            assert await waiting(store, START + 9) == ["c", "a", "b", "d"]
            assert await waiting(store, START + 9, 2) == ["c", "a"]
            assert await waiting(store, START + 9, 0) == []
            assert await waiting(store, app="another") == ["x"]
            assert list(await outboxes(store, "shop", START + 1, 10)) == [await the(store, "c")]

        stage.play(scenario)

    def test_a_delivered_outbox_is_found_no_more(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for id in "abc":
                await end(store, id, ("t", "u"))
            await end(store, "a", app="another")
            before = await the(store, "a")
            await store.insert([invocation("live")])
            await store.apply([])
            await store.apply(delivery("a", "c", "live", "nobody"))
            await store.apply(delivery("a"))
            assert await waiting(store) == ["b"]
            assert await waiting(store, app="another") == ["a"]
            assert await the(store, "a") == replace(before, outbox=())
            assert (await the(store, "live")).status is Status.REGISTERED

        stage.play(scenario)

    # --- keeping it until then

    def test_an_invocation_with_an_outbox_is_not_removed(self, stage: Stage) -> None:
        async def removed(store: Store) -> list[int]:
            return [
                await store.remove_expired("shop", _OVER, 10),
                await store.remove_ended("shop", ids("kept")),
            ]

        async def scenario(store: Store) -> None:
            await end(store, "kept")
            await end(store, "over", ())
            assert await removed(store) == [1, 0]
            assert await all_of(store) == {"kept"}
            await store.apply(delivery("kept"))
            assert await removed(store) == [1, 0]
            assert await all_of(store) == set()

        stage.play(scenario)

    def test_a_delivered_invocation_can_be_removed_by_hand(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "a")
            await store.apply(delivery("a"))
            assert await store.remove_ended("shop", ids("a")) == 1
            assert await all_of(store) == set()

        stage.play(scenario)

    def test_invocations_with_an_outbox_do_not_block_the_removal_of_others(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(4):
                await end(store, f"{number}", ("t",) if number < 3 else (), at=START + number)
            assert await store.remove_expired("shop", _OVER, 2) == 1
            assert await all_of(store) == {"0", "1", "2"}

        stage.play(scenario)

    def test_an_invocation_kept_for_ever_stays_after_its_delivery(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "a", terms=Terms(retention={"success": None}))
            await store.apply(delivery("a"))
            assert (await the(store)).retain_until == FOREVER
            assert await store.remove_expired("shop", FOREVER - 1, 10) == 0

        stage.play(scenario)

    def test_the_whole_record_comes_along(self, stage: Stage) -> None:
        def of(records: list[InvocationRecord]) -> list[object]:
            return [(record.result, record.origin, record.outbox) for record in records]

        async def scenario(store: Store) -> None:
            await end(store, "a", ("t",), origin=_ORIGINS[1])
            assert of(list(await outboxes(store, "shop", START, 1))) == [(b"r", _ORIGINS[1], ("t",))]

        stage.play(scenario)
