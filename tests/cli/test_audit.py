"""Commands that change something leave an audit record: every one of them, before they do it."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.processes import Command, Process

from holdfast import App
from holdfast.cli import program
from holdfast.errors import StoreUnavailable
from holdfast.web.api import ROUTES
from holdfast.web.auditing import TWINS

# Commands that change nothing in a store, or nothing of what is in it.
LOOKING = {
    *("ps", "show", "why", "history", "archive", "streams", "tasks", "apps", "triggers", "services", "stats", "audit"),
    *("top", "doctor", "store keys"),
    *("config", "runners", "groups", "groups show", "queues", "limits", "limits list", "limits show", "schedules"),
    *("schedules show", "schedules next", "events", "events show", "hooks", "hooks list", "hooks show"),
    *("workflow steps", "workflow events", "workflow check", "workflow replay", "status render"),
    *(
        "access token",
        "access token list",
        "world messages",
        "world messages list",
        "world messages show",
        "store check",
        "store backup",
        "store roles",
        "store keys",
        "doctor",
        "top",
    ),
}
# The engine at work. What it does is in the history of invocations.
WORKING = {"run", "worker", "monitor", "world serve", "dev", "dev-pages"}
# It makes the store, in which the record would be.
MAKING = {"store prepare"}

# Every command that changes something: its arguments, its exit code, its action, and the target in the record.
ACTING: dict[str, tuple[list[str], int, str, str]] = {
    "submit": (["add", "1"], 0, "invocation.submit", "add"),
    "wake": (["PART"], 1, "invocation.wake", "ID"),
    "cancel": (["PART"], 0, "invocation.cancel", "ID"),
    "rerun": (["ENDED"], 0, "archive.rerun", "ENDED"),
    "purge": (["--status", "success", "--yes"], 0, "archive.purge", "status=success"),
    "archive retain": (["30d", "ENDED", "--yes"], 0, "archive.retain", "ENDED"),
    "runners drain": (["nobody"], 4, "runner.drain", "nobody"),
    "runners stop": (["nobody"], 4, "runner.stop", "nobody"),
    "groups cancel": (["01m7syd228f8a52yv43f4156h1"], 4, "group.cancel", "01m7syd228f8a52yv43f4156h1"),
    "queues pause": (["mail"], 0, "queue.pause", "mail"),
    "queues resume": (["mail"], 0, "queue.resume", "mail"),
    "limits set": (["shop:add", "--limit", "2", "--url", "sqlite:///shop.db"], 0, "limit.set", "shop:add"),
    "limits clear": (["shop:add"], 0, "limit.clear", "shop:add"),
    "schedules create": (["daily", "add", "1", "--every", "1d"], 0, "schedule.create", "daily"),
    "schedules update": (["hourly", "--every", "2h"], 0, "schedule.update", "hourly"),
    "schedules pause": (["hourly"], 0, "schedule.pause", "hourly"),
    "schedules resume": (["hourly"], 0, "schedule.resume", "hourly"),
    "schedules run": (["hourly"], 0, "schedule.run", "hourly"),
    "schedules backfill": (
        ["hourly", "--from", "2026-11-01T00:00Z", "--to", "2026-11-01T01:00Z", "--yes"],
        *(0, "schedule.backfill", "hourly"),
    ),
    "schedules delete": (["hourly", "--yes"], 0, "schedule.delete", "hourly"),
    "events emit": (["order.created"], 0, "event.emit", "order.created"),
    "workflow fork": (["RUN", "charge#1"], 4, "workflow.fork", "RUN"),
    "hooks resume": (["approve:42", "{}"], 4, "hook.resume", "HOOK"),
    "access open": ([], 0, "access.open", ""),
    "access token create": (["ci", "--role", "operator"], 0, "token.create", "ci"),
    "access token revoke": (["nobody"], 2, "token.revoke", "nobody"),
    "world import": (["mongodb://"], 2, "world.import", "mongodb://"),
    "world messages redeliver": (["msg_00000000000000000000000000"], 4, "world.redeliver", "msg_" + "0" * 26),
}


WITHOUT_COMMAND: set[str] = set()  # actions of routes that no command does in the same way


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if command.callback is not None and (not below or getattr(command, "invoke_without_command", False)):
        yield " ".join(path), command
    for name, each in below.items():
        yield from commands(each, (*path, name))


ALL = {name: command for name, command in commands(typer.main.get_command(program._make())) if name}


def test_every_command_looks_or_leaves_a_record() -> None:
    assert set(ALL) == LOOKING | WORKING | MAKING | set(ACTING)


def test_every_command_that_changes_something_names_its_action_and_takes_a_reason() -> None:
    acting = {name: getattr(command.callback, "action", "") for name, command in ALL.items()}
    assert {name: action for name, action in acting.items() if action} == {
        name: action for name, (_, _, action, _) in ACTING.items()
    }
    for name in ACTING:
        assert "--reason" in [option for each in ALL[name].params for option in each.opts], name


def test_an_action_of_the_api_has_the_command_that_does_the_same() -> None:
    commands = {action: name for name, (_, _, action, _) in ACTING.items()}
    assert commands == TWINS
    routes = {route.action for route in ROUTES if route.action}
    assert routes - set(TWINS) <= WITHOUT_COMMAND


@pytest.fixture
def known(shop: Path) -> dict[str, str]:
    """A store with something of everything."""
    from holdfast.workflows.hooks_records import name_of

    with App("sqlite:///shop.db", poll_interval_seconds=0.05) as app:
        add = app.task(name="shop:add")(lambda a: a)
        app.schedules.create("hourly", add, [1], every="1h")
        flow = app.workflow(name="shop:checkout")(lambda order: order)
        with app.runner():
            ended = add.submit(1)
            ended.result(timeout=30)
        waiting, run = add.submit(1).id, flow.submit(1).id
        app.queues.pause("paused")
    names = {"ID": waiting, "PART": waiting[-8:], "RUN": run, "ENDED": ended.id, "HOOK": name_of("approve:42")}
    return names


def records(holdfast: Command, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = holdfast("audit", "--json", *options).json["records"]
    return found


@pytest.mark.parametrize("command", ACTING)
def test_a_command_leaves_a_record(holdfast: Command, known: dict[str, str], command: str) -> None:
    arguments, code, action, target = ACTING[command]
    words = [known.get(word, word) for word in arguments]
    answer = holdfast(*command.split(), *words, "--reason", "a drill")
    assert answer.code == code, answer.err
    (record,) = records(holdfast)
    assert (record["action"], record["target"]) == (action, known.get(target, target))
    assert (record["reason"], record["via"]) == ("a drill", "command line")
    assert record["outcome"] == ("failed" if code else "done")
    assert record["who"].endswith(f"@{record['source']}")
    assert f"{record['twin']} ".startswith(f"holdfast {command} ")


def test_the_record_is_there_before_anything_is_done(
    holdfast: Command, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*args: Any) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.access.audit.AuditLog.begin", away)
        assert holdfast("queues", "pause", "mail").code == 1
    assert not any(each["pause"] for each in holdfast("queues", "--json").json["queues"] if each["name"] == "mail")


def test_what_only_looks_leaves_no_record(
    holdfast: Command, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert holdfast("purge", "--status", "success").code == 0
    assert holdfast("rerun", "--status", "success").code == 0
    window = ("--from", "2026-11-01T00:00Z", "--to", "2026-11-01T01:00Z")
    assert holdfast("schedules", "backfill", "hourly", *window, "--dry-run").code == 0
    assert holdfast("schedules", "delete", "hourly").code == 1  # the answer is no
    assert holdfast("cancel", "--help").code == 0
    assert holdfast("cancel").code == 2
    assert records(holdfast) == []


def test_a_wrong_command_makes_no_store(shop: Path, holdfast: Command) -> None:
    assert holdfast("submit", "nothing").code == 2
    assert not (shop / "shop.db").exists()
    id = holdfast("submit", "add", "1").out.strip()
    (record,) = records(holdfast)
    assert (record["action"], record["outcome"], record["twin"]) == (
        *("invocation.submit", "done"),
        "holdfast submit add",
    )
    assert holdfast("submit", "add", "1", "--key", "k").code == 0
    assert records(holdfast)[0]["detail"] != id


def test_arguments_are_not_in_the_record(holdfast: Command, known: dict[str, str]) -> None:
    holdfast("submit", "add", '"canary"')
    holdfast("events", "emit", "paid", '{"card": "canary"}')
    holdfast("hooks", "resume", "canary-token", '"canary"')
    assert len(found := records(holdfast)) == 3
    assert "canary" not in json.dumps(found)


def test_the_list_is_for_people_too(holdfast: Command, known: dict[str, str]) -> None:
    assert holdfast("audit").out == "nothing was done that is kept\n"
    holdfast("queues", "pause", "mail", "--reason", "the printer is on fire")
    holdfast("queues", "resume", "mail")
    holdfast("cancel", known["ID"])
    lines = holdfast("audit").out.splitlines()
    assert len(lines) == 4
    assert "queue.pause" in lines[3]
    assert "the printer is on fire; command line from " in lines[3]
    assert len(records(holdfast, "--action", "queue")) == 2
    assert len(records(holdfast, "--target", "mail", "--action", "queue.pause")) == 1
    assert len(records(holdfast, "--who", "nobody")) == 0
    assert len(records(holdfast, "--since", "1h")) == 3
    assert records(holdfast, "--since", "2030-01-01T00:00:00Z") == []
    assert holdfast("audit", "--since", "yesterday").code == 2
    page = holdfast("audit", "--json", "--limit", "2").json
    assert len(page["records"]) == 2
    assert len(records(holdfast, "--before", page["before"])) == 1


def test_an_action_on_several_has_all_of_them(holdfast: Command, known: dict[str, str]) -> None:
    assert holdfast("cancel", known["ID"], known["RUN"][-8:]).code == 0
    (record,) = records(holdfast, "--target", known["RUN"])
    assert (record["target"], record["targets"]) == ("2 invocations", [known["ID"], known["RUN"]])
    assert record["twin"] == f"holdfast cancel {known['ID']} {known['RUN']}"
    assert records(holdfast, "--target", known["ID"]) == [record]
    line = holdfast("audit").out.splitlines()[1]
    assert "2 invocations" in line
    assert known["ID"] not in line


@pytest.mark.slow
def test_a_crash_in_between_leaves_begun(
    holdfast: Command, known: dict[str, str], start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("HOLDFAST_CRASH_AT", "audit.begun")
        killed = start("queues", "pause", "mail").ends()
    assert killed.code == -signal.SIGKILL
    (record,) = records(holdfast)
    assert (record["action"], record["outcome"], record["ended_at"]) == ("queue.pause", "begun", None)
    assert not any(each["pause"] for each in holdfast("queues", "--json").json["queues"] if each["name"] == "mail")
