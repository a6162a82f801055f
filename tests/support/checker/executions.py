"""What witnesses tell against the store: submits, executions and results that were seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.support.checker.case import Case, Execution, covers, left_by_owner
from tests.support.checker.evidence import Violation
from tests.support.witness import Event, What

from holdfast.model.records import HistoryEntry, InvocationRecord, left_out
from holdfast.model.status import FINAL, Status

_TOLD = (Status.RETRY, Status.SUSPENDED, Status.PARKED)
"""After these the code is called again, and rightly so."""


def _is_of_a_lost_claim(entry: HistoryEntry) -> bool:
    """Whether a run goes back that was cancelled while the reply to its claim was lost. Its next owner compensates."""
    return entry.status is Status.REROUTED and entry.why == "its owner does not know of it"


def nothing_lost(case: Case) -> Iterator[Violation]:
    """I1: what was acknowledged, executed or seen is there; what is there has ended, and in time."""
    acknowledged: dict[str, Event] = {}
    for event in case.events(What.SUBMIT_OK):
        if event.id is not None:
            acknowledged.setdefault(event.id, event)
    for id, event in acknowledged.items():
        if id not in case.records:
            yield Violation("I1", id, "its submit was acknowledged, and it is not there", (event,))
    for event in case.events(What.EXEC_START) + case.events(What.RESULT_SEEN):
        # A token that nothing resolves tells something only if tokens can be found in records at all.
        name = case.id_of(event) or (event.token if case.dump.tokens or not case.records else None)
        if name is not None and name not in case.records and name not in acknowledged:
            acknowledged[name] = event  # once is enough
            done = "was executed" if event.what is What.EXEC_START else "had a result"
            yield Violation("I1", name, f"it {done}, and it is not there", (event,))
    for record in case.dump.records:
        yield from _ended_in_time(case, record, acknowledged.get(record.id))


def _ended_in_time(case: Case, record: InvocationRecord, acknowledged: Event | None) -> Iterator[Violation]:
    known = (acknowledged,) if acknowledged else ()
    if record.status not in FINAL:
        sentence = f"it has not ended: it is {record.status}, owner {record.owner or 'nobody'}"
        yield Violation("I1", record.id, sentence, (*known, *record.history[-1:]))
        return
    if case.bounds.final_seconds is None or not record.history:
        return
    offset = case.dump.offset
    submitted = acknowledged.at if acknowledged else record.created_at - offset
    began = max(submitted, record.due_at - offset, case.healed_at)
    took = case.time_of(record.history[-1]) - began
    if took > case.bounds.final_seconds + case.slack:
        sentence = f"it ended {took:.1f} s after nothing was in its way; {case.bounds.final_seconds} s are allowed"
        yield Violation("I1", record.id, sentence, (*known, record.history[-1]))


def one_submit_one_invocation(case: Case) -> Iterator[Violation]:
    """I7: a token is there once; if its outcome was unknown once or not at all, if it was refused not at all."""
    outcomes: dict[str, list[Event]] = defaultdict(list)
    kinds = (What.SUBMIT_INVOKE, What.SUBMIT_OK, What.SUBMIT_FAIL, What.SUBMIT_UNKNOWN)
    for event in case.ledgers.of(*kinds):
        if event.token is not None:
            outcomes[event.token].append(event)
    for token, events in outcomes.items():
        ids = case.ids_by_token.get(token, [])
        if len(ids) > 1:
            sentence = f"the submit '{token}' is there {len(ids)} times: {', '.join(ids)}"
            yield Violation("I7", ids[0], sentence, tuple(events))
        refused = [event for event in events if event.what is What.SUBMIT_FAIL]
        tries = sum(event.what is What.SUBMIT_INVOKE for event in events)
        if ids and len(refused) >= max(1, tries):
            yield Violation("I7", ids[0], f"the submit '{token}' was refused, and it is there", tuple(refused[:1]))


def seen_once_seen_for_ever(case: Case) -> Iterator[Violation]:
    """I3, by witnesses: what a client was shown first is what everybody was shown later, and what is there now."""
    first: dict[str, Event] = {}
    for event in case.events(What.RESULT_SEEN):
        id = case.id_of(event)
        if id is None:
            continue
        before = first.setdefault(id, event)
        if (before.digest, before.status) != (event.digest, event.status):
            sentence = f"it was seen as {_end(before)}, and later as {_end(event)}"
            yield Violation("I3", id, sentence, (before, event))
    for id, event in first.items():
        record, digest = case.records.get(id), case.dump.digests.get(id)
        if record is None:
            continue
        changed = event.status is not None and event.status != record.status
        if changed or (None not in (digest, event.digest) and digest != event.digest):
            now = f"{record.status} {digest or ''}".strip()
            yield Violation("I3", id, f"it was seen as {_end(event)}, and is {now}", (event, *record.history[-1:]))


def _end(event: Event) -> str:
    return f"{event.status or 'ended'} {event.digest or ''}".strip()


def one_execution_of_an_epoch(case: Case) -> Iterator[Violation]:
    """I4, by witnesses: an epoch is executed once, and by a process that owned the invocation."""
    for id, executions in case.executions.items():
        by_epoch: dict[int, Execution] = {}
        for execution in executions:
            if execution.epoch is not None:
                before = by_epoch.setdefault(execution.epoch, execution)
                if before is not execution:
                    sentence = f"epoch {execution.epoch} was executed twice"
                    yield Violation("I4", id, sentence, (before.start, execution.start))
            names = case.names_of_pid.get(execution.start.pid)
            owners = {tenure.owner for tenure in case.tenures.get(id, ())}
            if names and id in case.records and not any(covers(name, owner) for name in names for owner in owners):
                sentence = f"it was executed by {', '.join(sorted(names))}, which never owned it"
                yield Violation("I4", id, sentence, (execution.start,))


def result_of_its_epoch(case: Case) -> Iterator[Violation]:
    """I6, by witnesses: the end that is there is that of the execution in whose epoch it was written; and whoever was
    told that it had lost the invocation did not write its end.
    """
    for id, executions in case.executions.items():
        record = case.records.get(id)
        last = left_by_owner(record) if record is not None else None
        if record is not None and last is not None and last.status is Status.SUCCESS:
            yield from _came_from(case, record, last, executions)
        elif record is not None and last is not None and last.status is Status.FAILED:
            yield from _failed_like(case, record, last, executions)
    for event in case.events(What.FENCED):
        record = case.records.get(case.id_of(event) or "")
        last = left_by_owner(record) if record is not None else None
        if record is not None and last is not None and last.status in FINAL and last.epoch == event.epoch:
            sentence = f"epoch {event.epoch} was told that it had lost the invocation, and its end was accepted"
            yield Violation("I6", record.id, sentence, (event, last))


def _came_from(
    case: Case, record: InvocationRecord, last: HistoryEntry, executions: list[Execution]
) -> Iterator[Violation]:
    digest = case.dump.digests.get(record.id)
    mine = [execution for execution in executions if execution.epoch == last.epoch]
    doubtful = [execution for execution in executions if execution.epoch is None]
    candidates = mine or doubtful
    if not candidates:
        starts = tuple(execution.start for execution in executions)
        sentence = f"its result was written in epoch {last.epoch}, in which it was not executed"
        yield Violation("I6", record.id, sentence, (*starts, last))
        return
    returned = [execution.end for execution in candidates if execution.end and not execution.end.raised]
    starts = tuple(execution.start for execution in candidates)
    if not returned:
        sentence = f"its result was written in epoch {last.epoch}, whose execution did not return"
        yield Violation("I6", record.id, sentence, (*starts, last))
    elif digest is not None and all(end.digest not in (None, digest) for end in returned):
        others = [e.end for e in executions if e.end and e.end.digest == digest]
        whose = f"that of epoch {others[0].epoch}" if others and others[0].epoch is not None else "another one"
        sentence = f"its result is not what epoch {last.epoch} returned, but {whose if others else 'nobody’s'}"
        yield Violation("I6", record.id, sentence, (*returned, *others[:1], last))


def _failed_like(
    case: Case, record: InvocationRecord, last: HistoryEntry, executions: list[Execution]
) -> Iterator[Violation]:
    """An error may be the engine's own; but one that an execution raised has to be that of this epoch's."""
    digest = case.dump.digests.get(record.id)
    raised = [e for e in executions if e.epoch is not None and e.end and e.end.raised and e.end.digest == digest]
    if raised and all(execution.epoch != last.epoch for execution in raised):
        sentence = f"it failed in epoch {last.epoch} with what epoch {raised[0].epoch} raised"
        yield Violation("I6", record.id, sentence, (*(e.end for e in raised[:1] if e.end), last))


def no_needless_executions(case: Case) -> Iterator[Violation]:
    """I15: one execution, one more for each retry or wait, and one more at most for each fault that touched it."""
    for record in case.dump.records:
        executions = case.executions.get(record.id, [])
        starts = tuple(execution.start for execution in executions)
        if left_out(record.history):
            continue  # what was left out cannot be counted
        path = [entry.status for entry in record.history]
        runs = path.count(Status.RUNNING)
        if len(executions) > runs:
            sentence = f"it was called {len(executions)} times in {runs} attempts"
            yield Violation("I15", record.id, sentence, starts)
        expected = 1 + sum(map(path.count, _TOLD)) + sum(map(_is_of_a_lost_claim, record.history))
        extra = max(len(executions), record.attempt) - expected
        faults = tuple(case.touching(record.id)) if extra > 0 else ()
        if extra > len(faults):
            sentence = f"it was executed {extra} times too often, and {len(faults)} faults touched it"
            yield Violation("I15", record.id, sentence, starts or record.history[1:])
        if not executions and record.status is Status.SUCCESS and record.task in case.witnessed_tasks:
            yield Violation("I15", record.id, "it has a result and was never executed", record.history[-1:])
