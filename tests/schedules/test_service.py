"""No tick fires twice, and none is lost against its schedule's policy: whoever fires, whatever fails in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.schedules.test_rules import START, schedule
from tests.support.engines import make_engine

from holdfast.errors import StoreUnavailable
from holdfast.model import changes
from holdfast.model.records import Entry, InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.cancel import Canceller
from holdfast.runtime.engine import Engine
from holdfast.schedules import Every
from holdfast.schedules.records import CatchUp, Overlap, Pause, Rules, ScheduleRecord, from_entry, to_entry
from holdfast.schedules.rules import due_at, invocation_id, moved
from holdfast.schedules.service import MAX_QUEUED, Scheduler, ScheduleRegistry
from holdfast.store.contract import Filter
from holdfast.store.memory.store import MemoryStore
from holdfast.testing import FakeClock
from holdfast.testing.samples import lane_of, wish

ALL = Rules(catch_up=CatchUp.ALL, catch_up_most=1000)


class Asked(Canceller):
    """Notes what it is asked to cancel, and lets it be."""

    def __init__(self, engine: Engine, asked: list[tuple[str, str]]) -> None:
        super().__init__(engine)
        self._asked = asked

    async def cancel(self, ids: Sequence[str], *, by: str, reason: str = "", children: bool | None = None) -> list[Any]:
        self._asked += [(id, reason) for id in ids]
        return []


class Shaky(MemoryStore):
    """Loses a message when it is told to: before the write takes place, or after it."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.breaks: tuple[str, bool] | None = None
        self.slow_seconds = 0.0
        self._fake = clock

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        return await self._lossy("insert", super().insert(records))

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        return await self._lossy("put_entry", super().put_entry(entry, over))

    async def get(self, app: str, ids: Sequence[str]) -> Sequence[InvocationRecord | None]:
        self._fake.advance(self.slow_seconds)
        return await super().get(app, ids)

    async def _lossy(self, name: str, write: Any) -> Any:
        breaks, self.breaks = self.breaks, None
        if breaks == (name, False):
            write.close()
            raise StoreUnavailable("away")
        answer = await write
        if breaks == (name, True):
            raise StoreUnavailable("the reply was lost")
        self.breaks = breaks
        return answer


class House:
    """A store with a clock that stands still, and as many schedulers as are wanted."""

    def __init__(self, *records: ScheduleRecord) -> None:
        self.clock = FakeClock(START)
        self.store = Shaky(self.clock)
        self.cancelled: list[tuple[str, str]] = []
        for record in records:
            assert asyncio.run(self.store.put_entry(to_entry(record)))

    def scheduler(self) -> Scheduler:
        engine = make_engine(self.store, self.clock, random.Random(1), app="shop")
        engine.canceller = Asked(engine, self.cancelled)
        return Scheduler(engine)

    def fire(self, scheduler: Scheduler | None = None) -> bool:
        return asyncio.run((scheduler or self.scheduler()).fire_due())

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.fire()

    def found(self) -> list[InvocationRecord]:
        return sorted(asyncio.run(self.store.find("shop", Filter(), 10_000)), key=lambda record: record.due_at)

    def ticks(self) -> list[float]:
        return [record.due_at - START for record in self.found()]

    def entry(self) -> ScheduleRecord:
        (entry,) = asyncio.run(self.store.entries("shop", "schedule"))
        return from_entry(entry)

    def change(self, **fields: Any) -> None:
        record = moved(self.entry(), self.clock.now(), **fields)
        assert asyncio.run(self.store.put_entry(to_entry(record)))

    def cancel_tasks(self) -> None:
        async def end() -> None:
            claim = wish("claim", lanes=(lane_of("default", "shop:clean"),), limit=1000, at=self.clock.now() + 1e9)
            for record in (await self.store.claim(claim)).records:
                change = changes.completed(record, result=b"\x01", operation=f"end {record.id}", at=START)
                await self.store.apply([change])

        asyncio.run(end())


def test_a_tick_is_an_invocation_that_says_so() -> None:
    house = House(schedule())
    house.after(10)
    (record,) = house.found()
    assert (record.task, record.arguments, record.status) == ("shop:clean", b"\x90", Status.REGISTERED)
    assert record.history[0].why == "tick 2023-11-14T22:00:10+00:00 of the schedule 'nightly'"
    assert record.due_at == START + 10
    progress = house.entry().progress
    assert (progress.fired, progress.last_id, progress.last_tick) == (1, record.id, START + 10)


def test_to_register_fires_nothing() -> None:
    house = House(schedule())
    for _ in range(3):
        house.fire()
    assert house.found() == []


def test_jitter_delays_the_invocation_and_not_the_tick() -> None:
    record = schedule(rules=Rules(jitter_seconds=5))
    house = House(record)
    house.after(10)
    assert [found.due_at for found in house.found()] == [due_at(record, START + 10)]


def test_an_idle_look_costs_nothing_until_something_is_due() -> None:
    house = House(schedule(Every(1000.0)))
    looks = 0

    class Counting(MemoryStore):
        async def entries(self, app: str, kind: str, *names: Any, **more: Any) -> Sequence[Entry]:
            nonlocal looks
            looks += 1
            return await super().entries(app, kind, *names, **more)

    house.store.__class__ = type("Counted", (Counting, Shaky), {})
    scheduler = house.scheduler()
    for _ in range(100):
        house.fire(scheduler)
        house.clock.advance(0.1)
    assert looks == 10
    scheduler.look_soon()
    house.fire(scheduler)
    assert looks == 11


def test_a_tick_is_fired_the_moment_it_is_due_although_looks_are_rare() -> None:
    house = House(schedule(Every(13.0, START)))
    scheduler = house.scheduler()
    for _ in range(27):
        house.clock.advance(1)
        house.fire(scheduler)
    assert house.ticks() == [13.0, 26.0]


# --- faults


@pytest.mark.parametrize("what", ["insert", "put_entry"])
@pytest.mark.parametrize("applied", [False, True])
def test_a_crash_between_any_two_writes_fires_a_tick_once(what: str, applied: bool) -> None:
    house = House(schedule())
    house.clock.advance(10)
    house.store.breaks = (what, applied)
    scheduler = house.scheduler()
    with pytest.raises(StoreUnavailable):
        house.fire(scheduler)
    house.fire(scheduler)
    assert house.ticks() == [10]
    assert house.entry().progress.fired == 1
    house.after(10)
    assert house.ticks() == [10, 20]


def test_two_at_once_fire_the_same() -> None:
    house = House(*[schedule(name=f"s{n}", uid=f"u{n}") for n in range(5)])
    house.clock.advance(10)

    async def both() -> None:
        await asyncio.gather(*(house.scheduler().fire_due() for _ in range(4)))

    asyncio.run(both())
    assert house.ticks() == [10] * 5


def test_a_clock_that_is_set_back_repeats_nothing() -> None:
    house = House(schedule(rules=ALL))
    house.after(30)
    house.clock.set(START)
    for _ in range(5):
        house.after(10)
    assert house.ticks() == [10, 20, 30, 40, 50]


def test_a_clock_that_jumps_forth_and_back_repeats_nothing() -> None:
    house = House(schedule(rules=ALL))
    house.clock.set(START + 60)
    house.fire()
    house.clock.set(START)
    for _ in range(8):
        house.after(10)
    assert house.ticks() == [10, 20, 30, 40, 50, 60, 70, 80]


def test_a_decision_that_took_too_long_is_thrown_away() -> None:
    house = House(schedule(rules=Rules(overlap=Overlap.SKIP)))
    house.after(10)
    house.cancel_tasks()
    house.store.slow_seconds = 31
    house.after(10)
    assert house.ticks() == [10]
    house.store.slow_seconds = 0
    house.fire()
    assert len(house.ticks()) == 2


def test_one_that_cannot_be_read_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    house = House(schedule())
    bad = Entry(app="shop", kind="schedule", name="a bad one", body=b'{"from": "the future"}', due_at=START + 1)
    asyncio.run(house.store.put_entry(bad))
    house.after(10)
    assert house.ticks() == [10]
    assert "'a bad one' cannot be read" in caplog.text


def test_many_that_cannot_be_read_do_not_stand_in_front_of_the_others() -> None:
    house = House(schedule())
    for number in range(120):
        bad = Entry(app="shop", kind="schedule", name=f"bad {number}", body=b"{}", due_at=START + 1)
        asyncio.run(house.store.put_entry(bad))
    scheduler = house.scheduler()
    house.clock.advance(10)
    while house.fire(scheduler):
        pass
    assert house.ticks() == [10]


def test_one_that_cannot_be_read_here_is_still_on_time_for_somebody_who_can() -> None:
    """In a mixed fleet the next one in turn may know it; what is a minute late would be missed."""
    house = House(schedule(Every(600.0), rules=Rules(catch_up=CatchUp.NONE)))
    (good,) = asyncio.run(house.store.entries("shop", "schedule"))
    assert asyncio.run(house.store.put_entry(replace(good, version=2, body=b"{}")))
    house.after(600 - START % 600 + 0.5)
    (put_off,) = asyncio.run(house.store.entries("shop", "schedule"))
    assert asyncio.run(house.store.put_entry(replace(good, version=put_off.version + 1, due_at=put_off.due_at)))
    house.after((put_off.due_at or 0.0) - house.clock.now())
    assert len(house.found()) == 1


def test_one_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    house = House(schedule(rules=Rules(overlap=Overlap.CANCEL)))
    house.after(10)
    asyncio.run(house.store.put_entry(to_entry(replace(schedule(), name="other", uid="other", through=START + 11))))

    async def fail(ids: Sequence[str], **how: Any) -> list[Any]:
        raise LookupError("something strange")

    scheduler = house.scheduler()
    scheduler._engine.canceller.cancel = fail  # type: ignore[method-assign]
    house.clock.advance(10)
    house.fire(scheduler)
    assert len(house.found()) == 2
    assert "put off schedule 'nightly': something strange" in caplog.text
    house.clock.advance(10)
    house.fire(scheduler)
    assert len(house.found()) == 3


# --- rules


def test_skip_passes_over_what_comes_while_one_is_under_way() -> None:
    house = House(schedule(rules=Rules(overlap=Overlap.SKIP)))
    house.after(10)
    house.after(10)
    assert house.ticks() == [10]
    house.cancel_tasks()
    house.after(10)
    assert house.ticks() == [10, 30]
    assert house.entry().progress.skipped == 1


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.CANCEL])
def test_what_fired_before_a_crash_counts_as_under_way(overlap: Overlap) -> None:
    """The tick is inserted, and the schedule does not say so yet."""
    house = House(schedule(rules=Rules(overlap=overlap)))
    house.store.breaks = ("put_entry", False)
    with pytest.raises(StoreUnavailable):
        house.after(10)
    assert (house.ticks(), house.entry().progress.fired) == ([10], 0)
    house.after(10)
    if overlap is Overlap.SKIP:
        assert (house.ticks(), house.cancelled) == ([10], [])
        house.after(10)
        assert house.ticks() == [10]
        house.cancel_tasks()
        house.after(10)
        assert house.ticks() == [10, 40]
    else:
        assert house.ticks() == [10, 20]
        assert [id for id, _ in house.cancelled] == [invocation_id(house.entry(), START + 10)]


def test_a_tick_that_fires_again_after_a_crash_does_not_cancel_itself() -> None:
    """Nothing but that tick is due, and what is under way is its own invocation."""
    house = House(schedule(rules=Rules(overlap=Overlap.CANCEL)))
    house.store.breaks = ("put_entry", False)
    with pytest.raises(StoreUnavailable):
        house.after(10)
    house.after(1)
    assert (house.ticks(), house.entry().progress.fired, house.cancelled) == ([10], 1, [])


def test_queue_fires_one_after_the_other() -> None:
    house = House(schedule(rules=Rules(overlap=Overlap.QUEUE)))
    for _ in range(3):
        house.after(10)
    assert house.ticks() == [10]
    assert house.entry().progress.queued == (START + 20, START + 30)
    house.cancel_tasks()
    house.after(1.5)
    assert house.ticks() == [10, 20]
    house.after(1.5)
    assert house.ticks() == [10, 20]
    house.cancel_tasks()
    house.after(1.5)
    assert house.ticks() == [10, 20, 30]


def test_a_queue_has_an_end() -> None:
    house = House(schedule(Every(1.0), rules=Rules(overlap=Overlap.QUEUE)))
    for _ in range(40):
        house.after(50)
    assert len(house.entry().progress.queued) == MAX_QUEUED


def test_cancel_ends_the_one_before() -> None:
    house = House(schedule(rules=Rules(overlap=Overlap.CANCEL)))
    house.after(10)
    house.after(10)
    first, _ = house.found()
    assert house.cancelled == [(first.id, "the next tick of the schedule 'nightly' takes its place")]


def test_unique_lets_one_wait_at_a_time() -> None:
    house = House(schedule(rules=Rules(unique=True)))
    house.after(10)
    house.after(10)
    assert house.ticks() == [10]
    assert house.entry().progress.skipped == 1
    house.cancel_tasks()
    house.after(10)
    assert house.ticks() == [10, 30]


def test_a_changed_expression_takes_effect_from_now_on() -> None:
    house = House(schedule(rules=ALL))
    house.after(10)
    house.clock.advance(15)
    house.change(timing=Every(100.0), through=house.clock.now())
    house.after(200)
    assert house.ticks()[0] == 10
    assert all((START + tick) % 100 == 0 for tick in house.ticks()[1:])
    assert len(house.ticks()) == 3


class Chaos:
    """Whatever may happen to a schedule; and what its invocations have to be in the end."""

    STEPS = st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.floats(0, 45)),
            st.tuples(st.just("break"), st.sampled_from(["insert", "put_entry"]), st.booleans()),
            st.tuples(st.just("set back"), st.floats(0, 100)),
            st.tuples(st.just("both")),
            st.tuples(st.just("end")),
        ),
        max_size=25,
    )


@settings(max_examples=150)
@given(Chaos.STEPS, st.sampled_from([Overlap.ALLOW, Overlap.QUEUE]))
def test_every_tick_fires_once_whatever_happens(steps: list[tuple[Any, ...]], overlap: Overlap) -> None:
    record = schedule(Every(7.0, START), rules=replace(ALL, overlap=overlap))
    house = House(record)
    latest = START
    for step in steps:
        match step:
            case ("wait", seconds):
                house.clock.advance(seconds)
            case ("break", what, applied):
                house.store.breaks = (what, applied)
            case ("set back", seconds):
                house.clock.set(house.clock.now() - seconds)
            case ("both",):
                asyncio.run(_both(house))
            case ("end",):
                house.cancel_tasks()
        latest = max(latest, house.clock.now())
        with contextlib.suppress(StoreUnavailable):
            house.fire()
    house.store.breaks = None
    house.clock.set(latest)
    for _ in range(200):
        house.cancel_tasks()
        house.after(1.1)
        if overlap is Overlap.ALLOW or not house.entry().progress.queued:
            break
    decided = house.entry().through
    expected = [invocation_id(record, tick) for tick in record.timing.ticks(START, decided)]
    if overlap is Overlap.QUEUE:
        expected = expected[: len(expected) - len(house.entry().progress.queued)]
    assert Counter(found.id for found in house.found()) == Counter(expected)


async def _both(house: House) -> None:
    await asyncio.gather(*(house.scheduler().fire_due() for _ in range(2)), return_exceptions=True)


def test_a_pause_in_between_is_respected() -> None:
    house = House(schedule())
    house.change(pause=Pause(at=START))
    house.after(100)
    assert house.found() == []
    house.change(pause=None, through=house.clock.now())
    house.after(10)
    assert house.ticks() == [110]


def test_one_that_is_deleted_and_made_anew_while_it_fires_is_left_as_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its version is the same as that of the one before."""
    house = House(schedule())
    anew = to_entry(replace(schedule(), uid="another", next_at=START + 1000))
    plain = house.store.insert

    async def slow(records: Sequence[InvocationRecord]) -> Sequence[bool]:
        (there,) = await house.store.entries("shop", "schedule")
        assert await house.store.remove_entry(there)
        assert await house.store.put_entry(anew)
        return await plain(records)

    monkeypatch.setattr(house.store, "insert", slow)
    house.after(10)
    assert asyncio.run(house.store.entries("shop", "schedule")) == [anew]


def test_a_change_of_one_that_is_deleted_and_made_anew_meanwhile_is_one_of_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(schedule())
    anew, plain = to_entry(replace(schedule(), uid="another")), house.store.put_entry

    async def slow(entry: Entry, over: Entry | None = None) -> bool:
        monkeypatch.setattr(house.store, "put_entry", plain)
        (there,) = await house.store.entries("shop", "schedule")
        assert await house.store.remove_entry(there)
        assert await plain(anew)
        return await plain(entry, over)

    monkeypatch.setattr(house.store, "put_entry", slow)
    registry = make_engine(house.store, house.clock, random.Random(1), app="shop").part(ScheduleRegistry)
    pause = Pause(at=START, by="ann", why="a test")
    asyncio.run(registry.change(schedule().name, lambda record, now: {"pause": pause}))
    assert (house.entry().uid, house.entry().pause) == ("another", pause)


@pytest.mark.parametrize(("trust", "looks"), [(0, 10), (1, 10), (3, 4), (99, 2)])
def test_where_hints_arrive_looks_are_rarer(trust: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    house, seen = House(), list[float]()
    scheduler = house.scheduler()
    monkeypatch.setattr(type(scheduler._engine.hub), "trust", trust)
    plain = house.store.entries

    async def entries(app: str, kind: str, **more: Any) -> Sequence[Entry]:
        seen.append(house.clock.now())
        return await plain(app, kind, **more)

    monkeypatch.setattr(house.store, "entries", entries)
    for _ in range(100):
        house.fire(scheduler)
        house.clock.advance(0.1)
    assert abs(len(seen) - looks) <= 1, len(seen)
    before = len(seen)
    scheduler.look_soon()
    house.fire(scheduler)
    assert len(seen) == before + 1, "a hint is heard at once"


@pytest.mark.parametrize("when", ["before it reads", "after it has read"])
def test_a_schedule_that_changes_during_a_look_is_looked_at_next(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    scheduler, reads, read = house.scheduler(), 0, house.store.entries

    async def meanwhile(*args: Any, **more: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 1 and when == "before it reads":
            scheduler.look_soon()
        found = await read(*args, **more)
        if reads == 1 and when == "after it has read":
            scheduler.look_soon()
        return found

    monkeypatch.setattr(house.store, "entries", meanwhile)
    for looks in (1, 2, 2):  # there is no reason for a third one
        house.fire(scheduler)
        assert reads == looks
