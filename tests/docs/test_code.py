"""The code on the pages runs.

The first line of a block says how:

    ```python            runs. The blocks of a page follow one another, as one program named shop.py
    ```python mongodb    runs too, as a program of its own, against a MongoDB in the place of `LOCAL`
    ```python fragment   only has to be Python: it needs what a page cannot have
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import PAGES, ROOT, blocks_of, name_of
from tests.support.patience import patient

from holdfast.settings import PREFIX

LOCAL = "mongodb://localhost/shop?replicaSet=rs0"


def program(page: Path, mark: str) -> str:
    """The blocks of a page with that mark, each at its own line, so that a traceback leads to the page."""
    lines: list[str] = []
    for block in blocks_of(page):
        if block.mark == mark:
            lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run(code: str, folder: Path) -> None:
    (folder / "shop.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-W", "error", "shop.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pages_with(mark: str) -> list[Path]:
    """Return the pages with such blocks. The README needs a runner: tests/test_examples.py runs it."""
    return [page for page in PAGES[1:] if any(block.mark == mark for block in blocks_of(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(""), ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(program(page, ""), tmp_path)


@pytest.mark.slow
def test_the_first_steps_run_again_and_can_be_imported(tmp_path: Path) -> None:
    """A reader runs the file more than once, and commands import it."""
    code = program(ROOT / "docs/learn/first-steps.md", "")
    run(code, tmp_path)
    run(code, tmp_path)
    stored = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("shop.db*"))]
    done = subprocess.run([sys.executable, "-c", "import shop"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("shop.db*"))] == stored


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
@pytest.mark.parametrize("page", pages_with("mongodb"), ids=name_of)
def test_the_code_of_a_page_runs_on_mongodb(page: Path, tmp_path: Path, mongo_url: str) -> None:
    code = program(page, "mongodb")
    assert LOCAL in code
    run(code.replace(LOCAL, mongo_url), tmp_path)


def test_most_code_runs_and_the_rest_is_python() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    for block in blocks:
        assert block.mark in ("", "mongodb", "fragment"), f"{block.page.name}:{block.line}"
        compile(block.code, f"{block.page.name}:{block.line}", "exec")
    fragments = [block for block in blocks if block.mark == "fragment"]
    assert len(fragments) < len(blocks) / 4


def test_configuration_on_the_pages_can_be_parsed() -> None:
    parsers: dict[str, Callable[[str], object]] = {
        "toml": tomllib.loads,
        "ini": configparser.ConfigParser(interpolation=None, strict=False).read_string,
        "json": json.loads,
    }
    found = 0
    for page in PAGES:
        for kind, text in re.findall(r"^```(toml|ini|json)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            parsers[kind](text)
            found += 1
    assert found >= 4
