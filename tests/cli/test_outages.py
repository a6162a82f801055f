"""The commands while MongoDB is away: a real server, killed and started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.processes import Process, eventually
from tests.mongod import Mongod

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mongo")]

SHOP = """
import pathlib, time
from holdfast import App

app = App("{url}")

@app.task
def add(a, b):
    return a + b

@app.task
def hold(name):
    pathlib.Path(name).touch()
    time.sleep(600)
"""
QUICK = {
    "HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.1",
    "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": "2s",
    "HOLDFAST_POLL_INTERVAL_SECONDS": "0.1",
    "HOLDFAST_RETRY_BASE_DELAY": "0.02",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Mongod]:
    server = Mongod(tmp_path / "mongod")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def mongo_shop(folder: Path, server: Mongod, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    (folder / "shop.py").write_text(SHOP.format(url=f"{server.url('shop')}&serverSelectionTimeoutMS=100"))
    return folder


@pytest.fixture
def start(mongo_shop: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(mongo_shop, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def test_an_outage_is_told_soon_and_in_few_lines_and_the_runner_goes_on_after_it(
    server: Mongod, start: Callable[..., Process]
) -> None:
    runner = start("run", "shop:app")
    runner.says("/1 is ready")
    before = len(runner.err)
    server.kill()
    killed_at = time.monotonic()
    runner.says("is not heard by the store")
    runner.says("cannot be reached: heartbeat, try 1 failed")
    assert time.monotonic() - killed_at < 2
    eventually(lambda: time.monotonic() - killed_at > 8, "eight seconds, in which some eighty heartbeats fail")
    told = runner.err[before:]
    assert len(told) < 40, "".join(told)
    assert not [line for line in told if " ERROR " in line or "given up" in line]
    assert all(server.address in line for line in told if "looking for work" in line)
    server.start()
    runner.says("is heard again, after")
    submitted = start("submit", "--app", "shop:app", "--wait", "--timeout", "30s", "add", "1", "2").ends()
    assert submitted.out == "3\n"
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0
