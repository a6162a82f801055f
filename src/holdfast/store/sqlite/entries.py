"""Entries in SQLite: jobs over one transaction each. The primary key, the version and the body decide."""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast.errors import CorruptRecord
from holdfast.model.records import Entry
from holdfast.store.contract import EntryOrder
from holdfast.store.sqlite.quarantine import ENTRIES, StoreConnection, readable
from holdfast.store.sqlite.rows import ENTRY_COLUMNS, entry_of

_COLUMNS = ", ".join(ENTRY_COLUMNS)

INSERT = f"INSERT INTO holdfast_entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
UPDATE = """
UPDATE holdfast_entries SET body = ?, version = ?, due_at = ?, keep_until = ?, subject = ?, payloads = ?
WHERE app = ? AND kind = ? AND name = ? AND version = ? AND body = coalesce(?, body)
"""
GET = f"SELECT {_COLUMNS} FROM holdfast_entries WHERE app = ? AND kind = ? AND name = ?"
_LISTS = {
    EntryOrder.NAME: ("", "name"),
    EntryOrder.LATEST: ("", "name DESC"),
    EntryOrder.DUE: (" AND due_at IS NOT NULL", "due_at, name"),  # holdfast_entries_due
}
EXPIRED = """
SELECT app, kind, name FROM holdfast_entries
WHERE app = ? AND keep_until IS NOT NULL AND keep_until <= ? ORDER BY keep_until LIMIT ?
"""  # holdfast_entries_kept
REMOVE_EXPIRED = f"DELETE FROM holdfast_entries WHERE (app, kind, name) IN ({EXPIRED})"
DELETE = "DELETE FROM holdfast_entries WHERE app = ? AND kind = ? AND name = ?"
REMOVE = f"{DELETE} AND version = ? AND body = ?"


def put_entry(connection: StoreConnection, entry: Entry, over: Entry | None = None) -> bool:
    if _put(connection, entry, over):
        return True
    row = connection.execute(GET, (entry.app, entry.kind, entry.name)).fetchone()
    try:
        return row is not None and entry_of(row) == entry
    except CorruptRecord as error:
        connection.set_aside(ENTRIES, row, error)
        return _put(connection, entry, over)


def _put(connection: StoreConnection, entry: Entry, over: Entry | None) -> bool:
    e, name = entry, (entry.app, entry.kind, entry.name)
    facts = (e.body, e.version, e.due_at, e.keep_until, e.subject, json.dumps(e.payloads) if e.payloads else None)
    if e.version == 1:
        return connection.execute(INSERT, (*name, *facts)).rowcount > 0
    before = (e.version - 1, over.body if over else None)
    return connection.execute(UPDATE, (*facts, *name, *before)).rowcount > 0


def put_new(connection: StoreConnection, entry: Entry) -> Entry | None:
    """Insert a new entry, or return the entry that has its name. An expired one gives way."""
    (there,) = entries(connection, entry.app, entry.kind, [entry.name]) or (None,)
    if there is not None and (there.keep_until is None or there.keep_until > connection.now):
        return there
    if there is not None:
        connection.execute(DELETE, (entry.app, entry.kind, entry.name))
    put_entry(connection, entry)
    return None


def entries(
    connection: StoreConnection,
    app: str,
    kind: str,
    names: Sequence[str] | None = None,
    *,
    order: EntryOrder = EntryOrder.NAME,
    limit: int | None = None,
    before: str | None = None,
    subject: str | None = None,
) -> list[Entry]:
    if names is None:
        return readable(connection, ENTRIES, *statement(app, kind, order, limit, before, subject), entry_of)
    each = [readable(connection, ENTRIES, GET, (app, kind, name), entry_of) for name in sorted(set(names))]
    return [entry for found in each for entry in found]


def statement(
    app: str, kind: str, order: EntryOrder, limit: int | None, before: str | None, subject: str | None = None
) -> tuple[str, list[object]]:
    """Return the query of a listing, on the primary key or the index of its order, and its values."""
    only, by = _LISTS[order]
    values: list[object] = [app, kind]
    table = "holdfast_entries"
    if subject is not None:  # else SQLite reads all entries of the kind, which are in order
        table += " INDEXED BY holdfast_entries_subject"
        only += " AND subject = ?"
        values.append(subject)
    if before is not None:
        only += " AND name < ?"
        values.append(before)
    query = f"SELECT {_COLUMNS} FROM {table} WHERE app = ? AND kind = ?{only} ORDER BY {by} LIMIT ?"
    return query, [*values, -1 if limit is None else limit]


def remove_expired(connection: StoreConnection, app: str, at: float, limit: int) -> int:
    return connection.execute(REMOVE_EXPIRED, (app, at, limit)).rowcount


def quarantine_entry(connection: StoreConnection, entry: Entry, error: CorruptRecord) -> bool:
    e = entry
    row = connection.execute(
        f"{GET} AND version = ? AND body = ?", (e.app, e.kind, e.name, e.version, e.body)
    ).fetchone()
    if row is not None:
        connection.set_aside(ENTRIES, row, error)
    return row is not None


def remove_entry(connection: StoreConnection, entry: Entry) -> bool:
    e = entry
    return connection.execute(REMOVE, (e.app, e.kind, e.name, e.version, e.body)).rowcount > 0
