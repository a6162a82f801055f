"""What all commands have in common: help, misuse, errors, JSON, streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast._version import __version__
from holdfast.model.diagram import render

if TYPE_CHECKING:
    from conftest import Command


def test_an_error_never_shows_a_password(folder: Path, holdfast: Command) -> None:
    answer = holdfast("ps", "--json", "--url", "mongodbb://bob:hunter2@host/db")
    assert answer.code == 1
    assert "hunter2" not in answer.out + answer.err


def test_an_unexpected_exception_keeps_its_traceback(
    shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    holdfast("store", "prepare")
    monkeypatch.setattr("holdfast.web.reading.model.ReadModel.invocations", broken)
    with pytest.raises(ZeroDivisionError):
        holdfast("ps")


def test_every_command_takes_json_and_explains_itself(holdfast: Command) -> None:
    commands = ["run", "submit", "wake", "ps", "show", "history", "runners", "schedules", "services", "config"]
    for command in [*([name] for name in commands), ["status", "render"], ["store", "prepare"], ["store", "check"]]:
        answer = holdfast(*command, "--help")
        assert answer.code == 0
        assert "--json" in answer.out


def test_the_list_of_commands_fits_80_columns_without_cutting_a_sentence(holdfast: Command) -> None:
    groups = ["runners", "queues", "schedules", "events", "workflow", "status", "store"]
    for command in [[], *([name] for name in groups)]:
        _, _, listed = holdfast(*command, "--help").out.partition("\nCommands:\n")
        lines = listed.partition("\n\n")[0].splitlines()
        assert len(lines) > (0 if command == ["status"] else 1)
        assert [line for line in lines if line.endswith("...") or len(line) > 80] == []


def test_version_and_misuse(holdfast: Command) -> None:
    assert holdfast("--version").out == f"holdfast {__version__}\n"
    assert holdfast("nonsense").code == 2
    assert holdfast("ps", "--limit", "0").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["ps", "--limit", "abc"],
        ["ps", "--nonsense"],
        ["nonsense"],
        ["show"],
        ["ps", "--status", "nonsense"],
        ["run", "--concurrency", "0"],
    ],
)
def test_with_json_every_misuse_is_a_document_on_stdout_and_nowhere_else(
    shop: Path, holdfast: Command, arguments: list[str]
) -> None:
    holdfast("store", "prepare")
    answer = holdfast(*arguments, "--json")
    assert (answer.code, answer.err) == (2, "")
    assert answer.json["error"]["type"] == "UsageError"
    assert answer.json["error"]["message"]
    people = holdfast(*arguments)
    assert (people.code, people.out) == (2, "")
    assert "rror: " in people.err


def test_a_task_s_own_json_flag_is_not_ours(shop: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "--nonsense", "--", "--json")
    assert (answer.code, answer.out) == (2, "")


def test_python_m_holdfast_is_the_same_program() -> None:
    ended = subprocess.run([sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"holdfast {__version__}\n", "")


def test_a_terminal_that_lacks_a_character_gets_an_escape() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "status", "render", "--format", "text"],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == render("text").encode("ascii", "backslashreplace")


@pytest.mark.parametrize("arguments", [["ps"], ["ps", "--json"], ["--help"]])
def test_a_reader_who_has_seen_enough_is_no_error(shop: Path, holdfast: Command, arguments: list[str]) -> None:
    holdfast("store", "prepare")
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments], cwd=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert (process.stderr.read(), process.wait(15)) == (b"", 0)


def test_help_loads_neither_rich_nor_a_store() -> None:
    code = (
        "import sys\nfrom holdfast.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'rich.table', 'rich.console', 'sqlite3', 'pymongo'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
