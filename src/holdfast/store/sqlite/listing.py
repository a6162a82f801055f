"""`find`: the first that a filter allows in some order, at the cost of the page and not of the table.

Each order reads its index. By id, and by the end, each wanted status, task or queue is an arm that reads its index
backwards, and SQLite merges the arms. Where a filter names several kinds, the arms are of the rarest, which
is found by counting a few keys of each. The default queue is in no index: it is met soon by walking `identity`
backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.model.limits import slot_range
from holdfast.model.records import OUTCOMES, InvocationRecord
from holdfast.store.contract import Filter, Order
from holdfast.store.sqlite.quarantine import INVOCATIONS, StoreConnection, readable
from holdfast.store.sqlite.queries import ID, TABLE
from holdfast.store.sqlite.rows import LIST, from_row
from holdfast.store.sqlite.schema import ENDED

ATTRIBUTES = "holdfast_attributes"
_HAVING = "app = ? AND name = ? AND value = ?"
_ALSO = f"has.app = {TABLE}.app AND has.name = ? AND has.value = ? AND has.id = {TABLE}.id"
_MAX_ARMS = 20  # more than there are statuses
_MAX_COUNTED = 1000
# What an index is limited to.
_ONLY = {"status": "", "task": "", "queue": " AND queue <> 'default'", "parent_id": " AND parent_id IS NOT NULL"}
# Which invocations an order lists, and how; each in the words of its index.
_ORDERS = {
    Order.NEWEST: ("", "id DESC"),
    Order.LATEST_END: (f" AND {ENDED}", "changed_at DESC, id DESC"),  # holdfast_ended
    Order.OUTBOX: (" AND outbox IS NOT NULL", "changed_at, id"),  # holdfast_outbox
    Order.START_BY: (" AND start_by IS NOT NULL", "start_by, id"),  # holdfast_start_by
    Order.SLOT: (" AND slot IS NOT NULL", "slot"),  # holdfast_slot
    Order.WAKE_AT: (" AND status = 'suspended' AND wake_at IS NOT NULL", "wake_at, id"),  # holdfast_wake
}


class Listing(NamedTuple):
    """A question of `find`."""

    app: str
    where: Filter
    order: Order
    limit: int


class Driver(NamedTuple):
    """The column of the index to read, and the wanted values; of `attributes`, a name and its value."""

    column: str
    wanted: Sequence[str]


def find(
    connection: StoreConnection,
    app: str,
    where: Filter,
    limit: int,
    *,
    order: Order = Order.NEWEST,
    set_aside: bool = False,
) -> list[InvocationRecord]:
    wanted = Listing(app, where, order, limit)
    if set_aside:
        query = listing(wanted, _driver(connection, wanted))
        return readable(connection, INVOCATIONS, *query, lambda row: from_row(row[1:]))
    records: list[InvocationRecord] = []
    while len(records) < limit:  # a whole page of the newest, as far as there is one
        rows, before = rows_of(connection, wanted._replace(limit=limit - len(records))), len(records)
        for row in rows:
            try:
                records.append(from_row(row[1:]))
            except CorruptRecord as error:
                connection.leave_out(error)
        ids = [id for row in rows if type(id := row[ID]) is str]
        if len(records) - before == len(rows) or not ids or order is not Order.NEWEST:
            break
        wanted = wanted._replace(where=replace(wanted.where, before_id=ids[-1]))
    return records


def rows_of(connection: StoreConnection, wanted: Listing) -> list[Sequence[Any]]:
    """Return the rowid and the columns of each."""
    return connection.execute(*listing(wanted, _driver(connection, wanted))).fetchall()


def _driver(connection: StoreConnection, wanted: Listing) -> Driver | None:
    among = drivers(wanted)
    if len(among) <= 1:
        return among[0] if among else None
    return min(among, key=lambda each: _count(connection, wanted.app, each))


def drivers(wanted: Listing) -> list[Driver]:
    """Return the columns that the question could be answered by."""
    where = wanted.where
    if wanted.order is Order.LATEST_END:
        return [Driver("status", sorted(str(status) for status in where.statuses) or OUTCOMES)]
    if wanted.order is not Order.NEWEST:
        return []
    if where.parent is not None:  # one has few children
        return [Driver("parent_id", [where.parent])]
    among = {"status": where.statuses, "task": where.tasks, "queue": where.queues}
    having = [Driver("attributes", pair) for pair in sorted(where.attributes)]
    return having + [
        Driver(column, sorted(str(value) for value in values))
        for column, values in among.items()
        if 0 < len(values) <= _MAX_ARMS and not (column == "queue" and "default" in values)
    ]


def _count(connection: StoreConnection, app: str, driver: Driver) -> int:
    return int(connection.execute(counting(driver), (app, *driver.wanted)).fetchone()[0])


def counting(driver: Driver) -> str:
    column = driver.column
    if column == "attributes":
        return f"SELECT count(*) FROM (SELECT 1 FROM {ATTRIBUTES} WHERE {_HAVING} LIMIT {_MAX_COUNTED})"
    within = f"app = ? AND {column} IN ({_places(driver.wanted)}){_ONLY[column]}"
    return f"SELECT count(*) FROM (SELECT 1 FROM {TABLE} WHERE {within} LIMIT {_MAX_COUNTED})"


def listing(wanted: Listing, driver: Driver | None) -> tuple[str, list[object]]:
    only, order = _ORDERS[wanted.order]
    conditions = list(_conditions(wanted, driver))
    rest = "".join(f" AND {condition}" for condition, _ in conditions)
    values = [value for _, some in conditions for value in some]
    if driver is not None and driver.column == "attributes":
        # Walked backwards, and each row is looked up: CROSS JOIN keeps SQLite from doing it the other way round.
        before = [] if wanted.where.before_id is None else [wanted.where.before_id]
        having = f"SELECT id AS found FROM {ATTRIBUTES} WHERE {_HAVING}{' AND id < ?' * len(before)}"
        looked_up = f"({having}) CROSS JOIN {TABLE} ON app = ? AND id = found"
        given = [wanted.app, *driver.wanted, *before, wanted.app, *values, wanted.limit]
        return f"SELECT {TABLE}.rowid, {LIST} FROM {looked_up} WHERE 1{rest} ORDER BY found DESC LIMIT ?", given
    driven = f" AND {driver.column} = ?{_ONLY[driver.column]}" if driver else ""
    arm = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ?{driven}{only}{rest}"
    arms: list[list[object]] = [[wanted.app, each, *values] for each in (driver.wanted if driver else ())]
    arms = arms or [[wanted.app, *values]]
    each = [value for arm_values in arms for value in arm_values]
    return f"{' UNION ALL '.join([arm] * len(arms))} ORDER BY {order} LIMIT ?", [*each, wanted.limit]


def _conditions(wanted: Listing, driver: Driver | None) -> Iterable[tuple[str, Sequence[object]]]:
    """Yield what the filter says. A + keeps SQLite from choosing another index than that of the driver or the order."""
    where, by_id = wanted.where, "" if wanted.order is Order.NEWEST else "+"
    is_by_attribute = driver is not None and driver.column == "attributes"
    for pair in sorted(where.attributes):
        if driver is None or not is_by_attribute or pair != driver.wanted:
            yield f"EXISTS (SELECT 1 FROM {ATTRIBUTES} AS has WHERE {_ALSO})", pair
    for column, some in (("task", where.tasks), ("queue", where.queues), ("status", where.statuses)):
        if some and (driver is None or column != driver.column):
            yield f"+{column} IN ({_places(some)})", sorted(str(value) for value in some)
    if where.parent is not None and (driver is None or driver.column != "parent_id"):
        yield "+parent_id = ?", [where.parent]
    if where.runner is not None:
        yield "owner >= ? AND owner < ?", [f"{where.runner}/", f"{where.runner}0"]  # 0 is the character after /
    if where.rerun_of is not None:
        yield f"{by_id}rerun_of = ? AND rerun_of IS NOT NULL", [where.rerun_of]
    if where.before_id is not None and not is_by_attribute:
        yield f"{by_id}id < ?", [where.before_id]
    if where.id_ends is not None:
        yield f"substr(id, -{len(where.id_ends)}) = ?", [where.id_ends]
    if where.limit_key is not None:
        # The slots of a key lie beside each other, and perhaps those of a key that goes on where it ends.
        if wanted.order is Order.SLOT:
            yield "slot >= ? AND slot < ?", slot_range(where.limit_key)
        yield "+limit_key = ?", [where.limit_key]
    if where.since is not None:
        yield "changed_at >= ?", [where.since]
    if where.until is not None:
        yield "changed_at < ?", [where.until]
    if where.before is not None:
        yield "changed_at <= ? AND (changed_at < ? OR id < ?)", [where.before[0], *where.before]


def _places(values: Sequence[str] | frozenset[str]) -> str:
    return ", ".join("?" * len(values))
