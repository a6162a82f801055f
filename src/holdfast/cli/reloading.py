"""Restart a command when the code of its folder changes.

Restarting is executing the same command again in the same process. Files are compared twice a second. While a changed
file is no Python, the old code runs on. Code that cannot be imported is waited for.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn, Self

LOOK_SECONDS = 0.5
_SKIPPED = frozenset({".venv", "venv", "site-packages", "node_modules", ".git", "__pycache__"})
Seen = dict[Path, tuple[int, int]]


class RestartWatch(abc.ABC):
    """Looks in a thread for a reason to restart; `why` is what it has found."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self.why = ""

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="holdfast-restart", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    @abc.abstractmethod
    def _watch(self) -> None: ...


class Reload(RestartWatch):
    """Calls `stop` when a source file has changed, and is Python. `before` are the files as they were before the code
    was imported.
    """

    def __init__(self, stop: Callable[[], object], note: Callable[[str], object], before: Seen) -> None:
        super().__init__()
        self._stop = stop
        self._note = note
        self._seen = {path: before.get(path, seen) for path, seen in _sources().items()}

    def _watch(self) -> None:
        broken: set[Path] = set()
        while not self._end.wait(LOOK_SECONDS):
            now = _sources()
            changed = {path for path, seen in now.items() if self._seen.get(path, seen) != seen}
            self._seen = now
            wrong = {path: why for path in changed | broken if (why := _wrong_with(path, path in broken))}
            for path in wrong.keys() & changed:
                self._note(f"{path} has changed, but {wrong[path]}; the old code runs until it is right")
            ready = (changed | broken) - wrong.keys()
            broken = set(wrong)
            if ready and not broken:
                self.why = f"{min(ready)} has changed"
                self._stop()
                return


def restart_process() -> NoReturn:
    """Execute the same command again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "holdfast", *sys.argv[1:]])


def restart_after_a_change(before: Seen) -> NoReturn:
    """Restart after any file changes: it is unknown which files code would load that cannot be imported."""
    while files_now() == before:
        time.sleep(LOOK_SECONDS)
    restart_process()


def stop_with_parent(line: int) -> None:
    """Have this process get SIGTERM when the other end of a socket is closed: its parent has ended, or wants that.

    A signal could come while this process restarts, and be lost. The socket stays open.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(line, 100):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="holdfast-parent", daemon=True).start()


def _wrong_with(path: Path, again: bool) -> str:
    """Return why the file cannot be imported, as far as that is known without running it. A file that is missing
    `again` was deleted.
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
    """Return the loaded source files of this folder, with time and size of their last writing."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(file) for file in files if file is not None and file.endswith(".py")]
    return _facts(path for path in paths if Path.cwd() in path.parents and not _SKIPPED & set(path.parts))


def files_now() -> Seen:
    """Return all source files of this folder, loaded or not."""

    def found() -> Iterator[Path]:
        for folder, folders, names in os.walk(Path.cwd()):
            folders[:] = [name for name in folders if name not in _SKIPPED]
            yield from (Path(folder) / name for name in names if name.endswith(".py"))

    return _facts(found()) or {Path.cwd(): (0, 0)}


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
