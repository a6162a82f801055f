"""Pages about tasks and workflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.model.names import unversioned
from holdfast.runtime.app_runtime import DeclaredTask
from holdfast.store.contract import Filter
from holdfast.web.documents import figures_document
from holdfast.web.pages import charts
from holdfast.web.pages.overview import search_of
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.tasks import TaskReading, parameters_of
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked

SPANS = ("1h", "24h", "7d")
_LATEST = 10


async def tasks(asked: Asked) -> Callable[[], Context]:
    known = await asked.runtime.arun(TaskReading(asked.runtime).all())
    answer = await asked.runtime.arun(asked.reading.stats(asked.query["since"]))
    ended = {name: figures_document(each) for name, each in answer.stats.tasks.items()}
    return lambda: {"tasks": known.document()["tasks"], "ended": ended, "spans": SPANS}


async def task(asked: Asked) -> Callable[[], Context]:
    known = await asked.runtime.arun(TaskReading(asked.runtime).one(asked.path["name"]))
    answer = await asked.runtime.arun(asked.reading.stats(asked.query["since"], task=[known.name]))
    latest = await asked.runtime.arun(asked.reading.invocations(Filter(tasks=frozenset({known.name})), _LATEST))
    stats = answer.stats

    def make() -> Context:
        starts = [each.at for each in stats.points]
        ends = [
            charts.Series("succeeded", [each.succeeded for each in stats.points], "f-good"),
            charts.Series("failed", [each.failed for each in stats.points], "f-bad"),
        ]
        times = [
            charts.Series("run time: p50", [each.run.percentile(50) for each in stats.points], "c1"),
            charts.Series("run time: p95", [each.run.percentile(95) for each in stats.points], "c2"),
        ]
        marks = [(each.at, "a deploy") for each in stats.deploys]
        document = known.document()
        return {
            "found": document,
            "versions": sorted(document["runners"].items()),
            "workflow": unversioned(known.name),
            "figures": figures_document(stats.total),
            "failures": [(group, search_of(group, asked.query["since"])) for group in stats.failures],
            "ends": charts.columns("Calls that ended, over time", starts, stats.until, ends, height=160),
            "times": charts.lines("How long they ran, in seconds", starts, stats.until, times, marks, charts.time),
            "latest": latest.document()["invocations"],
            "fields": [] if known.task is None else form_of(known.task),
            "spans": SPANS,
        }

    return make


def form_of(task: DeclaredTask) -> Sequence[dict[str, Any]]:
    """Return the fields of a form for a call of a task."""
    fields = []
    for each in parameters_of(task.definition):
        default = each.default if each.kind != "json" or each.required else ""
        fields.append(
            {
                "name": f"kwargs.{each.name}",
                "option": "--kwargs",
                "label": f"{each.name}: {each.annotation}" if each.annotation else each.name,
                "kind": each.kind,
                "optional": not each.required,
                "value": "" if default is None else default,
                "help": "" if each.kind != "json" else "As JSON.",
            }
        )
    return fields


_SINCE = {"since": Parameter("over the last", default="24h", choices=SPANS)}
PAGES = (
    WebPage("/tasks", "Tasks and workflows", "tasks.html", tasks, _SINCE, nav="tasks", topics=("stats",)),
    WebPage("/tasks/{name}", "Task", "task.html", task, _SINCE, nav="tasks", topics=("stats", "invocations")),
)
