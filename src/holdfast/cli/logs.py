"""Log lines, for people or for machines.

The standard library's logging, with the fields that Holdfast's lines carry. A message may quote what a user's code
said, so both forms make it harmless: one line stays one line, nothing acts on a terminal, and the passwords of URLs
are hidden. The lines of a traceback are moved to the right, where no forged line can begin.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TextIO

from holdfast.showing import as_json, indented, moment, printable, without_secrets
from holdfast.telemetry.logs import FIELDS as ALL_FIELDS
from holdfast.telemetry.tasks import call_fields, message_of

FIELDS = ("invocation", "task", "attempt", "runner", "epoch")  # of lines for people: messages name the others
_REMOTE_MARGIN = "    | "  # further to the right than an exception of our own


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(format: LogFormat = LogFormat.TEXT, level: LogLevel = LogLevel.WARNING) -> None:
    """Send everything from this level on to stderr. Called again, it replaces what it did before."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    handler = StderrHandler()
    handler.setFormatter(JsonLines() if format is LogFormat.JSON else TextLines())
    root.addHandler(handler)
    root.setLevel(level.upper())


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time, not to what it was at the start."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class TextLines(logging.Formatter):
    """``2026-11-15 08:00:00.123 INFO  holdfast.runner  message  [invocation=… task=…]``, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        stamp = f"{time:%Y-%m-%d %H:%M:%S}.{time.microsecond // 1000:03d}"
        fields = " ".join(f"{name}={printable(value)}" for name, value in _fields(record, FIELDS).items())
        line = f"{stamp} {record.levelname:<5} {printable(record.name)}  {printable(_message(record))}"
        line += f"  [{fields}]" if fields else ""
        remote, failure = _remote_traceback(record), _failure(self, record)
        parts = [line, indented(remote, _REMOTE_MARGIN) if remote else "", indented(failure) if failure else ""]
        return "\n".join(part for part in parts if part)


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, the fields that are there, and the texts of tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record, ALL_FIELDS),
        }
        if remote := _remote_traceback(record):
            facts["remote_traceback"] = without_secrets(remote)
        failure = _failure(self, record)
        return as_json(facts | {"exception": without_secrets(failure)} if failure else facts)


def _message(record: logging.LogRecord) -> str:
    return without_secrets(message_of(record))


def _fields(record: logging.LogRecord, names: Sequence[str]) -> dict[str, object]:
    """Return what a line is about. Inside of a task that is its call, whatever a record's own fields say."""
    if (call := call_fields(record)) is not None:
        return call._asdict()
    found = {name: getattr(record, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _remote_traceback(record: logging.LogRecord) -> str:
    """Return the traceback of a failed task, if the record carries one."""
    text = getattr(record, "remote_traceback", None)
    return text if isinstance(text, str) else ""


def _failure(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [
        formatter.formatException(record.exc_info) if record.exc_info else record.exc_text,
        formatter.formatStack(record.stack_info) if record.stack_info else None,
    ]
    return "\n".join(part for part in parts if part)
