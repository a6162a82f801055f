"""Conditions of triggers, how they are combined, and the sources of the arguments.

Everything here is a value. A condition is what one of the ``on_…`` functions makes; ``&`` and ``|``, or `all_of` and
`any_of`, put conditions together; `trigger()` does the same step by step. A wrong
declaration is refused when its module is imported.

A filter that is data (a dict of values) is decided by any process. A filter that is a function is decided by runners
that have it, so it has to be at the top level of a module.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import msgspec
from msgspec.structs import replace

from holdfast.clock import Duration, parse_duration
from holdfast.codec.data import is_same
from holdfast.errors import InvalidTrigger, NotEncodable, UsageError
from holdfast.executors.declared import why_unreachable
from holdfast.model.names import unversioned
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition, import_name
from holdfast.schedules.timing import Cron, Every, Once, cron
from holdfast.schedules.timing import Schedule as Timing
from holdfast.triggers.rules import DATA, TICKS, WITHIN_SECONDS, Argument, Condition, OnEnd, OnEvent


class DeclaredCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition as code declares it: its data, its functions, and a timing if it is about time."""

    condition: Condition | None = None
    where: Callable[[Any], bool] | None = None  # of the payload or the result
    called_with: Callable[[Any], bool] | None = None  # of the arguments of what ended
    timing: Timing | None = None


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions, and how the task is called when they hold. Each part is as in `TriggerRecord`.

    `arguments` is a dict of values and `from_…`, one `from_…` whose parts go by their own names, or a function of all
    that has happened which returns the keyword arguments. Without it, the task is called without arguments.
    """

    clauses: tuple[tuple[tuple[DeclaredCondition, ...], ...], ...]
    arguments: tuple[Argument, ...] = ()
    provider: Callable[..., Mapping[str, Any]] | None = None  # makes the arguments, of all that has happened
    within_seconds: float = WITHIN_SECONDS
    name: str = ""

    @property
    def asked(self) -> tuple[DeclaredCondition, ...]:
        return tuple(each for clause in self.clauses for member in clause for each in member)

    def __and__(self, other: Trigger) -> Trigger:
        return all_of(self, other)

    def __or__(self, other: Trigger) -> Trigger:
        return any_of(self, other)

    def __repr__(self) -> str:
        return f"<Trigger: {' or '.join(_shown(clause) for clause in self.clauses)}>"


Where = Mapping[str, Any] | Callable[[Any], bool]
LONGEST_EVENT_NAME = 200


class AnyTask(Protocol):
    @property
    def definition(self) -> TaskDefinition: ...


class From(msgspec.Struct, frozen=True, kw_only=True):
    """Where an argument comes from; `from_event` and the like make it."""

    part: str
    path: str = ""
    of: str = ""


Arguments = Mapping[str, Any] | From | Callable[..., Mapping[str, Any]] | None


def valid_event_name(name: object) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= LONGEST_EVENT_NAME
        or not name.isprintable()
        or set(name) & set(" |")
        or name.startswith(TICKS)
    ):
        raise InvalidTrigger(
            f"{name!r:.80} is no name for an event: 1 to {LONGEST_EVENT_NAME} characters, such as 'order.created', "
            f"without spaces and vertical bars, and not beginning with '{TICKS}'"
        )
    return name


def valid_path(what: str, path: object) -> str:
    """Return the path: names and numbers with dots between them; an empty path is the whole value."""
    if not isinstance(path, str) or (path and not all(path.split("."))):
        raise InvalidTrigger(f"{what}{path!r}: expected a path such as 'order.id' or 'lines.0.price'")
    return path


def statuses_of(given: str | Iterable[str]) -> tuple[Status, ...]:
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    ends = sorted(status.value for status in FINAL)
    for name in names:
        if not isinstance(name, str) or name.lower() not in ends:
            raise InvalidTrigger(
                f"on_status(…, {name!r}): expected one of {', '.join(ends)}. Only ends fire triggers: another status "
                "may be over before a task could be called"
            )
    if not names:
        raise InvalidTrigger("on_status() needs a status")
    return tuple(dict.fromkeys(Status(name.lower()) for name in names))


def filter_of(what: str, given: Where | None) -> tuple[bytes, Callable[[Any], bool] | None]:
    """Return the filter as encoded data, and as code."""
    if given is None:
        return b"", None
    if isinstance(given, Mapping):
        if not given or not all(isinstance(path, str) and path for path in given):
            raise InvalidTrigger(f"{what}={given!r}: expected values by name, such as {{'region': 'eu'}}")
        for path in given:
            valid_path(f"{what}= ", path)
        return compared(what, dict(given)), None
    return b"", _function(what, given)


def _function(what: str, given: object) -> Callable[..., Any]:
    if not inspect.isfunction(given) or inspect.iscoroutinefunction(given):
        raise InvalidTrigger(f"{what}={given!r}: expected a dict, or a plain function")
    if given.__name__ == "<lambda>":
        raise InvalidTrigger(f"{what}= is a lambda, which has no name for a runner to find it by: use a named function")
    if why := why_unreachable(given):
        raise InvalidTrigger(f"{what}= needs a function at the top level of a module: {why}")
    return given


def compared(what: str, value: object) -> bytes:
    """Return a value to compare with, encoded."""
    data = _encoded(what, value, "a trigger compares plain data, or asks a function")
    if not is_same(DATA.decode(data), DATA.decode(data)):
        raise InvalidTrigger(f"{what}={value!r}: nothing equals NaN; ask with a function")
    return data


def _encoded(what: str, value: object, advice: str) -> bytes:
    try:
        return DATA.encode(value, at=what)
    except NotEncodable as error:
        raise InvalidTrigger(f"{error}; {advice}") from None


def arguments_of(given: Arguments) -> dict[str, Any]:
    """Return the fields of a `Trigger` that say where the arguments come from."""
    if given is None:
        return {}
    if isinstance(given, From):
        return {"arguments": (Argument(part=given.part, path=given.path, of=given.of),)}
    if not isinstance(given, Mapping):
        return {"provider": _function("arguments", given)}
    found = []
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidTrigger(f"arguments={{{name!r}: …}}: expected the name of a parameter")
        if isinstance(value, From):
            found.append(Argument(name=name, part=value.part, path=value.path, of=value.of))
        else:
            data = _encoded(name, value, "a trigger passes on plain data, or what a function makes")
            found.append(Argument(name=name, value=data))
    return {"arguments": tuple(found)}


def names_of(task: AnyTask | str) -> tuple[str, ...]:
    if isinstance(task, str) and task:
        return (task,)
    definition = getattr(task, "definition", None)
    if not isinstance(definition, TaskDefinition):
        raise InvalidTrigger(f"{task!r}: expected a task, or the name of one")
    if definition.is_workflow and (name := unversioned(definition.name)) not in definition.names:
        return (*definition.names, name)  # runs from before it had a version may still end
    return definition.names


def error_name(given: type[BaseException] | str) -> str:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, type) and issubclass(given, BaseException):
        return f"{given.__module__}:{given.__qualname__}"
    raise InvalidTrigger(f"on_exception(…, {given!r}): expected exception classes, or their names")


def positional(signature: inspect.Signature | None) -> tuple[str, ...]:
    if signature is None:
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in signature.parameters.values() if each.kind in kinds)


def defaults_of(signature: inspect.Signature | None) -> bytes:
    """Return the defaults that are plain data, encoded."""
    found = {}
    for each in signature.parameters.values() if signature else ():
        if each.default is not each.empty:
            try:
                DATA.encode(each.default)
            except NotEncodable:
                continue
            found[each.name] = each.default
    return DATA.encode(found) if found else b""


def refuse_unknown_paths(what: str, paths: Iterable[str], signature: inspect.Signature, task: str) -> None:
    if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return
    for path in paths:
        if path.partition(".")[0] not in signature.parameters:
            raise InvalidTrigger(f"{what} '{path}': {task} has no such argument {signature}")


def refuse_unknown_sources(declared: Trigger) -> None:
    """Raise `InvalidTrigger` for arguments that no condition can supply: each call would fail."""
    for each in declared.arguments:
        if each.value is None:
            asked = [one.condition for one in declared.asked]
            about = [one for one in asked if not each.of or each.of in _about(one)]
            source = _SOURCES[each.part]
            shown = f"{source.function}({each.path!r}{f', of={each.of!r}' if each.of else ''})"
            if not about:
                raise InvalidTrigger(f"{shown}: no condition of this trigger is about '{each.of}'")
            if not any(_has(one, each.part) for one in about):
                raise InvalidTrigger(f"{shown}: no condition of this trigger has {source.of}")
            first = each.path.partition(".")[0]
            if first and source.parts and first not in source.parts:
                raise InvalidTrigger(f"{shown}: there is only {', '.join(source.parts)}")


def _about(condition: OnEvent | OnEnd | None) -> tuple[str, ...]:
    if condition is None:
        return ()
    return (condition.name,) if isinstance(condition, OnEvent) else condition.tasks


def _has(condition: OnEvent | OnEnd | None, part: str) -> bool:
    if not isinstance(condition, OnEnd):
        return part in ("event", "cause")
    wanted = {"result": Status.SUCCESS, "error": Status.FAILED}.get(part)
    return part != "event" and (wanted is None or wanted in condition.statuses)


class _Source(NamedTuple):
    function: str
    of: str  # what a condition must have
    parts: tuple[str, ...] = ()


_SOURCES = {
    "event": _Source("from_event", "an event"),
    "arguments": _Source("from_arguments", "a task that ends"),
    "result": _Source("from_result", "a task that ends as success"),
    "error": _Source("from_exception", "a task that ends as failed", ("type", "message", "traceback")),
    "cause": _Source(
        "from_cause", "", ("kind", "id", "name", "at", "payload", "status", "arguments", "result", "error")
    ),
}


def from_event(path: str = "", *, of: str = "") -> From:
    """Take a value of the event's payload (``from_event("order.id")``), or all of it. `of` is one of several events."""
    return _from("event", path, of)


def from_arguments(path: str = "", *, of: AnyTask | str = "") -> From:
    """Take an argument of the ended task, by its name."""
    return _from("arguments", path, of)


def from_result(path: str = "", *, of: AnyTask | str = "") -> From:
    """Take the result of the ended task, or a value in it."""
    return _from("result", path, of)


def from_exception(path: str = "", *, of: AnyTask | str = "") -> From:
    """Take the ended task's error: ``type``, ``message`` or ``traceback``, or all three."""
    return _from("error", path, of)


def from_cause(path: str = "", *, of: AnyTask | str = "") -> From:
    """Take everything about the happening: ``kind``, ``id``, ``name``, ``at``, and ``payload`` of an event; ``status``,
    ``arguments`` and ``result`` or ``error`` of an ended task.
    """
    return _from("cause", path, of)


def _from(part: str, path: str, of: AnyTask | str) -> From:
    valid_path("", path)
    name = of if isinstance(of, str) else names_of(of)[0]
    return From(part=part, path=path, of=name)


def _shown(clause: tuple[tuple[DeclaredCondition, ...], ...]) -> str:
    return " and ".join(
        " or ".join(str(each.condition or (each.timing and each.timing.describe())) for each in member)
        for member in clause
    )


# --- conditions


def on_event(name: str, *, where: Where | None = None, arguments: Arguments = None, correlate: str = "") -> Trigger:
    """Fire on an event of this name (`App.emit`); `where` filters its payload: values by path, or a function."""
    valid_event_name(name)
    valid_path("correlate=", correlate)
    data, code = filter_of("where", where)
    return _one(DeclaredCondition(condition=OnEvent(name=name, where=data, correlate=correlate), where=code), arguments)


class EndOptions(TypedDict, total=False):
    """Options of conditions about the end of a task."""

    called_with: Where | None  # filters the arguments of the ended task
    arguments: Arguments
    correlate: str


def on_status(task: AnyTask | str, status: str | Iterable[str] = "success", **options: Unpack[EndOptions]) -> Trigger:
    """Fire when the task ends as "success", "failed", "cancelled", or several. `called_with` filters its arguments. A
    call that a limit refuses (``when_full="refuse"``) ends as "concurrency_controlled_final".
    """
    return _end(task, statuses_of(status), {}, **options)


def on_result(
    task: AnyTask | str,
    *,
    where: Where | None = None,
    equals: Any = msgspec.UNSET,
    **options: Unpack[EndOptions],
) -> Trigger:
    """Fire when the task returns: any result, a result that `equals` this, or a result with these values by path
    (`where`), or for which the function `where` returns True.
    """
    if where is not None and equals is not msgspec.UNSET:
        raise InvalidTrigger("give where= or equals=, not both")
    whole = b"" if equals is msgspec.UNSET else compared("equals", equals)
    return _end(task, (Status.SUCCESS,), {"equals": whole}, where, **options)


def on_exception(
    task: AnyTask | str, *exceptions: type[BaseException] | str, message: str = "", **options: Unpack[EndOptions]
) -> Trigger:
    """Fire when the task has failed for good with one of these exceptions or a subclass (none: any), whose text
    contains the regular expression `message`.
    """
    try:
        re.compile(message)
    except (re.error, TypeError) as error:
        raise InvalidTrigger(f"message={message!r} is no regular expression: {error}") from None
    errors = tuple(error_name(each) for each in exceptions)
    return _end(task, (Status.FAILED,), {"errors": errors, "message": message}, **options)


def _end(
    task: AnyTask | str,
    statuses: tuple[Status, ...],
    filters: dict[str, Any],
    where: Where | None = None,
    *,
    called_with: Where | None = None,
    arguments: Arguments = None,
    correlate: str = "",
) -> Trigger:
    names = names_of(task)
    valid_path("correlate=", correlate)
    called, called_code = filter_of("called_with", called_with)
    returned, where_code = filter_of("where", where)
    signature = None if isinstance(task, str) else task.definition.signature
    if signature is not None:
        if isinstance(called_with, Mapping):
            refuse_unknown_paths("called_with", called_with, signature, names[0])
        if isinstance(arguments, Mapping):
            taken = [each.path for each in arguments.values() if isinstance(each, From) and _is_of(each, names)]
            refuse_unknown_paths("from_arguments", taken, signature, names[0])
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
    return _one(DeclaredCondition(condition=condition, where=where_code, called_with=called_code), arguments)


def _is_of(taken: From, names: tuple[str, ...]) -> bool:
    return taken.part == "arguments" and bool(taken.path) and (not taken.of or taken.of in names)


def _one(asked: DeclaredCondition, arguments: Arguments) -> Trigger:
    return Trigger(clauses=(((asked,),),), **arguments_of(arguments))


# --- put together


def all_of(
    *conditions: Trigger | Cron | Every | Once,
    within: Duration = WITHIN_SECONDS,
    correlate: str = "",
    arguments: Arguments = None,
    name: str = "",
) -> Trigger:
    """Fire when all of these have happened, in any order, `within` some time (a day). Each happening is used once.

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
    return Trigger(clauses=(tuple(members),), within_seconds=seconds, name=name, **_given(arguments, parts))


def any_of(*conditions: Trigger | Cron | Every | Once, arguments: Arguments = None, name: str = "") -> Trigger:
    """Fire when any of these has happened, once for each happening."""
    parts = _several("any_of", conditions)
    given = _given(arguments, parts)
    waits = {each.within_seconds for each in parts if any(len(clause) > 1 for clause in each.clauses)}
    if len(waits) > 1:
        raise InvalidTrigger("any_of() of several all_of() with different within=: make them triggers of their own")
    clauses = tuple(clause for each in parts for clause in each.clauses)
    return Trigger(clauses=clauses, within_seconds=waits.pop() if waits else WITHIN_SECONDS, name=name, **given)


def _several(what: str, conditions: Iterable[Any]) -> list[Trigger]:
    found = []
    for each in conditions:
        if isinstance(each, Cron | Every | Once):
            found.append(Trigger(clauses=(((DeclaredCondition(timing=each),),),)))
        elif isinstance(each, Trigger | TriggerBuilder):
            found.append(_made(each))
        else:
            raise InvalidTrigger(f"{what}({each!r}): expected what on_event(), on_status() and the like make")
    if not found:
        raise InvalidTrigger(f"{what}() needs conditions")
    return found


def _given(arguments: Arguments, parts: Sequence[Trigger]) -> dict[str, Any]:
    """Return the arguments of the whole trigger, or of its parts, as `arguments_of` does."""
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
    return {"arguments": found, "provider": providers[0] if providers else None}


def _refuse_half_correlated(members: Sequence[tuple[DeclaredCondition, ...]]) -> None:
    """Raise `InvalidTrigger` if only some conditions are correlated: the others would wait for ever."""
    asked = [each for member in members for each in member]
    without = [each for each in asked if each.condition is None or not each.condition.correlate]
    if len(members) > 1 and 0 < len(without) < len(asked):
        raise InvalidTrigger(
            f"all_of() with correlate= needs it for each condition, and {_shown((tuple(without[:1]),))} has none"
        )


def _correlated(asked: DeclaredCondition, correlate: str) -> DeclaredCondition:
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
        """Add a dict, a `from_…`, a function, or keyword arguments; earlier names stay."""
        if arguments is not None and not isinstance(arguments, Mapping):
            if values or self._options.get("arguments"):
                raise InvalidTrigger("with_arguments() takes a function or from_…() alone")
            return self._with(arguments=arguments)
        before = self._options.get("arguments") or {}
        if not isinstance(before, Mapping):
            raise InvalidTrigger("with_arguments() takes a function or from_…() alone")
        return self._with(arguments={**before, **(arguments or {}), **values})

    def with_args_from_event(self, *names: str) -> TriggerBuilder:
        """Take these values of the payload, or all that the task has parameters for."""
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


def task_trigger(given: Trigger | TriggerBuilder, signature: inspect.Signature) -> Trigger:
    """Check an item of the ``triggers=[…]`` of a task with this signature. Raises `InvalidTrigger`."""
    declared = _made(given)
    refuse_unknown_sources(declared)
    parameters, by_name = signature.parameters.values(), named_parameters(signature)
    for argument in declared.arguments:
        if argument.name and by_name is not None and argument.name not in by_name:
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


def named_parameters(signature: inspect.Signature) -> tuple[str, ...] | None:
    """Return the parameters that can be given by name; None if the task takes any."""
    parameters = signature.parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


def known_as(declared: Trigger, task: str) -> str:
    """Return the trigger's name: as given, or its task and a digest of its conditions."""
    if declared.name:
        return declared.name
    said = (
        [[[_said(asked) for asked in member] for member in clause] for clause in declared.clauses],
        declared.arguments,
        declared.within_seconds,
        _code_name(declared.provider),
    )
    return f"{task}#{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:8]}"


def _said(asked: DeclaredCondition) -> list[Any]:
    """Return what identifies a condition: of a task only its name, since its signature and older names may change."""
    condition = asked.condition
    if isinstance(condition, OnEnd):
        condition = replace(condition, tasks=condition.tasks[:1], parameters=(), defaults=b"")
    return [condition, asked.timing, _code_name(asked.where), _code_name(asked.called_with)]


def _code_name(function: Callable[..., Any] | None) -> str:
    return "" if function is None else import_name(function)


def needs_code(declared: Trigger) -> bool:
    return declared.provider is not None or any(each.where or each.called_with for each in declared.asked)


def tick_name(trigger: str, number: int) -> str:
    """Return the name of the schedule whose ticks are one of a trigger's conditions."""
    return f"{trigger}@{number}"


def tick_condition(trigger: str, number: int) -> OnEvent:
    return OnEvent(name=TICKS + tick_name(trigger, number))
