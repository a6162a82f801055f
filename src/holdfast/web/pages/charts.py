"""The geometry of charts: numbers in, coordinates out. `parts.html` draws them, with classes of the sheet. Pure."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.showing import length

_SHORT = 5.0  # seconds: times of a shorter span count from its start
_SHORT_STEPS = tuple(part * size for size in (0.001, 0.01, 0.1, 1.0) for part in (1, 2, 5))
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 7 * 86_400)


class Bar(NamedTuple):
    """A rectangle; `kind` is a class of the sheet, `at` what a brush selects."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    at: float | None = None


class Curve(NamedTuple):
    """A line through points; a gap in the numbers is a new line, and a point between two gaps is a dot."""

    points: str
    kind: str
    title: str
    is_dot: bool = False


class Mark(NamedTuple):
    """A vertical line, such as a deploy."""

    x: float
    title: str


class Drawn(NamedTuple):
    """A chart, ready to be drawn."""

    width: int
    height: int
    left: int
    bottom: float
    label: str
    grid: Sequence[tuple[float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()
    bars: Sequence[Bar] = ()
    lines: Sequence[Curve] = ()
    marks: Sequence[Mark] = ()


class Series(NamedTuple):
    """Numbers of one thing, one for each bucket of time; None where there is none."""

    title: str
    values: Sequence[float | None]
    kind: str  # c1 to c4 for a line, f1 to f4 or f-good, f-bad … for bars


class Axes:
    """A time axis and a value axis in one frame."""

    def __init__(
        self, since: float, until: float, top: float, *, width: int = 640, height: int = 160, left: int = 60
    ) -> None:
        self.since, self.until, self.top = since, max(until, since + 1e-9), nice_top(top)
        self.width, self.height, self.left, self.bottom = width, height, left, height - 22.0

    def x(self, at: float) -> float:
        place = (min(max(at, self.since), self.until) - self.since) / (self.until - self.since)
        return round(self.left + place * (self.width - self.left), 2)

    def y(self, value: float) -> float:
        return round(self.bottom - 8 - min(max(value, 0.0), self.top) / self.top * (self.bottom - 16) + 8, 2)

    def grid(self, said: Callable[[float], str]) -> list[tuple[float, str]]:
        return [(self.y(part * self.top), said(part * self.top)) for part in (0.0, 0.5, 1.0)]

    def ticks(self) -> list[tuple[float, str]]:
        """Return three to eight times with their places: in UTC, or from the start of a short span."""
        span = self.until - self.since
        if span < _SHORT:
            step = next((each for each in _SHORT_STEPS if span / each <= 7), _SHORT)
            offsets = [number * step for number in range(1, int(span / step) + 1)]
            return self._placed([(self.since + each, f"+{length(each)}") for each in offsets])
        step = next((each for each in _STEPS if span / each <= 7), math.ceil(span / 7 / 86_400) * 86_400)
        form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86_400 else "%d %b"
        first = math.ceil(self.since / step) * step
        times = [first + number * step for number in range(int((self.until - first) // step) + 1)]
        return self._placed([(at, dt.datetime.fromtimestamp(at, dt.UTC).strftime(form)) for at in times])

    def _placed(self, times: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
        """Return where times are written, without those at the edges, which would be cut."""
        placed = [(self.x(at), text, 5.5 * len(text)) for at, text in times]
        return [(x, text) for x, text, half in placed if half <= x <= self.width - half]


def lines(
    label: str,
    starts: Sequence[float],
    until: float,
    series: Sequence[Series],
    marks: Sequence[tuple[float, str]] = (),
    said: Callable[[float], str] | None = None,
) -> Drawn:
    """Draw lines over time; `starts` are those of the buckets, and `said` writes a value."""
    since = starts[0] if starts else until - 1
    top = max((value for each in series for value in each.values if value is not None), default=0.0)
    axes = Axes(since, until, top)
    drawn = [line for each in series for line in _lines(axes, starts, each)]
    placed = [Mark(axes.x(at), title) for at, title in marks if axes.since <= at <= axes.until]
    return Drawn(
        axes.width,
        axes.height,
        axes.left,
        axes.bottom,
        label,
        axes.grid(said or short),
        axes.ticks(),
        (),
        drawn,
        placed,
    )


def _lines(axes: Axes, starts: Sequence[float], series: Series) -> list[Curve]:
    found: list[Curve] = []
    points: list[str] = []
    for at, value in [*zip(starts, series.values, strict=True), (0.0, None)]:
        if value is not None:
            points.append(f"{axes.x(at)},{axes.y(value)}")
        elif points:
            is_dot = len(points) == 1
            found.append(Curve(" ".join(points * 2 if is_dot else points), series.kind, series.title, is_dot))
            points = []
    return found


def columns(label: str, starts: Sequence[float], until: float, series: Sequence[Series], height: int = 120) -> Drawn:
    """Draw stacked columns over time."""
    since = starts[0] if starts else until - 1
    sums = [sum(each.values[number] or 0 for each in series) for number in range(len(starts))]
    axes = Axes(since, until, max(sums, default=0.0), height=height)
    bars: list[Bar] = []
    for number, at in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else until
        below = 0.0
        for each in series:
            value = each.values[number] or 0
            if value:
                y, foot = axes.y(below + value), axes.y(below)
                wide = max(axes.x(end) - axes.x(at) - 1, 0.5)
                bars.append(
                    Bar(axes.x(at), y, round(wide, 2), max(foot - y, 1.0), each.kind, f"{each.title}: {value:g}", at)
                )
                below += value
    return Drawn(axes.width, axes.height, axes.left, axes.bottom, label, axes.grid(short), axes.ticks(), bars)


class Slot(NamedTuple):
    """A part of a cycle: where it begins and ends, from 0 to 1."""

    begins: float
    ends: float
    text: str
    title: str
    kind: str


def cycle(label: str, slots: Sequence[Slot], now: float, *, width: int = 640, height: int = 50) -> Drawn:
    """Draw the slots of a cycle, with a mark for now."""
    bottom = height - 22.0
    bars = [
        Bar(
            round(each.begins * width, 2),
            4,
            round((each.ends - each.begins) * width, 2),
            bottom - 4,
            each.kind,
            each.title,
        )
        for each in slots
    ]
    ticks = [(round((each.begins + each.ends) / 2 * width, 2), each.text) for each in slots]
    return Drawn(width, height, 0, bottom, label, (), ticks, bars, (), [Mark(round(now * width, 2), "now")])


def nice_top(value: float) -> float:
    """Return the end of an axis: 1, 2 or 5 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def time(seconds: float) -> str:
    """Return a duration for an axis, in one unit."""
    for size, name in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.2g}{name}" if size > 1 else f"{seconds:g}s"
    return f"{seconds * 1000:g}ms" if seconds else "0"


def short(value: float) -> str:
    """Return a number for an axis."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"
