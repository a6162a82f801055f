"""Simulated rates: seeds hold, and planted bugs do not survive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.simulation import dying_starters, rates_of, simulate
from tests.support.test_simulation import caught

from holdfast.model import limits, rates
from holdfast.model.rates import Bucket
from holdfast.model.status import Status
from holdfast.runtime.limits import Limits


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_seeds_hold(first: int) -> None:
    for seed in range(first, first + 10):
        run = simulate(rates_of(seed))
        assert not run.violations, str(run)


def test_rates_on_dying_runners_hold() -> None:
    for seed in range(4):
        run = simulate(dying_starters(seed))
        assert not run.violations, str(run)


def test_the_seeds_meet_what_may_happen_to_a_waiter() -> None:
    runs = [simulate(plan(seed)) for plan in (rates_of, dying_starters) for seed in range(4)]
    walked = [
        [line.status for line in record.history]
        for run in runs
        for record in run.evidence.dump.records
        if record.terms.rate_key is not None
    ]
    assert any(Status.CONCURRENCY_CONTROLLED in each for each in walked)
    assert any(Status.RUNNING_RECOVERY in each for each in walked)
    assert any(Status.RETRY in each for each in walked)


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(rates_of(3)).trace == simulate(rates_of(3)).trace


def a_takeover_takes_no_start(patch: pytest.MonkeyPatch) -> None:
    real = rates.rate_for
    patch.setattr(limits, "rate_for", lambda record, known: None if record.epoch else real(record, known))


def each_claim_has_a_bucket_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """As if a runner kept its buckets in memory."""
    patch.setattr(rates.RateBuckets, "changed", lambda self: [])


def every_start_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    start = Bucket.start

    def twice(self: Bucket, id: str, at: float, **named: Any) -> Bucket | None:
        after = start(self, id, at, **named)
        return self if after is not None and self.taken % 2 == 0 and self.last[:1] != ((id, at),) else after

    patch.setattr(Bucket, "start", twice)


def nobody_sweeps(patch: pytest.MonkeyPatch) -> None:
    """The runner that was to claim the next call has died, or the call was cancelled: nobody lets another go on."""

    async def nothing(self: Any, *given: Any) -> list[Any]:
        return []

    patch.setattr(Limits, "_forgotten", nothing)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Any]] = [
    (a_takeover_takes_no_start, "rate", dying_starters),
    (each_claim_has_a_bucket_of_its_own, "rate", rates_of),
    (every_start_is_given_twice, "rate", rates_of),
    (nobody_sweeps, "I1", dying_starters),
]


@pytest.mark.parametrize(("plant", "expected", "plan"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], expected: str, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    caught(expected, range(36, 76), plan)
