"""One worker process as its runner sees it, from its start to its end.

It leads a process group of its own: a Ctrl-C at the terminal reaches the runner alone, which decides what becomes of
it, and when the worker is ended, the programs that its tasks have started end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.crashpoints import crashpoint
from holdfast.engine.account import Account
from holdfast.engine.messages import (
    Done,
    Grant,
    Message,
    News,
    Orders,
    Pauses,
    Ping,
    Ready,
    Retire,
    Stop,
    receive,
    send,
)
from holdfast.lifecycle.records import WorkerRecord

# A new process belongs to our group for a moment, and hears nothing before it has begun to. So these wait until then.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class WorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process, owner: str, started_at: float, stream: Stream) -> None:
        self._process = process
        self.owner = owner
        self._started_at = started_at
        self._reader, self._writer = stream
        self._running = 0
        self._ended: Mapping[str, int] = {}
        self.apart: tuple[str, ...] = ()
        self._was_killed = False
        self._fault = ""  # why its runner had to kill it
        self._was_asked = self._has_answered = False
        self.silence = 0.0  # seconds for which it has not answered, as far as its runner was there to hear it
        self.unresponsive_since: float | None = None  # by the store's clock, once that is too long
        self.overdue: dict[str, int] = {}  # ids and epochs of the calls for which it was killed
        self.closed = asyncio.Event()  # nothing will be heard of it any more
        self.account = Account()  # as far as it has told
        self.ready = asyncio.Event()
        self.retiring = asyncio.Event()
        self.over = asyncio.Event()
        self.done: Done | None = None  # what it says when its work is over
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: Sequence[str], orders: Orders, started_at: float) -> WorkerProcess:
        """Start it and give it its orders. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # not the mask of before: others start beside this one
            theirs.close()
        crashpoint("worker.spawned")
        worker = cls(process, orders.owner, started_at, await asyncio.open_connection(sock=ours))
        worker._say(orders)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def record(self) -> WorkerRecord:
        id = self.owner.partition("/")[2]
        return WorkerRecord(
            id=id,
            pid=self._process.pid,
            started_at=self._started_at,
            running=self._running,
            ended=self._ended,
            unresponsive_since=self.unresponsive_since,
        )

    # --- what it is told, and what it tells

    def grant(self, until: float) -> None:
        self._say(Grant(until))

    def pause(self, queues: frozenset[str]) -> None:
        self._say(Pauses(tuple(sorted(queues))))

    def stop(self, *, hurry: bool) -> None:
        self._say(Stop(hurry))

    def retire(self) -> None:
        self.retiring.set()
        self._say(Retire())

    def ask(self, seconds: float) -> float:
        """Ask it whether it hears us, unless it still owes the last answer. Return for how long it owes that: these
        `seconds`, the time since the last look, are added to its silence. Anything that it says is an answer.
        """
        if self._was_asked and not self._has_answered:
            self.silence += seconds
        else:
            self.silence, self._was_asked, self._has_answered = 0.0, True, False
            self._say(Ping())
        return self.silence

    def count(self, running: int) -> None:
        """Note what the store says that it runs: it may have fallen silent before it could tell."""
        self._running = running

    def _say(self, message: Message) -> None:
        send(self._writer, message)

    async def _listen(self) -> None:
        while (message := await receive(self._reader)) is not None:
            self._has_answered, self.silence = True, 0.0
            match message:
                case Ready():
                    self.ready.set()
                case News():
                    self._running, self.account, self.apart = message.running, message.account, message.apart
                    self._ended = message.ended
                    if message.retiring:
                        self.retiring.set()
                case Done():
                    self.done, self.account = message, message.account
                    self.over.set()
        self.closed.set()

    # --- its end

    async def ended(self) -> None:
        await self._process.wait()

    def kill(self, fault: str = "") -> None:
        """Kill it and the programs of its group. With a `fault` that is its own doing, and it has died."""
        if self._process.returncode is None:
            self._was_killed = True
            self._fault = self._fault or fault
            self._kill_group()

    async def close(self) -> None:
        """See that it is over: the process, what it said last, and what it left running."""
        self.kill()
        await self._process.wait()
        await asyncio.wait({self._listening}, timeout=_LAST_WORDS_SECONDS)
        self._listening.cancel()
        self._writer.close()
        if self.done is None or self.done.unfinished:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so with the latter
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def ended_as_asked(self) -> bool:
        """Whether its end was its own or its runner's decision; else it died."""
        was_killed = self._was_killed and self._process.returncode == -signal.SIGKILL
        return self.done is not None or (was_killed and not self._fault)

    @property
    def exit(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode
        if code is None:
            return "it is still there"
        if self._fault and code == -signal.SIGKILL:
            return f"{self._fault}, and was killed"
        if code >= 0:
            return f"it exited with {code}"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"

    # --- its size

    async def resident_bytes(self) -> int:
        """How much memory it holds; 0 if nobody can tell."""
        pid = self._process.pid
        try:
            return _pages_of(pid) * os.sysconf("SC_PAGE_SIZE") if _HAS_PROC else 1024 * await _kilobytes_of(pid)
        except (OSError, ValueError, IndexError):
            return 0


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_LAST_WORDS_SECONDS = 1.0  # they may still lie in the stream when the process is over
_HAS_PROC = Path("/proc/self/statm").exists()


def _pages_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


async def _kilobytes_of(pid: int) -> int:
    """For systems without /proc."""
    asked = await asyncio.create_subprocess_exec(
        "ps", "-o", "rss=", "-p", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    answer, _ = await asked.communicate()
    return int(answer)
