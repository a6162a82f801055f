"""A fair turn between the processes that write one SQLite file.

SQLite's busy handler sleeps and tries again, and it has no queue: the process that has just committed is awake and
takes the lock again, while the others sleep. With two busy writers one of them can starve for seconds. So a writer
first takes a turn here, by two advisory locks beside the database:

    take `next`; take `turn`; let go of `next`; write; let go of `turn`

Whoever wants to write again has to pass `next`, which the longest waiting process holds until it has the turn. Nobody
can therefore overtake the one that is next, and two writers alternate. The locks are about fairness only: safety is
SQLite's own lock, so a lock that cannot be had in time is an error to report, never a danger.

The kernel lets go of the locks when a process dies. A process that is stopped (SIGSTOP) in the middle of a commit
holds SQLite's lock as well as the turn; nothing but waking or killing it helps, and the error names its pid.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from holdfast.errors import StoreUnavailable

_FIRST_WAIT_SECONDS = 0.0001
_LONGEST_WAIT_SECONDS = 0.001


class Turn:
    """One writer's place in the line. Used as a context manager around each write transaction."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._next = os.open(folder / "next.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._turn = os.open(folder / "turn.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._timeout
        self._lock(self._next, deadline)
        try:
            self._lock(self._turn, deadline)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        os.pwrite(self._turn, b"%-10d" % os.getpid(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _lock(self, descriptor: int, deadline: float) -> None:
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(self._stuck()) from None
            time.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_WAIT_SECONDS)

    def _stuck(self) -> str:
        holder = os.pread(self._turn, 10, 0).decode(errors="replace").strip() or "unknown"
        return (
            f"no turn to write within {self._timeout:g} s; the last process that had it is pid {holder}. "
            "If that process is stopped or hangs, continue or end it; "
            "if the disk is slow, raise sqlite_busy_timeout_seconds."
        )

    def close(self) -> None:
        os.close(self._next)
        os.close(self._turn)
