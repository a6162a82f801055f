"""Arguments of a call from JSON, by the annotations of its task: for commands, and for other languages over HTTP.

A text that is no JSON is a plain text of the annotated type: a date, a UUID, a str.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

import msgspec

from holdfast.codec.secret import Secret, is_secret
from holdfast.errors import UsageError
from holdfast.executors.call import bind
from holdfast.masking import is_secret_name
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.fitting import hint_of
from holdfast.showing import describe

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Call = tuple[list[Any], dict[str, Any]]


def call_of_texts(task: TaskDefinition, texts: Sequence[str], keywords: Mapping[str, str]) -> Call:
    """Return the values for a call of the task. Raises `ArgumentsDoNotBind`, or `UsageError` with the name."""
    bind(task.signature, tuple(texts), dict(keywords), task.name)
    parameters = task.signature.parameters
    positional = [each for each in parameters.values() if each.kind in _POSITIONAL]
    rest = {each.kind: each for each in parameters.values()}  # *args and **kwargs: at most one of each
    args = [
        _value(task, positional[i] if i < len(positional) else rest[inspect.Parameter.VAR_POSITIONAL], text)
        for i, text in enumerate(texts)
    ]
    kwargs = {
        name: _value(task, parameters.get(name) or rest[inspect.Parameter.VAR_KEYWORD], text)
        for name, text in keywords.items()
    }
    return args, kwargs


def call_of_values(task: TaskDefinition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the values for a call of the task, of values that were JSON. Raises as `call_of_texts`."""
    return call_of_texts(task, [json.dumps(each) for each in args], {name: json.dumps(kwargs[name]) for name in kwargs})


def _value(task: TaskDefinition, parameter: inspect.Parameter, text: str) -> Any:
    hint = hint_of(task.function, parameter)
    if hint is parameter.empty:
        return parsed(text)
    if is_secret(hint):
        inner = get_args(hint)
        is_text = get_origin(hint) is Secret and inner[0] in (str, bytes)
        value = converted(text, inner[0]) if is_text else parsed(text)
        return None if value is None else Secret(value)
    try:
        return converted(text, hint)
    except Unsupported:
        return parsed(text)
    except Exception as error:
        what = f"the argument '{parameter.name}' of {task.name}"
        if is_secret_name(parameter.name):  # other libraries quote the value in their errors
            raise UsageError(f"{what} does not fit its annotation") from None
        raise UsageError(f"{what} cannot be {describe(text)}: {error}") from error


class Unsupported(Exception):
    """No ValueError and no TypeError: those, msgspec would take for a verdict on the value."""


def _refuse_class(cls: type, value: object) -> NoReturn:
    raise Unsupported


def converted(text: str, hint: Any) -> Any:
    """Read the text as JSON of that type, else as a plain text of that type (a date, a UUID, a str)."""
    try:
        decoder = msgspec.json.Decoder(hint, strict=False, dec_hook=_refuse_class)
    except Exception as error:
        raise Unsupported from error
    try:
        return decoder.decode(text)
    except Unsupported:
        raise
    except Exception as error:
        as_json = error
    try:
        return msgspec.convert(text, hint, strict=False, dec_hook=_refuse_class)
    except Unsupported:
        raise
    except Exception:
        is_json = isinstance(as_json, msgspec.ValidationError) or not isinstance(
            as_json, msgspec.DecodeError | UnicodeError
        )
        if is_json:  # the value was wrong, so the error is about the value
            raise as_json from None
        raise


def parsed(text: str) -> object:
    """Return the value of JSON, else the text itself, so that a word needs no second pair of quotes in a shell."""
    try:
        return strictly(text)
    except ValueError:
        return text


def strictly(text: str) -> Any:
    """Read JSON, without the words that Python adds to it. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
