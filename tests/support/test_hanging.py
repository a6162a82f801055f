"""A test that hangs is ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import patient

TESTS = """
import threading, pytest

def test_that_waits_for_ever():
    threading.Event().wait()

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_whose_teardown_hangs(stuck):
    pass

def test_that_ends():
    pass
"""


@pytest.mark.slow
def test_tests_that_hang_fail_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.hanging", "-p", "no:cacheprovider", tmp_path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HOLDFAST_TEST_SECONDS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert "1 failed, 2 passed, 1 error" in done.stdout, done.stdout
    assert done.stdout.count("it has not ended within 1 s") >= 2
    assert 'test_them.py", line 5 in test_that_waits_for_ever' in done.stdout + done.stderr


CRASHING = """
import os, pytest

@pytest.mark.parametrize("number", range(20))
def test_that_ends(number):
    pass

@pytest.mark.xdist_group("last")
@pytest.mark.parametrize("number", range(4))
def test_in_the_last_group(number):
    if number == 2:
        os._exit(3)
"""


@pytest.mark.slow
def test_where_a_process_dies_each_test_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(CRASHING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.hanging", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-n", "1", "--dist", "loadgroup", tmp_path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert "1 failed, 23 passed" in done.stdout, done.stdout
