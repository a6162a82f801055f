"""A fair turn between the processes that write one SQLite file.

SQLite's busy handler sleeps and tries again, and it has no queue: the process that has just committed is awake and
takes the lock again, while the others sleep. With two busy writers one of them can starve for seconds. So a writer
first takes a turn here, by two advisory locks beside the database:

    take `next`; take `turn`; let go of `next`; write; let go of `turn`

Whoever wants to write again has to pass `next`, which the longest waiting process holds until it has the turn. Nobody
can therefore overtake the one that is next, and two writers alternate.

The locks are about fairness only; safety is SQLite's own lock. So a process that is frozen (SIGSTOP) with a turn in its
hand may not stop the others: after a while they go on without it, and unfairly, for some seconds. (Frozen in the middle
of a commit it holds SQLite's lock as well; then nothing but waking or killing it helps, and the error names the pid
that wrote last.) The kernel lets go of the locks when a process dies; a forked child closes its copies at once, or it
would keep its parent's turn alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
import weakref
from pathlib import Path
from types import TracebackType

_FIRST_WAIT_SECONDS = 0.0001
_LONGEST_WAIT_SECONDS = 0.001
PATIENCE_SECONDS = 2.0  # many commits fit into it, even on a slow disk
UNFAIR_SECONDS = 10.0


def open_lock(path: Path) -> int:
    """Open a file to lock, for this user alone. Not through a link, which somebody may have planted."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Turn:
    """One writer's place in the line. Used as a context manager around each write transaction."""

    def __init__(self, folder: Path, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience = patience_seconds
        self._next = open_lock(folder / "next.lock")
        try:
            self._turn = open_lock(folder / "turn.lock")
        except OSError:
            os.close(self._next)
            raise
        self._ours = False
        self._unfair_until = 0.0
        _TURNS.add(self)

    def __enter__(self) -> None:
        now = time.monotonic()
        if now >= self._unfair_until:
            self._ours = self._take(now + self._patience)
            if not self._ours:
                self._unfair_until = time.monotonic() + UNFAIR_SECONDS

    def sign(self) -> None:
        """Say who writes now."""
        os.pwrite(self._turn, b"%-10d" % os.getpid(), 0)

    def _take(self, deadline: float) -> bool:
        if not self._lock(self._next, deadline):
            return False
        try:
            return self._lock(self._turn, deadline)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ours:
            self._ours = False
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _lock(self, descriptor: int, deadline: float) -> bool:
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            select.select((), (), (), wait)  # time.sleep raises EINVAL where libfaketime leaves monotonic time alone
            wait = min(wait * 1.5, _LONGEST_WAIT_SECONDS)

    def last_writer(self) -> str:
        """The pid of the process that writes, or was the last to."""
        return os.pread(self._turn, 10, 0).decode(errors="replace").strip() or "unknown"

    def close(self) -> None:
        for descriptor in (self._next, self._turn):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _TURNS.discard(self)


_TURNS: weakref.WeakSet[Turn] = weakref.WeakSet()


def _forget_in_child() -> None:
    for turn in list(_TURNS):
        turn.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
