"""The part of the conformance suite about rates: buckets, starts, and calls that wait for theirs.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.decoding import RATE
from holdfast.model.limits import Limit, Release
from holdfast.model.rates import Bucket, Rate, bucket_of, rate_key, rate_of
from holdfast.model.records import InvocationRecord, RunState, Terms, lane_of
from holdfast.model.status import Status
from holdfast.store.contract import Filter, Store
from holdfast.testing.samples import ERROR, LANE, START, TASK, Stage, ids_of, invocation, the, wish

KEY = rate_key(TASK)
SECOND, PAIR = rate_of("1/s"), rate_of("1/s", 2)
WAITING = Status.CONCURRENCY_CONTROLLED
NEXT = 1.05  # seconds until the second start: an interval and the guard


def rated(id: str, key: str = KEY, **fields: Any) -> InvocationRecord:
    given: dict[str, Any] = {"limit_key": key, "terms": Terms(rate_key=key)} | fields
    return invocation(id, **given)


def paced(operation: str, rate: Rate = SECOND, **fields: Any) -> Claim:
    """Make a claim by a worker that knows this rate of the task."""
    return wish(operation, rates={TASK: rate}, **fields)


async def bucket(store: Store, key: str = KEY) -> Bucket:
    (entry,) = await store.entries("shop", RATE, [key])
    return bucket_of(entry)


async def waiters(store: Store) -> list[str]:
    return sorted(record.id for record in await store.find("shop", Filter(statuses=frozenset({WAITING})), 1000))


class RateConformance:
    """See the module."""

    def test_so_many_start_at_once_and_each_takes_a_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abcde"])
            got = await store.claim(paced("op", PAIR))
            assert ids_of(got.records) == ["a", "b"]
            assert [record.slot for record in got.records] == [None, None]
            there = await bucket(store)
            assert (there.taken, there.left(START), there.waiting) == (2, 0, True)
            assert [id for id, _ in there.last] == ["b", "a"]
            assert got.start_at == pytest.approx(START + NEXT)

        stage.play(scenario)

    def test_the_next_one_falls_due_at_its_start_and_others_wait_outside_the_queue(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abcd"])
            await store.claim(paced("op"))
            due = await the(store, "b")
            assert due.status is Status.REROUTED
            assert due.due_at == pytest.approx(START + NEXT)
            assert [line.status for line in due.history] == [Status.REGISTERED, WAITING, Status.REROUTED]
            assert "1/s" in due.reason
            assert await waiters(store) == ["c", "d"]
            early = await store.claim(paced("early", at=START + 1))
            assert early.records == ()
            assert early.next_due_at == pytest.approx(START + NEXT)

        stage.play(scenario)

    def test_each_start_lets_the_next_waiter_go_on(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abcd"])
            taken, at = [], START
            for turn in range(4):
                got = await store.claim(paced(f"op {turn}", at=at))
                taken.append((ids_of(got.records), round(at - START, 2)))
                at = (await bucket(store)).next_at()
            assert taken == [(["a"], 0), (["b"], 1.05), (["c"], 2.1), (["d"], 3.15)]
            assert await waiters(store) == []
            found = await store.find("shop", Filter(), 9)
            assert max(len(record.history) for record in found) <= 5

        stage.play(scenario)

    def test_the_calls_of_the_next_second_are_in_the_queue_each_at_its_time(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(f"{n:02}") for n in range(30)])
            got = await store.claim(paced("op", rate_of("10/s", 5)))
            assert len(got.records) == 5
            dues = [(await the(store, f"{n:02}")).due_at - START for n in range(5, 14)]
            assert dues == [pytest.approx(0.15 + 0.1 * n, abs=1e-4) for n in range(9)]
            assert len(await waiters(store)) == 16

        stage.play(scenario)

    def test_a_bucket_fills_up_to_its_burst(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(f"a{n}") for n in range(2)])
            await store.claim(paced("op", PAIR))
            await store.insert([rated(f"b{n}", at=START + 100) for n in range(5)])
            got = await store.claim(paced("op 2", PAIR, at=START + 100))
            assert ids_of(got.records) == ["b0", "b1"]

        stage.play(scenario)

    def test_keys_have_a_bucket_each(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            keys = [rate_key(TASK, digest) for digest in ("a", "b", "a|", "#0")] + [rate_key("other")]
            await store.insert([rated(f"{n}{turn}", key) for n, key in enumerate(keys) for turn in range(2)])
            got = await store.claim(paced("op", limit=100))
            assert ids_of(got.records) == [f"{n}0" for n in range(5)]
            assert [(await bucket(store, key)).taken for key in keys] == [1] * 5

        stage.play(scenario)

    def test_other_calls_cost_no_bucket(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a"), rated("b", task="shop:free")])
            got = await store.claim(paced("op", lanes=(LANE, lane_of("default", "shop:free"))))
            assert sorted(record.id for record in got.records) == ["a", "b"]
            assert list(await store.entries("shop", RATE)) == []

        stage.play(scenario)

    def test_what_waits_does_not_starve_what_lies_behind_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(f"{n:03}", due_at=START - 9) for n in range(150)])
            await store.insert([invocation(f"free {n}") for n in range(3)])
            got = await store.claim(paced("op", limit=3))
            assert ids_of(got.records) == ["000", "free 0", "free 1"]
            assert ids_of((await store.claim(paced("op 2", limit=1))).records) == ["free 2"]

        stage.play(scenario)

    def test_a_new_call_does_not_overtake_those_that_wait(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abc"])
            await store.claim(paced("op"))
            order = []
            for turn in range(1, 6):
                at = (await bucket(store)).next_at()
                await store.insert([rated(f"new {turn}", at=at - 0.01)])
                got = await store.claim(paced(f"early {turn}", at=at - 0.01))
                got = await store.claim(paced(f"op {turn}", at=at))
                order += ids_of(got.records)
            assert order == ["b", "c", "new 1", "new 2", "new 3"]

        stage.play(scenario)

    def test_a_higher_priority_goes_first_after_what_is_on_its_way(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            slow = rate_of("6/m")
            await store.insert([rated(id, at=START + n / 10) for n, id in enumerate("abcd")])
            await store.claim(paced("op", slow, at=START + 1))
            at = (await bucket(store)).next_at()
            await store.insert([rated("high", priority=5, at=at)])
            order = []
            for turn in range(4):
                order += ids_of((await store.claim(paced(f"op {turn}", slow, at=at))).records)
                at = (await bucket(store)).next_at()
            assert order == ["b", "high", "c", "d"]

        stage.play(scenario)

    def test_a_call_that_is_taken_over_takes_a_start_again(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated("a")])
            (record,) = (await store.claim(paced("op"))).records
            await store.apply([changes.recovered(record, by="runner", operation="end", at=START, why="dead")])
            assert (await store.claim(paced("op 2", owner="other/1"))).records == ()
            (again,) = (await store.claim(paced("op 3", owner="other/1", at=START + NEXT))).records
            assert (again.id, again.epoch, (await bucket(store)).taken) == ("a", 2, 2)

        stage.play(scenario)

    def test_a_run_that_has_started_takes_no_other_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated("a", run=RunState())])
            (record,) = (await store.claim(paced("op"))).records
            await store.apply([changes.recovered(record, by="runner", operation="end", at=START, why="dead")])
            assert ids_of((await store.claim(paced("op 2"))).records) == ["a"]
            assert (await bucket(store)).taken == 1

        stage.play(scenario)

    def test_a_claim_whose_answer_was_lost_takes_no_second_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abc"])
            claim = paced("op", PAIR, limit=2)
            first = await store.claim(claim)
            again = await store.claim(replace(claim, again=True))
            assert again.records == first.records
            assert (await bucket(store)).taken == 2

        stage.play(scenario)

    def test_claims_at_the_same_time_take_no_more_than_there_is(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            ten = rate_of("1/s", 10)
            await store.insert([rated(f"{n:03}") for n in range(60)])
            asked = [store.claim(paced(f"op {n}", ten, limit=4, owner=f"runner/{n}")) for n in range(8)]
            got: list[str | None] = [
                record.id for claimed in await asyncio.gather(*asked) for record in claimed.records
            ]
            for turn in range(5):
                got += ids_of((await store.claim(paced(f"last {turn}", ten))).records)
            there = await bucket(store)
            assert len(got) == len(set(got)) <= there.taken == 10
            running = await store.find("shop", Filter(statuses=frozenset({Status.RUNNING})), 100)
            assert {record.id for record in running} == set(got)

        stage.play(scenario)

    def test_a_claim_ahead_passes_over_what_needs_a_start(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a"), rated("b"), invocation("c")])
            ahead = await store.claim(paced("op", limited=False, start=False))
            assert (ids_of(ahead.records), ahead.cut) == (["a", "c"], True)
            assert list(await store.entries("shop", RATE)) == []

        stage.play(scenario)

    def test_a_call_that_is_not_to_wait_is_refused(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "ab"])
            got = await store.claim(paced("op", rate_of("1/s", waits=False)))
            assert (ids_of(got.records), list(got.refused)) == (["a"], ["b"])
            refused = await the(store, "b")
            assert (refused.status, "1/s" in refused.reason) == (Status.CONCURRENCY_CONTROLLED_FINAL, True)

        stage.play(scenario)

    def test_a_call_under_a_limit_and_a_rate_needs_both(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            both = [rated(id, limit_key=TASK, terms=Terms(rate_key=KEY)) for id in "abcd"]
            await store.insert(both)
            claim = paced("op", PAIR, limits={TASK: Limit(1)})
            (first,) = (await store.claim(claim)).records
            assert (first.slot, (await bucket(store)).taken) == (f"{TASK}#0", 1)
            assert await waiters(store) == ["b", "c", "d"]
            end = changes.failed(first, error=ERROR, operation="end", at=START)
            await store.apply([end])
            (gone,) = await store.release_waiters(
                "shop", [Release(limit_key=TASK, max_running=1)], operation="go", at=START
            )
            (second,) = (await store.claim(replace(claim, operation="op 2"))).records
            assert (gone.id, second.id, (await bucket(store)).left(START)) == ("b", "b", 0)

        stage.play(scenario)

    def test_another_rate_counts_the_starts_that_were_used(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abc"])
            assert len((await store.claim(paced("op", rate_of("1/h")))).records) == 1
            assert (await store.claim(paced("op 2", rate_of("10/s", 1), at=START + 0.1))).records == ()
            assert len((await store.claim(paced("op 3", rate_of("10/s", 1), ids=("c",), at=START + 9))).records) <= 1
            assert (await bucket(store)).text == "1/h"

        stage.play(scenario)

    def test_released_waiters_fall_due_when_they_are_told(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated(id) for id in "abcde"])
            await store.claim(paced("op"))
            wish_ = Release(limit_key=KEY, count=2, dues=(START + 5, START + 6))
            gone = await store.release_waiters("shop", [wish_], operation="go", at=START + 1)
            assert [(record.id, record.due_at) for record in gone] == [("c", START + 5), ("d", START + 6)]
            assert (await the(store, "d")).due_at == START + 6
            assert dict(await store.waiting_keys("shop")) == {KEY: 0}

        stage.play(scenario)

    def test_a_damaged_bucket_holds_nothing_up(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([rated("a")])
            (entry,) = [replace(each, body=b'{"interval": 0}') for each in await _buckets(store)]
            assert await store.put_entry(replace(entry, version=entry.version + 1))
            await store.insert([rated("b")])
            got = []
            for turn, at in enumerate((START, START + 5)):
                got += ids_of((await store.claim(paced(f"op {turn}", at=at))).records)
            assert got == ["b"]
            assert (await bucket(store)).taken >= 1

        stage.play(scenario)


async def _buckets(store: Store) -> Any:
    await store.claim(paced("first"))
    return await store.entries("shop", RATE)
