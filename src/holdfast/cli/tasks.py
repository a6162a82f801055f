"""``holdfast tasks``: the tasks that the code declares, with their options."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from holdfast.app import App
from holdfast.cli.command import Needs, command
from holdfast.cli.naming import find_task
from holdfast.cli.output import Output
from holdfast.web.reading.tasks import signature_of, task_document

_HEAD = ("name", "signature")
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
    documents = [task_document(each) for each in chosen]
    out.document({"tasks": documents} if task is None else documents[0])
    if task is not None:
        (one,) = chosen
        out.line(f"{one.name}{signature_of(one.definition)}")
        out.facts(
            [(name.replace("_", " "), _shown(value)) for name, value in documents[0].items() if name not in _HEAD]
        )
        return
    rows = []
    for document in documents:
        said = {name: _shown(value) for name, value in document.items()}
        rows.append(
            (
                said["name"],
                *(said[name] for name in ("kind", "queue", "priority", "retries", "limit", "rate", "timeout")),
                said["called_by"],
            )
        )
    out.table(_TITLES, rows, empty=f"the app '{app.name}' declares no tasks")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)
