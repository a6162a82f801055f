"""The app that is meant is found, and nothing is run that does not look like one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.cli.discovery import candidates, discover, find_app
from holdfast.errors import AppNotFound

if TYPE_CHECKING:
    from conftest import Command

APP = 'from holdfast import App\napp = App("memory://", name="{name}")\n'


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_only_app_is_found(folder: Path) -> None:
    write(folder / "single.py", APP.format(name="one"))
    write(folder / "other.py", "raise RuntimeError('must not be imported')\n")
    found = discover(folder)
    assert list(found.apps) == ["single:app"]
    assert found.apps["single:app"].name == "one"
    assert not found.broken


def test_an_app_in_a_package_is_found_once_however_many_modules_name_it(folder: Path) -> None:
    write(folder / "market" / "__init__.py", "from market.core import app  # holdfast's App()\n")
    write(folder / "market" / "core.py", APP.format(name="market"))
    write(folder / "market" / "inner" / "__init__.py", "")
    write(folder / "market" / "inner" / "again.py", "from market.core import app as same  # holdfast App(\n")
    assert list(discover(folder).apps) == ["market:app"]


def test_tests_environments_and_programs_are_not_imported(folder: Path) -> None:
    for name in ("setup.py", "conftest.py", "test_it.py", "it_test.py", "not-a-module.py"):
        write(folder / name, APP.format(name="x"))
    for place in ("tests", ".venv", "venv", "no_package"):
        write(folder / place / "made.py", APP.format(name="x"))
        if place != "no_package":
            write(folder / place / "__init__.py", "")
    write(folder / "pack" / "__init__.py", "")
    write(folder / "pack" / "__main__.py", APP.format(name="x"))
    assert list(candidates(folder)) == []


def test_two_apps_are_a_question_that_names_both(folder: Path, holdfast: Command) -> None:
    write(folder / "east.py", APP.format(name="east"))
    write(folder / "west.py", APP.format(name="west"))
    answer = holdfast("ps", "--json")
    assert answer.code == 1
    assert answer.json["error"]["type"] == "AppNotFound"
    assert "east:app" in answer.json["error"]["message"]
    assert "west:app" in answer.json["error"]["message"]
    assert answer.err == ""
    assert holdfast("config", "--app", "west").code == 0


def test_no_app_says_how_to_name_one(folder: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "anything")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: no app was found in {folder}")
    assert "module:attribute" in answer.err


def test_a_broken_module_is_named_with_its_error_and_line(folder: Path, holdfast: Command) -> None:
    write(folder / "broken.py", "from holdfast import App\napp = App(\n    'memory://')\nraise KeyError('x')\n")
    answer = holdfast("ps")
    assert answer.code == 1
    assert "the module 'broken' cannot be imported: KeyError: 'x'" in answer.err
    assert "broken.py, line 4" in answer.err
    assert "Traceback" not in answer.err
    assert not (folder / "holdfast.db").exists(), "another store than the broken app's was asked"


def test_a_broken_module_beside_a_good_one_is_only_a_note(folder: Path, holdfast: Command) -> None:
    write(folder / "bad.py", "from holdfast import App  # App(\nimport not_there\n")
    write(folder / "good.py", APP.format(name="good"))
    answer = holdfast("config", "--json")
    assert answer.json["app"]["name"] == "good"
    assert "note: the module 'bad' cannot be imported: ModuleNotFoundError: No module named 'not_there'" in answer.err


def test_an_import_error_keeps_its_cause(folder: Path) -> None:
    write(folder / "exits.py", "raise SystemExit(3)\n")
    with pytest.raises(AppNotFound, match="'exits' cannot be imported: SystemExit: 3") as caught:
        find_app("exits:app")
    assert isinstance(caught.value.__cause__, SystemExit)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("nowhere.deeper:app", "there is no module 'nowhere.deeper'"),
        ("plain:ap", "has no 'ap'. Did you mean plain:app?"),
        ("plain:number", "plain:number is no App but of type 'int'"),
        ("plain:", "names no app"),
        (":app", "names no app"),
        ("plain.py", "named by its module: plain:app"),
        ("several", "several:a, several:b"),
        ("empty", "the module 'empty' has no App in it"),
    ],
)
def test_a_wrong_reference_says_what_is_wrong(folder: Path, reference: str, message: str) -> None:
    write(folder / "plain.py", APP.format(name="plain") + "number = 3\n")
    write(folder / "several.py", "from holdfast import App\na, b = App('memory://'), App('memory://')\n")
    write(folder / "empty.py", "")
    with pytest.raises(AppNotFound) as caught:
        find_app(reference)
    assert message in str(caught.value)


def test_app_and_url_together_are_refused(shop: Path, holdfast: Command) -> None:
    assert holdfast("ps", "--app", "shop:app", "--url", "memory://").code == 2
