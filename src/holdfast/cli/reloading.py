"""``--reload``: while one develops, a change of a source file starts the runner anew.

The modules that are loaded from this folder are looked at twice a second. When one has changed, the runner stops as it
would on a signal, so nothing is lost, and the same command is executed again in the same process. A file that is no
Python yet, because somebody is in the middle of a line, is waited for: the old code runs meanwhile. Code that cannot be
imported is waited for, too, but with nothing that runs: only an import tells.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from holdfast.embedded import EmbeddedRunner

_LOOK_SECONDS = 0.5
_SKIPPED = frozenset({".venv", "venv", "site-packages", "node_modules", ".git", "__pycache__"})
Seen = dict[Path, tuple[int, int]]


class Reload:
    """`changed` is the file that made it start anew."""

    def __init__(self, runner: EmbeddedRunner, note: Callable[[str], None]) -> None:
        self._runner = runner
        self._note = note
        self._end = threading.Event()
        self._seen = _sources()
        self.changed: Path | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="holdfast-reload", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()

    def _watch(self) -> None:
        broken: set[Path] = set()
        while not self._end.wait(_LOOK_SECONDS):
            now = _sources()
            changed = {path for path, seen in now.items() if self._seen.get(path, seen) != seen}
            self._seen = now
            wrong = {path: why for path in changed | broken if (why := _wrong_with(path, path in broken))}
            for path in wrong.keys() & changed:
                self._note(f"{path} has changed, but {wrong[path]}; the old code runs until it is right")
            ready = (changed | broken) - wrong.keys()
            broken = set(wrong)
            if ready and not broken:
                self.changed = min(ready)
                self._runner.request_stop()
                return


def start_anew() -> NoReturn:
    """Execute the same command again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "holdfast", *sys.argv[1:]])


def start_anew_after_a_change() -> NoReturn:
    """For code that cannot be imported: nobody can tell which files it would have loaded, so any of them counts."""
    seen = _facts(_files())
    while _facts(_files()) == seen:
        time.sleep(_LOOK_SECONDS)
    start_anew()


def _wrong_with(path: Path, again: bool) -> str:
    """Why the file cannot be imported as it is, if that can be told without running it. One that stays away was
    deleted.
    """
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        if again and isinstance(error, FileNotFoundError):
            return ""
        return f"it cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"it is no Python: {error}"
    return ""


def _sources() -> Seen:
    """The source files of this folder that are loaded, with time and size of their last writing."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(file) for file in files if file is not None and file.endswith(".py")]
    return _facts(path for path in paths if Path.cwd() in path.parents and not _SKIPPED & set(path.parts))


def _files() -> Iterator[Path]:
    for folder, folders, names in os.walk(Path.cwd()):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def _facts(paths: Iterable[Path]) -> Seen:
    found: Seen = {}
    for path in paths:
        try:
            facts = path.stat()
        except OSError:  # an editor that writes a new file in its place has not done so yet
            found[path] = (0, 0)
        else:
            found[path] = (facts.st_mtime_ns, facts.st_size)
    return found
