"""From the words of a command line to the arguments of a task.

A word is JSON where it is JSON and text where it is not, and the task's annotations decide what it means: for a
``str``, 12345 is text; for a ``Decimal`` it never goes through a float; a dataclass is written as a JSON object. An
annotation that cannot be resolved here, or that leads to a class which JSON knows nothing of, changes nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Annotated, Any, NoReturn, get_args, get_origin

import msgspec
from typer import Argument, Option

from holdfast.codec.secret import Secret
from holdfast.errors import UsageError
from holdfast.executors.call import bind
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.fitting import hint_of, is_secret
from holdfast.showing import describe

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass
class CallWords:
    """A call as it was typed."""

    arguments: Annotated[
        list[str] | None,
        Argument(metavar="ARGS", help="By the task's annotations; else JSON, else text. -- before a dash."),
    ] = None
    kwargs: Annotated[str | None, Option(metavar="JSON", help="Keyword arguments as a JSON object.")] = None
    keyword: Annotated[
        list[str] | None, Option("-k", metavar="NAME=JSON", help="A keyword argument; may be repeated.")
    ] = None

    @property
    def keywords(self) -> dict[str, str]:
        """Return the texts of ``--kwargs`` and of every ``-k``. Raises `UsageError` if one is malformed."""
        found = _object(self.kwargs) if self.kwargs is not None else {}
        for pair in self.keyword or ():
            name, sign, text = pair.partition("=")
            if not sign or not name:
                raise UsageError(f"-k {pair!r} is not of the form name=value")
            if name in found:
                raise UsageError(f"the keyword argument '{name}' is given twice")
            found[name] = text
        return found

    def values(self, task: TaskDefinition) -> tuple[list[Any], dict[str, Any]]:
        """Return the values for a call of the task. Raises `ArgumentsDoNotBind`, or `UsageError` with the name."""
        texts, keywords = self.arguments or [], self.keywords
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


def _object(text: str) -> dict[str, str]:
    """Return the members of a JSON object as texts, so that all arguments are read in one way."""
    try:
        return {
            name: bytes(raw).decode() for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items()
        }
    except (ValueError, RecursionError):
        raise UsageError(f'--kwargs {text!r} is no JSON object; write it like \'{{"body": "hi"}}\'') from None


def _value(task: TaskDefinition, parameter: inspect.Parameter, text: str) -> Any:
    hint = hint_of(task.function, parameter)
    if hint is parameter.empty:
        return parsed(text)
    if is_secret(hint):
        inner = get_args(hint)
        return converted(text, inner[0]) if get_origin(hint) is Secret and inner[0] in (str, bytes) else parsed(text)
    try:
        return converted(text, hint)
    except _Unsupported:
        return parsed(text)
    except Exception as error:
        raise UsageError(
            f"the argument '{parameter.name}' of {task.name} cannot be {describe(text)}: {error}"
        ) from error


class _Unsupported(Exception):
    """No ValueError and no TypeError: those, msgspec would take for a verdict on the value."""


def _refuse_class(cls: type, value: object) -> NoReturn:
    raise _Unsupported


def converted(text: str, hint: Any) -> Any:
    """Read the text as JSON of that type, else as a plain text of that type (a date, a UUID, a str)."""
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
