"""The output of commands.

A command gives its answer twice: as a document for programs, and as lines, facts and tables for people. `Output` prints
either. A `HoldfastError` that leaves it becomes a message and an exit code: on stderr for people,
and with ``--json`` in the document on stdout. Any other exception is a mistake of ours and keeps its traceback.

What stored text looks like on a terminal is decided in `holdfast.showing`.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import typer

from holdfast.errors import (
    EventNotFound,
    HoldfastError,
    HookNotFound,
    InvocationNotFound,
    LogEventNotFound,
    ResultTimeout,
    StepNotFound,
    StreamGone,
    UnknownSchedule,
    UsageError,
)
from holdfast.showing import as_json, error_text, indented, printable, value_line, without_secrets

DONE, FAILED, MISUSED, TIMED_OUT, NOT_FOUND, INTERRUPTED = 0, 1, 2, 3, 4, 130
_CODES: dict[type[HoldfastError], int] = {
    UnknownSchedule: NOT_FOUND,  # these before UsageError, which they are
    EventNotFound: NOT_FOUND,
    UsageError: MISUSED,
    ResultTimeout: TIMED_OUT,
    InvocationNotFound: NOT_FOUND,
    StepNotFound: NOT_FOUND,
    LogEventNotFound: NOT_FOUND,
    HookNotFound: NOT_FOUND,
    StreamGone: NOT_FOUND,
}


class Output:
    """`json`: one document on stdout and nothing else there. `terminal` is found out by itself, if not given."""

    def __init__(self, *, json: bool, terminal: bool | None = None) -> None:
        self.json = json
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self.known: dict[str, object] = {}
        """Further fields of an error document, such as the id of a submitted invocation."""
        self.agreed: Callable[[], object] = lambda: None
        """Called before an action that the user may be asked about: its audit record is stored then."""
        self.did: Callable[[str], object] = lambda detail: None
        """Called when an action is done, and more follows, with what came of it."""

    @property
    def is_terminal(self) -> bool:
        return self._terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HoldfastError):
            code = next((code for cls, code in _CODES.items() if isinstance(error, cls)), FAILED)
            self.fail(type(error).__name__, error_text(error), code=code)
        if isinstance(error, KeyboardInterrupt):
            id = self.known.get("id")
            self.fail("Interrupted", f"interrupted; {id} stays in the store" if id else "interrupted", code=INTERRUPTED)

    def fail(self, kind: str, message: str, *, code: int = FAILED, detail: str = "") -> NoReturn:
        """Print what went wrong and end with that exit code. `detail`, a traceback, may have several lines."""
        message = without_secrets(message)
        if self.json:
            facts = {"type": kind, "message": message} | ({"traceback": detail} if detail else {})
            self.document(self.known | {"error": facts})
        else:
            _say(f"error: {printable(message)}")
            if detail:
                _say(indented(detail))
        raise typer.Exit(code) from None

    # --- the answer for programs

    def document(self, facts: Mapping[str, Any]) -> None:
        if self.json:
            print(as_json(facts, indent=2))

    def document_line(self, facts: Mapping[str, Any]) -> None:
        """Print one of many documents on its own line, as soon as it is available."""
        if self.json:
            print(as_json(facts), flush=True)

    # --- the answer for people

    def line(self, text: str = "") -> None:
        self._print(printable(text))

    def block(self, text: str) -> None:
        """Print text of several lines, indented so that none of them looks like one of ours."""
        self._print(indented(text))

    def value(self, value: object) -> None:
        """Print a result: text as it is, but harmless on a terminal; anything else as JSON on one line."""
        if not isinstance(value, str):
            self._print(value_line(value))
        else:
            self._print("\n".join(map(printable, value.split("\n"))) if self._terminal else value)

    def facts(self, pairs: Iterable[tuple[str, str | None]]) -> None:
        """Print labels and values, one pair per line, without empty ones."""
        there = [(label, value) for label, value in pairs if value]
        width = max((len(label) for label, _ in there), default=0)
        for label, value in there:
            self.line(f"{label:<{width}}  {value}")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
        """Print a table that fits the terminal, or 80 columns. `empty` is printed instead of a table without rows."""
        cells = [[printable("" if cell is None else cell) for cell in row] for row in rows]
        if self.json:
            return
        if not cells and empty:
            self.line(empty)
        elif self._terminal:
            _paint(_Table(titles, cells))
        else:
            print("\n".join(_Table(titles, cells).lines()))

    def _print(self, text: str) -> None:
        if not self.json:
            print(text)

    # --- beside the answer

    def confirm(self, question: str) -> None:
        """Ask the user, and end the command unless the answer is yes. With ``--json`` it takes --yes."""
        if self.json:
            raise UsageError(f"{question} With --json there is no question: give --yes")
        print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            self.fail("NotConfirmed", "nothing was done; --yes does it without asking")
        self.agreed()

    def note(self, text: str) -> None:
        """Print a note to stderr: it is not part of the answer."""
        _say(f"note: {printable(without_secrets(text))}")

    def aside(self, text: str) -> None:
        """Print a line to stderr that programs get in the document."""
        if not self.json:
            _say(printable(text))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


# --- tables

_GAP = "  "
_MARGIN = "    "  # of what stands beneath its row
_WIDEST_CELL = 28  # an id, a time, the longest status: only longer text is wrapped inside its column
_NARROWEST_TEXT = 24  # what the last column needs at least, to be wrapped where it is


class _Table:
    """Columns that fit are aligned. What does not fit stands beneath its row, wrapped: nothing is left out."""

    def __init__(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.titles = titles
        self.rows = rows
        self.limit = terminal_width()
        natural = [max(map(_cells, column)) for column in zip(titles, *rows, strict=True)]
        fits = sum(natural) + len(_GAP) * (len(natural) - 1) <= self.limit
        # A path or a command is copied from the last column, so its words stay whole.
        narrowest = max([_NARROWEST_TEXT, *(_cells(word) for row in rows for word in row[-1].split())])
        self.widths: list[int] = []
        for i, width in enumerate(natural):
            room = self.limit - sum(self.widths) - len(_GAP) * i
            widest = max(room, narrowest) if i == len(natural) - 1 else _WIDEST_CELL
            width = width if fits else min(width, widest)
            if i and width > room:
                break
            self.widths.append(width)

    def lines(self) -> Iterator[str]:
        yield from self._aligned(self.titles)
        for row in self.rows:
            yield from self.row(row)

    def row(self, row: Sequence[str]) -> Iterator[str]:
        yield from self._aligned(row)
        shown = len(self.widths)
        beneath = [(title, cell) for title, cell in zip(self.titles, row, strict=True)][shown:]
        is_text = len(beneath) == 1 and any(" " in each[-1] for each in self.rows)  # which says itself what it is
        parts = [cell if is_text or not title else f"{title}: {cell}" for title, cell in beneath if cell]
        for line in _wrapped(_GAP.join(parts), self.limit - len(_MARGIN)) if parts else ():
            yield f"{_MARGIN}{line}"

    def _aligned(self, row: Sequence[str]) -> Iterator[str]:
        columns = [_wrapped(cell, width) for cell, width in zip(row, self.widths, strict=False)]
        for i in range(max(map(len, columns))):
            parts = [lines[i] if i < len(lines) else "" for lines in columns]
            padded = [part + " " * (width - _cells(part)) for part, width in zip(parts, self.widths, strict=True)]
            yield _GAP.join(padded).rstrip()


def terminal_width() -> int:
    """Return the width of the terminal; 80 if it is unknown."""
    return _of_terminal("COLUMNS", 0, 80, least=40)


def terminal_height() -> int:
    """Return the height of the terminal; 24 if it is unknown."""
    return _of_terminal("LINES", 1, 24, least=5)


def _of_terminal(variable: str, index: int, unknown: int, *, least: int) -> int:
    try:
        size = int(os.environ.get(variable) or os.get_terminal_size(sys.stdout.fileno())[index])
    except (OSError, ValueError):
        return unknown
    return max(size, least) if size > 0 else unknown


def _cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _wrapped(text: str, width: int) -> list[str]:
    if _cells(text) <= width:
        return [text]
    # With characters that take two columns, half as many: too short is better than too long.
    return textwrap.wrap(text, width if _cells(text) == len(text) else max(1, width // 2), break_on_hyphens=False)


def _paint(table: _Table) -> None:
    """Print the table with a line under its titles, and each status in its colour."""
    # Imported here: rich costs a tenth of a second, and scripts never see its colours.
    from rich.console import Console
    from rich.text import Text

    from holdfast.model.diagram import COLOURS

    colours = {status.value: f"#ffffff on {colour}" for status, colour in COLOURS.items()}
    console = Console(file=sys.stdout, highlight=False)
    titles = list(table.titles[: len(table.widths)])
    where = titles.index("status") if "status" in titles else None
    rule = "─" * (sum(table.widths) + len(_GAP) * (len(table.widths) - 1))
    console.print(Text(next(table.lines()), style="bold"), Text(rule), sep="\n", soft_wrap=True)
    for row in table.rows:
        for number, line in enumerate(table.row(row)):
            text = Text(line)  # not str: in a str, square brackets would be markup
            if number == 0 and where is not None and (style := colours.get(row[where])):
                start = sum(table.widths[:where]) + len(_GAP) * where
                text.stylize(style, start, start + len(row[where]))
            console.print(text, soft_wrap=True)
