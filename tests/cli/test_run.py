"""`holdfast run` as people use it: processes, signals and a file between them."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.running import _Signals
from holdfast.engine.account import Account

if TYPE_CHECKING:
    from conftest import Command, Process

slow = pytest.mark.slow


@slow
def test_submitted_work_is_done_by_another_process(start: Callable[..., Process], holdfast: Command) -> None:
    runner = start("run", "shop:app", "--concurrency", "2", "--log-format", "json")
    runner.says("/1 is ready")
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
    runner.says("/1 is ready")
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
    assert "shop:boom failed: ValueError: so\\nwhat  [invocation=" in ended.err


@slow
def test_the_first_signal_lets_work_end(start: Callable[..., Process], holdfast: Command) -> None:
    id = holdfast("submit", "linger", "0.5").out.strip()
    runner = start("run", "--json")
    runner.says("lingering")
    runner.signal(signal.SIGTERM)
    ended = runner.ends()
    assert ended.code == 0
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

    before = signal.getsignal(signal.SIGTERM)
    with _Signals(Starting()) as signals:  # type: ignore[arg-type]
        signals.repeat()
        assert Starting.asked == []
        signal.raise_signal(signal.SIGTERM)
        signals.repeat()
        signal.raise_signal(signal.SIGINT)
        signals.repeat()
    assert Starting.asked == [False, False, True, True]
    assert signal.getsignal(signal.SIGTERM) is before


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
    monkeypatch.setattr("holdfast.cli.running._until_stopped", lambda runner: ("r", Account(), True))
    answer = holdfast("run", "--queues", "default,mial")
    assert answer.code == 0
    assert answer.err == (
        "note: no task is declared for the queue 'mial', only for: default; it gets what is submitted to it\n"
    )


def test_tasks_of_modules_that_a_runner_imports_are_declared(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.running._until_stopped", lambda runner: ("r", Account(), True))
    (folder / "market.py").write_text("from holdfast import App\napp = App('sqlite:///market.db')\n")
    (folder / "stalls.py").write_text("from market import app\napp.task(len, name='stalls:size', queue='stalls')\n")
    assert "declares no tasks" in holdfast("run", "market:app").err
    monkeypatch.setenv("HOLDFAST_TRIGGER_TASK_MODULES", "stalls")
    monkeypatch.delitem(sys.modules, "market")
    assert holdfast("run", "market:app", "--queues", "stalls").err == ""


def test_a_queue_that_retries_move_to_is_declared(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cli.running._until_stopped", lambda runner: ("r", Account(), True))
    (folder / "movers.py").write_text(
        "from holdfast import App, Fixed, FirstMatch, MoveTo, Only\n"
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
    runner.says("/1 is ready")
    (facts,) = holdfast("runners", "--json").json["runners"]
    assert sorted(facts["queues"]) == ["bulk", "mail", "slow"]
    assert facts["tags"] == ["gpu"]
    runner.signal(signal.SIGTERM)
    assert runner.ends().code == 0
