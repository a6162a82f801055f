"""Worker processes: started, permitted, watched and replaced by their runner, which runs no user code itself.

Each worker is a process of its own, with its own name as an owner, new for each process. When one dies, its runner
knows at once, by the end of the process, and takes back what it held; nobody waits for a heartbeat to be missed. A
worker gets its permit to start work only from a heartbeat that has put it on the roster, and loses it when the runner
cannot beat. A worker whose runner is gone sees the end of the stream, hands back what it can and ends itself.

Ending: first all are told to stop. Who still runs user code after the drain timeout ends its process, threads and all,
and the runner, which knows that the code is over, gives the work back; so it never runs in two places. A worker that
retires (it has done its share of tasks, or has grown too large) takes its time, and its successor starts beside it, as
long as there are not twice as many processes as workers: else tasks that take long would fill the machine with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.engine.account import Account
from holdfast.engine.answering import START_SECONDS, Answering
from holdfast.engine.ending import end_all
from holdfast.engine.messages import Orders
from holdfast.engine.permit import Permit
from holdfast.engine.recovery import Recovery
from holdfast.engine.worker_process import WorkerProcess
from holdfast.errors import StoreError, UsageError
from holdfast.lifecycle.records import RunnerRecord, WorkerRecord

log = logging.getLogger("holdfast.runner")

# A worker that dies before it is ready is replaced ever more slowly: its successor will hardly fare better.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
# One that was ready and dies before it has done anything likewise, but its work waits: within 2 s that goes on.
_LONGEST_PAUSE_OF_READY_SECONDS, _WELL_SECONDS = 1.0, 10.0
# For a worker that was told to end: beyond it, it is killed. It ends by itself sooner than that, even if the store is
# away and the ends of its work wait to be written.
_GRACE_SECONDS, _HURRIED_GRACE_SECONDS = 15.0, 5.0
_LEAVING_SECONDS = 15.0  # for one whose work is over: its hooks take less
_CLOSED_SECONDS = 1.0  # for the end of a process whose stream has ended: it usually follows at once
_PROCESSES_PER_WORKER = 2  # one that works, and one that has retired and is not done yet
_MEMORY_SECONDS = 1.0


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
        unresponsive_seconds: float = 10.0,
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
        self._answering = Answering(
            recovery,
            clock,
            now,
            lambda: list(self._alive.values()),
            lambda: self._changed(),
            unresponsive_seconds=unresponsive_seconds,
        )

    # --- what a runner asks for

    def on_change(self, tell: Callable[[], None]) -> None:
        self._changed = tell

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._runner_id = runner_id
        self._permit = permit
        permit.on_each_grant(self._pass_on)
        permit.on_pause(self._pass_on_pauses)
        first = asyncio.Event()
        self._keepers = [asyncio.create_task(self._keep_one(first)) for _ in range(self._count)]
        waiting = asyncio.create_task(first.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wait({waiting, *self._keepers}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.error("no worker was ready within %g s; still trying", START_SECONDS)
        finally:
            waiting.cancel()

    def workers(self) -> Sequence[WorkerRecord]:
        """Called for each heartbeat: who is told here may be permitted to work when that heartbeat was written."""
        self._on_roster = set(self._alive)
        return [worker.record for worker in self._alive.values()]

    async def wait(self) -> Account:
        watching = [asyncio.create_task(work) for work in (self._watch_memory(), self._answering.run())]
        try:
            await asyncio.gather(*self._keepers)
            await asyncio.gather(*self._retired)
        finally:
            await end_all(*watching)
        return self._account

    def stop(self, *, hurry: bool = False) -> None:
        self._hurry = self._hurry or hurry
        patience = _HURRIED_GRACE_SECONDS if hurry else self._drain + _GRACE_SECONDS
        self._kill_at = min(self._kill_at, self._clock.monotonic() + patience)
        self._stopping.set()
        for worker in self._alive.values():
            worker.stop(hurry=hurry)

    def fence(self) -> None:
        self._fenced = True
        self._kill_at = float("-inf")
        self._stopping.set()
        for worker in self._alive.values():
            worker.kill()

    def kill(self) -> None:
        self._fenced = True  # for one that is being started
        for worker in tuple(self._alive.values()):
            worker.kill()

    # --- keeping workers

    def _pass_on(self, until: float) -> None:
        for owner, worker in self._alive.items():
            if owner in self._on_roster and not self._fenced:
                worker.grant(until)
                crashpoint("worker.granted")

    def _pass_on_pauses(self, queues: frozenset[str]) -> None:
        for worker in self._alive.values():
            worker.pause(queues)

    async def _keep_one(self, first: asyncio.Event) -> None:
        """There is always one worker here, until it is time to stop."""
        pause = _FIRST_PAUSE_SECONDS
        while await self._may_start():
            began = self._clock.monotonic()
            worker = None
            try:
                worker = await self._spawn()
            except OSError as error:
                log.error("a worker process could not be started: %s", error, extra={"series": "no start"})
            if worker is not None and not await self._until_replaced(worker, first):
                continue
            longest = _LONGEST_PAUSE_SECONDS
            if worker is not None and worker.ready.is_set():
                longest = _LONGEST_PAUSE_OF_READY_SECONDS
                if worker.account.ended or self._clock.monotonic() - began > _WELL_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
                pause = min(pause, longest)
            elif not self._stopping.is_set():
                log.error("no worker was ready; the next one is started in %.1f s", pause)
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pause = min(pause * 2, longest)

    async def _may_start(self) -> bool:
        """Wait for room for one more process; each gives it back with its end. False: it is time to stop."""
        await self._room.acquire()
        if self._stopping.is_set():
            self._room.release()  # for the next who waits
            return False
        return True

    async def _spawn(self) -> WorkerProcess:
        self._numbers += 1
        owner = f"{self._runner_id}/{self._numbers}"
        orders = Orders(
            owner=owner,
            concurrency=self._record.concurrency,
            queues=self._record.queues,
            tags=self._record.tags,
            drain_timeout_seconds=self._drain,
            max_tasks=self._max_tasks,
            paused=self._paused,
            weights=self._record.weights,
        )
        try:
            worker = await WorkerProcess.start(self._command, orders, self._now())
        except BaseException:
            self._room.release()
            raise
        self._alive[owner] = worker
        if self._paused != orders.paused:  # they have changed while it was started
            worker.pause(frozenset(self._paused))
        self._changed()
        if self._fenced:
            worker.kill()
        elif self._stopping.is_set():
            worker.stop(hurry=self._hurry)
        return worker

    @property
    def _paused(self) -> tuple[str, ...]:
        return () if self._permit is None else tuple(sorted(self._permit.paused))

    async def _until_replaced(self, worker: WorkerProcess, first: asyncio.Event) -> bool:
        """Until it has ended, or has begun to retire. True: it died."""
        life = asyncio.create_task(self._see_through(worker))
        ready, retiring = asyncio.create_task(worker.ready.wait()), asyncio.create_task(worker.retiring.wait())
        try:
            await asyncio.wait({life, ready}, return_when=asyncio.FIRST_COMPLETED)
            if worker.ready.is_set():
                first.set()
            await asyncio.wait({life, retiring}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            retiring.cancel()
        if life.done():
            await life
            return not worker.ended_as_asked
        self._retired.add(life)
        life.add_done_callback(self._retired.discard)
        return False

    async def _see_through(self, worker: WorkerProcess) -> None:
        """One worker to its end, and beyond: what it still holds goes back."""
        try:
            await self._until_it_ends(worker)
        finally:
            await worker.close()
            self._alive.pop(worker.owner, None)
            self._on_roster.discard(worker.owner)
            self._room.release()
            self._changed()
        await self._take_stock(worker)

    async def _until_it_ends(self, worker: WorkerProcess) -> None:
        """It drains, and leaves its hooks, by itself; the rest is for one that does not."""
        ended = asyncio.create_task(worker.ended())
        turns = [asyncio.create_task(event.wait()) for event in (self._stopping, worker.over, worker.closed)]
        leaves_by = float("inf")
        try:
            await asyncio.wait({ended, *turns}, return_when=asyncio.FIRST_COMPLETED)
            while not ended.done() and (now := self._clock.monotonic()) < min(self._kill_at, leaves_by):
                if worker.over.is_set():
                    leaves_by = min(leaves_by, now + _LEAVING_SECONDS)
                elif worker.closed.is_set():  # and it has not said that it is done: nobody can tell what it does
                    await asyncio.wait({ended}, timeout=_CLOSED_SECONDS)
                    worker.kill("it closed its connection to its runner")
                await asyncio.wait({ended}, timeout=0.1)
        finally:
            for task in (ended, *turns):
                task.cancel()

    async def _take_stock(self, worker: WorkerProcess) -> None:
        """The process is over, so its code is: what it still holds goes back."""
        self._account.add(worker.account)
        if self._fenced:
            return
        asked = worker.ended_as_asked
        if not asked:
            self._account.deaths += 1
            log.error("worker %s died: %s", worker.owner, worker.exit, extra={"series": "deaths"})
        left = (worker.done.why if worker.done else "") or "its runner stopped before it was done"
        why = left if asked else f"its worker {worker.owner} died: {worker.exit}"
        # Its runner has ended it for one that was past its time, or it has itself: the others are not charged.
        for_another = bool(worker.overdue or (worker.done and worker.done.why))
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                crashpoint("takeback.before")
                taken = await self._recovery.of_owner(
                    worker.owner,
                    why,
                    ended=asked or for_another,
                    apart=worker.apart,
                    overdue=worker.overdue,
                    for_another=for_another,
                )
                crashpoint("takeback.after")
                self._account.interrupted += taken if asked else 0
                return
            except Exception as error:  # whatever it is: nobody else takes it back while this runner lives
                if not isinstance(error, StoreError):
                    log.exception("while taking back what worker %s held", worker.owner)
                if self._stopping.is_set() and pause > 1.0:
                    log.error("what worker %s held is left to recovery: %s", worker.owner, error)
                    return
                log.warning("what worker %s held was not taken back yet: %s", worker.owner, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _watch_memory(self) -> None:
        """A worker that has grown too large retires. One that has not worked yet will hardly get smaller by that."""
        while self._memory_limit is not None:
            await asyncio.sleep(_MEMORY_SECONDS)
            for worker in list(self._alive.values()):
                if worker.account.started and not worker.retiring.is_set():
                    size = await worker.resident_bytes()
                    if size > self._memory_limit:
                        log.warning("worker %s holds %.0f MB and is replaced", worker.owner, size / 2**20)
                        worker.retire()


def refuse_bad_numbers(workers: int, max_tasks: int | None, memory_limit_bytes: int | None) -> None:
    if not 0 <= workers <= 1_000:
        raise UsageError(f"workers={workers}: a runner has from 0 (none: it works itself) to 1,000 worker processes")
    if max_tasks is not None and max_tasks < 1:
        raise UsageError(f"max_tasks_per_worker={max_tasks}: expected a whole number from 1 on")
    if memory_limit_bytes is not None and memory_limit_bytes < 2**20:
        raise UsageError("the memory limit of a worker is at least 1 MB")
