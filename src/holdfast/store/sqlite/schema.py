"""The tables, and the checks before a file is trusted.

All names begin with ``holdfast_``, so that the tables can live in a file that an application uses for its own data.
The schema has a version, and the lowest version of Holdfast that may read it (`min_reader`): version N and N + 1 work
on one file during a rolling deploy, and anything else is refused before it can do harm.

A migration is a list of statements and functions that lead from one version to the next; all run in one transaction.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import SchemaMismatch, StoreUnavailable
from holdfast.model.decoding import shown
from holdfast.model.records import Entry
from holdfast.model.status import AVAILABLE, FINAL, Status
from holdfast.store.migration import entries_of_executions, entry_of_pause, kept_until

SCHEMA_VERSION = 8
MIN_READER = 6  # older versions would end a run without its compensation, and leave its log behind
_HIGHEST = 1_000_000
# STRICT tables: a value of the wrong type is refused when it is written, not when it is read
OLDEST_SQLITE = (3, 37, 0)
CHECKPOINT_PAGES = (
    4000  # 16 MB of log: a row is written three times in its life, so a longer log copies it back less often
)


def status_list(statuses: frozenset[Status]) -> str:
    """Return statuses as an SQL list.

    Sorted, because a partial index is used only by queries that repeat its condition to the letter.
    """
    return ", ".join(f"'{status}'" for status in sorted(statuses))


READY = f"status IN ({status_list(AVAILABLE)})"
WAITING = f"status = '{Status.CONCURRENCY_CONTROLLED}'"
ENDED = f"status IN ({status_list(FINAL)})"


def _move_to_entries(connection: sqlite3.Connection) -> None:
    """Turn pauses of queues and executions of services into entries."""
    queues = _rows(connection, "holdfast_queues")
    moved = [*map(entry_of_pause, queues), *entries_of_executions(_rows(connection, "holdfast_executions"))]
    columns = Entry.__struct_fields__[:7]  # as they were then
    statement = f"INSERT OR IGNORE INTO holdfast_entries ({', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?, ?)"
    connection.executemany(statement, [msgspec.structs.astuple(entry)[:7] for entry in moved])


def _rows(connection: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    if not _has_table(connection, table):
        return []
    cursor = connection.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _retain_old(connection: sqlite3.Connection) -> None:
    """Store how long invocations are kept that ended under an older version."""
    query = f"SELECT rowid, status, key, terms, changed_at FROM holdfast_invocations WHERE {ENDED}"
    steps = []
    for rowid, status, key, terms, changed_at in connection.execute(f"{query} AND retain_until IS NULL"):
        try:
            agreed = None if terms is None else json.loads(terms)
        except ValueError:
            agreed = terms  # the next reader of the whole row finds the damage
        steps.append((kept_until(status, key, agreed, changed_at), rowid))
    connection.executemany("UPDATE holdfast_invocations SET retain_until = ? WHERE rowid = ?", steps)


Step = str | Callable[[sqlite3.Connection], None]


def _added(*columns: str) -> list[Step]:
    return [f"ALTER TABLE holdfast_invocations ADD COLUMN {column}" for column in columns]


def _each_attribute(row: str) -> str:
    """Return the attributes of a row, one by one; none of a damaged text."""
    whole = f"CASE WHEN json_valid({row}.attributes) THEN {row}.attributes ELSE '{{}}' END"
    return f"SELECT {row}.app, key, value, {row}.id FROM json_each({whole}) WHERE type = 'text' AND key IS NOT NULL"


_attributes_in = f"INSERT OR IGNORE INTO holdfast_attributes {_each_attribute('new')};"
_attributes_out = f"DELETE FROM holdfast_attributes WHERE (app, name, value, id) IN ({_each_attribute('old')});"

# By what an entry refers to a payload: no id of an invocation has a colon.
_referring = "'entry:' || {row}.kind || '|' || {row}.name"
_referred_in = f"""
INSERT OR IGNORE INTO holdfast_payload_references (app, digest, id)
SELECT new.app, value, {_referring.format(row="new")}
FROM json_each(CASE WHEN json_valid(new.payloads) THEN new.payloads ELSE '[]' END) WHERE type = 'text';
"""
_referred_out = f"""
DELETE FROM holdfast_payload_references WHERE app = old.app AND id = {_referring.format(row="old")};
"""

# Tables that version 5 removes are not made any more.
MIGRATIONS: dict[int, list[Step]] = {
    1: [
        "CREATE TABLE holdfast_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
        """
        CREATE TABLE holdfast_invocations (
            app TEXT NOT NULL, id TEXT NOT NULL, task TEXT NOT NULL, queue TEXT NOT NULL,
            tags TEXT NOT NULL, lane TEXT NOT NULL, rank INTEGER NOT NULL, status TEXT NOT NULL,
            owner TEXT, epoch INTEGER NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL,
            created_at REAL NOT NULL, due_at REAL NOT NULL, changed_at REAL NOT NULL, claim_token TEXT,
            fingerprint TEXT, parent_id TEXT, reason TEXT NOT NULL, arguments BLOB NOT NULL, result BLOB,
            error TEXT, history TEXT NOT NULL
        ) STRICT
        """,
        # Serves `get`, and `find` without a filter, newest first.
        "CREATE UNIQUE INDEX holdfast_identity ON holdfast_invocations (app, id)",
        # Serves `claim`. It holds ready rows alone, so it stays as small as the backlog.
        f"CREATE INDEX holdfast_ready ON holdfast_invocations (app, lane, rank, due_at, id) WHERE {READY}",
        "CREATE INDEX holdfast_status ON holdfast_invocations (app, status, id) WHERE status <> 'success'",
        # Serves `find` by task.
        "CREATE INDEX holdfast_task ON holdfast_invocations (app, task, id)",
        """
        CREATE TABLE holdfast_runners (
            app TEXT NOT NULL, id TEXT NOT NULL, started_at REAL NOT NULL, heartbeat_at REAL NOT NULL,
            body TEXT NOT NULL, PRIMARY KEY (app, id)
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE holdfast_quarantine (
            app TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL, why TEXT NOT NULL, raw TEXT NOT NULL
        ) STRICT
        """,
    ],
    2: [
        *_added("at_most_once INTEGER NOT NULL DEFAULT 0", "limit_key TEXT", "slot TEXT"),
        # A slot of a limit has one holder.
        "CREATE UNIQUE INDEX holdfast_slot ON holdfast_invocations (app, slot) WHERE slot IS NOT NULL",
        # Serves the look for the invocation that waits longest for a slot.
        """
        CREATE INDEX holdfast_waiting ON holdfast_invocations (app, limit_key, rank, due_at, id)
        WHERE status = 'concurrency_controlled'
        """,
        # Serves the look for the runner that was silent longest.
        "CREATE INDEX holdfast_heartbeats ON holdfast_runners (app, heartbeat_at)",
        # The bytes lie in their own table: SQLite rewrites a whole row when one of its columns changes.
        """
        CREATE TABLE holdfast_payloads (
            app TEXT NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, pieces INTEGER NOT NULL,
            wanted_at REAL NOT NULL, PRIMARY KEY (app, digest)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX holdfast_payloads_wanted ON holdfast_payloads (app, wanted_at)",
        """
        CREATE TABLE holdfast_payload_pieces (
            app TEXT NOT NULL, digest TEXT NOT NULL, number INTEGER NOT NULL, put_at REAL NOT NULL,
            packed INTEGER NOT NULL, data BLOB NOT NULL
        ) STRICT
        """,
        "CREATE UNIQUE INDEX holdfast_pieces ON holdfast_payload_pieces (app, digest, number)",
        # The first piece of each is written with its payload and removed with it, so it is never left behind.
        "CREATE INDEX holdfast_pieces_put ON holdfast_payload_pieces (app, put_at) WHERE number > 0",
        # Which invocations refer to a payload. Quarantined ones keep their references.
        """
        CREATE TABLE holdfast_payload_references (
            app TEXT NOT NULL, digest TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY (app, digest, id)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX holdfast_referring ON holdfast_payload_references (app, id)",
    ],
    3: [
        *_added("key TEXT", "twin TEXT", "terms TEXT", "errors TEXT", "start_by REAL", "cancellation TEXT"),
        *_added("retain_until REAL", "rerun_of TEXT", "origin TEXT", "outbox TEXT"),
        # One key, one invocation; and one of a kind that waits for its first start.
        "CREATE UNIQUE INDEX holdfast_key ON holdfast_invocations (app, task, key) WHERE key IS NOT NULL",
        "CREATE UNIQUE INDEX holdfast_twin ON holdfast_invocations (app, twin) WHERE twin IS NOT NULL",
        # Serves the look for what was not started in time.
        "CREATE INDEX holdfast_start_by ON holdfast_invocations (app, start_by, id) WHERE start_by IS NOT NULL",
        # Serves `find` by parent.
        "CREATE INDEX holdfast_parent_id ON holdfast_invocations (app, parent_id, id) WHERE parent_id IS NOT NULL",
        # Serves `find` by status and `counts`, success included.
        "DROP INDEX holdfast_status",
        "CREATE INDEX holdfast_status ON holdfast_invocations (app, status, id)",
        """
        CREATE TABLE holdfast_entries (
            app TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL,
            version INTEGER NOT NULL, due_at REAL, keep_until REAL, PRIMARY KEY (app, kind, name)
        ) STRICT, WITHOUT ROWID
        """,
        # Serves the removal of entries that need not be kept longer.
        "CREATE INDEX holdfast_entries_kept ON holdfast_entries (app, keep_until) WHERE keep_until IS NOT NULL",
        "CREATE INDEX holdfast_entries_due ON holdfast_entries (app, kind, due_at, name) WHERE due_at IS NOT NULL",
        # Serves `find` by queue. Most is in the default queue, and found soon in `identity`.
        "CREATE INDEX holdfast_queue ON holdfast_invocations (app, queue, id) WHERE queue <> 'default'",
        # Serves the removal of what need not be kept longer, and the look for what does not say how long.
        f"CREATE INDEX holdfast_retained ON holdfast_invocations (app, retain_until) WHERE {ENDED}",
        # Serves the archive, by outcome.
        f"CREATE INDEX holdfast_ended ON holdfast_invocations (app, status, changed_at, id) WHERE {ENDED}",
        # Serves the look for what repeats an ended one.
        "CREATE INDEX holdfast_rerun ON holdfast_invocations (app, rerun_of, id) WHERE rerun_of IS NOT NULL",
        # Serves the look for ends with an outbox.
        "CREATE INDEX holdfast_outbox ON holdfast_invocations (app, changed_at, id) WHERE outbox IS NOT NULL",
    ],
    4: ["ALTER TABLE holdfast_quarantine ADD COLUMN kind TEXT NOT NULL DEFAULT 'invocation'"],
    5: [
        _move_to_entries,
        "DROP TABLE IF EXISTS holdfast_queues",
        "DROP TABLE IF EXISTS holdfast_executions",
        _retain_old,
    ],
    6: [
        "ALTER TABLE holdfast_entries ADD COLUMN subject TEXT",
        # Serves the entries that belong to a run or another invocation.
        """
        CREATE INDEX holdfast_entries_subject ON holdfast_entries (app, kind, subject, name)
        WHERE subject IS NOT NULL
        """,
        *_added("reply_to TEXT", "run TEXT", "wake_at REAL", "attributes TEXT", "has_streams INTEGER"),
        # Serves the look for runs that go on.
        """
        CREATE INDEX holdfast_wake ON holdfast_invocations (app, wake_at, id)
        WHERE status = 'suspended' AND wake_at IS NOT NULL
        """,
        # The logs of runs and streams. The key is the order of reading, and two writers collide on it.
        """
        CREATE TABLE holdfast_log (
            app TEXT NOT NULL, run TEXT NOT NULL, generation INTEGER NOT NULL, first INTEGER NOT NULL,
            last INTEGER NOT NULL, epoch INTEGER NOT NULL, operation TEXT NOT NULL, at REAL NOT NULL,
            events BLOB NOT NULL, payloads TEXT, writer TEXT, PRIMARY KEY (app, run, generation, first)
        ) STRICT, WITHOUT ROWID
        """,
        # Serves `find` by attribute. Triggers keep it as the rows say, whatever removes or quarantines them.
        """
        CREATE TABLE holdfast_attributes (
            app TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, id TEXT NOT NULL,
            PRIMARY KEY (app, name, value, id)
        ) STRICT, WITHOUT ROWID
        """,
        f"""
        CREATE TRIGGER holdfast_attributes_new AFTER INSERT ON holdfast_invocations WHEN new.attributes IS NOT NULL
        BEGIN {_attributes_in} END
        """,
        f"""
        CREATE TRIGGER holdfast_attributes_gone AFTER DELETE ON holdfast_invocations WHEN old.attributes IS NOT NULL
        BEGIN {_attributes_out} END
        """,
        f"""
        CREATE TRIGGER holdfast_attributes_set AFTER UPDATE OF attributes ON holdfast_invocations
        BEGIN {_attributes_out} {_attributes_in} END
        """,
    ],
    7: _added("waiting TEXT"),
    8: [
        *_added("notes TEXT"),
        "ALTER TABLE holdfast_entries ADD COLUMN payloads TEXT",
        # Large payloads of events, and arguments of schedules. Triggers keep the references as the rows say.
        f"""
        CREATE TRIGGER holdfast_entries_payloads_new AFTER INSERT ON holdfast_entries WHEN new.payloads IS NOT NULL
        BEGIN {_referred_in} END
        """,
        f"""
        CREATE TRIGGER holdfast_entries_payloads_gone AFTER DELETE ON holdfast_entries WHEN old.payloads IS NOT NULL
        BEGIN {_referred_out} END
        """,
        f"""
        CREATE TRIGGER holdfast_entries_payloads_set AFTER UPDATE OF payloads ON holdfast_entries
        WHEN old.payloads IS NOT new.payloads BEGIN {_referred_out} {_referred_in} END
        """,
    ],
}


def prepare(connection: sqlite3.Connection) -> None:
    """Bring the file to `SCHEMA_VERSION`, or refuse it. Runs inside the caller's write transaction."""
    found = stored_version(connection)
    if found is None:
        _refuse_foreign(connection)
        found = (0, 0)
    version, _ = found
    _refuse_newer(found)
    for step in range(version + 1, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[step]:
            connection.execute(statement) if isinstance(statement, str) else statement(connection)
    if version < SCHEMA_VERSION:
        rows = [("schema_version", str(SCHEMA_VERSION)), ("min_reader", str(MIN_READER))]
        connection.executemany("INSERT OR REPLACE INTO holdfast_meta (key, value) VALUES (?, ?)", rows)


def is_current(connection: sqlite3.Connection) -> bool:
    """Return whether there is nothing to prepare, and nothing to refuse."""
    found = stored_version(connection)
    return found is not None and found[0] >= SCHEMA_VERSION >= found[1]


def still_there(connection: sqlite3.Connection) -> bool:
    """Return whether the tables of a store that was opened before are there. Raises `SchemaMismatch` where a newer
    version has migrated them since, and this version may not use them.
    """
    found = stored_version(connection)
    if found is not None:
        _refuse_newer(found)
    return found is not None and found[0] >= SCHEMA_VERSION


def _refuse_newer(found: tuple[int, int]) -> None:
    version, min_reader = found
    if min_reader > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the file has schema version {version}, which needs a Holdfast that knows version {min_reader}; "
            f"this one knows {SCHEMA_VERSION}. Upgrade Holdfast here."
        )


def stored_version(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """Return (schema version, lowest reader) of the file; None if Holdfast has no tables there."""
    if not _has_table(connection, "holdfast_meta"):
        return None
    meta = dict(connection.execute("SELECT key, value FROM holdfast_meta").fetchall())
    try:
        version, min_reader = int(meta["schema_version"]), int(meta["min_reader"])
        if not 1 <= version <= _HIGHEST or not 0 <= min_reader <= _HIGHEST:
            raise ValueError("a version that no schema has")
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaMismatch(
            f"the table holdfast_meta does not have the schema's version ({shown(meta)}). "
            "Restore a backup, or move the file aside."
        ) from error
    return version, min_reader


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    query = "SELECT name FROM sqlite_master WHERE name LIKE 'holdfast\\_%' ESCAPE '\\' ORDER BY name"
    names = [name for (name,) in connection.execute(query)]
    if names:
        raise SchemaMismatch(
            f"the file has {', '.join(names)} but no holdfast_meta, so its schema's version is unknown. "
            "Restore a backup, or use another file."
        )


def _use_wal(connection: sqlite3.Connection, patience_seconds: float) -> None:
    """Switch to WAL. For this SQLite does not wait as it does otherwise, if another process is doing the same."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnavailable(f"SQLite keeps the journal mode {mode} of the file; a store needs WAL.")
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()  # opens the log and its index
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.005)


def connect(
    path: Path, *, synchronous: str, busy_timeout_seconds: float, factory: type[sqlite3.Connection] = sqlite3.Connection
) -> sqlite3.Connection:
    """Return a connection with our pragmas. Transactions are begun by hand."""
    connection = sqlite3.connect(
        path,
        timeout=busy_timeout_seconds,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=factory,
    )
    try:
        _use_wal(connection, busy_timeout_seconds)
    except BaseException:
        connection.close()
        raise
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute("PRAGMA mmap_size = 0")  # a file that shrinks under a map is a crash, not an error
    return connection


def connect_beside(path: Path, patience_seconds: float) -> sqlite3.Connection:
    """Return a connection that hardly waits for locks, and changes nothing by being made."""
    return sqlite3.connect(path, timeout=patience_seconds, isolation_level=None)


def prepare_now(connection: sqlite3.Connection) -> None:
    """Make the store unless it is there, in a transaction of our own."""
    if is_current(connection):
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        prepare(connection)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
