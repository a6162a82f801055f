"""The part of the conformance suite about limits: slots, waiters, and refused calls.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.model import changes, claims
from holdfast.model.changes import APPLIED, Change, apply_to, delivered
from holdfast.model.claims import Claim
from holdfast.model.limits import MAX_BLOCKED, Limit, Release, slot_of
from holdfast.model.records import InvocationRecord, lane_of
from holdfast.model.status import FINAL, OWNED, RELEASING, TABLE, Status
from holdfast.store.contract import Filter, Order, Store
from holdfast.testing.samples import ERROR, LANE, START, TASK, Stage, ids_of, invocation, raw_change, the, wish

KEY = "shop:send"
ONE, TWO, REFUSING = Limit(1), Limit(2), Limit(1, waits=False)
WAITING = Status.CONCURRENCY_CONTROLLED

Ids = list[str | None]


def limited(id: str, key: str = KEY, **fields: Any) -> InvocationRecord:
    return invocation(id, limit_key=key, **fields)


def bounded(operation: str, under: Limit = ONE, **fields: Any) -> Claim:
    """Make a claim by a worker that knows this limit of the task."""
    return wish(operation, limits={TASK: under}, **fields)


async def statuses(store: Store) -> dict[str, str]:
    return {record.id: record.status.value for record in await store.find("shop", Filter(), 1000)}


async def waiters(store: Store) -> list[str]:
    return sorted(record.id for record in await store.find("shop", Filter(statuses=frozenset({WAITING})), 1000))


async def holding(store: Store, id: str = "a", *, start: bool = True) -> InvocationRecord:
    """Insert an invocation that holds the only slot."""
    await store.insert([limited(id)])
    (record,) = (await store.claim(bounded(f"claim {id}", ids=(id,), start=start))).records
    return record


async def release(store: Store, key: str = KEY, operation: str = "release", at: float = START, **more: Any) -> Ids:
    wishes = [Release(limit_key=key, **more)]
    return ids_of(await store.release_waiters("shop", wishes, operation=operation, at=at))


ENDS: dict[str, Callable[[InvocationRecord], Change]] = {
    "completed": lambda r: changes.completed(r, result=b"r", operation="end", at=START),
    "failed": lambda r: changes.failed(r, error=ERROR, operation="end", at=START),
    "killed": lambda r: changes.killed(r, operation="end", at=START, why=""),
    "recovered": lambda r: changes.recovered(r, by="runner", operation="end", at=START, why=""),
    "recovered, once too often": lambda r: changes.recovered(
        r, by="runner", operation="end", at=START, why="", error=ERROR
    ),
    "parked": lambda r: changes.parked(r, fingerprint="f", operation="end", at=START, why=""),
    "handed back": lambda r: changes.handed_back(r, operation="end", at=START, why=""),
}


async def holders(store: Store, limit_key: str) -> Sequence[InvocationRecord]:
    return await store.find("shop", Filter(limit_key=limit_key), 100, order=Order.SLOT)


class LimitConformance:
    """See the module."""

    # --- taking a slot

    @pytest.mark.parametrize("start", [True, False])
    def test_a_limited_invocation_is_taken_with_a_slot(self, stage: Stage, start: bool) -> None:
        async def scenario(store: Store) -> None:
            before = limited("a")
            await store.insert([before])
            claim = bounded("op", start=start, at=START + 3)
            (got,) = (await store.claim(claim)).records
            assert got.slot == slot_of(KEY, 0)
            assert got == apply_to(claims.claimed(claim, before, got.slot), before) == await the(store)
            assert list(await holders(store, KEY)) == [got]

        stage.play(scenario)

    @pytest.mark.parametrize("limit", [1, 2, 10])
    def test_at_most_so_many_are_taken_and_the_others_wait(self, stage: Stage, limit: int) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(id) for id in "abcde"])
            taken: list[str | None] = []
            for turn in range(3):
                claimed = await store.claim(bounded(f"op {turn}", TWO, limit=limit))
                taken += ids_of(claimed.records)
            assert taken == ["a", "b"]
            assert (await store.claim(bounded("last", TWO, limit=limit))).next_due_at is None
            assert await waiters(store) == ["c", "d", "e"]
            assert ids_of(await holders(store, KEY)) == ["a", "b"]
            assert {record.slot for record in await holders(store, KEY)} == {f"{KEY}#0", f"{KEY}#1"}
            assert dict(await store.waiting_keys("shop")) == {KEY: 2}

        stage.play(scenario)

    def test_a_waiter_leaves_the_queue_but_keeps_its_place(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await holding(store)
            before = limited("b", priority=3, due_at=START - 5)
            await store.insert([before])
            claim = bounded("op", at=START + 3)
            assert await store.claim(claim) == claims.Claimed(())
            waiting = await the(store, "b")
            assert [line.status for line in waiting.history] == [Status.REGISTERED, WAITING]
            assert waiting == apply_to(claims.blocked(before, operation="op", at=START + 3, why=waiting.reason), before)
            assert KEY in waiting.reason
            assert (waiting.priority, waiting.due_at, waiting.owner, waiting.epoch) == (3, START - 5, None, 0)
            assert list(await store.lanes("shop")) == []

        stage.play(scenario)

    def test_keys_do_not_get_into_each_others_way(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            keys = [f"{KEY}|{n}" for n in range(3)]
            odd = [KEY, f"{KEY}#0", f"{KEY}#", f"{KEY}#0#0", f"{KEY}$"]
            records = [limited(f"{n}{turn}", key) for n, key in enumerate(keys + odd) for turn in range(2)]
            await store.insert(records)
            await store.insert([limited("z", app="other")])
            got = await store.claim(bounded("op", limit=100))
            assert ids_of(got.records) == [f"{n}0" for n in range(8)]
            assert dict(await store.waiting_keys("shop")) == dict.fromkeys(keys + odd, 1)
            within, below = (KEY, f"{KEY}!"), (f"{KEY}|", f"{KEY}" + "}")
            assert list(await store.waiting_keys("shop", [within], 2)) == [KEY]
            assert list(await store.waiting_keys("shop", [below], 2)) == keys[:2]
            assert sorted(await store.waiting_keys("shop", [below, within], 9)) == sorted([KEY, *keys])
            assert dict(await store.waiting_keys("shop", most=1)) == {KEY: 1}
            for n, key in enumerate(keys + odd):
                assert ids_of(await holders(store, key)) == [f"{n}0"]
            assert ids_of((await store.claim(bounded("2", app="other"))).records) == ["z"]
            assert dict(await store.waiting_keys("other")) == {}

        stage.play(scenario)

    def test_one_without_a_key_or_whose_task_has_no_limit_any_more_needs_no_slot(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a"), invocation("b"), limited("c", task="shop:free"), limited("d")])
            lanes = (LANE, lane_of("default", "shop:free"))
            got = await store.claim(bounded("op", lanes=lanes))
            assert [(record.id, record.slot) for record in got.records] == [
                ("a", None),
                ("b", None),
                ("c", None),
                ("d", f"{KEY}#0"),
            ]
            await store.insert([limited("e")])
            (free,) = (await store.claim(wish("no limits are known"))).records
            assert (free.id, free.slot) == ("e", None)

        stage.play(scenario)

    def test_holders_beyond_a_lowered_limit_count(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(id) for id in "abcde"])
            first = await store.claim(bounded("op 1", Limit(3)))
            assert ids_of(first.records) == ["a", "b", "c"]
            await store.apply([ENDS["completed"](first.records[0])])
            await store.insert([limited("f")])
            assert (await store.claim(bounded("op 2", TWO))).records == ()
            await store.apply([replace(ENDS["completed"](first.records[1]), operation="end b")])
            await store.insert([limited("g")])
            (got,) = (await store.claim(bounded("op 3", TWO))).records
            assert (got.id, got.slot) == ("g", f"{KEY}#0")

        stage.play(scenario)

    def test_what_is_blocked_does_not_starve_what_lies_behind_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(f"{n:03}", due_at=START - 9) for n in range(150)])
            await store.insert([invocation(f"free {n}") for n in range(3)])
            got = await store.claim(bounded("op", limit=3))
            assert ids_of(got.records) == ["000", "free 0", "free 1"]
            assert len(await waiters(store)) == 149
            assert ids_of((await store.claim(bounded("op 2", limit=1))).records) == ["free 2"]

        stage.play(scenario)

    def test_a_claim_that_is_not_through_says_that_there_is_more(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            count = MAX_BLOCKED * 2
            await store.insert([limited(f"{n:04}", due_at=START - 9) for n in range(count)])
            await store.insert([invocation("free")])
            taken: list[str | None] = []
            for turn in range(100):
                claimed = await store.claim(bounded(f"op {turn}", limit=5))
                taken += ids_of(claimed.records)
                if claimed.next_due_at is None:
                    break
                assert claimed.next_due_at <= START
            assert taken == ["0000", "free"]
            assert len(await waiters(store)) == count - 1
            assert {len(record.history) for record in await store.find("shop", Filter(), 9)} == {2, 3}

        stage.play(scenario)

    def test_priority_and_age_decide_which_waiter_gets_the_slot(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited("young"), limited("old", due_at=START - 9), limited("high", priority=5)])
            assert ids_of((await store.claim(bounded("op", TWO))).records) == ["high", "old"]

        stage.play(scenario)

    def test_a_claim_for_what_needs_no_slot_passes_over_what_does(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a"), invocation("b"), limited("c"), invocation("d"), limited("e")])
            first = await store.claim(bounded("op 1", limited=False, start=False))
            assert (ids_of(first.records), first.cut, first.next_due_at) == (["a", "b", "d"], True, None)
            assert await store.claim(bounded("op 2", limited=False)) == claims.Claimed((), cut=True)
            second = await store.claim(bounded("op 3", limit=1))
            assert (ids_of(second.records), second.cut) == (["c"], False)
            assert (await the(store, "e")).status is Status.REGISTERED

        stage.play(scenario)

    def test_a_claim_whose_answer_was_lost_finds_its_slots_again(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(id) for id in "abc"] + [limited("d", "other"), invocation("e")])
            claim = bounded("op", TWO, limit=4)
            first = await store.claim(claim)
            assert ids_of(first.records) == ["a", "b", "d", "e"]
            again = await store.claim(replace(claim, again=True))
            assert again.records == first.records
            assert await waiters(store) == ["c"]
            more = await store.claim(replace(claim, again=True, limit=9))
            assert more.records == first.records

        stage.play(scenario)

    # --- giving it back

    @pytest.mark.parametrize("name", ENDS)
    def test_a_slot_is_given_back_in_the_same_write(self, stage: Stage, name: str) -> None:
        async def scenario(store: Store) -> None:
            record = await holding(store)
            change = ENDS[name](record)
            assert list(await store.apply([change])) == [APPLIED]
            after = await the(store)
            assert after.slot is None
            assert after == apply_to(change, record)
            assert list(await holders(store, KEY)) == []
            await store.insert([limited("b", due_at=START - 1)])
            (heir,) = (await store.claim(bounded("next", limit=1))).records
            assert (heir.id, heir.slot) == ("b", record.slot)

        stage.play(scenario)

    @pytest.mark.parametrize("known_version", [True, False])
    def test_a_status_gives_back_the_slot_if_and_only_if_it_releases_the_owner(
        self, stage: Stage, known_version: bool
    ) -> None:
        """From the table, not from a list of names."""

        async def scenario(store: Store) -> None:
            for target in sorted(TABLE[Status.RUNNING].next):
                record = await holding(store, f"to {target}")
                version = record.version if known_version else None
                change = raw_change(record, target, operation=f"to {target}", epoch=1, version=version)
                assert list(await store.apply([change])) == [APPLIED]
                after = await the(store, record.id)
                assert (after.slot is None) == (target in RELEASING), target
                assert after == apply_to(change, record)
                if after.slot is not None:
                    free = raw_change(after, Status.RUNNING_RECOVERY, Status.REROUTED, operation=f"free {target}")
                    assert list(await store.apply([free])) == [APPLIED]

        stage.play(scenario)

    def test_a_pause_keeps_the_slot(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            running = await holding(store)
            pause = raw_change(running, Status.PAUSED, operation="pause", epoch=1)
            resume = raw_change(replace(running, status=Status.PAUSED), Status.RESUMED, operation="resume", epoch=1)
            for change in (pause, resume):
                await store.apply([change])
                await store.insert([limited(f"after {change.operation}")])
                assert (await store.claim(bounded(f"during {change.operation}"))).records == ()
            assert (await the(store)).slot == slot_of(KEY, 0)

        stage.play(scenario)

    def test_a_zombie_gives_nothing_back(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            zombie = await holding(store)
            await store.apply(
                [changes.recovered(zombie, by="runner", operation="recover", at=START, why="thought dead")]
            )
            (heir,) = (await store.claim(bounded("next", owner="runner/2"))).records
            await store.apply([changes.completed(zombie, result=b"late", operation="late", at=START)])
            assert list(await holders(store, KEY)) == [heir]
            await store.insert([limited("b")])
            assert (await store.claim(bounded("more"))).records == ()

        stage.play(scenario)

    # --- not waiting

    def test_a_refused_invocation_ends_and_names_the_holder(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited("a"), limited("b"), invocation("c")])
            got = await store.claim(bounded("op", REFUSING, owner="runner/7", limit=2))
            assert (ids_of(got.records), got.refused) == (["a", "c"], ("b",))
            refused = await the(store, "b")
            assert refused.status is Status.CONCURRENCY_CONTROLLED_FINAL
            assert "a on runner/7" in refused.reason
            assert KEY in refused.reason
            assert refused == apply_to(
                claims.refused(limited("b"), operation="op", at=START, why=refused.reason), limited("b")
            )
            assert dict(await store.waiting_keys("shop")) == {}

        stage.play(scenario)

    def test_a_refused_invocation_names_the_triggers_that_are_to_hear_of_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited("a"), limited("b")])
            wanted = bounded("op", REFUSING, refusal_outboxes={limited("b").task: ("t", "u"), "another": ("v",)})
            assert (await store.claim(wanted)).refused == ("b",)
            refused = await the(store, "b")
            assert (refused.outbox, (await the(store, "a")).outbox) == (("t", "u"), ())
            found = await store.find("shop", Filter(), 10, order=Order.OUTBOX, set_aside=True)
            assert [each.id for each in found] == ["b"]
            await store.apply([delivered(refused)])
            assert (await the(store, "b")).outbox == ()

        stage.play(scenario)

    @pytest.mark.parametrize("name", ["killed", "recovered", "handed back"])
    def test_what_was_claimed_once_waits_even_if_it_was_not_to(self, stage: Stage, name: str) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited("a")])
            (record,) = (await store.claim(bounded("op", REFUSING))).records
            await store.apply([ENDS[name](record)])
            await store.insert([limited("b", priority=5)])
            got = await store.claim(bounded("op 2", REFUSING))
            assert (ids_of(got.records), got.refused) == (["b"], ())
            assert await waiters(store) == ["a"]

        stage.play(scenario)

    # --- going on

    def test_the_longest_waiter_goes_on_first_at_its_old_place(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = await holding(store)
            await store.insert([limited("young"), limited("old", due_at=START - 9), limited("high", priority=5)])
            await store.claim(bounded("op"))
            assert await waiters(store) == ["high", "old", "young"]
            await store.apply([ENDS["completed"](first)])
            before = await the(store, "high")
            assert await release(store, at=START + 7, max_running=1) == ["high"]
            after = await the(store, "high")
            assert after == apply_to(claims.released(before, operation="release", at=START + 7), before)
            assert (after.status, after.due_at, after.priority) == (Status.REROUTED, START, 5)
            await store.insert([limited("new", priority=4)])
            (taken,) = (await store.claim(bounded("next", limit=1))).records
            assert taken.id == "high"
            for operation, expected in (("1", ["old"]), ("2", ["young"]), ("3", [])):
                assert await release(store, operation=operation) == expected

        stage.play(scenario)

    def test_only_as_many_go_on_as_there_are_free_slots(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(f"{n}") for n in range(9)])
            taken = (await store.claim(bounded("op", Limit(4)))).records
            assert ids_of(taken) == ["0", "1", "2", "3"]
            assert await release(store, count=9, max_running=4) == []
            ends = [replace(ENDS["completed"](record), operation=f"end {record.id}") for record in taken[:3]]
            await store.apply(ends)
            assert await release(store, count=2, max_running=4) == ["4", "5"]
            assert await release(store, operation="r2", count=9, max_running=2) == ["6"]
            assert await release(store, operation="r3", count=0, max_running=4) == []
            assert await release(store, operation="r4", count=9) == ["7", "8"]
            assert await release(store, "nobody waits for it", count=9) == []

        stage.play(scenario)

    def test_many_keys_are_released_in_one_go(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(f"{n}{turn}", f"k{n}") for n in range(4) for turn in range(3)])
            taken = (await store.claim(bounded("op", limit=99))).records
            assert ids_of(taken) == ["00", "10", "20", "30"]
            await store.apply([replace(ENDS["completed"](r), operation=f"end {r.id}") for r in taken[:3]])
            wishes = [Release(limit_key=key, max_running=1, count=5) for key in ("k0", "k2", "k3", "none")]
            released = await store.release_waiters("shop", wishes, operation="r", at=START)
            assert ids_of(released) == ["01", "21"]
            assert list(await store.release_waiters("shop", [], operation="r", at=START)) == []

        stage.play(scenario)

    def test_those_in_some_lanes_can_be_passed_over(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await holding(store)
            mail, fast = lane_of("mail", TASK), lane_of("fast", TASK)
            await store.insert([limited("m", queue="mail"), limited("n", queue="fast"), limited("o")])
            await store.claim(bounded("op", lanes=(LANE, mail, fast)))
            assert await release(store, without=frozenset({mail, fast})) == ["o"]
            assert await release(store, operation="2", without=frozenset({mail})) == ["n"]
            assert await release(store, operation="3", without=frozenset({mail})) == []
            assert await release(store, operation="4") == ["m"]

        stage.play(scenario)

    def test_a_released_waiter_that_finds_no_slot_waits_again(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await holding(store)
            await store.insert([limited("b", due_at=START - 2), limited("c", due_at=START - 1)])
            await store.claim(bounded("op"))
            assert await release(store) == ["b"]
            assert (await store.claim(bounded("op 2"))).records == ()
            assert await waiters(store) == ["b", "c"]
            assert await release(store, operation="2") == ["b"]

        stage.play(scenario)

    # --- in a crowd

    def test_claimers_at_once_never_share_a_slot(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([limited(f"{n:02}", f"k{n % 2}") for n in range(40)])
            ended: set[str] = set()
            for turn in range(200):
                claims = [bounded(f"{turn} {n}", TWO, limit=3, owner=f"runner/{n}") for n in range(6)]
                claims = [replace(each, start=(turn + n) % 3 > 0) for n, each in enumerate(claims)]
                await asyncio.gather(*[store.claim(each) for each in claims])
                owned = await store.find("shop", Filter(statuses=OWNED), 100)
                slots = [record.slot for record in owned]
                assert None not in slots
                assert len(slots) == len(set(slots)) <= 4
                ends = [_end(r, f"end {turn} {r.id}", done=turn % 4 > 0) for r in owned]
                await store.apply(ends)
                wishes = [Release(limit_key=f"k{n}", count=2, max_running=2) for n in range(2)]
                await store.release_waiters("shop", wishes, operation=f"r {turn}", at=START)
                ended = {id for id, status in (await statuses(store)).items() if Status(status) in FINAL}
                if len(ended) == 40:
                    break
            assert len(ended) == 40

        stage.play(scenario)


def _end(record: InvocationRecord, operation: str, *, done: bool) -> Change:
    if record.status is Status.RUNNING and done:
        return changes.completed(record, result=b"", operation=operation, at=START)
    return changes.killed(record, operation=operation, at=START, why="")
