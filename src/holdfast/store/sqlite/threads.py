"""The two threads of a SQLite store: one that writes, one that reads.

Both take jobs (functions of a connection) from coroutines and give the results back to the loop they came from. The
writer commits in groups: whatever gathered while the previous commit was being flushed shares the next one, so the
cost of a flush is divided by the load and nobody waits for a group to fill.

A job may not spoil its neighbours. If any job of a group raises, the group is rolled back and its jobs run one by
one, each in its own transaction; a job therefore must have no effect outside the connection. When a commit fails, the
same happens, and each caller learns what became of its own write.

Nothing is answered unless the path still names the files that the connection has open (see `files`). A writer that has
nothing to do looks now and then whether it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sqlite3
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from holdfast.errors import HoldfastError, SchemaMismatch, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.store.contract import Observe
from holdfast.store.sqlite.files import DatabaseFiles, FilesChanged, Log, close
from holdfast.store.sqlite.forks import forks
from holdfast.store.sqlite.turn import Turn

T = TypeVar("T")
_LARGEST_GROUP = 1000
_TRIES = 3
_IDLE_SECONDS = 1.0  # between two looks of a thread that has nothing to do: others may wait for it


class _Job(Generic[T]):
    __slots__ = ("error", "future", "loop", "run", "value")

    def __init__(self, run: Callable[[sqlite3.Connection], T], loop: asyncio.AbstractEventLoop) -> None:
        self.run = run
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.value: T | None = None
        self.error: BaseException | None = None


class ConnectionThread:
    """A thread that owns a connection. `do` runs a job there and waits for it.

    With `files`, nothing is answered unless the path names the files that the connection has open.
    """

    def __init__(
        self, name: str, connect: Callable[[], sqlite3.Connection], files: DatabaseFiles | None = None
    ) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._files = files
        self._verify = _trust if files is None else files.verify
        self.using = threading.Lock()  # the connection; `let_go` comes from another thread
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def do(self, run: Callable[[sqlite3.Connection], T]) -> T:
        job = _Job(run, asyncio.get_running_loop())
        self._jobs.put(job)
        return await job.future

    def stop(self) -> None:
        """Finish the jobs that were accepted, close the connection and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        ending = False
        while not ending:
            group, ending = self._gather()
            if group:
                self._serve(group)
                _deliver(group)
        with self.using:
            self._end()

    def _serve(self, group: list[_Job[Any]]) -> None:
        for _ in range(_TRIES):
            try:
                with self.using:
                    if self._connection is None:
                        self._connection = self._connect()
                    self._run(self._connection, group)
                return
            except FilesChanged as change:
                try:
                    self._renew(change)
                except BaseException as error:
                    return _fail(group, error)
            except BaseException as error:  # no connection
                return _fail(group, error)
        _fail(group, StoreUnavailable("the files of the store are deleted or replaced again and again"))

    def _renew(self, change: FilesChanged) -> None:
        assert self._files is not None
        self._files.renew(change)
        if change.written:
            raise self._files.uncertain() from change

    def let_go(self, log: Log) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection, log)

    def _end(self) -> None:
        self.let_go(Log.NAMED)

    def _gather(self) -> tuple[list[_Job[Any]], bool]:
        group: list[_Job[Any]] = []
        job = self._next_job()
        try:
            while job is not None:
                group.append(job)
                if len(group) == _LARGEST_GROUP:
                    return group, False
                job = self._jobs.get_nowait()
        except Empty:
            return group, False
        return group, True

    def _next_job(self) -> _Job[Any] | None:
        return self._jobs.get()

    def _run(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        for job in group:
            job.error = None
            try:
                job.value = job.run(connection)
            except BaseException as error:
                job.error = _translated(error)
        self._verify()


def _trust(*, written: bool = False) -> None:
    """For a connection whose files nobody watches."""


def _fail(group: list[_Job[Any]], error: BaseException) -> None:
    for job in group:
        job.error = _translated(error)


class WriterThread(ConnectionThread):
    """The only thread of this process that writes; every group is one transaction."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        turn: Turn,
        observe: Observe,
        files: DatabaseFiles | None = None,
    ) -> None:
        self._turn = turn
        self._observe = observe
        self._committing = False
        super().__init__(name, connect, files)

    def _run(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        self._committing = False
        try:
            rows = self._transaction(connection, group)
        except FilesChanged:
            raise
        except BaseException as error:
            self._verify(written=self._committing)  # a log that was deleted looks like a damaged disk
            translated = self._with_pid(_translated(error))
            if len(group) > 1 and not isinstance(translated, StoreUnavailable):
                return self._one_by_one(connection, group)
            for job in group:  # no lock: to wait for it once more for each job would take minutes
                job.error = translated
        else:
            self._verify(written=True)
            self._observe("commit", {"jobs": len(group), "rows": rows})

    def _next_job(self) -> _Job[Any] | None:
        if self._files is None:
            return self._jobs.get()
        while True:
            try:
                return self._jobs.get(timeout=_IDLE_SECONDS)
            except Empty:
                self._look(self._files)

    def _look(self, files: DatabaseFiles) -> None:
        """Let go of files that were deleted: whoever connects has to wait until nobody uses them any more."""
        try:
            with self.using:
                files.verify()
        except FilesChanged as change:
            with contextlib.suppress(Exception):  # whoever asks for something next hears of it
                files.renew(change)
        except StoreUnavailable:
            return  # it may come back

    @property
    def is_writing(self) -> bool:
        """Whether it has a transaction open, and so the write lock. From any thread."""
        connection = self._connection
        try:
            return connection is not None and connection.in_transaction
        except sqlite3.ProgrammingError:  # closed meanwhile
            return False

    def _one_by_one(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        for number, job in enumerate(group):
            try:
                self._run(connection, [job])
            except FilesChanged as change:
                change.written = change.written or number > 0
                raise

    def _end(self) -> None:
        self.let_go(Log.NAMED if self._files is None else self._files.closing())

    def _with_pid(self, error: BaseException) -> BaseException:
        if isinstance(error, StoreUnavailable) and "write lock" in str(error):
            return StoreUnavailable(f"{error} The last one of ours that wrote is pid {self._turn.last_writer()}.")
        return error

    def _transaction(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> int:
        with self._turn, forks:
            connection.execute("BEGIN IMMEDIATE")
            self._turn.sign()
            before = connection.total_changes
            try:
                self._verify()
                for job in group:
                    job.error = None
                    job.value = job.run(connection)
                self._committing = True
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return connection.total_changes - before


def _deliver(group: list[_Job[Any]]) -> None:
    """Wake each loop once for all of its jobs."""
    loops = {job.loop for job in group}
    for loop in loops:
        jobs = [job for job in group if job.loop is loop] if len(loops) > 1 else group
        try:
            loop.call_soon_threadsafe(_resolve, jobs)
        except RuntimeError:
            continue  # that loop was closed, so nobody waits any more


def _resolve(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        if job.future.done():
            continue  # its caller was cancelled
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.value)


def _translated(error: BaseException) -> BaseException:
    """SQLite's error, or the system's, in our words."""
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, OSError):
        unavailable = _OF_THE_SYSTEM.get(error.errno or 0, StoreUnavailable)(
            f"a file of the store, or one beside it, cannot be used: {error.strerror or error}."
        )
        unavailable.__cause__ = error
        return unavailable
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    kind, advice = _MEANING.get(code, (StoreError, ""))
    translated = kind(f"SQLite: {error}.{' ' + advice if advice else ''}")
    translated.__cause__ = error
    return translated


_OF_THE_SYSTEM: dict[int, type[StoreError]] = {
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EROFS: StoreReadOnly,
}
_MEANING: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (
        StoreUnavailable,
        "Another program holds the file's write lock for longer than sqlite_busy_timeout_seconds.",
    ),
    sqlite3.SQLITE_LOCKED: (StoreUnavailable, ""),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, "Does the folder exist, and may this user write to it?"),
    sqlite3.SQLITE_READONLY: (StoreReadOnly, "The file, its folder or its disk cannot be written by this user."),
    sqlite3.SQLITE_FULL: (StoreFull, "Nothing of this write was kept; free some space and try again."),
    sqlite3.SQLITE_IOERR: (StoreUnavailable, "The disk failed to read or write; `holdfast store check` looks closer."),
    sqlite3.SQLITE_CORRUPT: (
        StoreError,
        "The file is damaged. Keep a copy, run `holdfast store check`, and restore a backup.",
    ),
    sqlite3.SQLITE_NOTADB: (SchemaMismatch, "The file is no SQLite database. Use another file, or move it aside."),
}
