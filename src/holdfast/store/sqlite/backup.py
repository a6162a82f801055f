"""A copy of a SQLite store, made while it is used.

SQLite's own backup, in one step: it reads the file as it was at one moment. In WAL mode no writer waits for it; only
the log grows meanwhile. (In several steps it would start over with each write, and never end under load.)

The copy is made beside its target, for this user alone, and is read whole and checked. Only then it gets its name, so
there is never half a backup under that name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

from holdfast.errors import StoreError, StoreFull, UsageError
from holdfast.store.contract import Backup
from holdfast.store.sqlite import schema

_LOGS = ("-wal", "-journal", "-shm")


def back_up(source: sqlite3.Connection, path: Path, target: Path, *, overwrite: bool) -> Backup:
    """Copy the store at `path`, which `source` reads, to the file `target`."""
    _refuse(path, target, overwrite)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        made = _copy(source, part)
        _flush(part)
        _name(part, target, overwrite)
        _flush(target.parent)
        return made
    except FileExistsError as error:
        raise _there(target) from error
    except OSError as error:
        kind = StoreFull if error.errno == errno.ENOSPC else StoreError
        raise kind(f"the backup {target} could not be written: {error.strerror}. Nothing was left there.") from error
    finally:
        for name in ("", *_LOGS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{part}{name}")


def _name(part: Path, target: Path, overwrite: bool) -> None:
    """Name the copy. A link, unlike a rename, fails if the file exists by now; not every file system has links."""
    try:
        if not overwrite:
            return os.link(part, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.replace(part, target)


def _refuse(path: Path, target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"the folder {target.parent} of the backup does not exist. Create it first.")
    if target.is_dir():
        raise UsageError(f"{target} is a folder; a backup is a file.")
    if target.exists() and target.samefile(path):
        raise UsageError(f"{target} is the store itself.")
    if target.exists() and not overwrite:
        raise _there(target)
    if any(Path(f"{target}{name}").exists() for name in _LOGS):
        raise UsageError(
            f"there is a log beside {target}: another process has or had that file open as a database, and its log "
            "would be taken for the backup's. Give another name."
        )


def _there(target: Path) -> UsageError:
    return UsageError(f"{target} is there already and was not touched. Give another name, or --overwrite.")


def _copy(source: sqlite3.Connection, part: Path) -> Backup:
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode = OFF")  # an unfinished copy is removed as a whole
        copy.execute("PRAGMA synchronous = OFF")  # it is flushed at the end
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # so that it is one file
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        problems = [row[0] for row in copy.execute("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            raise StoreError(f"the store is damaged, and so would be its backup: {'; '.join(problems)}. None was left.")
        version = schema.stored_version(copy)
        if version is None:
            raise UsageError("there is no store in that file, only tables of others; nothing was left")
        (count,) = copy.execute("SELECT count(*) FROM holdfast_invocations").fetchone()
    return Backup(size=part.stat().st_size, invocations=count, schema_version=version[0])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
