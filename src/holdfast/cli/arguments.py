"""From the words of a command line to the arguments of a task.

A word is JSON where it is JSON and text where it is not, and the task's annotations decide what it means: for a
``str``, 12345 is text; for a ``Decimal`` it never goes through a float; a dataclass is written as a JSON object. An
annotation that cannot be resolved here, or that leads to a class which JSON knows nothing of, changes nothing.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from holdfast.cli.shown import described
from holdfast.engine.definition import TaskDefinition
from holdfast.errors import UsageError
from holdfast.execution.call import bind

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Words(NamedTuple):
    """A call as it was typed."""

    positional: Sequence[str]
    keywords: Mapping[str, str]


def words(positional: Sequence[str], whole: str | None, single: Sequence[str]) -> Words:
    """Gather ARGS, ``--kwargs`` and every ``-k``. Raises `UsageError` for what has not the form of it."""
    keywords = _object(whole) if whole is not None else {}
    for pair in single:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise UsageError(f"-k {pair!r} is not of the form name=value")
        if name in keywords:
            raise UsageError(f"the keyword argument '{name}' is given twice")
        keywords[name] = text
    return Words(positional, keywords)


def _object(text: str) -> dict[str, str]:
    """The members of a JSON object, each still as text: so all arguments are read in one way."""
    try:
        return {
            name: bytes(raw).decode() for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items()
        }
    except (ValueError, RecursionError):
        raise UsageError(f'--kwargs {text!r} is no JSON object; write it like \'{{"body": "hi"}}\'') from None


def arguments(task: TaskDefinition, given: Words) -> tuple[list[Any], dict[str, Any]]:
    """The values for a call of the task. Raises `ArgumentsDoNotBind`, or `UsageError` naming the parameter."""
    bind(task.signature, tuple(given.positional), dict(given.keywords), task.name)
    parameters = task.signature.parameters
    positional = [each for each in parameters.values() if each.kind in _POSITIONAL]
    rest = {each.kind: each for each in parameters.values()}  # *args and **kwargs: at most one of each
    args = [
        _value(task, positional[i] if i < len(positional) else rest[inspect.Parameter.VAR_POSITIONAL], text)
        for i, text in enumerate(given.positional)
    ]
    kwargs = {
        name: _value(task, parameters.get(name) or rest[inspect.Parameter.VAR_KEYWORD], text)
        for name, text in given.keywords.items()
    }
    return args, kwargs


def _value(task: TaskDefinition, parameter: inspect.Parameter, text: str) -> Any:
    hint = _hint(task, parameter)
    if hint is parameter.empty:
        return parsed(text)
    try:
        return converted(text, hint)
    except _Unsupported:
        return parsed(text)
    except Exception as error:
        raise UsageError(
            f"the argument '{parameter.name}' of {task.name} cannot be {described(text)}: {error}"
        ) from error


def _hint(task: TaskDefinition, parameter: inspect.Parameter) -> Any:
    """The resolved annotation; `Parameter.empty` if there is none, or none that can be resolved here."""
    if parameter.annotation is parameter.empty:
        return parameter.empty
    alone = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    names = getattr(inspect.unwrap(task.function), "__globals__", {})
    try:
        return typing.get_type_hints(alone, names, include_extras=True)["it"]
    except Exception:  # a name that only a type checker sees, or anything that an annotation may do when evaluated
        return parameter.empty


class _Unsupported(Exception):
    """No ValueError and no TypeError: those, msgspec would take for a verdict on the value."""


def _refuse_class(cls: type, value: object) -> NoReturn:
    raise _Unsupported


def converted(text: str, hint: Any) -> Any:
    """The text as JSON of that type, else as a plain text of that type (a date, a UUID, a str)."""
    try:
        decoder = msgspec.json.Decoder(hint, strict=False, dec_hook=_refuse_class)
    except Exception as error:
        raise _Unsupported from error
    try:
        return decoder.decode(text)
    except _Unsupported:
        raise
    except Exception as error:
        as_json = error
    try:
        return msgspec.convert(text, hint, strict=False, dec_hook=_refuse_class)
    except _Unsupported:
        raise
    except Exception:
        is_json = isinstance(as_json, msgspec.ValidationError) or not isinstance(
            as_json, msgspec.DecodeError | UnicodeError
        )
        if is_json:  # it was the value that was wrong, so that is the complaint to hear
            raise as_json from None
        raise


def parsed(text: str) -> object:
    """JSON where it is JSON, else the text itself: nobody wants to quote a word twice for the shell."""
    try:
        return strictly(text)
    except ValueError:
        return text


def strictly(text: str) -> Any:
    """JSON, without the words that Python adds to it. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
