"""Tasks, invocations and events by what people type: whole names and ids, and short forms that mean one thing only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from holdfast.app import App
from holdfast.cli.reach import set_aside_in
from holdfast.errors import EventNotFound, HoldfastError, InvocationNotFound, UnknownTask, UsageError
from holdfast.ids import LENGTH, is_id
from holdfast.model.decoding import INVOCATION
from holdfast.model.names import unversioned
from holdfast.task import Submittable
from holdfast.triggers.evaluation import EVALUATES

_UNDECLARED = "Work of a task that the code no longer declares is listed with --url and --name."


def find_task(app: App, name: str, advice: str = "") -> Submittable[..., Any]:
    """Find a task by name or alias, or by the part after the colon, or without its version, if only one has it.

    Raises `UnknownTask`, with a similar name and with the `advice`.
    """
    known = {each: task for task in app.tasks.values() for each in task.definition.names}
    if name in known:
        return known[name]
    matching = {each: task for each, task in known.items() if _short(each) == name} or {
        each: task for each, task in known.items() if name in _without_version(task)
    }
    tasks = {task.name: task for task in matching.values()}
    if len(tasks) > 1:
        raise UnknownTask(f"'{name}' may be {' or '.join(sorted(matching))}; write the whole name")
    if tasks:
        return next(iter(tasks.values()))
    near = _nearest(name, known)
    hint = f" Did you mean '{near}'?" if near else ""
    declared = ", ".join(sorted(app.tasks)) or "none"
    raise UnknownTask(f"this app declares no task '{name}'.{hint} Declared: {declared}. {advice}".rstrip())


def stored_names(app: App, names: Iterable[str]) -> list[str]:
    """Return the names under which the store may have work of these tasks.

    Without an app that declares tasks nothing is known about names, so they are taken as they are; so are names
    of internal tasks of triggers. A workflow without a version means all of its versions that are declared, and the
    runs of the time when it had none.
    """
    if not app.tasks:
        return list(names)
    return list(dict.fromkeys(each for name in names for each in _stored_names(app, name)))


def _stored_names(app: App, name: str) -> tuple[str, ...]:
    if name.startswith(EVALUATES):
        return (name,)
    versions = [task for task in app.tasks.values() if name in _without_version(task)]
    if not versions:
        return find_task(app, name, _UNDECLARED).definition.names
    stored = [each for task in versions for each in (*task.definition.names, unversioned(task.name))]
    exact = [task for task in app.tasks.values() if name in (task.name, _short(task.name))]
    return (*stored, *(each for task in exact for each in task.definition.names))


RUN_PREFIX = "wrun_"
_SHORTEST = 6  # characters of an id: they give the time to a quarter of an hour
_LISTED = 5


def find_id(app: App, text: str) -> str:
    """Find an invocation by the beginning of its id. A whole id is returned as it is, without a look. The id of a
    World run may be written as Workflow DevKit shows it: `wrun_` and capitals.

    Raises `InvocationNotFound`, or `UsageError` with the ids that begin so.
    """
    if text.startswith(RUN_PREFIX):
        text = text.removeprefix(RUN_PREFIX).lower()
    if is_id(text):
        return text
    found = app.invocations(before=_after(text, "invocation", InvocationNotFound), limit=_LISTED + 1)
    labels: dict[str, str] = {each.id: f"{each.task}, {each.status}" for each in found}
    if not any(id.startswith(text) for id in labels):  # it may be quarantined; the command says so
        labels |= {each.id: "set aside" for each in set_aside_in(app) if each.kind == INVOCATION}
    return _only_one(app, labels, text, "invocation", InvocationNotFound)


def find_event(app: App, text: str) -> str:
    """Find an event by the beginning of its id."""
    if is_id(text):
        return text
    found = app.events(before=_after(text, "event", EventNotFound), limit=_LISTED + 1)
    return _only_one(app, {each.id: each.name for each in found}, text, "event", EventNotFound)


def _after(text: str, what: str, missing: type[HoldfastError]) -> str:
    """Return a text after all ids that begin with this one: "{" is after every letter, and lists are newest first."""
    if not is_id(text[:LENGTH].ljust(LENGTH, "0")):
        raise missing(
            f"there is no {what} '{text}'; an id has {LENGTH} characters, and its first {_SHORTEST} or more will do"
        )
    if len(text) < _SHORTEST:
        raise UsageError(f"'{text}' is too short for the beginning of an id: write {_SHORTEST} characters or more")
    return f"{text}{{"


def _only_one(app: App, labels: dict[str, str], text: str, what: str, missing: type[HoldfastError]) -> str:
    found = [id for id in labels if id.startswith(text)]
    if not found:
        raise missing(f"the app '{app.name}' has no {what} whose id begins with '{text}'")
    if len(found) > 1:
        listed = ", ".join(f"{id} ({labels[id]})" for id in found[:_LISTED])
        more = " and others" if len(found) > _LISTED else ""
        raise UsageError(f"'{text}' may be {listed}{more}; write more of it")
    return found[0]


def _without_version(task: Submittable[..., Any]) -> tuple[str, ...]:
    """Return what a user may call a workflow that has a version, if the version is left out."""
    name = unversioned(task.name)
    return (name, _short(name)) if task.definition.is_workflow and name != task.name else ()


def _short(name: str) -> str:
    return name.partition(":")[2]


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, compared without modules if none was given."""
    forms = {each if ":" in name else _short(each) or each: each for each in known}
    near = difflib.get_close_matches(name, forms, n=1)
    return forms[near[0]] if near else None
