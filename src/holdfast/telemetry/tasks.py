"""Which call a log record was made in.

A call is entered into a context variable. So records of its coroutines, of the tasks that they start and of
`asyncio.to_thread` carry it too.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

ATTRIBUTE = "holdfast_call"  # of a log record that came from another process


class Here(Protocol):
    @property
    def about(self) -> Any: ...  # an invocation's record, or a `holdfast.Context`
    @property
    def deadline(self) -> float | None: ...


here: ContextVar[Here | None] = ContextVar("holdfast_call", default=None)


class CallFields(NamedTuple):
    invocation: str
    task: str
    attempt: int


def call_fields(record: logging.LogRecord) -> CallFields | None:
    """Return the call that the record was made in; None outside of tasks, and for the lines of Holdfast itself."""
    there: CallFields | None = getattr(record, ATTRIBUTE, None)
    if there is not None:
        return there
    about = None if (call := here.get()) is None else call.about
    if about is None or record.name == "holdfast" or record.name.startswith("holdfast."):
        return None  # lines of the engine name their invocation themselves: it may serve many callers
    return CallFields(getattr(about, "invocation_id", None) or about.id, about.task, about.attempt)


def message_of(record: logging.LogRecord) -> str:
    """Return the message. Where the arguments do not fit its text, return the text and the reason: such a line is a
    mistake of user code, and its reader needs the call that it was made in.
    """
    try:
        return record.getMessage()
    except Exception as error:
        try:
            return f"{record.msg} (its arguments do not fit: {type(error).__name__}: {error})"
        except Exception:  # of user code: the text of an object, or of its error
            return f"a message of {record.pathname}:{record.lineno} cannot be shown: {type(error).__name__}"


class TaskFields(logging.Filter):
    """Gives records that are made inside a task the attributes `invocation`, `task` and `attempt`.

    For your own handlers: ``handler.addFilter(TaskFields())``. An attribute that the record has already, by your own
    ``extra={"task": …}``, stays. Outside of tasks nothing is set: ``Formatter(…, defaults={"invocation": "-"})``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if (found := call_fields(record)) is not None:
            for name, value in found._asdict().items():
                record.__dict__.setdefault(name, value)
        return True
