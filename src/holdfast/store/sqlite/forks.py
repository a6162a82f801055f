"""A fork finds no connection of ours: it waits until no transaction is open, and then they are closed.

SQLite remembers in memory which locks the process has. A child that was forked in the middle of a transaction would
take its parent's lock for one of its own, and wait for it for ever. And a child that has inherited connections keeps
their files: when the others have closed and deleted log and index, it would go on with the deleted ones.

Parent and child connect anew when they next use the store. What is busy for longer than some seconds stays open.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

from holdfast.store.sqlite.files import let_go_of_all

_LOOK_SECONDS = 0.001
_PATIENCE_SECONDS = 1.0  # for reads, and for all that is between two of them
_TRANSACTION_SECONDS = 5.0


class Forks:
    """A context for each write transaction."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._unused = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1

    def before(self) -> None:
        unused = let_go_of_all(_PATIENCE_SECONDS)
        deadline = time.monotonic() + _TRANSACTION_SECONDS
        self._lock.acquire()  # kept until the fork is over, so that none begins
        while self._open and time.monotonic() < deadline:
            self._lock.release()
            time.sleep(_LOOK_SECONDS)
            self._lock.acquire()
        self._unused = unused

    def after(self) -> None:
        unused, self._unused = self._unused, ExitStack()
        self._lock.release()
        unused.close()


forks = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forks.before, after_in_parent=forks.after, after_in_child=forks.begin_anew)
