"""The open files of a process, and whether the path still names them.

A database in WAL mode is three files: `shop.db`, its log `shop.db-wal` and the log's index `shop.db-shm`. Each can be
deleted or replaced while a process has it open. Its writes then succeed, and no other process ever sees them. Hence
the rule: **no write is acknowledged, and no read is believed, unless the path names the three files that the
connection has open** (device and inode: three calls of `stat`). `docs/decisions/0008` has the whole argument.

Two parts keep the rule:

`DatabaseFiles.verify` compares. It is asked inside each write transaction before the first statement, and once more
after the commit. If the log is gone, `renew` closes every connection that this process's stores have to the database
and lets them reconnect. A transaction in which nothing was written is then repeated; after a commit the caller gets
`StoreUnavailable`, by which the outcome is unknown, and repeats the write with its operation id. If the database itself
is gone, or a backup was copied over it after the log was deleted, every call is refused until the store is closed.

The **hold** keeps others from deleting the log at all. SQLite deletes it when the last connection closes, and detects
that by POSIX locks. But a process loses *all* its POSIX locks on a file when it closes *any* descriptor of it, also
that of ``open("shop.db").read()``. So SQLite's own descriptors get a second lock on the same bytes, which belongs to
the open file (Linux: `F_OFD_SETLK`) and is not lost that way. The same holds for the index, which SQLite empties when
it thinks that it is the first. Where there are no such locks, `verify` alone has to do.

Nothing here opens a descriptor: to close it again would lose those very locks. `fstat` on the descriptors that are
open anyway shows which files SQLite has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sqlite3
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from pathlib import Path
from typing import Protocol

from holdfast.errors import StoreUnavailable
from holdfast.store.contract import Observe, ignore
from holdfast.store.sqlite.checkpoints import was_checkpointed

Identity = tuple[int, int]  # device and inode

# By SQLite's file formats, each user of a database has a read lock on these bytes of it, and on this one of the index.
_SHARED_BYTES = (0x40000002, 510)  # while locked, the log is not deleted, and the journal mode stays
_DEADMAN_BYTE = (128, 1)  # while locked, the index is not taken for the rest of a crash and emptied
_WRITE_BYTE = "120"  # of the index; the writer has a write lock on it
_LOOK_SECONDS = 0.01
PATIENCE_OF_USERS_SECONDS = 1.0  # the others may wait for the user's own transaction


class FilesChanged(Exception):
    """The path does not name the files any more that a connection has open. Never leaves the store."""

    def __init__(self, *, database: bool, written: bool = False) -> None:
        super().__init__("the database is another one" if database else "the log is another one")
        self.database = database
        self.written = written  # something may have been committed, to an unknown file


class Log(Enum):
    """The state of the log that the connections have open."""

    NAMED = "the path names it"
    NEWEST = "the path names none; no process has connected since, so it has the newest state"
    STALE = "others go on without it, or that is unknown; the hold keeps SQLite from writing it back"
    ADRIFT = "others go on without it, or that is unknown, and there is no hold"
    FOREIGN = "the path names none, and the database was overwritten since; the hold keeps SQLite from writing it back"


class ConnectionOwner(Protocol):
    """A thread of a store, or its lock probe, with a connection to the database."""

    using: threading.Lock

    def close_connection(self, log: Log, *, wait: bool = True) -> None:
        """Close the connection. The caller has `using`. `wait`: for readers, if the log is written back."""


class DatabaseFiles:
    """Compare the files at a store's path with the open files of its connections."""

    def __init__(self, path: Path, named: Path, patience_seconds: float, observe: Observe = ignore) -> None:
        self.path = path
        self._named = str(named)  # by which the user knows it; a link may name another file tomorrow
        self._log, self._index = f"{path}-wal", f"{path}-shm"
        self._patience = patience_seconds
        self._observe = observe
        self._database: Identity | None = None  # as of the first connection
        self._seen: tuple[int, ...] | None = None  # devices and inodes of the three
        self._changed_at = (0, 0)  # time and size of the database when all was well
        self._is_held_up = False  # when it was last tried to connect
        self._is_overwritten = False  # when its log was last judged
        self._owners: list[ConnectionOwner] = []
        self._turn: AbstractContextManager[None] | None = None

    def begin(self, owners: list[ConnectionOwner], turn: AbstractContextManager[None]) -> None:
        """Take the owners of connections, and the turn that keeps two processes from closing theirs at one moment."""
        self._owners, self._turn, self._database = owners, turn, None
        with _registering:
            _watched.add(self)

    def forget(self) -> None:
        with _registering:
            _watched.discard(self)

    # --- connections come and go

    def before_connecting(self) -> None:
        """Wait while processes use an index whose log was deleted, until the last of them has written it back.

        To connect now would be to read the new, empty log by the old one's index. Raises `StoreUnavailable` if it
        takes too long, or if a connection of the user in this process is what has the old log or index.
        """
        self.verify()  # ours may be what has them
        if _unusable and _identity_or_none(self._named) in _unusable:
            raise StoreUnavailable(
                f"this process (pid {os.getpid()}) was forked while its parent used {self.path}, and has copies of the "
                "parent's connections, which SQLite would go on with. Nothing was written. Fork while the app is idle "
                "or before its first use, or start the child as a program of its own (spawn instead of fork)."
            )
        if _has_deleted(self._log, self._index) and _identity_or_none(self._named) in _open_files().values():
            raise self._kept_by_others()
        deadline = time.monotonic() + self._patience
        while self._is_headless():
            self._is_held_up = True
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{self._log} was deleted while other processes have {self.path} open (pids: "
                    f"{', '.join(map(str, _pids_of(self._index))) or 'unknown'}). "
                    "What they wrote last is in the deleted log. Stop them in an orderly way, then try again."
                )
            time.sleep(_LOOK_SECONDS)

    def _is_headless(self) -> bool:
        """Return True for an index that is in use without a log. SQLite makes the log before the index, and deletes it
        after that.
        """
        looks = (os.path.exists(self._log), os.path.exists(self._index), os.path.exists(self._log))
        if looks != (False, True, False):
            return False
        pids = _pids_of(self._index)
        if pids == [os.getpid()]:
            raise self._kept_by_others()
        return bool(pids)

    def writer(self) -> int | None:
        """Return the pid of the process that has the write lock. None if that is unknown."""
        return writer_of(self._index)

    def other_indexes_written_here(self) -> list[str]:
        """Return the names of other indexes on which this process has the write lock, and that may belong to an older
        file of this store. Indexes of other stores of this process, and of databases that are no store, are left out.
        """
        named = _identity_or_none(self._index)
        with _registering:
            stores = {files._seen[4:] for files in _watched if files._seen is not None and files is not self}
        others = [index for index in _written_here() if index != named and index not in stores]
        names = {identity: name for name, identity in _names_of_open_files() if identity in others}
        return [names.get(index, f"inode {index[1]}") for index in others if not _is_no_store(names.get(index, ""))]

    def needs_restart(self, *, by_children: bool) -> str:
        """See the contract. As of now: the process that has the deleted files may have closed them since."""
        with contextlib.suppress(StoreUnavailable):  # the system does not show it
            there = _identity_or_none(self._named)
            if self._is_overwritten or (None not in (there, self._database) and there != self._database):
                return f"{self._named} was replaced while this process (pid {os.getpid()}) has it open"
            if self._is_held_up and (found := self._who_has_deleted(by_children)):
                return (
                    f"{self._log} or {self._index} was deleted, and connections that user code has made (pid "
                    f"{', '.join(map(str, found))}) still use it"
                )
        return ""

    def _who_has_deleted(self, by_children: bool) -> list[int]:
        if _has_deleted(self._log, self._index):
            return [os.getpid()]
        is_headless = not os.path.exists(self._log) and os.path.exists(self._index)
        pids = _pids_of(self._index) if is_headless else []
        return [pid for pid in pids if pid == os.getpid() or (by_children and _is_descendant(pid))]

    def connected(self) -> None:
        """Remember the files of a connection that was just opened and has read once, and hold them."""
        database, log, index = map(_identity_or_none, (self._named, self._log, self._index))
        open_here = set(_open_files().values())
        if database is None or (open_here and database not in open_here) or database != (self._database or database):
            raise FilesChanged(database=True)
        if log is None or index is None or (open_here and not {log, index} <= open_here):
            raise self._kept_by_others()
        seen = (*database, *log, *index)
        if self._seen is not None and self._seen != seen:
            raise FilesChanged(database=False)
        self._database, self._seen = database, seen
        _hold(database, index, self._patience)
        self.verify()
        self._is_held_up = self._is_overwritten = False

    def _kept_by_others(self) -> StoreUnavailable:
        """Return the error: SQLite has one index per process and database, so a new connection gets the deleted one of
        the others.
        """
        self._is_held_up = True
        return StoreUnavailable(
            f"{self._log} or {self._index} was deleted, and other connections of this process (pid {os.getpid()}), or "
            f"those that it had when it was forked, to {self.path} still use it. Close them (dispose of a pool), or "
            "restart this process; what they write is lost."
        )

    def verify(self, *, written: bool = False) -> None:
        """Raise `FilesChanged` unless the path names what was there when the connections were opened.

        `written`: something may have been committed since the last call. Raises `StoreUnavailable` if `stat` fails: the
        connections stay, and may be valid when it works again.
        """
        if self._seen is None:
            return
        try:
            database, log, index = os.stat(self._named), os.stat(self._log), os.stat(self._index)
        except FileNotFoundError:
            raise FilesChanged(database=self._database_changed(), written=written) from None
        except OSError as error:
            raise _unreachable(self._named, error, written=written) from error
        found = (database.st_dev, database.st_ino, log.st_dev, log.st_ino, index.st_dev, index.st_ino)
        if found != self._seen:
            raise FilesChanged(database=found[:2] != self._seen[:2], written=written)
        self._changed_at = (database.st_mtime_ns, database.st_size)

    def refuse_changed(self) -> None:
        """Do as `verify`, for a user with their own connection.

        Before the user closes it and reconnects, the old log has to be written back: the new one would replace it.
        """
        try:
            self.verify()
        except FilesChanged as change:
            self.renew(change, patience_seconds=PATIENCE_OF_USERS_SECONDS)
            raise self.refused() from change
        if self._seen is None and self._database_changed():
            raise self._gone()

    def _database_changed(self) -> bool:
        return _identity_or_none(self._named) != self._database

    def _gone(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._named} was removed or replaced while this process (pid {os.getpid()}) has it open. "
            "Nothing is written to the old file any more. Restart what uses it; work that is only in the old file is "
            "lost with it."
        )

    def refused(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._log} or {self._index} was deleted or replaced while this process (pid {os.getpid()}) has it open. "
            f"Nothing was submitted. Roll back, close your own connections to {self.path} in this process (dispose of "
            "a pool), and reconnect: what they write is lost."
        )

    def uncertain(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._log} or {self._index} was deleted or replaced while this process (pid {os.getpid()}) wrote to "
            "it, so it is not known what became of this write. Ask for it, or repeat it with the same key."
        )

    def closing(self) -> Log:
        """Let go, before the last connection is closed."""
        self.forget()
        log = self._state_of_log()
        if self._database is not None and not _stores_of(self._database):
            _release(self._database, unlock=log in (Log.NAMED, Log.NEWEST))
        self._seen = None
        return log

    def _state_of_log(self) -> Log:
        try:
            self.verify()
        except FilesChanged as change:
            if change.database:
                return Log.NAMED  # SQLite sees by itself that the database was moved, and leaves everything alone
        except StoreUnavailable:
            return Log.STALE if self._database in _held else Log.ADRIFT  # the next process that opens it writes it back
        else:
            return Log.NAMED
        is_held = self._database in _held
        try:
            there = os.stat(self._named)
        except OSError:
            return Log.NAMED  # gone meanwhile
        # A process that connects makes a log, and cannot delete it while we hold the database. Without a hold it could.
        untouched = (there.st_mtime_ns, there.st_size) == self._changed_at
        if os.path.exists(self._log) or not (is_held or untouched):
            return Log.STALE if is_held else Log.ADRIFT
        return Log.NEWEST if untouched or self._was_checkpointed() else Log.FOREIGN

    def _was_checkpointed(self) -> bool:
        """Return whether a checkpoint has changed the database, and not a backup that was copied over it."""
        found, seen = {identity: descriptor for descriptor, identity in _open_files().items()}, self._seen
        assert seen is not None
        try:
            return was_checkpointed(found[seen[0], seen[1]], found[seen[2], seen[3]], found[seen[4], seen[5]])
        except (KeyError, OSError):  # closed meanwhile: what it was is unknown
            return False

    # --- what to do about a change

    def renew(self, change: FilesChanged, *, patience_seconds: float | None = None) -> None:
        """Close all connections that stores of this process have to the database, so that they reconnect.

        Raises `StoreUnavailable` if it is the database itself that is gone. With a patience, nothing is done if they
        are busy for longer, and no transaction is waited for: it may be the caller's own.
        """
        if change.database or self._database is None:
            raise self._gone() from change
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        with ExitStack() as stack:
            if not _wait_for(_renewing, deadline, stack):
                return
            stores = _stores_of(self._database)
            owners = [owner for files in stores for owner in files._owners]
            if not all(_wait_for(owner.using, deadline, stack) for owner in owners):
                return
            with contextlib.suppress(FilesChanged):
                self.verify()
                return  # another thread was faster
            if self._turn is not None:
                stack.enter_context(self._turn)  # two that close at once would each take the other for a reader
            log = self._state_of_log()
            if log is Log.FOREIGN:
                self._is_overwritten = True
                raise self._gone() from change
            self._report(log)
            _release(self._database, unlock=log in (Log.NAMED, Log.NEWEST))
            for files in stores:
                files._seen = None
                for owner in files._owners:
                    owner.close_connection(log, wait=patience_seconds is None)

    def _report(self, log: Log) -> None:
        seen, there = self._seen, _identity_or_none(self._log)
        if log is Log.NEWEST:
            why = f"{self._log} was deleted while this process has it open; it is written back, and restarted"
        elif seen is not None and there == seen[2:4]:
            why = f"{self._index} was deleted while this process has it open; it is rebuilt from the log"
        else:
            why = (
                f"{self._log} was replaced while this process has it open; what was only in the old one is lost, "
                "unless another process has written it back (see the warnings of the others)"
            )
            return self._observe("log_lost", {"why": why})
        self._observe("log_renewed", {"why": why})


_watched: weakref.WeakSet[DatabaseFiles] = weakref.WeakSet()
_registering = threading.Lock()
_renewing = threading.Lock()


def _stores_of(database: Identity) -> list[DatabaseFiles]:
    """Return the stores of this process that have that database open, always in the same order."""
    with _registering:
        return sorted((files for files in _watched if files._database == database), key=id)


def close_all_connections(patience_seconds: float) -> ExitStack:
    """Close the connections of all stores of this process, in an orderly way; none is made before the stack is closed.

    Connections of a store that is busy for too long stay, and so do those to files that have changed. A child that is
    forked then cannot use that database.
    """
    deadline, unused = time.monotonic() + patience_seconds, ExitStack()
    with _registering:
        databases = {files._database for files in _watched if files._database is not None}
    _left_open.clear()
    _left_open.update(databases)
    if not _wait_for(_renewing, deadline, unused):
        return unused
    for database in sorted(databases):
        stores = _stores_of(database)
        owners = [owner for files in stores for owner in files._owners]
        with ExitStack() as taken:
            if not all(_wait_for(owner.using, deadline, taken) for owner in owners):
                continue
            try:
                for files in stores:
                    files.verify()
            except (FilesChanged, StoreUnavailable):
                continue
            _release(database, unlock=True)
            for files in stores:
                files._seen = None
            for owner in owners:
                with contextlib.suppress(sqlite3.Error):  # it is gone all the same
                    owner.close_connection(Log.NAMED)
            unused.push(taken.pop_all())
            _left_open.discard(database)
    return unused


def _wait_for(lock: threading.Lock, deadline: float | None, taken: ExitStack) -> bool:
    if not lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
        return False
    taken.callback(lock.release)
    return True


def close(connection: sqlite3.Connection, log: Log, *, wait: bool = True) -> None:
    """Close a connection. Depending on the state of its log, write the log back or leave the database alone.

    Without `wait`, write back as far as other open transactions allow.
    """
    if log is Log.NEWEST:
        with contextlib.suppress(sqlite3.Error):  # also while other processes have it open
            _write_back(connection, wait=wait)
    if log is Log.ADRIFT:
        if not hasattr(connection, "setconfig"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # never closed, not even when the process ends
            return
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE)  # type: ignore[attr-defined]
    connection.close()


def _write_back(connection: sqlite3.Connection, *, wait: bool) -> None:
    """Write back what is committed. Readers of an older state have to be waited for. An open transaction is not
    acknowledged yet, and it may be the user's, which waits for us.
    """
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    for milliseconds in (0, patience) if wait else (0,):
        connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
        _, frames, written = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if frames == written:
            return


# --- the hold

_CAN_HOLD = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
_left_open: set[Identity] = set()  # databases with connections of ours at the last fork
_unusable: set[Identity] = set()  # those, in a child
_inherited: set[int] = set()  # descriptors of a forked child's parent: to unlock them here is to unlock them there
_held: set[Identity] = set()
_holding = threading.Lock()


def _hold(database: Identity, index: Identity, patience_seconds: float) -> None:
    """Lock all descriptors that SQLite has of the database and of the index.

    All, because ours and the user's look alike: SQLite even hands descriptors from one connection to another.
    """
    if not _CAN_HOLD:
        return
    deadline = time.monotonic() + patience_seconds
    with _holding:
        while True:
            try:
                if _lock(database, _SHARED_BYTES, fcntl.F_RDLCK) and _lock(index, _DEADMAN_BYTE, fcntl.F_RDLCK):
                    _held.add(database)
                return
            except (BlockingIOError, PermissionError):  # another process is closing or opening the database
                if time.monotonic() > deadline:
                    return
                time.sleep(_LOOK_SECONDS)


def _release(database: Identity, *, unlock: bool) -> None:
    """Release the hold. Without `unlock` it ends with the descriptors, so SQLite cannot write the log back when it
    closes them.
    """
    with _holding:
        _held.discard(database)
        if unlock and _CAN_HOLD:
            _lock(database, _SHARED_BYTES, fcntl.F_UNLCK)


def _lock(file: Identity, where: tuple[int, int], kind: int) -> bool:
    """Return whether the lock was taken. Raises `BlockingIOError` or `PermissionError` if another lock conflicts."""
    wish, done = struct.pack("hhqqi0q", kind, os.SEEK_SET, *where, 0), False
    for descriptor, identity in _open_files().items():
        if identity == file and descriptor not in _inherited:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wish)
                done = True
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise
                if error.errno != errno.EBADF:  # closed meanwhile
                    return False  # a file system without such locks
    return done


def _reset_in_child() -> None:
    global _holding, _registering, _renewing
    _holding, _registering, _renewing = threading.Lock(), threading.Lock(), threading.Lock()
    known = _held | {files._database for files in _watched}  # SQLite keeps some open for later connections
    _inherited.update(descriptor for descriptor, identity in _open_files().items() if identity in known)
    _unusable.update(_left_open)
    _held.clear()
    _watched.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


# --- what the system shows


def _identity_or_none(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreachable(path, error) from error
    return found.st_dev, found.st_ino


def _unreachable(path: str, error: OSError, *, written: bool = False) -> StoreUnavailable:
    """Return the error for a file of unknown state: a mount is away, or rights were changed."""
    became = "It is not known what became of this write. Ask for it, or repeat it with the same key."
    advice = "Is its disk there, and may this user enter its folder?"
    return StoreUnavailable(f"{path} cannot be reached: {error.strerror}. {became if written else advice}")


def _open_files() -> dict[int, Identity]:
    """Return the descriptors of this process. Empty where the system does not list them."""
    return dict(_each_open_file())


def _each_open_file() -> Iterator[tuple[int, Identity]]:
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            yield descriptor, (found.st_dev, found.st_ino)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except (OSError, ValueError):
        return []


_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def _has_deleted(*paths: str) -> bool:
    """Return whether this process has a deleted file of such a path open. False if the system does not show it."""
    deleted = {f"{path} (deleted)" for path in paths}
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{descriptor}") in deleted:
                return True
    return False


def _is_descendant(pid: int) -> bool:
    """Return whether this process, or a child of it, has started that process."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == os.getpid()


def _pids_of(path: str) -> list[int]:
    """Return the processes that have a POSIX lock on a file, as SQLite has on an index that it uses.

    From a list of the kernel, because to ask about a lock takes a descriptor.
    """
    return sorted({int(fields[4]) for fields in _locks_of(path)})


def writer_of(index: str) -> int | None:
    """Return the process that has the write lock of a database, by the path of its index. None if that is unknown."""
    found = [int(fields[4]) for fields in _locks_of(index) if fields[3] == "WRITE" and fields[6] == _WRITE_BYTE]
    return found[0] if found else None


def _written_here() -> set[Identity]:
    """Return the indexes on which this process has a write lock. Empty where the system does not list them."""
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return set()
    mine = [f for f in locks if f[1:2] == ["POSIX"] and f[3:5] == ["WRITE", str(os.getpid())] and f[6] == _WRITE_BYTE]
    inodes = {int(fields[5].rpartition(":")[2]) for fields in mine}
    return {identity for identity in _open_files().values() if identity[1] in inodes}


def _names_of_open_files() -> Iterator[tuple[str, Identity]]:
    for descriptor, identity in _each_open_file():
        with contextlib.suppress(OSError):
            yield os.readlink(f"{_DESCRIPTORS}/{descriptor}"), identity


def _is_no_store(index: str) -> bool:
    """Return whether the database of an index is certainly no store of Holdfast, by its own connection."""
    database = Path(index.removesuffix("-shm"))
    if not index.endswith("-shm") or not database.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'holdfast_meta'").fetchone()
    except sqlite3.Error:
        return False
    return found is None


def _locks_of(path: str) -> list[list[str]]:
    try:
        inode = os.stat(path).st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    found = (line.split() for line in lines if f":{inode} " in line and "POSIX" in line)
    return [fields for fields in found if fields[1] == "POSIX"]
