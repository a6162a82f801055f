"""What a command says, and how.

`Output` is the frame around every command: inside it one answers with a table, with lines or with one JSON document;
an error of Holdfast that leaves it becomes a message and an exit code. Anything else that leaves it is a mistake of
ours and keeps its traceback. An error is told in one place: on stderr for people, and with ``--json`` in the document
on stdout, where a program looks for its answer anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import typer

from holdfast.cli.shown import as_json, printable, told, value_line, without_secrets
from holdfast.errors import EventNotFound, HoldfastError, InvocationNotFound, ResultTimeout, UnknownSchedule, UsageError

DONE, FAILED, MISUSED, TIMED_OUT, NOT_FOUND, INTERRUPTED = 0, 1, 2, 3, 4, 130
_CODES: dict[type[HoldfastError], int] = {
    UnknownSchedule: NOT_FOUND,  # these before UsageError, which they are
    EventNotFound: NOT_FOUND,
    UsageError: MISUSED,
    ResultTimeout: TIMED_OUT,
    InvocationNotFound: NOT_FOUND,
}
_GAP = 3  # between the columns of a drawn table
_NARROWEST_TEXT = 30


class Output:
    """`json`: one document on stdout and nothing else there. `terminal` is found out by itself, if not given."""

    def __init__(self, *, json: bool, terminal: bool | None = None) -> None:
        self.json = json
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self.known: dict[str, object] = {}
        """What is worth telling even if the rest fails, such as the id of what was submitted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HoldfastError):
            code = next((code for cls, code in _CODES.items() if isinstance(error, cls)), FAILED)
            self.fail(type(error).__name__, told(error), code=code)
        if isinstance(error, KeyboardInterrupt):
            id = self.known.get("id")
            self.fail("Interrupted", f"interrupted; {id} stays in the store" if id else "interrupted", code=INTERRUPTED)

    def fail(self, kind: str, message: str, *, code: int = FAILED, detail: str = "") -> NoReturn:
        """Say what went wrong and end with that exit code. `detail`, a traceback, may have several lines."""
        message = without_secrets(message)
        if self.json:
            facts = {"type": kind, "message": message} | ({"traceback": detail} if detail else {})
            self.document(self.known | {"error": facts})
        else:
            _say(f"error: {printable(message)}")
            if detail:
                _say(indented(detail))
        raise typer.Exit(code) from None

    # --- answers

    def document(self, facts: Mapping[str, Any]) -> None:
        print(as_json(facts, indent=2))

    def line(self, text: str = "") -> None:
        print(printable(text))

    def block(self, text: str) -> None:
        """Text of several lines, moved to the right so that none of them looks like one of ours."""
        print(indented(text))

    def value(self, value: object) -> None:
        """A result: text as it is, but harmless on a terminal; anything else as JSON on one line."""
        if not isinstance(value, str):
            print(value_line(value))
        else:
            print("\n".join(map(printable, value.split("\n"))) if self._terminal else value)

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Labels and values, one pair per line, without those that are empty."""
        there = [(label, value) for label, value in pairs if value]
        width = max((len(label) for label, _ in there), default=0)
        for label, value in there:
            self.line(f"{label:<{width}}  {value}")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "") -> None:
        """A table: drawn on a terminal, aligned columns elsewhere. `empty` is said instead of a table without rows."""
        cells = [[printable("" if cell is None else cell) for cell in row] for row in rows]
        if not cells and empty:
            self.line(empty)
        elif self._terminal:
            _draw(titles, cells)
        else:
            _align([list(titles), *cells])

    # --- beside the answer

    def confirm(self, question: str) -> None:
        """Ask whoever gave the command, and end it unless the answer is yes. A program has to say --yes before."""
        if self.json:
            raise UsageError(f"{question} With --json nobody is asked: give --yes")
        print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            self.fail("NotConfirmed", "nothing was done; --yes does it without asking")

    def note(self, text: str) -> None:
        """Something to know that is not part of the answer."""
        _say(f"note: {printable(without_secrets(text))}")

    def aside(self, text: str) -> None:
        """What people like to know at once, and programs get in the document."""
        if not self.json:
            _say(printable(text))


def indented(text: str, margin: str = "  | ") -> str:
    return "\n".join(f"{margin}{printable(line)}" for line in without_secrets(text).rstrip("\n").split("\n"))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _align(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(titles: Sequence[str], rows: list[list[str]]) -> None:
    # Imported here: rich costs a tenth of a second, and scripts never see its tables.
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.lifecycle.diagram import COLOURS

    colours: dict[str, str] = {status.value: f"#ffffff on {colour}" for status, colour in COLOURS.items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles[:-1]:
        table.add_column(title, no_wrap=True)
    table.add_column(titles[-1], overflow="fold")
    for row in rows:
        painted = [colours.get(cell, "") if title == "status" else "" for title, cell in zip(titles, row, strict=True)]
        # Text, not str: in a str, square brackets would be markup.
        table.add_row(*(Text(cell, style=style) for cell, style in zip(row, painted, strict=True)))
    console = Console(file=sys.stdout, highlight=False)
    # Half an id is no use to anybody: on a narrow terminal lines become too long instead.
    widths = [max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    needed = sum(width + _GAP for width in widths[:-1]) + min(widths[-1], _NARROWEST_TEXT)
    console.width = max(console.width, needed)
    console.print(table)
