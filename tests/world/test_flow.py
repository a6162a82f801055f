"""Whole workflows on one server and on two, as an application runs them; without faults, nothing happens twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.patience import eventually
from tests.world.flow import Flow
from tests.world.serving import serving

from holdfast import App


def ran(flow: Flow, count: int) -> list[str]:
    """Run workflows to their ends."""
    runs = [flow.start(number) for number in range(count)]
    waiting = list(runs)

    def approved() -> bool:
        waiting[:] = [run for run in waiting if not flow.approve(run)]
        return not waiting

    eventually(approved)
    eventually(lambda: all(flow.call("runs.get", runId=run)["status"] == "completed" for run in runs))
    return runs


def test_workflows_on_one_server(tmp_path: Path) -> None:
    with App("memory://", name="shop") as app, serving(app) as served:
        flow = Flow(lambda: [served.client.url], tmp_path)
        with flow.application:
            flow.check(ran(flow, 3), app)


def test_each_write_may_lose_its_reply(tmp_path: Path) -> None:
    with App("memory://", name="shop") as app, serving(app) as served:
        flow = Flow(lambda: [served.client.url], tmp_path, loses_replies=True)
        with flow.application:
            flow.check(ran(flow, 2), app)


@pytest.mark.slow
def test_workflows_on_two_servers_of_one_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with App(url, name="shop") as one, App(url, name="shop") as two:
        with serving(one) as first, serving(two) as second:
            flow = Flow(lambda: [first.client.url, second.client.url], tmp_path)
            turns = iter(range(10**6))
            flow.servers = lambda: [first.client.url, second.client.url][:: 1 if next(turns) % 2 else -1]
            with flow.application:
                flow.check(ran(flow, 4), one)
