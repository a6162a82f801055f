"""Submit inside a user's own SQLite transaction: on the user's connection to the same file, and on the user's thread.

The connection's transaction may hold the file's only write lock, so everything goes through it, large values included:
to wait here for our own writer would be to wait for oneself.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, StoreUnavailable, UsageError
from holdfast.lifecycle.identity import key_is_over
from holdfast.lifecycle.records import Entry, InvocationRecord, StoredPayload
from holdfast.store.sqlite import aside, entries, jobs, payloads, queries
from holdfast.store.sqlite.files import DatabaseFiles
from holdfast.store.sqlite.probe import LockProbe

T = TypeVar("T")


class SqliteTransaction:
    """See `holdfast.store.contract.Transaction`."""

    carries_payloads = True
    is_async = False

    def __init__(self, connection: sqlite3.Connection, clock: Clock, files: DatabaseFiles, probe: LockProbe) -> None:
        self._connection = connection
        self._clock = clock
        self._files = files
        self._probe = probe

    @property
    def is_over(self) -> bool:
        try:
            return not self._connection.in_transaction
        except sqlite3.ProgrammingError:  # closed
            return True

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self._whole(lambda connection: self._insert(connection, records, stored))

    def _whole(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """All that is written so, or none of it."""
        self._files.refuse_changed()
        with _plainly(self._connection) as connection:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")  # as Python itself would before an INSERT
            connection.execute("SAVEPOINT holdfast_submit")
            before = connection.total_changes
            try:
                answer = write(connection)
                self._probe.refuse_other_file(connection, written=connection.total_changes > before)
                return answer
            except BaseException:
                connection.execute("ROLLBACK TO holdfast_submit")
                raise
            finally:
                connection.execute("RELEASE holdfast_submit")

    def _insert(
        self, connection: sqlite3.Connection, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        now = self._clock.now()
        payloads.put(connection, records[0].app, stored, now)
        there: list[InvocationRecord | None] = []
        for record in records:
            holder = jobs.in_the_way(connection, record, self._set_aside)
            if holder is not None and holder.id != record.id and holder.key == record.key and key_is_over(holder, now):
                connection.execute(queries.FREE_KEY, (holder.app, holder.id, holder.key))
                holder = jobs.in_the_way(connection, record, self._set_aside)
            if holder is None:
                jobs.insert(connection, record)
            there.append(holder)
        return there

    def _set_aside(
        self, connection: sqlite3.Connection, table: aside.Table, row: aside.Row, error: CorruptRecord
    ) -> None:
        """In the user's own transaction: a damaged row takes no key."""
        aside.set_aside(connection, table, row, error, self._clock.now())

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self.insert(records, stored)

    def put_entries(self, fresh: Sequence[Entry]) -> Sequence[Entry | None]:
        now = self._clock.now()
        return self._whole(
            lambda connection: [entries.put_new(connection, entry, now, self._set_aside) for entry in fresh]
        )

    async def aput_entries(self, fresh: Sequence[Entry]) -> Sequence[Entry | None]:
        return self.put_entries(fresh)


def joined(connection: object, path: Path, clock: Clock, files: DatabaseFiles, probe: LockProbe) -> SqliteTransaction:
    """Raises `UsageError` unless it is a connection to that file, in a transaction or about to begin one."""
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
    """The owner may have rows and texts made into something else."""
    before = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield connection
    finally:
        connection.row_factory, connection.text_factory = before
