"""What a simulated run is judged by: the checker's invariants, and what the simulation saw with its own eyes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from holdfast.lifecycle.records import HistoryEntry
from holdfast.lifecycle.status import Status
from holdfast.testing import checker
from holdfast.testing.checker import Bounds, Fault, FaultKind, Faults, Violation
from holdfast.testing.simulation.plan import Plan
from holdfast.testing.simulation.world import (
    CYCLE_SECONDS,
    DEAD_AFTER_SECONDS,
    MOST_CRASHES,
    Evidence,
)
from holdfast.testing.witness import Ledgers, What

_BY_HISTORY = ("I2", "I3", "I4", "I6")


def judged(plan: Plan, evidence: Evidence) -> Iterator[Violation]:
    yield from evidence.refuted
    if not evidence.healed:
        yield Violation("I1", None, "when all was well again, work did not come to its end, or runners to theirs")
    # A claim that was carried out when nobody waited for it any more is like a cut line: its work is found by an audit.
    late = Fault(kind=FaultKind.CUT, at=0.0, ids=tuple(sorted(evidence.came_late)))
    faults = Faults((*evidence.faults.all, *((late,) if late.ids else ())))
    for violation in checker.check(evidence.dump, evidence.ledgers, faults, _bounds()):
        if not _was_audited(violation, evidence):
            yield violation
    for violation in checker.check(evidence.core, Ledgers(), Faults(), _bounds()):
        if violation.invariant in _BY_HISTORY:
            yield violation
    if plan.weather.is_fair:
        yield from _died_of_nothing(evidence)


def _bounds() -> Bounds:
    return Bounds(
        final_seconds=60.0,
        recovery_seconds=25.0,
        dead_after_seconds=DEAD_AFTER_SECONDS,
        crash_cap=MOST_CRASHES,
        service_seconds={"core": CYCLE_SECONDS},
    )


def _was_audited(violation: Violation, evidence: Evidence) -> bool:
    """Whether it was its own owner who gave the work back, because it was handed it too late."""
    last = violation.witness[-1:]
    told = isinstance(last[0], HistoryEntry) and last[0].status is Status.RUNNING_RECOVERY if last else False
    return violation.invariant == "I20" and told and violation.id in evidence.came_late


def _died_of_nothing(evidence: Evidence) -> Iterator[Violation]:
    """I20: an outage of the database is nobody's death; only a fault of a runner's own is."""
    strikes = sorted((fault.at, fault.pid) for fault in evidence.faults.all if fault.kind.explains_reruns and fault.pid)
    struck = {pid: at for at, pid in reversed(strikes)}  # when first
    pids = {event.owner: event.pid for event in evidence.ledgers.of(What.RUNNER_START)}
    for at, runner in evidence.declared:
        if struck.get(pids.get(runner, 0), inf) > at:
            yield Violation("I20", None, f"the runner {runner} was declared dead, and no fault of its own struck it")
