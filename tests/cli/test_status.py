"""status render: the diagram, and whether files of it are fresh."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.model.diagram import render

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
