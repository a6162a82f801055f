"""What a command does when an option is not given: the table of all defaults, and what those mean that say nothing."""

from __future__ import annotations

import datetime as dt
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App
from holdfast.cli import archive, program
from holdfast.schedules.records import Rules

if TYPE_CHECKING:
    from conftest import Command, Process

SHARED = {"--help", "--json", "--app", "--url", "--name", "--version"}

# Options whose default is a value. All others say nothing by default: None, or off for a flag.
VALUES: dict[str, dict[str, Any]] = {
    "run": {"--workers": 1, "--health-host": "127.0.0.1", "--log-format": "text", "--log-level": "info"},
    "dev": {"--workers": 1, "--log-format": "text", "--log-level": "info"},
    "worker": {"--log-format": "text", "--log-level": "info"},
    "dev-pages": {"--log-format": "text", "--log-level": "info"},
    "cancel": {"--reason": ""},
    "ps": {"--limit": 50},
    "archive": {"--limit": 50},
    "streams": {"--start": 0},
    "audit": {"--limit": 50},
    "monitor": {"--host": "127.0.0.1", "--port": 8080, "--log-format": "text", "--log-level": "info"},
    "hooks": {"--limit": 50},
    "hooks list": {"--limit": 50},
    "hooks resume": {"payload": "null"},
    "groups": {"--limit": 50},
    "groups cancel": {"--reason": ""},
    "limits show": {"--limit": 50},
    "limits set": {"--reason": ""},
    "stats": {"--since": "1h"},
    "services": {"--limit": 10},
    "queues pause": {"--reason": ""},
    "schedules next": {"-n": 5},
    "schedules pause": {"--reason": ""},
    "events": {"--event": "", "--limit": 50},
    "events emit": {"payload": "null"},
    "workflow events": {"--limit": 100},
    "workflow check": {"--limit": 100},
    "access token create": {"--role": "viewer", "--expires": "90d"},
    "world serve": {"--host": "127.0.0.1", "--port": 8091, "--log-format": "text", "--log-level": "info"},
    "world import": {"--database": "workflow"},
    "world messages": {"--limit": 50},
    "world messages list": {"--limit": 50},
}


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    for option in command.params:
        if option.opts[0] not in SHARED:
            yield " ".join(path), option.opts[0], option
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*path, name))


def test_every_default_on_the_command_line_is_the_one_that_is_written_down() -> None:
    found: dict[str, dict[str, Any]] = {}
    for command, name, option in options(typer.main.get_command(program._make())):
        says_nothing = option.default is None or (option.default is False and not option.secondary_opts)
        if not says_nothing:  # where there is also a --no-…, False would say that
            found.setdefault(command, {})[name] = option.default
    assert found == VALUES


# What a number may be, where its option says so.
RANGES: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "run": {"--workers": (0, 1000), "--max-tasks-per-worker": (1, None), "--health-port": (0, 65535)},
    "dev": {"--workers": (0, 1000), "--port": (0, 65535)},
    "ps": {"--limit": (1, None)},
    "archive": {"--limit": (1, 10000)},
    "services": {"--limit": (1, None)},
    "audit": {"--limit": (1, 10000)},
    "monitor": {"--port": (0, 65535)},
    "hooks": {"--limit": (1, 10000)},
    "hooks list": {"--limit": (1, 10000)},
    "groups": {"--limit": (1, None)},
    "limits show": {"--limit": (1, None)},
    "limits set": {"--limit": (1, None), "--burst": (1, None)},
    "schedules next": {"-n": (1, 10000)},
    "events": {"--limit": (1, 10000)},
    "workflow events": {"--limit": (1, 10000)},
    "workflow check": {"--limit": (1, 10000)},
    "world serve": {"--port": (0, 65535)},
    "world messages": {"--limit": (1, 1000)},
    "world messages list": {"--limit": (1, 1000)},
}


def test_every_range_on_the_command_line_is_the_one_that_is_written_down() -> None:
    found: dict[str, dict[str, Any]] = {}
    for command, name, option in options(typer.main.get_command(program._make())):
        limits = (getattr(option, "min", None), getattr(option, "max", None))
        if limits != (None, None):
            found.setdefault(command, {})[name] = limits
    assert found == RANGES


def test_what_can_be_switched_on_and_off_says_nothing_unless_it_is_given() -> None:
    found = {
        f"{command} {name}": option.default
        for command, name, option in options(typer.main.get_command(program._make()))
        if option.secondary_opts
    }
    assert len(found) >= 3
    assert set(found.values()) == {None}


# --- what nothing means


SHOP = """
from holdfast import App, context
app = App("sqlite:///shop.db")

@app.task(queue="mail", priority=7, expires="1h")
def letter(): ...

@app.task
def parent(): ...

@app.task(cancel_children=False)
def loose(): ...

@app.task
def child(): ...
"""


LINGER = """
import asyncio

@app.task
async def linger():
    print("lingering", flush=True)
    await asyncio.sleep(600)
"""


@pytest.fixture
def post(folder: Path) -> Path:
    (folder / "shop.py").write_text(SHOP)
    return folder


@pytest.fixture
def app(post: Path) -> Iterator[App]:
    with App(f"sqlite:///{post / 'shop.db'}") as found:
        yield found


def submitted(holdfast: Command, *arguments: str) -> dict[str, Any]:
    id = holdfast("submit", "--json", *arguments).json["id"]
    return {**holdfast("show", id, "--json").json, "id": id}


def test_a_submit_is_as_its_task_declares(post: Path, holdfast: Command) -> None:
    plain = submitted(holdfast, "letter")
    assert (plain["queue"], plain["priority"], plain["key"]) == ("mail", 7, None)
    assert plain["due_at"] == plain["created_at"]
    assert "It expires in" in holdfast("why", plain["id"]).out
    other = submitted(holdfast, "letter", "--queue", "slow", "--priority", "1", "--key", "k", "--delay", "10m")
    assert (other["queue"], other["priority"], other["key"]) == ("slow", 1, "k")
    assert other["due_at"] > other["created_at"]


@pytest.mark.parametrize(
    ("task", "option", "follows"),
    [
        ("parent", (), True),
        ("parent", ("--no-children",), False),
        ("parent", ("--children",), True),
        ("loose", (), False),
        ("loose", ("--children",), True),
    ],
)
def test_a_cancel_takes_children_along_as_the_task_declares(
    task: str, option: tuple[str, ...], follows: bool, app: App, holdfast: Command
) -> None:
    """The parent runs, and its child waits."""
    began, may_end = list[str](), threading.Event()

    @app.task(name=f"shop:{task}", cancel_children=task == "parent")
    def above() -> None:
        began.append(below.options(delay="1h").submit().id)
        may_end.wait(30)

    @app.task(name="shop:child")
    def below() -> None: ...

    with app.runner(concurrency=1):
        parent = above.submit()
        eventually(lambda: began, "the parent has submitted its child")
        assert holdfast("cancel", parent.id, *option).code == 0
        status = holdfast("show", began[0], "--json").json["status"]
        may_end.set()
    assert status == ("cancelled" if follows else "registered")


def test_a_runner_is_as_the_settings_say(
    post: Path, holdfast: Command, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "3")
    monkeypatch.setenv("HOLDFAST_DRAIN_TIMEOUT_SECONDS", "0.1")
    (post / "shop.py").write_text(SHOP + LINGER)
    holdfast("submit", "linger")
    runner = start("run")
    runner.says("lingering")
    (found,) = holdfast("runners", "--json").json["runners"]
    assert (found["concurrency"], found["queues"], found["tags"], len(found["workers"])) == (3, None, [], 1)
    began = time.monotonic()
    runner.signal(signal.SIGTERM)
    runner.ends()
    assert time.monotonic() - began < 20  # the task takes ten minutes


def test_a_new_schedule_has_the_rules_that_the_docs_give(post: Path, app: App, holdfast: Command) -> None:
    assert holdfast("schedules", "create", "s", "child", "--every", "1h").code == 0
    made = app.schedules.get("s")
    assert (made.rules, made.pause, made.call.queue, made.call.priority) == (Rules(), None, "default", 0)
    rules = ("--overlap", "skip", "--catch-up", "all", "--jitter", "3s", "--unique")
    assert holdfast("schedules", "update", "s", "child", *rules, "--priority", "4").code == 0
    changed = app.schedules.get("s")
    assert holdfast("schedules", "update", "s", "--every", "2h").code == 0
    after = app.schedules.get("s")
    assert (after.rules, after.call.priority) == (changed.rules, 4), "what is not given stays as it was"


def test_a_period_has_two_ends(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(name="shop:child")
    def child() -> None: ...

    ended = []
    with app.runner():
        for _ in range(2):
            invocation = child.submit()
            invocation.result(patient(30))
            ended.append((invocation.id, invocation.record().changed_at))
            time.sleep(0.02)  # the moment between the two is written in milliseconds
    (first, at), (second, later) = ended
    middle = (at + later) / 2
    monkeypatch.setattr("holdfast.cli.reach.time_of", lambda app: middle + 100.0)
    between = dt.datetime.fromtimestamp(middle, dt.UTC).isoformat()
    cases = {
        (): [second, first],
        ("--since", between): [second],
        ("--until", between): [first],
        ("--since", "100s ago"): [second],
        ("--until", "100s"): [first],
        ("--since", "2m"): [second, first],
        ("--until", "2m"): [],
        ("--since", "2m", "--until", between): [first],
        ("--since", between, "--until", between): [],
    }
    for period, expected in cases.items():
        found = [each["id"] for each in holdfast("archive", "--json", *period).json["invocations"]]
        assert found == expected, period


@pytest.mark.parametrize("ahead", [None, 60.0, 1e9], ids=["without an end", "in a minute", "in years"])
@pytest.mark.parametrize("command", ["purge", "rerun"])
def test_what_ends_while_a_person_thinks_was_not_agreed_to(
    command: str, ahead: float | None, app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = () if ahead is None else ("--until", dt.datetime.fromtimestamp(time.time() + ahead, dt.UTC).isoformat())

    @app.task(name="shop:child")
    def child() -> None: ...

    def done() -> str:
        with app.runner():
            invocation = child.submit()
            invocation.result(patient(30))
        return invocation.id

    meanwhile: list[str] = []

    def thinking(question: str) -> bool:
        assert question.startswith("1 invocation would")
        meanwhile.append(done())
        return True

    before = done()
    monkeypatch.setattr(archive.typer, "confirm", thinking)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert holdfast(command, "--status", "success", *until).code == 0
    found = {record.id for record in app.archive(limit=10)}
    if command == "purge":
        assert found == set(meanwhile)
    else:
        reruns = [each.rerun_of for each in app.invocations(status="registered")]
        assert reruns == [before]
