"""The part of the conformance suite about idempotency keys and dedup keys."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from holdfast.codec import Codec, SizeLimits
from holdfast.model import changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, Lost
from holdfast.model.limits import Limit, Release
from holdfast.model.pacing import amended
from holdfast.model.records import LONGEST, InvocationRecord, Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.store.contract import Store
from holdfast.testing.samples import ERROR, ODD_NAMES, START, TASK, Stage, freeing, ids, ids_of, invocation, the, wish

_KEYED: dict[str, Any] = {"key": "order 7"}
_DEDUP: dict[str, Any] = {"dedup_key": f"{TASK}|digest"}


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
            assert ids_of(await store.find_conflicts([second, invocation("d")])) == ["a", None]
            await ended(store, "a")
            assert list(await store.insert([second])) == [False]
            assert (await the(store, "a")).key == "order 7"
            assert ids_of(await store.get("shop", ids("b"))) == [None]

        stage.play(scenario)

    def test_a_key_belongs_to_a_task_of_an_app(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            apps = ["shop", *ODD_NAMES]
            for app in apps:
                mine = [invocation("a", app=app, **_KEYED), invocation("b", app=app, task="mail:other", **_KEYED)]
                assert list(await store.insert(mine)) == [True, True]
            for app in apps:
                wanted = [invocation("c", app=app, task="mail:other", **_KEYED)]
                assert ids_of(await store.find_conflicts(wanted)) == ["b"]

        stage.play(scenario)

    def test_a_key_that_is_freed_may_be_taken_by_another(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_KEYED)])
            before = await ended(store, "a")
            await store.apply([freeing("a", "another")])  # it does not have that one
            assert await the(store, "a") == before
            for _ in range(2):
                await store.apply([freeing("a", "order 7")])
            assert (await the(store, "a")).key is None
            assert list(await store.insert([invocation("b", **_KEYED)])) == [True]
            await store.apply([freeing("a", "order 7")])  # not that of the new one
            assert (await the(store, "b")).key == "order 7"
            assert ids_of(await store.find_conflicts([invocation("c", **_KEYED)])) == ["b"]

        stage.play(scenario)

    def test_of_many_submitters_of_one_key_one_gets_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for turn in range(5):
                wanted = [invocation(f"{turn} {n}", key=f"key {turn}") for n in range(8)]
                got = await asyncio.gather(*[store.insert([record]) for record in wanted])
                assert sorted(ours for (ours,) in got) == [False] * 7 + [True]
                winner = next(record.id for record, (ours,) in zip(wanted, got, strict=True) if ours)
                assert set(ids_of(await store.find_conflicts(wanted))) == {winner}

        stage.play(scenario)

    def test_one_of_a_kind_waits_for_its_first_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, second = invocation("a", **_DEDUP), invocation("b", **_DEDUP)
            assert list(await store.insert([first, invocation("other", dedup_key="another")])) == [True, True]
            assert list(await store.insert([second])) == [False]
            assert ids_of(await store.find_conflicts([second])) == ["a"]
            (claimed,) = (await store.claim(wish(ids=("a",)))).records
            assert claimed.dedup_key is None
            assert list(await store.insert([second])) == [True]
            await store.apply([changes.killed(claimed, operation="kill", at=START, why="")])
            assert (await the(store, "a")).dedup_key is None  # it is back in the queue, but has had its start
            assert ids_of(await store.find_conflicts([invocation("c", **_DEDUP)])) == ["b"]

        stage.play(scenario)

    def test_a_reserved_or_never_started_invocation_has_no_dedup_key(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_DEDUP)])
            (reserved,) = (await store.claim(wish("reserve", ids=("a",), start=False))).records
            assert reserved.dedup_key is None
            limit = {TASK: Limit(1, waits=False)}
            await store.insert([invocation("h", limit_key="k")])
            await store.claim(wish("hold", ids=("h",), limits=limit))
            await store.insert([invocation("b", limit_key="k", **_DEDUP)])
            assert (await store.claim(wish("refuse", ids=("b",), limits=limit))).refused == ("b",)
            refused = await the(store, "b")
            assert (refused.status, refused.dedup_key) == (Status.CONCURRENCY_CONTROLLED_FINAL, None)
            assert list(await store.insert([invocation("c", **_DEDUP)])) == [True]

        stage.play(scenario)

    def test_an_invocation_waiting_for_a_slot_has_not_started(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            limit = {TASK: Limit(1)}
            await store.insert([invocation("h", limit_key="k"), invocation("a", limit_key="k", **_DEDUP)])
            await store.claim(wish("hold", ids=("h",), limits=limit))
            await store.claim(wish("block", ids=("a",), limits=limit))
            assert (await the(store, "a")).status is Status.CONCURRENCY_CONTROLLED
            assert list(await store.insert([invocation("b", **_DEDUP)])) == [False]

        stage.play(scenario)

    def test_a_failed_attempt_keeps_its_key_and_has_no_dedup_key(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_KEYED, **_DEDUP)])
            (record,) = (await store.claim(wish(ids=("a",)))).records
            again = changes.retried(
                record, error=ERROR, due_at=START + 9, queue=None, operation="again", at=START, why="w"
            )
            assert list(await store.apply([again])) == [APPLIED]
            kept = await the(store, "a")
            assert (kept.key, kept.dedup_key) == ("order 7", None)

        stage.play(scenario)

    # --- one that waits is called as a later one would have been

    def test_what_waits_can_be_given_other_arguments_and_another_time(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", arguments=b"one", **_DEDUP)])
            before = await the(store, "a")
            change = amended(before, later("2", b"two"), due_at=START + 30)
            for verdict in (APPLIED, APPLIED_AGAIN):
                assert list(await store.apply([change])) == [verdict]
                after = await the(store, "a")
                assert after == changes.apply_to(change, before)
            assert (after.arguments, after.due_at, after.status, after.dedup_key) == (
                b"two",
                START + 30,
                before.status,
                _DEDUP["dedup_key"],
            )
            assert [(line.version, line.status) for line in after.history] == [(1, "registered"), (2, "registered")]
            early = await store.claim(wish("early", ids=("a",)))
            assert early.records == ()
            (claimed,) = (await store.claim(wish("late", ids=("a",), at=START + 30))).records
            assert (claimed.arguments, claimed.epoch, claimed.version) == (b"two", 1, 4)

        stage.play(scenario)

    def test_what_was_claimed_keeps_its_arguments(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", arguments=b"one", **_DEDUP)])
            change = amended(await the(store, "a"), later("2", b"two"), due_at=START + 30)
            (claimed,) = (await store.claim(wish(ids=("a",)))).records
            (verdict,) = await store.apply([change])
            assert verdict == Lost(Status.RUNNING, claimed.owner, 1)
            await store.apply([changes.killed(claimed, operation="kill", at=START, why="")])
            (verdict,) = await store.apply([change])
            assert isinstance(verdict, Lost)  # it is back in the queue, but has had its start
            assert (await the(store, "a")).arguments == b"one"
            assert list(await store.apply([replace(change, id="nobody")])) == [MISSING]

        stage.play(scenario)

    def test_of_claim_and_amendment_one_comes_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for turn in range(10):
                id, dedup_key = f"a{turn}", f"{TASK}|{turn}"
                await store.insert([invocation(id, arguments=b"one", dedup_key=dedup_key)])
                change = amended(await the(store, id), later(f"amend {turn}", b"two"), due_at=START)
                claimed, (verdict,) = await asyncio.gather(
                    store.claim(wish(f"claim {turn}", ids=(id,))), store.apply([change])
                )
                ran = {record.arguments for record in claimed.records}
                assert ran == ({b"two"} if verdict == APPLIED else {b"one"})

        stage.play(scenario)

    def test_an_invocation_waiting_for_a_slot_can_be_amended(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            limit = {TASK: Limit(1)}
            await store.insert([invocation("h", limit_key="k"), invocation("a", limit_key="k", **_DEDUP)])
            (holder,) = (await store.claim(wish("hold", ids=("h",), limits=limit))).records
            await store.claim(wish("block", ids=("a",), limits=limit))
            waiting = await the(store, "a")
            assert list(await store.apply([amended(waiting, later("2", b"two"), due_at=START + 5)])) == [APPLIED]
            await store.apply([changes.completed(holder, result=b"", operation="end", at=START)])
            (free,) = await store.release_waiters(
                "shop", [Release(limit_key="k", count=1, max_running=1)], operation="release", at=START
            )
            assert (free.status, free.arguments, free.due_at) == (Status.REROUTED, b"two", START + 5)
            assert list(await store.apply([amended(free, later("3", b"three"), due_at=START + 6)])) == [APPLIED]
            (claimed,) = (await store.claim(wish("run", ids=("a",), limits=limit, at=START + 6))).records
            assert claimed.arguments == b"three"

        stage.play(scenario)

    def test_thousands_of_amendments_do_not_grow_without_end(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", **_DEDUP)])
            expected = await the(store, "a")
            for number in range(LONGEST + 5):
                change = amended(expected, later(f"amend {number}", b"%d" % number), due_at=START)
                assert list(await store.apply([change])) == [APPLIED]
                expected = changes.apply_to(change, expected)
            there = await the(store, "a")
            assert there == expected
            assert len(there.history) <= LONGEST
            assert there.history[0].version == 1
            assert there.version == LONGEST + 6
            (claimed,) = (await store.claim(wish(ids=("a",)))).records
            await store.apply([changes.completed(claimed, result=b"r", operation="end", at=START)])
            assert (await the(store, "a")).status is Status.SUCCESS

        stage.play(scenario)

    def test_an_amended_one_refers_to_its_own_payloads_only(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, second = (
                Codec().pack_call((b"x" * 100 + end,), {}, (), SizeLimits(50, 1000)) for end in (b"1", b"2")
            )
            digests = [packed.payloads[0].digest for packed in (first, second)]
            for packed in (first, second):
                (payload,) = packed.payloads
                piece = StoredPayload(
                    digest=payload.digest, size=len(payload.data), pieces=1, first=Piece(payload.data)
                )
                await store.put_payloads("shop", [piece])
            await store.insert([invocation("a", arguments=first.data, **_DEDUP)])
            change = amended(await the(store, "a"), later("2", second.data), due_at=START)
            assert list(await store.apply([change])) == [APPLIED]
            assert (await store.collect_payloads("shop", store.now() + 1e6, 100)).removed == 1
            left = [await store.get_payload("shop", digest) is not None for digest in digests]
            assert left == [False, True]

        stage.play(scenario)


def later(operation: str, arguments: bytes) -> InvocationRecord:
    """Make a call that debounces another."""
    return invocation("later", operation=operation, arguments=arguments)
