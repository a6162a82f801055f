"""Pages about schedules and triggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.web.documents import Document
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.schedules import ScheduleReading, clock_of
from holdfast.web.routing import Asked

_HIGH, _LEFT, _RIGHT, _WIDTH = 30, 6, 400, 640


async def schedules(asked: Asked) -> Callable[[], Context]:
    reading = ScheduleReading(asked.runtime)
    found, triggers = await asked.runtime.arun(reading.all()), await asked.runtime.arun(reading.triggers())

    def make() -> Context:
        shown = triggers.document()
        return {
            "schedules": found.document()["schedules"],
            "notes": [*found.unserved, *found.unreadable.values(), *triggers.unreadable.values()],
            "triggers": shown["triggers"],
            "drawing": drawn(shown["triggers"]),
        }

    return make


async def schedule(asked: Asked) -> Callable[[], Context]:
    whole = await asked.runtime.arun(ScheduleReading(asked.runtime).one(asked.path["name"], 8))

    def make() -> Context:
        clocks = [clock_of(whole.record, at) for at in whole.next]
        return {"found": whole.document(asked.codec), "clocks": clocks, "aside": whole.aside}

    return make


class CallEnd(NamedTuple):
    """A cause or a task in the drawing of what calls what."""

    x: float
    y: float
    text: str
    kind: str


class CallLine(NamedTuple):
    """A trigger, from a cause to the task that it calls."""

    points: str
    title: str


class CallGraph(NamedTuple):
    """Causes on the left, tasks on the right, a line for each trigger."""

    width: int
    height: int
    nodes: Sequence[CallEnd]
    lines: Sequence[CallLine]


def drawn(triggers: Sequence[Document]) -> CallGraph:
    """Place what calls what. A task that is a cause too stands on both sides."""
    active: list[Any] = [each for each in triggers if each["state"] == "active"]
    causes = list(dict.fromkeys(cause for each in active for cause in each["causes"]))
    tasks = list(dict.fromkeys(each["task"] for each in active))
    high = max(len(causes), len(tasks), 1) * _HIGH + 8
    left = {name: (number + 0.5) * (high - 8) / len(causes) + 4 for number, name in enumerate(causes)}
    right = {name: (number + 0.5) * (high - 8) / len(tasks) + 4 for number, name in enumerate(tasks)}
    nodes = [CallEnd(_LEFT, y, name, "cause") for name, y in left.items()]
    nodes += [CallEnd(_RIGHT, y, name, "task") for name, y in right.items()]
    lines = [
        CallLine(_curve(left[cause], right[each["task"]]), each["when"]) for each in active for cause in each["causes"]
    ]
    return CallGraph(_WIDTH, int(high), nodes, lines)


def _curve(start: float, end: float) -> str:
    return f"M270,{start:.1f} C330,{start:.1f} 330,{end:.1f} 399,{end:.1f}"


_TOPICS = ("schedules",)
PAGES = (
    WebPage("/schedules", "Schedules and triggers", "schedules.html", schedules, nav="schedules", topics=_TOPICS),
    WebPage("/schedules/{name}", "Schedule", "schedule.html", schedule, nav="schedules", topics=_TOPICS),
)
