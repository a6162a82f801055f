"""Worker processes: started, permitted, watched and replaced by their runner, which runs no user code itself.

Each worker is a process with its own owner's name, new for each process. Its runner notices its death at once, by the
end of the process, and takes back its invocations. A worker gets its permit to start work only from a heartbeat that
has put it on the roster, and loses it when the store does not answer the runner. A worker whose runner is gone sees the
end of the stream, hands back what it can and ends itself.

**Ending.** First the runner sends each worker a stop. A worker that still runs user code after the drain timeout ends
its process with all threads. Then the runner gives the work back: the code is over, so it never runs in two places. A
worker retires when it has done its share of tasks, or has grown too large. It finishes its calls while its successor
starts. There are never more than twice as many processes as workers: long tasks would fill the machine with them.

**Silence** (`WorkerWatchdog`). A worker ends by itself a call that is past its time. It cannot while code holds the
interpreter lock, or while the process is stopped: then its runner kills it, also for a step of a run, whose time is
in the shared table only. A silent worker that holds nothing past its time is left alone: a computation may keep the
interpreter for an hour. It is reported once, on the roster and by `why`, and the work that it has not begun goes back,
also what the store has as RUNNING (`holdfast.executors.begun`). Silence is counted in looks, not by a clock: a look
that comes late, because this process was stopped or the machine slept, counts as one.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError, UsageError
from holdfast.executors.child_process import CLOSED
from holdfast.fleet.recovery import Recovery, sort_by_begun
from holdfast.fleet.worker_process import Grant, Orders, Pauses, RunningWorker, Stop, WorkerProcess
from holdfast.model.cancellation import must_end_by
from holdfast.model.records import RunnerRecord, WorkerRecord
from holdfast.model.status import Status
from holdfast.runtime.claim import Permit
from holdfast.runtime.engine import Engine
from holdfast.runtime.execute import STUBBORN_SECONDS
from holdfast.runtime.hints import first_of, wait_for
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.worker import Account, Worker, WorkerOptions
from holdfast.telemetry import events as e

# A worker that dies before it is ready is replaced ever more slowly: its successor will hardly fare better.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
# A worker that was ready and dies before it has done anything likewise, but its work waits: within 2 s that goes on.
_LONGEST_PAUSE_OF_READY_SECONDS, _WELL_SECONDS = 1.0, 10.0
# For a worker that has to end: beyond it, it is killed. It ends by itself sooner than that, even if the store is
# away and the ends of its work wait to be written.
_GRACE_SECONDS, _HURRIED_GRACE_SECONDS = 15.0, 5.0
_LEAVING_SECONDS = 15.0  # for one whose work is over: its hooks take less
_CLOSED_SECONDS = 1.0  # for the end of a process whose stream has ended: it usually follows at once
_PROCESSES_PER_WORKER = 2  # a working process, and a retired process that is not done yet
_MEMORY_SECONDS = 1.0
START_SECONDS = 60.0  # for a worker that has yet to import its app and to enter its hooks
_LOOK_SECONDS = 1.0
_LOOKS = 10  # in the time after which a worker counts as unresponsive, at least
_SILENT_LOOKS = 3  # unanswered: only then is it asked whether a call is past its time


class Workers(ABC):
    """What a runner asks of its workers. They live as long as the runner's entry on the roster."""

    def on_change(self, callback: Callable[[], None]) -> None:  # noqa: B027 - a worker in this process does not change
        """Call this when a worker comes or goes."""

    @abstractmethod
    async def start(self, runner_id: str, permit: Permit) -> None:
        """Begin to work as owners ``runner_id/…``; return when at least one worker is ready."""

    @abstractmethod
    def records(self) -> Sequence[WorkerRecord]:
        """Return the workers as a heartbeat writes them to the roster."""

    def are_on_roster(self, workers: Sequence[WorkerRecord]) -> None:  # noqa: B027 - its runner's entry is enough
        """Permit these workers, and no others, to work: a heartbeat has written them to the roster."""

    @abstractmethod
    async def wait(self) -> Account:
        """Wait until all have ended, after `stop` or `fence`, or by an error. Return what they did."""

    @abstractmethod
    def stop(self, *, hurry: bool = False) -> None:
        """Take no more work, let what runs end within the drain timeout, and end; `hurry` ends it now."""

    @abstractmethod
    def fence(self) -> None:
        """End without a write: the work was given to others."""

    def kill(self) -> None:  # noqa: B027 - a worker in this process ends with it
        """Kill the processes of the workers: this one is about to end. From any thread."""


class LocalWorkers(Workers):
    """Run one worker in this process."""

    def __init__(self, make_worker: Callable[[str, Permit], Worker], now: Callable[[], float]) -> None:
        self._make_worker = make_worker
        self._now = now
        self._started_at = 0.0
        self._running_worker: RunningWorker | None = None

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._started_at = self._now()
        ready = asyncio.Event()
        self._running_worker = RunningWorker(self._make_worker(f"{runner_id}/0", permit), ready.set)
        await first_of(ready, self._running_worker.task)
        if self._running_worker.task.done():
            await self._running_worker.ended()

    def records(self) -> Sequence[WorkerRecord]:
        worker = None if self._running_worker is None else self._running_worker.worker
        running, ended = (0, {}) if worker is None else (worker.busy, worker.ended_lately())
        return [WorkerRecord(id="0", pid=os.getpid(), started_at=self._started_at, running=running, ended=ended)]

    async def wait(self) -> Account:
        assert self._running_worker is not None
        return await self._running_worker.ended()

    def stop(self, *, hurry: bool = False) -> None:
        if self._running_worker is not None:
            self._running_worker.stop(hurry=hurry)

    def fence(self) -> None:
        if self._running_worker is not None:
            self._running_worker.worker.fence()


class Supervisor(Workers):
    """Workers in processes. `command` starts a worker; its end of the stream is ``--fd N``."""

    def __init__(
        self,
        *,
        command: Sequence[str],
        count: int,
        record: RunnerRecord,
        recovery: Recovery,
        engine: Engine,
        drain_timeout_seconds: float,
        max_tasks: int | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._command = list(command)
        self._count = count
        self._options = WorkerOptions(
            owner="",
            serves=record.serves,
            concurrency=record.concurrency,
            drain_timeout_seconds=drain_timeout_seconds,
            max_tasks=max_tasks,
            leaves_unfinished=True,
            look_seconds=engine.settings.runner_heartbeat_seconds,
        )
        self._recovery = recovery
        self._clock = engine.clock
        self._emit = engine.telemetry.emit
        self._measures = engine.measures
        self._now = engine.store.now
        self._memory_limit = memory_limit_bytes
        self._runner_id = ""
        self._permit: Permit | None = None
        self._numbers = 0
        self._alive: dict[str, WorkerProcess] = {}
        self._on_roster: set[str] = set()
        self._room = asyncio.Semaphore(_PROCESSES_PER_WORKER * count)
        self._keepers: list[asyncio.Task[None]] = []
        self._retired: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._hurry = False
        self._kill_at = float("inf")
        self._fenced = False
        self._account = Account()
        self._changed: Callable[[], None] = lambda: None
        self._watchdog = WorkerWatchdog(engine, recovery, lambda: list(self._alive.values()), lambda: self._changed())

    # --- what a runner asks for

    def on_change(self, callback: Callable[[], None]) -> None:
        self._changed = callback

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._runner_id = runner_id
        self._permit = permit
        permit.on_each_grant(self._send_grant)
        permit.on_pause(self._send_pauses)
        first = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep_worker(first)) for _ in range(self._count)]
        await first_of(first, *self._keepers, seconds=START_SECONDS)
        if not first.is_set() and not any(keeper.done() for keeper in self._keepers):
            self._emit(e.WorkerNotStarted(f"none was ready within {START_SECONDS:g} s; still trying"))

    def records(self) -> Sequence[WorkerRecord]:
        return [worker.record for worker in self._alive.values()]

    def are_on_roster(self, workers: Sequence[WorkerRecord]) -> None:
        # Not those of the last heartbeat that was sent: several are under way at once, and each may get lost.
        self._on_roster = {f"{self._runner_id}/{worker.id}" for worker in workers}

    async def wait(self) -> Account:
        watching = [asyncio.create_task(work) for work in (self._watch_memory(), self._watchdog.run())]
        try:
            await asyncio.gather(*self._keepers)
            await asyncio.gather(*self._retired)
        finally:
            await cancel_tasks(*watching)
        return self._account

    def stop(self, *, hurry: bool = False) -> None:
        self._hurry = self._hurry or hurry
        patience = _HURRIED_GRACE_SECONDS if hurry else self._options.drain_timeout_seconds + _GRACE_SECONDS
        self._kill_at = min(self._kill_at, self._clock.monotonic() + patience)
        self._stopping.set()
        for worker in self._alive.values():
            worker.post(Stop(hurry))

    def fence(self) -> None:
        self._fenced = True
        self._kill_at = float("-inf")
        self._stopping.set()
        for worker in self._alive.values():
            worker.kill()

    def kill(self) -> None:
        self._fenced = True  # for a worker that is being started
        for worker in tuple(self._alive.values()):
            worker.kill()

    # --- keeping workers

    def _send_grant(self, until: float) -> None:
        for owner, worker in self._alive.items():
            if owner in self._on_roster and not self._fenced:
                worker.post(Grant(until))
                crashpoint("worker.granted")

    def _send_pauses(self, queues: frozenset[str]) -> None:
        for worker in self._alive.values():
            worker.post(Pauses(tuple(sorted(queues))))

    async def _keep_worker(self, first: asyncio.Event) -> None:
        """Keep one worker process, until it is time to stop."""
        pause = _FIRST_PAUSE_SECONDS
        while await self._has_room():
            began = self._clock.monotonic()
            worker = None
            try:
                worker = await self._spawn()
            except OSError as error:
                self._emit(e.WorkerNotStarted(str(error)))
            if worker is not None and not await self._until_replaced(worker, first):
                continue
            longest = _LONGEST_PAUSE_SECONDS
            if worker is not None and worker.ready.is_set():
                longest = _LONGEST_PAUSE_OF_READY_SECONDS
                if worker.account.ended or self._clock.monotonic() - began > _WELL_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
                pause = min(pause, longest)
            elif not self._stopping.is_set():
                self._emit(e.WorkerNotStarted(f"it ended before it was ready; the next one starts in {pause:.1f} s"))
            if not await wait_for(self._stopping, pause):
                pause = min(pause * 2, longest)

    async def _has_room(self) -> bool:
        """Wait for room for one more process; each gives it back with its end. Return False when it is time to stop."""
        await self._room.acquire()
        if self._stopping.is_set():
            self._room.release()  # for the next waiter
            return False
        return True

    async def _spawn(self) -> WorkerProcess:
        self._numbers += 1
        owner = f"{self._runner_id}/{self._numbers}"
        orders = Orders(options=replace(self._options, owner=owner), paused=self._paused)
        try:
            worker = await WorkerProcess.start(self._command, orders, self._now(), self._measures)
        except BaseException:
            self._room.release()
            raise
        self._alive[owner] = worker
        if self._paused != orders.paused:  # they have changed while it was started
            worker.post(Pauses(self._paused))
        self._changed()
        if self._fenced:
            worker.kill()
        elif self._stopping.is_set():
            worker.post(Stop(self._hurry))
        return worker

    @property
    def _paused(self) -> tuple[str, ...]:
        return () if self._permit is None else tuple(sorted(self._permit.paused))

    async def _until_replaced(self, worker: WorkerProcess, first: asyncio.Event) -> bool:
        """Wait until the worker has ended, or has begun to retire. Return True if it died."""
        life = asyncio.create_task(self._follow(worker))
        await first_of(life, worker.ready)
        if worker.ready.is_set():
            first.set()
            self._changed()
        await first_of(life, worker.retiring)
        if life.done():
            await life
            return not worker.ended_as_asked
        self._retired.add(life)
        life.add_done_callback(self._retired.discard)
        return False

    async def _follow(self, worker: WorkerProcess) -> None:
        """Follow a worker to its end, and give back what it still holds."""
        try:
            await self._until_it_ends(worker)
        finally:
            await worker.close()
            self._alive.pop(worker.owner, None)
            self._on_roster.discard(worker.owner)
            self._room.release()
            self._changed()
        await self._take_back(worker)

    async def _until_it_ends(self, worker: WorkerProcess) -> None:
        """Wait while the worker drains and leaves its hooks. Kill it if it does not end in time."""
        ended = asyncio.create_task(worker.ended())
        leaves_by = float("inf")
        try:
            await first_of(ended, self._stopping, worker.over, worker.closed)
            while not ended.done() and (now := self._clock.monotonic()) < min(self._kill_at, leaves_by):
                if worker.over.is_set():
                    leaves_by = min(leaves_by, now + _LEAVING_SECONDS)
                elif worker.closed.is_set():  # and it has not reported its end: its state is unknown
                    await asyncio.wait({ended}, timeout=_CLOSED_SECONDS)
                    worker.kill(f"it lost its connection to its runner ({CLOSED})")
                await asyncio.wait({ended}, timeout=0.1)
        finally:
            ended.cancel()

    async def _take_back(self, worker: WorkerProcess) -> None:
        """Give back what a worker still holds: its process is over, so its code is."""
        self._account.add(worker.account)
        if self._fenced:
            return
        asked = worker.ended_as_asked
        if not asked:
            self._account.deaths += 1
            self._emit(e.WorkerDied(worker.owner, worker.exit))
        left = (worker.done.why if worker.done else "") or "its runner stopped before it was done"
        why = left if asked else f"its worker {worker.owner} died: {worker.exit}"
        # It was ended, by its runner or itself, for a call past its time: the other calls are not charged.
        for_another = bool(worker.overdue or worker.has_late_steps or (worker.done and worker.done.why))
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                crashpoint("takeback.before")
                taken = await self._recovery.of_owner(
                    worker.owner,
                    why,
                    ended=asked or for_another,
                    isolated=worker.isolated,
                    overdue=worker.overdue,
                    for_another=for_another,
                    begun=worker.begun,
                )
                crashpoint("takeback.after")
                self._account.interrupted += taken if asked else 0
                return
            except Exception as error:  # whatever it is: no other runner takes it back while this one lives
                if not isinstance(error, StoreError):
                    self._emit(e.DutyFailed("runner", f"take back the work of {worker.owner}", error))
                is_left = self._stopping.is_set() and pause > 1.0
                self._emit(e.WorkNotTakenBack(worker.owner, str(error), is_left))
                if is_left:
                    return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _watch_memory(self) -> None:
        """Retire workers that have grown too large. A worker that has not worked yet will hardly
        get smaller by that.
        """
        while self._memory_limit is not None:
            await asyncio.sleep(_MEMORY_SECONDS)
            for worker in list(self._alive.values()):
                if worker.account.started and not worker.retiring.is_set():
                    size = await worker.resident_bytes()
                    if size > self._memory_limit:
                        self._emit(e.WorkerRetires(worker.owner, f"it holds {size / 2**20:.0f} MB", is_too_large=True))
                        worker.retire()


def refuse_bad_numbers(workers: int, max_tasks: int | None, memory_limit_bytes: int | None) -> None:
    if not 0 <= workers <= 1_000:
        raise UsageError(f"workers={workers}: a runner has from 0 (none: it works itself) to 1,000 worker processes")
    if max_tasks is not None and max_tasks < 1:
        raise UsageError(f"max_tasks_per_worker={max_tasks}: expected a whole number from 1 on")
    if memory_limit_bytes is not None and memory_limit_bytes < 2**20:
        raise UsageError("the memory limit of a worker is at least 1 MB")


class WorkerWatchdog:
    """Watch whether worker processes answer. `changed` is called when the roster has to be rewritten."""

    def __init__(
        self,
        engine: Engine,
        recovery: Recovery,
        workers: Callable[[], Sequence[WorkerProcess]],
        changed: Callable[[], None],
    ) -> None:
        unresponsive_seconds = engine.settings.worker_unresponsive_seconds
        self._recovery = recovery
        self._clock = engine.clock
        self._emit = engine.telemetry.emit
        self._now = engine.store.now
        self._workers = workers
        self._changed = changed
        self._unresponsive = unresponsive_seconds
        self._every = min(_LOOK_SECONDS, unresponsive_seconds / _LOOKS)

    async def run(self) -> None:
        looked = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._every)
            elapsed, looked = self._clock.monotonic() - looked, self._clock.monotonic()
            for worker in self._workers():
                try:
                    await self.look(worker, min(elapsed, self._every))
                except Exception as error:
                    self._emit(e.DutyFailed("runner", f"watch worker {worker.owner}", error))

    async def look(self, worker: WorkerProcess, seconds: float) -> None:
        """Ping one worker, and do what its silence calls for. `seconds` have passed since the last look."""
        if worker.over.is_set() or worker.overdue or worker.has_late_steps:
            return
        silence = worker.ask(seconds)
        self._report(worker, silence)
        if silence < _SILENT_LOOKS * self._every or not worker.ready.is_set():
            return
        await self._check_overdue(worker)

    def _report(self, worker: WorkerProcess, silence: float) -> None:
        """Report once that a worker does not answer, and that it does again."""
        is_too_long = silence >= (self._unresponsive if worker.ready.is_set() else START_SECONDS)
        if is_too_long and worker.unresponsive_since is None:
            worker.unresponsive_since = self._now() - silence
            self._emit(e.WorkerUnresponsive(worker.owner, f"no answer from pid {worker.pid} for {silence:.0f} s"))
            self._changed()
        elif not silence and worker.unresponsive_since is not None:
            away = format_duration(round(max(0.0, self._now() - worker.unresponsive_since), 1))
            worker.unresponsive_since = None
            self._emit(e.WorkerAnswers(worker.owner, f"an answer from pid {worker.pid} after {away}"))
            self._changed()

    async def _check_overdue(self, worker: WorkerProcess) -> None:
        held = await self._recovery.held_by(worker.owner)
        late = self._now() - STUBBORN_SECONDS - self._every
        if not worker.silence or worker.closed.is_set():
            return  # it has answered meanwhile, or is gone
        begun = sort_by_begun(held, worker.begun)
        overdue = [record for record in begun.running if must_end_by(record) < late]
        if worker.note_begun([record.id for record in begun.running + begun.over], len(begun.running)):
            self._changed()
        if overdue:
            worker.overdue = {record.id: record.epoch for record in overdue}
            named = ", ".join(f"{record.task} {record.id}" for record in overdue[:3])
            why = f"it has not answered for {worker.silence:.0f} s while {named} was past its time"
            self._emit(e.WorkerKilled(worker.owner, why))
            worker.kill(why)
        elif worker.begun.steps_end_by < late:
            worker.has_late_steps = True
            why = f"it has not answered for {worker.silence:.0f} s while a step of a run was past its time"
            self._emit(e.WorkerKilled(worker.owner, why))
            worker.kill(why)
        elif worker.unresponsive_since is not None:
            why = f"its worker {worker.owner} has not answered for {worker.silence:.0f} s"
            waiting = [record for record in held if record.status is Status.PENDING]
            await self._recovery.recover(waiting, f"{why}, and had not started it")
            if worker.begun.is_revoked:  # since an earlier look: so these will not begin
                await self._recovery.give_back(begun.idle, why)
            else:
                worker.begun.revoke()
