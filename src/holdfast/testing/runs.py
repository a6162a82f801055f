"""Workflows in a test: real owners of runs, on virtual time, whose steps run where the test waits.

A body lingers for no time: it is suspended and evicted at each wait, and replayed when it goes on. Timers of a run
follow the clock of the test. Only the time limits of user code (`timeout=` of a step) take real seconds, as those of
tasks do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from holdfast.executors.call import Call
from holdfast.executors.context import Context
from holdfast.executors.local import Deliver, Executor
from holdfast.model.records import InvocationRecord
from holdfast.runtime.definition import ExecutorKind
from holdfast.runtime.execute import MakeExecutor
from holdfast.workflows.executor import WorkflowExecutor
from holdfast.workflows.host import Host

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine
    from holdfast.runtime.worker import Worker

Around = Callable[[Call], Call]


class StageHost(Host):
    """Extend the host of runs: timers go by the test's clock, and steps go where the test waits."""

    def __init__(self, engine_side: WorkflowExecutor, loop: asyncio.AbstractEventLoop, *, is_here: bool) -> None:
        super().__init__(engine_side, loop, is_here=is_here)
        self.linger_seconds = 0.0
        self.make_step_executor: MakeExecutor | None = None
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Callable[[], None]]] = []

    def _executor(self, kind: ExecutorKind) -> Executor:
        if kind not in self._executors:
            assert self.make_step_executor is not None
            self._executors[kind] = self.make_step_executor(kind, self._on_outcomes)
        return self._executors[kind]

    def may_start(self) -> bool:
        """Return whether a step may begin: one after another, each when the body has got the end of the one before. So
        the order does not depend on the threads of the test.
        """
        return not self._step_runs and super().may_start()

    def call_later(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        if seconds <= 0:
            return super().call_later(0.0, function)
        handle = asyncio.TimerHandle(self.now() + seconds, function, (), self.loop)
        self._timers.append((self.now() + seconds, next(self._numbers), handle, function))
        return handle

    @property
    def next_due(self) -> float | None:
        """Return when the next timer is due."""
        self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
        return min((when for when, *_ in self._timers), default=None)

    def fire(self) -> None:
        """Call the timers that are due by the test's clock."""
        due = sorted(timer[:2] for timer in self._timers if timer[0] <= self.now())
        for key in due:
            for timer in [timer for timer in self._timers if timer[:2] == key]:
                self._timers.remove(timer)
                if not timer[2].cancelled():
                    timer[3]()


class StageRuns(WorkflowExecutor):
    """Extend the executor of runs: `around` wraps each body, `make_step_executor` runs the steps."""

    host_class = StageHost
    host: StageHost

    def __init__(
        self, engine: Engine, worker: Worker, deliver: Deliver, around: Around, make_step_executor: MakeExecutor
    ) -> None:
        super().__init__(engine, worker, deliver, None)
        self.host.make_step_executor = make_step_executor
        self._around = around

    def start(self, calls: Iterable[Call]) -> None:
        super().start([self._limited(self._around(call)) for call in calls])

    def _limited(self, call: Call) -> Call:
        record = call.about
        if isinstance(record, InvocationRecord) and record.cancellation is not None:
            self._limit(call.key, record.cancellation.until)
        return call

    def cancel(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for key in keys:
            record = self._worker.record_of(key)
            if record is not None and record.cancellation is not None:
                self._limit(key, record.cancellation.until)
        super().cancel(keys)

    def _limit(self, key: str, until: float) -> None:
        """End a run by the test's clock when the grace of its cancellation is over; the worker's timer is real."""
        self.host.call_later(max(1e-6, until - self.host.now()), lambda: self.force([key]))

    def let_go(self, why: str) -> None:
        """Do nothing: the worker of a test retires after its first call, and the run goes on until it waits or ends."""

    @property
    def is_idle(self) -> bool:
        """Return whether its runs only wait, in memory: those that compensate are not suspended."""
        return bool(self.host.runs) and all(run.is_idle and run.stays for run in self.host.runs)

    async def look(self) -> None:
        """Fire due timers, and have the runs look into their inboxes."""
        self.host.fire()
        await self._refresh(list(self._records))
        done = asyncio.get_running_loop().create_future()
        self.host.inbox.post(lambda: self.post(lambda: done.set_result(None)))
        await done


def step_of(call: Call) -> tuple[str, Context]:
    """Return the id of the call of a step (``charge#1``), and its context."""
    about: Any = call.about
    assert isinstance(about, Context)
    start = max(call.key.find(f"/{about.task}{mark}") for mark in "#@") + 1
    return call.key[start:].rpartition("/")[0], about
