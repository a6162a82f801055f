"""I5 and I13: the logs of runs, against what witnesses saw of their steps, and against their children."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.support.checker.case import Case
from tests.support.checker.evidence import LogLine, Violation
from tests.support.witness import Event, What

from holdfast.model.status import FINAL, Status
from holdfast.workflows import events as e

_ENDS = {Status.SUCCESS: e.STEP_COMPLETED}


def logs_are_of_one_owner_at_a_time(case: Case) -> Iterator[Violation]:
    """I5: positions are dense, and no owner has written behind the page of a later one."""
    for id, lines in case.dump.logs.items():
        for before, line in zip([None, *lines], lines, strict=False):
            is_first = before is None or before.generation != line.generation
            expected = 1 if before is None or is_first else before.position + 1
            if line.position != expected:
                sentence = f"its log has position {line.position} where {expected} is to be"
                yield Violation("I5", id, sentence, (line,))
            if before is not None and before.epoch > line.epoch:
                sentence = f"epoch {line.epoch} wrote into its log after epoch {before.epoch} did"
                yield Violation("I5", id, sentence, (before, line))


def a_call_ends_once(case: Case) -> Iterator[Violation]:
    """I5: each call of a body has one end, and it was created before that."""
    for id, lines in case.dump.logs.items():
        ends: dict[str, LogLine] = {}
        created: set[str] = set()
        for line in lines:
            if line.event.type in (e.STEP_CREATED, e.HOOK_CREATED):
                created.add(line.step)
            if line.event.type not in e.ENDS:
                continue
            if (before := ends.setdefault(line.step, line)) is not line:
                yield Violation("I5", id, f"{line.step} has ended twice", (before, line))
            recorded_at_their_end = (e.WAIT_COMPLETED, e.STREAM_WRITTEN, e.HOOK_CONFLICT)
            if line.event.type not in recorded_at_their_end and line.step not in created:
                yield Violation("I5", id, f"{line.step} ended before it was created", (line,))


def no_recorded_step_runs_again(case: Case) -> Iterator[Violation]:
    """I5: no attempt whose end is recorded is executed in a later epoch, nor twice in one epoch."""
    recorded: dict[tuple[str | None, str], list[LogLine]] = defaultdict(list)
    for id, lines in case.dump.logs.items():
        for line in lines:
            if line.event.type in (e.STEP_COMPLETED, e.STEP_FAILED, e.STEP_RETRYING):
                recorded[id, line.step].append(line)
    began: dict[tuple[str | None, str, int | None, int | None], Event] = {}
    for start in case.events(What.STEP_START):
        before = began.setdefault((start.id, start.step, start.attempt, start.epoch), start)
        if before is not start:
            sentence = f"{start.step} ran twice in epoch {start.epoch}"
            yield Violation("I5", start.id, sentence, (before, start))
        for line in recorded[start.id, start.step]:
            is_over = line.event.type != e.STEP_RETRYING or line.event.attempt >= (start.attempt or 0)
            if is_over and line.epoch < (start.epoch or 0):
                sentence = f"{start.step} ran in epoch {start.epoch}, and its end was recorded in epoch {line.epoch}"
                yield Violation("I5", start.id, sentence, (line, start))


def a_recorded_step_has_run(case: Case) -> Iterator[Violation]:
    """I5: a recorded result is that of an execution in its own epoch. Steps without witnesses are left out."""
    witnessed = {_name(event.step) for event in case.events(What.STEP_START)}
    ends: dict[tuple[str | None, str, int | None], list[Event]] = defaultdict(list)
    for event in case.events(What.STEP_END):
        ends[event.id, event.step, event.epoch].append(event)
    for id, lines in case.dump.logs.items():
        children = {line.step for line in lines if line.event.child}
        for line in lines:
            if line.event.type != e.STEP_COMPLETED or line.step in children or _name(line.step) not in witnessed:
                continue
            found = [event for event in ends[id, line.step, line.epoch] if not event.raised]
            if not found:
                sentence = f"epoch {line.epoch} recorded a result of {line.step}, and did not run it to its end"
                yield Violation("I5", id, sentence, (line,))
            elif all(event.digest not in (None, line.digest) for event in found):
                sentence = (
                    f"the recorded result of {line.step} is not what its execution in epoch {line.epoch} returned"
                )
                yield Violation("I5", id, sentence, (*found, line))


def _name(step: str) -> str:
    """The name of a step, of ``charge#2``, ``charge@x`` or ``1/charge#2``."""
    return step.rpartition("/")[2].partition("#")[0].partition("@")[0]


def one_child_for_each_call(case: Case) -> Iterator[Violation]:
    """I13: a call has one child, whose run is there, and knows of it."""
    by_call: dict[tuple[str, int, str], str] = {}
    for child in case.dump.records:
        if child.reply_to is None:
            continue
        call = (child.reply_to.run, child.reply_to.generation, child.reply_to.call)
        if (before := by_call.setdefault(call, child.id)) != child.id:
            yield Violation("I13", child.id, f"{call[2]} of the run {call[0]} has two children, it and {before}")
        parent = case.records.get(child.reply_to.run)
        if parent is None or parent.run is None:
            yield Violation("I13", child.id, f"its run {call[0]} is not there")
        elif (
            parent.status is Status.SUCCESS and call[1] == parent.run.generation and not _created(case, call, child.id)
        ):
            # A cancelled run may end between the insert of a child and the page that names it.
            sentence = f"its run {parent.id} has ended, and does not know of it"
            yield Violation("I13", child.id, sentence, parent.history[-1:])


def _created(case: Case, call: tuple[str, int, str], child: str) -> bool:
    return any(
        line.event.type == e.STEP_CREATED and line.event.call == call[2] and line.event.child == child
        for line in case.dump.logs.get(call[0], ())
        if line.generation == call[1]
    )


def children_are_accounted_for(case: Case) -> Iterator[Violation]:
    """I13: a child that a run has recorded is there, and has the end that the run has recorded."""
    for id, lines in case.dump.logs.items():
        ends = {line.step: line for line in lines if line.event.type in e.ENDS}
        for line in lines:
            if line.event.type == e.STEP_CREATED and line.event.child:
                yield from _agrees(case, id, line, ends.get(line.step))


def _agrees(case: Case, id: str, created: LogLine, end: LogLine | None) -> Iterator[Violation]:
    child, step = case.records.get(created.event.child), created.step
    known: Sequence[LogLine] = (created,) if end is None else (created, end)
    was_refused = end is not None and end.event.type == e.STEP_FAILED and not end.event.entry
    if child is None:
        if not was_refused:
            yield Violation("I13", id, f"the child of {step}, {created.event.child}, is not there", tuple(known))
        return
    parent = case.records[id]
    if parent.status in FINAL and child.status not in FINAL:
        sentence = f"it has ended, and the child of {step}, {child.id}, is {child.status}"
        yield Violation("I13", id, sentence, (*known, *child.history[-1:]))
    if end is None or was_refused:
        return
    if child.status not in FINAL:
        sentence = f"it has recorded the end of {step}, and its child {child.id} is {child.status}"
        yield Violation("I13", id, sentence, (*known, *child.history[-1:]))
    elif end.event.type != _ENDS.get(child.status, e.STEP_FAILED):
        sentence = (
            f"it has recorded that {step} ended with {end.event.type}, and its child {child.id} is {child.status}"
        )
        yield Violation("I13", id, sentence, (*known, *child.history[-1:]))
    elif child.status is Status.SUCCESS and end.digest != case.dump.digests.get(child.id, end.digest):
        sentence = f"the result of {step} is not that of its child {child.id}"
        yield Violation("I13", id, sentence, tuple(known))
