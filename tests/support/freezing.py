"""Processes that stop in the middle of everything, as a machine that sleeps, and can be woken."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path


def freeze(*pids: int, can_write: Callable[[], bool]) -> None:
    """Stop these processes. A process that stops in the middle of a commit keeps SQLite's lock, and then no other
    process can write (docs/operations/sqlite.md): wake it and stop it again until that is not so.
    """
    _stop(*pids)
    while not can_write():
        wake(*pids)
        _stop(*pids)


def wake(*pids: int) -> None:
    _signal(signal.SIGCONT, *pids)


def can_write_to(file: Path) -> Callable[[], bool]:
    """Whether the SQLite file takes a write."""

    def can_write() -> bool:
        with contextlib.closing(sqlite3.connect(file, timeout=1.0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            connection.execute("ROLLBACK")
            return True

    return can_write


def _stop(*pids: int) -> None:
    """Stop them and wait until every thread has: the signal alone does not say when."""
    _signal(signal.SIGSTOP, *pids)
    for pid in pids:
        while any(state not in "TtZX" for state in _states(pid)):
            time.sleep(0.001)


def _states(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
                found.append(text.rpartition(")")[2].split()[0])
    return found


def _signal(number: int, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a woken process may end the other
            os.kill(pid, number)
