"""Executions of services in SQLite: jobs over one transaction each. A unique index is the gate."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from holdfast.lifecycle.slots import Execution, ExecutionStatus

_COLUMNS = "id, service, runner_id, started_at, window_ends_at, status, ended_at, reason"

PUT = f"INSERT INTO holdfast_executions (app, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
GET = f"SELECT {_COLUMNS} FROM holdfast_executions WHERE app = ? AND id = ?"
RUNNING = (
    f"SELECT {_COLUMNS} FROM holdfast_executions WHERE app = ? AND service = ? AND status = 'running'"  # executing
)
END = """
UPDATE holdfast_executions SET status = ?, ended_at = ?, reason = ? WHERE app = ? AND id = ? AND status = 'running'
"""
LIST = f"""
SELECT {_COLUMNS} FROM holdfast_executions WHERE app = ? AND service = ? ORDER BY started_at DESC, id DESC LIMIT ?
"""  # executed
FORGET = "DELETE FROM holdfast_executions WHERE app = ? AND id = ? AND status <> 'running'"


def put(connection: sqlite3.Connection, app: str, execution: Execution) -> Execution | None:
    e = execution
    values = (e.id, e.service, e.runner_id, e.started_at, e.window_ends_at, e.status.value, e.ended_at, e.reason)
    if connection.execute(PUT, (app, *values)).rowcount or connection.execute(GET, (app, e.id)).fetchone():
        return None
    return _execution(connection.execute(RUNNING, (app, e.service)).fetchone())


def end(connection: sqlite3.Connection, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
    if connection.execute(END, (status.value, at, reason, app, id)).rowcount:
        return True
    row = connection.execute(GET, (app, id)).fetchone()
    return row is not None and (row[5], row[6], row[7]) == (status.value, at, reason)


def listing(connection: sqlite3.Connection, app: str, service: str, limit: int) -> list[Execution]:
    return [_execution(row) for row in connection.execute(LIST, (app, service, limit))]


def forget(connection: sqlite3.Connection, app: str, ids: Sequence[str]) -> None:
    connection.executemany(FORGET, [(app, id) for id in ids])


def _execution(row: Sequence[object]) -> Execution:
    id, service, runner_id, started_at, window_ends_at, status, ended_at, reason = row
    return Execution(
        id=str(id),
        service=str(service),
        runner_id=str(runner_id),
        started_at=started_at,  # type: ignore[arg-type]
        window_ends_at=window_ends_at,  # type: ignore[arg-type]
        status=ExecutionStatus(str(status)),
        ended_at=ended_at,  # type: ignore[arg-type]
        reason=str(reason),
    )
