"""Programs as tasks: the commands of an allow-list, started without a shell.

A program leads a process group, which is ended with it: when it is done, when its task is cancelled, fails or is past
its time. On Linux the kernel kills it when its worker dies, since the next attempt would else run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.around.rules import CommandTemplate, templates_of
from holdfast.errors import Fatal, UsageError

KEEP_BYTES = 64 * 1024
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
_REST_SECONDS = 1.0  # for what is in the pipes when the program has ended
_CHUNK_BYTES = 64 * 1024
_MAX_KEPT_BYTES = 16 * 2**20

# It asks the kernel for SIGKILL at the death of its parent, and becomes the program.
_BOOT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[3:])
"""


class CommandResult(msgspec.Struct, frozen=True):
    """How a command has ended: its exit status, which is 0, and the end of what it has printed."""

    status: int
    output: str
    errors: str


class CommandFailed(Exception):
    """A command has ended with another exit status than 0; below 0 it was a signal."""

    def __init__(self, message: str, status: int = 1, output: str = "", errors: str = "") -> None:
        super().__init__(message, status, output, errors)
        self.status, self.output, self.errors = status, output, errors

    def __str__(self) -> str:
        return str(self.args[0])


class Programs:
    """Run the commands of an allow-list. `env` replaces the environment, but for PATH; None: that of the worker."""

    def __init__(
        self, allow: Mapping[str, Iterable[str]], cwd: str | None, env: Mapping[str, str] | None, keep_bytes: int
    ) -> None:
        self.templates: Mapping[str, CommandTemplate] = templates_of(allow)
        if type(keep_bytes) is not int or not 0 <= keep_bytes <= _MAX_KEPT_BYTES:
            raise UsageError(f"keep_bytes={keep_bytes!r}: expected a whole number from 0 to {_MAX_KEPT_BYTES:,}")
        self._cwd = cwd
        self._env = None if env is None else {"PATH": os.environ.get("PATH", os.defpath), **env}
        self._keep_bytes = keep_bytes

    def words_of(self, command: str, /, **values: Any) -> list[str]:
        """Return the words of a call. Raises `UsageError` for what the allow-list does not have."""
        template = self.templates.get(command) if isinstance(command, str) else None
        if template is None:
            known = ", ".join(self.templates)
            raise UsageError(f"{command!r:.80} is not in the allow-list of this task; it has: {known}")
        return template.filled(values)

    def function(self) -> Callable[..., Coroutine[Any, Any, CommandResult]]:
        """Return the function of the task."""

        async def shell(command: str, /, **values: Any) -> CommandResult:
            try:
                words = self.words_of(command, **values)
            except UsageError as error:  # the allow-list has changed since its submit
                raise Fatal(str(error)) from error
            return await self.run(command, words)

        return shell

    async def run(self, name: str, words: list[str]) -> CommandResult:
        """Run a program to its end. Raises `CommandFailed`."""
        path = None if self._env is None else self._env.get("PATH")
        found = shutil.which(words[0], path=path)
        if found is None:
            raise CommandFailed(f"{name}: there is no program {words[0]}", 127)
        process = await asyncio.create_subprocess_exec(
            *_dying_with_us(os.path.abspath(found), words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._cwd,
            env=self._env,
            start_new_session=True,
        )
        try:
            output, errors = await self._printed(process)
        finally:
            await _end(process)
        status = process.returncode
        assert status is not None
        if status:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            last = errors.strip().rpartition("\n")[2][:500]
            raise CommandFailed(f"{name}: {how}" + (f": {last}" if last else ""), status, output, errors)
        return CommandResult(status, output, errors)

    async def _printed(self, process: asyncio.subprocess.Process) -> tuple[str, str]:
        """Return the end of what it has printed, once it has ended."""
        tails = [_Tail(self._keep_bytes), _Tail(self._keep_bytes)]
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        pipes = zip(tails, (process.stdout, process.stderr), strict=True)
        readers = [asyncio.create_task(tail.read(pipe)) for tail, pipe in pipes]
        try:
            await process.wait()
            await asyncio.wait(readers, timeout=_REST_SECONDS)  # what it has left behind may hold the pipes open
        finally:
            for reader in readers:
                reader.cancel()
        return tails[0].text, tails[1].text


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self._size = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            self._size += len(chunk)
            self._kept += chunk
            if len(self._kept) > 2 * self._most:
                self._cut()

    def _cut(self) -> None:
        del self._kept[: max(0, len(self._kept) - self._most)]

    @property
    def text(self) -> str:
        self._cut()
        text = self._kept.decode("utf-8", "replace")
        gone = self._size - len(self._kept)
        return f"[{gone:,} bytes before this were dropped]\n{text}" if gone else text


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and what it has left in its group. A second cancellation ends the patience."""
    try:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TERM_SECONDS)
    finally:
        _signal(process, signal.SIGKILL)
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _dying_with_us(path: str, words: list[str]) -> list[str]:
    """Return the command that starts a program so that the kernel kills it when this process dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return [path, *words[1:]]
    return [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), path, *words]
