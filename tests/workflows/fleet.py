"""Runner processes for the tests of workflows, on a store of their own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.settings import SETTINGS
from tests.support.patience import patient
from tests.workflows import yard

from holdfast import App

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = patient(60.0)


class Fleet:
    """An app, and the runners that a test starts for it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.name = folder, url, f"yard-{secrets.token_hex(4)}"
        self.notes = folder / "notes"
        self.app = App(url, name=self.name, poll_interval_seconds=0.1)
        self._workflows = yard.declare(self.app)
        self.runners: list[subprocess.Popen[bytes]] = []

    def workflow(self, name: str) -> Any:
        return self._workflows[name]

    def start(self, *options: str, **more: str) -> subprocess.Popen[bytes]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {f"HOLDFAST_{name.upper()}": value for name, value in SETTINGS.items()}
        own = {"HOLDFAST_URL": self.url, "HOLDFAST_NAME": self.name, yard.NOTES: str(self.notes)}
        log = self.folder / f"runner{len(self.runners)}.log"
        with log.open("wb") as output:
            runner = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "run", "tests.workflows.yard:app", *options],
                env=plain | settings | own | more,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.runners.append(runner)
        return runner

    def lines(self, *beginning: str) -> list[str]:
        """Return what was noted, without the processes."""
        return [line.rpartition(" ")[0] for line in self._all() if line.startswith(beginning)]

    def processes(self, what: str) -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self._all() if line.rpartition(" ")[0] == what]

    def _all(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:g} s: {what}\n{self.told()}"
            time.sleep(0.05)

    def told(self) -> str:
        logs = [path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("runner*.log"))]
        return "\n---\n".join([*self._all(), *logs])

    def end(self) -> None:
        for runner in self.runners:
            if runner.poll() is None:
                os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()
        self.app.close()
