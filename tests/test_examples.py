"""The examples and the README's code do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(program: str, folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "demo.py"), tmp_path)
    assert "2001 success, 1 failed" in out


@pytest.mark.slow
def test_the_shop_runs_with_a_runner_in_another_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOLDFAST_URL": f"sqlite:///{tmp_path}/shop.db"}
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


def test_the_first_example_of_the_readme_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "shop.py").write_text(code.group(1))
    run("shop.py", tmp_path)
    assert (tmp_path / "shop.db").exists()


def test_links_in_the_papers_lead_somewhere() -> None:
    for paper in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", paper.read_text()):
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"
