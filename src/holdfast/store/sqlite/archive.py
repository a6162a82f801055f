"""What has ended, in SQLite: listing it, telling of it, and removing it in batches.

Each wanted outcome is an arm that reads its index backwards, and SQLite merges the arms by the time of the end. A
removal is a transaction of a bounded number of rows, with their references to payloads.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from holdfast.ids import InvocationId
from holdfast.lifecycle.records import PLAIN, InvocationRecord
from holdfast.lifecycle.retention import FOREVER, OUTCOMES, retain_until
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Ended
from holdfast.store.sqlite import entries, queries
from holdfast.store.sqlite.aside import INVOCATIONS, SetAside, readable
from holdfast.store.sqlite.payloads import forget
from holdfast.store.sqlite.rows import LIST, from_row, terms_decoder
from holdfast.store.sqlite.schema import ENDED


def ended(connection: sqlite3.Connection, app: str, where: Ended, limit: int) -> list[Sequence[object]]:
    statement, values = listing(app, where, limit)
    return connection.execute(statement, values).fetchall()


def listing(app: str, where: Ended, limit: int) -> tuple[str, list[object]]:
    statuses = [str(status) for status in sorted(where.statuses)] or OUTCOMES
    rest, values = "", list[object]()
    for condition, value in ((" AND changed_at >= ?", where.since), (" AND changed_at < ?", where.until)):
        if value is not None:
            rest += condition
            values.append(value)
    if where.before is not None:
        rest += " AND changed_at <= ? AND (changed_at < ? OR id < ?)"
        values += [where.before[0], *where.before]
    arm = f"SELECT {LIST} FROM {queries.TABLE} WHERE app = ? AND status = ? AND {ENDED}{rest}"
    each = [value for status in statuses for value in (app, status, *values)]
    return f"{' UNION ALL '.join([arm] * len(statuses))} ORDER BY changed_at DESC, id DESC LIMIT ?", [*each, limit]


def outboxes(
    connection: sqlite3.Connection, app: str, before: float, limit: int, set_aside: SetAside | None
) -> list[InvocationRecord]:
    values = (app, before, limit)
    return readable(connection, INVOCATIONS, queries.OUTBOXES, values, lambda row: from_row(row[1:]), set_aside)


def delivered(connection: sqlite3.Connection, app: str, ids: Sequence[InvocationId]) -> None:
    connection.executemany(queries.DELIVERED, [(app, id) for id in ids])


def remove_final(connection: sqlite3.Connection, app: str, before: float, limit: int) -> int:
    return _remove(connection, app, connection.execute(queries.ENDED_BEFORE, (app, before, limit)).fetchall())


def remove_expired(connection: sqlite3.Connection, app: str, at: float, limit: int) -> int:
    removed = _remove(connection, app, connection.execute(queries.EXPIRED, (app, at, limit)).fetchall())
    return removed + entries.remove_expired(connection, app, at, limit - removed)


def remove_ended(connection: sqlite3.Connection, app: str, ids: Sequence[InvocationId]) -> int:
    query = queries.ENDED_BY_ID.format(places=", ".join("?" * len(ids)))
    return _remove(connection, app, connection.execute(query, (app, *ids)).fetchall())


def _remove(connection: sqlite3.Connection, app: str, gone: Sequence[tuple[int, InvocationId]]) -> int:
    connection.executemany(queries.DELETE, [(rowid,) for rowid, _ in gone])
    forget(connection, app, [id for _, id in gone if type(id) is str])
    return len(gone)


def retain_old(connection: sqlite3.Connection, app: str, after: str, limit: int) -> str | None:
    """The index has what is to be done and nothing else, so there is no need to go on after an id."""
    found = connection.execute(queries.UNRETAINED, (app, limit)).fetchall()
    steps = []
    for rowid, status, key, terms, changed_at in found:
        try:
            agreed = PLAIN if terms is None else terms_decoder.decode(terms)
            until = retain_until(agreed, key, Status(status), changed_at)
        except Exception:  # whoever reads the whole row finds out
            until = FOREVER
        steps.append((until, rowid))
    connection.executemany(queries.RETAIN, steps)
    return after if len(found) == limit else None
