"""The workers of a runner, wherever they are: in this process, or in processes of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.engine.account import Account
from holdfast.engine.permit import Permit
from holdfast.engine.worker import Worker
from holdfast.lifecycle.records import WorkerRecord


class Crew(Protocol):
    """What a runner asks of its workers. It lives as long as the runner's entry on the roster."""

    def on_change(self, tell: Callable[[], None]) -> None:
        """Call this when a worker comes or goes."""
        ...

    async def start(self, runner_id: str, permit: Permit) -> None:
        """Begin to work as owners ``runner_id/…``; returns when at least one is ready."""
        ...

    def workers(self) -> Sequence[WorkerRecord]: ...

    async def wait(self) -> Account:
        """Until all of it has ended, after `stop` or `fence`, or by an error."""
        ...

    def stop(self, *, hurry: bool = False) -> None:
        """Take no more work, let what runs end within the drain timeout, and end; `hurry` ends it now."""
        ...

    def fence(self) -> None:
        """The work was given to others: end it, and write nothing."""
        ...

    def kill(self) -> None:
        """This process is about to end: see that none of its own outlives it. From any thread."""
        ...


class Working:
    """A worker that works, until it has ended. A stop does not wait for hooks that have yet to let it start."""

    def __init__(self, worker: Worker, ready: Callable[[], None], over: Callable[[], None] = lambda: None) -> None:
        self.worker = worker
        self._tell_ready = ready
        self._is_ready = False
        self.task = asyncio.create_task(worker.run(self._ready, over))

    def _ready(self) -> None:
        self._is_ready = True
        self._tell_ready()

    def stop(self, *, hurry: bool) -> None:
        self.worker.stop(hurry=hurry)
        if not self._is_ready:
            self.task.cancel()  # it has claimed nothing

    async def ended(self) -> Account:
        await asyncio.wait({self.task})
        return self.worker.account if self.task.cancelled() else self.task.result()


class LocalCrew:
    """One worker in this process."""

    def __init__(self, make_worker: Callable[[str, Permit], Worker], now: Callable[[], float]) -> None:
        self._make_worker = make_worker
        self._now = now
        self._started_at = 0.0
        self._working: Working | None = None

    def on_change(self, tell: Callable[[], None]) -> None:
        pass

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._started_at = self._now()
        ready = asyncio.Event()
        self._working = Working(self._make_worker(f"{runner_id}/0", permit), ready.set)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._working.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._working.task.done():
            await self._working.ended()

    def workers(self) -> Sequence[WorkerRecord]:
        worker = None if self._working is None else self._working.worker
        running, ended = (0, {}) if worker is None else (worker.running, worker.ended_lately())
        return [WorkerRecord(id="0", pid=os.getpid(), started_at=self._started_at, running=running, ended=ended)]

    async def wait(self) -> Account:
        assert self._working is not None
        return await self._working.ended()

    def stop(self, *, hurry: bool = False) -> None:
        if self._working is not None:
            self._working.stop(hurry=hurry)

    def fence(self) -> None:
        if self._working is not None:
            self._working.worker.fence()

    def kill(self) -> None:
        pass
