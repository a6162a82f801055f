"""How notes of running calls come to the store, over the memory store and on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from tests.runtime.test_worker import Harness, running

from holdfast import App, context
from holdfast.errors import StoreError, StoreUnavailable
from holdfast.ids import InvocationId
from holdfast.model.changes import Change, NoteUpdate, Verdict, Write
from holdfast.model.notes import NO_NOTES
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.worker import Worker
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock, run_virtual


class Watched(MemoryStore):
    """Writes down when notes come, and may refuse them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.groups: list[tuple[float, list[NoteUpdate]]] = []
        self.ends: list[Change] = []
        self.fails: Callable[[Sequence[NoteUpdate]], Exception | None] = lambda notes: None
        self.refuses_end: Callable[[Change], bool] = lambda end: False
        self.holds: asyncio.Event | None = None

    async def apply(self, changes: Sequence[Write]) -> Sequence[Verdict]:
        notes = [change for change in changes if isinstance(change, NoteUpdate)]
        self.ends += [change for change in changes if isinstance(change, Change) and change.name != "started"]
        if any(self.refuses_end(change) for change in changes if isinstance(change, Change)):
            raise StoreError("no")
        if notes:
            self.groups.append((self.clock.now(), notes))
            if self.holds is not None:
                await self.holds.wait()
            if (error := self.fails(notes)) is not None:
                raise error
        return await super().apply(changes)


Scenario = Callable[[Harness, Watched], Coroutine[Any, Any, None]]


def virtually(scenario: Scenario) -> None:
    async def main(clock: VirtualClock) -> None:
        store = Watched(clock)
        await scenario(Harness(clock, store), store)

    run_virtual(main)


async def over(worker: Worker, life: asyncio.Task[Any]) -> None:
    worker.stop()
    await life


async def counting(seconds: float, pause: float) -> None:
    """Say something again and again."""
    here, steps = context(), round(seconds / pause)
    for step in range(steps):
        here.progress(step + 1, total=steps)
        here.checkpoint(step + 1)
        await asyncio.sleep(pause)


def progress_in(record: InvocationRecord) -> float:
    progress = (record.notes or NO_NOTES).progress
    assert progress is not None
    return progress.current


def test_a_call_that_says_much_is_written_once_per_second() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting)
        life = await running(worker)
        id = await harness.submit("counting", 5.0, 0.001)
        (record,) = await harness.end(id)
        times = [at - store.groups[0][0] for at, _ in store.groups]
        assert times == pytest.approx([0, 1, 2, 3, 4], abs=0.01)
        assert progress_in(record) == 5000
        assert store.ends[-1].notes == record.notes, "the end carries what was not written yet"
        assert len(record.history) == 4
        await over(worker, life)

    virtually(scenario)


def test_what_ends_at_once_costs_no_write_of_its_own() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        async def quick() -> None:
            context().set(customer="c-17")
            context().progress(1)

        worker = harness.worker(quick)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("quick"))
        assert store.groups == []
        assert record.attributes == {"customer": "c-17"}
        assert progress_in(record) == 1
        await over(worker, life)

    virtually(scenario)


def test_many_calls_share_writes() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting, concurrency=100)
        life = await running(worker)
        ids = []
        for _ in range(100):
            ids.append(await harness.submit("counting", 4.0, 0.01))
            await asyncio.sleep(0.01)
        await harness.end(*ids)
        seconds = store.groups[-1][0] - store.groups[0][0]
        assert len(store.groups) <= 5 * seconds + 2
        assert sum(len(notes) for _, notes in store.groups) <= 100 * 5
        assert [progress_in(await harness.record(id)) for id in ids] == [400] * 100
        await over(worker, life)

    virtually(scenario)


def test_a_call_without_notes_costs_nothing() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        async def plain() -> None:
            await asyncio.sleep(3)

        worker = harness.worker(plain)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("plain"))
        assert store.groups == []
        assert record.notes is None
        assert not worker._running.notes.calls
        await over(worker, life)

    virtually(scenario)


def test_the_result_does_not_wait_for_a_note() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        store.holds = asyncio.Event()
        worker = harness.worker(counting)
        life = await running(worker)
        began = harness.clock.now()
        (record,) = await harness.end(await harness.submit("counting", 2.0, 0.5))
        assert record.status is Status.SUCCESS
        assert harness.clock.now() - began < 2.1
        assert progress_in(record) == 4
        store.holds.set()  # now comes what was to be written in its first second
        await asyncio.sleep(1)
        assert await harness.record(record.id) == record
        assert not worker._running.notes.calls
        await over(worker, life)

    virtually(scenario)


def test_an_absent_store_gets_the_latest_when_it_is_back() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        gone_until = harness.clock.now() + 20
        store.fails = lambda notes: StoreUnavailable("away") if store.clock.now() < gone_until else None
        worker = harness.worker(counting)
        life = await running(worker)
        id = await harness.submit("counting", 60.0, 0.1)
        await asyncio.sleep(19)
        assert len(store.groups) < 8, "the pauses grow"
        assert (await harness.record(id)).notes is None
        await asyncio.sleep(8)
        record = await harness.record(id)
        assert record.status is Status.RUNNING
        assert progress_in(record) > 200
        (record,) = await harness.end(id)
        assert (record.status, progress_in(record)) == (Status.SUCCESS, 600)
        await over(worker, life)

    virtually(scenario)


def test_a_refused_note_is_given_up_and_hurts_no_other() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting)
        life = await running(worker)
        bad, good = [await harness.submit("counting", 5.0, 0.1) for _ in range(2)]
        store.fails = lambda notes: StoreError("no") if any(note.id == bad for note in notes) else None
        records = await harness.end(bad, good)
        assert [record.status for record in records] == [Status.SUCCESS] * 2
        assert records[0].notes is None
        assert progress_in(records[1]) == 50
        assert len([note for _, notes in store.groups for note in notes if note.id == bad]) == 2
        await over(worker, life)

    virtually(scenario)


def test_an_end_that_is_refused_with_its_notes_is_written_without() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        store.refuses_end = lambda end: end.notes is not UNSET
        worker = harness.worker(counting)
        life = await running(worker)
        (record,) = await harness.end(await harness.submit("counting", 2.0, 0.5))
        assert record.status is Status.SUCCESS
        assert progress_in(record) < 4, "as it was written last"
        await over(worker, life)

    virtually(scenario)


def test_a_call_that_was_lost_changes_nothing_any_more() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting)
        life = await running(worker)
        id = await harness.submit("counting", 10.0, 0.1)
        await asyncio.sleep(0.5)
        mine = await harness.record(id)
        there = store._records["app", InvocationId(id)]
        taken = {"epoch": mine.epoch + 1, "owner": "another/0", "notes": None}
        store._records["app", InvocationId(id)] = replace(there, **taken)
        await asyncio.sleep(5)
        assert (await harness.record(id)).notes is None
        assert len(store.groups) == 2, "it is not heard after its first refusal"
        worker.stop(hurry=True)
        await life
        assert (await harness.record(id)).notes is None

    virtually(scenario)


def test_what_is_interrupted_leaves_its_notes() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting)
        life = await running(worker)
        id = await harness.submit("counting", 600.0, 0.3)
        await asyncio.sleep(0.9)
        worker.stop(hurry=True)
        await life
        record = await harness.record(id)
        assert record.status is Status.REROUTED
        assert record.notes is not None
        assert harness.codec.decode(record.notes.checkpoint or b"") == progress_in(record) >= 3

    virtually(scenario)


def test_a_cancelled_call_keeps_its_last_notes() -> None:
    async def scenario(harness: Harness, store: Watched) -> None:
        worker = harness.worker(counting)
        life = await running(worker)
        id = InvocationId(await harness.submit("counting", 600.0, 0.3))
        await asyncio.sleep(0.9)
        await harness.engine.canceller.cancel([id], by="a test", reason="")
        (record,) = await harness.end(id)
        assert record.status is Status.CANCELLED
        assert progress_in(record) >= 3
        await over(worker, life)

    virtually(scenario)


def test_a_schedule_gives_its_calls_their_attributes() -> None:
    app = App("memory://")
    task = app.task(name="bill")(lambda: None)
    with app:
        app.schedules.create("nightly", task.options(attributes={"customer": "c-17"}), cron="0 3 * * *")
        call = app.schedules.run_now("nightly")
        assert dict(call.record().attributes) == {"customer": "c-17"}
