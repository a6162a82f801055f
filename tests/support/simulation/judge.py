"""What a simulated run is judged by: the checker's invariants, and what the simulation saw with its own eyes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from math import inf

from msgspec.structs import replace
from tests.support import checker
from tests.support.checker import Bounds, Fault, FaultKind, Faults, Violation
from tests.support.checker.case import Case
from tests.support.checker.spans import Span, length, without
from tests.support.checker.timing import free_and_wanted
from tests.support.simulation.plan import Plan
from tests.support.simulation.world import (
    CYCLE_SECONDS,
    DEAD_AFTER_SECONDS,
    MOST_CRASHES,
    Evidence,
)
from tests.support.windows import excess
from tests.support.witness import Ledgers, What

from holdfast.model.rates import is_rate_key, rate_of
from holdfast.model.records import HistoryEntry, InvocationRecord
from holdfast.model.status import Status

SLOT_SECONDS, ROUGH_SLOT_SECONDS = 2.5, 12.0  # how long a slot may stay empty; the latter if messages get lost
ROUGH_CYCLE_SECONDS = 2 * CYCLE_SECONDS  # a runner stores what its code declares first, and tries until it is answered
ROUNDING = 1e-3  # of moments, in calls
_BY_HISTORY = ("I2", "I3", "I4", "I6")


def judged(plan: Plan, evidence: Evidence) -> Iterator[Violation]:
    yield from evidence.refuted
    if not evidence.healed:
        yield Violation("I1", None, "when all was well again, work did not come to its end, or runners to theirs")
    # A claim that was carried out when nobody waited for it any more is like a cut line: its work is found by an audit.
    late = Fault(kind=FaultKind.CUT, at=0.0, ids=tuple(sorted(evidence.came_late)))
    faults = Faults((*evidence.faults.all, *((late,) if late.ids else ())))
    bounds = _bounds() if plan.weather.is_fair else replace(_bounds(), service_seconds={"core": ROUGH_CYCLE_SECONDS})
    for violation in checker.check(evidence.dump, evidence.ledgers, faults, bounds, evidence.bodies):
        if not _was_audited(violation, evidence):
            yield violation
    for violation in checker.check(evidence.core, Ledgers(), Faults(), _bounds()):
        if violation.invariant in _BY_HISTORY:
            yield violation
    yield from _starved(plan, evidence)
    yield from _too_fast(plan, evidence)
    if plan.weather.is_fair:
        yield from _died_of_nothing(evidence)


def _bounds() -> Bounds:
    return Bounds(
        final_seconds=60.0,
        recovery_seconds=25.0,
        may_be_full=True,
        dead_after_seconds=DEAD_AFTER_SECONDS,
        crash_cap=MOST_CRASHES,
        slot_seconds=None,  # places may be few; see `_starved`
        service_seconds={"core": CYCLE_SECONDS},
    )


def _was_audited(violation: Violation, evidence: Evidence) -> bool:
    """Whether it was its own owner who gave the work back, because it was handed it too late."""
    last = violation.witness[-1:]
    told = isinstance(last[0], HistoryEntry) and last[0].status is Status.RUNNING_RECOVERY if last else False
    return violation.invariant == "I20" and told and violation.id in evidence.came_late


def _starved(plan: Plan, evidence: Evidence) -> Iterator[Violation]:
    """I8: by the histories, nobody waits for a slot that is free. A fault, and what it leaves to heal, is an excuse."""
    case = Case(evidence.dump, evidence.ledgers, evidence.faults, _bounds())
    if case.slack == inf:
        return
    disturbed = evidence.faults.windows(aftermath=case.bounds.recovery_seconds)
    most = SLOT_SECONDS if plan.weather.is_fair else ROUGH_SLOT_SECONDS
    keys = {record.limit_key for record in evidence.dump.records if record.limit_key}
    for key in sorted(key for key in keys if not is_rate_key(key)):
        records = [record for record in evidence.dump.records if record.limit_key == key]
        held = [(tenure.since, tenure.until) for record in records for tenure in case.tenures[record.id]]
        held += [span for record in records for span in _spent(case, record, Status.REROUTED)]  # on their way to it
        waits = [span for record in records for span in _spent(case, record, Status.CONCURRENCY_CONTROLLED)]
        for piece in free_and_wanted(plan.limit, held, waits, case.last):
            for free in without(piece, disturbed):
                if length([free]) > most:
                    told = f"a slot of '{key}' was free from {free[0]:.1f} to {free[1]:.1f}, and somebody waited for it"
                    yield Violation("I8", None, told)


def _too_fast(plan: Plan, evidence: Evidence) -> Iterator[Violation]:
    """In any window, no key of a rate has more claims than rate × time + burst."""
    claims: dict[str, list[float]] = defaultdict(list)
    for record in evidence.dump.records:
        if (key := record.terms.rate_key) is not None:
            claims[key] += [line.at for line in record.history if line.status is Status.PENDING]
    rate = rate_of(plan.rate, plan.burst)
    for key, moments in claims.items():
        if (over := excess(moments, 1 / rate.interval, rate.burst)) > ROUNDING:
            yield Violation("rate", None, f"{over:.2f} claims of '{key}' above {rate} with a burst of {rate.burst}")


def _spent(case: Case, record: InvocationRecord, status: Status) -> Iterator[Span]:
    """When it had this status."""
    for entry, after in zip_longest(record.history, record.history[1:]):
        if entry.status is status:
            yield case.time_of(entry), inf if after is None else case.time_of(after)


def _died_of_nothing(evidence: Evidence) -> Iterator[Violation]:
    """I20: an outage of the database is nobody's death; only a fault of a runner's own is."""
    strikes = sorted((fault.at, fault.pid) for fault in evidence.faults.all if fault.kind.explains_reruns and fault.pid)
    struck = {pid: at for at, pid in reversed(strikes)}  # when first
    pids = {event.owner: event.pid for event in evidence.ledgers.of(What.RUNNER_START)}
    for at, runner in evidence.declared:
        if struck.get(pids.get(runner, 0), inf) > at:
            yield Violation("I20", None, f"the runner {runner} was declared dead, and no fault of its own struck it")
