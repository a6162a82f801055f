"""What has to happen in time, or not at the same time: limits, services, recovery."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from tests.support.checker.case import Case, Tenure, covers
from tests.support.checker.evidence import Fault, FaultKind, Violation
from tests.support.checker.spans import Spans, length, union, without
from tests.support.witness import Event, What

from holdfast.model.records import HistoryEntry, InvocationRecord, neighbours, runner_of
from holdfast.model.status import FINAL, Status


class Lease(NamedTuple):
    """A slot of a limit, while user code held it."""

    since: float
    until: float
    event: Event


def leases_of(case: Case) -> dict[str, list[Lease]]:
    """By key, in the order of time. A lease ends when user code leaves it, when its process is killed, or when the
    store took the invocation away: what a zombie still does after that is not under the limit any more, it is fenced.
    """
    found: dict[str, list[Lease]] = defaultdict(list)
    for start, _, over in case.joined(What.LEASE_ENTER, What.LEASE_EXIT):
        tenure = case.tenure_of(start)
        until = over if tenure is None else max(start.at, min(over, _lost_at(case, tenure)))
        found[start.key or ""].append(Lease(start.at, until, start))
    return found


def _lost_at(case: Case, tenure: Tenure) -> float:
    """When an owner had its slot no longer, for sure: if somebody else says so, by a clock that may differ."""
    taken = tenure.release is not None and tenure.release.status in (Status.RUNNING_RECOVERY, Status.PENDING_RECOVERY)
    return tenure.until - (case.slack if taken else 0.0)


def limits_hold(case: Case) -> Iterator[Violation]:
    """I8, safety: at most K leases at any time under a limit of K."""
    for key, leases in leases_of(case).items():
        holding: list[Lease] = []
        for lease in leases:
            holding = [other for other in holding if other.until > lease.since]
            holding.append(lease)
            limit = lease.event.limit
            if limit is not None and len(holding) > limit:
                sentence = f"{len(holding)} hold a slot of '{key}' at once, and its limit is {limit}"
                yield Violation("I8", case.id_of(lease.event), sentence, tuple(other.event for other in holding))


def slots_are_filled(case: Case) -> Iterator[Violation]:
    """I8, liveness: while work waits for a key, a free slot of it is filled in time. Time in which a fault was in the
    way, or had just been, does not count.
    """
    if case.bounds.slot_seconds is None:
        return
    disturbed = case.faults.windows(aftermath=case.bounds.recovery_seconds)
    asked = _asked(case)
    for key, leases in leases_of(case).items():
        limit = max(lease.event.limit or 0 for lease in leases)
        waits = _waits(case, asked[key], leases)
        free = free_and_wanted(limit, [(lease.since, lease.until) for lease in leases], waits, case.last)
        for since, until in _cut_at(free, [lease.since for lease in leases]):
            for piece in without((since, until), disturbed):
                if length([piece]) > case.bounds.slot_seconds + case.slack:
                    yield _starved(case, key, piece, leases)
                    break


def _asked(case: Case) -> dict[str, dict[str, float]]:
    """For each key, which invocations are under it and since when they were there."""
    asked: dict[str, dict[str, float]] = defaultdict(dict)
    for event in case.events(What.LEASE_ENTER):
        if (id := case.id_of(event)) in case.records:
            asked[event.key or ""][id] = case.records[id].created_at - case.dump.offset
    for record in case.dump.records:
        if record.limit_key is not None:
            asked[record.limit_key][record.id] = record.created_at - case.dump.offset
    for event in case.events(What.SUBMIT_OK):
        if event.key is not None and event.id in case.records:
            asked[event.key][event.id] = event.at
    return asked


def _waits(case: Case, asked: dict[str, float], leases: list[Lease]) -> Spans:
    """When work waited for its first lease. What waited for a further one is left out: since when is not known."""
    first: dict[str | None, Lease] = {}
    for lease in leases:
        first.setdefault(case.id_of(lease.event), lease)
    waits = []
    for id, since in asked.items():
        record, entered = case.records[id], first.get(id)
        due = record.due_at - case.dump.offset
        if entered is not None and due <= entered.since:
            waits.append((max(since, due), entered.since))
        elif entered is None and record.status not in FINAL:
            waits.append((max(since, due), inf))
    return [(since, until) for since, until in waits if until > since]


def free_and_wanted(limit: int, leases: Spans, waits: Spans, last: float) -> Spans:
    """When fewer than `limit` leases were held while something waited."""
    steps = [(since, 1, 0) for since, _ in leases] + [(until, -1, 0) for _, until in leases]
    steps += [(since, 0, 1) for since, _ in waits] + [(until, 0, -1) for _, until in waits]
    held = waiting = 0
    spans: Spans = []
    for (at, leased, wanted), (following, _, _) in pairwise([*sorted(steps), (inf, 0, 0)]):
        held, waiting = held + leased, waiting + wanted
        if held < limit and waiting > 0 and following > at:
            spans.append((at, min(following, last)))
    return union(spans)


def _cut_at(spans: Spans, moments: list[float]) -> Spans:
    """The spans, cut where a slot was filled. Both are sorted."""
    cut: Spans = []
    for since, until in spans:
        inside = moments[bisect_right(moments, since) : bisect_left(moments, until)]
        cut += pairwise([since, *inside, until])
    return cut


def _starved(case: Case, key: str, piece: tuple[float, float], leases: list[Lease]) -> Violation:
    before = [lease.event for lease in leases if lease.until <= piece[0]][-1:]
    after = [lease.event for lease in leases if lease.since >= piece[1]][:1]
    sentence = f"a slot of '{key}' was free for {length([piece]):.1f} s while work waited for it"
    return Violation("I8", case.id_of(after[0]) if after else None, sentence, (*before, *after))


# --- services


def services_do_not_overlap(case: Case) -> Iterator[Violation]:
    """I16, safety. Only one whose process was struck may still be under way when the next one, of a later epoch, is; or
    anyone if a clock was set, because the slots move with it.
    """
    for name, executions in _services(case).items():
        for (earlier, until), (later, _) in pairwise(executions):
            if until > later.at and not _superseded(case, earlier, later):
                sentence = f"two executions of the service '{name}' were under way at once"
                yield Violation("I16", None, sentence, (earlier, later))


def _services(case: Case) -> dict[str, list[tuple[Event, float]]]:
    found: dict[str, list[tuple[Event, float]]] = defaultdict(list)
    for start, _, until in case.joined(What.SERVICE_START, What.SERVICE_END):
        found[start.service or ""].append((start, until))
    return found


def _superseded(case: Case, earlier: Event, later: Event) -> bool:
    if earlier.epoch is not None and later.epoch is not None and later.epoch <= earlier.epoch:
        return False
    return any(
        fault.at <= later.at
        and fault.ended >= earlier.at
        and (fault.kind is FaultKind.CLOCK or (fault.kind.explains_reruns and _hit(case, fault, earlier)))
        for fault in case.faults.all
    )


def _hit(case: Case, fault: Fault, event: Event) -> bool:
    return fault.pid == event.pid or bool(
        event.owner and any(covers(name, event.owner) for name in case.names_in(fault))
    )


def services_are_served(case: Case) -> Iterator[Violation]:
    """I16, liveness: while a runner is alive and no fault is in the way, two periods never pass without the service."""
    alive = union((start.at, min(until, case.last)) for start, _, until in case.joined(*_LIFE))
    disturbed = case.faults.windows(aftermath=case.bounds.recovery_seconds)
    services = _services(case)
    for name, period in case.bounds.service_seconds.items():
        executions = services.get(name, [])
        busy = union([*disturbed, *((start.at, until) for start, until in executions)])
        for idle in (piece for span in alive for piece in without(span, busy)):
            if length([idle]) > 2 * period + case.bounds.tolerance_seconds:
                before = [start for start, until in executions if until <= idle[0]][-1:]
                sentence = f"the service '{name}' was not served for {length([idle]):.1f} s; its period is {period} s"
                yield Violation("I16", None, sentence, tuple(before))


_LIFE = (What.RUNNER_START, What.RUNNER_END)


# --- recovery


class Sample(NamedTuple):
    seconds: float
    id: str
    fault: Fault


def recovery_is_prompt(case: Case) -> Iterator[Violation]:
    """I20, time: the work of the dead runs again, or has ended, in time (99 of 100). While the database was away, no
    time passed.
    """
    away = [fault for fault in case.faults.all if fault.kind is not FaultKind.KILL]
    windows = union((fault.at, fault.ended) for fault in away)
    runners, workers = list[Sample](), list[Sample]()
    for fault in case.faults.all:
        if fault.kind is not FaultKind.KILL:
            continue
        names = case.names_in(fault)
        of_worker = bool(names) and all("/" in name for name in names)
        for id in _struck(case, fault):
            took = length(without((fault.at, _back(case, case.records[id], fault)), windows))
            (workers if of_worker else runners).append(Sample(took, id, fault))
    bounds = ((runners, case.bounds.recovery_seconds), (workers, case.bounds.worker_recovery_seconds))
    for samples, bound in bounds:
        if not samples:
            continue
        slow = sorted(samples, key=lambda sample: sample.seconds)[ceil(0.99 * len(samples)) - 1]
        if slow.seconds > bound + case.slack:
            late = sum(sample.seconds > bound + case.slack for sample in samples)
            when = "did not run again" if slow.seconds == inf else f"ran again after {slow.seconds:.1f} s"
            sentence = f"it {when}; {late} of {len(samples)} took longer than {bound} s"
            yield Violation("I20", slow.id, sentence, (slow.fault, *_last_of(case, slow.id)))


def _struck(case: Case, fault: Fault) -> set[str]:
    """What the dead one owned, or was executing."""
    names = case.names_in(fault)
    owned = {
        tenure.id
        for owner, tenures in case.tenures_by_owner.items()
        if any(covers(name, owner) for name in names)
        for tenure in tenures
        if tenure.since <= fault.at < tenure.until
    }
    broken_off = case.broken_off.get(fault.pid, []) if fault.pid is not None else []
    return owned | {id for id, execution in broken_off if id in case.records and execution.start.at <= fault.at}


def _back(case: Case, record: InvocationRecord, fault: Fault) -> float:
    """When it ran again, had ended, or had its turn and found no slot: for that it may have to wait long. Where there
    may be no place for it either, when it was back in the queue.
    """
    enough = frozenset({Status.RUNNING, Status.CONCURRENCY_CONTROLLED})
    enough |= {Status.REROUTED} if case.bounds.may_be_full else frozenset()
    entries = [entry for entry in record.history if entry.status in enough]
    moments = [case.time_of(entry) for entry in entries]
    moments += [execution.start.at for execution in case.executions.get(record.id, ())]
    # An end is none too early, though clocks that differ by a hair may say so: it may come within milliseconds.
    ends = [max(case.time_of(entry), fault.at) for entry in record.history if entry.status in FINAL]
    return min([*ends, *(moment for moment in moments if moment > fault.at)], default=inf)


def _last_of(case: Case, id: str) -> tuple[HistoryEntry, ...]:
    return case.records[id].history[-1:]


def only_the_dead_are_recovered(case: Case) -> Iterator[Violation]:
    """I20, cause: nothing is taken from a runner whose heartbeats were accepted; and if nobody witnessed those, from
    none that no fault had struck.
    """
    beats: dict[str, list[Event]] = defaultdict(list)
    for event in case.events(What.RUNNER_BEAT):
        beats[runner_of(event.owner)].append(event)
    clients = {event.pid for event in case.events(What.SUBMIT_INVOKE)}
    unknown = [fault for fault in case.faults.all if fault.kind.explains_reruns and not case.names_in(fault)]
    nameless = any(fault.pid not in clients for fault in unknown)  # it may have been any runner
    for record in case.dump.records:
        for before, after in neighbours(record.history):
            if after.status is not Status.RUNNING_RECOVERY or before.owner is None:
                continue
            at, runner = case.time_of(after), runner_of(before.owner)
            last = [event for event in beats.get(runner, []) if event.at <= at][-1:]
            if _worker_was_struck(case, before.owner, at) or _had_left(case, runner, at):
                continue
            if last and at - last[0].at < case.bounds.dead_after_seconds - case.slack:
                sentence = f"it was taken from {before.owner}, whose last heartbeat was {at - last[0].at:.1f} s ago"
                yield Violation("I20", record.id, sentence, (last[0], after))
            elif not beats.get(runner) and not nameless and not _was_struck(case, before.owner, at):
                sentence = f"it was taken from {before.owner}, which no fault had struck"
                yield Violation("I20", record.id, sentence, (before, after))


def _worker_was_struck(case: Case, owner: str, at: float) -> bool:
    """Whether that worker, and not its whole runner, had died: its runner may say so at once, in good health."""
    return any(
        fault.kind is FaultKind.KILL and owner in case.names_in(fault) and "/" in owner
        for fault in case.faults.all
        if fault.at <= at + case.slack
    )


def _had_left(case: Case, runner: str, at: float) -> bool:
    """Whether the runner had left before: what it could not give back then is anybody's."""
    return any(event.owner == runner and event.at <= at + case.slack for event in case.events(What.RUNNER_END))


def _was_struck(case: Case, owner: str, at: float) -> bool:
    struck = any(
        fault.kind.explains_reruns and any(covers(name, owner) for name in case.names_in(fault))
        for fault in case.faults.all
        if fault.at <= at + case.slack
    )
    ends = case.events(What.RUNNER_END)
    return struck or any(covers(event.owner or "", owner) and event.at <= at + case.slack for event in ends)
