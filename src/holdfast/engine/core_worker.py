"""The worker of a runner that runs core tasks, which recover the work of others: there is always one.

If it breaks (a defect, or an error that nobody expected), nobody else would notice: the runner goes on beating its
heart, and the services of the fleet go on firing tasks that nobody runs. So its successor takes its place, under the
same name, after a pause that grows; the audit of that name finds what was left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.engine.worker import Worker

log = logging.getLogger("holdfast.runner")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
_WELL_SECONDS = 60.0  # one that lived as long was well; the next pause is short again


class CoreWorker:
    """`make` makes a worker for core tasks."""

    def __init__(self, make: Callable[[], Worker], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._worker = make()
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` or `fence`."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            began = self._clock.monotonic()
            try:
                await self._worker.run()
                return
            except Exception:
                if self._ending.is_set():
                    log.exception("the worker for core tasks ended with an error")
                    return
                if self._clock.monotonic() - began > _WELL_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
                log.exception("the worker for core tasks broke; the next one is started in %.1f s", pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()
                    return
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            self._worker = self._make()

    def stop(self, *, hurry: bool = False) -> None:
        self._ending.set()
        self._worker.stop(hurry=hurry)

    def fence(self) -> None:
        self._ending.set()
        self._worker.fence()
