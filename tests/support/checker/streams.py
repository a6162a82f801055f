"""I11: streams, against what witnesses wrote to them, and what readers were given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.support.checker.case import Case
from tests.support.checker.evidence import StreamLine, Violation
from tests.support.witness import Event, What

from holdfast.executors.chunks import CHUNK
from holdfast.model.status import Status
from holdfast.workflows import events as e

Speaker = tuple[str, str, int | None, int | None]
"""Of which stream, and call; which attempt, in which epoch."""


def positions_are_dense_and_fenced(case: Case) -> Iterator[Violation]:
    """Positions are dense, and no writer has written behind a later epoch of its own."""
    for log, lines in case.dump.streams.items():
        id, latest = log.partition("/")[0], dict[str, StreamLine]()
        for expected, line in enumerate(lines, 1):
            if line.position != expected:
                yield Violation("I11", id, f"the stream {log} has position {line.position} where {expected} is to be")
                break
            before = latest.setdefault(line.writer, line)
            if line.epoch < before.epoch:
                sentence = f"epoch {line.epoch} wrote into the stream {log} after epoch {before.epoch} did"
                yield Violation("I11", id, sentence, (before, line))
            if line.epoch > before.epoch:
                latest[line.writer] = line


def _said(case: Case) -> dict[Speaker, list[Event]]:
    found: dict[Speaker, list[Event]] = defaultdict(list)
    for event in case.events(What.CHUNK_SAID):
        found[f"{event.id}/{event.key}", event.step, event.attempt, event.epoch].append(event)
    return found


def _there(case: Case) -> dict[Speaker, list[StreamLine]]:
    found: dict[Speaker, list[StreamLine]] = defaultdict(list)
    for log, lines in case.dump.streams.items():
        for line in lines:
            if line.kind == CHUNK and not line.writer:
                found[log, line.call, line.attempt, line.epoch].append(line)
    return found


def chunks_are_as_they_were_said(case: Case) -> Iterator[Violation]:
    """The chunks of an attempt are those that it wrote, from the first on, in that order. Calls without witnesses are
    left out.
    """
    said, there = _said(case), _there(case)
    witnessed = {(log, call) for log, call, _, _ in said}
    for speaker, lines in there.items():
        if speaker[:2] not in witnessed:
            continue
        words = said.get(speaker, [])
        for number, line in enumerate(lines):
            if number >= len(words) or words[number].digest != line.digest:
                who = f"attempt {speaker[2]} of {speaker[1] or 'the call'} in epoch {speaker[3]}"
                sentence = f"the stream {speaker[0]} has another chunk where {who} wrote its number {number}"
                yield Violation("I11", speaker[0].partition("/")[0], sentence, (*words[number : number + 1], line))
                break


def a_call_that_has_ended_has_all_its_chunks(case: Case) -> Iterator[Violation]:
    """An attempt whose success is recorded has lost no chunk."""
    there = _there(case)
    for speaker, words in _said(case).items():
        log, call, attempt, epoch = speaker
        if not _has_succeeded(case, log.partition("/")[0], call, attempt, epoch):
            continue
        if len(there.get(speaker, [])) < len(words):
            missing = words[len(there.get(speaker, [])) :]
            sentence = (
                f"{len(missing)} chunks of {call or 'the call'} are not in the stream {log}, and it has succeeded"
            )
            yield Violation("I11", log.partition("/")[0], sentence, tuple(missing[:1]))


def _has_succeeded(case: Case, id: str, call: str, attempt: int | None, epoch: int | None) -> bool:
    record = case.records.get(id)
    if record is None:
        return False
    if not call:
        return record.status is Status.SUCCESS and (record.attempt, record.epoch) == (attempt, epoch)
    return any(
        line.event.type == e.STEP_COMPLETED and (line.step, line.event.attempt, line.epoch) == (call, attempt, epoch)
        for line in case.dump.logs.get(id, ())
    )


def readers_saw_what_is_there(case: Case) -> Iterator[Violation]:
    """Each item that a reader was given is in the stream, and no reader has missed one between two others."""
    last: dict[str, Event] = {}
    for event in case.events(What.CHUNK_READ):
        log = f"{event.id}/{event.key}"
        lines, index = case.dump.streams.get(log, ()), event.index or 0
        line = lines[index] if index < len(lines) else None
        if line is None or line.digest != event.digest:
            sentence = f"a reader was given an item {index} of the stream {log} that is not there"
            yield Violation("I11", event.id, sentence, (event, line) if line is not None else (event,))
        before = last.get(event.span)
        if before is not None and index != (before.index or 0) + 1:
            yield Violation(
                "I11", event.id, f"a reader of {log} was given {index} after {before.index}", (before, event)
            )
        last[event.span] = event
