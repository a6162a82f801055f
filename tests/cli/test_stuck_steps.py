"""Steps that cannot be stopped: they exhaust no worker, and do not outlive their timeout. Real runners on SQLite."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Process, eventually, is_gone
from tests.support.patience import patient

from holdfast import InvocationCancelled, TimedOut
from holdfast.cli.discovery import import_module

YARD = """
import os, re, time
from pathlib import Path
from holdfast import App, TimedOut

app = App("sqlite:///yard.db")
HERE = Path(__file__).parent

@app.step(timeout="300ms")
def stuck():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

@app.step(timeout="300ms")
def stubborn(name):
    while not (HERE / f"{name}.go").exists():
        try:
            time.sleep(0.05)
        except BaseException:
            pass

@app.step
def who():
    return os.getpid()

@app.step(timeout="300ms")
async def blocks_the_loop():
    time.sleep(600)

@app.step(timeout="300ms")
async def holds_the_lock():
    re.match(r"(a+)+$", "a" * 34 + "b")  # takes minutes, and keeps the interpreter lock

STEPS = {"stuck": stuck, "blocks_the_loop": blocks_the_loop, "holds_the_lock": holds_the_lock}

@app.workflow
async def tries(name):
    before = await who()
    try:
        await STEPS[name]()
    except TimedOut as error:
        return before, await who(), str(error)

@app.workflow
async def leaves_behind(name):
    try:
        await stubborn(name)
    except TimedOut:
        return await who()

@app.workflow(timeout="300ms", cancel_grace="300ms")
async def spins_with_a_limit():
    await who()
    while True:
        pass

@app.workflow(cancel_grace="300ms")
async def spins():
    await who()
    while True:
        pass

@app.workflow
async def asks():
    return await who()
"""

pytestmark = pytest.mark.slow


class Yard:
    def __init__(self, folder: Path, module: Any) -> None:
        self.folder = folder
        self.module = module


@pytest.fixture
def yard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    monkeypatch.setenv("HOLDFAST_WORKER_UNRESPONSIVE_SECONDS", "1")
    monkeypatch.setenv("HOLDFAST_POLL_INTERVAL_SECONDS", "0.1")
    (folder / "yard.py").write_text(YARD)
    module = import_module("yard", folder)
    yield Yard(folder, module)
    module.app.close()


@pytest.fixture
def run(yard: Yard) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(yard.folder, "run", "yard:app", "--workers", "1", *arguments))
        started[-1].says("/1: it serves")
        return started[-1]

    yield begin
    for process in started:
        process.signal(signal.SIGCONT)
        process.end()
        print(*process.err, sep="", end="\n\n")  # for whoever has to find out why a test failed


def test_a_worker_whose_slots_are_taken_by_steps_that_cannot_be_stopped_gives_way_to_another(
    yard: Yard, run: Callable[..., Process]
) -> None:
    runner = run("--concurrency", "2")
    runs = [yard.module.tries.submit("stuck") for _ in range(2)]
    results = [each.result(timeout=patient(30)) for each in runs]
    assert ["timed out after 0.3 s" in why for *_, why in results] == [True, True]
    (worker,) = {before for before, *_ in results}
    assert yard.module.asks.submit().result(timeout=patient(10)) != worker
    eventually(lambda: is_gone(worker), "the worker is over")
    assert len(runner.said("code that cannot be stopped has all of its 2 slots")) == 1


def test_a_step_that_is_given_up_has_a_slot_until_it_ends_and_the_run_goes_on(
    yard: Yard, run: Callable[..., Process]
) -> None:
    runner = run("--concurrency", "3")
    workers = {yard.module.leaves_behind.submit(name).result(timeout=patient(30)) for name in ("one", "two")}
    for name in ("one", "two"):
        (yard.folder / f"{name}.go").touch()
    workers |= {yard.module.leaves_behind.submit(name).result(timeout=patient(30)) for name in ("three", "four")}
    assert len(workers) == 1, "those that ended gave their slots back"
    workers.add(yard.module.asks.submit().result(timeout=patient(30)))
    assert len(workers) == 1
    assert not runner.said("code that cannot be stopped has all")


@pytest.mark.parametrize("name", ["blocks_the_loop", "holds_the_lock"])
def test_a_step_that_blocks_its_worker_times_out_and_its_run_is_not_charged(
    yard: Yard, run: Callable[..., Process], name: str
) -> None:
    runner = run("--concurrency", "2")
    invocation = yard.module.tries.submit(name)
    before, after, why = invocation.result(timeout=patient(60))
    assert before != after, "its worker was replaced"
    assert f"{name}#1 timed out after 0.3 s" in why
    walked = [entry.status.value for entry in invocation.record().history]
    assert "running_recovery" not in walked, "no crash is charged"
    assert walked.count("killed") == 2, "then its steps run apart"
    assert len(runner.said("past its time")) >= 2
    eventually(lambda: is_gone(before), "the worker is over")


def test_a_body_that_blocks_its_worker_times_out_and_others_go_on(yard: Yard, run: Callable[..., Process]) -> None:
    run("--concurrency", "2")
    spinning, other = yard.module.spins_with_a_limit.submit(), yard.module.asks.submit()
    with pytest.raises(TimedOut, match="the event loop of its workers was blocked"):
        spinning.result(timeout=patient(60))
    other.result(timeout=patient(30))
    walked = [entry.status.value for entry in spinning.record().history]
    assert "running_recovery" not in walked, "no crash is charged"
    assert walked.count("killed") == 2


def test_a_body_that_blocks_its_worker_is_cancelled_and_others_go_on(yard: Yard, run: Callable[..., Process]) -> None:
    run("--concurrency", "2")
    before = yard.module.asks.submit().result(timeout=patient(30))
    spinning = yard.module.spins.submit()
    eventually(lambda: len(spinning.steps()) == 1, "its step has ended, and it spins")
    spinning.cancel("it spins")
    with pytest.raises(InvocationCancelled):
        spinning.result(timeout=patient(30))
    assert spinning.record().reason.endswith("it spins; its code could not be stopped and still runs")
    assert yard.module.asks.submit().result(timeout=patient(30)) != before
    eventually(lambda: is_gone(before), "the worker is over")
