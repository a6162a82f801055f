"""What every store must do so that one key is one invocation, and one of a kind waits."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import APPLIED
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Store
from holdfast.testing.samples import ERROR, ODD_NAMES, START, TASK, Stage, ids_of, invocation, the, wish

_KEYED: dict[str, Any] = {"key": "order 7"}
_TWIN: dict[str, Any] = {"twin": f"{TASK}|digest"}


async def ended(store: Store, id: str) -> InvocationRecord:
    (record,) = (await store.claim(wish(f"claim {id}", ids=(id,)))).records
    await store.apply([changes.completed(record, result=b"r", operation=f"end {id}", at=START + 1)])
    return await the(store, id)


class IdentityConformance:
    def test_a_key_is_taken_once_whatever_becomes_of_its_call(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, second = invocation("a", **_KEYED), invocation("b", **_KEYED)
            assert list(await store.insert([first])) == [True]
            assert list(await store.insert([first])) == [True]  # an earlier try of the same
            assert list(await store.insert([second, invocation("c")])) == [False, True]
            assert ids_of(await store.in_the_way([second, invocation("d")])) == ["a", None]
            await ended(store, "a")
            assert list(await store.insert([second])) == [False]
            assert (await the(store, "a")).key == "order 7"
            assert ids_of(await store.get("shop", ["b"])) == [None]

        stage.play(scenario)

    def test_a_key_belongs_to_a_task_of_an_app(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            apps = ["shop", *ODD_NAMES]
            for app in apps:
                mine = [invocation("a", app=app, **_KEYED), invocation("b", app=app, task="mail:other", **_KEYED)]
                assert list(await store.insert(mine)) == [True, True]
            for app in apps:
                wanted = [invocation("c", app=app, task="mail:other", **_KEYED)]
                assert ids_of(await store.in_the_way(wanted)) == ["b"]

        stage.play(scenario)

    def test_a_key_that_is_freed_may_be_taken_by_another(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_KEYED)])
            before = await ended(store, "a")
            await store.free_key("shop", "a", "another")  # it does not have that one
            assert await the(store, "a") == before
            for _ in range(2):
                await store.free_key("shop", "a", "order 7")
            assert (await the(store, "a")).key is None
            assert list(await store.insert([invocation("b", **_KEYED)])) == [True]
            await store.free_key("shop", "a", "order 7")  # not that of the new one
            assert (await the(store, "b")).key == "order 7"
            assert ids_of(await store.in_the_way([invocation("c", **_KEYED)])) == ["b"]

        stage.play(scenario)

    def test_of_many_who_take_a_key_at_once_one_gets_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for turn in range(5):
                wanted = [invocation(f"{turn} {n}", key=f"key {turn}") for n in range(8)]
                got = await asyncio.gather(*[store.insert([record]) for record in wanted])
                assert sorted(ours for (ours,) in got) == [False] * 7 + [True]
                winner = next(record.id for record, (ours,) in zip(wanted, got, strict=True) if ours)
                assert set(ids_of(await store.in_the_way(wanted))) == {winner}

        stage.play(scenario)

    def test_one_of_a_kind_waits_for_its_first_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, second = invocation("a", **_TWIN), invocation("b", **_TWIN)
            assert list(await store.insert([first, invocation("other", twin="another")])) == [True, True]
            assert list(await store.insert([second])) == [False]
            assert ids_of(await store.in_the_way([second])) == ["a"]
            (claimed,) = (await store.claim(wish(ids=("a",)))).records
            assert claimed.twin is None
            assert list(await store.insert([second])) == [True]
            await store.apply([changes.killed(claimed, operation="kill", at=START, why="")])
            assert (await the(store, "a")).twin is None  # it is back in the queue, but has had its start
            assert ids_of(await store.in_the_way([invocation("c", **_TWIN)])) == ["b"]

        stage.play(scenario)

    def test_who_is_reserved_or_ends_without_a_start_has_no_twin(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_TWIN)])
            (reserved,) = (await store.claim(wish("reserve", ids=("a",), start=False))).records
            assert reserved.twin is None
            limit = {TASK: Limit(1, waits=False)}
            await store.insert([invocation("h", limit_key="k")])
            await store.claim(wish("hold", ids=("h",), limits=limit))
            await store.insert([invocation("b", limit_key="k", **_TWIN)])
            assert (await store.claim(wish("refuse", ids=("b",), limits=limit))).refused == ("b",)
            refused = await the(store, "b")
            assert (refused.status, refused.twin) == (Status.CONCURRENCY_CONTROLLED_FINAL, None)
            assert list(await store.insert([invocation("c", **_TWIN)])) == [True]

        stage.play(scenario)

    def test_who_waits_for_a_slot_still_waits_for_its_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            limit = {TASK: Limit(1)}
            await store.insert([invocation("h", limit_key="k"), invocation("a", limit_key="k", **_TWIN)])
            await store.claim(wish("hold", ids=("h",), limits=limit))
            await store.claim(wish("block", ids=("a",), limits=limit))
            assert (await the(store, "a")).status is Status.CONCURRENCY_CONTROLLED
            assert list(await store.insert([invocation("b", **_TWIN)])) == [False]

        stage.play(scenario)

    def test_a_failed_attempt_keeps_its_key_and_has_no_twin(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_KEYED, **_TWIN)])
            (record,) = (await store.claim(wish(ids=("a",)))).records
            again = changes.retried(
                record, error=ERROR, due_at=START + 9, queue=None, operation="again", at=START, why="w"
            )
            assert list(await store.apply([again])) == [APPLIED]
            kept = await the(store, "a")
            assert (kept.key, kept.twin) == ("order 7", None)

        stage.play(scenario)
