"""From the words of a command line to the arguments of a task.

A word is JSON where it is JSON and text where it is not, and the task's annotations decide what it means: for a
``str``, 12345 is text; for a ``Decimal`` it never goes through a float; a dataclass is written as a JSON object. An
annotation that cannot be resolved here, or that leads to a class which JSON knows nothing of, changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from holdfast.app import App
from holdfast.errors import UsageError
from holdfast.model.records import InvocationRecord
from holdfast.runtime.converting import Call, call_of_texts, strictly
from holdfast.runtime.definition import TaskDefinition
from holdfast.web.documents import refuse_hidden


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

    def values(self, task: TaskDefinition) -> Call:
        """Return the values for a call of the task. Raises `ArgumentsDoNotBind`, or `UsageError` with the name."""
        return call_of_texts(task, self.arguments or [], self.keywords)


def _object(text: str) -> dict[str, str]:
    """Return the members of a JSON object as texts, so that all arguments are read in one way."""
    try:
        return {
            name: bytes(raw).decode() for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items()
        }
    except (ValueError, RecursionError):
        raise UsageError(f'--kwargs {text!r} is no JSON object; write it like \'{{"body": "hi"}}\'') from None


def call_given(app: App, record: InvocationRecord, text: str) -> tuple[Any, ...] | dict[str, Any]:
    """Return other arguments for a call from JSON: by the annotations of its task, if this app declares it."""
    wrong = f'--arguments {text[:80]!r} is neither a JSON list nor an object; write \'["42"]\' or \'{{"order": "42"}}\''
    try:
        value = strictly(text)
    except ValueError:
        raise UsageError(wrong) from None
    if not isinstance(value, list | dict):
        raise UsageError(wrong)
    refuse_hidden(app.runtime.codec, record, value)
    task = app.tasks.get(record.task)
    if task is None:
        return tuple(value) if isinstance(value, list) else value
    words = CallWords(kwargs=text) if isinstance(value, dict) else CallWords(arguments=_elements(text))
    args, kwargs = words.values(task.definition)
    return tuple(args) if isinstance(value, list) else kwargs


def _elements(text: str) -> list[str]:
    """Return the elements of a JSON list as texts, so that all arguments are read in one way."""
    return [bytes(raw).decode() for raw in msgspec.json.decode(text, type=list[msgspec.Raw])]
