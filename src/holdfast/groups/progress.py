"""The progress bar of a group, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[], None]]:
    """Draw a bar. Yield what moves it on by one."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=total)
        yield lambda: drawn.advance(task)
