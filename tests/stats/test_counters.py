"""Workers count what they end, and store it every 10 s: in virtual time, over a line that can be disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.fleet import APP, Fleet, Member, add, virtually

from holdfast.errors import StoreReadOnly, StoreUnavailable
from holdfast.model.records import Entry
from holdfast.model.status import Status
from holdfast.runtime.engine import COUNTED_AT_ONCE
from holdfast.stats import Stats
from holdfast.stats.api import question, read_stats
from holdfast.stats.counters import FLUSH_SECONDS, Counters
from holdfast.stats.records import read_file
from holdfast.stats.rules import COUNTS, LATE_SECONDS, WORKERS
from holdfast.telemetry.events import ChangeNotWritten, DutyFailed

DAY = 86_400.0


async def stored(fleet: Fleet) -> list[Entry]:
    """The files of workers."""
    return list(await fleet.store.entries(APP, WORKERS.kind))


def ended(entries: list[Entry]) -> int:
    return sum(cell.succeeded for entry in entries for cell in read_file(entry).cells.values())


async def counting(fleet: Fleet, **options: Any) -> Member:
    fleet.settings |= {"stats_retention_seconds": 30 * DAY}
    return await fleet.started(add, nap, **options)


async def nap() -> None:
    await asyncio.sleep(1)


class Failures(list[DutyFailed]):
    """What an engine reports about its statistics, and the ends that it could not write."""

    def __init__(self) -> None:
        super().__init__()
        self.unwritten: list[ChangeNotWritten] = []

    def wants(self, kind: type) -> bool:
        return kind in (DutyFailed, ChangeNotWritten)

    def __call__(self, event: Any) -> None:
        if isinstance(event, DutyFailed) and event.area == "stats":
            self.append(event)
        elif isinstance(event, ChangeNotWritten):
            self.unwritten.append(event)


def failures_of(member: Member) -> Failures:
    member.engine.telemetry.subscribe(told := Failures())
    return told


async def end_some(fleet: Fleet, number: int) -> None:
    ids = [await fleet.submit("add", 1, 2) for _ in range(number)]
    for id in ids:
        await fleet.end(id)


def test_a_worker_stores_what_it_has_counted_every_ten_seconds() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        counters = member.engine.part(Counters)
        await asyncio.sleep(60 - fleet.clock.now() % 60)
        await end_some(fleet, 100)
        assert await stored(fleet) == []
        await asyncio.sleep(FLUSH_SECONDS + 1)
        (entry,) = await stored(fleet)
        assert (ended([entry]), entry.version) == (100, 1)
        await end_some(fleet, 5)
        await asyncio.sleep(FLUSH_SECONDS + 1)
        (entry,) = await stored(fleet)
        assert (ended([entry]), entry.version) == (105, 2)
        assert entry.due_at == int(entry.name[:11]) + 60 + 600
        await asyncio.sleep(120)
        await end_some(fleet, 1)
        await asyncio.sleep(120)
        assert [found.version for found in await stored(fleet)] == [2, 1]
        assert counters._flushing is not None
        assert counters._flushing.done()  # nothing is to be done until something ends

    virtually(scenario)


def test_a_worker_that_ends_nothing_stores_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        await counting(fleet)
        await asyncio.sleep(300)
        assert await stored(fleet) == []

    virtually(scenario)


def test_each_worker_has_a_file_of_its_own_and_a_reader_adds_them_up() -> None:
    async def scenario(fleet: Fleet) -> None:
        members = [await counting(fleet, concurrency=1) for _ in range(3)]
        ids = [await fleet.submit("nap") for _ in range(60)]
        for id in ids:
            await fleet.end(id)
        await asyncio.sleep(FLUSH_SECONDS + 1)
        assert ended(await stored(fleet)) == 60
        assert len({entry.name.partition("/")[2] for entry in await stored(fleet)}) > 1
        engine = members[0].engine
        found: Stats = await read_stats(engine, question(fleet.clock.now(), 600))
        assert (found.total.succeeded, found.tasks["nap"].run.count) == (60, 60)
        assert [round(each.value) for each in found.slow] == [1] * 10
        assert sorted(each.id for each in found.delayed) == sorted(ids[-10:])  # those at the end of the queue

    virtually(scenario)


@pytest.mark.parametrize("lost", ["lost", "swallowed"])
def test_a_write_without_an_answer_counts_once(lost: str) -> None:
    """It may be there, or not; the next try has the same counts, and those since then follow."""

    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        await asyncio.sleep(60 - fleet.clock.now() % 60)
        counters = member.engine.part(Counters)
        await end_some(fleet, 3)
        getattr(member.line, lost)["put_entry"] = 1
        with pytest.raises(StoreUnavailable):
            await counters.flush()
        await end_some(fleet, 4)
        await counters.flush()
        assert ended(await stored(fleet)) == 7
        (entry,) = await stored(fleet)
        assert entry.version == 2

    virtually(scenario)


@pytest.mark.parametrize("lost", ["lost", "swallowed"])
def test_an_end_without_an_answer_counts_once(lost: str) -> None:
    """The worker writes it again, until the store answers."""

    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        for _ in range(5):
            getattr(member.line, lost)["apply"] = 2
            await end_some(fleet, 10)
        found = await read_stats(member.engine, question(fleet.clock.now(), 3600))
        assert (found.total.ended, found.total.run.count) == (50, 50)

    virtually(scenario)


def test_an_end_that_another_owner_wrote_counts_once() -> None:
    """A runner that was frozen and declared dead writes its end too late."""

    async def scenario(fleet: Fleet) -> None:
        async def hold() -> None:
            await asyncio.sleep(40)

        fleet.settings |= {"stats_retention_seconds": 30 * DAY}
        first = await fleet.started(hold)
        id = await fleet.submit("hold")
        await fleet.until_status(id, Status.RUNNING)
        first.line.freeze()
        second = await fleet.started(hold)
        await fleet.end(id)
        first.line.thaw()
        await asyncio.sleep(60)
        found = await read_stats(second.engine, question(fleet.clock.now(), 600))
        assert (found.total.ended, found.total.lost) == (1, 1)

    virtually(scenario)


def test_counts_that_cannot_be_stored_are_reported_and_stored_when_the_store_is_back() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        told = failures_of(member)
        await end_some(fleet, 3)
        member.line.cut = True
        await asyncio.sleep(FLUSH_SECONDS + 2)
        assert await stored(fleet) == []
        assert [event.is_defect for event in told] == [False]
        member.line.cut = False
        await asyncio.sleep(FLUSH_SECONDS + 2)
        assert ended(await stored(fleet)) == 3

    virtually(scenario)


def test_counts_that_are_too_late_are_dropped_since_their_file_may_be_folded() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        await end_some(fleet, 3)
        counters = member.engine.part(Counters)
        member.line.swallowed["put_entry"] = 1
        with pytest.raises(StoreUnavailable):
            await counters.flush()
        member.line.cut = True
        await asyncio.sleep(60 + LATE_SECONDS + FLUSH_SECONDS)
        member.line.cut = False
        await asyncio.sleep(2 * FLUSH_SECONDS)
        assert ended(await stored(fleet)) == 0
        await fleet.stop()

    virtually(scenario)


def test_an_end_that_waited_for_the_store_is_counted_beside_the_file_of_its_minute() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        counters, outbox = member.engine.part(Counters), member.engine.outbox
        await asyncio.sleep(60 - fleet.clock.now() % 60 + 55)
        await end_some(fleet, 3)
        await counters.flush()
        await end_some(fleet, 2)
        assert outbox.written
        late = list(outbox.written)
        outbox.written.clear()
        await asyncio.sleep(2 * FLUSH_SECONDS)  # the file of that minute is closed
        outbox.written += late  # whose answers came 20 s later, say
        await counters.flush()
        await counters.flush()
        assert (ended(await stored(fleet)), len(await stored(fleet))) == (5, 2)

    virtually(scenario)


def test_a_file_that_a_user_removed_is_begun_anew() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        await asyncio.sleep(60 - fleet.clock.now() % 60)
        counters = member.engine.part(Counters)
        await end_some(fleet, 3)
        await counters.flush()
        for entry in await stored(fleet):
            assert await fleet.store.remove_entry(entry)
        await end_some(fleet, 1)
        await counters.flush()
        await end_some(fleet, 2)
        await counters.flush()
        assert ended(await stored(fleet)) == 2

    virtually(scenario)


def test_a_defect_in_counting_does_no_harm_to_the_work() -> None:
    """Not even where it is met in the middle of a write."""

    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet, concurrency=1)
        told = failures_of(member)
        counters = member.engine.part(Counters)

        def broken(start: int) -> Any:
            raise ZeroDivisionError

        counters._cells_of = broken  # type: ignore[method-assign]
        await end_some(fleet, 10 * COUNTED_AT_ONCE)
        assert told.unwritten == []
        await asyncio.sleep(2 * FLUSH_SECONDS)
        assert [type(event.error) for event in told] == [ZeroDivisionError] * len(told)
        assert len(told) >= 2
        assert await stored(fleet) == []

    virtually(scenario)


def test_a_store_that_refuses_the_last_counts_is_reported() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        told = failures_of(member)
        await end_some(fleet, 3)
        await fleet.stop()
        member.line.errors["put_entry"] = StoreReadOnly("this user may not write")
        await member.engine.part(Counters).close()
        assert [type(event.error) for event in told] == [StoreReadOnly]

    virtually(scenario)


def test_nothing_is_counted_without_a_retention() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.settings |= {"stats_retention_seconds": 0}
        member = await fleet.started(add)
        await end_some(fleet, 50)
        await asyncio.sleep(3 * FLUSH_SECONDS)
        assert await stored(fleet) == []
        assert member.engine.outbox.written is None
        found = await read_stats(member.engine, question(fleet.clock.now(), 600))
        assert [getattr(found.total, name) for name in COUNTS] == [0] * len(COUNTS)

    virtually(scenario)


def test_lost_attempts_are_counted_by_the_runner_that_recovers_them() -> None:
    async def scenario(fleet: Fleet) -> None:
        async def hold() -> None:
            await asyncio.sleep(30)

        fleet.settings |= {"stats_retention_seconds": 30 * DAY}
        first = await fleet.started(hold)
        id = await fleet.submit("hold")
        await fleet.until_status(id, Status.RUNNING)
        first.crash()
        second = await fleet.started(hold)
        await fleet.end(id)
        found = await read_stats(second.engine, question(fleet.clock.now(), 600))
        assert (found.total.lost, found.total.succeeded) == (1, 1)
        assert [each.id for each in found.retried] == [id]

    virtually(scenario)


def test_files_are_folded_by_the_services_as_time_goes_by() -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await counting(fleet)
        for _ in range(3):
            await end_some(fleet, 10)
            await asyncio.sleep(500)
        workers, minutes = [len(await fleet.store.entries(APP, kind)) for kind in ("stats.worker", "stats.minute")]
        assert (workers, minutes) == (1, 2)
        found = await read_stats(member.engine, question(fleet.clock.now(), DAY))
        assert found.total.succeeded == 30

    virtually(scenario)
