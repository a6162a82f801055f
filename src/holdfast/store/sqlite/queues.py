"""Queues in SQLite: what lies in each, and which are paused. Jobs over one transaction each."""

from __future__ import annotations

import sqlite3

from holdfast.lifecycle.queues import MOST_OPERATIONS, QueueDepth, QueuePause, gathered, in_lane
from holdfast.lifecycle.status import OWNED
from holdfast.store.sqlite.queries import TABLE
from holdfast.store.sqlite.schema import READY, WAITING, status_list

READY_DEPTHS = f"""
SELECT lane, sum(due_at <= ?), sum(due_at > ?), min(due_at) FROM {TABLE} WHERE app = ? AND {READY} GROUP BY lane
"""  # holdfast_ready, without reading a row
OWNED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND status IN ({status_list(OWNED)})"  # holdfast_status
BLOCKED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND {WAITING}"  # holdfast_waiting or holdfast_status

GET = "SELECT paused_at, paused_by, reason, operations FROM holdfast_queues WHERE app = ? AND name = ?"
PUT = """
INSERT OR REPLACE INTO holdfast_queues (app, name, paused_at, paused_by, reason, operations) VALUES (?, ?, ?, ?, ?, ?)
"""
PAUSES = """
SELECT name, paused_at, paused_by, reason, operations FROM holdfast_queues
WHERE app = ? AND paused_at IS NOT NULL ORDER BY name
"""


def depths(connection: sqlite3.Connection, app: str, at: float) -> list[QueueDepth]:
    parts = [in_lane(*row) for row in connection.execute(READY_DEPTHS, (at, at, app))]
    parts += [QueueDepth(name=queue, running=1) for (queue,) in connection.execute(OWNED_QUEUES, (app,))]
    parts += [QueueDepth(name=queue, blocked=1) for (queue,) in connection.execute(BLOCKED_QUEUES, (app,))]
    return gathered(parts)


def pause(connection: sqlite3.Connection, wanted: QueuePause) -> QueuePause | None:
    row = connection.execute(GET, (wanted.app, wanted.name)).fetchone()
    done = [] if row is None else row[3].split("\n")
    if row is not None and row[0] is not None:
        return _pause(wanted.app, wanted.name, *row)
    if wanted.operation in done:
        return None
    operations = _joined(done, wanted.operation)
    connection.execute(PUT, (wanted.app, wanted.name, wanted.at, wanted.by, wanted.reason, operations))
    return wanted


def resume(connection: sqlite3.Connection, app: str, name: str, operation: str) -> bool:
    row = connection.execute(GET, (app, name)).fetchone()
    if row is None or operation in row[3].split("\n"):
        return row is not None
    if row[0] is None:
        return False
    connection.execute(PUT, (app, name, None, "", "", _joined(row[3].split("\n"), operation)))
    return True


def pauses(connection: sqlite3.Connection, app: str) -> list[QueuePause]:
    return [_pause(app, name, *row) for name, *row in connection.execute(PAUSES, (app,))]


def _joined(before: list[str], operation: str) -> str:
    """The last operations, the one that paused it among them: nobody can pause it before it is resumed."""
    return "\n".join([*before, operation][-MOST_OPERATIONS:])


def _pause(app: str, name: str, at: float, by: str, reason: str, operations: str) -> QueuePause:
    return QueuePause(app=app, name=name, at=at, by=by, reason=reason, operation=operations.split("\n")[-1])
