"""Runners in SQLite: the roster, and the statements that it takes. Jobs over one transaction each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.model.records import RunnerRecord, WorkerRecord
from holdfast.store.sqlite.quarantine import RUNNERS, StoreConnection, readable
from holdfast.store.sqlite.rows import runner_of, runner_row

ENROL = "INSERT OR REPLACE INTO holdfast_runners (app, id, started_at, heartbeat_at, body) VALUES (?, ?, ?, ?, ?)"
GET_RUNNER = "SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ? AND id = ?"
SET_RUNNER = "UPDATE holdfast_runners SET heartbeat_at = ?, body = ? WHERE app = ? AND id = ?"
SILENT = """
SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ? ORDER BY heartbeat_at, id
"""  # heartbeats
REMOVE_RUNNER = "DELETE FROM holdfast_runners WHERE app = ? AND id = ? AND heartbeat_at = coalesce(?, heartbeat_at)"
ROSTER = "SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ?"


def enrol(connection: StoreConnection, runner: RunnerRecord) -> None:
    connection.execute(ENROL, runner_row(runner))


def heartbeat(
    connection: StoreConnection,
    app: str,
    runner_id: str,
    workers: Sequence[WorkerRecord] = (),
    *,
    ticks: bool = True,
    draining: bool = False,
) -> RunnerRecord | None:
    facts = {"workers": tuple(workers), "can_run_atomic_service": ticks, "draining": draining}
    return _alter(connection, app, runner_id, facts | {"heartbeat_at": connection.now})


def ask_runner(
    connection: StoreConnection,
    app: str,
    runner_id: str,
    *,
    wish: str | None = None,
    sits_out_until: float | None = None,
) -> bool:
    asked = {"wish": wish, "sits_out_until": sits_out_until}
    facts = {name: value for name, value in asked.items() if value is not None}
    return _alter(connection, app, runner_id, facts) is not None


def _alter(connection: StoreConnection, app: str, id: str, facts: Mapping[str, object]) -> RunnerRecord | None:
    """Change these facts of a roster entry. Return it; None if there is none that can be read."""
    row = connection.execute(GET_RUNNER, (app, id)).fetchone()
    if row is None:
        return None
    try:
        before = runner_of(row)
    except CorruptRecord as error:
        connection.set_aside(RUNNERS, row, error)
        return None
    runner = replace(before, **facts)
    if "heartbeat_at" in facts and runner.heartbeat_at == before.heartbeat_at:  # even if its clock stands still
        runner = replace(runner, heartbeat_at=math.nextafter(before.heartbeat_at, math.inf))
    _, _, _, heartbeat_at, body = runner_row(runner)
    connection.execute(SET_RUNNER, (heartbeat_at, body, app, id))
    return runner


def silent(connection: StoreConnection, app: str) -> list[tuple[RunnerRecord, float]]:
    found = readable(connection, RUNNERS, SILENT, (app,), runner_of)
    return [(runner, connection.now - runner.heartbeat_at) for runner in found]


def roster(connection: StoreConnection, app: str) -> list[RunnerRecord]:
    found = readable(connection, RUNNERS, ROSTER, (app,), runner_of)
    return sorted(found, key=lambda runner: (runner.started_at, runner.id))


def remove_runner(connection: StoreConnection, app: str, runner_id: str, *, heartbeat_at: float | None = None) -> bool:
    return connection.execute(REMOVE_RUNNER, (app, runner_id, heartbeat_at)).rowcount > 0
