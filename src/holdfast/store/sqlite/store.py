"""The SQLite store: one file, several processes, every acknowledged write on the disk.

What is atomic: each job of the writer thread is a function over one transaction (see `threads`), so reading a row,
deciding and writing it cannot be separated. What happens on a crash between any two lines: the transaction is not
there, and nobody was told that it is. What it costs: a submit, a claim and a settle are one transaction each, shared
with whatever else gathered while the previous one was flushed; an idle claim writes nothing and flushes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, HoldfastError, StoreError, StoreReadOnly, StoreUnavailable
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import Change, Verdict
from holdfast.lifecycle.claims import Claim, Claimed
from holdfast.lifecycle.limits import Release, slot_range
from holdfast.lifecycle.queues import QueueDepth, QueuePause
from holdfast.lifecycle.records import (
    Collected,
    Entry,
    InvocationRecord,
    Piece,
    Quarantined,
    RunnerRecord,
    StoredPayload,
    WorkerRecord,
)
from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Ability, Backup, Ended, Filter, Finding, Observe
from holdfast.store.sqlite import (
    archive,
    aside,
    entries,
    executions,
    jobs,
    listing,
    payloads,
    queries,
    queues,
    schema,
    surroundings,
)
from holdfast.store.sqlite.backup import back_up
from holdfast.store.sqlite.files import DatabaseFiles
from holdfast.store.sqlite.hints import SocketHints
from holdfast.store.sqlite.inspection import connect_to_look, inspect
from holdfast.store.sqlite.lenient import do_leniently
from holdfast.store.sqlite.probe import LockProbe
from holdfast.store.sqlite.rows import from_row, runner_of, runner_row
from holdfast.store.sqlite.threads import ConnectionThread, WriterThread
from holdfast.store.sqlite.transaction import SqliteTransaction, joined
from holdfast.store.sqlite.turn import Turn, open_lock

T = TypeVar("T")

_MOST_TOLD = 10_000
_KNOWN = frozenset(status.value for status in Status)

_BESIDE_SECONDS = 0.2  # another process may be about to make the store


class SqliteStore:
    """See `holdfast.store.contract.Store`."""

    abilities = Ability.MULTI_PROCESS | Ability.DURABLE | Ability.TRANSACTIONS
    schema_version = schema.SCHEMA_VERSION

    def __init__(
        self, path: Path, *, clock: Clock, observe: Observe, synchronous: str, busy_timeout_seconds: float
    ) -> None:
        self._named = path.absolute()  # perhaps by a link
        self.path = path = surroundings.resolved(path)
        self._clock = clock
        self._observe = observe
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout_seconds
        self._writer: WriterThread | None = None
        self._reader: ConnectionThread | None = None
        self._turn: Turn | None = None
        self._probe = LockProbe(path, self._connect, lambda: self._writer is not None and self._writer.is_writing)
        self._presence = -1
        self._files = DatabaseFiles(path, self._named, busy_timeout_seconds, observe)
        self._prepared = False
        self._hints: SocketHints | None = None
        self._told: set[tuple[str, str]] = set()

    def now(self) -> float:
        return self._clock.now()

    def clock_error(self) -> float:
        return 0.0

    # --- opening and closing

    async def open(self, beside: object = None) -> None:
        if self._writer is not None:
            return
        schema.refuse_network_file_system(self.path)
        try:
            surroundings.refuse_planted_link(self._named, self.path)
            surroundings.create_file(self.path)
            for risk in surroundings.risks(self.path):
                self._observe("risk", {"why": risk})
        except OSError as error:
            raise StoreUnavailable(f"{self.path} cannot be reached: {error.strerror} ({error.filename}).") from error
        if isinstance(beside, sqlite3.Connection) and beside.in_transaction:
            await self._prepare_beside()
        folder = surroundings.side_folder(self.path)
        try:
            surroundings.make_side_folder(folder, self.path)
            self._turn = Turn(folder)
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
        except BaseException:
            await self.close()
            raise
        self._writer = WriterThread("holdfast-sqlite-write", self._connect, self._turn, self._observe, self._files)
        self._reader = ConnectionThread("holdfast-sqlite-read", self._connect, self._files)
        self._files.begin([self._writer, self._reader, self._probe], self._turn)
        try:
            if not await self._read(schema.is_current):  # to look needs no lock, which somebody may hold for long
                await self._write(schema.prepare)
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
            raise StoreUnavailable(
                f"the store in {self.path} has to be made first, or brought up to date, and that cannot be done while "
                "your own transaction holds the file's lock. Run `holdfast store prepare` once, or use the app once "
                f"before the transaction begins (app.invocations(limit=1)). Nothing was written. ({error})"
            ) from error
        finally:
            once.stop()

    def _connect(self) -> sqlite3.Connection:
        self._files.before_connecting()
        connection = schema.connect(self.path, synchronous=self._synchronous, busy_timeout_seconds=self._busy_timeout)
        try:
            self._files.connected()
            if self._prepared and not schema.is_current(connection):
                raise StoreUnavailable(
                    f"the tables of {self.path} are gone: they were in a log that was deleted or replaced. "
                    "Restore a backup; or restart this process, and it makes new ones."
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _be_present(self, folder: Path) -> bool:
        """Hold a shared lock for as long as the store is open. True if nobody else did."""
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

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._writer is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return await self._mended(self._writer, job)

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._reader is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return await self._mended(self._reader, job)

    async def _mended(self, thread: ConnectionThread, job: Callable[[sqlite3.Connection], T]) -> T:
        """Where a value of another type stops a job, rows with such values are set aside, and the job runs again."""
        try:
            return await do_leniently(thread, job)
        except HoldfastError:
            raise
        except Exception:
            if self._writer is None or not await do_leniently(
                self._writer, lambda connection: aside.misfits(connection, self._set_aside)
            ):
                raise
        return await do_leniently(thread, job)

    async def _tended(self, job: Callable[[sqlite3.Connection, aside.SetAside | None], T]) -> T:
        """Read. If something cannot be read, do the same once more as a write, which sets it aside."""
        try:
            return await self._read(lambda connection: job(connection, None))
        except CorruptRecord as error:
            try:
                return await self._write(lambda connection: job(connection, self._set_aside))
            except StoreReadOnly:  # this user may not
                raise error from None

    def joined(self, session: object) -> SqliteTransaction:
        return joined(session, self.path, self._clock, self._files, self._probe)

    def hints(self) -> SocketHints | None:
        return self._hints

    # --- the contract

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        return await self._write(lambda connection: [jobs.insert(connection, record) for record in records])

    async def in_the_way(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        return await self._tended(
            lambda connection, set_aside: [jobs.in_the_way(connection, record, set_aside) for record in records]
        )

    async def free_key(self, app: str, id: str, key: str) -> None:
        await self._write(lambda connection: connection.execute(queries.FREE_KEY, (app, id, key)))

    async def claim(self, claim: Claim) -> Claimed:
        return await self._write(lambda connection: jobs.claim(connection, claim, self._set_aside))

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        def release(connection: sqlite3.Connection) -> list[InvocationRecord]:
            released = [jobs.release_waiters(connection, app, wish, operation, at, self._set_aside) for wish in wishes]
            return [record for some in released for record in some]

        return await self._write(release)

    async def waiting_keys(self, app: str) -> Mapping[str, int]:
        rows = await self._read(lambda connection: connection.execute(queries.WAITING_KEYS, {"app": app}).fetchall())
        return {key: held for key, held in rows if type(key) is str}

    async def slot_holders(self, app: str, limit_key: str) -> Sequence[InvocationRecord]:
        values = (app, *slot_range(limit_key), limit_key)
        rows = await self._read(lambda connection: connection.execute(queries.SLOT_HOLDERS, values).fetchall())
        return [record for record in map(self._readable, rows) if record is not None]

    async def start_limits(self, app: str, limit: int) -> Sequence[InvocationRecord]:
        return await self._tended(
            lambda connection, set_aside: aside.readable(
                *(connection, aside.INVOCATIONS, queries.START_BY, (app, limit)),
                *(lambda row: from_row(row[1:]), set_aside),
            )
        )

    async def lanes(self, app: str) -> Sequence[str]:
        heads = await self._read(lambda connection: connection.execute(queries.HEADS, {"app": app}).fetchall())
        return sorted({lane for lane, _ in heads if type(lane) is str})

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        return await self._write(lambda connection: jobs.apply(connection, changes, self._set_aside))

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        rows = await self._read(lambda connection: jobs.rows_by_id(connection, app, ids))
        found = {row[queries.ID_COLUMN]: from_row(row) for row in rows}
        return [found.get(id) for id in ids]

    async def find(self, app: str, where: Filter, limit: int, *, set_aside: bool = False) -> Sequence[InvocationRecord]:
        if set_aside:
            return await self._tended(lambda connection, aside: listing.found(connection, app, where, limit, aside))
        return await self._read(lambda connection: listing.found(connection, app, where, limit, self._leave_out))

    def _readable(self, row: Sequence[object]) -> InvocationRecord | None:
        try:
            return from_row(row)
        except CorruptRecord as error:
            self._observe("unreadable", {"kind": error.kind, "id": error.id, "why": str(error)})
            return None

    def _leave_out(self, connection: object, table: object, row: object, error: CorruptRecord) -> None:
        self._observe("unreadable", {"kind": error.kind, "id": error.id, "why": str(error)})

    async def counts(self, app: str) -> Mapping[Status, int]:
        rows = await self._read(lambda connection: connection.execute(queries.COUNTS, (app,)).fetchall())
        return {Status(name): count for name, count in rows if name in _KNOWN}

    async def queue_depths(self, app: str, at: float) -> Sequence[QueueDepth]:
        return await self._read(lambda connection: queues.depths(connection, app, at))

    async def pause_queue(self, pause: QueuePause) -> QueuePause | None:
        return await self._write(lambda connection: queues.pause(connection, pause, self._set_aside))

    async def resume_queue(self, app: str, name: str, operation: str) -> bool:
        return await self._write(lambda connection: queues.resume(connection, app, name, operation, self._set_aside))

    async def pauses(self, app: str) -> Sequence[QueuePause]:
        return await self._tended(lambda connection, set_aside: queues.pauses(connection, app, set_aside))

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        return await self._write(lambda connection: payloads.keep(connection, app, digests, self.now()))

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        await self._write(lambda connection: payloads.put_piece(connection, app, digest, number, piece, self.now()))

    async def put_payloads(self, app: str, stored: Sequence[StoredPayload]) -> None:
        await self._write(lambda connection: payloads.put(connection, app, stored, self.now()))

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        try:
            return await self._read(lambda connection: payloads.get(connection, app, digest))
        except CorruptRecord as error:
            await self._give_up(app, digest, 0, error)
            raise

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        try:
            return await self._read(lambda connection: payloads.get_piece(connection, app, digest, number))
        except CorruptRecord as error:
            await self._give_up(app, digest, number, error)
            raise

    async def _give_up(self, app: str, digest: str, number: int, error: CorruptRecord) -> None:
        with contextlib.suppress(StoreReadOnly):
            await self._write(
                lambda connection: payloads.give_up(connection, app, digest, number, error, self._set_aside)
            )

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        return await self._write(lambda connection: payloads.collect(connection, app, before, limit, self.now()))

    async def enrol(self, runner: RunnerRecord) -> None:
        await self._write(lambda connection: connection.execute(queries.ENROL, runner_row(runner)))

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        facts = {
            "heartbeat_at": self.now(),
            "workers": tuple(workers),
            "can_run_atomic_service": ticks,
            "draining": draining,
        }
        return await self._write(
            lambda connection: jobs.alter_runner(connection, app, runner_id, facts, self._set_aside)
        )

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        found = await self._runners(queries.SILENT, app)
        return [(runner, self.now() - runner.heartbeat_at) for runner in found]

    async def _runners(self, query: str, app: str) -> list[RunnerRecord]:
        return await self._tended(
            lambda connection, set_aside: aside.readable(connection, aside.RUNNERS, query, (app,), runner_of, set_aside)
        )

    async def declare_dead(self, runner: RunnerRecord) -> bool:
        values = (runner.app, runner.id, runner.heartbeat_at)
        return await self._write(lambda connection: connection.execute(queries.DECLARE_DEAD, values).rowcount > 0)

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        asked = {"wish": wish, "sits_out_until": sits_out_until}
        facts = {name: value for name, value in asked.items() if value is not None}
        return await self._alter_runner(app, runner_id, facts) is not None

    async def _alter_runner(self, app: str, id: str, facts: Mapping[str, object]) -> RunnerRecord | None:
        return await self._write(lambda connection: jobs.alter_runner(connection, app, id, facts, self._set_aside))

    async def owners(self, app: str) -> Sequence[str]:
        rows = await self._read(lambda connection: connection.execute(queries.OWNERS, (app,)).fetchall())
        return sorted({owner for (owner,) in rows if type(owner) is str})

    async def leave(self, app: str, runner_id: str) -> None:
        await self._write(lambda connection: connection.execute(queries.LEAVE, (app, runner_id)))

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        return sorted(await self._runners(queries.ROSTER, app), key=lambda runner: (runner.started_at, runner.id))

    async def put_execution(self, app: str, execution: Execution) -> Execution | None:
        return await self._write(lambda connection: executions.put(connection, app, execution, self._set_aside))

    async def end_execution(self, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
        return await self._write(lambda connection: executions.end(connection, app, id, status, at, reason))

    async def executions(self, app: str, service: str, limit: int) -> Sequence[Execution]:
        return await self._tended(
            lambda connection, set_aside: executions.listing(connection, app, service, limit, set_aside)
        )

    async def forget_executions(self, app: str, ids: Sequence[str]) -> None:
        await self._write(lambda connection: executions.forget(connection, app, ids))

    async def remove_final(self, app: str, before: float, limit: int) -> int:
        return await self._write(lambda connection: archive.remove_final(connection, app, before, limit))

    async def ended(self, app: str, where: Ended, limit: int) -> Sequence[InvocationRecord]:
        rows = await self._read(lambda connection: archive.ended(connection, app, where, limit))
        return [record for record in map(self._readable, rows) if record is not None]

    async def outboxes(self, app: str, before: float, limit: int) -> Sequence[InvocationRecord]:
        return await self._tended(
            lambda connection, set_aside: archive.outboxes(connection, app, before, limit, set_aside)
        )

    async def delivered(self, app: str, ids: Sequence[InvocationId]) -> None:
        await self._write(lambda connection: archive.delivered(connection, app, ids))

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        return await self._write(lambda connection: archive.remove_ended(connection, app, ids))

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        return await self._write(lambda connection: archive.remove_expired(connection, app, at, limit))

    async def retain_old(self, app: str, after: str, limit: int) -> str | None:
        return await self._write(lambda connection: archive.retain_old(connection, app, after, limit))

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        return await self._write(lambda connection: entries.put(connection, entry, over, self._set_aside))

    async def entries(self, app: str, kind: str, names: Sequence[str] | None = None) -> Sequence[Entry]:
        return await self._tended(
            lambda connection, set_aside: entries.listing(connection, app, kind, names, set_aside)
        )

    async def due_entries(self, app: str, kind: str, limit: int) -> Sequence[Entry]:
        return await self._tended(lambda connection, set_aside: entries.due(connection, app, kind, limit, set_aside))

    async def latest_entries(self, app: str, kind: str, limit: int, before: str | None = None) -> Sequence[Entry]:
        return await self._tended(
            lambda connection, set_aside: entries.latest(connection, app, kind, limit, before, set_aside)
        )

    async def remove_entry(self, entry: Entry) -> bool:
        return await self._write(lambda connection: entries.remove(connection, entry))

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        return await self._write(lambda connection: entries.put_aside(connection, entry, error, self._set_aside))

    async def quarantined(self, app: str) -> Sequence[Quarantined]:
        rows = await self._read(lambda connection: connection.execute(queries.QUARANTINED, (app,)).fetchall())
        return [aside.quarantined(row) for row in rows]

    async def quarantine_hidden(self, app: str) -> int:
        return await self._tended(lambda connection, set_aside: aside.hidden(connection, app, set_aside))

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        def look(connection: sqlite3.Connection) -> list[Finding]:
            return inspect(connection, self.path, self._synchronous, deep=deep)

        if self._reader is not None:
            return await self._read(look)
        schema.refuse_network_file_system(self.path)
        return await self._look(look)

    async def backup(self, target: Path, *, overwrite: bool = False) -> Backup:
        """Copy the store to a file, as it is at one moment, while others use it. Needs no `open`.

        Raises: `UsageError` if something is there already, `StoreFull`, `StoreError` if the store is damaged.
        """
        return await self._look(lambda connection: back_up(connection, self.path, target, overwrite=overwrite))

    async def _look(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """By a connection for this once, which cannot write."""
        reader = ConnectionThread("holdfast-sqlite-check", lambda: connect_to_look(self.path, self._busy_timeout))
        try:
            return await do_leniently(reader, job)
        finally:
            reader.stop()

    def _set_aside(
        self, connection: sqlite3.Connection, table: aside.Table, row: Sequence[object], error: CorruptRecord
    ) -> None:
        """Move a row that cannot be read out of the way, whole, in the same transaction."""
        aside.set_aside(connection, table, row, error, self.now())
        if (error.kind, error.id) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((error.kind, error.id))  # the transaction may be tried again
            self._observe("quarantine", {"kind": error.kind, "id": error.id, "why": str(error)})


# --- the file's surroundings


def _was_left_open(path: Path) -> bool:
    """A log beside the file, and nobody who has it open: the last process did not close it."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def _quick_check(connection: sqlite3.Connection) -> None:
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise StoreError(
            f"the file was not closed cleanly and is damaged: {'; '.join(problems)}. "
            "It was not touched. Keep a copy, look with `holdfast store check`, and restore a backup."
        )
