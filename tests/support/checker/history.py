"""What a history alone tells: whether the path was legal, the end final, the owners one after another.

Versions decide what came after what; times play no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from tests.support.checker.case import Case
from tests.support.checker.evidence import Violation

from holdfast.errors import NotDecodable
from holdfast.model.records import HistoryEntry, InvocationRecord, left_out, neighbours
from holdfast.model.retries import load_policy, max_retries
from holdfast.model.status import FINAL, INITIAL, TABLE, Status, acts_for
from holdfast.workflows.events import WITHOUT_PROGRESS

_ANSWERED = frozenset({Status.RETRY, Status.SUSPENDED, Status.PARKED})
"""An attempt that led here came to an end of its own, so crashes are counted anew."""


def legal_path(case: Case) -> Iterator[Violation]:
    """I2: it starts at the initial status, each pair is in the table, versions are 1, 2, 3 … without a gap (but for
    what a long history leaves out), and no write was applied twice. What was never claimed may be amended where it is.
    """
    for record in case.dump.records:
        history = record.history
        if not history:
            yield Violation("I2", record.id, "it has no history")
            continue
        if history[0].status is not INITIAL:
            yield Violation("I2", record.id, f"it begins as {history[0].status}, not as {INITIAL}", history[:1])
        if history[0].version != 1:
            yield Violation("I2", record.id, f"its first version is {history[0].version}", history[:1])
        for before, after in neighbours(history):
            if after.version != before.version + 1:
                sentence = f"version {after.version} follows version {before.version}"
                yield Violation("I2", record.id, sentence, (before, after))
            amends = before.status is after.status and after.epoch == 0  # its arguments changed, and it stayed there
            if before.status not in FINAL and after.status not in TABLE[before.status].next and not amends:
                sentence = f"{before.status} → {after.status} is not in the table"
                yield Violation("I2", record.id, sentence, (before, after))
        yield from _applied_twice(record)


def _applied_twice(record: InvocationRecord) -> Iterator[Violation]:
    """Several lines of one write stand together; a second bunch of them is a second write.

    A claim is not judged: asked again, it may rightly get what it had and lost, or again find no slot or start for what
    went on meanwhile.
    """
    seen: dict[str, HistoryEntry] = {}
    for operation, bunch in groupby(record.history, key=lambda entry: entry.operation):
        first = next(bunch)
        by_claim = TABLE[first.status].acquires_ownership or first.status is Status.CONCURRENCY_CONTROLLED
        if operation in seen and not by_claim:
            sentence = f"the write {operation} was applied twice"
            yield Violation("I2", record.id, sentence, (seen[operation], first))
        seen.setdefault(operation, first)


def final_is_final(case: Case) -> Iterator[Violation]:
    """I3, by the history: nothing comes after a final status, and a result comes with it, neither before nor never."""
    for record in case.dump.records:
        for before, after in neighbours(record.history):
            if before.status in FINAL:
                sentence = f"{after.status} came after {before.status}, which is final"
                yield Violation("I3", record.id, sentence, (before, after))
        if record.result is not None and record.status not in FINAL:
            yield Violation("I3", record.id, f"it is {record.status} and has a result already", record.history[-1:])
        if record.result is None and record.status is Status.SUCCESS:
            yield Violation("I3", record.id, "it is success and has no result", record.history[-1:])


def one_owner(case: Case) -> Iterator[Violation]:
    """I4, by the history: nobody acquires what another holds, nobody holds what was released, each claim has the next
    epoch, and nobody else takes an edge that is the owner's.
    """
    for record in case.dump.records:
        first, last = record.history[:1], record.history[-1:]
        if first and (first[0].owner, first[0].epoch) != (None, 0):
            yield Violation("I4", record.id, "it was owned before anybody could claim it", first)
        if last and record.owner != last[0].owner:
            sentence = f"its owner is {record.owner or 'nobody'}, and by its history {last[0].owner or 'nobody'}"
            yield Violation("I4", record.id, sentence, last)
        for before, after in neighbours(record.history):
            rule = TABLE[after.status]
            asks = TABLE[before.status].requires_ownership and not rule.overrides_ownership
            if asks and after.by is not None and not acts_for(after.by, before.owner):
                sentence = f"{before.status} → {after.status} is for its owner {before.owner}, and {after.by} took it"
                yield Violation("I4", record.id, sentence, (before, after))
            if rule.acquires_ownership:
                yield from _acquired(record, before, after)
            elif rule.releases_ownership:
                if after.owner is not None:
                    sentence = f"{after.status} has no owner, but {after.owner} kept it"
                    yield Violation("I4", record.id, sentence, (before, after))
            elif after.owner != before.owner:
                sentence = f"it went from {before.owner or 'nobody'} to {after.owner or 'nobody'} without a claim"
                yield Violation("I4", record.id, sentence, (before, after))


def _acquired(record: InvocationRecord, before: HistoryEntry, after: HistoryEntry) -> Iterator[Violation]:
    if after.owner is None:
        yield Violation("I4", record.id, "nobody claimed it", (after,))
    if before.owner is not None:
        sentence = f"{after.owner or 'nobody'} claimed it while {before.owner} owned it"
        yield Violation("I4", record.id, sentence, (before, after))
    if after.epoch != before.epoch + 1:
        sentence = f"it was claimed with epoch {after.epoch} after epoch {before.epoch}"
        yield Violation("I4", record.id, sentence, (before, after))


def current_epoch(case: Case) -> Iterator[Violation]:
    """I6, by the history: a write that is no claim carries the epoch that was current."""
    for record in case.dump.records:
        for before, after in neighbours(record.history):
            if not TABLE[after.status].acquires_ownership and after.epoch != before.epoch:
                sentence = f"a write of epoch {after.epoch} was accepted when the epoch was {before.epoch}"
                yield Violation("I6", record.id, sentence, (before, after))
        last = record.history[-1:]
        if last and record.epoch != last[0].epoch:
            sentence = f"its epoch is {record.epoch}, and its last write had epoch {last[0].epoch}"
            yield Violation("I6", record.id, sentence, last)


def _allowed_retries(case: Case, record: InvocationRecord) -> int | None:
    """By the policy that was stored with it; None: any number. A task without one retries itself, or not at all."""
    if record.task in case.bounds.retries or record.terms.retries is None:
        return case.bounds.retries.get(record.task, 0)
    try:
        return max_retries(load_policy(record.terms.retries))
    except NotDecodable:
        return 0


def bounded_attempts(case: Case) -> Iterator[Violation]:
    """I14: attempts ≤ 1 + retries + recoveries (and what a runner gave back, or a wait let go), and crashes in a row
    stay under their cap.
    """
    for record in case.dump.records:
        if left_out(record.history):
            continue  # what was left out cannot be counted
        path = [entry.status for entry in record.history]
        retries, allowed = path.count(Status.RETRY), _allowed_retries(case, record)
        if allowed is not None and retries > allowed:
            entries = tuple(entry for entry in record.history if entry.status is Status.RETRY)[: allowed + 1]
            yield Violation("I14", record.id, f"it was retried {retries} times, and {allowed} are allowed", entries)
        others = (Status.RUNNING_RECOVERY, Status.KILLED, Status.SUSPENDED, Status.PARKED)
        most = 1 + retries + sum(map(path.count, others))
        runs = tuple(entry for entry in record.history if entry.status is Status.RUNNING)
        if record.attempt > min(most, len(runs)):
            sentence = f"it counts {record.attempt} attempts; {len(runs)} began, and {most} are accounted for"
            yield Violation("I14", record.id, sentence, runs[most:] or runs[-1:])
        elif len(runs) > most:
            sentence = f"{len(runs)} attempts began, and {most} are accounted for"
            yield Violation("I14", record.id, sentence, runs[most:])
        elif record.attempt < len(runs) - path.count(Status.KILLED):
            sentence = f"it counts {record.attempt} attempts, and {len(runs)} began"
            yield Violation("I14", record.id, sentence, runs)
        yield from _forgiven(case, record)


def _forgiven(case: Case, record: InvocationRecord) -> Iterator[Violation]:
    """How often in a row it was run again after a crash. For a run, they count from its last progress."""
    cap = 0 if record.at_most_once else case.bounds.crash_cap
    crashes: list[HistoryEntry] = []
    log = case.dump.logs.get(record.id, ())
    progress = {line.epoch for line in log if line.event.type not in WITHOUT_PROGRESS}
    for before, after in neighbours(record.history):
        if after.status in _ANSWERED or before.epoch in progress:
            crashes.clear()
        if before.status is Status.RUNNING_RECOVERY and after.status not in FINAL:
            crashes.append(before)
            if cap is not None and len(crashes) == cap + 1:
                sentence = f"it was run again after crash {len(crashes)} in a row, and {cap} are forgiven"
                yield Violation("I14", record.id, sentence, tuple(crashes))
