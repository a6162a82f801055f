"""The threads of a SQLite store: a writer and a reader. With them: turns between processes, and forks.

Both threads take jobs (functions of a connection) and answer the loop or the thread that asked. The writer commits in
groups: jobs that arrive while a commit is flushed share the next one. So the cost of a flush is shared, and no job
waits for a group to fill. If a job of a group raises, or the commit fails, the group is rolled back and its jobs run
one by one, each in its own transaction; so a job must have no effect outside its connection.

Nothing is answered unless the path still names the files that the connection has open (see `files`). An idle writer
checks that now and then.

**Turns.** SQLite's busy handler sleeps and tries again, without a queue: the process that has just committed is awake
and takes the lock again, while the others sleep. With two busy writers one of them can starve for seconds. So a writer
takes a turn first, by two advisory locks beside the database:

    take `next`; take `turn`; release `next`; write; release `turn`

A process that wants to write again has to pass `next`, which the longest waiting process holds until it has the turn.
The locks are about fairness only; safety is SQLite's own lock. So a process that is frozen (SIGSTOP) during its turn
does not stop the others: after a while they go on without turns for some seconds. (Frozen in the middle of a commit it
holds SQLite's lock as well; then only waking or killing it helps, and the error names its pid.) The
kernel releases the locks of a dead process; a forked child closes its copies at once.

**Forks.** A fork waits until no transaction is open, and then connections are closed. SQLite remembers in memory which
locks the process has: a child forked in the middle of a transaction would take its parent's lock for its own, and wait
for it for ever. A child that inherits connections keeps their files, even when the others have deleted log and index.
Parent and child reconnect on their next use. A connection that is busy for longer than some seconds stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from holdfast.errors import HoldfastError, SchemaMismatch, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.store.contract import Observe
from holdfast.store.sqlite.files import DatabaseFiles, FilesChanged, Log, close, close_all_connections
from holdfast.store.sqlite.rows import BadText

T = TypeVar("T")
_BUSY = sqlite3.SQLITE_BUSY
_LARGEST_GROUP = 1000
_TRIES = 3
_IDLE_SECONDS = 1.0  # between two looks of a thread that has nothing to do: others may wait for it
_FORK_LOOK_SECONDS = 0.001
_FORK_PATIENCE_SECONDS = 1.0  # for reads, and for all that is between two of them
_FORK_TRANSACTION_SECONDS = 5.0
_FIRST_WAIT_SECONDS = 0.0001
_LONGEST_WAIT_SECONDS = 0.001
PATIENCE_SECONDS = 2.0  # many commits fit into it, even on a slow disk
UNFAIR_SECONDS = 10.0


# --- turns and forks


def open_lock(path: Path) -> int:
    """Open a file to lock, for this user alone. Not through a link, which another user may have planted."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class WriteTurn:
    """Take turns with other writers: a context for each write transaction."""

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
        """Write down the pid of the process that writes."""
        os.pwrite(self._turn, b"%-10d" % os.getpid(), 0)

    def _take(self, deadline: float) -> bool:
        if not self._lock(self._next, deadline):
            return False
        try:
            return self._lock(self._turn, deadline)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(self, *_: object) -> None:
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
        """Return the pid of the process that writes, or was the last to."""
        return os.pread(self._turn, 10, 0).decode(errors="replace").strip() or "unknown"

    def close(self) -> None:
        for descriptor in (self._next, self._turn):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _TURNS.discard(self)


_TURNS: weakref.WeakSet[WriteTurn] = weakref.WeakSet()


def _forget_in_child() -> None:
    for turn in list(_TURNS):
        turn.close()


class Forks:
    """Keep forks and write transactions apart: a context for each transaction."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
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
        unused = close_all_connections(_FORK_PATIENCE_SECONDS)
        deadline = time.monotonic() + _FORK_TRANSACTION_SECONDS
        self._lock.acquire()  # kept until the fork is over, so that none begins
        while self._open and time.monotonic() < deadline:
            self._lock.release()
            time.sleep(_FORK_LOOK_SECONDS)
            self._lock.acquire()
        self._unused = unused

    def after(self) -> None:
        unused, self._unused = self._unused, ExitStack()
        self._lock.release()
        unused.close()


forks = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forks.before, after_in_parent=forks.after, after_in_child=forks.reset)
    os.register_at_fork(after_in_child=_forget_in_child)


# --- threads


class _Job(Generic[T]):
    """Work for a thread. Its answer goes to a future of a loop; without a loop, `gate` is released.

    `committed` is called on the thread before that, unless the job has failed.
    """

    __slots__ = ("committed", "error", "future", "gate", "loop", "run", "value")

    def __init__(self, run: Callable[[sqlite3.Connection], T], loop: asyncio.AbstractEventLoop | None) -> None:
        self.run = run
        self.loop = loop
        self.future: asyncio.Future[T] | None = None if loop is None else loop.create_future()
        self.gate = threading.Lock()
        self.committed: Callable[[], object] = lambda: None
        self.value: T | None = None
        self.error: BaseException | None = None

    def answer(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


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
        self.using = threading.Lock()  # the connection; `close_connection` comes from another thread
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._has_ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def do(self, run: Callable[[sqlite3.Connection], T]) -> T:
        job = _Job(run, asyncio.get_running_loop())
        self._jobs.put(job)
        assert job.future is not None
        return await job.future

    def do_blocking(self, run: Callable[[sqlite3.Connection], T], committed: Callable[[], object] | None = None) -> T:
        """Do as `do`, from any other thread, which waits for the answer. `committed` must neither block nor raise."""
        job = _Job(run, None)
        job.committed = committed or job.committed
        job.gate.acquire()
        self._jobs.put(job)
        if self._has_ended:
            self._refuse_waiting()  # the thread may have done so before this job was there
        job.gate.acquire()
        return job.answer()

    def _refuse_waiting(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    _fail([job], StoreUnavailable("the store was closed meanwhile; nothing was written"))
                    _deliver([job])

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
        self._has_ended = True
        self._refuse_waiting()

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

    def close_connection(self, log: Log, *, wait: bool = True) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection, log, wait=wait)

    def _end(self) -> None:
        self.close_connection(Log.NAMED)

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
    """Verify nothing: for a connection without watched files."""


def _fail(group: list[_Job[Any]], error: BaseException) -> None:
    for job in group:
        job.error = _translated(error)


class WriterThread(ConnectionThread):
    """The only thread of this process that writes; every group is one transaction."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        turn: WriteTurn,
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
            translated = self._with_holder(_translated(error))
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
        """Close connections to deleted files: a process that connects has to wait until they are unused."""
        try:
            with self.using:
                files.verify()
        except FilesChanged as change:
            with contextlib.suppress(Exception):  # the next caller gets the error
                files.renew(change)
        except StoreUnavailable:
            return  # it may come back

    @property
    def is_writing(self) -> bool:
        """Return whether the thread has a transaction open, and so the write lock. From any thread."""
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
        self.close_connection(Log.NAMED if self._files is None else self._files.closing())

    def _with_holder(self, error: BaseException) -> BaseException:
        """Return the error of a lock that was not free with the process that has it, as far as the system shows it."""
        cause = error.__cause__
        if not isinstance(error, StoreUnavailable) or getattr(cause, "sqlite_errorcode", 0) & 0xFF != _BUSY:
            return error
        holder = None if self._files is None else self._files.writer()
        if holder == os.getpid():
            why = (
                f"An open transaction of this process (pid {holder}) has the file's write lock. Commit your "
                "transaction before you submit, or pass its connection: options(session=connection)."
            )
        elif holder is not None:
            why = f"Process {holder} has the file's write lock for longer than sqlite_busy_timeout_seconds."
        else:
            why = f"{_LOCKED} The last process of Holdfast that wrote has the pid {self._turn.last_writer()}."
        named = StoreUnavailable(f"SQLite: {cause}. {why}")
        named.__cause__ = cause
        return named

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
        if loop is None:
            for job in jobs:
                if job.error is None:
                    job.committed()
                job.gate.release()
            continue
        try:
            loop.call_soon_threadsafe(_resolve, jobs)
        except RuntimeError:
            continue  # that loop was closed


def _resolve(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        assert job.future is not None
        if job.future.done():
            continue  # its caller was cancelled
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.value)


def _translated(error: BaseException) -> BaseException:
    """Return our error for an error of SQLite or of the system."""
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
_LOCKED = (
    "Another connection has the file's write lock for longer than sqlite_busy_timeout_seconds: another program's, or "
    "one of your own with an open transaction."
)
_MEANING: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (StoreUnavailable, _LOCKED),
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


# --- texts that are not UTF-8


async def do_leniently(thread: ConnectionThread, job: Callable[[sqlite3.Connection], T]) -> T:
    """Run a job; if a text is not UTF-8, run it again and read such texts leniently.

    Python's sqlite3 refuses the whole query then, so one damaged row would stop every claim and every list.
    """
    try:
        return await thread.do(job)
    except StoreError as error:
        if "Could not decode to UTF-8" not in str(error.__cause__):
            raise

    def leniently(connection: sqlite3.Connection) -> T:
        connection.text_factory = _lenient
        try:
            return job(connection)
        finally:
            connection.text_factory = str

    return await thread.do(leniently)


def _lenient(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return BadText(raw.decode(errors="surrogateescape"))
