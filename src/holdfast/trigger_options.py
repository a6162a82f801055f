"""What is given to a condition or a trigger, and the checks of it. What is data is encoded here, what is code must be
findable by others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from holdfast.codec.data import is_same
from holdfast.engine.definition import TaskDefinition, TaskTrigger
from holdfast.errors import InvalidTrigger, NotEncodable
from holdfast.execution.declared import why_unreachable
from holdfast.lifecycle.status import FINAL, Status
from holdfast.lifecycle.triggers import DATA, TICKS, Argument, OnEnd, OnEvent

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
    """Names and numbers with dots between them; an empty one is the whole."""
    if not isinstance(path, str) or (path and not all(path.split("."))):
        raise InvalidTrigger(f"{what}{path!r}: expected a path such as 'order.id' or 'lines.0.price'")
    return path


def statuses_of(given: str | Iterable[str]) -> tuple[Status, ...]:
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    ends = sorted(status.value for status in FINAL if status is not Status.CONCURRENCY_CONTROLLED_FINAL)
    for name in names:
        if not isinstance(name, str) or name.lower() not in ends:
            raise InvalidTrigger(
                f"on_status(…, {name!r}): expected one of {', '.join(ends)}. Only ends are told of: what an invocation "
                "passes through may be over before anybody can be called"
            )
    if not names:
        raise InvalidTrigger("on_status() needs a status")
    return tuple(dict.fromkeys(Status(name.lower()) for name in names))


def filter_of(what: str, given: Where | None) -> tuple[bytes, Callable[[Any], bool] | None]:
    """What of a filter is data, and what is code."""
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
    """A value that others are compared with."""
    data = _encoded(what, value, "a trigger compares plain data, or asks a function")
    if not is_same(DATA.decode(data), DATA.decode(data)):
        raise InvalidTrigger(f"{what}={value!r}: nothing equals NaN; ask with a function")
    return data


def _encoded(what: str, value: object, advice: str) -> bytes:
    try:
        return DATA.encode(value, at=what)
    except NotEncodable as error:
        raise InvalidTrigger(f"{error}; {advice}") from None


def arguments_of(given: Arguments) -> tuple[tuple[Argument, ...], Callable[..., Any] | None]:
    if given is None:
        return (), None
    if isinstance(given, From):
        return (Argument(part=given.part, path=given.path, of=given.of),), None
    if not isinstance(given, Mapping):
        return (), _function("arguments", given)
    found = []
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidTrigger(f"arguments={{{name!r}: …}}: expected the name of a parameter")
        if isinstance(value, From):
            found.append(Argument(name=name, part=value.part, path=value.path, of=value.of))
        else:
            found.append(
                Argument(
                    name=name, value=_encoded(name, value, "a trigger passes on plain data, or what a function makes")
                )
            )
    return tuple(found), None


def names_of(task: AnyTask | str) -> tuple[str, ...]:
    if isinstance(task, str) and task:
        return (task,)
    definition = getattr(task, "definition", None)
    if not isinstance(definition, TaskDefinition):
        raise InvalidTrigger(f"{task!r}: expected a task, or the name of one")
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
    """Those that are data."""
    found = {}
    for each in signature.parameters.values() if signature else ():
        if each.default is not each.empty:
            try:
                DATA.encode(each.default)
            except NotEncodable:
                continue
            found[each.name] = each.default
    return DATA.encode(found) if found else b""


def refuse_strange(what: str, paths: Iterable[str], signature: inspect.Signature, task: str) -> None:
    if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return
    for path in paths:
        if path.partition(".")[0] not in signature.parameters:
            raise InvalidTrigger(f"{what} '{path}': {task} has no such argument {signature}")


def refuse_unfindable(declared: TaskTrigger) -> None:
    """Arguments that are taken from something that none of the conditions is about: each call would fail."""
    for each in declared.arguments:
        if each.value is None:
            asked = [one.condition for one in declared.asked]
            about = [one for one in asked if not each.of or each.of in _about(one)]
            shown = f"{_SHOWN[each.part]}({each.path!r}{f', of={each.of!r}' if each.of else ''})"
            if not about:
                raise InvalidTrigger(f"{shown}: no condition of this trigger is about '{each.of}'")
            if not any(_has(one, each.part) for one in about):
                raise InvalidTrigger(f"{shown}: no condition of this trigger has {_HAS[each.part]}")
            first = each.path.partition(".")[0]
            if first and first not in _PARTS.get(each.part, (first,)):
                raise InvalidTrigger(f"{shown}: there is only {', '.join(_PARTS[each.part])}")


def _about(condition: OnEvent | OnEnd | None) -> tuple[str, ...]:
    if condition is None:
        return ()
    return (condition.name,) if isinstance(condition, OnEvent) else condition.tasks


def _has(condition: OnEvent | OnEnd | None, part: str) -> bool:
    if not isinstance(condition, OnEnd):
        return part in ("event", "cause")
    wanted = {"result": Status.SUCCESS, "error": Status.FAILED}.get(part)
    return part != "event" and (wanted is None or wanted in condition.statuses)


_SHOWN = {
    "event": "from_event",
    "arguments": "from_arguments",
    "result": "from_result",
    "error": "from_exception",
    "cause": "from_cause",
}
_HAS = {
    "event": "an event",
    "arguments": "a task that ends",
    "result": "a task that ends as success",
    "error": "a task that ends as failed",
    "cause": "",
}
_PARTS = {
    "error": ("type", "message", "traceback"),
    "cause": ("kind", "id", "name", "at", "payload", "status", "arguments", "result", "error"),
}
