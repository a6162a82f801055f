"""``holdfast tasks``: the tasks that the code declares, with their options."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument

from holdfast.app import App
from holdfast.cli.command import Needs, command
from holdfast.cli.naming import find_task
from holdfast.cli.output import Output
from holdfast.cli.policies import describe_policy
from holdfast.model.pacing import Debounce
from holdfast.runtime.definition import TaskDefinition
from holdfast.showing import length
from holdfast.task import Submittable

_TIMES = ("timeout", "soft_timeout", "expires", "cancel_grace")
_TITLES = ("task", "kind", "queue", "priority", "retries", "limit", "rate", "timeout", "called by")


@command(Needs.TASKS)
def tasks(
    out: Output,
    app: App,
    task: Annotated[str | None, Argument(help="One of them, with all of its options.")] = None,
) -> None:
    """List the tasks of an app with their options, or show one.

    This is what the code declares; stored calls keep what they were submitted with.
    """
    chosen = [app.tasks[name] for name in sorted(app.tasks)] if task is None else [find_task(app, task)]
    documents = [_document(each) for each in chosen]
    out.document({"tasks": documents} if task is None else documents[0])
    if task is not None:
        (one,) = chosen
        out.line(f"{one.name}{one.definition.signature}")
        out.facts([(name.replace("_", " "), _shown(value)) for name, value in _options(one).items()])
        return
    rows = []
    for each in chosen:
        said = {name: _shown(value) for name, value in _options(each).items()}
        rows.append(
            (
                each.name,
                *(said[name] for name in ("kind", "queue", "priority", "retries", "limit", "rate", "timeout")),
                said["called_by"],
            )
        )
    out.table(_TITLES, rows, empty=f"the app '{app.name}' declares no tasks")


def _document(task: Submittable[..., Any]) -> dict[str, Any]:
    return {"name": task.name, "signature": str(task.definition.signature)} | _options(task)


def _options(task: Submittable[..., Any]) -> dict[str, Any]:
    """Return the options by name, as people and programs see them."""
    definition, terms = task.definition, task.terms
    return {
        "kind": "workflow" if definition.is_workflow else str(definition.executor),
        "aliases": list(definition.aliases),
        "queue": definition.queue,
        "tags": list(definition.tags),
        "priority": definition.priority,
        "at_most_once": definition.at_most_once,
        "retries": describe_policy(terms.retries) or "none",
        "retention": {
            outcome: length(kept) if kept is not None else "forever"
            for outcome, kept in (terms.retention or {}).items()
        },
        "limit": _limit(definition),
        "rate": _rate(definition),
        "unique": _unique(definition),
        "pacing": _pacing(definition),
        **{
            name: _time(getattr(definition.time, name))
            for name in ("timeout", "soft_timeout", "expires", "cancel_grace")
        },
        "cancel_children": definition.time.cancel_children,
        "log_lines": definition.log_lines or None,
        "validate": task.is_validated,
        "called_by": [*_schedules(definition), *map(repr, definition.triggers)],
    }


def _schedules(definition: TaskDefinition) -> list[str]:
    return [each.timing.describe() for each in definition.schedules]


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else length(seconds)


def _limit(definition: TaskDefinition) -> str | None:
    limit = definition.limit
    if limit is None:
        return None
    by = f" by {', '.join(definition.limit_by)}" if definition.limit_by else ""
    return f"{limit.max_running}{by}" + ("" if limit.waits else ", others are refused")


def _rate(definition: TaskDefinition) -> str | None:
    rate = definition.rate
    if rate is None:
        return None
    shared = f", shared as {definition.rate_name}" if definition.rate_name else ""
    by = f" by {', '.join(definition.rate_by)}" if definition.rate_by else ""
    return f"{rate}, burst {rate.burst}{by}{shared}" + ("" if rate.waits else ", others are refused")


def _unique(definition: TaskDefinition) -> str | None:
    if not definition.unique or definition.pacing is not None:
        return None
    return f"by {', '.join(definition.unique_by)}" if definition.unique_by else "of the task"


def _pacing(definition: TaskDefinition) -> str | None:
    pacing = definition.pacing
    if pacing is None:
        return None
    return f"{'debounce' if isinstance(pacing, Debounce) else 'throttle'} {length(pacing.seconds)}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)
