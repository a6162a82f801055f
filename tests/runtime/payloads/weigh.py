"""A program of its own: submit one large value, or run it, and tell how much memory that took at most.

    python weigh.py runner    URL        says "ready", runs until its input ends, and tells
    python weigh.py submitter URL KIND BYTES

What counts is the resident memory above what was there once everything was imported and the app was open; the
submitter's value is made after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from holdfast import App

SECONDS = 300.0


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


class Scales:
    def __init__(self) -> None:
        self.baseline = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here

    def tell(self, **more: object) -> None:
        print(json.dumps({"above": status("VmHWM") - self.baseline, **more}), flush=True)


def digest(value: Any) -> str:
    """Without a copy of a large one."""
    found = hashlib.sha256()
    for start in range(0, len(value), 2**20):
        part = value[start : start + 2**20]
        found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()


def made(kind: str, size: int) -> Any:
    if kind == "bytes":
        return os.urandom(size)
    if kind == "text":
        return os.urandom(size // 2).hex()
    return [f"{number:04}" * 250 for number in range(size // 1000)]


def main() -> None:
    role, url, *more = sys.argv[1:]
    app = App(url, poll_interval_seconds=0.2)

    @app.task(name="turn")
    def turn(value: Any) -> Any:
        return value[::-1]

    app.invocations()
    if role == "runner":
        with app.runner(concurrency=1):
            scales = Scales()
            print("ready", flush=True)
            sys.stdin.read()
            scales.tell()
    else:
        kind, size = more[0], int(more[1])
        scales = Scales()
        value = made(kind, size)
        result = turn.submit(value).result(SECONDS)
        scales.tell(size=len(value))
        assert digest(result[::-1]) == digest(value)
    app.close()


main()
