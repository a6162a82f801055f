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
from holdfast.executors.context import context

KEEP_BYTES = 64 * 1024
_TERM_SECONDS, _HASTE_SECONDS = 5.0, 0.5  # from SIGTERM to SIGKILL: if it was cancelled, or is past its time
_REST_SECONDS = 1.0  # for what is in the pipes when the program has ended, and for its end after SIGKILL
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
        found = self._found(words[0])
        if found is None:
            raise CommandFailed(f"{name}: there is no program {words[0]}", 127)
        loop = asyncio.get_running_loop()
        transport, program = await loop.subprocess_exec(
            lambda: _Program(self._keep_bytes),
            *_dying_with_us(found, words),
            stdin=asyncio.subprocess.DEVNULL,
            cwd=self._cwd,
            env=self._env,
            start_new_session=True,
        )
        pid = transport.get_pid()
        try:
            await program.exited.wait()
            with contextlib.suppress(TimeoutError):  # what it has left behind may hold the pipes open
                await asyncio.wait_for(program.closed.wait(), _REST_SECONDS)
        finally:
            try:
                await _end(pid, program)
            finally:
                transport.close()
        output, errors = program.printed
        status = transport.get_returncode()
        assert status is not None
        if status:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            last = errors.strip().rpartition("\n")[2][:500]
            raise CommandFailed(f"{name}: {how}" + (f": {last}" if last else ""), status, output, errors)
        return CommandResult(status, output, errors)

    def _found(self, program: str) -> str | None:
        """Return the path of a program; a relative one counts from `cwd`."""
        path = None if self._env is None else self._env.get("PATH")
        named = os.path.join(self._cwd or "", program) if os.sep in program else program
        found = shutil.which(named, path=path)
        return None if found is None else os.path.abspath(found)


class _Program(asyncio.SubprocessProtocol):
    """A program that runs, and the end of what it prints. Its pipes may be open when it has ended."""

    def __init__(self, keep_bytes: int) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._tails = {1: _Tail(keep_bytes), 2: _Tail(keep_bytes)}
        self._open = set(self._tails)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._tails[fd].add(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    @property
    def printed(self) -> tuple[str, str]:
        return self._tails[1].text, self._tails[2].text


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        self._kept += data
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


async def _end(pid: int, program: _Program) -> None:
    """End a program and what it has left in its group. A second cancellation ends the patience."""
    try:
        if not program.exited.is_set():
            _signal(pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(program.exited.wait(), _TERM_SECONDS if _is_cancelled() else _HASTE_SECONDS)
    finally:
        _signal(pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(program.exited.wait(), _REST_SECONDS)


def _is_cancelled() -> bool:
    try:
        return context().cancelled
    except UsageError:  # in no task
        return False


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _dying_with_us(path: str, words: list[str]) -> list[str]:
    """Return the command that starts a program so that the kernel kills it when this process dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return [path, *words[1:]]
    return [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), path, *words]
