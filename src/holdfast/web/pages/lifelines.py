"""The life of an invocation as geometry: its way through the state machine, bands of its attempts, and for a workflow
the bars of its steps. Numbers in, coordinates out. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.model.diagram import Drawing, drawing
from holdfast.model.records import HistoryEntry, InvocationRecord, runner_of
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.runs import CHILD, FAILED, HOOK, STREAM, WAIT, Span, StepRecord, began_at, chosen, label, took
from holdfast.showing import brief, length
from holdfast.web.pages.charts import Axes

# --- the state machine


class LitArrow(NamedTuple):
    """An arrow of the picture, and whether the invocation has gone it."""

    path: str
    title: str
    is_taken: bool


class Machine(NamedTuple):
    """The state machine with the path of one invocation."""

    drawing: Drawing
    visits: Counter[Status]
    current: Status | None
    arrows: Sequence[LitArrow]
    words: str


def machine_of(history: Sequence[HistoryEntry]) -> Machine:
    path = [entry.status for entry in history]
    taken = set(pairwise(path))
    picture = drawing()
    arrows = [
        LitArrow(
            arrow.path,
            f"{', '.join(arrow.sources)} → {arrow.target}",
            any((source, arrow.target) in taken for source in arrow.sources),
        )
        for arrow in picture.arrows
    ]
    arrows.sort(key=lambda arrow: arrow.is_taken)  # those taken lie above the others
    current = path[-1] if path else None
    return Machine(picture, Counter(path), current, arrows, " → ".join(status.replace("_", " ") for status in path))


# --- bands of attempts

_KINDS = {
    Status.REGISTERED: "waiting",
    Status.REROUTED: "waiting",
    Status.RETRY: "backoff",
    Status.CONCURRENCY_CONTROLLED: "limit",
    Status.PENDING: "claimed",
    Status.PENDING_RECOVERY: "recovery",
    Status.RUNNING_RECOVERY: "recovery",
    Status.KILLED: "recovery",
    Status.RUNNING: "running",
    Status.RESUMED: "running",
    Status.PAUSED: "suspended",
    Status.SUSPENDED: "suspended",
    Status.PARKED: "parked",
    Status.CANCELLING: "cancelling",
}
_LANE, _LABEL, _BAND, _TICKS = 44.0, 15.0, 22.0, 20.0
_NARROWEST, _PER_LETTER = 2.0, 7.0


class Band(NamedTuple):
    """A part of the time in one status."""

    x: float
    width: float
    kind: str
    text: str  # empty, if there is no room for it
    title: str


class LaneRow(NamedTuple):
    """A row of bands: the queue, or a runner."""

    label: str
    y: float
    bands: Sequence[Band]


class Lifeline(NamedTuple):
    """The rows over one axis of time."""

    width: int
    height: float
    left: int
    ticks: Sequence[tuple[float, str]]
    lanes: Sequence[LaneRow]
    band_height: float
    sums: Sequence[tuple[str, str]]  # how long it was in each kind of status, in words
    words: str


def lifeline_of(record: InvocationRecord, now: float) -> Lifeline:
    """Return bands for each status that it has had, in a row for the queue and one for each runner."""
    history = record.history
    since = history[0].at if history else record.created_at
    until = max(record.changed_at if record.status in FINAL else now, since + 0.001)
    axes, lanes, sums = Axes(since, until, 1, width=960, left=1), dict[str, list[Band]](), dict[str, float]()
    ends = [*(entry.at for entry in history[1:]), until]
    for entry, end in zip(history, ends, strict=False):
        if entry.status in FINAL:
            continue
        kind = _KINDS[entry.status]
        seconds = max(0.0, end - entry.at)
        sums[kind] = sums.get(kind, 0.0) + seconds
        lane = runner_of(entry.owner) if entry.status in OWNED and entry.owner else "the queue"
        lanes.setdefault(str(lane), []).append(_band(axes, entry.at, end, kind, f"{kind} {length(seconds)}", entry.why))
    rows = [LaneRow(name, _LABEL + number * _LANE, bands) for number, (name, bands) in enumerate(lanes.items())]
    said = [(kind, length(seconds)) for kind, seconds in sums.items()]
    words = ", ".join(f"{kind} {seconds}" for kind, seconds in said) or "no time"
    return Lifeline(960, len(rows) * _LANE + _TICKS, axes.left, axes.ticks(), rows, _BAND, said, words)


def _band(axes: Axes, start: float, end: float, kind: str, text: str, why: str) -> Band:
    x = axes.x(start)
    width = max(round(axes.x(end) - x, 2), _NARROWEST)
    x = min(x, axes.width - width)
    return Band(x, width, kind, text if len(text) * _PER_LETTER < width else "", f"{text}{': ' if why else ''}{why}")


# --- the waterfall of a workflow


class StepBar(NamedTuple):
    """A call of a body: its row, its bar, and where it leads to."""

    id: str
    label: str
    status: str
    kind: str
    y: float
    x: float
    width: float
    text: str
    text_x: float
    is_right: bool  # its text ends there
    child: str


class Waterfall(NamedTuple):
    """The calls of a run over one axis of time; `left_out` of them are not drawn."""

    width: int
    height: float
    left: int
    ticks: Sequence[tuple[float, str]]
    bars: Sequence[StepBar]
    left_out: int
    words: str


_ROW = 34.0
_OF_KIND = {WAIT: "backoff", HOOK: "suspended", CHILD: "claimed", STREAM: "waiting"}


def waterfall_of(calls: Sequence[StepRecord], span: Span, queue: str) -> Waterfall:
    """Return a bar for each step, child, wait and hook."""
    axes = Axes(span.start, max(span.end, span.start + 0.001), 1, width=960, left=1)
    shown = chosen(calls)
    bars = [_bar(axes, call, _began(call, calls, span), span, queue, number) for number, call in enumerate(shown)]
    height = len(bars) * _ROW + _TICKS
    words = f"{len(calls)} calls in {length(span.seconds)}"
    return Waterfall(960, height, axes.left, axes.ticks(), bars, len(calls) - len(shown), words)


def _began(call: StepRecord, calls: Sequence[StepRecord], span: Span) -> float:
    """Return where the bar of a call begins. The log has only the end of a short sleep: the bar begins where the last
    call before it ended, which is when a body that does one thing after another began to sleep.
    """
    if call.kind != WAIT or call.started_at is not None or call.created_at is not None or call.ended_at is None:
        began = began_at(call)
        return span.end if began is None else began
    before = [each.ended_at for each in calls if each.ended_at is not None and each.position < call.position]
    return max((at for at in before if at <= call.ended_at), default=span.start)


def _bar(axes: Axes, call: StepRecord, start: float, span: Span, queue: str, number: int) -> StepBar:
    seconds = took(call, span.end)
    end = span.end if call.ended_at is None else call.ended_at
    kind = "failed" if call.status == FAILED else _OF_KIND.get(call.kind, "running")
    spent = "" if seconds is None else length(seconds)
    attempts = f", attempt {call.attempt}" if call.attempt > 1 else ""
    text = f"{brief(label(call, queue), 60)}: {call.status}{f' {spent}' if spent else ''}{attempts}"
    x = min(axes.x(start), axes.width - 3.0)
    width = max(round(axes.x(end) - x, 2), 3.0)
    is_right = x > axes.width * 0.5
    text_x = x + width if is_right else x
    y = number * _ROW
    return StepBar(call.id, label(call, queue), call.status, kind, y, x, width, text, text_x, is_right, call.child)
