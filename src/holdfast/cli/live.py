"""Invocations as they change: ``ps --watch``, ``top`` and ``show --follow``."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from holdfast.app import App
from holdfast.cli.output import Output, terminal_height
from holdfast.ids import InvocationId
from holdfast.model.notes import NO_NOTES, LogLine
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.showing import length, moment
from holdfast.web.documents import invocation_document, line_document

WATCH_SECONDS, FOLLOW_SECONDS = 2.0, 0.5
_SHARE = 20  # of the time that a draw takes, to wait after it
_TO_THE_END, _BELOW = "\x1b[K", "\x1b[J"  # what is to be erased
pause: Callable[[float], None] = time.sleep


def repeated(out: Output, draw: Callable[[], None], *, watch: bool) -> None:
    """Draw once, or again and again until Ctrl-C: on a terminal at the same place, without a flicker.

    A draw that takes long is followed by a longer pause: to watch a store must not be its load.
    """
    screen = Screen() if watch and out.is_terminal and not out.json else None
    while True:
        began = time.monotonic()
        if screen is None:
            draw()
        else:
            screen.draw(draw)
        if not watch:
            return
        sys.stdout.flush()
        pause(max(WATCH_SECONDS, (time.monotonic() - began) * _SHARE))


class _Frame(io.StringIO):
    """Gathers what is printed, and is a terminal as the one behind it is."""

    def __init__(self, behind: TextIO) -> None:
        super().__init__()
        self._behind = behind

    def fileno(self) -> int:
        return self._behind.fileno()

    def isatty(self) -> bool:
        return self._behind.isatty()


class Screen:
    """A terminal on which each frame is written over the one before, in one write."""

    def __init__(self) -> None:
        self._begin = "\x1b[H\x1b[2J"

    def draw(self, draw: Callable[[], None]) -> None:
        terminal = sys.stdout
        frame = _Frame(terminal)
        with contextlib.redirect_stdout(frame):
            draw()
        lines, room = frame.getvalue().splitlines(), terminal_height() - 1
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
        terminal.write(f"{self._begin}{''.join(f'{line}{_TO_THE_END}{chr(10)}' for line in lines)}{_BELOW}")
        terminal.flush()
        self._begin = "\x1b[H"


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
