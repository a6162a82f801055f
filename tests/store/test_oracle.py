"""SQLite and memory agree on everything that Hypothesis thinks of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from holdfast.clock import Clock
from holdfast.store.contract import Store, ignore
from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.stateful import oracle_test

_folders: list[tempfile.TemporaryDirectory[str]] = []


def _open_sqlite(clock: Clock) -> Store:
    _folders.append(tempfile.TemporaryDirectory(prefix="hf"))
    path = Path(_folders[-1].name, "store.db")
    return SqliteStore(path, clock=clock, observe=ignore, synchronous="normal", busy_timeout_seconds=5.0)


@pytest.fixture(autouse=True)
def _folders_are_removed() -> Iterator[None]:
    yield
    while _folders:
        _folders.pop().cleanup()


@pytest.mark.slow
class TestSqliteAgreesWithMemory(oracle_test(_open_sqlite)):  # type: ignore[misc]
    settings = settings(stateful_step_count=30)


class TestMemoryAgreesWithItself(oracle_test(MemoryStore)):  # type: ignore[misc]
    """Nothing may depend on chance or on the host, or the comparison would mean nothing."""

    settings = settings(stateful_step_count=20, max_examples=20)
