"""Tasks, invocations and events by what people type: whole names and ids, and short forms that mean one thing only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.output import Output
from holdfast.errors import EventNotFound, InvocationNotFound, UsageError
from holdfast.ids import is_id
from holdfast.model.names import counted
from holdfast.runtime.naming import declared, find_definition, wanted_names
from holdfast.task import Submittable
from holdfast.web.reading.finding import LISTED, behind, only_one
from holdfast.web.reading.model import ReadModel


def find_task(app: App, name: str, advice: str = "") -> Submittable[..., Any]:
    """Find a task by name or alias, or by the part after the colon, or without its version, if only one has it.

    Raises `UnknownTask`, with a similar name and with the `advice`.
    """
    return app.tasks[find_definition(declared(app.runtime), name, advice).name]


def stored_names(app: App, names: Iterable[str]) -> list[str]:
    """Return the names under which the store may have work of these tasks. See `wanted_names`."""
    given = list(names)
    return reach.with_engine(app, lambda engine: wanted_names(app.runtime, engine, given)) if given else []


def explain_empty(out: Output, app: App, tasks: Iterable[str] | None) -> None:
    """Say of an empty answer that a short name means a task only where the app's code is imported."""
    short = next((name for name in tasks or () if ":" not in name), None)
    if short is not None and not declared(app.runtime):
        out.aside(f"note: no code is imported, so write the whole name of the task, such as shop:{short}")


_LOOKED_AT = 10_000


def find_id(app: App, text: str) -> str:
    """Find an invocation by the beginning of its id, or else by its end: see `IdFinder`."""
    return app.runtime.run(ReadModel(app.runtime).ids.find(text)) if not is_id(text) else text


def find_event(app: App, text: str) -> str:
    """Find an event by the beginning of its id, or else by its end among the latest."""
    if is_id(text):
        return text
    found = app.events(before=behind(text, "event", EventNotFound), limit=LISTED + 1)
    if not any(each.id.startswith(text) for each in found):
        found = app.events(limit=_LOOKED_AT)
    return only_one(app.name, {each.id: each.name for each in found}, text, "event", EventNotFound)


def find_group(app: App, text: str) -> str:
    """Find a group by the beginning of its id, or else by its end among the latest."""
    if is_id(text):
        return text
    found = app.groups(before=behind(text, "group", InvocationNotFound), limit=LISTED + 1)
    if not any(each.id.startswith(text) for each in found):
        found = app.groups(limit=_LOOKED_AT)
    labels = {str(each.id): counted(each.size, "member") for each in found}
    return only_one(app.name, labels, text, "group", InvocationNotFound)


def attributes_of(given: Iterable[str]) -> dict[str, str]:
    """Return attributes that are written as name=value."""
    found: dict[str, str] = {}
    for each in given:
        name, is_there, value = each.partition("=")
        if not name or not is_there:
            raise UsageError(f"--attribute {each}: write it as name=value, such as stage=packed")
        if found.setdefault(name, value) != value:
            raise UsageError(f"--attribute {each}: an attribute has one value, and {name}={found[name]} is wanted too")
    return found
