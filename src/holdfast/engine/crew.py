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


class LocalCrew:
    """One worker in this process."""

    def __init__(self, make_worker: Callable[[str, Permit], Worker], now: Callable[[], float]) -> None:
        self._make_worker = make_worker
        self._now = now
        self._started_at = 0.0
        self._worker: Worker | None = None
        self._done: asyncio.Task[Account] | None = None

    def on_change(self, tell: Callable[[], None]) -> None:
        pass

    async def start(self, runner_id: str, permit: Permit) -> None:
        self._started_at = self._now()
        self._worker = self._make_worker(f"{runner_id}/0", permit)
        ready = asyncio.Event()
        self._done = asyncio.create_task(self._worker.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._done}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._done.done():
            self._done.result()

    def workers(self) -> Sequence[WorkerRecord]:
        running = 0 if self._worker is None else self._worker.running
        return [WorkerRecord(id="0", pid=os.getpid(), started_at=self._started_at, running=running)]

    async def wait(self) -> Account:
        assert self._done is not None
        return await self._done

    def stop(self, *, hurry: bool = False) -> None:
        if self._worker is not None:
            self._worker.stop(hurry=hurry)

    def fence(self) -> None:
        if self._worker is not None:
            self._worker.fence()

    def kill(self) -> None:
        pass
