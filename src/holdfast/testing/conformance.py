"""What every store has to pass, ours and a third party's.

Subclass `StoreConformance` in a test module and say where the store is; pytest does the rest:

    class TestOurStore(StoreConformance):
        @pytest.fixture
        def store_url(self, tmp_path):
            return f"ours:///{tmp_path}/store"          # found by the entry point; or override the fixture `open_store`

Every test gets an empty store. Opened twice, a store that is `MULTI_PROCESS` or `DURABLE` has to show the same
contents. Tests ask for an `Ability`, never for a store's name. Times are handed in, so no test waits.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.model import changes, claims
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, Lost, apply_to
from holdfast.model.records import lane_of
from holdfast.model.status import Status
from holdfast.store import open_store as open_by_url
from holdfast.store.contract import Ability, Filter, Store
from holdfast.testing.conformance_archive import ArchiveConformance
from holdfast.testing.conformance_attributes import AttributeConformance
from holdfast.testing.conformance_cancelling import CancellingConformance
from holdfast.testing.conformance_entries import EntryConformance
from holdfast.testing.conformance_identity import IdentityConformance
from holdfast.testing.conformance_limits import LimitConformance
from holdfast.testing.conformance_outbox import OutboxConformance
from holdfast.testing.conformance_ownership import OwnershipConformance
from holdfast.testing.conformance_payloads import PayloadConformance
from holdfast.testing.conformance_queues import QueueConformance
from holdfast.testing.conformance_rates import RateConformance
from holdfast.testing.conformance_reads import ReadConformance
from holdfast.testing.conformance_retries import RetryConformance
from holdfast.testing.conformance_runs import RunConformance
from holdfast.testing.conformance_streams import StreamConformance
from holdfast.testing.conformance_transactions import TransactionConformance
from holdfast.testing.conformance_waits import WaitConformance
from holdfast.testing.samples import (
    BY_NAME,
    ERROR,
    LANE,
    START,
    TASK,
    OpenStore,
    Stage,
    claim_until_empty,
    fields_for,
    ids,
    ids_of,
    in_status,
    invocation,
    owned,
    raw_change,
    the,
    wish,
)


class StoreConformance(
    ReadConformance,
    PayloadConformance,
    LimitConformance,
    RateConformance,
    RetryConformance,
    IdentityConformance,
    ArchiveConformance,
    CancellingConformance,
    QueueConformance,
    EntryConformance,
    OutboxConformance,
    OwnershipConformance,
    RunConformance,
    AttributeConformance,
    StreamConformance,
    TransactionConformance,
    WaitConformance,
):
    """Run the whole suite; see the module. Its parts are in the modules ``conformance_…``."""

    @pytest.fixture
    def store_url(self) -> str:
        pytest.fail("a subclass of StoreConformance has to give the fixture store_url")

    @pytest.fixture
    def open_store(self, store_url: str) -> OpenStore:
        return lambda clock, observe: open_by_url(store_url, clock=clock, observe=observe)

    @pytest.fixture
    def stage(self, open_store: OpenStore) -> Stage:
        return Stage(open_store)

    # --- insert

    def test_what_is_inserted_comes_back_whole(self, stage: Stage) -> None:
        more: dict[str, Any] = {
            "queue": "mail",
            "tags": ("eu", "gpu"),
            "priority": 7,
            "parent_id": "p",
            "fingerprint": "f",
        }
        records = [invocation("a", due_at=START + 0.1, **more), invocation("b", arguments=b"", priority=-100)]

        async def scenario(store: Store) -> None:
            assert list(await store.insert(records)) == [True, True]
            assert list(await store.get("shop", ids("a", "b"))) == records

        stage.play(scenario)

    def test_a_taken_id_is_refused_and_what_is_there_stays(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = invocation("a", arguments=b"first")
            await store.insert([first])
            assert list(await store.insert([invocation("a", arguments=b"other", operation="other")])) == [False]
            assert await the(store) == first

        stage.play(scenario)

    def test_an_insert_repeated_is_recognised_although_others_have_written_since(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            await store.apply([changes.completed(record, result=b"r", operation="end", at=START)])
            ended = await the(store)
            assert list(await store.insert([invocation("a")])) == [True]
            assert await the(store) == ended

        stage.play(scenario)

    def test_a_batch_is_answered_record_by_record(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a"), invocation("b")])
            batch = [invocation("c"), invocation("a", operation="x"), invocation("b"), invocation("c", operation="y")]
            assert list(await store.insert(batch)) == [True, False, True, False]
            assert ids_of(await store.find("shop", Filter(), 10)) == ["c", "b", "a"]
            assert list(await store.insert([])) == []

        stage.play(scenario)

    # --- claim

    def test_claims_go_by_priority_then_due_time_then_id(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            other = lane_of("mail", TASK)
            queue = [
                invocation("e", priority=9),
                invocation("a", priority=0, due_at=START - 1),
                invocation("d", priority=0, due_at=START - 2, queue="mail"),
                invocation("c", priority=0, due_at=START - 1, queue="mail"),
                invocation("b", priority=-5, due_at=START - 9),
            ]
            await store.insert(queue)
            got = await store.claim(wish("1", lanes=(LANE, other), limit=3))
            assert ids_of(got.records) == ["e", "d", "a"]
            assert ids_of((await store.claim(wish("2", lanes=(other, LANE)))).records) == ["c", "b"]

        stage.play(scenario)

    @pytest.mark.parametrize("narrowed", [False, True])
    def test_a_small_claim_takes_the_first_in_order(self, stage: Stage, narrowed: bool) -> None:
        async def scenario(store: Store) -> None:
            facts = [("d", 1, 2), ("b", 0, 1), ("e", 1, 1), ("a", 0, 2), ("c", 0, 1), ("f", -1, 0)]
            await store.insert([invocation(id, priority=p, due_at=START - 9 + due) for id, p, due in facts])
            ids = ("a", "b", "c", "d", "e", "f") if narrowed else ()
            for number, expected in enumerate(["e", "db", "c", "af"]):
                got = await store.claim(wish(f"{number}", limit=len(expected), ids=ids))
                assert ids_of(got.records) == [*expected]

        stage.play(scenario)

    def test_a_claim_takes_due_invocations_and_returns_the_next_due_time(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("now"), invocation("soon", due_at=START + 0.25, priority=9)])
            await store.insert([invocation("later", due_at=START + 60), invocation("not ours", queue="q", due_at=1.0)])
            full = await store.claim(wish("1", limit=1))
            assert (ids_of(full.records), full.next_due_at) == (["now"], None)
            nothing = await store.claim(wish("2", at=START + 0.2499))
            assert (nothing.records, nothing.next_due_at) == ((), START + 0.25)
            some = await store.claim(wish("3", at=START + 0.25))
            assert (ids_of(some.records), some.next_due_at) == (["soon"], START + 60)
            assert (await store.claim(wish("4", at=START + 60))).next_due_at is None
            assert (await store.claim(wish("5"))) == claims.Claimed(())

        stage.play(scenario)

    def test_a_claim_takes_only_the_lanes_it_asks_for(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            tagged = invocation("t", tags=("gpu", "eu"))
            await store.insert([invocation("a"), invocation("b", queue="mail"), invocation("c", task="shop:x"), tagged])
            assert ids_of((await store.claim(wish("1", lanes=("default|nothing",)))).records) == []
            assert ids_of((await store.claim(wish("2", lanes=()))).records) == []
            assert ids_of((await store.claim(wish("3", lanes=(LANE, LANE)))).records) == ["a"]
            assert ids_of((await store.claim(wish("4", lanes=(lane_of("default", TASK, ("eu", "gpu")),)))).records) == [
                "t"
            ]
            assert set((await store.counts("shop")).items()) == {(Status.RUNNING, 2), (Status.REGISTERED, 2)}

        stage.play(scenario)

    def test_lanes_returns_lanes_with_ready_invocations(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.lanes("shop")) == []
            await store.insert([invocation("a", queue="z"), invocation("b", queue="z", priority=9), invocation("c")])
            await store.insert([invocation("d", tags=("gpu",), due_at=START + 999), invocation("e", app="other")])
            ready = sorted([lane_of("z", TASK), LANE, lane_of("default", TASK, ("gpu",))])
            assert list(await store.lanes("shop")) == ready
            (taken,) = (await store.claim(wish("op"))).records
            assert list(await store.lanes("shop")) == [lane for lane in ready if lane != LANE]
            await store.apply([changes.killed(taken, operation="kill", at=START, why="")])
            assert list(await store.lanes("shop")) == ready
            assert list(await store.lanes("other")) == [LANE]

        stage.play(scenario)

    @pytest.mark.parametrize("start", [True, False])
    def test_a_claim_writes_owner_epoch_and_every_edge(self, stage: Stage, start: bool) -> None:
        async def scenario(store: Store) -> None:
            before = invocation("a")
            await store.insert([before])
            claim = wish("op", start=start, at=START + 3)
            (got,) = (await store.claim(claim)).records
            assert got == apply_to(claims.claimed(claim, before), before) == await the(store)
            walked = [Status.REGISTERED, Status.PENDING, Status.RUNNING][: 3 if start else 2]
            assert [line.status for line in got.history] == walked
            assert (got.status, got.owner, got.epoch, got.attempt) == (walked[-1], "runner/1", 1, int(start))
            assert [(line.owner, line.epoch) for line in got.history[1:]] == [("runner/1", 1)] * (len(walked) - 1)

        stage.play(scenario)

    def test_each_claim_adds_one_to_the_epoch(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a")])
            for turn in range(1, 4):
                (record,) = (await store.claim(wish(f"claim {turn}", owner=f"runner/{turn}"))).records
                assert (record.epoch, record.owner, record.attempt) == (turn, f"runner/{turn}", turn)
                await store.apply([changes.killed(record, operation=f"kill {turn}", at=START, why="")])

        stage.play(scenario)

    def test_a_claim_can_be_narrowed_to_ids(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(id) for id in "abcd"] + [invocation("late", due_at=START + 9)])
            await store.insert([invocation("elsewhere", queue="mail")])
            got = await store.claim(wish("1", ids=("d", "late", "elsewhere", "unknown", "b")))
            assert ids_of(got.records) == ["b", "d"]
            assert ids_of((await store.claim(wish("2", ids=("b", "c", "a"), limit=1))).records) == ["a"]

        stage.play(scenario)

    @pytest.mark.parametrize("start", [True, False])
    def test_a_claim_whose_answer_was_lost_is_answered_again(self, stage: Stage, start: bool) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(id, priority=n) for n, id in enumerate("abcde")])
            claim = wish("op", limit=3, start=start)
            first = (await store.claim(claim)).records
            await store.apply([changes.killed(first[1], operation="kill", at=START, why="")])
            await store.claim(wish("other", ids=("d",), owner="runner/2"))
            again = (await store.claim(replace(claim, again=True))).records
            assert again[:2] == (first[0], first[2])
            assert ids_of(again) == ["e", "c", "b"]
            assert ids_of((await store.claim(replace(claim, again=True))).records) == ["e", "c", "b"]

        stage.play(scenario)

    def test_two_claimers_never_share(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(f"{n:03}") for n in range(60)])
            wishes = [wish(f"op {n}", limit=7, owner=f"runner/{n}") for n in range(12)]
            got = await asyncio.gather(*[store.claim(each) for each in wishes])
            taken = [id for each in got for id in ids_of(each.records)]
            # Claimers that collide may come away with less than there is; then it is there for the next one.
            taken += ids_of((await store.claim(wish("the rest", limit=60, owner="runner/0"))).records)
            assert len(taken) == len(set(taken)) == 60
            assert {r.owner for r in await store.find("shop", Filter(), 99)} <= {each.owner for each in wishes}

        stage.play(scenario)

    def test_two_processes_never_share(self, stage: Stage, store_url: str) -> None:
        async def fill(store: Store) -> None:
            await store.insert([invocation(f"{n:03}") for n in range(60)])

        async def nothing_is_left(store: Store) -> None:
            assert await store.counts("shop") == {Status.RUNNING: 60}

        stage.play(fill, needs=Ability.MULTI_PROCESS)
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            mine, yours = pool.map(claim_until_empty, [store_url] * 2, ["runner/1", "runner/2"])
        assert sorted(mine + yours) == [f"{n:03}" for n in range(60)]
        stage.play(nothing_is_left)

    # --- apply

    @pytest.mark.parametrize("name", BY_NAME)
    def test_a_named_change_is_applied_once_and_whole(self, stage: Stage, name: str) -> None:
        async def scenario(store: Store) -> None:
            status, build = BY_NAME[name]
            record = await in_status(store, status, **fields_for(name))
            change = build(record)
            assert list(await store.apply([change])) == [APPLIED]
            after = await the(store)
            assert after == apply_to(change, record)
            assert list(await store.apply([change, change])) == [APPLIED_AGAIN] * 2
            assert await the(store) == after

        stage.play(scenario)

    @pytest.mark.parametrize("name", BY_NAME)
    def test_a_named_change_is_lost_to_another_epoch_or_status(self, stage: Stage, name: str) -> None:
        async def scenario(store: Store) -> None:
            status, build = BY_NAME[name]
            record = await in_status(store, status, **fields_for(name))
            stale = build(replace(record, epoch=record.epoch - 1))
            assert list(await store.apply([stale])) == [Lost(status, record.owner, record.epoch)]
            assert await the(store) == record
            other = await owned(store, "b")
            await store.apply([changes.completed(other, result=b"r", operation="end", at=START)])
            late = build(other)
            assert list(await store.apply([replace(late, operation="late")])) == [Lost(Status.SUCCESS, None, 1)]

        stage.play(scenario)

    def test_zombie_result_is_refused(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            zombie = await owned(store)
            await store.apply([changes.killed(zombie, operation="kill", at=START, why="thought dead")])
            (heir,) = (await store.claim(wish("next", owner="runner/2"))).records
            late = changes.completed(zombie, result=b"zombie", operation="late 1", at=START + 9)
            assert list(await store.apply([late])) == [Lost(Status.RUNNING, "runner/2", 2)]
            await store.apply([changes.completed(heir, result=b"heir", operation="end", at=START + 10)])
            assert list(await store.apply([replace(late, operation="late 2")])) == [Lost(Status.SUCCESS, None, 2)]
            assert (await the(store)).result == b"heir"

        stage.play(scenario)

    def test_a_change_to_an_unknown_invocation_is_missing(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            change = changes.completed(record, result=b"", operation="op", at=START)
            assert list(await store.apply([replace(change, id="b"), replace(change, app="other")])) == [MISSING] * 2
            assert await the(store) == record
            assert list(await store.apply([])) == []

        stage.play(scenario)

    def test_a_repeated_change_is_recognised_although_others_have_written_since(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            first = changes.killed(record, operation="kill", at=START, why="stop")
            await store.apply([first])
            for turn in range(6):
                (record,) = (await store.claim(wish(f"claim {turn}"))).records
                await store.apply([changes.killed(record, operation=f"kill {turn}", at=START, why="")])
            there = await the(store)
            assert list(await store.apply([first])) == [APPLIED_AGAIN]
            assert await the(store) == there

        stage.play(scenario)

    def test_a_repeated_change_is_recognised_although_its_guard_would_let_it_in_again(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            running = await owned(store)
            pause = raw_change(running, Status.PAUSED, operation="pause", epoch=1)
            resume = raw_change(replace(running, status=Status.PAUSED), Status.RESUMED, operation="resume", epoch=1)
            either = replace(pause, sources=frozenset({Status.RUNNING, Status.RESUMED}))
            assert list(await store.apply([either, resume, either])) == [APPLIED, APPLIED, APPLIED_AGAIN]
            assert (await the(store)).status is Status.RESUMED

        stage.play(scenario)

    def test_changes_to_one_invocation_are_taken_in_the_order_given(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, start=False)
            start = changes.started(record, operation="start", at=START + 1)
            end = changes.completed(record, result=b"r", operation="end", at=START + 2)
            assert list(await store.apply([end])) == [Lost(Status.PENDING, "runner/1", 1)]
            wrong = replace(end, epoch=9, operation="wrong")
            verdicts = await store.apply([start, wrong, end, start])
            assert list(verdicts) == [APPLIED, Lost(Status.RUNNING, "runner/1", 1), APPLIED, APPLIED_AGAIN]
            after = await the(store)
            assert [line.version for line in after.history] == [1, 2, 3, 4]
            assert after == apply_to(end, apply_to(start, record))

        stage.play(scenario)

    def test_one_lost_change_does_not_spoil_its_batch(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            records = [await owned(store, f"{n}") for n in range(6)]
            ends = [changes.completed(r, result=r.id.encode(), operation=f"end {r.id}", at=START) for r in records]
            ends[2] = replace(ends[2], epoch=7)
            ends[4] = replace(ends[4], id="unknown")
            lost = Lost(Status.RUNNING, "runner/1", 1)
            assert list(await store.apply(ends)) == [APPLIED, APPLIED, lost, APPLIED, MISSING, APPLIED]
            found = await store.find("shop", Filter(), 10)
            assert [record.result for record in found] == [b"5", None, b"3", None, b"1", b"0"]

        stage.play(scenario)

    def test_a_change_can_set_the_due_time_and_the_claim_waits_for_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            retry = raw_change(record, Status.RETRY, operation="retry", epoch=1, due_at=START + 30, error=ERROR)
            assert list(await store.apply([retry])) == [APPLIED]
            assert await the(store) == apply_to(retry, record)
            assert (await store.claim(wish("1", at=START + 29))).next_due_at == START + 30
            (again,) = (await store.claim(wish("2", at=START + 30))).records
            assert (again.attempt, again.epoch, again.error) == (2, 2, ERROR)

        stage.play(scenario)

    def test_anybody_may_make_a_change_that_overrides_the_owner(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            cancel = raw_change(record, Status.CANCELLING, operation="cancel", actor="a person", why="please")
            assert list(await store.apply([cancel])) == [APPLIED]
            asked = await the(store)
            assert (asked.owner, asked.epoch, asked.reason) == ("runner/1", 1, "please")
            rescue = raw_change(asked, Status.RUNNING_RECOVERY, Status.CANCELLED, operation="rescue", actor=None)
            assert list(await store.apply([rescue])) == [APPLIED]
            assert [line.status for line in (await the(store)).history][-2:] == [*rescue.path]

        stage.play(scenario)
