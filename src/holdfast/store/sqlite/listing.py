"""`find`: the newest that a filter allows, at the cost of the page and not of the table.

Each wanted status, task or queue is an arm that reads its index backwards, and SQLite merges the arms by id. Where a
filter names several kinds, the arms are of the one that is rarest; that is found by counting a few keys of each. The
default queue is in no index: it is met soon by walking `identity` backwards.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.records import InvocationRecord
from holdfast.store.contract import Filter
from holdfast.store.sqlite.aside import INVOCATIONS, SetAside
from holdfast.store.sqlite.queries import ID_COLUMN, TABLE
from holdfast.store.sqlite.rows import LIST, from_row

_MOST_ARMS = 20  # more than there are statuses
_MOST_COUNTED = 1000
# What an index is limited to.
_ONLY = {"status": "", "task": "", "queue": " AND queue <> 'default'", "parent_id": " AND parent_id IS NOT NULL"}


class Driver(NamedTuple):
    """The column whose index is read, and the values that are wanted of it."""

    column: str
    wanted: Sequence[str]


def found(
    connection: sqlite3.Connection, app: str, where: Filter, limit: int, set_aside: SetAside | None
) -> list[InvocationRecord]:
    """Return a whole page, as far as there is one. Those that cannot be read are given to `set_aside`.

    Raises `CorruptRecord` without one.
    """
    records: list[InvocationRecord] = []
    while len(records) < limit:
        rows, before = find(connection, app, where, limit - len(records)), len(records)
        for row in rows:
            try:
                records.append(from_row(row[1:]))
            except CorruptRecord as error:
                if set_aside is None:
                    raise
                set_aside(connection, INVOCATIONS, row, error)
        ids = [id for row in rows if type(id := row[1 + ID_COLUMN]) is str]
        if len(records) - before == len(rows) or not ids:
            break
        where = replace(where, before_id=ids[-1])
    return records


def find(connection: sqlite3.Connection, app: str, where: Filter, limit: int) -> list[Sequence[Any]]:
    """Rowid and columns of each."""
    among = drivers(where)
    driver = None
    if among:
        driver = among[0] if len(among) == 1 else min(among, key=lambda each: _count(connection, app, each))
    statement, values = listing(app, where, limit, driver)
    return connection.execute(statement, values).fetchall()


def drivers(where: Filter) -> list[Driver]:
    """The columns that a filter could be answered by."""
    if where.parent is not None:  # one has few children
        return [Driver("parent_id", [where.parent])]
    wanted = {"status": where.statuses, "task": where.tasks, "queue": where.queues}
    return [
        Driver(column, sorted(str(value) for value in values))
        for column, values in wanted.items()
        if 0 < len(values) <= _MOST_ARMS and not (column == "queue" and "default" in values)
    ]


def _count(connection: sqlite3.Connection, app: str, driver: Driver) -> int:
    return int(connection.execute(counting(driver), (app, *driver.wanted)).fetchone()[0])


def counting(driver: Driver) -> str:
    column = driver.column
    within = f"app = ? AND {column} IN ({_places(driver.wanted)}){_ONLY[column]}"
    return f"SELECT count(*) FROM (SELECT 1 FROM {TABLE} WHERE {within} LIMIT {_MOST_COUNTED})"


def listing(app: str, where: Filter, limit: int, driver: Driver | None) -> tuple[str, list[object]]:
    rest, values = "", list[object]()
    for column, some in (("task", where.tasks), ("queue", where.queues), ("status", where.statuses)):
        if some and (driver is None or column != driver.column):
            rest += f" AND +{column} IN ({_places(some)})"  # the + keeps it from choosing the index
            values += sorted(str(value) for value in some)
    if where.runner is not None:
        rest += " AND owner >= ? AND owner < ?"
        values += [f"{where.runner}/", f"{where.runner}0"]  # 0 is the character after /
    if where.rerun_of is not None:
        rest += " AND rerun_of = ? AND rerun_of IS NOT NULL"
        values.append(where.rerun_of)
    if where.before_id is not None:
        rest += " AND id < ?"
        values.append(where.before_id)
    driven = f" AND {driver.column} = ?{_ONLY[driver.column]}" if driver else ""
    arm = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ?{driven}{rest}"
    arms: list[list[object]] = [[app, value, *values] for value in driver.wanted] if driver else [[app, *values]]
    each = [value for arm_values in arms for value in arm_values]
    return f"{' UNION ALL '.join([arm] * len(arms))} ORDER BY id DESC LIMIT ?", [*each, limit]


def _places(values: Sequence[str] | frozenset[str]) -> str:
    return ", ".join("?" * len(values))
