"""The calls of a workflow's body on a time line: one bar for each step, child, wait and hook. Pure.

``=`` is a step, ``-`` a child, ``.`` a wait, ``~`` a hook. A bar ends with ``!`` if the call failed or was cancelled,
and with ``>`` if it is still open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.runtime.runs import (
    CANCELLED,
    CHILD,
    FAILED,
    HOOK,
    STEP,
    WAIT,
    Span,
    StepRecord,
    began_at,
    chosen,
    label,
    took,
)
from holdfast.showing import brief, length

TITLES = ("call", "status", "start", "took", "time line")
LEGEND = "= step  - child  . wait  ~ hook  ! failed or cancelled  > still open"
_MARKS = {STEP: "=", CHILD: "-", WAIT: ".", HOOK: "~"}
_LONGEST_NAME = 24
_NARROWEST_BAR = 12


def rows(calls: Sequence[StepRecord], queue: str, span: Span, width: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the rows of the time line, for a table of that width."""
    shown = chosen(calls)
    cells = [_cells(call, queue, span) for call in shown]
    used = [max(map(len, column)) + 2 for column in zip(TITLES[:-1], *cells, strict=True)]
    room = max(_NARROWEST_BAR, width - sum(used) - 2)
    for call, each in zip(shown, cells, strict=True):
        yield (*each, f"|{bar(call, span, room)}|")


def _cells(call: StepRecord, queue: str, span: Span) -> tuple[str, str, str, str]:
    began, seconds = began_at(call), took(call, span.end)
    start = "" if began is None else f"+{length(max(0.0, began - span.start))}"
    return brief(label(call, queue), _LONGEST_NAME), call.status, start, "" if seconds is None else length(seconds)


def bar(call: StepRecord, span: Span, room: int) -> str:
    """Return the bar of a call, filled up with blanks. It has one mark at least."""
    began = began_at(call)
    if began is None:
        return " " * room
    scale = room / span.seconds if span.seconds > 0 else 0.0
    ended = span.end if call.ended_at is None else call.ended_at
    first = min(room - 1, max(0, int((began - span.start) * scale)))
    last = min(room, max(first + 1, round((ended - span.start) * scale)))
    marks = _MARKS.get(call.kind, "=") * (last - first)
    if call.is_open:
        marks = f"{marks[:-1]}>"
    elif call.status in (FAILED, CANCELLED):
        marks = f"{marks[:-1]}!"
    return f"{' ' * first}{marks}".ljust(room)
