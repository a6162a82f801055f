"""Worker processes: started, permitted, watched and replaced by their runner, which runs no user code itself.

Each worker is a process of its own, with its own name as an owner, new for each process. When one dies, its runner
knows at once, by the end of the process, and takes back what it held; nobody waits for a heartbeat to be missed. A
worker gets its permit to start work only from a heartbeat that has put it on the roster, and loses it when the runner
cannot beat. A worker whose runner is gone sees the end of the stream, hands back what it can and ends itself.

Ending: first all are told to stop. Who still runs user code after the drain timeout ends its process, threads and all,
and the runner, which knows that the code is over, gives the work back; so it never runs in two places.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.account import Account
from holdfast.engine.messages import Done, Grant, News, Orders, Ready, Stop, receive, send
from holdfast.engine.permit import Permit
from holdfast.engine.recovery import Recovery
from holdfast.errors import StoreError, UsageError
from holdfast.lifecycle.records import RunnerRecord, WorkerRecord

log = logging.getLogger("holdfast.runner")

_QUICK_DEATH_SECONDS = 5.0  # a worker that lives no longer than this is replaced ever more slowly
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
_GRACE_SECONDS = 5.0  # for a worker that was told to end: beyond it, it is killed
_START_SECONDS = 60.0
_MEMORY_SECONDS = 1.0


class WorkerProcess:
    """One worker, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, owner: str, started_at: float, stream: Stream) -> None:
        self.process = process
        self.owner = owner
        self.started_at = started_at
        self.reader, self.writer = stream
        self.running = 0
        self.ready = asyncio.Event()
        self.done: Done | None = None
        self.told_to_stop = False

    @property
    def id(self) -> str:
        return self.owner.partition("/")[2]

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(id=self.id, pid=self.process.pid, started_at=self.started_at, running=self.running)

    def stop(self, *, hurry: bool) -> None:
        self.told_to_stop = True
        send(self.writer, Stop(hurry))

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def listen(self) -> None:
        while (message := await receive(self.reader)) is not None:
            match message:
                case Ready():
                    self.ready.set()
                case News(running):
                    self.running = running
                case Done():
                    self.done = message

    def resident_bytes(self) -> int:
        """How much memory it holds, where that can be told."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessCrew:
    """See `holdfast.engine.crew.Crew`. `command` starts a worker that is given its end of the stream as ``--fd N``."""

    def __init__(
        self,
        *,
        command: Sequence[str],
        count: int,
        record: RunnerRecord,
        recovery: Recovery,
        clock: Clock,
        now: Callable[[], float],
        drain_timeout_seconds: float,
        max_tasks: int | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._command = list(command)
        self._count = count
        self._record = record
        self._recovery = recovery
        self._clock = clock
        self._now = now
        self._drain = drain_timeout_seconds
        self._max_tasks = max_tasks
        self._memory_limit = memory_limit_bytes
        self._runner_id = ""
        self._numbers = 0
        self._alive: dict[str, WorkerProcess] = {}
        self._on_roster: set[str] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._hurry = False
        self._fenced = False
        self._account = Account()
        self._changed: Callable[[], None] = lambda: None

    # --- what a runner asks for

    def on_change(self, tell: Callable[[], None]) -> None:
        self._changed = tell

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._runner_id = runner_id
        permit.on_each_grant(self._pass_on)
        first = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep_one(first)) for _ in range(self._count)]
        if self._memory_limit is not None:
            self._watching = asyncio.create_task(self._watch_memory(self._memory_limit))
        waiting = asyncio.create_task(first.wait())
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.wait({waiting, *self._keepers}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.error("no worker was ready within %g s; still trying", _START_SECONDS)
        finally:
            waiting.cancel()

    def workers(self) -> Sequence[WorkerRecord]:
        """Called for each heartbeat: who is told here may be permitted to work when that heartbeat was written."""
        self._on_roster = set(self._alive)
        return [worker.record for worker in self._alive.values()]

    async def wait(self) -> Account:
        await asyncio.gather(*self._keepers)
        return self._account

    def stop(self, *, hurry: bool = False) -> None:
        self._hurry = self._hurry or hurry
        self._stopping.set()
        for worker in self._alive.values():
            worker.stop(hurry=hurry)

    def fence(self) -> None:
        self._fenced = True
        self._stopping.set()
        for worker in self._alive.values():
            worker.kill()

    # --- keeping workers

    def _pass_on(self, until: float) -> None:
        for owner, worker in self._alive.items():
            if owner in self._on_roster and not self._fenced:
                send(worker.writer, Grant(until))

    async def _keep_one(self, first: asyncio.Event) -> None:
        """There is always one worker here, until it is time to stop."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            try:
                await self._one_life(first)
            except OSError as error:
                log.error("a worker process could not be started: %s", error)
            if self._clock.monotonic() - began > _QUICK_DEATH_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            if not self._stopping.is_set():
                try:
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()
                except TimeoutError:
                    pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _one_life(self, first: asyncio.Event) -> None:
        worker = await self._spawn()
        self._alive[worker.owner] = worker
        self._changed()
        listening = asyncio.create_task(worker.listen())
        ready = asyncio.create_task(worker.ready.wait())
        ready.add_done_callback(lambda done: None if done.cancelled() else first.set())
        try:
            await self._until_it_ends(worker)
        finally:
            worker.kill()
            await worker.process.wait()
            # Its last words may still lie in the stream.
            await asyncio.wait({listening}, timeout=1.0)
            listening.cancel()
            ready.cancel()
            worker.writer.close()
            self._alive.pop(worker.owner, None)
            self._on_roster.discard(worker.owner)
            self._changed()
        await self._take_stock(worker)

    async def _spawn(self) -> WorkerProcess:
        self._numbers += 1
        owner = f"{self._runner_id}/{self._numbers}"
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = WorkerProcess(process, owner, self._now(), await asyncio.open_connection(sock=ours))
        send(
            worker.writer,
            Orders(
                owner=owner,
                concurrency=self._record.concurrency,
                queues=self._record.queues,
                tags=self._record.tags,
                drain_timeout_seconds=self._drain,
                max_tasks=self._max_tasks,
            ),
        )
        if self._stopping.is_set():
            worker.stop(hurry=self._hurry)
        return worker

    async def _until_it_ends(self, worker: WorkerProcess) -> None:
        ended = asyncio.create_task(worker.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                # It drains by itself; this is for one that does not. A hurry shortens the wait.
                deadline = self._clock.monotonic() + self._drain + _GRACE_SECONDS
                while not ended.done() and self._clock.monotonic() < deadline:
                    await asyncio.wait({ended}, timeout=0.1)
                    if self._hurry:
                        deadline = min(deadline, self._clock.monotonic() + _GRACE_SECONDS)
                        self._hurry = False
        finally:
            stopping.cancel()
            ended.cancel()

    async def _take_stock(self, worker: WorkerProcess) -> None:
        """The process is over, so its code is: what it still holds goes back."""
        if worker.done is not None:
            self._account.add(
                Account(started=worker.done.started, ended=worker.done.ended, interrupted=worker.done.interrupted)
            )
        if self._fenced:
            return
        asked = worker.told_to_stop or worker.done is not None
        how = exit_of(worker.process.returncode)
        if not asked:
            log.error("worker %s died: %s", worker.owner, how)
        why = "its runner stopped before it was done" if asked else f"its worker {worker.owner} died: {how}"
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                taken = await self._recovery.of_owner(worker.owner, why, ended=asked)
                self._account.interrupted += taken if asked else 0
                return
            except StoreError as error:
                if self._stopping.is_set() and pause > 1.0:
                    log.error("what worker %s held is left to recovery: %s", worker.owner, error)
                    return
                log.warning("what worker %s held was not taken back yet: %s", worker.owner, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _watch_memory(self, limit: int) -> None:
        """A worker that has grown too large finishes what runs and is replaced."""
        while not self._stopping.is_set():
            await asyncio.sleep(_MEMORY_SECONDS)
            for worker in list(self._alive.values()):
                size = worker.resident_bytes()
                if size > limit and not worker.told_to_stop:
                    log.warning("worker %s holds %.0f MB and is replaced", worker.owner, size / 2**20)
                    worker.stop(hurry=False)


def exit_of(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "it is still there"
    if code >= 0:
        return f"it exited with {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def refuse_bad_numbers(workers: int, max_tasks: int | None, memory_limit_bytes: int | None) -> None:
    if not 0 <= workers <= 1_000:
        raise UsageError(f"workers={workers}: a runner has from 0 (none: it works itself) to 1,000 worker processes")
    if max_tasks is not None and max_tasks < 1:
        raise UsageError(f"max_tasks_per_worker={max_tasks}: expected a whole number from 1 on")
    if memory_limit_bytes is not None and memory_limit_bytes < 2**20:
        raise UsageError("the memory limit of a worker is at least 1 MB")
