"""Waits for a moment in which the machine does little else, and remembers how busy others were if there was none."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_SECONDS = 0.3
_QUIET_CORES = 0.25


class Quiet:
    """A patience of so many seconds for a whole bench: a machine that is never quiet is measured all the same.

    Without any patience it does not even look.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._looks = patience_seconds > 0
        self._patience = patience_seconds
        self.foreign_cores: list[float] = []  # used by others, just before each run

    def wait(self) -> None:
        """Return in a quiet moment, or when patience is at its end. Does nothing where /proc/stat is not there."""
        if not self._looks or not _STAT.exists():
            return
        foreign = _foreign_cores()
        while foreign > _QUIET_CORES and self._patience > 0:
            self._patience -= _LOOK_SECONDS
            foreign = _foreign_cores()
        self.foreign_cores.append(foreign)


def _foreign_cores() -> float:
    """How many cores are busy while this process sleeps."""
    before, began = _busy_seconds(), time.perf_counter()
    time.sleep(_LOOK_SECONDS)
    return (_busy_seconds() - before) / (time.perf_counter() - began)


def _busy_seconds() -> float:
    user, nice, system, _idle, _waiting, *others = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
