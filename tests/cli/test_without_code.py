"""Commands that are given a URL import no code: not the app's, and none that happens to lie in the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.processes import Command

from holdfast import App
from holdfast.cli import program

LOUD = """
from pathlib import Path
from holdfast import App
Path("imported").touch()
app = App("sqlite:///other.db", name="other")
"""

# Every command that takes --url, with arguments, and how it ends: some have nothing to do here, and say so.
COMMANDS: dict[str, tuple[list[str], int]] = {
    "wake": (["ID"], 1),
    "cancel": (["ID"], 0),
    "ps": ([], 0),
    "show": (["ID"], 0),
    "why": (["ID"], 0),
    "history": (["ID"], 0),
    "archive": ([], 0),
    "rerun": (["--status", "success", "--yes"], 0),
    "purge": (["--status", "success", "--yes"], 0),
    "triggers": ([], 0),
    "services": ([], 0),
    "stats": ([], 0),
    "top": ([], 0),
    "doctor": ([], 1),  # a call waits, and no runner is alive
    "audit": ([], 0),
    "config": ([], 0),
    "runners": ([], 0),
    "runners drain": (["nobody"], 4),
    "runners stop": (["nobody"], 4),
    "queues": ([], 0),
    "queues pause": (["mail"], 0),
    "queues resume": (["mail"], 0),
    "schedules": ([], 0),
    "schedules show": (["hourly"], 0),
    "schedules next": (["hourly"], 0),
    "schedules update": (["hourly", "--every", "2h"], 0),
    "schedules pause": (["hourly"], 0),
    "schedules resume": (["hourly"], 0),
    "schedules run": (["hourly"], 0),
    "schedules backfill": (["hourly", "--from", "2026-11-01T00:00Z", "--to", "2026-11-01T01:00Z", "--yes"], 0),
    "schedules delete": (["hourly", "--yes"], 0),
    "events": ([], 0),
    "events show": (["EVENT"], 0),
    "events emit": (["order.created"], 0),
    "workflow steps": (["RUN"], 0),
    "workflow events": (["RUN"], 0),
    "workflow fork": (["RUN", "charge#1"], 4),
    "hooks": ([], 0),
    "hooks list": ([], 0),
    "apps": ([], 0),
    "groups": ([], 0),
    "groups show": (["01m7syd228f8a52yv43f4156h1"], 4),
    "groups cancel": (["01m7syd228f8a52yv43f4156h1"], 4),
    "limits": ([], 0),
    "limits list": ([], 0),
    "limits show": (["shop:add"], 0),
    "limits set": (["shop:add", "--limit", "2"], 0),
    "limits clear": (["shop:add"], 0),
    "archive retain": (["30d", "ID"], 1),
    "hooks show": (["approve:42"], 4),
    "hooks resume": (["approve:42", "{}"], 4),
    "streams": (["ID"], 0),
    "store prepare": ([], 0),
    "store check": ([], 0),
    "store keys": ([], 0),
    "store backup": (["copy.db"], 0),
    "store roles": ([], 2),
    "access open": ([], 0),
    "access token": ([], 0),
    "access token list": ([], 0),
    "access token create": (["TOKEN"], 0),
    "access token revoke": (["nobody"], 2),
    "world messages": ([], 0),
    "world messages list": ([], 0),
    "world messages show": (["msg_00000000000000000000000000"], 4),
    "world messages redeliver": (["msg_00000000000000000000000000"], 4),
    "world import": (["mongodb://"], 2),
}


SERVING = {"monitor", "world serve"}  # they go on until they are stopped: tests/cli/test_monitor.py, test_world.py


def taking_urls(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if any("--url" in option.opts for option in command.params):
        yield " ".join(path)
    for name, below in getattr(command, "commands", {}).items():
        yield from taking_urls(below, (*path, name))


def test_the_table_has_every_command_that_takes_a_url() -> None:
    assert set(taking_urls(typer.main.get_command(program._make()))) == {*COMMANDS, *SERVING}


@pytest.fixture
def known(folder: Path) -> dict[str, str]:
    """A store with something of everything, made by code that is gone; and code that must not run."""
    with App("sqlite:///shop.db") as app:
        task = app.task(name="shop:add")(lambda a: a)
        app.schedules.create("hourly", task, [1], every="1h")
        flow = app.workflow(name="shop:checkout")(lambda order: order)
        names = {"ID": task.submit(1).id, "EVENT": app.emit("order.created", {"id": 1}).id, "RUN": flow.submit(1).id}
    (folder / "loud.py").write_text(LOUD)
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_a_url_imports_no_code(
    folder: Path, holdfast: Command, known: dict[str, str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    arguments, code = COMMANDS[command]
    words = [*command.split(), *(known.get(word, word) for word in arguments)]
    if command not in ("schedules delete", "store backup", "access token create"):  # these can be done once
        answer = holdfast(*words, "--url", "sqlite:///shop.db")
        assert answer.code == code, answer.err
    monkeypatch.setenv("HOLDFAST_URL", "sqlite:///shop.db")
    monkeypatch.setenv("HOLDFAST_APP", "loud:app")
    answer = holdfast(*words)
    assert answer.code == code, answer.err
    assert not (folder / "imported").exists()
    assert not (folder / "other.db").exists()


@pytest.mark.parametrize("command", ["ps", "archive", "stats"])
def test_a_short_name_that_finds_nothing_is_explained(holdfast: Command, known: dict[str, str], command: str) -> None:
    answer = holdfast(command, "--task", "add", "--url", "sqlite:///shop.db")
    assert (answer.code, "write the whole name of the task, such as shop:add" in answer.err) == (0, True), answer.err
    assert "note:" not in holdfast(command, "--task", "shop:add", "--url", "sqlite:///shop.db").err


def test_what_needs_tasks_imports_the_app_whatever_the_url(
    folder: Path, holdfast: Command, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "sqlite:///shop.db")
    answer = holdfast("submit", "add", "1")
    assert (answer.code, "this app declares no task 'add'" in answer.err) == (2, True)
    assert (folder / "imported").exists()


def test_a_class_of_the_app_is_shown_as_data(folder: Path, holdfast: Command) -> None:
    (folder / "shop.py").write_text(
        "import dataclasses, enum\nfrom holdfast import App\napp = App('sqlite:///shop.db')\n"
        "class Size(enum.Enum):\n    SMALL = 1\n"
        "@dataclasses.dataclass\nclass Order:\n    id: int\n    sizes: tuple[Size, ...] = (Size.SMALL,)\n"
        "@app.task\ndef ship(order: Order): ...\n"
    )
    id = holdfast("submit", "ship", '{"id": 42}').out.strip()
    assert "call     shop:ship(Order(id=42, sizes=(<Size.SMALL: 1>,)))\n" in holdfast("show", id).out
    shown = holdfast("show", id, "--url", "sqlite:///shop.db")
    assert "call     shop:ship({'id': 42, 'sizes': ('SMALL',)})\n" in shown.out
    facts = holdfast("show", id, "--url", "sqlite:///shop.db", "--json").json
    assert facts["arguments"] == {"args": [{"id": 42, "sizes": ["SMALL"]}], "kwargs": {}}
