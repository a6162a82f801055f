"""Streams in the simulation: seeds hold, and bugs planted in streams do not survive it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.checker import Violation
from tests.support.simulation import Plan, Run, dying_tellers, simulate, tales_of, zombie_tellers
from tests.support.simulation.trips import id_of
from tests.support.witness import What, digest_of

from holdfast.executors.call import Outcome
from holdfast.executors.chunks import RESTART
from holdfast.model import log
from holdfast.model.log import AppendVerdict, Behind, Fenced, Page
from holdfast.model.status import Status
from holdfast.streams.reader import Cursor, LogReader, PlacedChunk
from holdfast.streams.writer import ChunkWriter, OpenStream, Pending
from holdfast.workflows import events as e

# The dead leave coroutines that were never begun.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS = 8
MOST_SEEDS = 60
MANY = int(os.environ.get("HOLDFAST_TEST_SIMULATION_SEEDS", "2000"))


def violations(run: Run) -> list[Violation]:
    """What the checker finds; and bodies that have said something twice, or not at all."""
    return [*run.violations, *bodies_said_it_once(run)]


def bodies_said_it_once(run: Run) -> Iterator[Violation]:
    records = {record.id: record for record in run.evidence.dump.records}
    for trip in run.plan.trips:
        id = id_of(trip.token)
        legs = [f"{trip.token} {number}" for number, leg in enumerate(trip.legs) if leg.kind == "said"]
        expected = [digest_of(each) for each in legs]
        there = [line.digest for line in run.evidence.dump.streams.get(f"{id}/said", ())]
        has_succeeded = id in records and records[id].status is Status.SUCCESS
        if there != expected[: len(there)] or (has_succeeded and there != expected):
            yield Violation("I11", id, f"its body has said {len(there)} of {len(expected)}, or something else")


def hold(seeds: Sequence[int], plan_for: Callable[[int], Plan] = tales_of) -> list[Run]:
    runs = []
    for seed in seeds:
        runs.append(run := simulate(plan_for(seed)))
        assert not violations(run), "\n".join([str(run), *map(str, bodies_said_it_once(run))])
    return runs


def test_seeds_hold_and_meet_everything() -> None:
    """A simulation in which nothing happens proves nothing."""
    runs = hold(range(SEEDS))
    lines = [line for run in runs for stream in run.evidence.dump.streams.values() for line in stream]
    assert {line.kind for line in lines} >= {0, RESTART}
    assert {bool(line.writer) for line in lines} == {True, False}
    assert max(line.epoch for line in lines) >= 3
    assert sum(len(run.evidence.ledgers.of(What.CHUNK_READ)) for run in runs) > 100
    events = {line.event.type for run in runs for each in run.evidence.dump.logs.values() for line in each}
    assert {e.STREAM_OPENED, e.STREAM_WRITTEN} <= events


@pytest.mark.parametrize("plan_for", [zombie_tellers, dying_tellers])
def test_seeds_of_one_fault_hold(plan_for: Callable[[int], Plan]) -> None:
    hold(range(1), plan_for)


@pytest.mark.faults
@pytest.mark.parametrize("first", range(SEEDS, 288, 70))
def test_more_seeds_hold(first: int) -> None:
    hold(range(first, first + 70))


@pytest.mark.torture
def test_many_seeds_hold() -> None:
    hold(range(288, 288 + MANY))


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(tales_of(3)).trace == simulate(tales_of(3)).trace


# --- planted bugs


def chunks_in_the_order_of_a_clock(patch: pytest.MonkeyPatch) -> None:
    """As if each chunk had a time for its key, by a clock that is set back at every third chunk."""
    take = ChunkWriter._next

    def sorted_by_time(self: ChunkWriter, stream: OpenStream) -> list[Pending]:
        batch = list(enumerate(take(self, stream)))
        return [pending for _, pending in sorted(batch, key=lambda each: each[0] - 2 * (each[0] % 3 == 1))]

    patch.setattr(ChunkWriter, "_next", sorted_by_time)


def a_zombie_goes_behind_its_successor(patch: pytest.MonkeyPatch) -> None:
    """A chunk before the fence: no page of a later owner refuses it."""
    judge = log.judge

    def lenient(page: Page, there: Sequence[Page]) -> AppendVerdict:
        verdict = judge(page, there)
        return Behind(tuple(there)) if isinstance(verdict, Fenced) and log.is_stream(page.run) else verdict

    patch.setattr("holdfast.store.memory.store.judge", lenient)


def a_step_ends_before_its_chunks_are_durable(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: ChunkWriter, outcomes: Sequence[tuple[str, Outcome]], deliver: Any) -> Any:
        return outcomes

    patch.setattr(ChunkWriter, "hold", at_once)


def a_body_does_not_look_for_what_it_has_said(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: ChunkWriter, stream: OpenStream, wanted: Pending) -> None:
        return None

    patch.setattr(ChunkWriter, "_search", nothing)


def pages_whose_replies_were_lost_are_written_again(patch: pytest.MonkeyPatch) -> None:
    page = ChunkWriter._page

    def another(self: ChunkWriter, stream: OpenStream) -> Page:
        made = page(self, stream)
        append = self._store.append

        async def again(pages: Sequence[Page]) -> Any:
            # Copies: the store of the simulation keeps what it is given.
            anew = [msgspec.structs.replace(each, operation=self._engine.ids.operation()) for each in pages]
            return await append(
                [each if log.is_stream(page.run) else page for each, page in zip(anew, pages, strict=True)]
            )

        if getattr(self._store, "_forgets", None) is None:
            self._store._forgets = True  # type: ignore[attr-defined]
            self._store.append = again  # type: ignore[method-assign]
        return made

    patch.setattr(ChunkWriter, "_page", another)


def a_reader_skips_a_chunk_when_several_come(patch: pytest.MonkeyPatch) -> None:
    wanted = LogReader._wanted

    def fewer(self: LogReader, cursor: Cursor, pages: Sequence[Page]) -> list[PlacedChunk]:
        items = wanted(self, cursor, pages)
        return [*items[:-2], *items[-1:]]

    patch.setattr(LogReader, "_wanted", fewer)


PLANTED = [
    chunks_in_the_order_of_a_clock,
    a_zombie_goes_behind_its_successor,
    a_step_ends_before_its_chunks_are_durable,
    a_body_does_not_look_for_what_it_has_said,
    pages_whose_replies_were_lost_are_written_again,
    a_reader_skips_a_chunk_when_several_come,
]


PLANS: dict[str, Callable[[int], Plan]] = {
    "a_zombie_goes_behind_its_successor": zombie_tellers,
    "a_body_does_not_look_for_what_it_has_said": dying_tellers,
}
"""Faults that show a bug which plans of chance seldom show."""


def caught(plan_for: Callable[[int], Plan]) -> Plan:
    for seed in range(MOST_SEEDS):
        run = simulate(plan_for(seed))
        if "I11" in {violation.invariant for violation in violations(run)}:
            return run.plan
    raise AssertionError(f"no seed of {MOST_SEEDS} shows it")


@pytest.mark.parametrize("plant", PLANTED, ids=[plant.__name__ for plant in PLANTED])
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    caught(PLANS.get(plant.__name__, tales_of))
