"""A worker process, seen from both ends: its runner's (`WorkerProcess`) and its own (`AttachedWorker`).

`holdfast.executors.child_process` starts it, exchanges messages with it and ends it. Runner and worker are of one
release and on one host. The end of the stream means that the other side is gone.

The worker claims while it has a permit, and reports its calls. It ends when the runner sends a stop, when it has done
its share of tasks, or when the stream ends. Then its runner is gone, and the worker hands its calls back rather than
leave them to recovery. It also ends if its runner is silent (frozen, say) until others have declared it dead. And it
ends if connections of its own tasks to deleted files keep it from the store: they are closed with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError
from holdfast.executors.begun import BegunCalls, BegunTable
from holdfast.executors.child_process import AsyncChannel, exit_in_words, kill_group, start_async
from holdfast.model.records import WorkerRecord
from holdfast.runtime.claim import Permit
from holdfast.runtime.measures import MeasurePort
from holdfast.runtime.worker import Account, Worker, WorkerOptions
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import LeftToRecovery, RunnerFenced, WorkerEnds

# --- messages

_LAST_WORDS_SECONDS = 1.0  # they may still lie in the stream when the process is over
_HAS_PROC = Path("/proc/self/statm").exists()
_NEWS_SECONDS = 0.5
_WATCH_SECONDS = 1.0
_STUCK_LOOKS = 3
_ORPHANED = "its runner died or was killed. It hands back what it can stop; calls on threads end with this process"
_LEFT = "they run on threads, which end with this process. A live runner runs them again, or the next one that starts"


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag="orders"):
    """The first message to a worker: its options (it serves the tasks of its own code) and the paused queues."""

    options: WorkerOptions
    paused: tuple[str, ...] = ()
    begun: int | None = None  # the descriptor of the table of begun calls


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Work may be started until then, by the clock of this host that counts suspension."""

    until: float


class Pauses(msgspec.Struct, frozen=True, tag="pauses"):
    """These queues are paused, and no others."""

    queues: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Take no more work, let what runs end within the drain timeout (`hurry`: now), and end."""

    hurry: bool = False


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """Take no more work, let what runs end, and end: another worker carries on."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with `Pong`, from the loop that claims and settles: the runner asks whether that loop turns."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The worker answers its runner."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker looks for work."""


class WorkerNews(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """What the worker is doing and has done. `retiring`: it takes no more work. `isolated` are the invocations that run
    in processes of their own: these end with the worker, and cannot be the cause of its death. `ended` is how many
    calls of each queue it has ended of late.
    """

    running: int
    account: Account
    retiring: bool = False
    isolated: tuple[str, ...] = ()
    ended: Mapping[str, int] = msgspec.field(default_factory=dict)


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """What the worker has counted since the last time: see `holdfast.runtime.measures`."""

    counts: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The worker's work is over, and it is about to end. `unfinished`: user code still runs and ends with it. `why` is
    for the history of unfinished invocations, if the worker ended by itself.
    """

    account: Account
    unfinished: bool
    why: str = ""


FromRunner = Orders | Grant | Pauses | Stop | Retire | Ping
FromWorker = Pong | Ready | WorkerNews | Measured | Done


# --- the runner's end


class WorkerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        owner: str,
        started_at: float,
        channel: Channel,
        begun: BegunTable,
        measures: MeasurePort | None,
    ) -> None:
        self._process = process
        self._measures = measures
        self.begun = begun
        self.owner = owner
        self._started_at = started_at
        self._channel = channel
        self.post = channel.post
        self._running = 0
        self._ended: Mapping[str, int] = {}
        self.isolated: tuple[str, ...] = ()
        self._was_killed = False
        self._fault = ""  # why its runner had to kill it
        self._was_asked = self._has_answered = False
        self.silence = 0.0  # seconds without an answer, without times at which its runner did not look
        self.unresponsive_since: float | None = None  # by the store's clock, once that is too long
        self.begun_ids: tuple[str, ...] | None = None  # by its table, while it does not answer
        self.overdue: dict[str, int] = {}  # ids and epochs of the calls for which it was killed
        self.has_late_steps = False  # of runs, for which it was killed
        self.closed = asyncio.Event()  # no message will come from it any more
        self.account = Account()  # by its last report
        self.ready = asyncio.Event()
        self.retiring = asyncio.Event()
        self.over = asyncio.Event()
        self.done: Done | None = None  # what it says when its work is over
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, command: Sequence[str], orders: Orders, started_at: float, measures: MeasurePort | None = None
    ) -> WorkerProcess:
        """Start it and give it its orders. Raises `OSError`."""
        begun = BegunTable.create(orders.options.concurrency)
        try:
            process, connection = await start_async(lambda fd: [*command, "--fd", str(fd)], begun.descriptor)
        finally:
            os.close(begun.descriptor)
        crashpoint("worker.spawned")
        channel: Channel = await AsyncChannel.open(connection, FromWorker)
        worker = cls(process, orders.options.owner, started_at, channel, begun, measures)
        worker.post(replace(orders, begun=begun.descriptor))
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
            begun=self.begun_ids,
            starting=not self.ready.is_set(),
        )

    # --- messages

    def retire(self) -> None:
        self.retiring.set()
        self.post(Retire())

    def ask(self, seconds: float) -> float:
        """Ping the worker, unless it still owes the last answer. Return for how long it owes that: these `seconds`, the
        time since the last look, are added to its silence. Any message is an answer.
        """
        if self._was_asked and not self._has_answered:
            self.silence += seconds
        else:
            self.silence, self._was_asked, self._has_answered = 0.0, True, False
            self.post(Ping())
        return self.silence

    def note_begun(self, ids: Sequence[str], running: int) -> bool:
        """Note what has begun, and how much of that runs: it may have fallen silent before it could report. Return
        whether that is news.
        """
        begun = tuple(sorted(ids))
        is_news, self._running, self.begun_ids = begun != self.begun_ids, running, begun
        return is_news

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self._has_answered, self.silence, self.begun_ids = True, 0.0, None
            match message:
                case Ready():
                    self.ready.set()
                case WorkerNews():
                    self._running, self.account, self.isolated = message.running, message.account, message.isolated
                    self._ended = message.ended
                    if message.retiring:
                        self.retiring.set()
                case Measured(counts):
                    if self._measures is not None:
                        self._measures.add(counts)
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
            kill_group(self._process.pid)

    async def close(self) -> None:
        """Wait for the end of the process and its last messages, and kill the programs that it left running."""
        self.kill()
        await self._process.wait()
        await asyncio.wait({self._listening}, timeout=_LAST_WORDS_SECONDS)
        self._listening.cancel()
        self._channel.close()
        if self.done is None or self.done.unfinished:
            kill_group(self._process.pid)

    @property
    def ended_as_asked(self) -> bool:
        """Return whether its end was its own or its runner's decision; else it died."""
        was_killed = self._was_killed and self._process.returncode == -signal.SIGKILL
        return self.done is not None or (was_killed and not self._fault)

    @property
    def exit(self) -> str:
        """Return how the process ended, in words."""
        code = self._process.returncode
        if code is None:
            return "it is still there"
        if self._fault and code == -signal.SIGKILL:
            return f"{self._fault}, and was killed"
        return exit_in_words(code)

    # --- its size

    async def resident_bytes(self) -> int:
        """Return how much memory it holds; 0 if that is unknown."""
        pid = self._process.pid
        try:
            return _pages_of(pid) * os.sysconf("SC_PAGE_SIZE") if _HAS_PROC else 1024 * await _kilobytes_of(pid)
        except (OSError, ValueError, IndexError):
            return 0


Channel = AsyncChannel[FromWorker]


def _pages_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


async def _kilobytes_of(pid: int) -> int:
    """Return the memory of a process on systems without /proc."""
    asked = await asyncio.create_subprocess_exec(
        "ps", "-o", "rss=", "-p", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    answer, _ = await asked.communicate()
    return int(answer)


# --- the worker's end


class RunningWorker:
    """A worker that runs, until it has ended. A stop does not wait for hooks that have yet to let it start."""

    def __init__(self, worker: Worker, ready: Callable[[], None], over: Callable[[], None] = lambda: None) -> None:
        self.worker = worker
        self._on_ready = ready
        self._is_ready = False
        self.task = asyncio.create_task(worker.run(self._ready, over))

    def _ready(self) -> None:
        self._is_ready = True
        self._on_ready()

    def stop(self, *, hurry: bool, why: str = "") -> None:
        self.worker.stop(hurry=hurry, why=why)
        if not self._is_ready:
            self.task.cancel()  # it has claimed nothing

    async def ended(self) -> Account:
        await asyncio.wait({self.task})
        return self.worker.account if self.task.cancelled() else self.task.result()


MakeWorker = Callable[[WorkerOptions, Permit], Worker]


class AttachedWorker:
    def __init__(
        self,
        channel: AsyncChannel[FromRunner],
        clock: Clock,
        telemetry: Telemetry,
        measures: MeasurePort | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._measures = measures
        self._channel = channel
        self._permit = Permit(clock)
        self._running_worker: RunningWorker | None = None
        self._is_to_stop = False
        self._is_orphan = False  # its runner is gone
        self._has_reported = False
        self._news: WorkerNews | None = None

    async def run(self, make_worker: MakeWorker) -> bool:
        """Work until the end. Return True if user code still runs, which only the end of this process ends."""
        orders = await self._channel.receive()
        if not isinstance(orders, Orders):
            return False
        self._permit.pause(frozenset(orders.paused))
        if orders.begun is not None:
            self._permit.begun = BegunCalls.attach(orders.begun)
        worker = make_worker(orders.options, self._permit)
        self._running_worker = RunningWorker(worker, lambda: self._channel.post(Ready()), self._report_done)
        if self._is_to_stop:
            self.stop()
        duties = [asyncio.create_task(work) for work in self._duties(worker)]
        try:
            await self._running_worker.ended()
        finally:
            for duty in duties:
                duty.cancel()
        self._report_done()
        if self._is_orphan and worker.running:
            self._telemetry.emit(LeftToRecovery(worker.running, _LEFT, worker.owner))
        await self._channel.drain()
        return worker.is_unfinished

    def _duties(self, worker: Worker) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._listen(), self._report(worker), self._watch_runner(worker), self._watch_store(worker)

    def stop(self, *, hurry: bool = False, why: str = "") -> None:
        self._is_to_stop = True
        if self._running_worker is not None:
            self._running_worker.stop(hurry=hurry, why=why)

    def _report_done(self) -> None:
        """Report the end before the hooks: whatever these do, the work is done, or left to the runner."""
        if self._running_worker is not None and not self._has_reported:
            self._has_reported = True
            worker = self._running_worker.worker
            self._report_measures()
            done = Done(account=replace(worker.account), unfinished=worker.is_unfinished, why=worker.why_ended)
            self._channel.post(done)

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            match message:
                case Grant(until):
                    self._permit.grant(until)
                    crashpoint("worker.permitted")
                case Ping():
                    self._channel.post(Pong())
                case Pauses(queues):
                    self._permit.pause(frozenset(queues))
                case Stop(hurry):
                    self.stop(hurry=hurry)
                case Retire() if self._running_worker is not None:
                    self._running_worker.worker.retire()
        owner = self._running_worker.worker.owner if self._running_worker is not None else ""
        self._telemetry.emit(WorkerEnds(owner, _ORPHANED))
        self._is_orphan = True
        self.stop(hurry=True, why="its runner died before it was done")

    async def _watch_runner(self, worker: Worker) -> None:
        """Look whether a silent runner was declared dead: then other runners have its work."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._permit.is_granted() or not worker.running:
                continue
            with contextlib.suppress(StoreError):
                if await worker.has_lost() and not self._permit.is_granted():
                    self._telemetry.emit(RunnerFenced("worker", f"worker {worker.owner}"))
                    worker.fence()

    async def _watch_store(self, worker: Worker) -> None:
        """End this worker if only another process can use the store. Tasks that close their connections themselves, or
        soon end, are left some time to do so.
        """
        looks = 0
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            why = worker.needs_restart()
            looks = looks + 1 if why else 0
            if looks == _STUCK_LOOKS:
                worker.give_up(f"only a process other than that of worker {worker.owner} can use the store: {why}")

    async def _report(self, worker: Worker) -> None:
        worker.on_isolated = lambda: self._report_news(worker)
        while True:
            self._report_news(worker)
            await asyncio.sleep(_NEWS_SECONDS)
            self._report_measures()

    def _report_measures(self) -> None:
        if self._measures is not None and (counts := self._measures.taken()):
            self._channel.post(Measured(counts))

    def _report_news(self, worker: Worker) -> None:
        news = WorkerNews(
            running=worker.busy,
            account=replace(worker.account),
            retiring=worker.is_stopping,
            isolated=worker.isolated,
            ended=worker.ended_lately(),
        )
        if news != self._news:
            self._news = news
            self._channel.post(news)
