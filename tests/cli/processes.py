"""`holdfast …` as processes of their own, for tests that need real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import patience
from tests.support.patience import patient

PATIENCE_SECONDS = patient(60.0)  # only a failure takes that long, or a machine with much else to do


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


def eventually(holds: Callable[[], object], what: str | Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until it holds, or fail. Processes need longer than threads."""
    patience.eventually(holds, what, seconds)


def hear_interrupts() -> None:
    """A background job inherits that interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Process:
    """One command. What it writes is gathered as it comes. It leads a process group, as a shell would have it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
            process_group=0,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in ((self.out, self._process.stdout), (self.err, self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def said(self, text: str) -> list[str]:
        return [line for line in self.out + self.err if text in line]

    def says(self, text: str) -> str:
        """Wait until it has said so, on either stream; the line."""
        eventually(lambda: self.said(text) or self.is_over, lambda: f"{text!r} in {self.out} {self.err}")
        eventually(lambda: self.said(text), lambda: f"{text!r} in {self.out} {self.err}", seconds=patient(5))
        return self.said(text)[0]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def interrupt_all(self) -> None:
        """As Ctrl-C at a terminal does it."""
        os.killpg(self.pid, signal.SIGINT)

    def ends(self) -> Answer:
        code = self._process.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
            assert not reader.is_alive(), "somebody that it has started still holds its output"
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        return Answer(code, "".join(self.out), "".join(self.err))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.ends()


def is_gone(pid: int) -> bool:
    """Whether the process is over; one that nobody has waited for yet is."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not state.strip() or state.startswith("Z")


def children(pid: int) -> list[int]:
    """The processes that it has started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(child) for child, parent in map(str.split, listed.splitlines()) if int(parent) == pid]
