"""Invocations as they change: ``ps --watch`` and ``show --follow``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from holdfast.app import App
from holdfast.cli.output import Output
from holdfast.ids import InvocationId
from holdfast.model.notes import NO_NOTES, LogLine
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.showing import length, moment
from holdfast.web.documents import invocation_document, line_document

WATCH_SECONDS, FOLLOW_SECONDS = 2.0, 0.5
_CLEAR = "\x1b[H\x1b[2J"
pause: Callable[[float], None] = time.sleep


def repeated(out: Output, draw: Callable[[], None], *, watch: bool) -> None:
    """Draw once, or again and again until Ctrl-C: on a terminal at the same place."""
    while True:
        if watch and out.is_terminal and not out.json:
            print(_CLEAR, end="")
        draw()
        if not watch:
            return
        sys.stdout.flush()
        pause(WATCH_SECONDS)


def follow(out: Output, app: App, id: InvocationId) -> None:
    """Print each change of an invocation, what its code says and its log lines, until it has ended."""
    shown: tuple[object, ...] = ()
    last: LogLine | None = None
    while True:
        record = app.invocation(id).record()
        notes = record.notes or NO_NOTES
        now = (record.status, record.attempt, notes.progress, dict(record.attributes))
        lines = _behind(last, notes.log)
        for line in lines:
            last = line
            out.document_line({"id": id, **line_document(line)})
            out.line(text_of(line))
        if now != shown:
            shown = now
            out.document_line(invocation_document(record))
            out.line(f"{moment(max(record.changed_at, said_at(record)))}  {record.status}{said(record)}")
        if not out.json:
            sys.stdout.flush()
        if record.status in FINAL:
            return
        pause(FOLLOW_SECONDS)


def _behind(last: LogLine | None, lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """Return the lines that follow the last one that was shown."""
    if last is None or last not in lines:
        return lines
    return lines[len(lines) - tuple(reversed(lines)).index(last) :]


def said_at(record: InvocationRecord) -> float:
    progress = (record.notes or NO_NOTES).progress
    return 0.0 if progress is None else progress.at


def said(record: InvocationRecord) -> str:
    """Return how far the code of an invocation has come, to be put behind something else."""
    progress = (record.notes or NO_NOTES).progress
    if progress is None:
        return ""
    before = "" if progress.attempt == record.attempt else f", in attempt {progress.attempt}"
    return f", {progress}{before}"


def progress_text(record: InvocationRecord, now: float) -> str:
    """Return how far the code of an invocation has come, and when it has said so."""
    progress = (record.notes or NO_NOTES).progress
    if progress is None:
        return ""
    return f"{said(record).removeprefix(', ')}, {length(max(0.0, now - progress.at))} ago"


def text_of(line: LogLine) -> str:
    return f"{moment(line.at)}  {line.level:<7} {line.logger}  {line.text}"
