"""Rows that cannot be read are set aside, whole, so that one bad row neither stops a loop nor is lost.

Readers work without writing, and raise at the first row that cannot be read. Then the same job runs once more as a
write, moves such rows to the quarantine in its transaction, and answers with the rest. So what is set aside is told
once, and met by nobody again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.decoding import EARLIEST, INVOCATION, LATEST, corrupt, shown
from holdfast.lifecycle.records import Quarantined
from holdfast.lifecycle.status import OWNED, Status
from holdfast.store.sqlite.queries import HEADS
from holdfast.store.sqlite.rows import (
    COLUMNS,
    ENTRY_COLUMNS,
    EXECUTION_COLUMNS,
    LIST,
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

_MOST_PASSES = 100
_AT_ONCE = 1000


class Table(NamedTuple):
    """A table, the columns that its readers select, and those of them that tell a row from others."""

    name: str
    columns: Sequence[str]
    key: Sequence[str]


INVOCATIONS = Table("holdfast_invocations", ("rowid", *COLUMNS), ("rowid",))
RUNNERS = Table("holdfast_runners", RUNNER_COLUMNS, ("app", "id"))
ENTRIES = Table("holdfast_entries", ENTRY_COLUMNS, ("app", "kind", "name"))
EXECUTIONS = Table("holdfast_executions", ("app", *EXECUTION_COLUMNS), ("app", "id"))
QUEUES = Table("holdfast_queues", ("app", "name", "paused_at", "paused_by", "reason", "operations"), ("app", "name"))
PAYLOADS = Table("holdfast_payloads", PAYLOAD_COLUMNS, ("app", "digest"))
PIECES = Table("holdfast_payload_pieces", PIECE_COLUMNS, ("app", "digest", "number"))

QUARANTINE = "INSERT INTO holdfast_quarantine (app, id, at, why, raw, kind) VALUES (?, ?, ?, ?, ?, ?)"


class SetAside(Protocol):
    """Moves a row that cannot be read out of the way, in the transaction of the connection."""

    def __call__(self, connection: sqlite3.Connection, table: Table, row: Row, error: CorruptRecord) -> None: ...


def set_aside(connection: sqlite3.Connection, table: Table, row: Row, error: CorruptRecord, at: float) -> None:
    """Move a row to the quarantine."""
    values = dict(zip(table.columns, row, strict=True))
    columns, told = [name for name in values if name != "rowid"], [values[name] for name in values if name != "rowid"]
    aside = (shown(values["app"]), error.id, at, shown(str(error)), raw_text(columns, told), error.kind)
    connection.execute(QUARANTINE, aside)
    conditions, key = zip(*[_is(name, values[name]) for name in table.key], strict=True)
    connection.execute(f"DELETE FROM {table.name} WHERE {' AND '.join(conditions)}", key)


def quarantined(row: Sequence[Any]) -> Quarantined:
    """What was set aside, as far as that itself can be read."""
    app, id, at, why, raw, kind = row
    moment = at if type(at) is float and EARLIEST <= at <= LATEST else 0.0
    return Quarantined(app=app, id=shown(id), at=moment, why=shown(why), raw=str(raw), kind=shown(kind))


def _is(name: str, value: object) -> tuple[str, object]:
    """A condition and its value. A text that is not UTF-8 was read leniently, and can only be bound as bytes."""
    try:
        if isinstance(value, str):
            value.encode()
        return f"{name} IS ?", value
    except UnicodeEncodeError:
        return f"{name} IS CAST(? AS TEXT)", str(value).encode(errors="surrogateescape")


def readable(
    connection: sqlite3.Connection,
    table: Table,
    query: str,
    values: Sequence[object],
    decode: Callable[[Row], T],
    set_aside: SetAside | None,
) -> list[T]:
    """Return what a query of these columns finds. Rows that cannot be read make room for the next.

    Raises `CorruptRecord` where nothing may be set aside.
    """
    found: list[T] = []
    for _ in range(_MOST_PASSES):
        found, bad = [], 0
        for row in connection.execute(query, values).fetchall():
            try:
                found.append(decode(row))
            except CorruptRecord as error:
                if set_aside is None:
                    raise
                set_aside(connection, table, row, error)
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


def misfits(connection: sqlite3.Connection, set_aside: SetAside) -> int:
    """Set aside invocations with a value of another type, which may stop a query of many. Reads the whole table."""
    return _all(connection, connection.execute(MISFITS).fetchall(), set_aside, "a value in it is of another type")


def hidden(connection: sqlite3.Connection, app: str, set_aside: SetAside | None) -> int:
    """Set aside invocations that hold something, and that no claim, change or recovery would ever meet."""
    count = 0
    for row in connection.execute(SLOT_HOLDERS, (app,)).fetchall():
        try:
            from_row(row[1:])
        except CorruptRecord as error:
            if set_aside is None:
                raise
            set_aside(connection, INVOCATIONS, row, error)
            count += 1
    strange = [*_of_unknown_status(connection, app), *_without_owner(connection, app), *_never_due(connection, app)]
    once = list({row[0]: row for row in strange}.values())
    return count + _all(connection, once, set_aside, "nobody could ever claim or recover it")


def _of_unknown_status(connection: sqlite3.Connection, app: str) -> Iterator[Row]:
    statuses = [status for (status,) in connection.execute(STATUSES, {"app": app})]
    for status in [None, *(status for status in statuses if status not in _KNOWN)]:
        condition, value = _is("status", status)
        yield from connection.execute(OF_STATUS.format(condition=condition), (app, value)).fetchall()


def _without_owner(connection: sqlite3.Connection, app: str) -> Iterator[Row]:
    """Recovery asks for the work of a runner by its id, which is what comes before the slash."""
    for rowid, owner in connection.execute(OWNERS, (app,)).fetchall():
        if type(owner) is not str or "/" not in owner[1:]:
            yield connection.execute(BY_ROWID, (rowid,)).fetchone()


def _never_due(connection: sqlite3.Connection, app: str) -> Iterator[Row]:
    """Those that are ready, and that no claim would find. A search in holdfast_ready for each lane and rank."""
    yield from connection.execute(f"{_READY} AND (lane IS NULL OR lane <= '') LIMIT {_AT_ONCE}", (app,)).fetchall()
    heads = {(lane, rank) for lane, rank in connection.execute(HEADS, {"app": app}).fetchall() if type(lane) is str}
    for lane in {lane for lane, _ in heads}:
        yield from _of_another_lane(connection, app, lane)
        yield from connection.execute(f"{_READY} AND lane = ? AND rank IS NULL", (app, lane)).fetchall()
    for lane, rank in heads:
        for times in ("due_at IS NULL", f"due_at > {LATEST}"):
            query = f"{_READY} AND lane = ? AND rank = ? AND {times} LIMIT {_AT_ONCE}"
            yield from connection.execute(query, (app, lane, rank)).fetchall()


def _of_another_lane(connection: sqlite3.Connection, app: str, lane: str) -> Iterator[Row]:
    """Those that lie in a lane that is not theirs. If the first is none of them, somebody serves the lane, or will."""
    for most in (1, _AT_ONCE):
        rows = connection.execute(f"{_READY} AND lane = ? ORDER BY rank, due_at LIMIT {most}", (app, lane)).fetchall()
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


def _all(connection: sqlite3.Connection, rows: Sequence[Row], set_aside: SetAside | None, why: str) -> int:
    for row in rows:
        error = corrupt(INVOCATION, row[2], ValueError(why))
        if set_aside is None:
            raise error
        set_aside(connection, INVOCATIONS, row, error)
    return len(rows)
