"""Queues in SQLite: what lies in each, and which are paused. Jobs over one transaction each."""

from __future__ import annotations

import sqlite3
from typing import Any

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.decoding import EARLIEST, LATEST
from holdfast.lifecycle.queues import MOST_OPERATIONS, QueueDepth, QueuePause, gathered, in_lane
from holdfast.lifecycle.status import OWNED
from holdfast.store.sqlite.aside import QUEUES, SetAside, readable
from holdfast.store.sqlite.queries import TABLE
from holdfast.store.sqlite.rows import pause_of
from holdfast.store.sqlite.schema import READY, WAITING, status_list

READY_DEPTHS = f"""
SELECT lane, sum(due_at <= ?), sum(due_at > ?), min(due_at) FROM {TABLE} WHERE app = ? AND {READY} GROUP BY lane
"""  # holdfast_ready, without reading a row
OWNED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND status IN ({status_list(OWNED)})"  # holdfast_status
BLOCKED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND {WAITING}"  # holdfast_waiting or holdfast_status

_COLUMNS = ", ".join(QUEUES.columns)
GET = f"SELECT {_COLUMNS} FROM holdfast_queues WHERE app = ? AND name = ?"
PUT = """
INSERT OR REPLACE INTO holdfast_queues (app, name, paused_at, paused_by, reason, operations) VALUES (?, ?, ?, ?, ?, ?)
"""
PAUSES = f"SELECT {_COLUMNS} FROM holdfast_queues WHERE app = ? AND paused_at IS NOT NULL ORDER BY name"


def depths(connection: sqlite3.Connection, app: str, at: float) -> list[QueueDepth]:
    lanes = [row for row in connection.execute(READY_DEPTHS, (at, at, app)) if type(row[0]) is str]
    parts = [in_lane(lane, ready, later, _moment(oldest)) for lane, ready, later, oldest in lanes]
    running = [queue for (queue,) in connection.execute(OWNED_QUEUES, (app,)) if type(queue) is str]
    blocked = [queue for (queue,) in connection.execute(BLOCKED_QUEUES, (app,)) if type(queue) is str]
    parts += [QueueDepth(name=queue, running=1) for queue in running]
    parts += [QueueDepth(name=queue, blocked=1) for queue in blocked]
    return gathered(parts)


def _moment(value: object) -> float | None:
    return value if type(value) is float and EARLIEST <= value <= LATEST else None


def pause(connection: sqlite3.Connection, wanted: QueuePause, set_aside: SetAside) -> QueuePause | None:
    row = _row(connection, wanted.app, wanted.name, set_aside)
    done = [] if row is None else row[5].split("\n")
    if row is not None and row[2] is not None:
        return pause_of(wanted.app, row[1:])
    if wanted.operation in done:
        return None
    operations = _joined(done, wanted.operation)
    connection.execute(PUT, (wanted.app, wanted.name, wanted.at, wanted.by, wanted.reason, operations))
    return wanted


def resume(connection: sqlite3.Connection, app: str, name: str, operation: str, set_aside: SetAside) -> bool:
    row = _row(connection, app, name, set_aside)
    if row is None or operation in row[5].split("\n"):
        return row is not None
    if row[2] is None:
        return False
    connection.execute(PUT, (app, name, None, "", "", _joined(row[5].split("\n"), operation)))
    return True


def pauses(connection: sqlite3.Connection, app: str, set_aside: SetAside | None) -> list[QueuePause]:
    return readable(connection, QUEUES, PAUSES, (app,), lambda row: pause_of(app, row[1:]), set_aside)


def _row(connection: sqlite3.Connection, app: str, name: str, set_aside: SetAside) -> tuple[Any, ...] | None:
    """The row of a queue, paused or not. One that cannot be read is set aside, and the queue is not paused."""
    row: tuple[Any, ...] | None = connection.execute(GET, (app, name)).fetchone()
    if row is None:
        return None
    try:
        pause_of(app, (*row[1:2], 0.0 if row[2] is None else row[2], *row[3:]))
    except CorruptRecord as error:
        set_aside(connection, QUEUES, row, error)
        return None
    return row


def _joined(before: list[str], operation: str) -> str:
    """The last operations, the one that paused it among them: nobody can pause it before it is resumed."""
    return "\n".join([*before, operation][-MOST_OPERATIONS:])
