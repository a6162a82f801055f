"""The witness: what the parties of a load did and saw, written outside the system.

One file of JSON lines for each process, opened for appending and written line by line, so that a line is there whole
or not at all, whatever happens to the process afterwards. Calls are known by their number, which is their first
argument.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

SUBMITS = "submits"  # numbers, before they are sent
ACCEPTED = "accepted"  # numbers and ids, after `submit` has returned
UNKNOWN = "unknown"  # numbers: `submit` raised, so they may be there or not
BEGAN = "began"  # number: user code was called
SEEN = "seen"  # number, id, and the result or the error that a client was given
GONE = "gone"  # number, id: a client was told that there is no such invocation
READY = "ready"  # id: a runner is on the roster
QUIET = "quiet"  # a submitter has submitted nothing for a while, and knows the ends of all it has submitted


class Ledger:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, **facts: Any) -> None:
        line = {"what": what, "pid": os.getpid(), "at": time.monotonic(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """Reads ledgers while they grow."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._read = dict.fromkeys(paths, 0)
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """All whole lines so far in the order of their times: the clock is the same for all processes."""
        for path, position in self._read.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(position)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[path] += len(whole) + 1
                self._events += map(json.loads, whole.split(b"\n"))
        self._events.sort(key=lambda event: float(event["at"]))
        return self._events


def fails(number: int) -> bool:
    """Whether the call of that number has to raise."""
    return number % 10 == 9


def answer(number: int) -> str:
    """What the call of that number has to return; if it has to raise, the message."""
    word = "refused" if fails(number) else "done"
    return f"{word} {number} {hashlib.sha256(str(number).encode()).hexdigest()[:12]}"
