"""`holdfast run` with worker processes: what dies, what ends, and what becomes of the work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.processes import Command, Process, children, eventually, is_gone
from tests.support.freezing import can_write_to, freeze
from tests.support.patience import patient

from holdfast.cli.discovery import import_module
from holdfast.cli.reach import with_store
from holdfast.executors.child_process import exit_in_words
from holdfast.model.records import InvocationRecord, RunnerRecord

SHOP = """
import asyncio, contextlib, ctypes, os, signal, sqlite3, subprocess, time
from pathlib import Path
from holdfast import App

app = App()
HERE = Path(__file__).parent
VERSION = 1
ballast, pool = [], None

def tell(line, file="told"):
    with open(HERE / file, "a") as told:
        told.write(f"{os.getpid()} {line}\\n")

@app.lifespan
@contextlib.asynccontextmanager
async def pools():
    global pool
    pool = asyncio.get_running_loop()
    tell("opened")
    yield
    tell("closed")

@app.on_worker_start
def on_start():
    tell("started")

@app.on_worker_stop
async def on_stop():
    tell("stopped")

@app.task
def who():
    return os.getpid()

@app.task
def deaf():
    return [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]

@app.task
def version():
    return VERSION

@app.task
async def pooled():
    tell("worked")
    return pool is asyncio.get_running_loop()

def waiting(name):
    tell("", f"{name}.begun")
    while not (HERE / f"{name}.go").exists():
        yield

def held(name):
    for _ in waiting(name):
        tell(time.time(), f"{name}.witness")
        time.sleep(0.01)
    return os.getpid()

@app.task
def hold(name):
    return held(name)

@app.task(at_most_once=True)
def hold_once(name):
    return held(name)

@app.task
async def ahold(name):
    for _ in waiting(name):
        await asyncio.sleep(0.01)
    return os.getpid()

@app.task
def program(name):
    with subprocess.Popen(["sleep", "600"]) as started:
        (HERE / f"{name}.program").write_text(str(started.pid))
        tell("", f"{name}.begun")

@app.task
def crash(how):
    first = not (HERE / how).exists()
    (HERE / how).touch()
    if first and how == "exit":
        os._exit(7)
    if first and how == "segfault":
        ctypes.string_at(0)
    return os.getpid()

@app.task
def keep_the_interpreter(seconds):
    tell("", "kept.begun")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a PyDLL keeps the lock
    return os.getpid()

def connected():
    ballast.append(sqlite3.connect(HERE / "shop.db"))
    ballast[-1].execute("SELECT * FROM sqlite_master").fetchall()
    return os.getpid()

@app.task
def connect():
    return connected()

@app.task(executor="process")
def connect_apart():
    return connected()

@app.task
def grow(megabytes):
    ballast.append(b"x" * megabytes * 2**20)
    return os.getpid()
"""
DEAD_AFTER_SECONDS = 1.5
QUICK = {
    "HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.2",
    "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": f"{DEAD_AFTER_SECONDS}s",
    "HOLDFAST_ATOMIC_SERVICE_CHECK_INTERVAL_MINUTES": "0.2s",
    "HOLDFAST_POLL_INTERVAL_SECONDS": "0.2",
    "HOLDFAST_SQLITE_BUSY_TIMEOUT_SECONDS": "0.5",
}

pytestmark = pytest.mark.slow


class Shop:
    """The shop as its submitters see it."""

    def __init__(self, folder: Path, module: ModuleType) -> None:
        self.folder = folder
        self.app = module.app
        self._module = module

    def submit(self, task: str, *arguments: object) -> str:
        id: str = getattr(self._module, task).submit(*arguments).id
        return id

    def result(self, id: str) -> Any:
        return self.app.invocation(id).result(timeout=patient(30))

    def record(self, id: str) -> InvocationRecord:
        record: InvocationRecord = self.app.invocation(id).record()
        return record

    def statuses(self, id: str) -> list[str]:
        return [entry.status.value for entry in self.record(id).history]

    def reaches(self, id: str, *statuses: str) -> InvocationRecord:
        """Wait until it has walked these edges, one after the other."""
        wanted = list(statuses)

        def walked() -> bool:
            there = self.statuses(id)
            return any(there[n : n + len(wanted)] == wanted for n in range(len(there)))

        eventually(walked, lambda: f"{wanted} in {self.statuses(id)}")
        return self.record(id)

    def begun(self, name: str, times: int = 1) -> int:
        """Wait until the call of that name has begun so often; the process that it is in."""
        eventually(lambda: len(self.lines(f"{name}.begun")) >= times, f"{name} has begun {times} times")
        return int(self.lines(f"{name}.begun")[times - 1].split()[0])

    def let_go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def lines(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def roster(self) -> list[RunnerRecord]:
        return list(with_store(self.app, lambda store: store.roster(self.app.name)))

    def owners(self) -> list[str]:
        return list(with_store(self.app, lambda store: store.owners(self.app.name)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(folder: Path, request: pytest.FixtureRequest) -> str:
    fixture: str | None = getattr(request, "param", None)
    return f"sqlite:///{folder}/shop.db" if fixture is None else request.getfixturevalue(fixture)


@pytest.fixture
def shop(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("HOLDFAST_URL", url)
    (folder / "shop.py").write_text(SHOP)
    module = import_module("shop", folder)
    yield Shop(folder, module)
    module.app.close()


@pytest.fixture
def run(shop: Shop) -> Iterator[Callable[..., Process]]:
    """Start a runner and wait until it is ready."""
    started: list[Process] = []

    def begin(*arguments: str, ready: str = "") -> Process:
        started.append(Process(shop.folder, "run", "shop:app", *arguments))
        alone = "--workers 0" in " ".join(arguments)
        started[-1].says(ready or ("/0: it serves" if alone else "/1: it serves"))
        return started[-1]

    yield begin
    for process in started:
        process.end()
        print(*process.err, sep="", end="\n\n")  # for whoever has to find out why a test failed


def times(record: InvocationRecord, status: str) -> list[float]:
    return [entry.at for entry in record.history if entry.status.value == status]


# --- what dies


def test_a_worker_that_dies_is_replaced_and_its_work_is_taken_up_at_once(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--workers", "1")
    (entry,) = shop.roster()
    assert entry.supervises
    id = shop.submit("hold", "a")
    first = shop.begun("a")
    killed_at = time.time()
    os.kill(first, signal.SIGKILL)
    record = shop.reaches(id, "running", "running_recovery", "rerouted")
    assert times(record, "rerouted")[0] - killed_at < 2.0
    told = [(line.by, line.why) for line in record.history[3:5]]
    assert told == [(entry.id, f"its worker {entry.id}/1 died: {exit_in_words(-9)}")] * 2
    second = shop.begun("a", 2)
    assert second not in (first, runner.pid)
    shop.let_go("a")
    assert shop.result(id) == second
    for how, why in (("exit", "exit code 7"), ("segfault", "SIGSEGV (Segmentation fault)")):
        id = shop.submit("crash", how)
        assert shop.result(id) not in (runner.pid, first)
        record = shop.record(id)
        assert shop.statuses(id)[2:5] == ["running", "running_recovery", "rerouted"]
        assert why in record.history[4].why
        assert record.owner is None
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert (ended.code, ended.out.count("3 workers died")) == (0, 1), ended
    assert (shop.roster(), shop.owners()) == ([], [])


@pytest.mark.faults
@pytest.mark.parametrize(
    ("task", "names"), [("connect", ["-wal"]), ("connect", ["-wal", "-shm"]), ("connect_apart", ["-wal"])]
)
def test_a_worker_whose_tasks_keep_a_deleted_log_is_replaced(
    shop: Shop, run: Callable[..., Process], names: list[str], task: str
) -> None:
    """As long as they have their own connections to it, nobody in that process can use the store."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells who has a deleted file open")
    runner = run("--workers", "1")
    shop.result(shop.submit(task))
    id = shop.submit("hold", "a")
    first = shop.begun("a")
    shop.app.close()
    for name in names:
        (shop.folder / f"shop.db{name}").unlink()
    runner.says("connections that user code has made")
    second = shop.begun("a", 2)
    assert second != first
    shop.let_go("a")
    assert shop.result(id) == second
    record = shop.record(id)
    assert "connections that user code has made" in str(record.history)
    assert "running_recovery" not in shop.statuses(id), "it is not charged"
    assert shop.result(shop.submit("who")) == second


@pytest.mark.faults
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_runner_whose_file_is_replaced_starts_anew_with_the_new_one(
    shop: Shop, run: Callable[..., Process], workers: str
) -> None:
    runner = run("--workers", workers)
    assert shop.result(shop.submit("who"))
    with closing(sqlite3.connect(shop.folder / "shop.db")) as source, closing(sqlite3.connect("copy.db")) as target:
        source.backup(target)
    shop.app.close()
    for name in ("shop.db", "shop.db-wal", "shop.db-shm"):
        (shop.folder / name).unlink()
    (shop.folder / "copy.db").rename(shop.folder / "shop.db")
    runner.says("was replaced while this process")
    runner.says("restarting")
    assert shop.result(shop.submit("who"))
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0


@pytest.mark.faults
def test_a_runner_whose_own_code_keeps_a_deleted_log_starts_anew(shop: Shop, run: Callable[..., Process]) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells who has a deleted file open")
    runner = run("--workers", "0", "--health-port", "0")
    said: list[str] = []
    health = health_of(runner, said)
    shop.result(shop.submit("connect"))
    shop.app.close()
    (shop.folder / "shop.db-wal").unlink()
    eventually(lambda: health() == 503, "not heard")
    assert "other connections of this process" in said[-1]
    assert "restart this process" in said[-1]
    runner.says("connections that user code has made")
    runner.says("restarting")
    assert shop.result(shop.submit("who")) == runner.pid, "by the same process"
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0


@pytest.mark.xdist_group("mongo")
@pytest.mark.parametrize("url", ["mongo_url"], indirect=True)
def test_the_same_on_mongodb(shop: Shop, run: Callable[..., Process]) -> None:
    runner = run("--workers", "1")
    ids = [shop.submit("hold", "a"), shop.submit("ahold", "b")]
    first = shop.begun("a")
    assert shop.begun("b") == first
    killed_at = time.time()
    os.kill(first, signal.SIGKILL)
    for id in ids:
        record = shop.reaches(id, "running", "running_recovery", "rerouted")
        assert times(record, "rerouted")[0] - killed_at < 2.0
    second = shop.begun("a", 2)
    shop.let_go("b")
    assert shop.result(ids[1]) == second
    runner.signal(signal.SIGTERM)
    runner.says("waits up to")
    runner.signal(signal.SIGINT)  # another one than the first counts at once
    assert runner.ends().code == 0
    assert shop.statuses(ids[0])[-2:] == ["killed", "rerouted"]
    assert (shop.roster(), shop.owners()) == ([], [])


def test_workers_whose_runner_is_killed_end_and_their_work_goes_on_elsewhere(
    shop: Shop, run: Callable[..., Process]
) -> None:
    """Coroutines are handed back at once; a thread ends with its process, and a runner without workers takes it up."""
    runner = run("--workers", "2", "--concurrency", "1")
    runner.says("/2: it serves")
    thread, coroutine = shop.submit("hold", "t"), shop.submit("ahold", "c")
    pids = {shop.begun("t"), shop.begun("c")}
    assert len(pids) == 2
    runner.signal(signal.SIGKILL)
    eventually(lambda: all(map(is_gone, pids)), "the workers end by themselves")
    record = shop.reaches(coroutine, "running", "killed", "rerouted")
    assert record.history[-1].why == "its runner died before it was done"
    assert runner.said("its runner died or was killed")
    assert runner.said("it ends 1 invocation now")
    assert not runner.said("waits up to")
    assert runner.said("left 1 invocation of")
    assert shop.statuses(thread)[-1] == "running", "nobody but its runner knows that its code has ended"
    witness = shop.lines("t.witness")
    other = run("--workers", "0")
    record = shop.reaches(thread, "running", "running_recovery", "rerouted", "pending", "running")
    assert "is dead" in record.history[4].why
    assert record.owner is not None
    assert record.owner.endswith("/0")
    assert shop.lines("t.witness")[: len(witness)] == witness
    assert not any(line.startswith(f"{pid} ") for pid in pids for line in shop.lines("t.witness")[len(witness) :])
    shop.let_go("t")
    shop.let_go("c")
    assert [shop.result(id) for id in (thread, coroutine)] == [other.pid] * 2
    other.signal(signal.SIGTERM)
    assert other.ends().code == 0


def test_a_frozen_runner_finds_itself_declared_dead_ends_its_workers_and_begins_anew(
    shop: Shop, run: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that on a busy machine nobody but the frozen one is taken for dead.
    monkeypatch.setenv("HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES", f"{3 * DEAD_AFTER_SECONDS}s")
    frozen = run("--workers", "1")
    (entry,) = shop.roster()
    id = shop.submit("hold", "z")
    zombie = shop.begun("z")
    other = run("--workers", "0")
    freeze(frozen.pid, can_write=can_write_to(shop.folder / "shop.db"))
    assert shop.begun("z", 2) == other.pid
    assert entry.id not in [runner.id for runner in shop.roster()]
    assert not is_gone(zombie), "it cannot know yet"
    frozen.signal(signal.SIGCONT)
    frozen.says(f"fenced runner {entry.id}: declared dead")
    eventually(lambda: is_gone(zombie), "its worker is ended")
    eventually(lambda: [runner for runner in shop.roster() if runner.pid == frozen.pid], "it is back")
    shop.let_go("z")
    assert shop.result(id) == other.pid
    edges = ["registered", "pending", "running", "running_recovery", "rerouted", "pending", "running", "success"]
    assert shop.statuses(id) == edges
    other.signal(signal.SIGTERM)
    assert other.ends().code == 0
    assert shop.result(shop.submit("who")) not in (zombie, other.pid)
    frozen.signal(signal.SIGTERM)
    assert frozen.ends().code == 0
    assert shop.roster() == []


FIRST_AN_IMPORT_FAILS_AND_THEN_A_HOOK = """
import sys
if "worker" in sys.argv and not (HERE / "tried").exists():
    (HERE / "tried").touch()
    raise RuntimeError("no luck")

@app.on_worker_start
def no_pool():
    raise ConnectionRefusedError("no pool")
"""


def test_a_worker_that_cannot_start_is_replaced_ever_more_slowly_and_says_why(
    shop: Shop, run: Callable[..., Process]
) -> None:
    (shop.folder / "shop.py").write_text(SHOP + FIRST_AN_IMPORT_FAILS_AND_THEN_A_HOOK)
    runner = run("--log-format", "json", ready="starts in 0.4 s")
    pauses = [json.loads(line)["message"] for line in runner.said("the next one starts in")]
    assert [re.findall(r"in ([\d.]+) s", text) for text in pauses[:3]] == [["0.1"], ["0.2"], ["0.4"]]
    reason = json.loads(runner.said("no luck")[0])
    assert (reason["level"], reason["logger"]) == ("error", "holdfast.worker")
    assert "the module 'shop' cannot be imported: RuntimeError: no luck" in reason["message"]
    assert "ConnectionRefusedError: no pool" in json.loads(runner.said("no pool")[0])["exception"]
    assert json.loads(runner.said("lost worker")[0])["message"].endswith("died: exit code 1")
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert ended.code == 0
    assert all(json.loads(line) for line in ended.err.splitlines())
    assert shop.roster() == []


# --- what is replaced


def test_a_worker_retires_after_its_share_of_tasks_or_when_it_has_grown_too_large(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--workers", "1", "--concurrency", "2", "--max-tasks-per-worker", "3", "--memory-limit", "200M")
    first = [shop.result(shop.submit("who")) for _ in range(3)]
    assert first == [first[0]] * 3
    long = shop.submit("hold", "long")
    second = shop.begun("long")
    assert second != first[0]
    assert [shop.result(shop.submit("grow", 1)) for _ in range(2)] == [second] * 2
    third = shop.result(shop.submit("grow", 250))  # while the second one waits for the last of its three
    assert third not in (first[0], second)
    runner.says(" MB")
    eventually(lambda: is_gone(third), "the one that had grown ends")
    fourth = shop.result(shop.submit("who"))
    assert fourth not in (first[0], second, third)
    os.kill(fourth, signal.SIGTERM)  # a worker can be told, too
    eventually(lambda: is_gone(fourth), "it obeys")
    assert shop.result(shop.submit("who")) != fourth
    assert shop.statuses(long)[-1] == "running"
    shop.let_go("long")
    assert shop.result(long) == second
    eventually(lambda: is_gone(second), "the one whose last task has ended ends")
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert ended.out.endswith(": 9 started, 9 ended, 0 interrupted\n"), ended


def test_reload_starts_anew_with_the_new_code_once_it_is_python(shop: Shop, run: Callable[..., Process]) -> None:
    runner = run("--reload")
    assert shop.result(shop.submit("version")) == 1
    (shop.folder / "shop.py").write_text("def half(\n")
    runner.says("is no Python")
    assert shop.result(shop.submit("version")) == 1
    (shop.folder / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 2"))
    runner.says("has changed; restarting")
    assert shop.result(shop.submit("version")) == 2
    (shop.folder / "shop.py").write_text("raise RuntimeError('half done')\n")
    runner.says("'shop' cannot be imported: RuntimeError: half done")
    (shop.folder / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 3"))
    assert shop.result(shop.submit("version")) == 3
    (entry,) = shop.roster()
    assert entry.pid == runner.pid
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0


# --- what a worker is given


def test_hooks_and_lifespans_surround_each_worker_and_never_the_runner(shop: Shop, run: Callable[..., Process]) -> None:
    runner = run("--workers", "2", "--concurrency", "1")
    runner.says("/2: it serves")
    assert [shop.result(id) for id in [shop.submit("pooled") for _ in range(3)]] == [True] * 3
    (entry,) = shop.roster()
    eventually(lambda: len(shop.roster()[0].workers) == 2, "both are on the roster")
    (entry,) = shop.roster()
    runner.interrupt_all()
    assert runner.ends().code == 0
    lives: dict[str, list[str]] = {}
    for line in shop.lines("told"):
        pid, what = line.split()
        lives.setdefault(pid, []).append(what)
    assert set(lives) == {str(worker.pid) for worker in entry.workers}
    assert str(runner.pid) not in lives
    for life in lives.values():
        assert life[:2] == ["opened", "started"]
        assert life[-2:] == ["stopped", "closed"]
        assert set(life[2:-2]) <= {"worked"}


# --- ends


def test_a_stop_lets_short_work_end_and_ends_the_rest_before_it_is_given_back(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--concurrency", "4", "--drain-timeout", "1s")
    short, thread, coroutine, once = [
        shop.submit(task, name)
        for task, name in (("hold", "short"), ("hold", "thread"), ("ahold", "coroutine"), ("hold_once", "once"))
    ]
    pids = {shop.begun(name) for name in ("short", "thread", "coroutine", "once")}
    runner.interrupt_all()
    runner.says("waits up to 1 s for 4 invocations")
    assert shop.roster()[0].id, "it leaves when its work is done, not before"
    late = shop.submit("who")
    shop.let_go("short")
    ended = runner.ends()
    assert ended.code == 0
    assert ended.out.endswith(": 4 started, 1 ended, 3 interrupted\n"), ended
    assert all(map(is_gone, pids))
    assert (shop.roster(), shop.owners()) == ([], [])
    assert shop.statuses(short)[-1] == "success"
    assert shop.statuses(late) == ["registered"]
    assert shop.statuses(coroutine)[-2:] == ["killed", "rerouted"]
    assert shop.statuses(thread)[-2:] == ["killed", "rerouted"]
    assert shop.statuses(once)[-2:] == ["killed", "failed"]
    error = shop.record(once).error
    assert error is not None
    assert "at most once" in error.message
    for id, name in ((thread, "thread"), (once, "once")):
        last = float(shop.lines(f"{name}.witness")[-1].split()[1])
        assert last < times(shop.record(id), "killed")[0], "its code ran on after it was given back"


def test_a_second_signal_hurries_and_what_a_task_has_started_ends_with_it(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--drain-timeout", "10m")
    ids = [shop.submit("hold", "long"), shop.submit("program", "p")]
    shop.begun("long")
    shop.begun("p")
    program = int((shop.folder / "p.program").read_text())
    runner.signal(signal.SIGTERM)
    runner.says("waits up to 600 s")
    runner.signal(signal.SIGINT)  # another one than the first counts at once
    try:
        eventually(lambda: runner.is_over, "it ends")
        assert is_gone(program)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
    assert runner.ends().code == 0
    assert shop.lines("told")[-1].endswith("closed"), "it was hurried, not killed"
    assert [shop.statuses(id)[-2:] for id in ids] == [["killed", "rerouted"]] * 2
    assert (shop.roster(), shop.owners()) == ([], [])


def test_a_stop_while_the_workers_start_is_heard_and_nothing_is_said_twice(
    shop: Shop, run: Callable[..., Process]
) -> None:
    runner = run("--workers", "2", ready="joined the roster")
    runner.interrupt_all()
    ended = runner.ends()
    assert (ended.code, shop.roster()) == (0, [])
    assert ended.out.endswith(": 0 started, 0 ended, 0 interrupted\n"), ended
    assert "Traceback" not in ended.err


def test_an_interrupt_that_reaches_a_worker_while_it_starts_does_not_end_it(
    shop: Shop, run: Callable[..., Process]
) -> None:
    """Ctrl-C may come while a worker has not left its runner's process group yet."""
    runner = run("--workers", "1", ready="joined the roster")
    eventually(lambda: children(runner.pid), "a worker is started")
    (worker,) = children(runner.pid)
    os.kill(worker, signal.SIGINT)
    runner.says("/1: it serves")
    assert shop.result(shop.submit("who")) == worker
    os.kill(worker, signal.SIGINT)
    assert shop.result(shop.submit("deaf")) == []
    runner.signal(signal.SIGTERM)
    assert runner.ends().out.endswith(": 2 started, 2 ended, 0 interrupted\n")


def test_who_keeps_the_interpreter_is_not_dead_and_a_runner_obeys_the_roster(
    shop: Shop, run: Callable[..., Process], holdfast: Command
) -> None:
    busy = run("--workers", "1", "--concurrency", "1")
    (entry,) = shop.roster()
    other = run("--workers", "1", "--queues", "elsewhere", "--drain-timeout", "10m")
    id = shop.submit("keep_the_interpreter", 4 * DEAD_AFTER_SECONDS)
    shop.begun("kept")
    ages = []
    while shop.record(id).status.value == "running":
        listed = {each["id"]: each for each in holdfast("runners", "--json").json["runners"]}
        ages.append(listed[entry.id]["heartbeat_age_seconds"])
        assert listed[entry.id]["state"] == "alive"
    assert max(ages) < DEAD_AFTER_SECONDS
    assert shop.statuses(id) == ["registered", "pending", "running", "success"]
    assert not other.said("declared runner")
    # The roster tells them to end: one when its work is done, the other now.
    long = shop.submit("hold", "long")
    shop.begun("long")
    eventually(
        lambda: holdfast("runners", "--json").json["runners"][0]["running"] == 1, "the roster tells what it does"
    )
    answer = holdfast("runners", "drain", entry.id)
    assert (answer.code, "is asked to drain" in answer.out) == (0, True)
    busy.says("a user asks it to drain")
    eventually(lambda: shop.roster()[0].draining, "the roster tells that it drains")
    assert "draining" in holdfast("runners").out
    shop.let_go("long")
    ended = busy.ends()
    assert (ended.code, shop.statuses(long)[-1]) == (0, "success")
    (rest,) = shop.roster()
    stuck = shop._module.hold.options(queue="elsewhere").submit("stuck").id
    shop.begun("stuck")
    assert holdfast("runners", "stop", rest.id[:24], "--json").json == {"id": rest.id, "asked": "stop"}
    assert other.ends().code == 0
    assert shop.statuses(stuck)[-2:] == ["killed", "rerouted"]
    assert shop.roster() == []


# --- without workers, and health


def health_of(runner: Process, said: list[str]) -> Callable[..., int]:
    """Ask it how it is; what it complains of is gathered."""
    port = re.findall(r":(\d+)/health", runner.says("/health"))[0]

    def health(path: str = "/health") -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=patient(10)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            said.append(error.read().decode())
            return error.code

    return health


def test_health_tells_whether_the_store_hears_a_runner(shop: Shop, run: Callable[..., Process]) -> None:
    runner = run("--workers", "0", "--health-port", "0")
    said: list[str] = []
    health = health_of(runner, said)
    assert health() == 200
    assert health("/secrets") == 404
    assert shop.result(shop.submit("who")) == runner.pid
    with closing(sqlite3.connect(shop.folder / "shop.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")  # nobody else can write
        eventually(lambda: health() == 503, "not heard")
        assert "does not answer the heartbeats of this runner: " in said[-1]
        assert "write lock" in said[-1]
        connection.execute("ROLLBACK")
    eventually(lambda: health() == 200, "heard again")
    assert shop.result(shop.submit("who")) == runner.pid
    runner.signal(signal.SIGINT)
    assert runner.ends().code == 0


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_store_that_lives_in_one_process_is_refused(folder: Path, holdfast: Command, workers: str) -> None:
    (folder / "alone.py").write_text("from holdfast import App\napp = App('memory://')\n")
    answer = holdfast("run", "alone:app", "--workers", workers)
    assert answer.code == 1
    assert "a memory store lives in one process only" in answer.err
