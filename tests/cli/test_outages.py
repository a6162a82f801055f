"""The commands while MongoDB is away: a real server, killed and started again."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient
from tests.cli.processes import Command, Process, children, eventually, is_gone
from tests.support.mongod import Mongod, free_port
from tests.support.patience import patient

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
    runner.says("/1: it serves")
    before = len(runner.err)
    server.kill()
    killed_at = time.monotonic()
    runner.says("has not written a heartbeat for")
    runner.says(": heartbeat, try 1 failed")
    assert time.monotonic() - killed_at < 5
    eventually(lambda: time.monotonic() - killed_at > 4, "four seconds, in which some forty heartbeats fail")
    told = runner.err[before:]
    assert len(told) < 25, "".join(told)
    assert not [line for line in told if " ERROR " in line or "given up" in line]
    assert all(server.address in line for line in told if "looking for work" in line)
    server.start()
    runner.says("wrote a heartbeat again, after")
    submitted = start("submit", "--app", "shop:app", "--wait", "--timeout", "30s", "add", "1", "2").ends()
    assert submitted.out == "3\n"
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.faults)])
def test_the_third_signal_ends_the_whole_family_at_once_even_without_the_store(
    server: Mongod,
    start: Callable[..., Process],
    mongo_shop: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setenv("HOLDFAST_RETRY_BASE_DELAY", "30s")  # whoever waits for the store waits for long
    start("submit", "--app", "shop:app", "hold", "begun").ends()
    runner = start("run", "shop:app", "--drain-timeout", "10m")
    runner.says("/1: it serves")
    eventually((mongo_shop / "begun").exists, "the task has begun")
    (worker,) = [pid for pid in children(runner.pid) if not is_gone(pid)]
    server.kill()
    runner.says("has not written a heartbeat for")
    assert not is_gone(worker)

    def is_over() -> bool:
        runner.signal(number)  # again and again: signals that come together are one
        return runner.is_over

    eventually(is_over, "it has heard three of them", seconds=patient(10))
    try:
        eventually(lambda: is_gone(worker), "so has its worker", seconds=patient(5))
    finally:
        if not is_gone(worker):
            os.killpg(worker, signal.SIGKILL)
    assert runner.ends().code == -number


ID = "0" * 26
LOOKING = [["ps"], ["show", ID], ["runners"], ["services"], ["store", "check"]]
looking = pytest.mark.parametrize("command", LOOKING, ids=" ".join)


def test_looking_at_a_server_that_is_down_ends_soon_with_one_sentence(folder: Path) -> None:
    """All commands wait at the same time: nearly all of it is the driver's wait for a server."""
    url = f"mongodb://127.0.0.1:{free_port()}/shop"
    answers = [process.ends() for process in [Process(folder, *command, "--url", url) for command in LOOKING]]
    for command, answer in zip(LOOKING, answers, strict=True):
        (seconds,) = re.findall(r"was tried once in ([\d.]+) s", answer.err)
        assert float(seconds) < 8, command  # the driver takes 5 s to find out
        assert (answer.code, answer.out) == (1, ""), command
        assert answer.err.startswith("error: MongoDB at 127.0.0.1:"), command
        assert answer.err.endswith("Is it running, and does this host reach it?\n"), command
        assert answer.err.count("\n") == 1, command


@pytest.mark.faults
def test_whoever_sets_how_long_to_try_is_obeyed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_RETRIES", "2")
    url = f"mongodb://127.0.0.1:{free_port()}/shop?serverSelectionTimeoutMS=10"
    answer = Process(folder, "ps", "--url", url).ends()
    assert "was tried 3 times" in answer.err


@looking
def test_looking_at_a_mistyped_database_makes_nothing(
    folder: Path, holdfast: Command, replica_set: str, command: list[str]
) -> None:
    url = replica_set.replace("/test?", "/shpo?")
    answer = holdfast(*command, "--url", url)
    assert answer.code == 1
    if command[0] == "store":
        assert "Holdfast's collections are not there" in answer.out
    else:
        assert answer.err.startswith("error: there is no store in the database 'shpo' of mongodb://127.0.0.1:")
        assert "Is the URL right?" in answer.err
    with MongoClient[dict[str, object]](url) as client:
        assert client["shpo"].list_collection_names() == []
