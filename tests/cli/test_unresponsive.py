"""Workers that live and do not answer: told of, relieved of what they have not started, and ended for a call that is
past its time. Real runners and workers on SQLite.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command, Process, eventually, is_gone
from tests.support.freezing import can_write_to, freeze
from tests.support.patience import patient

from holdfast import App, TimedOut
from holdfast.cli.discovery import import_module
from holdfast.cli.reach import with_store
from holdfast.errors import WorkerLost
from holdfast.model.records import WorkerRecord

SHOP = """
import asyncio, ctypes, os, re, sys, time
from pathlib import Path
from holdfast import App, context
from holdfast.retries import Fixed
from holdfast.runtime import claim

# On any machine, these calls count as so short that workers claim them ahead as RUNNING. The test, which imports this
# module too, is no worker: what it changed would stay changed for the tests after it.
if "pytest" not in sys.modules:
    claim.BATCH_SECONDS = claim.AHEAD_SECONDS = claim.AT_ONCE_SECONDS = 60.0
    claim.KEEP_BATCH_SECONDS = claim.KEEP_SECONDS = 60.0

app = App(os.environ.get("SHOP_URL", "sqlite:///shop.db"))
HERE = Path(__file__).parent

def begun(name):
    with open(HERE / name, "a") as told:
        told.write(f"{os.getpid()}\\n")

@app.task(limit=1)
def close_everything():
    begun("closed")
    os.closerange(3, 4096)
    time.sleep(600)

@app.task(timeout="300ms", retries=Fixed(1, 0.01))
def holds_the_lock():
    if context().attempt == 1:
        re.match(r"(a+)+$", "a" * 34 + "b")  # takes minutes, and keeps the interpreter lock
    return "second attempt"

@app.task(cancel_grace="100ms")
async def beside(name):
    begun(name)
    while not (HERE / f"{name}.go").exists():
        await asyncio.sleep(0.01)
    return context().attempt

@app.task(timeout="1s")
def short(name):
    begun(name)
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.01)
    return "in time"

@app.task
def hog():
    time.sleep(0.3)  # so that others run beside it
    begun("hog")
    ctypes.PyDLL(None).sleep(6)  # keeps the interpreter lock
    return context().attempt

@app.task
async def blocks_the_loop_for_a_while():
    await asyncio.sleep(0.3)
    begun("hog")
    time.sleep(6)
    return context().attempt

@app.task(timeout="300ms")
async def brief():
    await asyncio.sleep(0.1)

@app.task(timeout="200ms")
async def blocks_the_loop():
    time.sleep(600)

@app.task(timeout="200ms")
def cannot_be_stopped():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

@app.task
def who():
    return os.getpid()

@app.task
def holds_the_lock_for(seconds):
    begun("hog")
    ctypes.PyDLL(None).sleep(seconds)  # keeps the interpreter lock
    return context().attempt

def note(n):
    with open(HERE / "notes", "a") as notes:
        notes.write(f"{n}\\n")
    return context().attempt

@app.task
def quick(n):
    return note(n)

@app.task(timeout="1s")
def quick_in_a_second(n):
    return note(n)
"""
UNRESPONSIVE_SECONDS = 1.0

pytestmark = pytest.mark.slow


class Shop:
    def __init__(self, folder: Path, app: App, module: Any) -> None:
        self.folder = folder
        self.app = app
        self.module = module

    def begun(self, name: str) -> int:
        """Wait until the call has begun, and return the process that it is in."""
        path = self.folder / name
        eventually(lambda: path.exists() and path.read_text().endswith("\n"), f"{name} has begun")
        return int(path.read_text().split()[-1])

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def worker(self) -> WorkerRecord:
        ((worker,),) = [each.workers for each in with_store(self.app, lambda store: store.roster(self.app.name))]
        return worker


@pytest.fixture
def url(folder: Path) -> str:
    return "sqlite:///shop.db"


@pytest.fixture
def shop(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("SHOP_URL", url)
    monkeypatch.setenv("HOLDFAST_WORKER_UNRESPONSIVE_SECONDS", f"{UNRESPONSIVE_SECONDS}")
    monkeypatch.setenv("HOLDFAST_POLL_INTERVAL_SECONDS", "0.1")
    (folder / "shop.py").write_text(SHOP)
    module = import_module("shop", folder)
    yield Shop(folder, module.app, module)
    module.app.close()


@pytest.fixture
def run(shop: Shop) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(shop.folder, "run", "shop:app", *arguments))
        started[-1].says("/1: it serves")
        return started[-1]

    yield begin
    for process in started:
        process.signal(signal.SIGCONT)
        process.end()
        print(*process.err, sep="", end="\n\n")  # for whoever has to find out why a test failed


def test_a_worker_that_closes_its_descriptors_is_ended_and_the_call_is_charged(
    shop: Shop, run: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_CRASH_RECOVERIES", "0")
    runner = run()
    invocation = shop.module.close_everything.submit()
    with pytest.raises(WorkerLost, match="crash 1 in a row") as lost:
        invocation.result(timeout=patient(30))
    cause = "its code closed descriptors that are not its own, with os.close or os.closerange say"
    assert cause in str(lost.value)
    assert cause in invocation.history()[-1].why
    assert cause in invocation.explain()
    assert shop.module.who.submit().result(timeout=patient(30)) != shop.begun("closed")
    assert sum(map(len, runner.err)) < 20_000, "a loop that cannot turn does not fill the log"


def test_a_call_that_holds_the_interpreter_lock_beyond_its_timeout_is_ended_by_the_runner(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--concurrency", "2")
    neighbour = shop.module.beside.submit("neighbour")
    first = shop.begun("neighbour")
    invocation = shop.module.holds_the_lock.submit()
    assert invocation.result(timeout=patient(30)) == "second attempt"
    (failed,) = invocation.record().errors
    assert failed.error.type_name == "holdfast.errors:TimedOut"
    expected = "TimedOut: timed out after 300ms; its worker did not answer and was killed; attempt 1 of 2 failed"
    assert expected in next(entry.why for entry in invocation.record().history if entry.why)
    shop.go("neighbour")
    assert neighbour.result(timeout=patient(30)) == 2
    walked = [entry.status.value for entry in neighbour.record().history]
    assert "killed" in walked
    assert "running_recovery" not in walked, "what another call did is not charged to it"
    assert is_gone(first)
    assert len(runner.said("killed worker")) == 1


def test_a_worker_that_does_not_answer_is_told_of_and_gives_back_what_it_has_not_started(
    shop: Shop, run: Callable[..., Process], holdfast: Command
) -> None:
    runner = run()
    invocation = shop.module.beside.submit("silent")
    worker = shop.begun("silent")
    freeze(worker, can_write=can_write_to(shop.folder / "shop.db"))
    eventually(lambda: shop.worker().unresponsive_since is not None, "the roster tells it")
    why = invocation.explain()
    assert "but its worker has not answered for" in why
    assert "It has no timeout that would end it" in why
    assert "has not answered for" in holdfast("runners").out
    (told,) = holdfast("runners", "--json").json["runners"][0]["workers"]
    assert told["unresponsive_since"].endswith("Z")
    assert told["running"] == 1
    waiting = shop.module.who.submit()
    assert "its only worker has not answered for" in waiting.explain()
    os.kill(worker, signal.SIGCONT)
    runner.says(" again: an answer from pid")
    assert len(runner.said("unresponsive: no answer")) == 1, "that is said once"
    eventually(lambda: shop.worker().unresponsive_since is None, "the roster tells it")
    eventually(lambda: shop.worker().begun is None, "what has begun is the worker's to tell again")
    shop.go("silent")
    assert invocation.result(timeout=patient(30)) == 1, "it was left alone"
    assert waiting.result(timeout=patient(30)) == worker


def test_a_coroutine_that_never_began_does_not_say_that_it_still_runs(shop: Shop, run: Callable[..., Process]) -> None:
    run("--concurrency", "2")
    shop.module.blocks_the_loop_for_a_while.submit()
    shop.begun("hog")
    brief = shop.module.brief.submit()
    with pytest.raises(TimedOut, match="timed out after 300ms; its event loop was blocked, and its code had not begun"):
        brief.result(timeout=patient(30))


@pytest.fixture(params=["sqlite", pytest.param("mongodb", marks=pytest.mark.xdist_group("mongo"))])
def any_url(request: pytest.FixtureRequest) -> str:
    return "sqlite:///shop.db" if request.param == "sqlite" else str(request.getfixturevalue("mongo_url"))


@pytest.mark.usefixtures("shop")
class TestWorkThatHasNotBegun:
    """Calls that a worker has claimed ahead, as RUNNING, while another call keeps the interpreter."""

    @pytest.fixture
    def url(self, any_url: str) -> str:
        return any_url

    def test_is_given_back_does_not_fail_and_runs_once(self, shop: Shop, run: Callable[..., Process]) -> None:
        runner = run("--workers", "1", "--concurrency", "1")
        for invocation in [shop.module.quick.submit(-1) for _ in range(20)]:
            invocation.result(timeout=patient(30))  # the worker learns that calls are short
        (shop.folder / "notes").unlink()
        shop.app.queues.pause("default")
        eventually(lambda: runner.said("paused queue"), "it claims nothing")
        tasks = [shop.module.quick] * 3 + [shop.module.quick_in_a_second, shop.module.quick] * 20
        calls = [task.submit(n) for n, task in enumerate(tasks[:3])]
        hog = shop.module.holds_the_lock_for.submit(int(patient(6)))
        calls += [task.submit(n) for n, task in enumerate(tasks[3:], 3)]
        shop.app.queues.resume("default")
        shop.begun("hog")

        def claimed() -> list[Any]:
            ran = set((shop.folder / "notes").read_text().split())  # the end of the last one may not be in the store
            waiting = [call for n, call in enumerate(calls) if f"{n}" not in ran]
            return [call for call in waiting if call.record().status.value in ("pending", "running")]

        was_claimed = claimed()
        assert {call.record().status.value for call in was_claimed} == {"running"}, "the worker has claimed ahead"
        said, said_of_hog = set[str](), hog.explain()
        while claimed():
            assert hog.record().status.value == "running", "in the end it is given back"
            if shop.worker().unresponsive_since is not None:
                said.update(call.explain() for call in was_claimed if call.record().status.value == "running")
        assert not [why for why in said if "its code is running" in why]
        assert "its code is running" in said_of_hog
        assert hog.result(timeout=patient(30)) == 1, "the worker was left alone"
        assert {call.result(timeout=patient(30)) for call in calls} == {1}, "no attempt was charged"
        notes = (shop.folder / "notes").read_text().split()
        assert sorted(map(int, notes)) == list(range(len(calls))), "each ran once"
        (why,) = {entry.why for entry in was_claimed[-1].record().history if "had not" in entry.why}
        assert why.endswith(" s; it had not begun, and is not charged")
        assert not runner.said("killed worker")


# --- with `make faults`


@pytest.mark.faults
def test_a_stopped_worker_is_ended_for_a_call_past_its_time_and_no_result_comes_later(
    shop: Shop, run: Callable[..., Process]
) -> None:
    run()
    invocation = shop.module.short.submit("stopped")
    worker = shop.begun("stopped")
    freeze(worker, can_write=can_write_to(shop.folder / "shop.db"))
    shop.go("stopped")
    with pytest.raises(TimedOut):
        invocation.result(timeout=patient(30))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: is_gone(worker), "the worker is over")
    assert shop.module.who.submit().result(timeout=patient(30)) != worker
    record = invocation.record()
    assert (record.status.value, record.result) == ("failed", None)
    assert record.reason == "TimedOut: timed out after 1s; its worker did not answer and was killed"


@pytest.mark.faults
def test_a_stopped_worker_is_ended_for_a_cancelled_call_past_its_grace(shop: Shop, run: Callable[..., Process]) -> None:
    run()
    invocation = shop.module.beside.submit("cancelled")
    worker = shop.begun("cancelled")
    freeze(worker, can_write=can_write_to(shop.folder / "shop.db"))
    invocation.cancel()
    eventually(lambda: invocation.record().status.value == "cancelled", "it is cancelled")
    assert is_gone(worker)


@pytest.mark.faults
def test_a_runner_that_was_stopped_together_with_its_worker_kills_nobody(
    shop: Shop, run: Callable[..., Process]
) -> None:
    """As when a machine sleeps: the time of the call is over by then, but nobody was there to end it."""
    runner = run()
    invocation = shop.module.short.submit("asleep")
    worker = shop.begun("asleep")
    for process in (runner.pid, worker):
        os.kill(process, signal.SIGSTOP)
    time.sleep(UNRESPONSIVE_SECONDS * 4)  # what is tested is what follows a while in which nothing happens
    for process in (runner.pid, worker):
        os.kill(process, signal.SIGCONT)
    with pytest.raises(TimedOut):
        invocation.result(timeout=patient(30))
    assert invocation.record().reason == "TimedOut: timed out after 1s", "its worker ended it"
    assert shop.module.who.submit().result(timeout=patient(30)) == worker
    assert not runner.said("unresponsive: no answer")


@pytest.mark.faults
def test_a_worker_whose_event_loop_is_blocked_for_good_gives_way_to_another(
    shop: Shop, run: Callable[..., Process]
) -> None:
    run("--concurrency", "3")
    sister = shop.module.beside.submit("sister")
    worker = shop.begun("sister")
    with pytest.raises(TimedOut):
        shop.module.blocks_the_loop.submit().result(timeout=patient(30))
    shop.go("sister")
    assert sister.result(timeout=patient(30)) == 2
    reasons = [entry.why for entry in sister.record().history]
    assert any("code that cannot be stopped blocked the event loop of its worker" in why for why in reasons)
    assert is_gone(worker)


@pytest.mark.faults
def test_a_worker_whose_places_are_all_taken_by_what_cannot_be_stopped_gives_way_to_another(
    shop: Shop, run: Callable[..., Process]
) -> None:
    run("--concurrency", "1")
    worker = shop.module.who.submit().result(timeout=patient(30))
    with pytest.raises(TimedOut):
        shop.module.cannot_be_stopped.submit().result(timeout=patient(30))
    assert shop.module.who.submit().result(timeout=patient(30)) != worker
    eventually(lambda: is_gone(worker), "the worker is over")


@pytest.mark.faults
@pytest.mark.parametrize("task", ["hog", "blocks_the_loop_for_a_while"])
def test_a_call_that_keeps_others_from_ending_in_time_runs_apart_in_the_end(
    shop: Shop, run: Callable[..., Process], task: str
) -> None:
    """It has no timeout, and is not charged for theirs. Else it would be begun and killed with its worker for ever."""
    run("--concurrency", "4")
    hog = getattr(shop.module, task).submit()
    brief = []

    def has_begun_apart() -> bool:
        brief.append(shop.module.brief.submit())
        time.sleep(0.1)
        path = shop.folder / "hog"
        return path.exists() and len(path.read_text().splitlines()) == 3

    eventually(has_begun_apart, "it has begun for the third time", 60)
    assert shop.begun("hog") != shop.module.who.submit().result(timeout=patient(30)), "it has a process of its own"
    for _ in range(5):
        shop.module.brief.submit().result(timeout=patient(30))
    assert hog.record().status.value == "running", "it held up nobody"
    assert hog.result(timeout=patient(30)) == 3
    record = hog.record()
    assert "running_recovery" not in [entry.status.value for entry in record.history]
    assert len([entry for entry in record.history if entry.why.endswith("it ran beside that, and is not charged")]) == 2
