"""Questions about tasks: what the code declares, what its arguments are, and which runners have which version."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import UnknownTask
from holdfast.model.explain import living
from holdfast.model.names import unversioned
from holdfast.model.pacing import Debounce
from holdfast.model.policies import describe_policy
from holdfast.runtime.app_runtime import AppRuntime, DeclaredTask
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.naming import declared, find_definition
from holdfast.showing import length, plain
from holdfast.web.documents import Document

_TIMES = ("timeout", "soft_timeout", "expires", "cancel_grace")


class TaskKnown(NamedTuple):
    """A task: as this program declares it, if it does; and the versions and numbers of runners that know it."""

    name: str
    task: DeclaredTask | None
    runners: Mapping[str, int]  # by the name with its version

    def document(self) -> Document:
        facts = {} if self.task is None else task_document(self.task)
        return {"name": self.name, "declared": self.task is not None} | facts | {"runners": dict(self.runners)}


class TaskList(NamedTuple):
    """The tasks of an app, by name: what the code declares, and what living runners know besides."""

    tasks: Sequence[TaskKnown]

    def document(self) -> Document:
        return {"tasks": [each.document() for each in self.tasks]}


class TaskReading:
    """Ask for tasks. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def all(self) -> TaskList:
        runners = await self._runners()
        own = {each.name: self._runtime.tasks[each.name] for each in declared(self._runtime)}
        names = own.keys() | {name for name in runners if not name.startswith(("trigger:", "step:"))}
        return TaskList([self._known(name, own.get(name), runners) for name in sorted(names)])

    async def one(self, name: str) -> TaskKnown:
        """Return a task by its name, an alias, or a part that only one has. Raises `UnknownTask`."""
        runners, definitions = await self._runners(), declared(self._runtime)
        try:
            known = find_definition(definitions, name)
        except UnknownTask:
            if name not in runners:
                raise
            return self._known(name, None, runners)
        return self._known(known.name, self._runtime.tasks[known.name], runners)

    def _known(self, name: str, task: DeclaredTask | None, runners: Mapping[str, int]) -> TaskKnown:
        alike = {each: count for each, count in runners.items() if unversioned(each) == unversioned(name)}
        return TaskKnown(name, task, alike)

    async def _runners(self) -> Mapping[str, int]:
        """Return how many living runners know each task."""
        engine, found = await self._runtime.engine(), dict[str, int]()
        roster = await engine.store.roster(engine.app)
        for runner in living(roster, engine.store.now(), self._runtime.settings.dead_after_seconds):
            for task in runner.tasks:
                found[task] = found.get(task, 0) + 1
        return found


# --- a task as a document


def task_document(task: DeclaredTask) -> Document:
    """Return the options of a task, as people and programs see them."""
    definition, terms = task.definition, task.terms
    return {
        "name": task.name,
        "signature": signature_of(definition),
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
        **{name: _time(getattr(definition.time, name)) for name in _TIMES},
        "cancel_children": definition.time.cancel_children,
        "log_lines": definition.log_lines or None,
        "validate": task.is_validated,
        "called_by": [*(each.timing.describe() for each in definition.schedules), *map(repr, definition.triggers)],
    }


class _Plain:
    """An annotation that is a text, shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    @staticmethod
    def of(annotation: Any) -> Any:
        return _Plain(annotation) if isinstance(annotation, str) else annotation


def signature_of(definition: TaskDefinition) -> str:
    """Return the signature of a task, as its code has it."""
    signature = definition.signature
    parameters = [each.replace(annotation=_Plain.of(each.annotation)) for each in signature.parameters.values()]
    shown = signature.replace(parameters=parameters, return_annotation=_Plain.of(signature.return_annotation))
    return str(shown)


class ParameterOfTask(NamedTuple):
    """A parameter of a task, for a form: with its default, if JSON can hold that."""

    name: str
    kind: str
    annotation: str
    required: bool
    default: Any


def parameters_of(definition: TaskDefinition) -> Sequence[ParameterOfTask]:
    """Return the parameters of a task that a form can ask for, in their order."""
    found = []
    for each in definition.signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        has_default = each.default is not each.empty
        annotation = "" if each.annotation is each.empty else inspect.formatannotation(_Plain.of(each.annotation))
        kind = {"int": "number", "float": "number", "bool": "checkbox", "str": "text"}.get(annotation, "json")
        default = plain(each.default) if has_default else None
        kind = kind if not has_default or kind != "text" or isinstance(default, str) else "json"
        found.append(ParameterOfTask(each.name, kind, annotation, not has_default, default))
    return found


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
