"""For the SQLite tests: a short folder for each (a socket's path is limited), and nothing left behind in /tmp."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.samples import Stage


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are
    path = Path(tempfile.mkdtemp(prefix="hf-"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(folder: Path) -> Path:
    """Where the store's file will be."""
    return folder / "store.db"


@pytest.fixture
def stage(path: Path) -> Stage:
    return Stage(
        lambda clock, observe: SqliteStore(
            path, clock=clock, observe=observe, synchronous="normal", busy_timeout_seconds=5.0
        )
    )


@pytest.fixture
def meddle(path: Path) -> Callable[..., list[Any]]:
    """Run a statement on the file behind the store's back."""

    def run(statement: str, *values: object) -> list[Any]:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    return run
