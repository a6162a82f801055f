"""When a worker looks for work: expectations spare looks, and never prevent one for long."""

from __future__ import annotations

import pytest

from holdfast.model.claims import Claimed
from holdfast.runtime.claim import DOUBT_SECONDS, MANY, MAX_DOUBT_SECONDS, Ask, Demand, Turn, Turns
from holdfast.testing.samples import START, invocation

POLL, TRUST = 1.0, 8
FALLBACK = POLL * TRUST


def claim(demand: Demand, most: int, got: int, elapsed: float, *, turn: Turn | None = None, cut: bool = False) -> int:
    """Let it claim: up to so many, and so many are there. Return how many it asked for."""
    expected = demand.taken()
    asked = min(most, expected)
    ask = Ask(["lane"], asked, turn)
    records = tuple(invocation(f"i{number}") for number in range(got))
    demand.learn(Turns({}), ask, Claimed(records, cut=cut), expected, elapsed)
    return asked


def pause(demand: Demand, elapsed: float) -> float:
    return demand.pause(START, elapsed, TRUST)


@pytest.fixture
def demand() -> Demand:
    """One that has looked, and found nothing."""
    demand = Demand(POLL)
    claim(demand, 4, 0, elapsed=0.0)
    assert pause(demand, 0.0) == FALLBACK
    return demand


def test_a_claim_that_got_exactly_what_was_announced_looks_again_soon(demand: Demand) -> None:
    demand.announce(1)
    assert claim(demand, 4, 1, elapsed=1.0) == 1
    assert pause(demand, 1.0) == DOUBT_SECONDS


def test_a_claim_that_got_less_relies_on_hints(demand: Demand) -> None:
    demand.announce(2)
    claim(demand, 4, 1, elapsed=1.0)
    assert pause(demand, 1.0) == FALLBACK


def test_neither_outcomes_nor_hints_put_a_look_off(demand: Demand) -> None:
    """Where a task comes every tenth of a second, a look that begins anew with each of them never comes."""
    for tenth in range(1, 20):
        demand.announce(1)
        claim(demand, 4, 1, elapsed=tenth / 10)
    assert pause(demand, 1.9) == pytest.approx(0.1 + MAX_DOUBT_SECONDS - 1.9)
    assert pause(demand, 0.1 + MAX_DOUBT_SECONDS) == 0.0


def test_the_bell_does_not_put_the_fallback_off(demand: Demand) -> None:
    for second in range(9):
        assert pause(demand, float(second)) == max(0.0, FALLBACK - second)


def test_after_the_turn_of_one_queue_anything_may_wait(demand: Demand) -> None:
    demand.announce(1)
    claim(demand, 4, 1, elapsed=0.0, turn=Turn("mail", 1))
    assert demand.look
    assert demand.expected == MANY


def test_before_one_that_needs_a_slot_there_is_always_another_look(demand: Demand) -> None:
    demand.announce(1)
    claim(demand, 4, 1, elapsed=0.0, cut=True)
    assert demand.look
    assert demand.expected >= 1
