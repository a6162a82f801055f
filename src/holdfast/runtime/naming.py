"""Tasks by what people say, a task, its whole name or an alias, or the short name that only one has; and lists of
invocations by that.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from holdfast.errors import UnknownTask, UsageError
from holdfast.model.names import unversioned
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime, DeclaredTask
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.listing import Moment, filter_of, is_allowed, listed, made_within, several, with_key
from holdfast.store.contract import Filter

# What the names of our own tasks begin with: evaluations of triggers, steps on other queues, World runs.
_OURS = ("trigger:", "step:", "world:")
_UNDECLARED = "Work of a task that the code no longer declares is found by its whole name, or with --url and --name."


def declared(runtime: AppRuntime) -> list[TaskDefinition]:
    """Return the tasks that the app declares, without internal ones."""
    return [definition for definition in runtime.definitions if not definition.is_hidden]


def find_definition(definitions: Sequence[TaskDefinition], name: str, advice: str = "") -> TaskDefinition:
    """Find a task by name or alias, or by the part after the colon, or without its version, if only one has it.

    Raises `UnknownTask`, with a similar name and with the `advice`.
    """
    known = {each: definition for definition in definitions for each in definition.names}
    if name in known:
        return known[name]
    matching = {each: definition for each, definition in known.items() if name and short(each) == name} or {
        each: definition for each, definition in known.items() if name in without_version(definition)
    }
    found = {definition.name: definition for definition in matching.values()}
    if len(found) > 1:
        raise UnknownTask(f"'{name}' may be {' or '.join(sorted(matching))}; write the whole name")
    if found:
        return next(iter(found.values()))
    near = _nearest(name, known)
    hint = f" Did you mean '{near}'?" if near else ""
    names = ", ".join(sorted({definition.name for definition in definitions})) or "none"
    raise UnknownTask(f"this app declares no task '{name}'.{hint} Declared: {names}. {advice}".rstrip())


def stored_names(definitions: Sequence[TaskDefinition], name: str) -> tuple[str, ...]:
    """Return the names under which the store may have work of a task. A workflow without a version means all of its
    versions that are declared, and the runs of the time when it had none. Raises `UnknownTask`.
    """
    versions = [definition for definition in definitions if name in without_version(definition)]
    if not versions:
        return find_definition(definitions, name, _UNDECLARED).names
    stored = [each for definition in versions for each in (*definition.names, unversioned(definition.name))]
    exact = [definition for definition in definitions if name in (definition.name, short(definition.name))]
    return (*stored, *(each for definition in exact for each in definition.names))


Wanted = str | DeclaredTask | Iterable[str | DeclaredTask] | None


class ListOptions(TypedDict, total=False):
    """Which invocations are listed; `App.invocations` says what they mean."""

    status: str | Iterable[str] | None
    task: Wanted
    queue: str | Iterable[str] | None
    parent: str | None
    attributes: Mapping[str, str] | None
    key: str | None
    since: Moment
    until: Moment
    before: str | None


_KNOWN = tuple(ListOptions.__annotations__)


async def listing(runtime: AppRuntime, engine: Engine, limit: int, options: ListOptions) -> Sequence[InvocationRecord]:
    """Return the invocations that these options mean. Raises `UsageError`, `UnknownTask`."""
    if unknown := [name for name in options if name not in _KNOWN]:
        raise UsageError(f"invocations() has no filter {unknown[0]}=; there are limit, {', '.join(_KNOWN)}")
    given = cast(dict[str, Any], dict(options))
    keep, key = made_within(given.pop("since", None), given.pop("until", None)), given.pop("key", None)
    names = await wanted_names(runtime, engine, given.pop("task", ()))
    where = filter_of(task=names, **given)
    if key is None:
        return (await listed(engine, where, limit, keep)).records
    if not isinstance(key, str) or not key:
        raise UsageError(f"key={key!r:.80}: expected a text that is not empty; leave it out to mean any")
    if tasks := names or [name for definition in declared(runtime) for name in definition.names]:
        found = await with_key(engine, tasks, key)
        return [each for each in found if is_allowed(where, each) and (keep is None or keep(each))][:limit]
    wanted = keep or (lambda record: True)
    return (await listed(engine, where, limit, lambda record: record.key == key and wanted(record))).records


Knows = Callable[[str], Awaitable[bool]]


async def wanted_names(runtime: AppRuntime, engine: Engine, given: Wanted, is_known: Knows | None = None) -> list[str]:
    """Return the names under which the store may have work of these tasks.

    Raises `UnknownTask` for a name that the app does not declare and under which nothing is stored. Where no tasks are
    declared, nothing is known about names, so they are taken as they are. `is_known` knows further names.
    """
    each = several("task", given, (str, DeclaredTask))
    return list(dict.fromkeys([name for one in each for name in await _wanted(runtime, engine, one, is_known)]))


async def _wanted(
    runtime: AppRuntime, engine: Engine, given: str | DeclaredTask, is_known: Knows | None
) -> Sequence[str]:
    if isinstance(given, DeclaredTask):
        if runtime.tasks.get(given.name) is None:
            raise UnknownTask(f"the task {given.name} belongs to another app than '{runtime.name}'")
        return given.definition.names
    if not given:
        raise UsageError(f"task={given!r:.80}: expected a task, or the name of one")
    definitions = declared(runtime)
    if not definitions or given.startswith(_OURS):
        return (given,)
    try:
        return stored_names(definitions, given)
    except UnknownTask:
        is_stored = await engine.store.find(engine.app, Filter(tasks=frozenset({given})), 1)
        if is_stored or (is_known is not None and await is_known(given)):
            return (given,)
        raise


def short(name: str) -> str:
    return name.partition(":")[2]


def without_version(definition: TaskDefinition) -> tuple[str, ...]:
    """Return what a user may call a workflow that has a version, if the version is left out."""
    name = unversioned(definition.name)
    return (name, short(name)) if definition.is_workflow and name != definition.name else ()


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, compared without modules if none was given."""
    forms = {each if ":" in name else short(each) or each: each for each in known}
    near = difflib.get_close_matches(name, forms, n=1)
    return forms[near[0]] if near else None
