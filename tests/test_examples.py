"""The examples do what they say, and so does the quick start of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def run(program: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "demo.py"), tmp_path)
    assert "2001 success, 1 failed" in out


@pytest.mark.slow
def test_the_shop_runs_with_a_runner_in_another_process(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HOLDFAST_URL": f"sqlite:///{tmp_path}/shop.db"}
    runner = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", "examples.shop:app"], cwd=tmp_path, env=environment
    )
    try:
        shop = [sys.executable, "-m", "examples.shop"]
        done = subprocess.run(
            shop, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        runner.terminate()
        assert runner.wait(timeout=30) == 0
    assert "thank you, receipt-1" in done.stdout


def readme(language: str) -> str:
    """The first block of the README in that language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return next(block for mark, block in blocks if mark == language)


@pytest.mark.slow
def test_the_quick_start_of_the_readme_works_when_it_is_copied(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(readme("python"))
    run("shop.py", tmp_path)
    session = readme("").splitlines()
    commands = [line.removeprefix("$ ").partition("#")[0].split() for line in session if line.startswith("$ ")]
    assert [command[1] for command in commands] == ["run", "submit", "ps", "show", "history", "archive", "rerun"]

    def answer(command: list[str]) -> str:
        called = [sys.executable, "-m", *command]
        done = subprocess.run(
            called, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    runner = subprocess.Popen([sys.executable, "-m", *commands[0]], cwd=tmp_path, env=ENVIRONMENT)
    try:
        assert answer(commands[1]).splitlines() == [session[2]]
        id, task, status, *_ = answer(commands[2]).splitlines()[1].split()
        assert (task, status) == ("shop:add", "success")
        for command in commands[3:5]:
            assert "success" in answer([id if word == "ID" else word for word in command])
        for command in commands[5:]:
            assert id not in answer(command), "nothing has failed"
    finally:
        runner.terminate()
        assert runner.wait(timeout=60) == 0
