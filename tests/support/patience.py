"""How long a test waits before it fails. A failure takes that long; a success does not.

`HOLDFAST_TEST_PATIENCE=4` multiplies every such time: on a machine that is four times slower than usual, `.ci/run` sets
it. What a test promises to a user in seconds is not multiplied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FACTOR = float(os.environ.get("HOLDFAST_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """Return the seconds to wait on this machine."""
    return seconds * FACTOR


def eventually(holds: Callable[[], T], what: str | Callable[[], str] = "", seconds: float = patient(30.0)) -> T:
    """Wait until it holds in another thread or process, and return the answer. Fails with `what` after that time."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.01)
    return found
