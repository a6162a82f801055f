"""A bar on stderr for commands that walk over many records: only on a terminal, and gone when they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.app import App
from holdfast.cli.output import Output
from holdfast.telemetry.events import Event, RecordsWalked

Advance = Callable[[int], object]


@contextmanager
def walking(out: Output, app: App | None, what: str, total: int | None = None) -> Iterator[Advance]:
    """Show how many records were read: the app's engine and the caller report them."""
    if out.json or not sys.stderr.isatty():
        yield int
        return
    # Imported here, as rich costs a tenth of a second.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        shown = bar.add_task(what, total=total)

        def advance(count: int) -> None:
            bar.advance(shown, count)

        if app is not None:
            app.runtime.telemetry.subscribe(_Walk(advance))
        yield advance


class _Walk:
    """Advances the bar by the records that the engine has looked at."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def wants(self, kind: type[Event]) -> bool:
        return kind is RecordsWalked

    def __call__(self, event: Event) -> None:
        if isinstance(event, RecordsWalked):
            self._advance(event.count)
