"""Does the user's own connection write to the file that the path names?

It may be older than the restore of a backup: then it has the old file open, which nobody will read any more, and its
path says nothing about that. SQLite does not tell which file a connection has open. But a file has one write lock, so
while the user's transaction has it, no connection of ours can get it. If one can, theirs is another file.

If ours cannot, somebody has the lock of our file: the user's connection; or our writer, or another process, while the
user's has that of another file. Our writer says so itself, and Linux tells which process has a lock.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import StoreUnavailable
from holdfast.store.sqlite.files import FilesChanged, Log, close, writer_of
from holdfast.store.sqlite.forks import forks

_LOOK_AGAIN_SECONDS = 0.01
# Takes the write lock, as any statement that may write does, and changes nothing.
_TAKE_LOCK = "DELETE FROM holdfast_meta WHERE 0"


class LockProbe:
    """A connection that is made for the first session. `is_writing`: whether our own writer has a transaction open."""

    def __init__(self, path: Path, connect: Callable[[], sqlite3.Connection], is_writing: Callable[[], bool]) -> None:
        self._path = path
        self._connect = connect
        self._is_writing = is_writing
        self._connection: sqlite3.Connection | None = None
        self.using = threading.Lock()

    def let_go(self, log: Log) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection, log)

    def stop(self) -> None:
        with self.using:
            self.let_go(Log.NAMED)

    def refuse_other_file(self, theirs: sqlite3.Connection, *, written: bool) -> None:
        """Raise `StoreUnavailable` if the transaction of `theirs` is in another file than ours.

        `written`: it has changed something, so it has its file's lock.
        """
        if self._is_locked():
            return
        if not written:
            try:
                theirs.execute(_TAKE_LOCK)
            except sqlite3.OperationalError:
                return  # somebody else writes, or has written since: what it reads is old, and it cannot write
            if self._is_locked():
                return
        raise StoreUnavailable(
            f"the connection of this session has another file open than {self._path}, which was removed or replaced "
            "since. Nothing was submitted. Roll back, close the connection and connect anew."
        )

    def _is_locked(self) -> bool:
        """Whether the lock of our file is taken, as far as one can tell by the user's connection."""
        if self._is_writing():
            time.sleep(_LOOK_AGAIN_SECONDS)  # it may just be rolling back
            if self._is_writing():
                return False
        try:
            with self.using, forks:
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.execute("PRAGMA busy_timeout = 0")
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("ROLLBACK")
            return False
        except FilesChanged:
            return False
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise StoreUnavailable(f"SQLite: {error}. Nothing was submitted.") from error
        return writer_of(f"{self._path}-shm") in (None, os.getpid())
