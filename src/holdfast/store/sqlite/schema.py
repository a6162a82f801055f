"""The tables, and the checks before a file is trusted.

All names begin with ``holdfast_``, so that the tables can live in a file that an application uses for its own data.
The schema has a version, and the lowest version of Holdfast that may read it (`min_reader`): version N and N + 1 work
on one file during a rolling deploy, and anything else is refused before it can do harm.

A migration is a list of statements that leads from one version to the next; all of them run in one transaction.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import time
from pathlib import Path

from holdfast.errors import SchemaMismatch, StoreUnavailable, UnsupportedFileSystem
from holdfast.lifecycle.decoding import shown
from holdfast.lifecycle.status import AVAILABLE, FINAL, Status

SCHEMA_VERSION = 4
MIN_READER = 1
_HIGHEST = 1_000_000
OLDEST_SQLITE = (
    3,
    37,
    0,
)  # STRICT tables: a value of the wrong type is refused when it is written, not when it is read
CHECKPOINT_PAGES = (
    4000  # 16 MB of log: a row is written three times in its life, so a longer log copies it back less often
)


def status_list(statuses: frozenset[Status]) -> str:
    """Statuses as an SQL list.

    Sorted, because a partial index is used only by queries that repeat its condition to the letter.
    """
    return ", ".join(f"'{status}'" for status in sorted(statuses))


READY = f"status IN ({status_list(AVAILABLE)})"
WAITING = f"status = '{Status.CONCURRENCY_CONTROLLED}'"
ENDED = f"status IN ({status_list(FINAL)})"

MIGRATIONS: dict[int, list[str]] = {
    1: [
        "CREATE TABLE holdfast_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
        """
        CREATE TABLE holdfast_invocations (
            app TEXT NOT NULL,
            id TEXT NOT NULL,
            task TEXT NOT NULL,
            queue TEXT NOT NULL,
            tags TEXT NOT NULL,
            lane TEXT NOT NULL,
            rank INTEGER NOT NULL,
            status TEXT NOT NULL,
            owner TEXT,
            epoch INTEGER NOT NULL,
            version INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            created_at REAL NOT NULL,
            due_at REAL NOT NULL,
            changed_at REAL NOT NULL,
            claim_token TEXT,
            fingerprint TEXT,
            parent_id TEXT,
            reason TEXT NOT NULL,
            arguments BLOB NOT NULL,
            result BLOB,
            error TEXT,
            history TEXT NOT NULL
        ) STRICT
        """,
        # Serves `get`, and `find` without a filter, newest first.
        "CREATE UNIQUE INDEX holdfast_identity ON holdfast_invocations (app, id)",
        # Serves `claim`. It holds what is ready and nothing else, so it stays as small as the backlog.
        f"CREATE INDEX holdfast_ready ON holdfast_invocations (app, lane, rank, due_at, id) WHERE {READY}",
        "CREATE INDEX holdfast_status ON holdfast_invocations (app, status, id) WHERE status <> 'success'",
        # Serves `find` by task.
        "CREATE INDEX holdfast_task ON holdfast_invocations (app, task, id)",
        """
        CREATE TABLE holdfast_runners (
            app TEXT NOT NULL,
            id TEXT NOT NULL,
            started_at REAL NOT NULL,
            heartbeat_at REAL NOT NULL,
            body TEXT NOT NULL,
            PRIMARY KEY (app, id)
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE holdfast_quarantine (
            app TEXT NOT NULL,
            id TEXT NOT NULL,
            at REAL NOT NULL,
            why TEXT NOT NULL,
            raw TEXT NOT NULL
        ) STRICT
        """,
    ],
    2: [
        "ALTER TABLE holdfast_invocations ADD COLUMN at_most_once INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE holdfast_invocations ADD COLUMN limit_key TEXT",
        "ALTER TABLE holdfast_invocations ADD COLUMN slot TEXT",
        # A place under a limit has one holder.
        "CREATE UNIQUE INDEX holdfast_slot ON holdfast_invocations (app, slot) WHERE slot IS NOT NULL",
        # Serves the look for who waits longest for a place.
        """
        CREATE INDEX holdfast_waiting ON holdfast_invocations (app, limit_key, rank, due_at, id)
        WHERE status = 'concurrency_controlled'
        """,
        """
        CREATE TABLE holdfast_executions (
            app TEXT NOT NULL,
            id TEXT NOT NULL,
            service TEXT NOT NULL,
            runner_id TEXT NOT NULL,
            started_at REAL NOT NULL,
            window_ends_at REAL NOT NULL,
            status TEXT NOT NULL,
            ended_at REAL,
            reason TEXT NOT NULL,
            PRIMARY KEY (app, id)
        ) STRICT, WITHOUT ROWID
        """,
        # One execution of a service runs at a time.
        "CREATE UNIQUE INDEX holdfast_executing ON holdfast_executions (app, service) WHERE status = 'running'",
        # Serves the audit trail of a service.
        "CREATE INDEX holdfast_executed ON holdfast_executions (app, service, started_at, id)",
        # Serves the look for the runner that was silent longest.
        "CREATE INDEX holdfast_heartbeats ON holdfast_runners (app, heartbeat_at)",
        # The bytes lie in a table of their own: SQLite writes a whole row anew when one of its columns changes.
        """
        CREATE TABLE holdfast_payloads (
            app TEXT NOT NULL,
            digest TEXT NOT NULL,
            size INTEGER NOT NULL,
            pieces INTEGER NOT NULL,
            wanted_at REAL NOT NULL,
            PRIMARY KEY (app, digest)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX holdfast_payloads_wanted ON holdfast_payloads (app, wanted_at)",
        """
        CREATE TABLE holdfast_payload_pieces (
            app TEXT NOT NULL,
            digest TEXT NOT NULL,
            number INTEGER NOT NULL,
            put_at REAL NOT NULL,
            packed INTEGER NOT NULL,
            data BLOB NOT NULL
        ) STRICT
        """,
        "CREATE UNIQUE INDEX holdfast_pieces ON holdfast_payload_pieces (app, digest, number)",
        # The first piece of each is written with its payload and removed with it, so it is never left behind.
        "CREATE INDEX holdfast_pieces_put ON holdfast_payload_pieces (app, put_at) WHERE number > 0",
        # Which invocations refer to a payload. What is set aside keeps its references.
        """
        CREATE TABLE holdfast_payload_references (
            app TEXT NOT NULL,
            digest TEXT NOT NULL,
            id TEXT NOT NULL,
            PRIMARY KEY (app, digest, id)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX holdfast_referring ON holdfast_payload_references (app, id)",
    ],
    3: [
        "ALTER TABLE holdfast_invocations ADD COLUMN key TEXT",
        "ALTER TABLE holdfast_invocations ADD COLUMN twin TEXT",
        # One key, one invocation; and one of a kind that waits for its first start.
        "CREATE UNIQUE INDEX holdfast_key ON holdfast_invocations (app, task, key) WHERE key IS NOT NULL",
        "CREATE UNIQUE INDEX holdfast_twin ON holdfast_invocations (app, twin) WHERE twin IS NOT NULL",
        "ALTER TABLE holdfast_invocations ADD COLUMN terms TEXT",
        "ALTER TABLE holdfast_invocations ADD COLUMN errors TEXT",
        "ALTER TABLE holdfast_invocations ADD COLUMN start_by REAL",
        "ALTER TABLE holdfast_invocations ADD COLUMN cancellation TEXT",
        # Serves the look for what was not started in time.
        "CREATE INDEX holdfast_start_by ON holdfast_invocations (app, start_by, id) WHERE start_by IS NOT NULL",
        # Serves `find` by parent.
        "CREATE INDEX holdfast_parent_id ON holdfast_invocations (app, parent_id, id) WHERE parent_id IS NOT NULL",
        # Serves `find` by status and `counts`, success included.
        "DROP INDEX holdfast_status",
        "CREATE INDEX holdfast_status ON holdfast_invocations (app, status, id)",
        """
        CREATE TABLE holdfast_entries (
            app TEXT NOT NULL,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            body BLOB NOT NULL,
            version INTEGER NOT NULL,
            due_at REAL,
            keep_until REAL,
            PRIMARY KEY (app, kind, name)
        ) STRICT, WITHOUT ROWID
        """,
        # Serves the removal of entries that need not be kept longer.
        "CREATE INDEX holdfast_entries_kept ON holdfast_entries (app, keep_until) WHERE keep_until IS NOT NULL",
        "CREATE INDEX holdfast_entries_due ON holdfast_entries (app, kind, due_at, name) WHERE due_at IS NOT NULL",
        # Serves `find` by queue. Most is in the default queue, and found soon in `identity`.
        "CREATE INDEX holdfast_queue ON holdfast_invocations (app, queue, id) WHERE queue <> 'default'",
        "ALTER TABLE holdfast_invocations ADD COLUMN retain_until REAL",
        "ALTER TABLE holdfast_invocations ADD COLUMN rerun_of TEXT",
        # Serves the removal of what need not be kept longer, and the look for what does not say how long.
        f"CREATE INDEX holdfast_retained ON holdfast_invocations (app, retain_until) WHERE {ENDED}",
        # Serves the archive, by outcome.
        f"CREATE INDEX holdfast_ended ON holdfast_invocations (app, status, changed_at, id) WHERE {ENDED}",
        # Serves the look for what repeats an ended one.
        "CREATE INDEX holdfast_rerun ON holdfast_invocations (app, rerun_of, id) WHERE rerun_of IS NOT NULL",
        "ALTER TABLE holdfast_invocations ADD COLUMN origin TEXT",
        "ALTER TABLE holdfast_invocations ADD COLUMN outbox TEXT",
        # Serves the look for ends that somebody is yet to be told of.
        "CREATE INDEX holdfast_outbox ON holdfast_invocations (app, changed_at, id) WHERE outbox IS NOT NULL",
        # Queues that are, or were, paused.
        """
        CREATE TABLE holdfast_queues (
            app TEXT NOT NULL,
            name TEXT NOT NULL,
            paused_at REAL,
            paused_by TEXT NOT NULL,
            reason TEXT NOT NULL,
            operations TEXT NOT NULL,
            PRIMARY KEY (app, name)
        ) STRICT, WITHOUT ROWID
        """,
    ],
    4: [
        "ALTER TABLE holdfast_quarantine ADD COLUMN kind TEXT NOT NULL DEFAULT 'invocation'",
    ],
}


def prepare(connection: sqlite3.Connection) -> None:
    """Bring the file to `SCHEMA_VERSION`, or refuse it. Runs inside the caller's write transaction."""
    found = stored_version(connection)
    if found is None:
        _refuse_foreign(connection)
        found = (0, 0)
    version, min_reader = found
    if min_reader > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the file has schema version {version}, which needs a Holdfast that knows version {min_reader}; "
            f"this one knows {SCHEMA_VERSION}. Upgrade Holdfast here."
        )
    for step in range(version + 1, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[step]:
            connection.execute(statement)
    if version < SCHEMA_VERSION:
        rows = [("schema_version", str(SCHEMA_VERSION)), ("min_reader", str(MIN_READER))]
        connection.executemany("INSERT OR REPLACE INTO holdfast_meta (key, value) VALUES (?, ?)", rows)


def is_current(connection: sqlite3.Connection) -> bool:
    """Whether there is nothing to prepare, and nothing to refuse."""
    found = stored_version(connection)
    return found is not None and found[0] >= SCHEMA_VERSION >= found[1]


def stored_version(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """(schema version, lowest reader) of the file, or None where Holdfast has never been."""
    if not _has_table(connection, "holdfast_meta"):
        return None
    meta = dict(connection.execute("SELECT key, value FROM holdfast_meta").fetchall())
    try:
        version, min_reader = int(meta["schema_version"]), int(meta["min_reader"])
        if not 1 <= version <= _HIGHEST or not 0 <= min_reader <= _HIGHEST:
            raise ValueError("a version that no schema has")
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaMismatch(
            f"the table holdfast_meta does not tell the schema's version ({shown(meta)}). "
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
    """For this SQLite does not wait as it does otherwise, if somebody else is just at it."""
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


def connect(path: Path, *, synchronous: str, busy_timeout_seconds: float) -> sqlite3.Connection:
    """A connection with our pragmas. Transactions are begun by hand."""
    connection = sqlite3.connect(
        path, timeout=busy_timeout_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
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
    """A connection that hardly waits for anybody, and changes nothing by being made."""
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


# --- the file system

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "smb2",
        "afs",
        "afpfs",
        "ncpfs",
        "ceph",
        "lustre",
        "gpfs",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.davfs2",
        "davfs",
        "webdav",
        "ocfs2",
        "gfs2",
        "beegfs",
        "moosefs",
        "fuse.mfs",
    ]
)


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """SQLite's locks do not hold on network file systems: two hosts would corrupt the file."""
    kind = file_system_of(path, _read_mounts() if mounts is None else mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UnsupportedFileSystem(
            f"{path} lies on a network file system ({kind}), where SQLite's locks cannot be trusted. "
            "Put the file on a local disk, or use MongoDB to share work between hosts."
        )


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mounts; empty if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = f"{path}/".startswith(point.rstrip("/") + "/")  # a container may mount the file itself
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _read_mounts() -> str:
    proc = Path("/proc/self/mounts")
    try:
        return proc.read_text() if proc.exists() else _mounts_of_macos()
    except OSError:
        return ""


def _mounts_of_macos() -> str:
    try:
        listing = subprocess.run(["/sbin/mount"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.findall(r"^(.+?) on (.+?) \((\w+)", listing, re.MULTILINE)
    return "\n".join(
        f"{device.replace(' ', '_')} {point.replace(' ', chr(92) + '040')} {kind}" for device, point, kind in found
    )
