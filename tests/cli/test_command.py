"""Which app a command takes, and that looking never makes a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

ID = "0" * 26
LOOKING = [["ps"], ["show", ID], ["history", ID], ["runners"], ["store", "check"], ["wake", ID]]
looking = pytest.mark.parametrize("command", LOOKING, ids=lambda command: command[-1] if len(command) > 1 else None)

APP = """
from holdfast import App
app = App("sqlite:///{name}.db", name="{name}")

@app.task
def add(a: int, b: int = 0):
    return a + b
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


# --- looking makes nothing


@looking
def test_looking_where_there_is_nothing_makes_nothing(folder: Path, holdfast: Command, command: list[str]) -> None:
    answer = holdfast(*command)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: there is no store at {folder / 'holdfast.db'}; no app was found here")
    assert files(folder) == {"pyproject.toml"}


@looking
def test_looking_at_a_file_that_is_not_there_makes_nothing(folder: Path, holdfast: Command, command: list[str]) -> None:
    answer = holdfast(*command, "--url", "sqlite:///nope.db", "--json")
    assert answer.code == 1
    assert answer.json["error"]["type"] == "StoreUnavailable"
    assert f"there is no store at {folder / 'nope.db'}" in answer.json["error"]["message"]
    assert files(folder) == {"pyproject.toml"}


@looking
def test_looking_before_the_first_submit_says_what_makes_the_store(
    shop: Path, holdfast: Command, command: list[str]
) -> None:
    answer = holdfast(*command)
    assert answer.code == 1
    assert f"there is no store at {shop / 'shop.db'} yet" in answer.err
    assert files(shop) == {"pyproject.toml", "shop.py"}


def test_prepare_makes_the_store_and_then_one_can_look(folder: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare").code == 0
    assert (folder / "holdfast.db").exists()
    assert holdfast("ps", "--json").json["invocations"] == []
    assert holdfast("ps", "--url", "sqlite:///holdfast.db", "--name", "x").out == "no invocations\n"


@pytest.mark.parametrize("command", [*LOOKING, ["submit", "add", "1"], ["run"], ["store", "prepare"]])
def test_a_memory_store_is_refused_because_no_other_process_sees_it(
    folder: Path, holdfast: Command, command: list[str]
) -> None:
    write(folder / "brief.py", APP.format(name="brief").replace("sqlite:///brief.db", "memory://"))
    answer = holdfast(*command)
    assert (answer.code, answer.out) == (1, "")
    assert "a memory store lives in one process only" in answer.err
    assert "sqlite:///" in answer.err


def test_config_tells_of_a_memory_store_and_of_one_that_is_not_there(folder: Path, holdfast: Command) -> None:
    assert "memory://" in holdfast("config", "--url", "memory://").out
    assert holdfast("config").code == 0
    assert files(folder) == {"pyproject.toml"}


# --- the setting


@pytest.mark.parametrize("source", ["environment", "pyproject"])
def test_the_setting_names_the_app_where_there_are_several(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    for name in ("east", "west"):
        write(folder / f"{name}.py", APP.format(name=name))
    if source == "environment":
        monkeypatch.setenv("HOLDFAST_APP", "west:app")
    else:
        write(folder / "pyproject.toml", '[tool.holdfast]\napp = "west:app"\n')
    assert holdfast("config", "--json").json["app"]["name"] == "west"
    assert holdfast("submit", "add", "1").code == 0
    assert (folder / "west.db").exists()
    assert holdfast("config", "--app", "east:app", "--json").json["app"]["name"] == "east"
    assert holdfast("config", "--url", "sqlite:///x.db", "--json").json["app"]["url"] == f"sqlite:///{folder}/x.db"


def test_the_setting_comes_before_scanning(folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "east.py", APP.format(name="east"))
    write(folder / "loud.py", "raise SystemExit('must not be imported')  # holdfast App(\n")
    monkeypatch.setenv("HOLDFAST_APP", "east")
    answer = holdfast("config", "--json")
    assert (answer.json["app"]["name"], answer.err) == ("east", "")


def test_the_setting_of_a_project_counts_in_its_folders_too(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "pyproject.toml", '[tool.holdfast]\napp = "east:app"\n')
    write(folder / "east.py", APP.format(name="east"))
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    assert holdfast("config", "--json").json["app"]["name"] == "east"


def test_a_wrong_setting_says_where_it_stands(folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_APP", "nowhere:app")
    answer = holdfast("ps")
    assert answer.code == 1
    assert "there is no module 'nowhere'" in answer.err
    assert "environment HOLDFAST_APP" in answer.err


def test_help_tells_how_the_app_is_found_and_what_the_exit_codes_mean(holdfast: Command) -> None:
    told = holdfast("--help").out
    assert "HOLDFAST_APP" in told
    assert 'app = "shop:app"' in told
    for code in ("0", "1", "2", "3", "4", "130"):
        assert f"\n    {code:<4} " in told
    assert "timed out" in holdfast("submit", "--help").out


@pytest.mark.parametrize("command", ["config", "ps", "run"])
@pytest.mark.parametrize("with_app", [True, False])
def test_wrong_settings_are_the_only_error(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch, command: str, with_app: bool
) -> None:
    if with_app:
        write(folder / "east.py", APP.format(name="east"))
    monkeypatch.setenv("HOLDFAST_CONCURENCY", "3")
    answer = holdfast(command, "--json")
    assert (answer.code, answer.json["error"]["type"]) == (1, "UnknownSetting")
    assert answer.json["error"]["message"] == (
        "HOLDFAST_CONCURENCY, in the environment, is not a setting. Did you mean HOLDFAST_CONCURRENCY?"
    )


def test_a_value_out_of_range_counts_only_if_the_app_does_not_override_it(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_POLL_INTERVAL_SECONDS", "999")
    write(folder / "east.py", APP.format(name="east").replace("name=", "poll_interval_seconds=1, name="))
    assert holdfast("config").code == 0
    write(folder / "west.py", APP.format(name="west"))
    error = holdfast("config", "--app", "west", "--json").json["error"]
    assert error["type"] == "InvalidSetting"
    assert error["message"].startswith("poll_interval_seconds = ")


# --- several apps


@pytest.fixture
def two(folder: Path) -> Path:
    for name in ("east", "west"):
        write(folder / f"{name}.py", APP.format(name=name))
    return folder


def test_several_apps_are_a_question_that_says_how_to_answer(two: Path, holdfast: Command) -> None:
    for command in (["ps"], ["submit", "add", "1"], ["run"]):
        answer = holdfast(*command)
        assert answer.code == 1
        assert "this folder has 2 apps: east:app, west:app" in answer.err
        assert "--app east:app" in answer.err
        assert "holdfast run east:app" in answer.err


def test_a_whole_task_name_tells_which_of_several_apps(two: Path, holdfast: Command) -> None:
    assert holdfast("submit", "west:add", "1").code == 0
    assert (two / "west.db").exists()
    assert not (two / "east.db").exists()
    unknown = holdfast("submit", "west:ad", "1")
    assert unknown.code == 2
    assert "Did you mean 'west:add'?" in unknown.err


def test_a_task_is_found_in_the_app_that_declares_it_wherever_that_was_made(two: Path, holdfast: Command) -> None:
    write(two / "west.py", APP.format(name="west").replace("@app.task", "@app.task(name='mail:add')"))
    assert holdfast("submit", "mail:add", "1").code == 0
    assert (two / "west.db").exists()


def test_run_takes_the_app_as_an_option_too(two: Path, holdfast: Command) -> None:
    assert "there is no module 'nowhere'" in holdfast("run", "--app", "nowhere:app").err
    both = holdfast("run", "east:app", "--app", "west:app")
    assert both.code == 2
    assert "east:app" in both.err


# --- imports


def test_what_a_module_prints_when_imported_stays_out_of_the_answer(folder: Path, holdfast: Command) -> None:
    write(folder / "loud.py", APP.format(name="loud") + "print('hello from the module')\n")
    answer = holdfast("config", "--json")
    assert answer.json["app"]["name"] == "loud"
    assert answer.err == "hello from the module\n"


@pytest.mark.parametrize("given", [[], ["--app", "broken:app"]])
def test_an_error_of_ours_in_a_module_is_that_error(folder: Path, holdfast: Command, given: list[str]) -> None:
    write(folder / "broken.py", "from holdfast import App\napp = App(\n    'sqlite:///x.db', nam='x')\n")
    error = holdfast("ps", *given, "--json").json["error"]
    assert error["type"] == "UnknownSetting"
    assert error["message"].startswith("nam, given as a keyword, is not a setting.")
    assert f"the module 'broken', {folder / 'broken.py'}, line 2" in error["message"]


def test_a_file_with_a_syntax_error_is_a_note_beside_a_good_one(folder: Path, holdfast: Command) -> None:
    write(folder / "bad.py", "from holdfast import App\napp = App(\ndef f(:\n")
    write(folder / "good.py", APP.format(name="good"))
    answer = holdfast("config", "--json")
    assert answer.json["app"]["name"] == "good"
    assert answer.err.startswith("note: the module 'bad' cannot be imported: SyntaxError: ")
    assert answer.err.endswith("It was left out.\n")


def test_an_error_of_ours_beside_a_good_app_is_a_note_in_whole_sentences(folder: Path, holdfast: Command) -> None:
    write(folder / "bad.py", "from holdfast import App\napp = App('sqlite:///x.db', name='a b')\n")
    write(folder / "good.py", APP.format(name="good"))
    answer = holdfast("config", "--json")
    assert answer.json["app"]["name"] == "good"
    assert "line 2). It was left out.\n" in answer.err
