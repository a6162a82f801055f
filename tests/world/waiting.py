"""Wait for something that happens soon, in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.patience import patient


def until(asked: Callable[[], object], seconds: float = 30.0) -> None:
    """Return as soon as the answer is true."""
    deadline = time.monotonic() + patient(seconds)
    while not asked():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
