"""Watches whether worker processes answer, and ends one that holds a call beyond its time.

A worker ends by itself what is past its time. It cannot while code holds the interpreter lock, or while the process
is stopped: then its runner does, by killing it, since there is nothing smaller that can be ended. A worker that does
not answer and holds nothing that is past its time is left alone: a computation may keep the interpreter for an hour.
It is told of, in the log once, on the roster and by `why`, and what it has claimed and not started goes back.

Silence is counted in looks, not by a clock. A look that comes late, because this process was stopped or the machine
slept, counts as one: while nobody listened, nobody was silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from holdfast.clock import Clock, format_duration
from holdfast.engine.outages import repeated
from holdfast.engine.recovery import Recovery
from holdfast.engine.stopping import STUBBORN_SECONDS
from holdfast.engine.worker_process import WorkerProcess
from holdfast.errors import StoreError
from holdfast.lifecycle.cancelling import must_end_by
from holdfast.lifecycle.status import Status

log = logging.getLogger("holdfast.runner")

START_SECONDS = 60.0  # for a worker that has yet to import its app and to enter its hooks
_LOOK_SECONDS = 1.0
_LOOKS = 10  # in the time after which a worker counts as unresponsive, at least
_SILENT_LOOKS = 3  # unanswered: only then is it asked whether a call is past its time


class Answering:
    """`now` is the store's time; `changed` is called when the roster should tell something new."""

    def __init__(
        self,
        recovery: Recovery,
        clock: Clock,
        now: Callable[[], float],
        workers: Callable[[], Sequence[WorkerProcess]],
        changed: Callable[[], None],
        *,
        unresponsive_seconds: float,
    ) -> None:
        self._recovery = recovery
        self._clock = clock
        self._now = now
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
                except Exception:
                    log.exception("while watching worker %s", worker.owner)

    async def look(self, worker: WorkerProcess, seconds: float) -> None:
        """Ask one worker, and do what its silence calls for. `seconds` have passed since the last look."""
        if worker.over.is_set() or worker.overdue:
            return
        silence = worker.ask(seconds)
        self._note(worker, silence)
        if silence < _SILENT_LOOKS * self._every or not worker.ready.is_set():
            return
        try:
            with repeated():
                await self._see_to(worker)
        except StoreError as error:
            log.debug("what worker %s holds is not known: %s", worker.owner, error)

    def _note(self, worker: WorkerProcess, silence: float) -> None:
        """Tell that it does not answer, once; and that it does again."""
        is_too_long = silence >= (self._unresponsive if worker.ready.is_set() else START_SECONDS)
        if is_too_long and worker.unresponsive_since is None:
            worker.unresponsive_since = self._now() - silence
            log.warning("worker %s (pid %d) has not answered for %.0f s", worker.owner, worker.pid, silence)
            self._changed()
        elif not silence and worker.unresponsive_since is not None:
            away = format_duration(round(max(0.0, self._now() - worker.unresponsive_since), 1))
            worker.unresponsive_since = None
            log.info("worker %s (pid %d) answers again, after %s", worker.owner, worker.pid, away)
            self._changed()

    async def _see_to(self, worker: WorkerProcess) -> None:
        held = await self._recovery.held_by(worker.owner)
        late = self._now() - STUBBORN_SECONDS - self._every
        overdue = [record for record in held if must_end_by(record) < late]
        if not worker.silence or worker.closed.is_set():
            return  # it has answered meanwhile, or is gone
        worker.count(sum(record.status is not Status.PENDING for record in held))
        if overdue:
            worker.overdue = {record.id: record.epoch for record in overdue}
            named = ", ".join(f"{record.task} {record.id}" for record in overdue[:3])
            why = f"it has not answered for {worker.silence:.0f} s while {named} was past its time"
            log.error("worker %s is killed: %s", worker.owner, why)
            worker.kill(why)
        elif worker.unresponsive_since is not None:
            why = f"its worker {worker.owner} has not answered for {worker.silence:.0f} s, and had not started it"
            await self._recovery.recover([record for record in held if record.status is Status.PENDING], why)
