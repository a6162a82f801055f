"""The dashboard and the rules name what the endpoint has, and each rule fires in its situation and not before."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.cli.processes import eventually
from tests.metrics.conftest import RunnerProcess
from tests.metrics.promql import Evaluation, Scrape, expressions
from tests.support.patience import patient

from holdfast.model.records import RunnerRecord

FOLDER = Path(__file__).parents[2] / "integrations" / "monitoring"
RULES = dict(
    re.findall(r"- alert: (\w+)\n +expr: (.+)\n", (FOLDER / "holdfast.rules.yml").read_text()),
)
DASHBOARD = list(expressions(json.loads((FOLDER / "holdfast.dashboard.json").read_text())))
SCRAPE_SECONDS = 0.3
ALERTS = ("HoldfastWorkWaits", "HoldfastRunnerSilent", "HoldfastFailures", "HoldfastRecoveries", "HoldfastSlotSkips")


def fires(alert: str, first: Scrape, last: Scrape) -> bool:
    return bool(Evaluation(RULES[alert], first, last).value)


class Watch:
    """Scrapes of a runner, a few per second: each costs it some work."""

    def __init__(self, runner: RunnerProcess) -> None:
        self._runner = runner
        self._last = runner.scrape()

    def latest(self) -> Scrape:
        if time.monotonic() - self._last.at > SCRAPE_SECONDS:
            self._last = self._runner.scrape()
        return self._last


def test_there_are_five_rules() -> None:
    assert tuple(RULES) == ALERTS


@pytest.mark.slow
def test_rules_fire_in_their_situation_and_not_before(runner: RunnerProcess, tmp_path: Path) -> None:
    app, watch = runner.app, Watch(runner)
    first = watch.latest()
    runs = [app.get_task("add").submit(number) for number in range(-2, 20)]
    for run in runs:
        run.result(patient(60))
    eventually(lambda: ends(watch.latest()) == 22, lambda: f"the workers report: {watch.latest().samples}")
    good = runner.scrape()
    assert [alert for alert in ALERTS if fires(alert, first, good)] == []
    for expression in [*RULES.values(), *DASHBOARD]:
        check_names(expression, first, good)

    store_old_work(runner)
    for _ in range(10):
        app.get_task("boom").submit()
    # Before any worker is killed: it would take its last half second of counts with it.
    eventually(lambda: fires("HoldfastFailures", good, watch.latest()), "HoldfastFailures")
    runs = [app.get_task("hang").submit() for _ in range(6)]
    eventually(lambda: all(run.status == "running" for run in runs), "they hang")
    (record,) = app.runners()
    for worker in record.workers:
        os.kill(worker.pid, signal.SIGKILL)
    for run in runs:
        run.result(patient(60))
    join_idle_runner(runner)
    for alert in ("HoldfastWorkWaits", "HoldfastRecoveries", "HoldfastSlotSkips"):
        eventually(lambda alert=alert: fires(alert, good, watch.latest()), alert)  # type: ignore[misc]
    assert not fires("HoldfastRunnerSilent", good, watch.latest())

    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")  # no heartbeat is written
        eventually(lambda: fires("HoldfastRunnerSilent", good, watch.latest()), "HoldfastRunnerSilent")
        eventually(lambda: runner.asked("/health/ready") == (503, "no\n"), "it is not ready")
        assert runner.asked("/health/live") == (200, "ok\n")
    eventually(lambda: runner.asked("/health/ready") == (200, "ok\n"), "it is ready again")


def ends(scrape: Scrape) -> float:
    return sum(scrape.samples.get("holdfast_ended_total", {}).values())


def check_names(expression: str, first: Scrape, last: Scrape) -> None:
    """Every series that an expression names is there, with the labels that it asks for and groups by."""
    evaluation = Evaluation(expression, first, last)
    for selector in evaluation.selectors:
        found = [dict(labels) for labels in last.samples.get(selector.name, {})]
        assert found, f"{selector.name} of {expression!r} is not at the endpoint"
        assert any(labels.items() >= {*selector.wanted} for labels in found), (selector, found)
        assert evaluation.by <= found[0].keys(), (expression, found[0])


def store_old_work(runner: RunnerProcess) -> None:
    """Store a call that is due since 20 minutes in a queue that the runner does not serve."""
    app = runner.app
    engine = app.runtime.ready()
    record, _ = app.get_task("add").options(queue="mail").prepared(engine, (1,), {})
    old = replace(record, due_at=record.due_at - 1200, created_at=record.created_at - 1200)
    app.runtime.run(engine.submitter.submit([old]))


def join_idle_runner(runner: RunnerProcess) -> None:
    """Put a runner on the roster that sends a heartbeat and does nothing else."""
    engine = runner.app.runtime.ready()
    (real,) = runner.app.runners()
    now = engine.store.now()
    idle: RunnerRecord = replace(real, id="0" * 26, started_at=now, heartbeat_at=now, workers=())
    runner.app.runtime.run(engine.store.enrol(idle))
