"""An exception that is thrown into the thread of a call, at whatever line, hits that call or nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.patience import patient


@pytest.mark.parametrize("what", ["force", pytest.param("raise_soft_timeout", marks=pytest.mark.faults)])
def test_what_is_thrown_at_any_line_hits_no_other_call(what: str) -> None:
    program = [sys.executable, "-m", "tests.executors.every_line", what]
    told = subprocess.run(program, capture_output=True, text=True, timeout=patient(120), check=False)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.split()
    assert len(lines) > 20
    assert {line.partition(":")[0] for line in lines} >= {"run", "_work", "_throw"}
