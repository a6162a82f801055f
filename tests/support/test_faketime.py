"""The tests of wrong clocks are not left out where they have to run."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tests.support import faketime


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_the_library_ci_fails_and_others_skip(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faketime, "library", lambda: None)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="apt-get install faketime"):
        faketime.clock_off_by(60)


def test_the_wall_clock_is_off_and_the_monotonic_ones_are_not() -> None:
    variables = faketime.clock_off_by(-3600)
    code = "import time; print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"
    before = (time.time() - 3600, time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
    run = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    for was, found in zip(before, map(float, run.stdout.split()), strict=True):
        assert 0 <= found - was < 60
