"""Entries in SQLite: jobs over one transaction each. The primary key, the version and the body decide."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from holdfast.lifecycle.records import Entry

_COLUMNS = "app, kind, name, body, version, due_at, keep_until"

INSERT = f"INSERT INTO holdfast_entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
UPDATE = """
UPDATE holdfast_entries SET body = ?, version = ?, due_at = ?, keep_until = ?
WHERE app = ? AND kind = ? AND name = ? AND version = ? AND body = coalesce(?, body)
"""
GET = f"SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? AND name = ?"
LIST = f"SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? ORDER BY name"
DUE = f"""
SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? AND due_at IS NOT NULL ORDER BY due_at, name LIMIT ?
"""  # holdfast_entries_due
LATEST = f"SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? ORDER BY name DESC LIMIT ?"
LATEST_BEFORE = f"""
SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? AND name < ? ORDER BY name DESC LIMIT ?
"""
EXPIRED = """
SELECT app, kind, name FROM holdfast_entries
WHERE app = ? AND keep_until IS NOT NULL AND keep_until <= ? ORDER BY keep_until LIMIT ?
"""  # holdfast_entries_kept
DELETE = "DELETE FROM holdfast_entries WHERE app = ? AND kind = ? AND name = ?"
REMOVE = f"{DELETE} AND version = ? AND body = ?"


def put(connection: sqlite3.Connection, entry: Entry, over: Entry | None = None) -> bool:
    e, name = entry, (entry.app, entry.kind, entry.name)
    if e.version == 1:
        done = connection.execute(INSERT, (*name, e.body, e.version, e.due_at, e.keep_until)).rowcount
    else:
        before = (e.version - 1, over.body if over else None)
        done = connection.execute(UPDATE, (e.body, e.version, e.due_at, e.keep_until, *name, *before)).rowcount
    return done > 0 or [_entry(row) for row in connection.execute(GET, name)] == [entry]


def put_new(connection: sqlite3.Connection, entry: Entry, now: float) -> Entry | None:
    """Insert a new entry, or answer what has its name. What need not be kept any longer gives way."""
    (there,) = listing(connection, entry.app, entry.kind, [entry.name]) or (None,)
    if there is not None and (there.keep_until is None or there.keep_until > now):
        return there
    if there is not None:
        connection.execute(DELETE, (entry.app, entry.kind, entry.name))
    put(connection, entry)
    return None


def listing(connection: sqlite3.Connection, app: str, kind: str, names: Sequence[str] | None) -> list[Entry]:
    if names is None:
        return [_entry(row) for row in connection.execute(LIST, (app, kind))]
    return [_entry(row) for name in sorted(set(names)) for row in connection.execute(GET, (app, kind, name))]


def due(connection: sqlite3.Connection, app: str, kind: str, limit: int) -> list[Entry]:
    return [_entry(row) for row in connection.execute(DUE, (app, kind, limit))]


def latest(connection: sqlite3.Connection, app: str, kind: str, limit: int, before: str | None) -> list[Entry]:
    if before is None:
        return [_entry(row) for row in connection.execute(LATEST, (app, kind, limit))]
    return [_entry(row) for row in connection.execute(LATEST_BEFORE, (app, kind, before, limit))]


def remove_expired(connection: sqlite3.Connection, app: str, at: float, limit: int) -> int:
    gone = connection.execute(EXPIRED, (app, at, limit)).fetchall()
    connection.executemany(DELETE, gone)
    return len(gone)


def remove(connection: sqlite3.Connection, entry: Entry) -> bool:
    e = entry
    return connection.execute(REMOVE, (e.app, e.kind, e.name, e.version, e.body)).rowcount > 0


def _entry(row: Sequence[object]) -> Entry:
    app, kind, name, body, version, due_at, keep_until = row
    return Entry(
        app=str(app),
        kind=str(kind),
        name=str(name),
        body=bytes(body),  # type: ignore[call-overload]
        version=version,  # type: ignore[arg-type]
        due_at=due_at,  # type: ignore[arg-type]
        keep_until=keep_until,  # type: ignore[arg-type]
    )
