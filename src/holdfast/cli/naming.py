"""Tasks by the names that people type: whole ones, aliases, and short ones without the module."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from holdfast.app import App
from holdfast.errors import UnknownTask
from holdfast.task import Submittable

_UNDECLARED = "Work of a task that the code no longer declares is listed with --url and --name."


def find_task(app: App, name: str, advice: str = "") -> Submittable[..., Any]:
    """The task of that name or alias, or the only one that is called so after the colon.

    Raises `UnknownTask`, with what is near and with the `advice` if there is none.
    """
    known = {each: task for task in app.tasks.values() for each in task.definition.names}
    if name in known:
        return known[name]
    matching = {each: task for each, task in known.items() if _short(each) == name}
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
    """The names under which the store may have work of these tasks.

    Without an app that declares tasks nothing is known about names, so they are taken as they are.
    """
    if not app.tasks:
        return list(names)
    return [each for name in names for each in find_task(app, name, _UNDECLARED).definition.names]


def _short(name: str) -> str:
    return name.partition(":")[2]


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: compared as a whole, or without modules if none was given."""
    forms = {each if ":" in name else _short(each) or each: each for each in known}
    near = difflib.get_close_matches(name, forms, n=1)
    return forms[near[0]] if near else None
