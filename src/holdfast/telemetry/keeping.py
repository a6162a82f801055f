"""Log lines that are kept with the call that they were made in."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.model.notes import MAX_LINE_CHARACTERS, MAX_NAME_CHARACTERS, LogLine, cut
from holdfast.showing import without_secrets
from holdfast.telemetry.tasks import call_fields, message_of

Keep = Callable[[str, int, LogLine], None]
"""Takes an invocation, its attempt and a line, on any thread."""


class LineKeeper(logging.Handler):
    """Gives lines that are logged in tasks to `keep`, between `begin` and `end`."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep

    def begin(self) -> None:
        logging.getLogger().addHandler(self)

    def end(self) -> None:
        logging.getLogger().removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a line. It takes no lock: an exception may be raised in a thread anywhere."""
        if self.filter(record):
            self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if (call := call_fields(record)) is None:
            return
        try:
            self._keep(call.invocation, call.attempt, line_of(record))
        except Exception:
            self.handleError(record)


def line_of(record: logging.LogRecord) -> LogLine:
    """Return the line as it is kept: bounded, and without the passwords of URLs."""
    text = message_of(record)
    if record.exc_info and record.exc_info[0] is not None:
        text = f"{text} ({record.exc_info[0].__name__}: {record.exc_info[1]})"
    elif record.exc_text:  # from another process
        text = f"{text} ({record.exc_text.rpartition(chr(10))[2]})"
    return LogLine(
        at=record.created,
        level=cut(record.levelname, MAX_NAME_CHARACTERS),
        logger=cut(record.name, MAX_NAME_CHARACTERS),
        text=cut(without_secrets(text), MAX_LINE_CHARACTERS),
    )
