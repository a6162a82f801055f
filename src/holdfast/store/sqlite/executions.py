"""Executions of services in SQLite: jobs over one transaction each. A unique index is the gate."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.store.sqlite.aside import EXECUTIONS, SetAside, readable
from holdfast.store.sqlite.rows import execution_of

_COLUMNS = ", ".join(EXECUTIONS.columns)

PUT = f"INSERT INTO holdfast_executions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
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


def put(connection: sqlite3.Connection, app: str, execution: Execution, set_aside: SetAside) -> Execution | None:
    e = execution
    values = (e.id, e.service, e.runner_id, e.started_at, e.window_ends_at, e.status.value, e.ended_at, e.reason)
    while not connection.execute(PUT, (app, *values)).rowcount:
        if connection.execute(GET, (app, e.id)).fetchone():
            return None
        if running := _readable(connection, RUNNING, (app, e.service), set_aside):
            return running[0]
        # What was in the way could not be read, and was set aside.
    return None


def end(connection: sqlite3.Connection, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
    if connection.execute(END, (status.value, at, reason, app, id)).rowcount:
        return True
    row = connection.execute(GET, (app, id)).fetchone()
    wanted = {"status": status.value, "ended_at": at, "reason": reason}
    return row is not None and wanted.items() <= dict(zip(EXECUTIONS.columns, row, strict=True)).items()


def listing(
    connection: sqlite3.Connection, app: str, service: str, limit: int, set_aside: SetAside | None
) -> list[Execution]:
    return _readable(connection, LIST, (app, service, limit), set_aside)


def _readable(
    connection: sqlite3.Connection, query: str, values: Sequence[object], set_aside: SetAside | None
) -> list[Execution]:
    return readable(connection, EXECUTIONS, query, values, lambda row: execution_of(row[1:]), set_aside)


def forget(connection: sqlite3.Connection, app: str, ids: Sequence[str]) -> None:
    connection.executemany(FORGET, [(app, id) for id in ids])
