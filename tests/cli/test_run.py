"""`holdfast run` as people use it: processes, signals and a file between them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.processes import children, eventually
from tests.support.patience import patient

from holdfast import App
from holdfast.cli.run import SAME_SIGNAL_SECONDS, Restart, _Signals, _until_stopped
from holdfast.fleet.embedded import EmbeddedRunner
from holdfast.runtime.worker import Account
from holdfast.settings import Settings

if TYPE_CHECKING:
    from conftest import Command, Process

slow = pytest.mark.slow


@slow
def test_submitted_work_is_done_by_another_process(start: Callable[..., Process], holdfast: Command) -> None:
    runner = start("run", "shop:app", "--concurrency", "2", "--log-format", "json")
    runner.says("/1: it serves")
    good = start("submit", "add", "1", "2", "--wait", "--json").ends()
    assert (good.code, good.json["result"], good.json["status"]) == (0, 3, "success")
    (alive,) = holdfast("runners", "--json").json["runners"]
    assert (alive["alive"], alive["concurrency"]) == (True, 2)
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert (ended.code, ended.out) == (0, f"runner {alive['id']}: 1 started, 1 ended, 0 interrupted\n")
    assert all(json.loads(line)["logger"].startswith("holdfast") for line in ended.err.splitlines())
    assert holdfast("runners", "--json").json["runners"] == []


@slow
def test_a_failed_task_is_reported_by_the_one_who_waits(start: Callable[..., Process]) -> None:
    runner = start("run")
    runner.says("/1: it serves")
    waiting = [start("submit", "boom", "so\nwhat", "--wait", *more) for more in ([], ["--json"])]
    people, program = [process.ends() for process in waiting]
    assert (people.code, program.code) == (1, 1)
    assert "(failed): ValueError: so\\nwhat" in people.err
    assert "  | Traceback" in people.err
    assert program.json["status"] == "failed"
    assert program.json["error"]["type"] == "builtins:ValueError"
    assert "raise ValueError(text)" in program.json["error"]["traceback"]
    runner.signal(signal.SIGINT)
    ended = runner.ends()
    assert ended.code == 0
    assert "failed shop:boom: ValueError: so\\nwhat  [invocation=" in ended.err


@slow
def test_the_first_signal_lets_work_end(start: Callable[..., Process], holdfast: Command) -> None:
    id = holdfast("submit", "linger", "0.5").out.strip()
    runner = start("run", "--json")
    runner.says("lingering")
    runner.signal(signal.SIGHUP)
    ended = runner.ends()
    assert ended.code == 0
    assert "stopping the runner: SIGHUP; running work may end within the drain timeout" in ended.err
    document = ended.out.partition("{")[2]  # the task of this test prints to stdout too
    assert json.loads("{" + document)["ended"] == 1
    assert holdfast("show", id, "--json").json["status"] == "success"


@slow
def test_the_second_signal_ends_it_and_the_work_goes_back(start: Callable[..., Process], holdfast: Command) -> None:
    id = holdfast("submit", "linger", "600").out.strip()
    runner = start("run", "--drain-timeout", "10m")
    runner.says("lingering")
    runner.signal(signal.SIGTERM)
    assert runner.says("waits up to 600 s for 1 invocation").rstrip().endswith("invocation")
    time.sleep(SAME_SIGNAL_SECONDS)
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert ended.code == 0
    history = holdfast("history", id, "--json").json["history"]
    assert [entry["status"] for entry in history[-2:]] == ["killed", "rerouted"]


@slow
def test_a_drain_timeout_ends_it_without_a_second_signal(
    shop: Path, start: Callable[..., Process], holdfast: Command
) -> None:
    id = holdfast("submit", "linger", "600").out.strip()
    runner = start("run", "--drain-timeout", "10ms")
    runner.says("lingering")
    runner.signal(signal.SIGINT)
    assert runner.ends().code == 0
    assert holdfast("show", id, "--json").json["status"] == "rerouted"


def test_signals_become_more_urgent_and_none_is_lost_during_the_start() -> None:
    class Starting:
        """Stands in for a runner, to see what it is asked."""

        asked: list[bool] = []

        def request_stop(self, *, hurry: bool = False) -> None:
            self.asked.append(hurry)

    now = 100.0
    before = signal.getsignal(signal.SIGTERM)
    with _Signals(Starting(), lambda: now) as signals:  # type: ignore[arg-type]
        signals.repeat()
        assert Starting.asked == []
        signal.raise_signal(signal.SIGTERM)
        now += SAME_SIGNAL_SECONDS / 2
        signal.raise_signal(signal.SIGTERM)  # to the process, and to its group
        signals.repeat()
        now += SAME_SIGNAL_SECONDS
        signal.raise_signal(signal.SIGINT)
        signals.repeat()
    assert Starting.asked == [False, False, True, True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_before_the_runner_is_there_stops_it() -> None:
    app = App("memory://")
    runner = app.runner()
    start = runner.start

    def start_after_a_signal() -> EmbeddedRunner:
        signal.raise_signal(signal.SIGTERM)  # there is nothing yet that could be asked
        return start()

    runner.start = start_after_a_signal  # type: ignore[method-assign]
    late = threading.Timer(20.0, runner.end)
    late.start()
    try:
        _, _, was_stopped = _until_stopped(runner)
        assert (was_stopped, late.is_alive()) == (True, True)
    finally:
        late.cancel()
        app.close()


def test_run_refuses_what_it_cannot_do(shop: Path, holdfast: Command) -> None:
    assert holdfast("run", "--drain-timeout", "soon").code == 2
    assert holdfast("run", "--concurrency", "0").code == 2
    assert holdfast("run", "nowhere:app").code == 1
    assert holdfast("run", "--queues", "a,,b").code == 2
    assert holdfast("run", "--tags", "two words").code == 2
    for number in (-1, 1001):
        answer = holdfast("run", "--workers", number)
        assert (answer.code, "Invalid value for '--workers'" in answer.err) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = holdfast("run", "--health-port", taken.getsockname()[1])
    assert (answer.code, "another program uses that port" in answer.err, answer.err.count("\n")) == (1, True, 1)


def test_a_queue_that_no_task_is_declared_for_is_noted(
    shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may submit to it, so it is no error; but mostly it is a misspelt one."""
    monkeypatch.setattr("holdfast.cli.run._until_stopped", lambda runner: ("r", Account(), True))
    answer = holdfast("run", "--queues", "default,mial")
    assert answer.code == 0
    assert answer.err == (
        "note: no task is declared for the queue 'mial', only for: default; calls that are submitted to it run\n"
    )


def test_tasks_of_modules_that_a_runner_imports_are_declared(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.run._until_stopped", lambda runner: ("r", Account(), True))
    (folder / "market.py").write_text("from holdfast import App\napp = App('sqlite:///market.db')\n")
    (folder / "stalls.py").write_text("from market import app\napp.task(len, name='stalls:size', queue='stalls')\n")
    assert "declares no tasks" in holdfast("run", "market:app").err
    monkeypatch.setenv("HOLDFAST_TRIGGER_TASK_MODULES", "stalls")
    monkeypatch.delitem(sys.modules, "market")
    assert holdfast("run", "market:app", "--queues", "stalls").err == ""


def test_a_queue_that_retries_move_to_is_declared(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.run._until_stopped", lambda runner: ("r", Account(), True))
    (folder / "movers.py").write_text(
        "from holdfast import App\nfrom holdfast.retries import Fixed, FirstMatch, MoveTo, Only\n"
        "app = App('sqlite:///movers.db')\n"
        "later = Only(MoveTo('late', Fixed(1)), Exception)\n"
        "rules = FirstMatch([(OSError, MoveTo('slow', Fixed(1))), (ValueError, later)])\n"
        "app.task(len, name='movers:size', retries=rules)\n"
    )
    assert holdfast("run", "movers:app", "--queues", "default,slow,late").err == ""
    assert holdfast("store", "prepare").code == 0
    assert [queue["name"] for queue in holdfast("queues", "--json").json["queues"]] == ["default", "late", "slow"]


@slow
def test_a_runner_serves_the_queues_and_tags_it_is_given(start: Callable[..., Process], holdfast: Command) -> None:
    runner = start("run", "--app", "shop:app", "--queues", "mail, bulk", "--queues", "slow", "--tags", "gpu")
    runner.says("/1: it serves")
    (facts,) = holdfast("runners", "--json").json["runners"]
    assert sorted(facts["queues"]) == ["bulk", "mail", "slow"]
    assert facts["tags"] == ["gpu"]
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0


# --- signals beside SIGINT and SIGTERM


TALKING = """
import time
from pathlib import Path
from holdfast import App

app = App("sqlite:///shop.db")
HERE = Path(__file__).parent

@app.task
def talk():
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    print("nobody sees this", flush=True)
    return "done"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_work_ends_when_the_terminal_is_closed_though_it_prints(shop: Path, holdfast: Command, workers: str) -> None:
    (shop / "shop.py").write_text(TALKING)
    id = holdfast("submit", "--app", "shop:app", "talk").out.split()[0]
    with Terminal() as terminal:
        runner = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "run", "shop:app", "--workers", workers],
            cwd=shop,
            stdin=terminal.inside,
            stdout=terminal.inside,
            stderr=terminal.inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        eventually(lambda: (shop / "begun").exists(), "it has begun")

    def state() -> str:
        (found,) = holdfast("runners", "--app", "shop:app", "--json").json["runners"]
        return str(found["state"])

    try:
        eventually(lambda: state() == "draining", "it drains", seconds=patient(20))
        (shop / "go").touch()
        assert runner.wait(30) == 0
    finally:
        runner.kill()
        runner.wait()
    shown = holdfast("show", "--app", "shop:app", id, "--json").json
    assert (shown["status"], shown["attempt"]) == ("success", 1)
    assert holdfast("runners", "--app", "shop:app", "--json").json == {"runners": []}


class Terminal:
    """A real one, whose window is closed at the end."""

    def __init__(self) -> None:
        self._window, self.inside = pty.openpty()
        self._closing = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        """As a window does: else whoever writes has to wait."""
        while not self._closing.is_set():
            if select.select([self._window], [], [], 0.02)[0]:
                os.read(self._window, 65536)

    def __enter__(self) -> Terminal:
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._reading.join()
        os.close(self.inside)
        os.close(self._window)


@pytest.mark.slow
def test_quit_drains_and_hangup_is_ignored_under_nohup(start: Callable[..., Process], holdfast: Command) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        runner = start("run", "shop:app", "--workers", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    runner.says("/1: it serves")
    id = holdfast("submit", "--app", "shop:app", "linger", "1").out.split()[0]
    runner.says("lingering")
    os.killpg(runner.pid, signal.SIGHUP)
    for worker in children(runner.pid):
        os.kill(worker, signal.SIGHUP)
        os.kill(worker, signal.SIGQUIT)  # a process manager may tell every process
    os.killpg(runner.pid, signal.SIGQUIT)
    ended = runner.ends()
    assert ended.code == 0
    assert "1 started, 1 ended, 0 interrupted" in ended.out
    assert holdfast("show", "--app", "shop:app", id, "--json").json["status"] == "success"


def test_a_hangup_asks_to_drain_and_never_hurries(caplog: pytest.LogCaptureFixture) -> None:
    class Running:
        asked: list[bool] = []

        def request_stop(self, *, hurry: bool = False) -> None:
            self.asked.append(hurry)

    caplog.set_level("INFO", "holdfast.runner")
    with _Signals(Running()):  # type: ignore[arg-type]
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGQUIT, signal.SIGHUP):
            signal.raise_signal(number)
    assert Running.asked == [False, True]
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "stopping the runner: SIGHUP",
        "stopping the runner: SIGQUIT",
    ]


def test_a_store_that_comes_and_goes_is_no_reason_to_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.run.LOOK_SECONDS", 0.001)
    enough = threading.Event()

    class Running:
        looks = 0
        is_stopped = False

        @property
        def needs_restart(self) -> str:
            self.looks += 1
            if self.looks > 300:
                enough.set()
            return "its file was replaced" if self.looks % 2 or enough.is_set() else ""

        def request_stop(self, *, hurry: bool) -> None:
            self.is_stopped = True

    running = Running()
    settings = Settings(runner_considered_dead_after_minutes="100ms", runner_heartbeat_seconds="10ms")
    with Restart(running, settings) as watch:  # type: ignore[arg-type]
        assert enough.wait(patient(10.0)), "it has stopped to look"
        eventually(lambda: watch.why, "now it is one for good")
    assert running.is_stopped
