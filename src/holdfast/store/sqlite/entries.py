"""Entries in SQLite: jobs over one transaction each. The primary key, the version and the body decide."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.records import Entry
from holdfast.store.sqlite.aside import ENTRIES, SetAside, readable
from holdfast.store.sqlite.rows import ENTRY_COLUMNS, entry_of

_COLUMNS = ", ".join(ENTRY_COLUMNS)

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
REMOVE_EXPIRED = f"DELETE FROM holdfast_entries WHERE (app, kind, name) IN ({EXPIRED})"
DELETE = "DELETE FROM holdfast_entries WHERE app = ? AND kind = ? AND name = ?"
REMOVE = f"{DELETE} AND version = ? AND body = ?"


def put(connection: sqlite3.Connection, entry: Entry, over: Entry | None, set_aside: SetAside) -> bool:
    if _put(connection, entry, over):
        return True
    name = (entry.app, entry.kind, entry.name)
    row = connection.execute(GET, name).fetchone()
    try:
        return row is not None and entry_of(row) == entry
    except CorruptRecord as error:  # it makes room
        set_aside(connection, ENTRIES, row, error)
        return _put(connection, entry, over)


def _put(connection: sqlite3.Connection, entry: Entry, over: Entry | None) -> bool:
    e, name = entry, (entry.app, entry.kind, entry.name)
    if e.version == 1:
        return connection.execute(INSERT, (*name, e.body, e.version, e.due_at, e.keep_until)).rowcount > 0
    before = (e.version - 1, over.body if over else None)
    return connection.execute(UPDATE, (e.body, e.version, e.due_at, e.keep_until, *name, *before)).rowcount > 0


def put_new(connection: sqlite3.Connection, entry: Entry, now: float, set_aside: SetAside) -> Entry | None:
    """Insert a new entry, or answer what has its name. What need not be kept any longer gives way."""
    (there,) = listing(connection, entry.app, entry.kind, [entry.name], set_aside) or (None,)
    if there is not None and (there.keep_until is None or there.keep_until > now):
        return there
    if there is not None:
        connection.execute(DELETE, (entry.app, entry.kind, entry.name))
    put(connection, entry, None, set_aside)
    return None


def listing(
    connection: sqlite3.Connection, app: str, kind: str, names: Sequence[str] | None, set_aside: SetAside | None
) -> list[Entry]:
    if names is None:
        return _readable(connection, LIST, (app, kind), set_aside)
    each = [_readable(connection, GET, (app, kind, name), set_aside) for name in sorted(set(names))]
    return [entry for found in each for entry in found]


def due(connection: sqlite3.Connection, app: str, kind: str, limit: int, set_aside: SetAside | None) -> list[Entry]:
    return _readable(connection, DUE, (app, kind, limit), set_aside)


def latest(
    connection: sqlite3.Connection, app: str, kind: str, limit: int, before: str | None, set_aside: SetAside | None
) -> list[Entry]:
    if before is None:
        return _readable(connection, LATEST, (app, kind, limit), set_aside)
    return _readable(connection, LATEST_BEFORE, (app, kind, before, limit), set_aside)


def _readable(
    connection: sqlite3.Connection, query: str, values: Sequence[object], set_aside: SetAside | None
) -> list[Entry]:
    return readable(connection, ENTRIES, query, values, entry_of, set_aside)


def remove_expired(connection: sqlite3.Connection, app: str, at: float, limit: int) -> int:
    return connection.execute(REMOVE_EXPIRED, (app, at, limit)).rowcount


def put_aside(connection: sqlite3.Connection, entry: Entry, error: CorruptRecord, set_aside: SetAside) -> bool:
    e = entry
    row = connection.execute(
        f"{GET} AND version = ? AND body = ?", (e.app, e.kind, e.name, e.version, e.body)
    ).fetchone()
    if row is not None:
        set_aside(connection, ENTRIES, row, error)
    return row is not None


def remove(connection: sqlite3.Connection, entry: Entry) -> bool:
    e = entry
    return connection.execute(REMOVE, (e.app, e.kind, e.name, e.version, e.body)).rowcount > 0
