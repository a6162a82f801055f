"""Logs of runs and streams in SQLite: a page is a row, appended in a transaction. Each function is a job over one
transaction.

The primary key is the order of the log, so a log is read from one place of the file. References to payloads lie beside
those of the invocation, under the name of the log, and are removed with it. Where a part of a log is removed, they are
counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.decoding import PAGE, corrupt
from holdfast.model.log import (
    APPENDED,
    MAX_BEHIND,
    AppendVerdict,
    Page,
    check_page,
    checked,
    is_stream,
    judge,
    page_name,
    stream_logs,
    until_damaged,
)
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.payloads import forget, refer
from holdfast.store.sqlite.quarantine import StoreConnection
from holdfast.store.sqlite.rows import PAGE_COLUMNS as COLUMNS
from holdfast.store.sqlite.rows import from_row

TABLE = "holdfast_log"
_LIST = ", ".join(COLUMNS)
INSERT = f"INSERT INTO {TABLE} ({_LIST}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT DO NOTHING"
READ = f"""
SELECT {_LIST} FROM {TABLE}
WHERE app = ? AND run = ? AND generation = ? AND first > ? AND first <= ? ORDER BY first LIMIT ?
"""  # primary key
READ_LATEST = READ.replace("ORDER BY first", "ORDER BY first DESC")
REMOVE = f"DELETE FROM {TABLE} WHERE app = ? AND run = ? AND generation < ?"  # primary key
REMOVE_ALL = f"DELETE FROM {TABLE} WHERE app = ? AND run = ?"  # primary key
REMOVE_STREAMS = f"DELETE FROM {TABLE} WHERE app = ? AND run > ? AND run < ?"  # primary key
DIGESTS = f"SELECT payloads FROM {TABLE} WHERE app = ? AND run = ? AND payloads IS NOT NULL"  # primary key


def append(connection: StoreConnection, pages: Sequence[Page]) -> list[AppendVerdict]:
    return [_append(connection, page) for page in pages]


def _append(connection: StoreConnection, page: Page) -> AppendVerdict:
    if connection.execute(INSERT, _row(page)).rowcount:
        refer(connection, page.app, page.run, page.payloads)
        return APPENDED
    values = (page.app, page.run, page.generation, page.first - 1, _LAST, MAX_BEHIND)
    return judge(page, until_damaged(connection.execute(READ, values).fetchall(), page_of))


def read_log(
    connection: StoreConnection,
    app: str,
    run: InvocationId,
    *,
    generation: int = 0,
    after: int = 0,
    until: int | None = None,
    limit: int,
    latest: bool = False,
) -> list[Page]:
    """Return pages. Raises `CorruptRecord`."""
    values = (app, run, generation, after, _LAST if until is None else until, limit)
    found = [page_of(row) for row in connection.execute(READ_LATEST if latest else READ, values).fetchall()]
    checked(found[::-1] if latest else found, from_start=after == 0 and not latest)
    return found


def remove_log(connection: StoreConnection, app: str, run: InvocationId, *, before: int) -> int:
    removed = connection.execute(REMOVE, (app, run, before)).rowcount
    if removed:
        _refer_again(connection, app, run)
    return removed


def _refer_again(connection: StoreConnection, app: str, run: InvocationId) -> None:
    """Keep only references that the log still has, and those of its run. A run that is damaged or in quarantine keeps
    all of them.
    """
    digests: set[str] = set()
    if not is_stream(run):
        try:
            (row,) = connection.execute(queries.by_id(1), (app, run)).fetchall()
            digests = set(from_row(row[1:]).payloads)
        except (CorruptRecord, ValueError):
            return
    for (text,) in connection.execute(DIGESTS, (app, run)).fetchall():
        digests.update(str(text).split(","))
    forget(connection, app, [run])
    refer(connection, app, run, sorted(digests))


def remove_logs(connection: StoreConnection, app: str, ids: Sequence[str]) -> None:
    """Remove the logs of invocations that are removed, and those of their streams."""
    connection.executemany(REMOVE_ALL, [(app, id) for id in ids])
    connection.executemany(REMOVE_STREAMS, [(app, *stream_logs(id)) for id in ids])


_LAST = 2**62  # beyond every position


def _row(page: Page) -> tuple[object, ...]:
    *plain, payloads, writer = (getattr(page, name) for name in COLUMNS)
    return (*plain, ",".join(payloads) or None, writer or None)


def page_of(row: Sequence[Any]) -> Page:
    """Return the page of a row. Raises `CorruptRecord`."""
    fields = dict(zip(COLUMNS, row, strict=True))
    try:
        payloads, writer = fields.pop("payloads"), fields.pop("writer")
        if type(fields["events"]) is not bytes:  # a text would be taken for base64
            raise TypeError(f"Expected `bytes`, got `{type(fields['events']).__name__}` - at `$.events`")
        more = {"payloads": payloads.split(",") if payloads else [], "writer": "" if writer is None else writer}
        return check_page(msgspec.convert(fields | more, Page))
    except Exception as error:
        raise corrupt(PAGE, page_name(fields["run"], fields["first"]), error) from error
