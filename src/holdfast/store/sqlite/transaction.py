"""Submit inside a user's own SQLite transaction: on the user's connection to the same file, and on the user's thread.

The connection's transaction may hold the file's only write lock, so everything goes through it, large values included:
to wait here for our own writer would be a deadlock.

`LockProbe` finds out whether the user's connection writes to the file that the path names. It may be older than the
restore of a backup: then it has the old file open, which no process will read any more. SQLite does not show which file
a connection has open. But a file has one write lock, so while the user's transaction has it, no connection of ours can
get it. If one can, theirs is another file. If ours cannot, the lock of our file is held by the user's connection; or by
our writer or another process, while the user's has that of another file. Our writer knows whether it writes, and Linux
lists which process has a lock. It may be a third connection of this process: then this process has the write locks of
two databases, one of which may be an old file of ours.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock
from holdfast.errors import StoreUnavailable, UsageError
from holdfast.model.identity import key_is_over
from holdfast.model.log import AppendVerdict, Page
from holdfast.model.records import Entry, InvocationRecord, StoredPayload
from holdfast.store.sqlite import entries, invocations, logs, payloads, queries
from holdfast.store.sqlite.files import PATIENCE_OF_USERS_SECONDS, DatabaseFiles, FilesChanged, Log, close
from holdfast.store.sqlite.quarantine import StoreConnection
from holdfast.store.sqlite.threads import forks

T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 0.01
_LONGEST_FLUSH_SECONDS = 2.0
# Takes the write lock, as any statement that may write does, and changes nothing.
_TAKE_LOCK = "DELETE FROM holdfast_meta WHERE 0"


class SqliteTransaction:
    """See `holdfast.store.contract.Transaction`."""

    carries_payloads = True
    is_async = False

    def __init__(self, connection: sqlite3.Connection, clock: Clock, files: DatabaseFiles, probe: LockProbe) -> None:
        self._connection = connection
        self._clock = clock
        self._files = files
        self._probe = probe
        self._ended_at: float | None = None  # or its commit has begun, by the monotonic clock

    @property
    def is_over(self) -> bool:
        """Return whether what it committed can be read. SQLite calls a transaction ended when its commit begins: until
        that is flushed, this process has the lock. But so may another connection of it, again and again.
        """
        try:
            if self._connection.in_transaction:
                return False
        except sqlite3.ProgrammingError:  # closed
            return True
        now = self._clock.monotonic()
        self._ended_at = now if self._ended_at is None else self._ended_at
        return now - self._ended_at > _LONGEST_FLUSH_SECONDS or not self._probe.is_held_by_user()

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self._atomically(lambda connection: self._insert(connection, records, stored))

    def _atomically(self, write: Callable[[StoreConnection], T]) -> T:
        """Write all of it, or nothing. A row that cannot be read is set aside in the user's own transaction."""
        self._files.refuse_changed()
        with _plainly(self._connection) as connection:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")  # as Python itself would before an INSERT
            connection.execute("SAVEPOINT holdfast_submit")
            before = connection.total_changes
            try:
                answer = write(StoreConnection(connection, self._clock.now(), lambda *_: None, may_write=True))
                self._probe.refuse_other_file(connection, written=connection.total_changes > before)
                return answer
            except BaseException:
                connection.execute("ROLLBACK TO holdfast_submit")
                raise
            finally:
                connection.execute("RELEASE holdfast_submit")

    @staticmethod
    def _insert(
        connection: StoreConnection, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        payloads.put_payloads(connection, records[0].app, stored)
        there: list[InvocationRecord | None] = []
        for record in records:
            holder = invocations.find_conflict(connection, record)
            is_by_key = holder is not None and holder.id != record.id and holder.key == record.key
            if holder is not None and is_by_key and key_is_over(holder, connection.now):
                connection.execute(queries.FREE_KEY, (holder.app, holder.id, holder.key))
                holder = invocations.find_conflict(connection, record)
            if holder is None:
                invocations.insert(connection, [record])
            there.append(holder)
        return there

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self.insert(records, stored)

    def put_entries(self, fresh: Sequence[Entry], stored: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        return self._atomically(lambda connection: self._put_entries(connection, fresh, stored))

    @staticmethod
    def _put_entries(
        connection: StoreConnection, fresh: Sequence[Entry], stored: Sequence[StoredPayload]
    ) -> Sequence[Entry | None]:
        if stored:
            payloads.put_payloads(connection, fresh[0].app, stored)
        return [entries.put_new(connection, entry) for entry in fresh]

    async def aput_entries(
        self, fresh: Sequence[Entry], stored: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]:
        return self.put_entries(fresh, stored)

    def append(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        return self._atomically(lambda connection: self._append(connection, pages, stored))

    @staticmethod
    def _append(
        connection: StoreConnection, pages: Sequence[Page], stored: Sequence[StoredPayload]
    ) -> Sequence[AppendVerdict]:
        if pages:
            payloads.put_payloads(connection, pages[0].app, stored)
        return logs.append(connection, pages)

    async def aappend(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        return self.append(pages, stored)


def joined(connection: object, path: Path, clock: Clock, files: DatabaseFiles, probe: LockProbe) -> SqliteTransaction:
    """Return the transaction of a session. Raises `UsageError` unless it is a connection to that file, in a
    transaction or about to begin one.
    """
    if not isinstance(connection, sqlite3.Connection):
        raise UsageError(f"session= takes a sqlite3.Connection to {path}, not {type(connection).__name__}")
    with _plainly(connection):
        (file,) = [row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main"]
    files.refuse_changed()
    if not file or not _is_same(file, path):
        raise UsageError(f"the connection is to {file or 'a database in memory'}; this app works on {path}")
    begins = connection.isolation_level is not None or getattr(connection, "autocommit", None) is False
    if not connection.in_transaction and not begins:
        raise UsageError("the connection is in no transaction and begins none by itself; execute BEGIN first")
    return SqliteTransaction(connection, clock, files, probe)


def _is_same(file: str, path: Path) -> bool:
    try:
        return os.path.samefile(file, path)
    except OSError as error:
        raise StoreUnavailable(f"{error.filename} cannot be reached: {error.strerror}. Nothing was written.") from error


@contextlib.contextmanager
def _plainly(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Use the connection without the factories of its owner for rows and texts."""
    before = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield connection
    finally:
        connection.row_factory, connection.text_factory = before


class LockProbe:
    """A connection that is made for the first session. `is_writing`: whether our own writer has a transaction open."""

    def __init__(
        self, files: DatabaseFiles, connect: Callable[[], sqlite3.Connection], is_writing: Callable[[], bool]
    ) -> None:
        self._files = files
        self._path = files.path
        self._connect = connect
        self._is_writing = is_writing
        self._connection: sqlite3.Connection | None = None
        self.using = threading.Lock()

    def close_connection(self, log: Log, *, wait: bool = True) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection, log, wait=wait)

    def stop(self) -> None:
        with self.using:
            self.close_connection(Log.NAMED)

    def is_held_by_user(self) -> bool:
        """Return whether the user's code in this process has the lock. False if the system does not show it."""
        return self._files.writer() == os.getpid() and not self._is_writing()

    def refuse_other_file(self, theirs: sqlite3.Connection, *, written: bool) -> None:
        """Raise `StoreUnavailable` if the transaction of `theirs` is in another file than ours.

        `written`: it has changed something, so it has its file's lock.
        """
        if not written:
            try:
                theirs.execute(_TAKE_LOCK)
            except sqlite3.OperationalError:
                return  # another connection writes, or has written since: what it reads is old, and it cannot write
        deadline = time.monotonic() + PATIENCE_OF_USERS_SECONDS
        while self._is_locked():
            if not (others := self._files.other_indexes_written_here()):
                return
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"this process has write transactions open in {self._path} and in the database of "
                    f"{', '.join(others)}, and the connection of this session may have either: the file may have been "
                    "removed or replaced since it was opened. Nothing was submitted. Roll back, close the connection "
                    "and reconnect, or end the other transaction first."
                )
            time.sleep(_LOOK_AGAIN_SECONDS)
        raise StoreUnavailable(
            f"the connection of this session has another file open than {self._path}, which was removed or replaced "
            "since. Nothing was submitted. Roll back, close the connection and reconnect."
        )

    def _is_locked(self) -> bool:
        """Return whether the lock of our file is taken, as far as can be seen by the user's connection."""
        if self._is_writing():
            time.sleep(_LOOK_AGAIN_SECONDS)  # it may just be rolling back
            if self._is_writing():
                return False
        if not self.using.acquire(timeout=PATIENCE_OF_USERS_SECONDS):
            raise self._files.refused()  # all connections are being closed, and that waits for the writer
        try:
            with forks:
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
        finally:
            self.using.release()
        return self._files.writer() in (None, os.getpid())
