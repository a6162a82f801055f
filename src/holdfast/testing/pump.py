"""Run the user code of a test where the test waits for it.

A worker of a test hands its calls to a `Box`. The box belongs to the blocking (or awaited) call of the app that led to
that worker. The caller runs incoming work until it has its answer, on its own thread or its own loop. So a task sees
the connections, patches and context variables of the test, and one call runs at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

from holdfast.executors.call import INTERRUPTED, NOT_BEGUN, STOPPED, Call, Outcome, Raised, run, run_coroutine
from holdfast.executors.local import Deliver, Executor
from holdfast.model.retries import exception_name
from holdfast.runtime.app_runtime import Bridge, BridgedCall

T = TypeVar("T")


class Job(NamedTuple):
    """A piece of work for an engine, and where to report its outcome."""

    key: str
    work: Callable[[], Any]  # makes a coroutine if it `is_coroutine`
    is_coroutine: bool
    deliver: Callable[[Any], None]
    is_call: bool = True  # of a task, and no hook


class Box:
    """The work that an engine wants done by a caller that waits."""

    def __init__(self, coroutine_loop: CoroutineLoop) -> None:
        self._coroutine_loop = coroutine_loop
        self._jobs: deque[Job] = deque()
        self._answered = False
        self._news = threading.Condition()
        self._ring: Callable[[], None] = lambda: None
        self._running: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}
        self._asked: set[str] = set()  # to end; what they make of it is their outcome
        self._ended: set[str] = set()  # by the engine
        self.is_interrupted = (
            False  # by Ctrl-C or a cancellation: the running call goes back, and nothing more is begun
        )

    def put(self, job: Job) -> None:
        with self._news:
            self._jobs.append(job)
            self._news.notify_all()
            self._ring()

    def answer(self) -> None:
        """End the wait."""
        with self._news:
            self._answered = True
            self._news.notify_all()
            self._ring()

    def interrupt(self, keys: Iterable[str]) -> None:
        """End these calls where that is possible: coroutines. A function on the thread of a test cannot be ended."""
        for key in keys:
            self._ended.add(key)
            self._drop(key, NOT_BEGUN if key in self._asked else INTERRUPTED)
            if key in self._running:
                loop, task = self._running[key]
                loop.call_soon_threadsafe(task.cancel)

    def _drop(self, key: str, outcome: Outcome) -> None:
        """Take back a call that has not begun."""
        with self._news:
            waiting = [job for job in self._jobs if job.is_call and job.key == key]
            for job in waiting:
                self._jobs.remove(job)
        for job in waiting:
            job.deliver(outcome)

    def cancel(self, keys: Iterable[str]) -> None:
        """Ask these calls to end."""
        asked = list(keys)
        self._asked.update(asked)
        self.interrupt(asked)

    def pump(self) -> None:
        """Do incoming work on this thread until there is an answer."""
        while (job := self._next()) is not None:
            value = self._coroutine_loop.run(self._as_task(job)) if job.is_coroutine else job.work()
            if _is_ctrl_c(value) or (value is INTERRUPTED and job.key not in self._ended):  # a loop cancels for Ctrl-C
                self.is_interrupted, value = True, STOPPED
            job.deliver(value)

    def _next(self) -> Job | None:
        with self._news:
            while not self._jobs and not self._answered:
                self._news.wait()
            return self._jobs.popleft() if self._jobs else None

    async def apump(self) -> None:
        """Do incoming work on this loop; plain functions run on a thread, since they may block."""
        loop, rung = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(rung.set)

        with self._news:
            self._ring = ring
        with self._coroutine_loop.on(loop):
            try:
                await self._until_answered(rung)
            except asyncio.CancelledError:
                self.is_interrupted = True
                await self._until_answered(rung)  # the engine is soon done; who cancels once more does not wait for it
                raise

    async def _until_answered(self, rung: asyncio.Event) -> None:
        while self._jobs or not self._answered:
            rung.clear()
            while self._jobs:
                await self._do(self._jobs.popleft())
            if not self._answered:
                await rung.wait()

    async def _do(self, job: Job) -> None:
        value: Any = INTERRUPTED
        try:
            if not (self.is_interrupted and job.is_call):
                work = self._as_task(job) if job.is_coroutine else asyncio.to_thread(job.work)
                value = await _its_own(asyncio.create_task(work))
        finally:
            job.deliver(value)

    async def _as_task(self, job: Job) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running[job.key] = (asyncio.get_running_loop(), task)
        try:
            value = await job.work()
            return INTERRUPTED if task.cancelling() and job.key not in self._asked else value
        except asyncio.CancelledError:
            if not task.cancelling():
                raise
            return INTERRUPTED
        finally:
            del self._running[job.key]


def _is_ctrl_c(value: object) -> bool:
    return isinstance(value, Raised) and _CTRL_C in value.kinds


_CTRL_C = exception_name(KeyboardInterrupt)


async def _its_own(task: asyncio.Task[T]) -> T:
    """Await the task. A caller that is cancelled meanwhile cancels the task, too."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    return task.result()


class CoroutineLoop:
    """The loop for coroutines that a thread without a loop runs: the test's, if it is async and waits; otherwise one
    that lives as long as the test.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._loops: list[asyncio.AbstractEventLoop] = []

    @contextmanager
    def on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Allow work to run on this loop while it waits."""
        self._loops.append(loop)
        try:
            yield
        finally:
            self._loops.remove(loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loops:
            return asyncio.run_coroutine_threadsafe(work, self._loops[-1]).result()
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(work)

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:  # not on this thread, which may run a loop now
            closing = threading.Thread(target=runner.close)
            closing.start()
            closing.join()


BOX: ContextVar[Box] = ContextVar("BOX")


class PumpingBridge(Bridge):
    """Let a caller that waits do the engine's work meanwhile."""

    def __init__(self, coroutine_loop: CoroutineLoop, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._coroutine_loop = coroutine_loop
        self._before = before  # is called where a caller waits, ahead of the work

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread.thread:
            return super().run(work)
        box = Box(self._coroutine_loop)
        bridged = self._sent(work, box)
        try:
            box.pump()
        except BaseException:
            self._call(bridged.cancel)
            raise
        if box.is_interrupted:
            raise KeyboardInterrupt
        return bridged.outcome()

    def may_wait(self) -> bool:
        return False  # what is wanted meanwhile has to be done

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        if asyncio.get_running_loop() is self._thread.loop:
            return await work
        box = Box(self._coroutine_loop)
        bridged = self._sent(work, box)
        try:
            await box.apump()
        except BaseException:
            self._call(bridged.cancel)
            raise
        return bridged.outcome()

    def _sent(self, work: Coroutine[Any, Any, T], box: Box) -> BridgedCall[T]:
        self._before()
        token = BOX.set(box)  # what is sent takes the context along
        try:
            return self._send(work, box.answer)
        finally:
            BOX.reset(token)


class WaitingExecutor(Executor):
    """Implement `holdfast.executors.local.Executor`: every kind of task runs where a caller waits. `around` wraps each
    function.
    """

    def __init__(self, box: Box, deliver: Deliver, around: Callable[[Call], Call]) -> None:
        self._box = box
        self._deliver = deliver
        self._around = around
        self._loop = asyncio.get_running_loop()

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            is_coroutine = asyncio.iscoroutinefunction(call.function)
            runs = partial(run_coroutine if is_coroutine else run, self._around(call))
            self._box.put(Job(call.key, runs, is_coroutine, partial(self._end, call.key)))

    def _end(self, key: str, outcome: Outcome) -> None:
        self._loop.call_soon_threadsafe(self._deliver, [(key, outcome)])

    def interrupt(self, keys: Iterable[str]) -> None:
        self._box.interrupt(keys)

    def cancel(self, keys: Iterable[str]) -> None:
        self._box.cancel(keys)

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        """Do nothing: time stands still while a task runs."""
