"""Processes whose clock is wrong, by libfaketime (Debian's package `faketime`).

The monotonic clocks stay as they are, as they do where somebody sets the clock of a host.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_NAME = "libfaketime.so.1"
_MISSING = f"{_NAME} is not installed: apt-get install faketime"


def library() -> Path | None:
    """Return where the library is, if it is installed."""
    folders = [*Path("/usr/lib").glob("*/faketime"), Path("/usr/lib/faketime"), Path("/usr/local/lib/faketime")]
    return next((folder / _NAME for folder in folders if (folder / _NAME).exists()), None)


def clock_off_by(seconds: float) -> dict[str, str]:
    """Return the variables of a process whose clock is off by so much. Skip the test where the library is missing;
    in CI, fail: there it is a part of the machine.
    """
    found = library()
    if found is None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(_MISSING)
        pytest.skip(_MISSING)
    return {"LD_PRELOAD": str(found), "FAKETIME": f"{seconds:+g}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
