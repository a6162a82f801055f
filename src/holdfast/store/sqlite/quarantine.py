"""Rows that cannot be read are set aside, whole, so that a bad row neither stops a loop nor is lost.

A job of the reader raises `CorruptRecord` at the first row that cannot be read. Then the same job runs once more on the
writer, moves such rows to the quarantine in its transaction, and answers with the rest. So each is reported once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import CorruptRecord
from holdfast.model.decoding import EARLIEST, INVOCATION, LATEST, corrupt, shown
from holdfast.model.records import Quarantined
from holdfast.model.status import OWNED, Status
from holdfast.store.sqlite.queries import HEADS
from holdfast.store.sqlite.rows import (
    COLUMNS,
    ENTRY_COLUMNS,
    LIST,
    PAGE_COLUMNS,
    PAYLOAD_COLUMNS,
    PIECE_COLUMNS,
    RUNNER_COLUMNS,
    column_types,
    from_row,
    raw_text,
)
from holdfast.store.sqlite.schema import READY, status_list

T = TypeVar("T")
Row = Sequence[object]

_MAX_PASSES = 100
_AT_ONCE = 1000


class Table(NamedTuple):
    """A table, the columns that its readers select, and its key."""

    name: str
    columns: Sequence[str]
    key: Sequence[str]


INVOCATIONS = Table("holdfast_invocations", ("rowid", *COLUMNS), ("rowid",))
RUNNERS = Table("holdfast_runners", RUNNER_COLUMNS, ("app", "id"))
ENTRIES = Table("holdfast_entries", ENTRY_COLUMNS, ("app", "kind", "name"))
LOG = Table("holdfast_log", PAGE_COLUMNS, ("app", "run", "generation", "first"))
PAYLOADS = Table("holdfast_payloads", PAYLOAD_COLUMNS, ("app", "digest"))
PIECES = Table("holdfast_payload_pieces", PIECE_COLUMNS, ("app", "digest", "number"))

Report = Callable[[str, CorruptRecord], None]
"""Takes "quarantine" or "unreadable", and the damage of the row."""

QUARANTINED = """
SELECT app, id, at, why, raw, kind FROM holdfast_quarantine WHERE app = ? AND id = coalesce(?, id) ORDER BY at
"""
# By rowid: in the order in which they were set aside, backwards.
LATEST_ASIDE = """
SELECT app, id, at, why, raw, kind FROM holdfast_quarantine WHERE app = ? AND id = coalesce(?, id)
ORDER BY rowid DESC LIMIT ?
"""
QUARANTINE = "INSERT INTO holdfast_quarantine (app, id, at, why, raw, kind) VALUES (?, ?, ?, ?, ?, ?)"


class StoreConnection:
    """The connection of a job, with the time of the job. Rows that cannot be read go through `set_aside`."""

    __slots__ = ("_report", "execute", "executemany", "may_write", "now", "raw")

    def __init__(self, raw: sqlite3.Connection, now: float, report: Report, *, may_write: bool) -> None:
        self.raw = raw
        self.execute = raw.execute
        self.executemany = raw.executemany
        self.now = now
        self.may_write = may_write
        self._report = report

    def set_aside(self, table: Table, row: Row, error: CorruptRecord) -> None:
        """Move a row to the quarantine, whole, in this transaction. Raises `error` where the job may not write."""
        if not self.may_write:
            raise error
        values = dict(zip(table.columns, row, strict=True))
        columns, kept = zip(*[(name, value) for name, value in values.items() if name != "rowid"], strict=True)
        raw = raw_text(columns, kept)
        self.execute(QUARANTINE, (shown(values["app"]), error.id, self.now, shown(str(error)), raw, error.kind))
        conditions, key = zip(*[_is(name, values[name]) for name in table.key], strict=True)
        self.execute(f"DELETE FROM {table.name} WHERE {' AND '.join(conditions)}", key)
        self._report("quarantine", error)

    def leave_out(self, error: CorruptRecord) -> None:
        """Report a row that is left out of an answer."""
        self._report("unreadable", error)


def quarantined(
    connection: StoreConnection, app: str, id: str | None = None, *, latest: int | None = None
) -> list[Quarantined]:
    """Return what was set aside, as far as that itself can be read: oldest first, or the `latest` first."""
    if latest is None:
        return [_quarantined(row) for row in connection.execute(QUARANTINED, (app, id)).fetchall()]
    return [_quarantined(row) for row in connection.execute(LATEST_ASIDE, (app, id, latest)).fetchall()]


def _quarantined(row: Sequence[Any]) -> Quarantined:
    app, id, at, why, raw, kind = row
    moment = at if type(at) is float and EARLIEST <= at <= LATEST else 0.0
    return Quarantined(app=app, id=shown(id), at=moment, why=shown(why), raw=str(raw), kind=shown(kind))


def _is(name: str, value: object) -> tuple[str, object]:
    """Return a condition and its value. A text that is not UTF-8 was read leniently, and can only be bound as bytes."""
    try:
        if isinstance(value, str):
            value.encode()
        return f"{name} IS ?", value
    except UnicodeEncodeError:
        return f"{name} IS CAST(? AS TEXT)", str(value).encode(errors="surrogateescape")


def readable(
    connection: StoreConnection, table: Table, query: str, values: Sequence[object], decode: Callable[[Row], T]
) -> list[T]:
    """Return what a query of these columns finds. Rows that cannot be read are set aside and make room for others."""
    found: list[T] = []
    for _ in range(_MAX_PASSES):
        found, bad = [], 0
        for row in connection.execute(query, values).fetchall():
            try:
                found.append(decode(row))
            except CorruptRecord as error:
                connection.set_aside(table, row, error)
                bad += 1
        if not bad:
            break
    return found


# --- looking for them

_TYPES = " AND ".join(
    f"({' OR '.join(f'typeof({name}) = {kind!r}' for kind in kinds)})" for name, kinds in column_types().items()
)
MISFITS = f"SELECT rowid, {LIST} FROM holdfast_invocations WHERE NOT ({_TYPES}) LIMIT {_AT_ONCE}"
SLOT_HOLDERS = f"SELECT rowid, {LIST} FROM holdfast_invocations WHERE app = ? AND slot IS NOT NULL"  # holdfast_slot
OWNERS = f"""
SELECT rowid, owner FROM holdfast_invocations WHERE app = ? AND status IN ({status_list(OWNED)})
"""  # holdfast_status
BY_ROWID = f"SELECT rowid, {LIST} FROM holdfast_invocations WHERE rowid = ?"
_READY = f"SELECT rowid, {LIST} FROM holdfast_invocations WHERE app = ? AND {READY}"
STATUSES = """
WITH RECURSIVE each (status) AS (
    SELECT (SELECT min(status) FROM holdfast_invocations WHERE app = :app)
    UNION ALL
    SELECT (SELECT min(status) FROM holdfast_invocations WHERE app = :app AND status > each.status)
    FROM each WHERE each.status IS NOT NULL
)
SELECT status FROM each WHERE status IS NOT NULL
"""  # holdfast_status, jumping from status to status
OF_STATUS = f"SELECT rowid, {LIST} FROM holdfast_invocations WHERE app = ? AND {{condition}} LIMIT {_AT_ONCE}"
_KNOWN = frozenset(status.value for status in Status)


def quarantine_misfits(connection: StoreConnection) -> int:
    """Set aside invocations with a value of another type, which may stop a query of many. Reads the whole table."""
    return _set_all_aside(connection, connection.execute(MISFITS).fetchall(), "a value in it is of another type")


def quarantine_hidden(connection: StoreConnection, app: str) -> int:
    """Set aside invocations that hold something, and that no claim, change or recovery would ever meet."""
    count = 0
    for row in connection.execute(SLOT_HOLDERS, (app,)).fetchall():
        try:
            from_row(row[1:])
        except CorruptRecord as error:
            connection.set_aside(INVOCATIONS, row, error)
            count += 1
    strange = [*_of_unknown_status(connection, app), *_without_owner(connection, app), *_never_due(connection, app)]
    once = list({row[0]: row for row in strange}.values())
    return count + _set_all_aside(connection, once, "no runner could ever claim or recover it")


def _of_unknown_status(connection: StoreConnection, app: str) -> Iterator[Row]:
    statuses = [status for (status,) in connection.execute(STATUSES, {"app": app})]
    for status in [None, *(status for status in statuses if status not in _KNOWN)]:
        condition, value = _is("status", status)
        yield from connection.execute(OF_STATUS.format(condition=condition), (app, value)).fetchall()


def _without_owner(connection: StoreConnection, app: str) -> Iterator[Row]:
    """Yield owned rows that recovery never finds: it asks by the id of a runner, the part before the slash."""
    for rowid, owner in connection.execute(OWNERS, (app,)).fetchall():
        if type(owner) is not str or "/" not in owner[1:]:
            yield connection.execute(BY_ROWID, (rowid,)).fetchone()


def _never_due(connection: StoreConnection, app: str) -> Iterator[Row]:
    """Return ready rows that no claim would find. A search in holdfast_ready for each lane and rank."""
    yield from connection.execute(f"{_READY} AND (lane IS NULL OR lane <= '') LIMIT {_AT_ONCE}", (app,)).fetchall()
    heads = {(lane, rank) for lane, rank in connection.execute(HEADS, {"app": app}).fetchall() if type(lane) is str}
    for lane in {lane for lane, _ in heads}:
        yield from _of_another_lane(connection, app, lane)
        yield from connection.execute(f"{_READY} AND lane = ? AND rank IS NULL", (app, lane)).fetchall()
    for lane, rank in heads:
        for times in ("due_at IS NULL", f"due_at > {LATEST}"):
            query = f"{_READY} AND lane = ? AND rank = ? AND {times} LIMIT {_AT_ONCE}"
            yield from connection.execute(query, (app, lane, rank)).fetchall()


def _of_another_lane(connection: StoreConnection, app: str, lane: str) -> Iterator[Row]:
    """Return rows in a foreign lane. If the first row of a lane is sound, runners serve the lane, and meet them."""
    for limit in (1, _AT_ONCE):
        rows = connection.execute(f"{_READY} AND lane = ? ORDER BY rank, due_at LIMIT {limit}", (app, lane)).fetchall()
        strange = [row for row in rows if not _is_readable(row)]
        if not strange:
            return
    yield from strange


def _is_readable(row: Row) -> bool:
    try:
        from_row(row[1:])
    except CorruptRecord:
        return False
    return True


def _set_all_aside(connection: StoreConnection, rows: Sequence[Row], why: str) -> int:
    for row in rows:
        connection.set_aside(INVOCATIONS, row, corrupt(INVOCATION, row[2], ValueError(why)))
    return len(rows)
