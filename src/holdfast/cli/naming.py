"""Tasks, invocations and events by what people type: whole names and ids, and short forms that mean one thing only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.app import App
from holdfast.cli import reach
from holdfast.errors import EventNotFound, HoldfastError, InvocationNotFound, UsageError
from holdfast.ids import LENGTH, is_id
from holdfast.model.decoding import INVOCATION
from holdfast.model.names import core_app
from holdfast.runtime.naming import declared, find_definition, wanted_names
from holdfast.store.contract import Filter
from holdfast.task import Submittable


def find_task(app: App, name: str, advice: str = "") -> Submittable[..., Any]:
    """Find a task by name or alias, or by the part after the colon, or without its version, if only one has it.

    Raises `UnknownTask`, with a similar name and with the `advice`.
    """
    return app.tasks[find_definition(declared(app.runtime), name, advice).name]


def stored_names(app: App, names: Iterable[str]) -> list[str]:
    """Return the names under which the store may have work of these tasks. See `wanted_names`."""
    given = list(names)
    return reach.with_engine(app, lambda engine: wanted_names(app.runtime, engine, given)) if given else []


RUN_PREFIX = "wrun_"
_SHORTEST = 6  # characters of an id: they give the time to a quarter of an hour
_LISTED = 5
_EVENTS_LOOKED_AT = 10_000


def find_id(app: App, text: str) -> str:
    """Find an invocation by the beginning of its id, or else by its end. A whole id is returned as it is, without a
    look. The id of a World run may be written as Workflow DevKit shows it: `wrun_` and capitals.

    Raises `InvocationNotFound`, or `UsageError` with the ids that begin, or end, so.
    """
    if text.startswith(RUN_PREFIX):
        text = text.removeprefix(RUN_PREFIX).lower()
    if is_id(text):
        return text
    after = _after(text, "invocation", InvocationNotFound)
    labels: dict[str, str] = {}
    for each in (app.name, core_app(app.name)):
        for where in (Filter(before_id=after), Filter(id_ends=text)):
            found = reach.find(app, each, where, _LISTED + 1)
            labels |= {record.id: f"{record.task}, {record.status}" for record in found}
            if any(is_meant(id, text) for id in labels):
                return _only_one(app, labels, text, "invocation", InvocationNotFound)
    # It may be quarantined; the command says so.
    labels |= {each.id: "set aside" for each in reach.set_aside_in(app) if each.kind == INVOCATION}
    return _only_one(app, labels, text, "invocation", InvocationNotFound)


def find_event(app: App, text: str) -> str:
    """Find an event by the beginning of its id, or else by its end among the latest."""
    if is_id(text):
        return text
    found = app.events(before=_after(text, "event", EventNotFound), limit=_LISTED + 1)
    if not any(each.id.startswith(text) for each in found):
        found = app.events(limit=_EVENTS_LOOKED_AT)
    return _only_one(app, {each.id: each.name for each in found}, text, "event", EventNotFound)


def is_meant(id: str, text: str) -> bool:
    return id.startswith(text) or id.endswith(text)


def _after(text: str, what: str, missing: type[HoldfastError]) -> str:
    """Return a text after all ids that begin with this one: "{" is after every letter, and lists are newest first."""
    if not is_id(text[:LENGTH].ljust(LENGTH, "0")):
        raise missing(
            f"there is no {what} '{text}'; an id has {LENGTH} characters, and its first or last {_SHORTEST} will do"
        )
    if len(text) < _SHORTEST:
        raise UsageError(
            f"'{text}' is too short for a part of an id: write {_SHORTEST} characters or more of its "
            "beginning, or of its end"
        )
    return f"{text}{{"


def _only_one(app: App, labels: dict[str, str], text: str, what: str, missing: type[HoldfastError]) -> str:
    """Return the id that is meant: that which begins so, else that which ends so."""
    found = [id for id in labels if id.startswith(text)] or [id for id in labels if id.endswith(text)]
    if not found:
        raise missing(f"the app '{app.name}' has no {what} whose id begins or ends with '{text}'")
    if len(found) > 1:
        listed = ", ".join(f"{id} ({labels[id]})" for id in found[:_LISTED])
        more = " and others" if len(found) > _LISTED else ""
        raise UsageError(f"'{text}' may be {listed}{more}; write more of it")
    return found[0]


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
