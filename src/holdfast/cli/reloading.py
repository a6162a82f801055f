"""``--reload``: while one develops, a change of a source file starts the runner anew.

The modules that are loaded from this folder are looked at twice a second. When one has changed, the runner stops as it
would on a signal, so nothing is lost, and the same command is executed again in the same process.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.embedded import EmbeddedRunner

_LOOK_SECONDS = 0.5


class Reload:
    def __init__(self, runner: EmbeddedRunner) -> None:
        self._runner = runner
        self._end = threading.Event()
        self._seen = _times()
        self.changed: Path | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="holdfast-reload", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            now = _times()
            changed = [path for path, time in now.items() if self._seen.get(path, time) != time]
            changed += [path for path in self._seen if path not in now]
            self._seen = now
            if changed:
                self.changed = changed[0]
                self._runner.request_stop()
                return

    def start_anew(self) -> None:
        """Execute the same command again. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "holdfast", *sys.argv[1:]])


def _times() -> dict[Path, float]:
    """The source files of this folder that are loaded, and when each was last written."""
    here = Path.cwd()
    found: dict[Path, float] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py"):
            continue
        path = Path(file)
        if here in path.parents and ".venv" not in path.parts and "site-packages" not in path.parts:
            try:
                found[path] = path.stat().st_mtime
            except OSError:
                continue
    return found
