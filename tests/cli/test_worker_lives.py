"""How many worker processes there are, and when they end: whatever user code does around and inside its tasks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Process, children, eventually, is_gone
from tests.support.patience import patient

from holdfast.cli.discovery import import_module

SHOP = """
import asyncio, contextlib, ctypes, os, subprocess, time
from pathlib import Path
from holdfast import App

app = App("sqlite:///shop.db", runner_heartbeat_seconds=0.2, poll_interval_seconds=0.2)
HERE = Path(__file__).parent

def tell(name):
    with open(HERE / "told", "a") as told:
        told.write(f"{name} {os.getpid()}\\n")

@app.task
def hold(name):
    tell(name)
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.01)
    return os.getpid()

@app.task
def who():
    return os.getpid()

@app.task
async def block_the_loop(name):
    tell(name)
    time.sleep(600)

@app.task
def keep_the_interpreter(name):
    tell(name)
    ctypes.PyDLL(None).sleep(600)  # a PyDLL keeps the lock

@app.task
def start_a_program(name):
    with subprocess.Popen(["sleep", "600"]) as started:
        (HERE / "program").write_text(str(started.pid))
        tell(name)
"""
HOOKS = """
@app.on_worker_start
def hello():
    tell("hello")

@app.on_worker_stop
def goodbye():
    tell("goodbye")
"""
HANGING_START = """
@app.on_worker_start
async def never_ready():
    tell("hello")
    await asyncio.sleep(600)
"""
HANGING_STOP = """
@app.on_worker_stop
async def never_done():
    tell("goodbye")
    await asyncio.sleep(600)
"""
BLOCKING_STOP = HANGING_STOP.replace("await asyncio.sleep", "time.sleep")
IMPATIENT = """
from holdfast.executors import lifespan
lifespan.LEAVE_ONE_SECONDS, lifespan.LEAVE_SECONDS, lifespan.TURN_SECONDS = 0.5, 1.0, 0.5
"""
RAISING_STOP = """
@app.lifespan
@contextlib.contextmanager
def pool():
    yield
    tell("closed")

@app.on_worker_stop
def no_goodbye():
    raise RuntimeError("the pool does not close")
"""

pytestmark = pytest.mark.slow


class Shop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._module: Any = None
        self._runners: list[Process] = []

    def run(self, code: str, *arguments: str, ready: str = "started worker") -> Process:
        (self.folder / "shop.py").write_text(SHOP + code)
        self._module = self._module or import_module("shop", self.folder)
        runner = Process(self.folder, "run", "shop:app", *arguments)
        self._runners.append(runner)
        runner.says(ready)
        return runner

    def submit(self, task: str, *arguments: object) -> Any:
        return getattr(self._module, task).submit(*arguments)

    def told(self, name: str) -> list[int]:
        """The processes that have told this, or anything."""
        told = self.folder / "told"
        lines = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
        return [int(pid) for what, pid in lines if name in (what, "")]

    def begun(self, name: str) -> int:
        eventually(lambda: self.told(name), f"{name} has begun")
        return self.told(name)[0]

    def let_go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def close(self) -> None:
        for runner in self._runners:
            workers = set(children(runner.pid)) | set(self.told("")) - {runner.pid}
            runner.signal(signal.SIGKILL)
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            runner.ends()
            print(*runner.err, sep="", end="\n\n")
        if self._module is not None:
            self._module.app.close()


@pytest.fixture
def shop(folder: Path) -> Iterator[Shop]:
    shop = Shop(folder)
    yield shop
    shop.close()


# --- how many there are


def test_workers_that_retire_are_no_more_than_those_that_work(shop: Shop) -> None:
    runner = shop.run("", "--workers", "1", "--concurrency", "1", "--max-tasks-per-worker", "1", ready="/1: it serves")
    calls = [shop.submit("hold", name) for name in "abcd"]
    shop.begun("a")
    shop.begun("b")  # by the successor, which retires too
    watched_until = time.monotonic() + 2.0  # a third one takes half a second to come
    while time.monotonic() < watched_until:
        assert len(children(runner.pid)) <= 2
    assert shop.told("c") == []
    shop.let_go("b")
    shop.begun("c")
    for name in "acd":
        shop.let_go(name)
    assert len({call.result(timeout=patient(30)) for call in calls}) == 4
    runner.signal(signal.SIGTERM)
    assert runner.ends().out.endswith(": 4 started, 4 ended, 0 interrupted\n")


def test_a_stop_is_heard_while_there_is_no_room_for_a_successor(shop: Shop) -> None:
    options = ("--workers", "1", "--concurrency", "1", "--max-tasks-per-worker", "1", "--drain-timeout", "0.1s")
    runner = shop.run("", *options, ready="/1: it serves")
    for name in "abc":
        shop.submit("hold", name)
    shop.begun("a")
    shop.begun("b")
    runner.signal(signal.SIGTERM)
    assert runner.ends().out.endswith(": 2 started, 0 ended, 2 interrupted\n")


# --- with their runner, whatever they do


@pytest.mark.parametrize(
    ("hooks", "task"),
    [
        pytest.param(HOOKS, "block_the_loop", id="blocked loop, hooks"),
        pytest.param("", "block_the_loop", id="blocked loop", marks=pytest.mark.faults),
        pytest.param("", "keep_the_interpreter", id="interpreter lock"),
        pytest.param("", "start_a_program", id="program"),
        pytest.param(HANGING_START, "", id="hanging start", marks=pytest.mark.faults),
        pytest.param(HANGING_STOP, "hold", id="hanging stop"),
    ],
)
def test_a_worker_does_not_outlive_its_runner(shop: Shop, hooks: str, task: str) -> None:
    if "interpreter" in task and not sys.platform.startswith("linux"):
        pytest.skip("no kernel here ends a process with its parent")
    runner = shop.run(hooks, "--workers", "1", ready="joined the roster")
    if task:
        shop.submit(task, "begun")
    worker = shop.begun("begun" if task else "hello")
    runner.signal(signal.SIGKILL)
    eventually(lambda: is_gone(worker), "it ends", seconds=patient(8))
    if task == "start_a_program":
        program = int((shop.folder / "program").read_text())
        eventually(lambda: is_gone(program), "so does what it has started", seconds=patient(5))


def test_a_worker_whose_runner_dies_while_it_imports_ends(shop: Shop) -> None:
    runner = shop.run(
        "\nimport sys\nif 'worker' in sys.argv:\n    tell('importing')\n    ctypes.PyDLL(None).sleep(600)\n",
        ready="joined the roster",
    )
    worker = shop.begun("importing")
    runner.signal(signal.SIGKILL)
    eventually(lambda: is_gone(worker), "it ends", seconds=patient(8))


# --- hooks that hang or raise


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.faults), "1"])
def test_a_stop_is_not_held_up_by_a_blocked_loop_with_hooks(shop: Shop, workers: str) -> None:
    runner = shop.run(HOOKS, "--workers", workers, "--drain-timeout", "0.1s")
    call = shop.submit("block_the_loop", "begun")
    shop.begun("begun")
    runner.signal(signal.SIGTERM)
    eventually(lambda: runner.is_over, "it ends", seconds=patient(10))
    ended = runner.ends()
    assert (ended.code, ended.out.count("1 started, 0 ended, 1 interrupted\n")) == (0, 1), ended
    assert "the event loop is blocked" in ended.err
    assert [entry.status.value for entry in call.record().history][-2:] == ["killed", "rerouted"]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_stop_does_not_wait_for_a_start_hook_that_hangs(shop: Shop, workers: str) -> None:
    runner = shop.run(HANGING_START, "--workers", workers, ready="joined the roster")
    shop.begun("hello")
    runner.signal(signal.SIGTERM)
    eventually(lambda: runner.is_over, "it ends", seconds=patient(10))
    ended = runner.ends()
    assert (ended.code, ended.out.count(": 0 started, 0 ended, 0 interrupted\n")) == (0, 1), ended


@pytest.mark.parametrize("hook", [HANGING_STOP, BLOCKING_STOP], ids=["waiting", "blocking"])
def test_a_stop_hook_that_hangs_is_given_up_and_named(shop: Shop, hook: str) -> None:
    """After 5 s, or 10 in all; here it is a tenth of that."""
    runner = shop.run(IMPATIENT + hook, "--workers", "1", "--max-tasks-per-worker", "1", ready="/1: it serves")
    worker = shop.submit("who").result(timeout=patient(30))
    runner.says("the stop hook never_done")
    eventually(lambda: is_gone(worker), "it ends")
    assert shop.submit("who").result(timeout=patient(30)) != worker


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.faults), "1"])
def test_a_stop_hook_that_raises_is_named_and_changes_nothing_else(shop: Shop, workers: str) -> None:
    runner = shop.run(RAISING_STOP, "--workers", workers, "--drain-timeout", "0.1s")
    call = shop.submit("hold", "begun")
    shop.begun("begun")
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert (ended.code, ended.out.count(": 1 started, 0 ended, 1 interrupted\n")) == (0, 1), ended
    assert "the stop hook no_goodbye: it failed" in ended.err
    assert "the pool does not close" in ended.err
    assert len(shop.told("closed")) == 1, "what comes after it is called"
    assert [entry.status.value for entry in call.record().history][-2:] == ["killed", "rerouted"]


# --- signals while it starts

SLOW_IMPORT = """
import sys
if "worker" in sys.argv and not (HERE / "go").exists():
    tell("importing")
    while not (HERE / "go").exists():
        time.sleep(0.01)
"""


def test_a_worker_that_is_told_to_stop_while_it_starts_does_so_and_has_not_died(shop: Shop) -> None:
    """A process manager tells every process; a terminal tells a whole group, to which a new process still belongs."""
    runner = shop.run(SLOW_IMPORT, "--workers", "1", ready="joined the roster")
    worker = shop.begun("importing")
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    (shop.folder / "go").touch()
    eventually(lambda: is_gone(worker), "it obeys")
    runner.says("/2: it serves")
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert (ended.code, "died" in ended.out + ended.err) == (0, False), ended
