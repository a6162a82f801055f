"""A roster for tests of what is told about runners, at a time that the test knows."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import pytest

from holdfast import App
from holdfast.cli.reach import with_store
from holdfast.model.records import RunnerRecord

NOW = 1_800_000_000.0  # the start of a cycle of one minute


def set_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("holdfast.store.sqlite.store.SqliteStore.now", lambda _: NOW + seconds)


def enrol(app: App, *ids: str, **facts: Any) -> None:
    for number, id in enumerate(ids):
        given: dict[str, Any] = {"started_at": NOW - 3600 + number, "heartbeat_at": NOW - 1, "version": "9.9"} | facts
        runner = RunnerRecord(id=id, app=app.name, host="h", pid=1, concurrency=4, tasks=("shop:add",), **given)
        with_store(app, methodcaller("enrol", runner))


def entry(app: App, id: str) -> RunnerRecord:
    (found,) = [runner for runner in with_store(app, lambda store: store.roster(app.name)) if runner.id == id]
    return found
