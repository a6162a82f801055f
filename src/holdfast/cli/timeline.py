"""The calls of a workflow's body on a time line: one bar for each step, child, wait and hook. Pure.

``=`` is a step, ``-`` a child, ``.`` a wait, ``~`` a hook. A bar ends with ``!`` if the call failed or was cancelled,
and with ``>`` if it is still open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.runtime.runs import CANCELLED, CHILD, FAILED, HOOK, STEP, WAIT, StepRecord, began_at, started_at, took
from holdfast.showing import brief, length

TITLES = ("call", "status", "start", "took", "time line")
LEGEND = "= step  - child  . wait  ~ hook  ! failed or cancelled  > still open"
_MARKS = {STEP: "=", CHILD: "-", WAIT: ".", HOOK: "~"}
_LONGEST_NAME = 24
_NARROWEST_BAR = 12
_FIRST, _LAST = 10, 30  # calls that are drawn of a long log; those that are open always are


class Span(NamedTuple):
    """The time from the start of a run to its end, or to now."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def span_of(record: InvocationRecord, calls: Sequence[StepRecord], now: float) -> Span:
    """Return the time that the log of a run covers. After a restart, that of its present log."""
    began = [at for at in map(began_at, calls) if at is not None]
    if began and record.run is not None and record.run.generation:
        start = min(began)
    else:
        start = min([started_at(record), *began])
    return Span(start, max([start, record.changed_at if record.status in FINAL else now]))


def label(call: StepRecord, queue: str) -> str:
    """Return the name of a call for people: with the kind of a wait, the token of a hook that code has chosen, and the
    queue of a step that is not the run's. Of a World, the name comes first: its ids are long, and begin alike.
    """
    is_foreign = "#" not in call.id and "@" not in call.id  # of a World, where the id of a step is not made of its name
    if is_foreign:
        return f"{call.name} {call.id}"
    if call.kind in (WAIT, HOOK):
        return f"{call.id} {call.name}"
    return f"{call.id} on {call.queue}" if call.queue and call.queue != queue else call.id


def rows(calls: Sequence[StepRecord], queue: str, span: Span, width: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the rows of the time line, for a table of that width."""
    shown = chosen(calls)
    cells = [_cells(call, queue, span) for call in shown]
    used = [max(map(len, column)) + 2 for column in zip(TITLES[:-1], *cells, strict=True)]
    room = max(_NARROWEST_BAR, width - sum(used) - 2)
    for call, each in zip(shown, cells, strict=True):
        yield (*each, f"|{bar(call, span, room)}|")


def chosen(calls: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the calls that are drawn: of many, the first, the last, and those that are open."""
    if len(calls) <= _FIRST + _LAST:
        return list(calls)
    return [*calls[:_FIRST], *[call for call in calls[_FIRST:-_LAST] if call.is_open][:_LAST], *calls[-_LAST:]]


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
