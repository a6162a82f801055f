"""Another process, with another hash seed, that replays runs for a test.

It is started once, when the first run of a workflow has ended, and waits for requests until this process ends. It
imports the modules of bodies as this process finds them. If a module has another file by now, a new process is started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import subprocess
import sys
import warnings
from typing import IO, Any, NamedTuple

from holdfast.executors.declared import Address, Unreachable, find
from holdfast.settings import Settings
from holdfast.workflows.replaying import ReplayReport, StoredRun

_PATIENCE_SECONDS = 60.0
_STALE = "stale"


class Request(NamedTuple):
    """A run to be replayed, and where its body is found."""

    address: Address
    stored: StoredRun
    code: str
    settings: Settings
    path: list[str]
    files: dict[str, tuple[str, float]]  # of the modules of the body, with the times of their last change

    @classmethod
    def of(cls, address: Address, stored: StoredRun, code: str, settings: Settings) -> Request:
        return cls(address, stored, code, settings, list(sys.path), _files_of(address))


def _files_of(address: Address) -> dict[str, tuple[str, float]]:
    found = {}
    for name in {address.module, address.declared_in}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            with contextlib.suppress(OSError):
                found[name] = (os.path.abspath(file), os.stat(file).st_mtime)
    return found


# --- on the side of the test

_process: subprocess.Popen[bytes] | None = None


def warm_up() -> None:
    """Start the other process, without waiting for it."""
    global _process
    if _process is None or _process.poll() is not None:
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        _process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.testing.other_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


def _end() -> None:
    global _process
    process, _process = _process, None
    if process is not None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()


atexit.register(_end)


def replayed_elsewhere(request: Request) -> ReplayReport | None:
    """Replay a run in the other process; None if its body cannot be found there."""
    try:
        data = pickle.dumps(request)
    except Exception:  # an app whose settings or records cannot be sent
        return None
    answer = _ask(data)
    if answer == _STALE:
        _end()
        answer = _ask(data)
    return answer if isinstance(answer, ReplayReport) else None


def _ask(data: bytes) -> Any:
    warm_up()
    assert _process is not None
    assert _process.stdin is not None
    assert _process.stdout is not None
    try:
        _send(_process.stdin, data)
        if not select.select([_process.stdout], [], [], _PATIENCE_SECONDS)[0]:
            raise EOFError(f"no answer within {_PATIENCE_SECONDS:g} s")
        return pickle.loads(_received(_process.stdout))
    except (OSError, EOFError) as error:
        _end()
        warnings.warn(f"a run was not replayed in another process: {error}", stacklevel=2)
        return None


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _received(pipe: IO[bytes]) -> bytes:
    size = pipe.read(8)
    if len(size) < 8:
        raise EOFError("the other process has ended")
    return pipe.read(int.from_bytes(size, "big"))


# --- on the other side


def main() -> None:
    """Answer requests until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what modules print is not for the pipe
    while True:
        try:
            request: Request = pickle.loads(_received(sys.stdin.buffer))
        except EOFError:
            return
        _send(answers, pickle.dumps(_answer(request)))


def _answer(request: Request) -> ReplayReport | str:
    known = [name for name in request.files if name in sys.modules]
    if any(_files_of(request.address).get(name) != request.files[name] for name in known):
        return _STALE
    sys.path[:] = request.path
    try:
        return _replayed(request)
    except Unreachable as error:
        return str(error)
    except BaseException as error:  # of an import, for instance
        return f"{type(error).__name__}: {error}"


def _replayed(request: Request) -> ReplayReport:
    from holdfast.app import App
    from holdfast.declaring import workflow_definition
    from holdfast.store.memory.store import MemoryStore
    from holdfast.testing.clock import FakeClock
    from holdfast.workflows.replaying import replayed

    found = find(request.address, None)
    definition = workflow_definition(found.function, {"name": request.address.task, "check": False})
    app = App("memory://", name=request.address.app)
    app.runtime.settings = request.settings
    app.runtime.codec = found.codec
    engine = app.runtime.make_engine(MemoryStore(FakeClock(request.stored.record.changed_at)))()
    return replayed(request.stored, definition, engine, code=request.code)


if __name__ == "__main__":
    main()
