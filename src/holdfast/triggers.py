"""What a task can be called by: conditions, how they are put together, and where the arguments come from.

Everything here is a value. A condition is what one of the ``on_…`` functions makes; ``&`` and ``|``, or `all_of` and
`any_of`, put conditions together; `trigger()` does the same step by step. What is wrong with them is found when the
module is imported, as with all that is declared.

What is given as data (a dict of values) is decided by whoever is at hand. What is given as a function is decided by
runners that have it, so it has to be at the top level of a module.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.clock import Duration, parse_duration
from holdfast.engine.definition import Asked, TaskTrigger, import_name
from holdfast.errors import InvalidTrigger, UsageError
from holdfast.lifecycle.status import Status
from holdfast.lifecycle.triggers import TICKS, WITHIN_SECONDS, Argument, OnEnd, OnEvent
from holdfast.schedules import Cron, Every, Once, cron
from holdfast.trigger_options import (
    AnyTask,
    Arguments,
    From,
    Where,
    arguments_of,
    compared,
    defaults_of,
    error_name,
    filter_of,
    names_of,
    positional,
    refuse_strange,
    refuse_unfindable,
    statuses_of,
    valid_event_name,
    valid_path,
)


def from_event(path: str = "", *, of: str = "") -> From:
    """A value of the event's payload (``from_event("order.id")``), or all of it. `of` is which event, of several."""
    return _from("event", path, of)


def from_arguments(path: str = "", *, of: AnyTask | str = "") -> From:
    """An argument that the task which has ended was called with, by its name."""
    return _from("arguments", path, of)


def from_result(path: str = "", *, of: AnyTask | str = "") -> From:
    """What the task which has ended returned, or a value in it."""
    return _from("result", path, of)


def from_exception(path: str = "", *, of: AnyTask | str = "") -> From:
    """What it raised: ``type``, ``message`` or ``traceback``, or all three."""
    return _from("error", path, of)


def from_cause(path: str = "", *, of: AnyTask | str = "") -> From:
    """Everything about what has happened: ``kind``, ``id``, ``name``, ``at``, and ``payload`` of an event; ``status``,
    ``arguments`` and ``result`` or ``error`` of what has ended.
    """
    return _from("cause", path, of)


def _from(part: str, path: str, of: AnyTask | str) -> From:
    valid_path("", path)
    name = of if isinstance(of, str) else names_of(of)[0]
    return From(part=part, path=path, of=name)


class Trigger:
    """One or more conditions, and how the task is called when they hold.

    `arguments` is a dict of values and `from_…`, one `from_…` whose parts go by their own names, or a function of all
    that has happened which returns the keyword arguments. Without it, the task is called without arguments.
    """

    def __init__(self, declared: TaskTrigger) -> None:
        self.declared = declared

    def __and__(self, other: Trigger) -> Trigger:
        return all_of(self, other)

    def __or__(self, other: Trigger) -> Trigger:
        return any_of(self, other)

    def __repr__(self) -> str:
        return f"<Trigger: {' or '.join(_shown(clause) for clause in self.declared.clauses)}>"


def _shown(clause: tuple[tuple[Asked, ...], ...]) -> str:
    return " and ".join(
        " or ".join(str(each.condition or (each.timing and each.timing.describe())) for each in member)
        for member in clause
    )


# --- conditions


def on_event(name: str, *, where: Where | None = None, arguments: Arguments = None, correlate: str = "") -> Trigger:
    """An event of this name (`App.emit`); `where` filters by its payload: values by path, or a function of it."""
    valid_event_name(name)
    valid_path("correlate=", correlate)
    data, code = filter_of("where", where)
    return _one(Asked(condition=OnEvent(name=name, where=data, correlate=correlate), where=code), arguments)


def on_status(
    task: AnyTask | str,
    status: str | Iterable[str] = "success",
    *,
    called_with: Where | None = None,
    arguments: Arguments = None,
    correlate: str = "",
) -> Trigger:
    """The task ends so: "success", "failed", "cancelled", or several. `called_with` filters by its arguments."""
    return _end(task, statuses_of(status), called_with, arguments, correlate)


def on_result(
    task: AnyTask | str,
    *,
    where: Where | None = None,
    equals: Any = msgspec.UNSET,
    called_with: Where | None = None,
    arguments: Arguments = None,
    correlate: str = "",
) -> Trigger:
    """The task returns: anything, a result that `equals` this one, or one with these values by path (`where`), or one
    for which the function `where` returns True.
    """
    if where is not None and equals is not msgspec.UNSET:
        raise InvalidTrigger("give where= or equals=, not both")
    whole = b"" if equals is msgspec.UNSET else compared("equals", equals)
    return _end(task, (Status.SUCCESS,), called_with, arguments, correlate, where=where, equals=whole)


def on_exception(
    task: AnyTask | str,
    *exceptions: type[BaseException] | str,
    message: str = "",
    called_with: Where | None = None,
    arguments: Arguments = None,
    correlate: str = "",
) -> Trigger:
    """The task has failed for good with one of these exceptions, or a subclass (none: any), whose text contains the
    regular expression `message`.
    """
    try:
        re.compile(message)
    except (re.error, TypeError) as error:
        raise InvalidTrigger(f"message={message!r} is no regular expression: {error}") from None
    errors = tuple(error_name(each) for each in exceptions)
    return _end(task, (Status.FAILED,), called_with, arguments, correlate, errors=errors, message=message)


def _end(
    task: AnyTask | str,
    statuses: tuple[Status, ...],
    called_with: Where | None,
    arguments: Arguments,
    correlate: str,
    *,
    where: Where | None = None,
    **filters: Any,
) -> Trigger:
    names = names_of(task)
    valid_path("correlate=", correlate)
    called, called_code = filter_of("called_with", called_with)
    returned, where_code = filter_of("where", where)
    signature = None if isinstance(task, str) else task.definition.signature
    if signature is not None:
        if isinstance(called_with, Mapping):
            refuse_strange("called_with", called_with, signature, names[0])
        if isinstance(arguments, Mapping):
            taken = [each.path for each in arguments.values() if isinstance(each, From) and _is_of(each, names)]
            refuse_strange("from_arguments", taken, signature, names[0])
    condition = OnEnd(
        tasks=names,
        statuses=statuses,
        called_with=called,
        where=returned,
        parameters=positional(signature),
        defaults=defaults_of(signature),
        correlate=correlate,
        **filters,
    )
    return _one(Asked(condition=condition, where=where_code, called_with=called_code), arguments)


def _is_of(taken: From, names: tuple[str, ...]) -> bool:
    return taken.part == "arguments" and bool(taken.path) and (not taken.of or taken.of in names)


def _one(asked: Asked, arguments: Arguments) -> Trigger:
    found, provider = arguments_of(arguments)
    return Trigger(TaskTrigger(clauses=(((asked,),),), arguments=found, provider=provider))


# --- put together


def all_of(
    *conditions: Trigger | Cron | Every | Once,
    within: Duration = WITHIN_SECONDS,
    correlate: str = "",
    arguments: Arguments = None,
    name: str = "",
) -> Trigger:
    """All of these have happened, in whatever order, `within` some time (a day), each happening used once.

    `correlate` is a path that says which happenings belong together: the same value of the event's payload, or of the
    argument of the task that has ended, or of its result. A condition may have one of its own.
    """
    try:
        seconds = parse_duration(within)
    except UsageError as error:
        raise InvalidTrigger(f"within={within!r}: {error}") from None
    if not seconds:
        raise InvalidTrigger(f"within={within!r}: expected a length of time")
    valid_path("correlate=", correlate)
    parts = _several("all_of", conditions)
    members = []
    for each in parts:
        several = any(len(clause) > 1 for clause in each.clauses)
        if several and len(each.clauses) > 1:
            raise InvalidTrigger("all_of() takes conditions, or any_of() of conditions: put one in the other only so")
        together = each.clauses[0] if several else (tuple(asked for clause in each.clauses for asked in clause[0]),)
        members += [tuple(_correlated(asked, correlate) for asked in member) for member in together]
    _refuse_half_correlated(members)
    lengths = {each.within_seconds for each in parts if len(each.clauses[0]) > 1} | {seconds}
    if len(lengths - {WITHIN_SECONDS}) > 1:
        raise InvalidTrigger("all_of() of several all_of() with different within=: say it once, for the whole")
    seconds = min(lengths, key=lambda length: length == WITHIN_SECONDS)
    found, provider = _given(arguments, parts)
    return Trigger(
        TaskTrigger(clauses=(tuple(members),), arguments=found, provider=provider, within_seconds=seconds, name=name)
    )


def any_of(*conditions: Trigger | Cron | Every | Once, arguments: Arguments = None, name: str = "") -> Trigger:
    """One of these has happened; the task is called once for each happening."""
    parts = _several("any_of", conditions)
    found, provider = _given(arguments, parts)
    waits = {each.within_seconds for each in parts if any(len(clause) > 1 for clause in each.clauses)}
    if len(waits) > 1:
        raise InvalidTrigger("any_of() of several all_of() with different within=: make them triggers of their own")
    return Trigger(
        TaskTrigger(
            clauses=tuple(clause for each in parts for clause in each.clauses),
            arguments=found,
            provider=provider,
            within_seconds=waits.pop() if waits else WITHIN_SECONDS,
            name=name,
        )
    )


def _several(what: str, conditions: Iterable[Any]) -> list[TaskTrigger]:
    found = []
    for each in conditions:
        if isinstance(each, Cron | Every | Once):
            found.append(TaskTrigger(clauses=(((Asked(timing=each),),),)))
        elif isinstance(each, Trigger | TriggerBuilder):
            found.append(_made(each).declared)
        else:
            raise InvalidTrigger(f"{what}({each!r}): expected what on_event(), on_status() and the like make")
    if not found:
        raise InvalidTrigger(f"{what}() needs conditions")
    return found


def _given(arguments: Arguments, parts: Sequence[TaskTrigger]) -> tuple[tuple[Argument, ...], Any]:
    """The arguments of the whole, or those that the parts say."""
    if arguments is not None:
        return arguments_of(arguments)
    providers = [each.provider for each in parts if each.provider is not None]
    found = tuple(dict.fromkeys(each for part in parts for each in part.arguments))
    if len(providers) + bool(found) > 1:
        raise InvalidTrigger("several conditions have arguments=, and one of them is a function; give the whole one")
    for one in found:
        if one.value is not None and any(each.name == one.name and each != one for each in found):
            raise InvalidTrigger(
                f"several conditions give '{one.name}', and not the same: make them triggers of their own, or give "
                "arguments= to the whole"
            )
    return found, providers[0] if providers else None


def _refuse_half_correlated(members: Sequence[tuple[Asked, ...]]) -> None:
    """What has no value in common with the others would wait for ever."""
    asked = [each for member in members for each in member]
    without = [each for each in asked if each.condition is None or not each.condition.correlate]
    if len(members) > 1 and 0 < len(without) < len(asked):
        raise InvalidTrigger(
            f"all_of() with correlate= needs it for each condition, and {_shown((tuple(without[:1]),))} has none"
        )


def _correlated(asked: Asked, correlate: str) -> Asked:
    condition = asked.condition
    if condition is None or condition.correlate or not correlate:
        return asked
    return replace(asked, condition=replace(condition, correlate=correlate))


class TriggerBuilder:
    """Conditions step by step: ``trigger().on_event("a").on_event("b").with_logic("and").with_arguments({…})``.

    Each step is a new builder. Several conditions are put together with AND, unless `with_logic("or")` says otherwise.
    """

    def __init__(self, conditions: tuple[Any, ...] = (), **options: Any) -> None:
        self._conditions = conditions
        self._options = options

    def _and(self, condition: Any) -> TriggerBuilder:
        return TriggerBuilder((*self._conditions, condition), **self._options)

    def _with(self, **options: Any) -> TriggerBuilder:
        return TriggerBuilder(self._conditions, **(self._options | options))

    def on_cron(self, expression: str, *, timezone: str = "UTC") -> TriggerBuilder:
        return self._and(cron(expression, timezone=timezone))

    def on_event(self, name: str, **filters: Any) -> TriggerBuilder:
        return self._and(on_event(name, **filters))

    def on_status(self, task: AnyTask | str, status: str | Iterable[str] = "success", **filters: Any) -> TriggerBuilder:
        return self._and(on_status(task, status, **filters))

    def on_result(self, task: AnyTask | str, **filters: Any) -> TriggerBuilder:
        return self._and(on_result(task, **filters))

    def on_exception(
        self, task: AnyTask | str, *exceptions: type[BaseException] | str, **filters: Any
    ) -> TriggerBuilder:
        return self._and(on_exception(task, *exceptions, **filters))

    def add_condition(self, condition: Trigger | Cron | Every | Once) -> TriggerBuilder:
        return self._and(condition)

    def with_logic(self, logic: str) -> TriggerBuilder:
        if logic not in ("and", "or"):
            raise InvalidTrigger(f"with_logic({logic!r}): expected 'and' or 'or'")
        return self._with(logic=logic)

    def within(self, length: Duration) -> TriggerBuilder:
        return self._with(within=length)

    def correlate(self, path: str) -> TriggerBuilder:
        return self._with(correlate=path)

    def named(self, name: str) -> TriggerBuilder:
        return self._with(name=name)

    def with_arguments(self, arguments: Arguments = None, /, **values: Any) -> TriggerBuilder:
        """A dict, a `from_…`, a function, or keyword arguments; what was said before by name stays."""
        if arguments is not None and not isinstance(arguments, Mapping):
            if values or self._options.get("arguments"):
                raise InvalidTrigger("with_arguments() takes a function or from_…() alone")
            return self._with(arguments=arguments)
        before = self._options.get("arguments") or {}
        if not isinstance(before, Mapping):
            raise InvalidTrigger("with_arguments() takes a function or from_…() alone")
        return self._with(arguments={**before, **(arguments or {}), **values})

    def with_args_from_event(self, *names: str) -> TriggerBuilder:
        """These values of the payload, or all that the task has parameters for."""
        return self._from(from_event, names)

    def with_args_from_arguments(self, *names: str) -> TriggerBuilder:
        return self._from(from_arguments, names)

    def with_args_from_result(self, *names: str) -> TriggerBuilder:
        return self._from(from_result, names)

    def with_args_from_exception(self, *names: str) -> TriggerBuilder:
        return self._from(from_exception, names)

    def _from(self, make: Callable[[str], From], names: tuple[str, ...]) -> TriggerBuilder:
        if not names:
            return self.with_arguments(make(""))
        return self.with_arguments({name: make(name) for name in names})

    def build(self) -> Trigger:
        options = dict(self._options)
        logic = options.pop("logic", "and")
        if logic == "or":
            if given := [f"{name}()" for name in ("within", "correlate") if name in options]:
                raise InvalidTrigger(f"{' and '.join(given)} is for conditions that are put together with AND")
            return any_of(*self._conditions, **options)
        return all_of(*self._conditions, **options)


def trigger() -> TriggerBuilder:
    """Begin a trigger; see `TriggerBuilder`."""
    return TriggerBuilder()


def _made(given: Trigger | TriggerBuilder) -> Trigger:
    return given.build() if isinstance(given, TriggerBuilder) else given


# --- for the declaration of a task


def task_trigger(given: Trigger | TriggerBuilder, signature: inspect.Signature) -> TaskTrigger:
    """One of the ``triggers=[…]`` of a task with this signature. Raises `InvalidTrigger`."""
    declared = _made(given).declared
    refuse_unfindable(declared)
    parameters = signature.parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for argument in declared.arguments:
        if argument.name and argument.name not in by_name and not takes_any:
            raise InvalidTrigger(f"arguments={{'{argument.name}': …}}: the task has no such parameter {signature}")
    spread = declared.provider is not None or any(not each.name for each in declared.arguments)
    given_names = {each.name for each in declared.arguments}
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if not spread and (missing := [name for name in needed if name not in given_names]):
        raise InvalidTrigger(
            f"the task needs {', '.join(missing)}: say where that comes from, such as "
            f"arguments={{'{missing[0]}': from_event('{missing[0]}')}}"
        )
    return declared


def known_as(declared: TaskTrigger, task: str) -> str:
    """The trigger's name: what it was given, or its task and a digest of what it says."""
    if declared.name:
        return declared.name
    said = (
        [[[_said(asked) for asked in member] for member in clause] for clause in declared.clauses],
        declared.arguments,
        declared.within_seconds,
        _code_name(declared.provider),
    )
    return f"{task}#{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:8]}"


def _said(asked: Asked) -> list[Any]:
    """Of the task that ends only its name: its signature and older names may change, and the trigger is the same."""
    condition = asked.condition
    if isinstance(condition, OnEnd):
        condition = replace(condition, tasks=condition.tasks[:1], parameters=(), defaults=b"")
    return [condition, asked.timing, _code_name(asked.where), _code_name(asked.called_with)]


def _code_name(function: Callable[..., Any] | None) -> str:
    return "" if function is None else import_name(function)


def needs_code(declared: TaskTrigger) -> bool:
    return declared.provider is not None or any(each.where or each.called_with for each in declared.asked)


def tick_name(trigger: str, number: int) -> str:
    """The name of the schedule whose ticks are one of a trigger's conditions."""
    return f"{trigger}@{number}"


def tick_condition(trigger: str, number: int) -> OnEvent:
    return OnEvent(name=TICKS + tick_name(trigger, number))
