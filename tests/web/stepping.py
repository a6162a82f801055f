"""The cost of a page, counted in steps of SQLite, which depend on no clock."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from typing import Any

from holdfast import App
from holdfast.cli.reach import with_store


class Steps:
    """Count the instructions of SQLite's machine that reading takes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._seen = itertools.count()

    def of(self, work: Callable[[], object]) -> int:
        work()  # once before: statements are prepared
        self._set(lambda: next(self._seen) < 0)
        before = next(self._seen)
        work()
        self._set(None)
        return next(self._seen) - before

    def _set(self, handler: Callable[[], bool] | None) -> None:
        def install(connection: Any) -> None:
            raw: sqlite3.Connection = connection.raw
            raw.set_progress_handler(handler, 1)

        with_store(self._app, lambda store: store._read(install))
