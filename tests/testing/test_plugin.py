"""The fixtures, as a user's project gets them: by the entry point of an installed Holdfast."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.patience import patient

ROOT = Path(__file__).parent.parent.parent

SHOP = """
from holdfast import App
from holdfast.retries import Fixed

app = App("sqlite:///shop.db")

@app.task(retries=Fixed(2, 60))
def mail(to: str) -> str:
    if failing:
        raise ConnectionError(failing.pop())
    return f"sent to {to}"

failing = []

@app.task
async def welcome(name: str) -> None:
    await mail.options(delay="1h").asubmit(f"{name}@example.org")
"""

TESTS = """
import asyncio
from pathlib import Path
import pytest
import shop

def test_mail_is_sent_an_hour_later(holdfast_testing):
    shop.welcome.submit("ann")
    assert len(holdfast_testing.drain(check=True)) == 1
    holdfast_testing.assert_submitted(shop.mail, "ann@example.org")
    assert len(holdfast_testing.drain()) == 0
    shop.failing.append("no net")
    report = holdfast_testing.advance("2h", check=True)
    assert (len(report.retried), len(report.succeeded)) == (1, 1)

def test_each_test_begins_anew(holdfast_testing, holdfast_app):
    assert holdfast_app is shop.app
    assert holdfast_testing.submitted() == []
    async def main():
        await shop.welcome.asubmit("bob")
        await holdfast_testing.adrain(until="1h", check=True)
    asyncio.run(main())
    holdfast_testing.assert_submitted(shop.mail, "bob@example.org")
    assert not Path("shop.db").exists()

@pytest.mark.xfail(strict=True, raises=AssertionError)
def test_that_fails(holdfast_testing):
    holdfast_testing.assert_submitted(shop.mail)
"""

OWN = """
import pytest
from holdfast import App

@pytest.fixture
def holdfast_app():
    return App("memory://", name="mine")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder, and beside it what an installer writes down about Holdfast."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = tmp_path / "site" / "holdfast_testing-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: holdfast-testing\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in declared.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def run_pytest(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(project.parent / "site"), str(project)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *options]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=patient(120), check=False
    )


@pytest.mark.slow
def test_a_project_tests_its_tasks_with_the_fixtures(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\nholdfast_app = shop:app\n")
    (project / "shop.py").write_text(SHOP)
    (project / "test_shop.py").write_text(TESTS)
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 1 xfailed" in done.stdout


@pytest.mark.slow
def test_a_project_may_give_its_own_app_or_a_wrong_name(project: Path) -> None:
    (project / "test_default.py").write_text("def test_new(holdfast_testing): assert not holdfast_testing.app.tasks\n")
    (project / "own").mkdir()
    (project / "own" / "conftest.py").write_text(OWN)
    (project / "own" / "test_own.py").write_text(
        "def test(holdfast_testing, holdfast_app): assert holdfast_app.name == 'mine'\n"
    )
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout + done.stderr
    (project / "pytest.ini").write_text("[pytest]\nholdfast_app = os:path\n")
    done = run_pytest(project, "test_default.py")
    assert done.returncode == 1
    assert "the setting holdfast_app of pytest is 'os:path'" in done.stdout


WORKFLOW = """
from holdfast import App

app = App("sqlite:///shop.db")

@app.step
async def charge(order: str) -> None: ...

@app.workflow
async def checkout() -> None:
    for order in {f"order {number}" for number in range(20)}:
        await charge(order)
"""


@pytest.mark.slow
def test_a_loop_over_a_set_fails_a_test_with_the_fixture_unless_the_project_says_no(project: Path) -> None:
    settings = "[pytest]\nholdfast_app = shop:app\n"
    (project / "pytest.ini").write_text(settings)
    (project / "shop.py").write_text(WORKFLOW)
    (project / "test_shop.py").write_text(
        "import shop\ndef test(holdfast_testing): shop.checkout.submit(); holdfast_testing.drain(check=True)\n"
    )
    done = run_pytest(project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ReplayMismatch: shop:checkout" in done.stdout
    assert "shop.py:12" in done.stdout
    (project / "pytest.ini").write_text(f"{settings}holdfast_other_process = false\n")
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_is_not_needed_without_it() -> None:
    code = "import sys; sys.modules['pytest'] = None; import holdfast.testing; holdfast.testing.testing_app"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True, timeout=patient(60))
