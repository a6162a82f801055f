"""A clock that a test can set while others read it."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.clock import SystemClock


class HostClock(SystemClock):
    """The clock of a host whose time is off by as many seconds as a file says."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def now(self) -> float:
        return super().now() + float(self._path.read_text())


def set_clock(path: Path, seconds: float) -> Path:
    """Let the clock that reads this file be off by so much."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(seconds))
    os.replace(fresh, path)
    return path
