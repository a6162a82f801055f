"""status render, store, config, and what all commands have in common."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient

from holdfast._version import __version__
from holdfast.lifecycle.diagram import render

if TYPE_CHECKING:
    from conftest import Command

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("format", ["svg", "mermaid", "text"])
def test_render_prints_the_diagram_as_it_is(holdfast: Command, format: str) -> None:
    assert holdfast("status", "render", "--format", format).out == render(format)  # type: ignore[arg-type]
    assert holdfast("status", "render", "--format", format, "--json").json == {
        "format": format,
        "text": render(format),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", ["machine.svg", "machine.mmd", "machine.txt"])
def test_check_tells_fresh_from_stale_and_missing(folder: Path, holdfast: Command, name: str) -> None:
    missing = holdfast("status", "render", "--check", "--output", name)
    assert missing.code == 1
    assert "not readable" in missing.out
    assert holdfast("status", "render", "--output", name).code == 0
    assert holdfast("status", "render", "--check", "--output", name).code == 0
    with (folder / name).open("a") as file:
        file.write(" ")
    stale = holdfast("status", "render", "--check", "--output", name, "--json")
    assert (stale.code, stale.json) == (1, {"fresh": False, "files": {name: "stale"}})
    assert (
        f"run: holdfast status render --output {name}" in holdfast("status", "render", "--check", "--output", name).out
    )


def test_a_file_name_without_a_format_is_a_usage_error(folder: Path, holdfast: Command) -> None:
    assert holdfast("status", "render", "--output", "machine").code == 2
    assert holdfast("status", "render", "--check", "--format", "svg").code == 2


def test_the_rendered_documentation_is_fresh(holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    answer = holdfast("status", "render", "--check")
    assert answer.code == 0, answer.out + "run: make diagram"


def test_store_prepare_and_check(shop: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare", "--json").json == {"url": f"sqlite:///{shop}/shop.db", "prepared": True}
    assert (shop / "shop.db").exists()
    checked = holdfast("store", "check", "--deep", "--json")
    assert (checked.code, checked.json["ok"]) == (0, True)
    (shop / "shop.db").chmod(0o644)
    worse = holdfast("store", "check")
    assert worse.code == 1
    assert "NOT OK" in worse.out


@pytest.mark.xdist_group("mongo")
def test_check_tells_of_a_missing_index_and_prepare_makes_it(holdfast: Command, mongo_url: str) -> None:
    assert holdfast("store", "prepare", "--url", mongo_url).code == 0
    with MongoClient[dict[str, Any]](mongo_url) as client:
        client.get_default_database().holdfast_invocations.drop_index("task")
    for _ in range(2):  # to look is not to heal
        answer = holdfast("store", "check", "--url", mongo_url, "--json")
        assert (answer.code, answer.json["ok"]) == (1, False)
        (wrong,) = [finding for finding in answer.json["findings"] if not finding["ok"]]
        assert wrong["subject"] == "index holdfast_invocations.task"
        assert "missing" in wrong["detail"]
        assert wrong["advice"] == "holdfast store prepare"
    answer = holdfast("store", "check", "--url", mongo_url)
    (line,) = [line for line in answer.out.splitlines() if "NOT OK" in line]
    assert line.startswith("index holdfast_invocations.task ")
    assert line.endswith("holdfast store prepare")
    assert holdfast("store", "prepare", "--url", mongo_url).code == 0
    assert holdfast("store", "check", "--url", mongo_url).code == 0


@pytest.mark.xdist_group("mongo")
def test_check_makes_nothing_where_no_store_is(holdfast: Command, mongo_url: str) -> None:
    answer = holdfast("store", "check", "--url", mongo_url)
    assert answer.code == 1
    assert "Holdfast's collections are not there" in answer.out
    with MongoClient[dict[str, Any]](mongo_url) as client:
        assert client.get_default_database().list_collection_names() == []


def test_check_of_a_file_without_tables_makes_none(folder: Path, holdfast: Command) -> None:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    (folder / "shop.db").chmod(0o600)
    before = (folder / "shop.db").read_bytes()
    answer = holdfast("store", "check", "--deep", "--url", "sqlite:///shop.db", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    (wrong,) = [finding for finding in answer.json["findings"] if not finding["ok"]]
    assert (wrong["subject"], wrong["advice"]) == ("schema", "holdfast store prepare")
    assert (folder / "shop.db").read_bytes() == before
    assert holdfast("store", "prepare", "--url", "sqlite:///shop.db").code == 0
    assert holdfast("store", "check", "--deep", "--url", "sqlite:///shop.db").code == 0


def test_a_damaged_file_that_was_left_open_can_be_looked_at(shop: Path, holdfast: Command) -> None:
    """Opening it is refused, with the advice to look with this very command. To look changes nothing."""
    for n in range(20):
        holdfast("submit", "shop:add", str(n))
    left_open = f"""
import os, sqlite3
connection = sqlite3.connect({str(shop / "shop.db")!r}, isolation_level=None)
connection.execute("CREATE TABLE theirs (x)")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", left_open], check=True)
    with closing(sqlite3.connect(f"file:{shop / 'shop.db'}?mode=ro", uri=True)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'holdfast_invocations'"
        ((page,),) = connection.execute(query).fetchall()
    content = bytearray((shop / "shop.db").read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\x55" * 4096
    (shop / "shop.db").write_bytes(content)
    log = (shop / "shop.db-wal").read_bytes()
    answer = holdfast("store", "check", "--deep", "--json")
    assert answer.code == 1
    assert [finding["subject"] for finding in answer.json["findings"] if not finding["ok"]] == ["integrity"]
    assert (shop / "shop.db-wal").read_bytes() == log, "what the next opening has to see is gone"
    assert (shop / "shop.db").read_bytes() == bytes(content)
    opened = holdfast("ps")
    assert opened.code == 1
    assert "holdfast store check" in opened.err


def test_a_store_that_cannot_be_opened_is_one_clear_error(folder: Path, holdfast: Command) -> None:
    (folder / "text.db").write_text("this is no database, but it is long enough to be taken for one " * 20)
    answer = holdfast("store", "check", "--url", "sqlite:///text.db")
    assert answer.code == 1
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1


def test_config_tells_sources_and_hides_secrets(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "3")
    monkeypatch.setenv("HOLDFAST_URL", "mongodb://bob:hunter2@host/db")
    answer = holdfast("config", "--json")
    assert "hunter2" not in answer.out
    rows = {row["name"]: row for row in answer.json["settings"]}
    assert (rows["concurrency"]["value"], rows["concurrency"]["source"]) == (3, "environment HOLDFAST_CONCURRENCY")
    assert "mongodb://bob:***@host/db" in holdfast("config").out


def test_config_of_an_app_shows_its_keywords(shop: Path, holdfast: Command) -> None:
    rows = {row["name"]: row for row in holdfast("config", "--json").json["settings"]}
    assert (rows["url"]["shown"], rows["url"]["source"]) == ("sqlite:///shop.db", "keyword")


def test_an_unknown_setting_is_an_error_that_suggests_the_right_one(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURENCY", "3")
    answer = holdfast("config")
    assert answer.code == 1
    assert "Did you mean HOLDFAST_CONCURRENCY?" in answer.err


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
    monkeypatch.setattr("holdfast.app.App.invocations", broken)
    with pytest.raises(ZeroDivisionError):
        holdfast("ps")


def test_every_command_takes_json_and_explains_itself(holdfast: Command) -> None:
    commands = ["run", "submit", "wake", "ps", "show", "history", "runners", "schedules", "services", "config"]
    for command in [*([name] for name in commands), ["status", "render"], ["store", "prepare"], ["store", "check"]]:
        answer = holdfast(*command, "--help")
        assert answer.code == 0
        assert "--json" in answer.out


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
