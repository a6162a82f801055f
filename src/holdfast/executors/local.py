"""Where calls run: on a thread each, on their own loop, or right here.

Each executor takes calls in batches and gives outcomes back in batches: a finished call joins a batch, and
the engine's loop is woken once for the batch, however many calls finish meanwhile. With calls of a few microseconds,
waking the loop for each would be most of the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from inspect import CORO_CREATED, getcoroutinestate
from queue import SimpleQueue
from typing import Any

from holdfast.errors import SoftTimeout
from holdfast.executors.begun import BegunCalls
from holdfast.executors.call import (
    INTERRUPTED,
    NOT_BEGUN,
    Call,
    Crashed,
    Interrupted,
    Outcome,
    raised,
    run,
    run_coroutine,
)
from holdfast.executors.interrupts import BEGIN_SECONDS, SoftTimeoutInjector, Stopped, throw_into
from holdfast.executors.loop import LoopThread
from holdfast.telemetry import Telemetry

Deliver = Callable[[Sequence[tuple[str, Outcome]]], None]


class Executor(ABC):
    """Run calls of user code. `start` never blocks; outcomes arrive on the loop that made the executor, through the
    `Deliver` that it was given. Each call gets its outcome, also a call that has not begun.
    """

    @abstractmethod
    def start(self, calls: Iterable[Call]) -> None: ...

    @abstractmethod
    def interrupt(self, keys: Iterable[str]) -> None:
        """End these calls if that is possible; a plain thread cannot be ended and goes on."""

    @abstractmethod
    def cancel(self, keys: Iterable[str]) -> None:
        """Ask these to end. Coroutines get a CancelledError; what they make of it is their outcome. Plain functions
        learn it from their context only.
        """

    @abstractmethod
    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        """Raise `SoftTimeout` in these."""

    def force(self, keys: Iterable[str]) -> None:
        """End these with what there is: kill a process, cancel a coroutine, raise in a thread."""
        self.cancel(keys)

    def let_go(self, why: str) -> None:  # noqa: B027 - most calls can only run to their end
        """Hand calls over to other workers where that is possible before they end."""

    def make_room(self, more: int) -> None:  # noqa: B027 - coroutines need none
        """Change the number of calls that run at once: as many wait, with all that they hold."""

    def runs_on(self, key: str) -> bool:
        """Return whether the present thread is the one on which the function of this call runs."""
        return False

    def main_task_of(self, key: str) -> asyncio.Task[Any] | None:
        """Return the task in which the coroutine of this call runs. On the loop of that."""
        return None

    def is_blocked(self, key: str) -> bool:
        """Return whether the loop of this call does not turn: it has not even taken the request to end the call."""
        return False

    def close(self) -> None:  # noqa: B027 - nothing to close is a fine default
        """Take no more calls and let go of idle resources, without waiting for calls that still run."""


class OutcomeBatch:
    """Outcomes on their way to the engine's loop. Appending to a deque is atomic, so threads need no lock."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._outcomes: deque[tuple[str, Outcome]] = deque()
        self._announced = False

    def add(self, key: str, outcome: Outcome) -> None:
        """Add an outcome to the batch. `announce` has to follow soon."""
        self._outcomes.append((key, outcome))

    def collect(self, loop: asyncio.AbstractEventLoop, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Add outcomes of calls on this loop. They are announced one turn of it later: by then everything that ends in
        this turn is in the batch.
        """
        self._outcomes.extend(outcomes)
        loop.call_soon(self.announce)

    def announce(self) -> None:
        """Wake the engine's loop, unless it is on its way already or there is nothing to fetch."""
        if self._outcomes and not self._announced:
            self._announced = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return  # the engine is gone; its invocations are recovered by others

    def _empty(self) -> None:
        # Cleared before the batch is emptied: an outcome that comes too late for this visit announces itself again.
        self._announced = False
        taken = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        if taken:
            self._deliver(taken)


class ThreadExecutor(Executor):
    """Plain functions, on up to `size` threads.

    A batch wakes one thread. A thread that takes a call while more are waiting wakes the next thread before it runs the
    call. So blocking calls get a thread each. Short calls are all done by the first thread before the second gets the
    interpreter lock. Their outcomes are announced together: by the first thread when it is idle, or by the second when
    it starts, whichever is earlier. Threads start when they are first needed and are daemons: they cannot be ended, and
    must not keep a process alive.
    """

    def __init__(self, size: int, deliver: Deliver, begun: BegunCalls | None = None) -> None:
        self._size = size
        self._deliver = deliver
        self._begun = begun
        self._outcomes = OutcomeBatch(self._finished)
        self._calls: deque[Call] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # True: there are calls; False: go home
        self._coming = False  # a thread was woken and has not looked yet
        self._threads = 0
        self._busy = 0
        self._throwing = threading.Lock()  # nothing is thrown into a thread that has gone on to another call
        self._where: dict[str, int | None] = {}  # the thread of each call; None: it waits for one
        self._thrown: set[str] = set()
        self._late: set[str] = set()  # calls that wait, and whose soft timeout is over
        self._timers: dict[str, threading.Timer] = {}  # of such calls that have begun

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._where[call.key] = None
            self._busy += 1
            self._add_thread()
            self._calls.append(call)
        self._send_one()

    def _add_thread(self) -> None:
        if self._threads < min(self._busy, self._size):
            self._threads += 1
            threading.Thread(target=self._main, name=f"holdfast-executor-{self._threads}", daemon=True).start()

    def make_room(self, more: int) -> None:
        self.set_size(self._size + more)

    def runs_on(self, key: str) -> bool:
        return self._where.get(key) == threading.get_ident()

    def set_size(self, size: int) -> None:
        """Set the number of threads from now on. Running threads stay."""
        self._size = size
        self._add_thread()
        if self._calls:
            self._send_one()

    def _send_one(self) -> None:
        # The call is in the deque before this is read, and a woken thread clears it before it looks into the deque:
        # in whatever order the two happen, a thread sees the call.
        if not self._coming:
            self._coming = True
            self._wake.put(True)

    def _finished(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        self._busy -= len(outcomes)
        self._deliver(outcomes)

    def _main(self) -> None:
        thread = threading.get_ident()
        while self._wake.get():
            self._coming = False
            self._outcomes.announce()
            self._work(thread)

    def _work(self, thread: int) -> None:
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            if self._calls:
                self._send_one()
            outcome: Outcome | None = None
            try:
                if self._begun is not None and not self._begun.begin(call.mark, call.ticket):
                    outcome = NOT_BEGUN
                    self._late.discard(call.key)
                else:
                    self._where[call.key] = thread
                    if self._late:
                        self._strike_late(call.key)
                    outcome = run(call)
                    if self._begun is not None:
                        self._begun.over(call.mark)
                with self._throwing:
                    self._where.pop(call.key, None)
                    if self._timers:
                        self._timers.pop(call.key, None)
                if call.key in self._thrown:
                    self._catch(call.key, thread)
            except BaseException as error:  # it was thrown when user code was through with it
                self._catch(call.key, thread)
                outcome = outcome or raised(call, error)
            self._outcomes.add(call.key, outcome)
            if not self._coming or not self._calls:
                self._outcomes.announce()
            del call, outcome  # an idle thread must not keep the last call's values alive

    def _catch(self, key: str, thread: int) -> None:
        """Take back an exception that was thrown and has not been raised by now."""
        with self._throwing:
            self._where.pop(key, None)
            self._timers.pop(key, None)
            self._thrown.discard(key)
            throw_into(thread, None)

    def _throw(self, keys: Iterable[str], error: type[BaseException]) -> None:
        with self._throwing:
            for key in keys:
                if (thread := self._where.get(key)) is not None:
                    self._thrown.add(key)
                    throw_into(thread, error)

    def _drop(self, keys: Iterable[str], outcome: Interrupted) -> None:
        """Take back calls that no thread has begun."""
        wanted = set(keys)
        for call in [call for call in tuple(self._calls) if call.key in wanted]:
            with contextlib.suppress(ValueError):  # a thread was faster
                self._calls.remove(call)
                self._where.pop(call.key, None)
                self._late.discard(call.key)
                self._outcomes.add(call.key, outcome)
        self._outcomes.announce()

    def interrupt(self, keys: Iterable[str]) -> None:
        self._drop(keys, INTERRUPTED)

    def cancel(self, keys: Iterable[str]) -> None:
        self._drop(keys, NOT_BEGUN)

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._where.get(key, 0) is not None:
                self._throw([key], SoftTimeout)
                continue
            self._late.add(key)
            if self._where.get(key) is not None:  # a thread has taken it meanwhile, and may not have seen that
                self._strike_late(key)

    def _strike_late(self, key: str) -> None:
        """Raise the soft timeout of a call that was late to begin, once its code has had time to reach its `try`."""
        try:
            self._late.remove(key)
        except KeyError:
            return
        self._timers[key] = timer = threading.Timer(BEGIN_SECONDS, self._strike_begun, [key])
        timer.daemon = True
        timer.start()

    def _strike_begun(self, key: str) -> None:
        """Raise it, on the thread of the timer, if that is of this call: not of an earlier one with its key."""
        with self._throwing:
            if self._timers.get(key) is threading.current_thread() and (thread := self._where.get(key)) is not None:
                self._thrown.add(key)
                throw_into(thread, SoftTimeout)

    def force(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._drop(keys, NOT_BEGUN)
        self._throw(keys, Stopped)

    def close(self) -> None:
        for _ in range(self._threads):
            self._wake.put(False)


class InlineExecutor(Executor):
    """Run calls as tasks of the present loop, on which all of this happens: for core tasks, tests and the simulation.
    Without `takes_functions`, all of them are coroutine functions.

    A task that is cancelled before its first step never enters its coroutine, so no `finally` of that is reached:
    the canceller has to see to its outcome.
    """

    def __init__(self, deliver: Deliver, *, takes_functions: bool = True, begun: BegunCalls | None = None) -> None:
        self._deliver = deliver
        self._begun = begun
        self._takes_functions = takes_functions
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: set[str] = set()  # to end; what they make of it is their outcome
        self._injectors: dict[str, SoftTimeoutInjector] = {}

    def start(self, calls: Iterable[Call]) -> None:
        loop = asyncio.get_running_loop()
        for call in calls:
            self._tasks[call.key] = loop.create_task(self._run(call), name=call.key)

    async def _run(self, call: Call) -> None:
        outcome: Outcome = INTERRUPTED
        try:
            if self._begun is not None and not self._begun.begin(call.mark, call.ticket):
                outcome = NOT_BEGUN
                return
            injector = self._injector(call) if call.has_soft_timeout else None
            is_function = self._takes_functions and not asyncio.iscoroutinefunction(call.function)
            outcome = run(call) if is_function else await run_coroutine(call, injector)
            task = asyncio.current_task()
            if task is not None and task.cancelling() and call.key not in self._asked:
                outcome = INTERRUPTED
        finally:
            if self._begun is not None:
                self._begun.over(call.mark)
            self._ended(call.key, outcome)

    def _injector(self, call: Call) -> SoftTimeoutInjector:
        injector = self._injectors.setdefault(call.key, SoftTimeoutInjector())
        if injector.is_early and (task := asyncio.current_task()) is not None:
            injector.strike(task)
        return injector

    def _ended(self, key: str, outcome: Outcome) -> None:
        self._tasks.pop(key, None)
        if self._asked or self._injectors:
            self._asked.discard(key)
            self._injectors.pop(key, None)
        self._deliver([(key, outcome)])

    def interrupt(self, keys: Iterable[str]) -> None:
        self._cancel(keys, INTERRUPTED)

    def cancel(self, keys: Iterable[str]) -> None:
        self._cancel(keys, NOT_BEGUN)

    def _cancel(self, keys: Iterable[str], if_not_begun: Interrupted) -> None:
        for key in keys:
            if task := self._tasks.get(key):
                if not _has_begun(task):
                    self._tasks.pop(key)
                    # Not at once: the caller does not expect the outcome before it is through.
                    task.get_loop().call_soon(self._ended, key, if_not_begun)
                elif if_not_begun is NOT_BEGUN:
                    self._asked.add(key)
                task.cancel()

    def main_task_of(self, key: str) -> asyncio.Task[Any] | None:
        return self._tasks.get(key)

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None and not _has_begun(task):
                self._injectors.setdefault(key, SoftTimeoutInjector()).is_early = True
            elif task is not None and (injector := self._injectors.get(key)):
                injector.strike(task)

    def abandon(self) -> list[str]:
        """Forget the calls that run, and return their keys: their loop will never turn again."""
        keys = list(self._tasks)
        self._tasks.clear()
        return keys


def _has_begun(task: asyncio.Task[None]) -> bool:
    coroutine = task.get_coro()
    return not isinstance(coroutine, Coroutine) or getcoroutinestate(coroutine) != CORO_CREATED


class LoopExecutor(Executor):
    """Coroutine functions, all on one loop of their own. A coroutine that blocks hurts the others, never the engine."""

    def __init__(
        self,
        deliver: Deliver,
        telemetry: Telemetry,
        thread: LoopThread | None = None,
        begun: BegunCalls | None = None,
    ) -> None:
        self._outcomes = OutcomeBatch(deliver)
        self._own = thread is None
        self._thread = thread or LoopThread("holdfast-coroutines", telemetry)
        self._loop = self._thread.loop
        collect = functools.partial(self._outcomes.collect, self._loop)
        self._there = InlineExecutor(collect, takes_functions=False, begun=begun)  # used on that loop
        self._batches: deque[list[Call]] = deque()  # on their way to the loop
        self._undelivered: set[str] = set()  # calls whose end was requested, while the loop does not turn
        self._unwatch = self._thread.on_broken(self._broken)

    def start(self, calls: Iterable[Call]) -> None:
        self._batches.append(list(calls))
        if not self._call(self._spawn):
            self._broken()

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        """Have the loop do it. Return False if it is broken."""
        if self._thread.is_broken:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _broken(self) -> None:
        """Report the calls on the loop as crashed: it will never turn again."""
        waiting = [call.key for batch in self._batches for call in batch]
        self._batches.clear()
        for key in [*self._there.abandon(), *waiting]:
            self._outcomes.add(key, Crashed("the event loop on which it ran is broken"))
        self._outcomes.announce()

    def _spawn(self) -> None:
        self._there.start(self._batches.popleft())

    def interrupt(self, keys: Iterable[str]) -> None:
        self._call(self._there.interrupt, list(keys))

    def cancel(self, keys: Iterable[str]) -> None:
        self._call(self._there.cancel, list(keys))

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        self._call(self._there.raise_soft_timeout, list(keys))

    def force(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._undelivered.update(keys)
        self.cancel(keys)
        self._call(self._undelivered.difference_update, keys)

    def main_task_of(self, key: str) -> asyncio.Task[Any] | None:
        return self._there.main_task_of(key)

    def is_blocked(self, key: str) -> bool:
        return key in self._undelivered

    def close(self) -> None:
        self._unwatch()
        if self._own:
            self._thread.end(wait=False)
