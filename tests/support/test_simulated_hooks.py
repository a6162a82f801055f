"""Hooks in the simulation: payloads come once, in order, to their own hook, whatever strikes; planted bugs are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.simulation import Plan, client, hooks_of, simulate

from holdfast.workflows import events as e
from holdfast.workflows import hooks, hooks_resuming, hooks_store
from holdfast.workflows.hooks_records import name_of
from holdfast.workflows.rules import Replay
from holdfast.workflows.run import Run

# The dead leave coroutines that were never begun.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SEEDS, MOST_SEEDS = 10, 40


@pytest.mark.faults
@pytest.mark.parametrize("first", range(SEEDS, 500, 60))
def test_more_seeds_hold(first: int) -> None:
    for seed in range(first, first + 60):
        run = simulate(hooks_of(seed))
        assert not run.violations, str(run)


def test_the_first_seeds_hold_and_meet_everything() -> None:
    runs = [simulate(hooks_of(seed)) for seed in range(SEEDS)]
    assert [str(run) for run in runs if run.violations] == []
    lines = [line for run in runs for log in run.evidence.dump.logs.values() for line in log]
    assert {line.event.type for line in lines} >= e.HOOKS - {e.HOOK_CONFLICT}
    told = {event.what for run in runs for event in run.evidence.ledgers.events}
    assert told >= {"resume.ok", "resume.fail", "resume.unknown"}
    assert max(line.epoch for line in lines if line.event.type == e.HOOK_RECEIVED) >= 3


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(hooks_of(3)).trace == simulate(hooks_of(3)).trace


# --- planted bugs


def tokens_compared_by_prefix(patch: pytest.MonkeyPatch) -> None:
    def short(token: str) -> str:
        return name_of(token[:5])

    patch.setattr(hooks, "name_of", short)
    patch.setattr(client, "name_of", short)


def payloads_taken_without_a_look_at_the_log(patch: pytest.MonkeyPatch) -> None:
    init = Replay.__init__

    def forgetful(self: Replay, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self.entries = {entry for entry in self.entries if not entry.startswith("hook:")}

    patch.setattr(Replay, "__init__", forgetful)


def acknowledged_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    push = hooks_resuming.push_all

    async def hasty(engine: Any, pushes: Sequence[Any]) -> Any:
        try:
            return await push(engine, pushes)
        except Exception:
            return [hooks_resuming.Applied()]

    patch.setattr(hooks_resuming, "push_all", hasty)


def hooks_stay_behind(patch: pytest.MonkeyPatch) -> None:
    async def nothing(*args: Any) -> None:
        return None

    patch.setattr(hooks_store, "_end", nothing)


def last_payload_first(patch: pytest.MonkeyPatch) -> None:
    take = Run.take_inbox
    patch.setattr(Run, "take_inbox", lambda self, inbox: take(self, inbox[::-1]))


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    tokens_compared_by_prefix,
    payloads_taken_without_a_look_at_the_log,
    acknowledged_before_it_is_written,
    hooks_stay_behind,
    last_payload_first,
]


def caught(seeds: Sequence[int]) -> Plan:
    """The plan of the first seed that shows the bug, by I12."""
    for seed in seeds:
        run = simulate(hooks_of(seed))
        if "I12" in {violation.invariant for violation in run.violations}:
            return run.plan
    raise AssertionError(f"no seed under {len(seeds)} shows it")


@pytest.mark.parametrize("plant", PLANTED, ids=[plant.__name__ for plant in PLANTED])
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    caught(range(MOST_SEEDS))
