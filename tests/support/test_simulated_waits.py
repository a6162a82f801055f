"""Simulated parents that wait for children: seeds hold, and planted bugs do not survive them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.simulation import dying_families, families_of, simulate
from tests.support.test_simulation import caught

from holdfast.fleet import recovery
from holdfast.model.status import Status
from holdfast.runtime import waits
from holdfast.runtime.waits import WorkerWaits

KNOWN = (9, 19)  # they failed once


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_seeds_hold(first: int) -> None:
    for seed in range(first, first + 10):
        run = simulate(families_of(seed))
        assert not run.violations, str(run)


@pytest.mark.parametrize("seed", KNOWN)
def test_seeds_that_failed_once_hold(seed: int) -> None:
    run = simulate(families_of(seed))
    assert not run.violations, str(run)


def test_families_on_dying_runners_hold() -> None:
    for seed in range(4):
        run = simulate(dying_families(seed))
        assert not run.violations, str(run)


def test_the_seeds_meet_what_may_happen_to_a_parent() -> None:
    runs = [simulate(plan(seed)) for plan in (families_of, dying_families) for seed in range(5)]
    after = {
        (line.status, following.status)
        for run in runs
        for record in run.evidence.dump.records
        for line, following in zip(record.history, record.history[1:], strict=False)
    }
    wanted = ("resumed", "running_recovery", "cancelling")
    assert {(Status.PAUSED, Status(each)) for each in wanted} <= after
    messages = {record.error.type_name for run in runs for record in run.evidence.dump.records if record.error}
    assert "holdfast.errors:CircularWait" in messages


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(families_of(3)).trace == simulate(families_of(3)).trace


def no_slot_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    """The slot was given to others, and the parent goes on as if it had it."""

    async def resume(self: WorkerWaits, call: Any) -> None:
        real = self._worker.want_slots
        self._worker.want_slots = lambda id, count, grant: grant(count)  # type: ignore[method-assign]
        try:
            await going_on(self, call)
        finally:
            self._worker.want_slots = real  # type: ignore[method-assign]

    going_on = WorkerWaits._resume
    patch.setattr(WorkerWaits, "_resume", resume)


def code_goes_on_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    write = waits._Writer.write

    async def early(self: Any, record: Any, change: Any) -> Any:
        if getattr(change, "name", "") != "resumed":
            return await write(self, record, change)
        asyncio.get_running_loop().create_task(write(self, record, change))
        return None

    patch.setattr(waits._Writer, "write", early)


def no_slot_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerWaits, "_pause", lambda self, call: self._keep(call, "it never does"))


def circles_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waits, "find_circle", lambda start, needs: ())


def recovery_overlooks_the_paused(patch: pytest.MonkeyPatch) -> None:
    pages = recovery.pages

    async def without(*args: Any, **named: Any) -> Any:
        async for page in pages(*args, **named):
            yield [record for record in page if record.status is not Status.PAUSED]

    patch.setattr(recovery, "pages", without)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Any]] = [
    (no_slot_is_taken_again, "slots", families_of),
    (code_goes_on_before_it_is_written, "paused", families_of),
    (no_slot_is_given_back, "I1", families_of),
    (circles_are_not_looked_for, "I1", families_of),
    (recovery_overlooks_the_paused, "I1", dying_families),
]


@pytest.mark.parametrize(("plant", "expected", "plan"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], expected: str, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    caught(expected, range(40), plan)
