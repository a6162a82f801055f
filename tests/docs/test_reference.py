"""The reference is current, and what pages name exists."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.docs import reference
from tests.docs.pages import DOCS, PAGES, ROOT, listed, name_of, names, rows

import holdfast
from holdfast import crashpoints, errors
from holdfast.cli import program as cli
from holdfast.declaring import CallOptions, TaskOptions
from holdfast.metrics.rules import METRICS
from holdfast.model.eligibility import Reason
from holdfast.model.status import Status
from holdfast.settings import PREFIX, SPECS
from holdfast.store.contract import Ability, Store
from holdfast.telemetry.logs import NAMES


@pytest.mark.parametrize("page", reference.MADE)
def test_a_page_that_is_made_from_the_code_is_current(page: str) -> None:
    there = (DOCS / "reference" / page).read_text()
    assert there == reference.MADE[page](), "make it anew: make docs"


def test_the_page_on_logging_has_every_logger() -> None:
    head, mark, _ = (DOCS / "reference" / "logging.md").read_text().partition(reference.LOGGING_MARK)
    assert mark
    assert all(f"`holdfast.{name}`" in head for name in NAMES), "each has its line"


def test_the_figures_of_the_readme_are_those_of_the_page_on_performance() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## Figures\n")
    table = rest.partition("\n## ")[0].partition("|---|---|---|\n")[2].splitlines()
    figures = [figure for row in table if row.startswith("|") for figure in re.findall(r"\| ([\d.,]+) ", row)]
    measured = re.findall(r"[\d.,]+", (DOCS / "operations" / "performance.md").read_text())
    assert len(figures) == 6
    assert set(figures) <= set(measured)


def test_the_page_on_dashboards_has_every_metric() -> None:
    wanted = [
        [f"`{each.name}`", each.kind, ", ".join(f"`{name}`" for name in each.labels), each.says] for each in METRICS
    ]
    assert rows("operations/dashboards.md", "## Every metric") == wanted


def test_the_page_on_dashboards_has_every_alert() -> None:
    rules = (ROOT / "integrations" / "monitoring" / "holdfast.rules.yml").read_text()
    named = [row[0].strip("`") for row in rows("operations/dashboards.md", "## Prometheus")]
    assert named == re.findall(r"- alert: (\w+)", rules)


def test_the_readme_names_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"dev"}
    assert set(re.findall(r"holdfast\[(\w+)\]", (ROOT / "README.md").read_text())) == extras


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(cli._make())


@functools.cache
def words_of_the_code() -> set[str]:
    return set(re.findall(r"\w+", "".join(path.read_text() for path in ROOT.glob("src/**/*.py"))))


# Pages that also name options of other systems.
OF_OTHERS = (
    "coming-from-dramatiq.md",
    *("coming-from-celery.md", "coming-from-huey.md", "coming-from-pynenc.md", "coming-from-temporal.md"),
    *("coming-from-workflow-worlds-mongodb.md", "workflow-devkit.md", "django.md", "docker.md"),
)


@pytest.mark.parametrize("paper", PAGES, ids=name_of)
def test_what_a_paper_names_exists(paper: Path) -> None:
    """Settings, options, fields: what is written as code and looks like a name is a name in the code."""
    text = paper.read_text()
    for variable in set(re.findall(r"\bHOLDFAST_[A-Z_]+\b", text)) - {crashpoints.VARIABLE}:
        assert variable.removeprefix(PREFIX).lower() in SPECS, variable
    code = words_of_the_code()
    named = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text) if "__" not in name}
    assert paper.name in OF_OTHERS or named <= code


@pytest.mark.parametrize("paper", PAGES, ids=name_of)
def test_commands_that_a_paper_names_exist(paper: Path) -> None:
    """With all their options, also behind arguments in quotes."""
    shown = r"^(?:\$ )?holdfast (.+)$|`holdfast ([^`]+)`|^ExecStart\w*=\S*/holdfast (.+)$"
    for found in re.finditer(shown, paper.read_text(), re.MULTILINE):
        line = "".join(filter(None, found.groups())).replace("\\|", "|")
        words, command = shlex.split(line, comments=True), command_line()
        if paper.name == "commands.md" or words[0].startswith("-"):
            continue  # made from the commands themselves
        assert words[0] in command.commands, line
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert used <= known | {"--help"}, line


# --- pages that are written by hand have an entry for everything


def test_the_page_on_errors_has_every_error() -> None:
    wanted = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert {names(row[0])[0] for row in rows("reference/errors.md", "## The tree")} == wanted


def test_the_page_on_settings_has_every_setting_once() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(SPECS)


def test_the_page_on_statuses_has_every_status() -> None:
    assert listed("reference/statuses.md", "## What an operator does") == {str(status) for status in Status}


def test_the_page_on_options_has_every_option() -> None:
    page = "reference/task-options.md"
    older = {name.partition("=")[0] for row in rows(page, "## Older names") for name in names(row[0])}
    options = listed(page, "## Options of a task")
    assert options | (older - {"False"}) == set(TaskOptions.__annotations__)
    assert not options & older
    assert listed(page, "## Options of a call") == set(CallOptions.__annotations__)


def test_the_page_on_stores_has_every_method_of_the_contract() -> None:
    text = (DOCS / "reference" / "writing-a-store.md").read_text()
    wanted = {name for name, each in vars(Store).items() if callable(each) and not name.startswith("_")}
    table = text.partition("| group | methods |")[2].partition("\n\n")[0]
    assert set(names("".join(line.split("|")[2] for line in table.splitlines()[2:]))) == wanted


def test_the_page_on_stores_has_every_ability() -> None:
    wanted = {ability.name for ability in Ability if ability.name}
    assert {name for name in listed("reference/writing-a-store.md", "## Proving it") if name.isupper()} == wanted


def test_the_page_on_why_has_every_reason() -> None:
    assert listed("operations/why.md", "## Reasons") == {str(reason) for reason in Reason}


def test_the_page_on_names_has_every_public_name() -> None:
    page = "reference/python.md"
    assert listed(page, "## holdfast") == set(holdfast.__all__)
    for module, members in rows(page, "## Other modules"):
        (name,) = names(module)
        if name != "holdfast.errors":  # has a page of its own
            assert set(names(members)) == set(importlib.import_module(name).__all__), name
    app = {name.partition("(")[0] for row in rows(page, "## App") for name in names(row[0])}
    public = {name for name in dir(holdfast.App("memory://")) if not name.startswith(("_", "a")) or name == "archive"}
    assert app == public - {"runtime"}
    handles = {name.partition("(")[0] for row in rows(page, "## Handles") for name in names(row[0])}
    public = {name for name in dir(holdfast.Invocation) if not name.startswith(("_", "a"))}
    assert handles == public - {"is_fresh"}
