"""The part of the conformance suite about waits for other invocations: PAUSED and RESUMED, and the place in the queue.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, Lost, MoveUp, WaitNote, apply_to
from holdfast.model.records import InvocationRecord, Waiting
from holdfast.model.status import Status
from holdfast.model.waits import paused, resumed
from holdfast.store.contract import Ability, Filter, Store
from holdfast.testing.samples import START, WAITING, Stage, ids, ids_of, in_status, invocation, owned, the, wish


def noting(record: InvocationRecord, waiting: Waiting | None, **other: Any) -> WaitNote:
    """Make an owner's note of what its code waits for."""
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner} | other
    return WaitNote(app=record.app, id=record.id, waiting=waiting, **given)


def up(id: str, due_at: float) -> MoveUp:
    return MoveUp(app="shop", id=InvocationId(id), due_at=due_at)


class WaitConformance:
    """See the module."""

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_pause_keeps_what_is_waited_for(self, stage: Stage, is_known: bool) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, limit_key="k")
            known = {} if is_known else {"version": None}
            pause = paused(record, WAITING, operation="pause", at=START + 1, why="it waits for b")
            assert list(await store.apply([replace(pause, **known)])) == [APPLIED]
            there = await the(store)
            assert there == apply_to(pause, record)
            assert (there.status, there.awaited) == (Status.PAUSED, WAITING)
            resume = resumed(there, operation="resume", at=START + 2)
            assert list(await store.apply([replace(resume, **known)])) == [APPLIED]
            after = await the(store)
            assert after == apply_to(resume, there)
            assert (after.status, after.waiting, after.awaited) == (Status.RESUMED, None, None)
            assert list(await store.apply([resume, pause])) == [APPLIED_AGAIN, APPLIED_AGAIN]

        stage.play(scenario)

    def test_many_pause_and_go_on_together(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            records = [await owned(store, id) for id in "abcde"]
            pauses = [
                paused(r, replace(WAITING, more=n), operation=f"p {r.id}", at=START, why="")
                for n, r in enumerate(records)
            ]
            assert list(await store.apply(pauses)) == [APPLIED] * 5
            there = [await the(store, id) for id in "abcde"]
            assert there == [apply_to(*each) for each in zip(pauses, records, strict=True)]
            ends = [changes.completed(r, result=b"", operation=f"e {r.id}", at=START) for r in there[3:]]
            resumes = [resumed(r, operation=f"r {r.id}", at=START) for r in there[:3]]
            assert list(await store.apply([*resumes, *ends])) == [APPLIED] * 5
            assert [(await the(store, id)).status for id in "abcde"] == [Status.RESUMED] * 3 + [Status.SUCCESS] * 2
            assert [line.status for line in (await the(store, "e")).history][-3:] == ["paused", "resumed", "success"]

        stage.play(scenario)

    def test_only_the_owner_pauses_and_goes_on(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await in_status(store, Status.PAUSED)
            lost = Lost(Status.PAUSED, "runner/1", 1)
            resume = resumed(record, operation="resume", at=START)
            assert list(await store.apply([replace(resume, actor="runner/2")])) == [lost]
            assert list(await store.apply([replace(resume, epoch=2)])) == [lost]
            again = paused(replace(record, status=Status.RUNNING), WAITING, operation="more", at=START, why="")
            assert list(await store.apply([again])) == [lost]

        stage.play(scenario)

    def test_a_new_owner_waits_for_nothing(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await in_status(store, Status.PAUSED)
            taken = changes.recovered(record, by="other", operation="recover", at=START, why="dead")
            assert list(await store.apply([taken])) == [APPLIED]
            assert (await the(store)).status is Status.REROUTED
            (again,) = (await store.claim(wish("next", owner="runner/2"))).records
            assert (again.epoch, again.awaited) == (2, None)

        stage.play(scenario)

    def test_a_note_says_what_keeps_its_slot(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            note = noting(record, replace(WAITING, keeps_slot="there are many"))
            assert list(await store.apply([note, note])) == [APPLIED, APPLIED_AGAIN]
            assert await the(store) == replace(record, waiting=note.waiting), "no edge is walked"
            wrong = [noting(record, None, epoch=2), noting(record, None, actor="runner/2")]
            assert list(await store.apply(wrong)) == [Lost(Status.RUNNING, "runner/1", 1)] * 2
            assert list(await store.apply([replace(note, id=InvocationId("nobody"))])) == [MISSING]
            assert list(await store.apply([noting(record, None)])) == [APPLIED]
            assert await the(store) == record

        stage.play(scenario)

    def test_what_is_waited_for_goes_first_of_its_priority(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = [invocation(id, due_at=START - 9 + n) for n, id in enumerate("abcd")]
            await store.insert([*first, invocation("z", due_at=START - 1, priority=1)])
            assert list(await store.apply([up("d", START - 20), up("c", START - 19), up("a", START)])) == [APPLIED] * 3
            assert (await the(store, "a")).due_at == START - 9, "it is never moved back"
            assert (await the(store, "d")) == replace(first[3], due_at=START - 20), "no edge is walked"
            got = [(await store.claim(wish(f"claim {n}", limit=1))).records[0].id for n in range(5)]
            assert got == ["z", "d", "c", "a", "b"]

        stage.play(scenario)

    def test_a_batch_of_claims_sees_the_new_order(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(f"{n:03}", due_at=START - 500 + n) for n in range(100)])
            await store.claim(wish("some", limit=10))
            assert list(await store.apply([up("099", START - 600), up("098", START - 601)])) == [APPLIED] * 2
            assert ids_of((await store.claim(wish("more", limit=3))).records) == ["098", "099", "010"]

        stage.play(scenario)

    def test_only_what_waits_in_the_queue_is_moved(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            running = await owned(store, "r")
            blocked = await in_status(store, Status.CONCURRENCY_CONTROLLED, "b", limit_key="k")
            moves = [up("r", START - 50), up("b", START - 50), up("nobody", START)]
            assert list(await store.apply(moves)) == [APPLIED, APPLIED, MISSING]
            assert await the(store, "r") == running
            assert await the(store, "b") == replace(blocked, due_at=START - 50)

        stage.play(scenario)

    def test_waits_outlive_the_process(self, stage: Stage) -> None:
        async def write(store: Store) -> None:
            await in_status(store, Status.PAUSED)

        async def read(store: Store) -> None:
            assert (await the(store)).awaited == WAITING
            where = Filter(statuses=frozenset({Status.PAUSED}), runner="runner")
            assert ids_of(await store.find("shop", where, 9)) == ids("a")

        stage.play(write, read, needs=Ability.DURABLE)
