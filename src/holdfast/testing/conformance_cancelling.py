"""The part of the conformance suite about cancellation and time limits."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from holdfast.model import cancellation as cancelling
from holdfast.model import changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, Applied, Lost
from holdfast.model.limits import Limit
from holdfast.model.records import Cancellation, InvocationRecord, Terms
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Ability, Filter, Order, Store
from holdfast.testing.samples import (
    BY_NAME,
    CANCELLATION,
    ERROR,
    START,
    TASK,
    Stage,
    cancelled,
    ids_of,
    in_status,
    invocation,
    owned,
    the,
    wish,
)

_QUEUED = [Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.RETRY, Status.PARKED, Status.KILLED]
_UNSTARTED = [Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.PENDING, Status.RUNNING]
_LATE = Terms(start_by=START + 5)


def waiting(id: str, start_by: float = START + 5) -> InvocationRecord:
    return invocation(id, start_by=start_by, terms=Terms(start_by=start_by))


class CancellingConformance:
    @pytest.mark.parametrize("status", _QUEUED)
    def test_an_invocation_without_an_owner_is_cancelled_at_once(self, stage: Stage, status: Status) -> None:
        async def scenario(store: Store) -> None:
            record = await in_status(store, status)
            assert list(await store.apply([cancelled(record)])) == [APPLIED]
            ended = await the(store)
            assert (ended.status, ended.owner, ended.cancellation) == (Status.CANCELLED, None, CANCELLATION)
            assert ended.reason == "cancelled by a person: no longer wanted"
            assert (await store.claim(wish("later", at=START + 99))).records == ()
            assert list(await store.apply([cancelled(record)])) == [APPLIED_AGAIN]
            other = replace(cancelled(record), operation="other")
            assert list(await store.apply([other])) == [Lost(Status.CANCELLED, None, record.epoch)]

        stage.play(scenario)

    @pytest.mark.parametrize("start", [False, True])
    def test_an_owner_is_asked_and_keeps_what_it_has(self, stage: Stage, start: bool) -> None:
        async def write(store: Store) -> None:
            await store.insert([invocation("a", limit_key="k")])
            (record,) = (await store.claim(wish(start=start, limits={TASK: Limit(1)}))).records
            assert list(await store.apply([cancelled(record)])) == [APPLIED]

        async def read(store: Store) -> None:
            asked = await the(store)
            assert (asked.status, asked.owner, asked.epoch) == (Status.CANCELLING, "runner/1", 1)
            assert asked.slot is not None
            assert asked.cancellation == CANCELLATION
            assert list(await store.owners("shop")) == ["runner/1"]
            where = Filter(runner="runner", statuses=frozenset({Status.CANCELLING}))
            assert ids_of(await store.find("shop", where, 10)) == ["a"]
            ended = cancelling.gave_way(asked, operation="end", at=START + 2, how="it has ended")
            assert list(await store.apply([ended])) == [APPLIED]
            last = await the(store)
            assert (last.status, last.owner, last.slot) == (Status.CANCELLED, None, None)
            assert last.cancellation == CANCELLATION
            assert last.reason == "cancelled by a person: no longer wanted; it has ended"

        stage.play(write, read, needs=Ability.DURABLE)

    def test_only_its_owner_leaves_what_is_being_cancelled(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            asked = await in_status(store, Status.CANCELLING)
            strange = replace(asked, epoch=asked.epoch + 1)
            assert list(await store.apply([cancelled(strange)])) == [Lost(Status.CANCELLING, asked.owner, asked.epoch)]
            again = replace(cancelled(replace(asked, status=Status.RUNNING)), operation="again")
            assert list(await store.apply([again])) == [Lost(Status.CANCELLING, asked.owner, asked.epoch)]

        stage.play(scenario)

    def test_a_cancelling_invocation_may_have_a_result_but_no_other_attempt(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for id, name, taken in (("a", "completed", True), ("b", "failed", True), ("c", "retried", False)):
                record = await owned(store, id)  # as its owner knows it
                await store.apply([replace(cancelled(record), operation=f"cancel {id}")])
                change = replace(BY_NAME[name][1](record), operation=f"end {id}")
                (verdict,) = await store.apply([change])
                assert isinstance(verdict, Applied) is taken, name

        stage.play(scenario)

    def test_a_dead_owner_of_what_is_being_cancelled_does_not_bring_it_back(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            await store.apply([cancelled(record)])
            asked = await the(store)
            assert list(
                await store.apply([changes.recovered(asked, by="runner", operation="r", at=START + 9, why="dead")])
            ) == [APPLIED]
            ended = await the(store)
            story = [entry.status for entry in ended.history[-3:]]
            assert story == [Status.CANCELLING, Status.RUNNING_RECOVERY, Status.CANCELLED]
            assert ended.cancellation == CANCELLATION

        stage.play(scenario)

    def test_a_claim_and_a_cancellation_at_once_have_one_winner(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for turn in range(20):
                await store.insert([record := invocation(f"i{turn}")])
                claim = store.claim(wish(f"claim {turn}", ids=(record.id,)))
                change = replace(cancelled(record), operation=f"cancel {turn}")
                got, (verdict,) = await asyncio.gather(claim, store.apply([change]))
                after = await the(store, record.id)
                if got.records:
                    assert verdict == Lost(Status.RUNNING, "runner/1", 1)
                    assert after.status is Status.RUNNING
                else:
                    assert verdict == APPLIED
                    assert (after.status, after.attempt) == (Status.CANCELLED, 0)

        stage.play(scenario)

    def test_an_end_and_a_cancellation_at_once_leave_one_end(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for turn in range(20):
                record = await owned(store, f"i{turn}")
                end = changes.completed(record, result=b"r", operation=f"end {turn}", at=START + 1)
                cancel = replace(cancelled(record), operation=f"cancel {turn}")
                (ended,), (asked,) = await asyncio.gather(store.apply([end]), store.apply([cancel]))
                after = await the(store, record.id)
                assert ended == APPLIED  # a result is taken before and after the question
                assert (after.status, after.result) == (Status.SUCCESS, b"r")
                walked = [entry.status for entry in after.history]
                assert (Status.CANCELLING in walked) is isinstance(asked, Applied)
                assert sum(status in FINAL for status in walked) == 1

        stage.play(scenario)

    def test_a_kind_may_be_stored_again_when_the_one_that_waits_is_cancelled(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([record := invocation("a", dedup_key="t")])
            await store.apply([cancelled(record)])
            assert list(await store.insert([invocation("b", dedup_key="t")])) == [True]

        stage.play(scenario)

    def test_children_are_found(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            mine = [invocation(f"c{n}", parent_id="p") for n in range(3)]
            await store.insert([*mine, invocation("o", parent_id="q"), invocation("n")])
            await store.apply([replace(cancelled(mine[0]), operation="x")])
            assert ids_of(await store.find("shop", Filter(parent="p"), 10)) == ["c2", "c1", "c0"]
            open_ = frozenset(Status) - FINAL
            assert ids_of(await store.find("shop", Filter(parent="p", statuses=open_), 10)) == ["c2", "c1"]
            assert ids_of(await store.find("shop", Filter(parent="p", before_id="c2"), 1)) == ["c1"]
            assert ids_of(await store.find("other", Filter(parent="p"), 10)) == []

        stage.play(scenario)

    def test_a_cancellation_comes_back_as_it_was(self, stage: Stage) -> None:
        given = Cancellation(
            by="O'Brien 😀", reason='a "reason"\n$set', at=START + 0.5, until=START + 1.5, children=False
        )

        async def write(store: Store) -> None:
            record = await owned(store)
            await store.apply([replace(cancelled(record), cancellation=given)])

        async def read(store: Store) -> None:
            assert (await the(store)).cancellation == given

        stage.play(write, read, needs=Ability.DURABLE)

    # --- limits of time

    def test_what_is_to_be_started_in_time_is_found_until_it_is(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert(
                [waiting("late", START + 9), waiting("soon"), invocation("never"), waiting("b", START + 9)]
            )
            assert ids_of(await store.find("shop", Filter(), 10, order=Order.START_BY)) == ["soon", "b", "late"]
            assert ids_of(await store.find("shop", Filter(), 1, order=Order.START_BY)) == ["soon"]
            assert ids_of(await store.find("other", Filter(), 10, order=Order.START_BY)) == []
            (reserved,) = (await store.claim(wish("reserve", ids=("soon",), start=False))).records
            assert reserved.start_by == START + 5  # it has an owner, and no start
            await store.apply([changes.started(reserved, operation="start", at=START)])
            (begun,) = (await store.claim(wish("begin", ids=("b",)))).records
            assert begun.start_by is None
            assert begun.terms.start_by == START + 9
            assert ids_of(await store.find("shop", Filter(), 10, order=Order.START_BY)) == ["late"]
            back = changes.handed_back(begun, operation="back", at=START, why="it was not begun")
            assert list(await store.apply([back])) == [APPLIED]
            assert (await the(store, "b")).start_by == START + 9
            await store.apply([replace(cancelled(await the(store, "late")), operation="cancel")])
            assert ids_of(await store.find("shop", Filter(), 10, order=Order.START_BY)) == ["b"]

        stage.play(scenario)

    @pytest.mark.parametrize(
        "status", [Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.PENDING, Status.RUNNING]
    )
    def test_what_was_not_started_in_time_fails_without_an_attempt(self, stage: Stage, status: Status) -> None:
        async def scenario(store: Store) -> None:
            record = replace(await in_status(store, status), terms=_LATE)
            late = cancelling.expired(record, error=ERROR, operation="late", at=START + 7)
            assert late is not None
            assert list(await store.apply([late])) == [APPLIED]
            ended = await the(store)
            assert (ended.status, ended.attempt, ended.owner, ended.error) == (Status.FAILED, 0, None, ERROR)
            assert ended.reason == "expired: it was to be started 2s ago at the latest, and never was"

        stage.play(scenario)

    def test_what_is_started_at_the_last_moment_does_not_expire(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([record := waiting("a")])
            await store.claim(wish())
            late = cancelling.expired(record, error=ERROR, operation="late", at=START + 7)
            assert late is not None
            assert list(await store.apply([late])) == [Lost(Status.RUNNING, "runner/1", 1)]

        stage.play(scenario)
