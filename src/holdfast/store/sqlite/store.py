"""The SQLite store: one file, several processes, every acknowledged write on the disk.

Atomic: each job of the writer thread is a function over one transaction (see `threads`), so reading a row, deciding and
writing it cannot be separated. After a crash between any two lines the transaction is not there, and no caller had an
answer. Cost: a submit, a claim and a settle are one transaction each, shared with all jobs that arrive while the
previous one is flushed; an idle claim writes nothing and flushes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, HoldfastError, StoreError, StoreReadOnly, StoreUnavailable
from holdfast.ids import InvocationId
from holdfast.model.log import Page
from holdfast.model.records import InvocationRecord, Piece, StoredPayload
from holdfast.store.contract import Ability, Backup, Finding, Observe
from holdfast.store.sqlite import entries, invocations, listing, logs, paths, payloads, quarantine, runners, schema
from holdfast.store.sqlite.backup import back_up
from holdfast.store.sqlite.files import DatabaseFiles
from holdfast.store.sqlite.hints import SocketHints
from holdfast.store.sqlite.inspection import connect_to_look, inspect
from holdfast.store.sqlite.quarantine import StoreConnection
from holdfast.store.sqlite.sessions import SqliteStepTransaction
from holdfast.store.sqlite.threads import ConnectionThread, WriterThread, WriteTurn, do_leniently, open_lock
from holdfast.store.sqlite.transaction import LockProbe, SqliteTransaction, joined

T = TypeVar("T")
P = ParamSpec("P")

_MAX_REPORTED = 10_000

_BESIDE_SECONDS = 0.2  # another process may be about to make the store


Job = Callable[Concatenate[StoreConnection, P], T]
Method = Callable[Concatenate["SqliteStore", P], Coroutine[Any, Any, T]]


def _written(job: Job[P, T]) -> Method[P, T]:
    """Make a method of the store from a job of the writer."""

    async def method(self: SqliteStore, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._write(job, *args, **named)

    return method


def _read_with_quarantine(job: Job[P, T]) -> Method[P, T]:
    """Make a method of the store from a job of the reader. Rows that cannot be read are set aside by the writer."""

    async def method(self: SqliteStore, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._read_or_quarantine(job, *args, **named)

    return method


class SqliteStore:
    """See `holdfast.store.contract.Store`."""

    abilities = Ability.MULTI_PROCESS | Ability.DURABLE | Ability.TRANSACTIONS | Ability.BATCHED_CLAIMS
    schema_version = schema.SCHEMA_VERSION

    def __init__(
        self, path: Path, *, clock: Clock, observe: Observe, synchronous: str, busy_timeout_seconds: float
    ) -> None:
        self._named = path.absolute()  # perhaps by a link
        self.path = path = paths.resolved(path)
        self._clock = clock
        self._observe = observe
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout_seconds
        self._writer: WriterThread | None = None
        self._reader: ConnectionThread | None = None
        self._turn: WriteTurn | None = None
        self._presence = -1
        self._files = DatabaseFiles(path, self._named, busy_timeout_seconds, observe)
        self._probe = LockProbe(self._files, self._connect, lambda: bool(self._writer and self._writer.is_writing))
        self._prepared = False
        self._hints: SocketHints | None = None
        self._reported: set[tuple[str, str]] = set()  # what was quarantined

    def now(self) -> float:
        return self._clock.now()

    def clock_error(self) -> float:
        return 0.0

    def needs_restart(self, *, by_children: bool = False) -> str:
        return self._files.needs_restart(by_children=by_children)

    # --- opening and closing

    async def open(self, session: object = None) -> None:
        if self._writer is not None:
            return
        paths.refuse_network_file_system(self.path)
        try:
            paths.refuse_planted_link(self._named, self.path)
            paths.create_file(self.path)
            for risk in paths.risks(self.path):
                self._observe("risk", {"why": risk})
        except OSError as error:
            raise StoreUnavailable(f"{self.path} cannot be reached: {error.strerror} ({error.filename}).") from error
        if isinstance(session, sqlite3.Connection) and session.in_transaction:
            await self._prepare_beside()
        folder = paths.side_folder(self.path)
        try:
            paths.make_side_folder(folder, self.path)
            self._turn = WriteTurn(folder)
            alone = self._be_present(folder)
        except OSError as error:
            await self.close()
            raise StoreUnavailable(
                f"{folder}, where processes take turns, cannot be used: {error.strerror} ({error.filename})."
            ) from error
        try:
            if alone and _was_left_open(self.path):
                # By a connection that cannot write: another one would write the log back, and empty it, on its way out.
                await self._look(_quick_check)
            self._writer = WriterThread("holdfast-sqlite-write", self._connect, self._turn, self._observe, self._files)
            self._reader = ConnectionThread("holdfast-sqlite-read", self._connect, self._files)
            self._files.begin([self._writer, self._reader, self._probe], self._turn)
            if not await self._read(lambda connection: schema.is_current(connection.raw)):  # needs no lock
                await self._write(lambda connection: schema.prepare(connection.raw))
        except BaseException:
            await self.close()
            raise
        self._prepared = True
        self._hints = SocketHints(folder)

    async def _prepare_beside(self) -> None:
        """Make the store if it is not there, without waiting for the lock that the caller's transaction may hold: the
        caller waits for us, so it could not let go of it.
        """
        wait = min(_BESIDE_SECONDS, self._busy_timeout)
        once = ConnectionThread("holdfast-sqlite-prepare", lambda: schema.connect_beside(self.path, wait))
        try:
            await do_leniently(once, schema.prepare_now)
        except StoreUnavailable as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            raise StoreUnavailable(
                f"the store in {self.path} has to be made first, or brought up to date, and that cannot be done while "
                "a transaction, most likely your own, holds the file's lock. Nothing was written. Run `holdfast store "
                "prepare` once, or call app.prepare() before the transaction begins."
            ) from error
        finally:
            once.stop()

    def _connect(self, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
        self._files.before_connecting()
        connection = schema.connect(
            self.path, synchronous=self._synchronous, busy_timeout_seconds=self._busy_timeout, factory=factory
        )
        try:
            self._files.connected()
            if self._prepared and not schema.still_there(connection):
                raise StoreUnavailable(
                    f"the tables of {self.path} are gone: they were in a log that was deleted or replaced. "
                    "Restore a backup; or restart this process, and it makes new ones."
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _be_present(self, folder: Path) -> bool:
        """Hold a shared lock for as long as the store is open. Return True if no other process held it."""
        self._presence = open_lock(folder / "presence.lock")
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        fcntl.flock(self._presence, fcntl.LOCK_SH)
        return alone

    async def close(self) -> None:
        writer, reader, turn = self._writer, self._reader, self._turn
        self._writer = self._reader = self._turn = None
        if self._hints is not None:
            await self._hints.close()
            self._hints = None
        self._probe.stop()
        for thread in (reader, writer):
            if thread is not None:
                thread.stop()
        self._files.forget()
        self._prepared = False
        if turn is not None:
            turn.close()
        if self._presence >= 0:
            os.close(self._presence)
            self._presence = -1

    # --- the way to the file

    async def _write(self, job: Job[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await self._run(self._writer, job, *args, **named)

    async def _read(self, job: Job[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await self._run(self._reader, job, *args, **named)

    async def _run(self, thread: ConnectionThread | None, job: Job[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run a job. Where a value of another type stops it, set rows with such values aside and run it again."""
        if thread is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        work = self._job(thread, job, *args, **named)
        try:
            return await do_leniently(thread, work)
        except HoldfastError:
            raise
        except Exception:
            writer = self._writer
            if writer is None or not await do_leniently(writer, self._job(writer, quarantine.quarantine_misfits)):
                raise
        return await do_leniently(thread, work)

    def _job(
        self, thread: ConnectionThread, job: Job[P, T], *args: P.args, **named: P.kwargs
    ) -> Callable[[sqlite3.Connection], T]:
        def run(raw: sqlite3.Connection) -> T:
            may_write = isinstance(thread, WriterThread)
            return job(StoreConnection(raw, self.now(), self._report, may_write=may_write), *args, **named)

        return run

    async def _read_or_quarantine(self, job: Job[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Read. If a row cannot be read, run the job once more on the writer, which sets the row aside."""
        try:
            return await self._read(job, *args, **named)
        except CorruptRecord as error:
            try:
                return await self._write(job, *args, **named)
            except StoreReadOnly:  # this user may not
                raise error from None

    def _report(self, event: str, error: CorruptRecord) -> None:
        if event == "quarantine":  # once, though the transaction may be tried again
            if (error.kind, error.id) in self._reported or len(self._reported) >= _MAX_REPORTED:
                return
            self._reported.add((error.kind, error.id))
        self._observe(event, {"kind": error.kind, "id": error.id, "why": str(error)})

    def joined(self, session: object) -> SqliteTransaction:
        return joined(session, self.path, self._clock, self._files, self._probe)

    def transaction(self, *, is_async: bool, owner: str = "") -> SqliteStepTransaction:
        folder = paths.side_folder(self.path)
        return SqliteStepTransaction(self._connect, lambda: WriteTurn(folder), is_async=is_async)

    async def abort_transactions(self, owners: Collection[str]) -> int:
        return 0  # a transaction ends with its process

    def hints(self) -> SocketHints | None:
        return self._hints

    # --- each method is a job of the writer, or of the reader

    insert = _written(invocations.insert)
    claim = _written(invocations.claim)
    apply = _written(invocations.apply)
    release_waiters = _written(invocations.release_waiters)
    remove_ended = _written(invocations.remove_ended)
    remove_expired = _written(invocations.remove_expired)
    find_conflicts = _read_with_quarantine(invocations.find_conflicts)
    find = _read_with_quarantine(listing.find)
    lanes = _read_with_quarantine(invocations.lanes)
    waiting_keys = _read_with_quarantine(invocations.waiting_keys)
    owners = _read_with_quarantine(invocations.owners)
    apps = _read_with_quarantine(invocations.apps)
    counts = _read_with_quarantine(invocations.counts)
    queue_depths = _read_with_quarantine(invocations.queue_depths)

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        return await self._read(invocations.get, app, ids)

    def insert_blocking(self, records: Sequence[InvocationRecord], committed: Callable[[], object]) -> Sequence[bool]:
        if self._writer is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return self._writer.do_blocking(self._job(self._writer, invocations.insert, records), committed)

    append = _written(logs.append)
    remove_log = _written(logs.remove_log)

    async def read_log(self, app: str, run: InvocationId, **where: Any) -> Sequence[Page]:
        return await self._read(logs.read_log, app, run, **where)

    put_entry = _written(entries.put_entry)
    remove_entry = _written(entries.remove_entry)
    quarantine_entry = _written(entries.quarantine_entry)
    entries = _read_with_quarantine(entries.entries)

    keep_payloads = _written(payloads.keep_payloads)
    put_piece = _written(payloads.put_piece)
    put_payloads = _written(payloads.put_payloads)
    collect_payloads = _written(payloads.collect_payloads)

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        try:
            return await self._read(payloads.get_payload, app, digest)
        except CorruptRecord as error:
            await self._quarantine_payload(app, digest, 0, error)
            raise

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        try:
            return await self._read(payloads.get_piece, app, digest, number)
        except CorruptRecord as error:
            await self._quarantine_payload(app, digest, number, error)
            raise

    async def _quarantine_payload(self, app: str, digest: str, number: int, error: CorruptRecord) -> None:
        with contextlib.suppress(StoreReadOnly):
            await self._write(payloads.quarantine_payload, app, digest, number, error)

    enrol = _written(runners.enrol)
    heartbeat = _written(runners.heartbeat)
    ask_runner = _written(runners.ask_runner)
    remove_runner = _written(runners.remove_runner)
    silent = _read_with_quarantine(runners.silent)
    roster = _read_with_quarantine(runners.roster)

    quarantined = _read_with_quarantine(quarantine.quarantined)
    quarantine_hidden = _read_with_quarantine(quarantine.quarantine_hidden)

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        def look(connection: sqlite3.Connection) -> list[Finding]:
            return inspect(connection, self.path, self._synchronous, deep=deep, observe=self._observe)

        if self._reader is not None:
            return await self._read(lambda connection: look(connection.raw))
        paths.refuse_network_file_system(self.path)
        return await self._look(look)

    async def sizes(self) -> Mapping[str, int]:
        """Return the bytes of the file, and of its log."""
        files = {"file": self.path, "log": self.path.with_name(self.path.name + "-wal")}
        return {name: file.stat().st_size for name, file in files.items() if file.exists()}

    async def backup(self, target: Path, *, overwrite: bool = False) -> Backup:
        """Copy the store to a file, as it is at one moment, while others use it. Needs no `open`.

        Raises: `UsageError` if something is there already, `StoreFull`, `StoreError` if the store is damaged.
        """
        return await self._look(lambda connection: back_up(connection, self.path, target, overwrite=overwrite))

    async def _look(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job on its own connection, which cannot write."""
        reader = ConnectionThread("holdfast-sqlite-check", lambda: connect_to_look(self.path, self._busy_timeout))
        try:
            return await do_leniently(reader, job)
        finally:
            reader.stop()


# --- a file that was not closed


def _was_left_open(path: Path) -> bool:
    """Return whether a log lies beside the file, though no process has it open: the last one did not close it."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def _quick_check(connection: sqlite3.Connection) -> None:
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise StoreError(
            f"the file was not closed cleanly and is damaged: {'; '.join(problems)}. "
            "It was not touched. Keep a copy, look with `holdfast store check`, and restore a backup."
        )
