"""Where calls run: on a thread each, on a loop of their own, or right here.

Each kind of place takes calls in batches and gives outcomes back in batches: a finished call is put on a pile, and
the engine's loop is woken once for the pile, however many calls finish meanwhile. With calls of a few microseconds,
waking the loop for each would be most of the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from inspect import CORO_CREATED, getcoroutinestate
from queue import SimpleQueue
from typing import Protocol

from holdfast.errors import SoftTimeout
from holdfast.execution.call import (
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
from holdfast.execution.loop import LoopThread
from holdfast.execution.throwing import Softly, Stopped, throw_into

Deliver = Callable[[Sequence[tuple[str, Outcome]]], None]


class Execution(Protocol):
    """A kind of place.

    `start` never blocks; outcomes arrive on the loop that made it, through the `Deliver` it was given.
    """

    def start(self, calls: Iterable[Call]) -> None: ...

    def interrupt(self, keys: Iterable[str]) -> None:
        """End these calls if that is possible.

        Each still gets its outcome, also one that has not begun; a plain thread cannot be ended and goes on.
        """
        ...

    def cancel(self, keys: Iterable[str]) -> None:
        """Tell these that they are to end. Coroutines get a CancelledError; what they make of it is their outcome.
        Plain functions learn it from their context only.
        """
        ...

    def soften(self, keys: Iterable[str]) -> None:
        """Raise `SoftTimeout` in these."""
        ...

    def force(self, keys: Iterable[str]) -> None:
        """End these with what there is: kill a process, cancel a coroutine, raise in a thread."""
        ...

    def is_blocked(self, key: str) -> bool:
        """Whether the loop of this call does not turn: it was told to end the call, and has not even heard that."""
        ...

    def close(self) -> None:
        """Take no more calls and let go of idle resources, without waiting for calls that still run."""
        ...


class _Pile:
    """Outcomes on their way to the engine's loop. Appending to a deque is atomic, so threads need no lock."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._outcomes: deque[tuple[str, Outcome]] = deque()
        self._announced = False

    def add(self, key: str, outcome: Outcome) -> None:
        """Put it on the pile. Whoever adds has to see to it that `announce` is called soon."""
        self._outcomes.append((key, outcome))

    def announce(self) -> None:
        """Wake the engine's loop, unless it is on its way already or there is nothing to fetch."""
        if self._outcomes and not self._announced:
            self._announced = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return  # the engine is gone; its invocations are recovered by others

    def _empty(self) -> None:
        # Cleared before the pile is emptied: an outcome that comes too late for this visit announces itself again.
        self._announced = False
        taken = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        if taken:
            self._deliver(taken)


class ThreadPlaces:
    """Plain functions, on up to `size` threads.

    A batch wakes one thread. Whoever takes a call while more are waiting wakes the next thread before running it, so
    calls that block get a thread each, while a batch of short ones is done by the first thread before the second has
    even got hold of the interpreter; and its outcomes are announced together, by the first thread when it has no more
    to do or by the second when it comes, whichever is earlier. Threads start when they are first needed and are
    daemons: they cannot be ended, and must not keep a process alive.
    """

    def __init__(self, size: int, deliver: Deliver) -> None:
        self._size = size
        self._deliver = deliver
        self._pile = _Pile(self._finished)
        self._calls: deque[Call] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # True: there are calls; False: go home
        self._coming = False  # a thread was woken and has not looked yet
        self._threads = 0
        self._busy = 0
        self._throwing = threading.Lock()  # nothing is thrown into a thread that has gone on to another call
        self._where: dict[str, int] = {}  # the thread of each call
        self._thrown: set[str] = set()

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._busy += 1
            if self._threads < min(self._busy, self._size):
                self._threads += 1
                threading.Thread(target=self._main, name=f"holdfast-place-{self._threads}", daemon=True).start()
            self._calls.append(call)
        self._send_one()

    def _send_one(self) -> None:
        # The call is in the deque before this is read, and a woken thread clears it before it looks into the deque:
        # in whatever order the two happen, somebody sees the call.
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
            self._pile.announce()
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
                self._where[call.key] = thread
                outcome = run(call)
                with self._throwing:
                    del self._where[call.key]
                if call.key in self._thrown:
                    self._catch(call.key, thread)
            except BaseException as error:  # it was thrown when user code was through with it
                self._catch(call.key, thread)
                outcome = outcome or raised(call, error)
            self._pile.add(call.key, outcome)
            if not self._coming or not self._calls:
                self._pile.announce()
            del call, outcome  # an idle thread must not keep the last call's values alive

    def _catch(self, key: str, thread: int) -> None:
        """What was thrown, and has not been raised by now, is not to be."""
        with self._throwing:
            self._where.pop(key, None)
            self._thrown.discard(key)
            throw_into(thread, None)

    def _throw(self, keys: Iterable[str], error: type[BaseException]) -> None:
        with self._throwing:
            for key in keys:
                if (thread := self._where.get(key)) is not None:
                    self._thrown.add(key)
                    throw_into(thread, error)

    def _drop(self, keys: Iterable[str], outcome: Interrupted) -> None:
        """Take back those that no thread has begun with: they shall not begin any more."""
        wanted = set(keys)
        for call in [call for call in tuple(self._calls) if call.key in wanted]:
            with contextlib.suppress(ValueError):  # a thread was faster
                self._calls.remove(call)
                self._pile.add(call.key, outcome)
        self._pile.announce()

    def interrupt(self, keys: Iterable[str]) -> None:
        self._drop(keys, INTERRUPTED)

    def cancel(self, keys: Iterable[str]) -> None:
        self._drop(keys, NOT_BEGUN)

    def soften(self, keys: Iterable[str]) -> None:
        self._throw(keys, SoftTimeout)

    def force(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._drop(keys, NOT_BEGUN)
        self._throw(keys, Stopped)

    def is_blocked(self, key: str) -> bool:
        return False

    def close(self) -> None:
        for _ in range(self._threads):
            self._wake.put(False)


class _Coroutines:
    """Calls as tasks of one loop, on which all of this happens.

    A task that is cancelled before its first step never enters its coroutine, so no `finally` of that is reached:
    whoever cancels it has to see to its outcome.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: set[str] = set()  # to end; what they make of it is their outcome
        self._soft: dict[str, Softly] = {}

    def _ended(self, key: str, outcome: Outcome) -> None:
        """Let go of a call and pass its outcome on."""
        raise NotImplementedError

    def _softly(self, call: Call) -> Softly:
        softly = self._soft.setdefault(call.key, Softly())
        if softly.is_early and (task := asyncio.current_task()) is not None:
            softly.strike(task)
        return softly

    def _left(self, key: str) -> None:
        self._asked.discard(key)
        self._soft.pop(key, None)

    def _cancel(self, keys: Iterable[str], *, asked: bool = False) -> None:
        for key in keys:
            if task := self._tasks.get(key):
                if not _has_begun(task):
                    self._tasks.pop(key)
                    # Not at once: whoever cancels does not expect the outcome before he is through.
                    task.get_loop().call_soon(self._ended, key, NOT_BEGUN if asked else INTERRUPTED)
                elif asked:
                    self._asked.add(key)
                task.cancel()

    def _ask(self, keys: Iterable[str]) -> None:
        self._cancel(keys, asked=True)

    def _soften(self, keys: Iterable[str]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None and not _has_begun(task):
                self._soft.setdefault(key, Softly()).is_early = True
            elif task is not None and (softly := self._soft.get(key)):
                softly.strike(task)


def _has_begun(task: asyncio.Task[None]) -> bool:
    coroutine = task.get_coro()
    return not isinstance(coroutine, Coroutine) or getcoroutinestate(coroutine) != CORO_CREATED


class LoopPlaces(_Coroutines):
    """Coroutine functions, all on one loop of their own.

    A coroutine that blocks hurts its sisters, but never the engine.
    """

    def __init__(self, deliver: Deliver, thread: LoopThread | None = None) -> None:
        super().__init__()
        self._pile = _Pile(deliver)
        self._own = thread is None
        self._thread = thread or LoopThread("holdfast-coroutines")
        self._loop = self._thread.loop
        self._batches: deque[list[Call]] = deque()  # on their way to the loop
        self._unheard: set[str] = set()  # of those that were told to end, since the loop does not turn
        self._unwatch = self._thread.on_broken(self._broken)

    def start(self, calls: Iterable[Call]) -> None:
        self._batches.append(list(calls))
        if not self._call(self._spawn):
            self._broken()

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        """Have the loop do it. False: it is broken."""
        if self._thread.is_broken:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _broken(self) -> None:
        """The loop will never turn again, so what is on it has crashed."""
        waiting = [call.key for batch in self._batches for call in batch]
        self._batches.clear()
        for key in [*self._tasks, *waiting]:
            self._pile.add(key, Crashed("the event loop on which it ran is broken"))
        self._tasks.clear()
        self._pile.announce()

    def _spawn(self) -> None:
        for call in self._batches.popleft():
            self._tasks[call.key] = self._loop.create_task(self._run(call), name=call.key)

    async def _run(self, call: Call) -> None:
        outcome: Outcome = INTERRUPTED
        try:
            outcome = await run_coroutine(call, self._softly(call) if call.softly else None)
            task = asyncio.current_task()
            if task is not None and task.cancelling() and call.key not in self._asked:
                outcome = INTERRUPTED
        finally:
            self._ended(call.key, outcome)

    def _ended(self, key: str, outcome: Outcome) -> None:
        self._tasks.pop(key, None)
        if self._asked or self._soft:
            self._left(key)
        self._pile.add(key, outcome)
        # One turn of the loop later: by then everything that ends in this turn is on the pile.
        self._loop.call_soon(self._pile.announce)

    def interrupt(self, keys: Iterable[str]) -> None:
        self._call(self._cancel, list(keys))

    def cancel(self, keys: Iterable[str]) -> None:
        self._call(self._ask, list(keys))

    def soften(self, keys: Iterable[str]) -> None:
        self._call(self._soften, list(keys))

    def force(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._unheard.update(keys)
        self.cancel(keys)
        self._call(self._unheard.difference_update, keys)

    def is_blocked(self, key: str) -> bool:
        return key in self._unheard

    def close(self) -> None:
        self._unwatch()
        if self._own:
            self._thread.end(wait=False)


class InlinePlaces(_Coroutines):
    """Everything on the engine's own loop:

    for tests and the simulation, where there is one thread and time is not real.
    """

    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            task = asyncio.get_running_loop().create_task(self._run(call), name=call.key)
            self._tasks[call.key] = task

    async def _run(self, call: Call) -> None:
        outcome: Outcome = INTERRUPTED
        try:
            is_coroutine = asyncio.iscoroutinefunction(call.function)
            softly = self._softly(call) if call.softly else None
            outcome = await run_coroutine(call, softly) if is_coroutine else run(call)
            task = asyncio.current_task()
            if task is not None and task.cancelling() and call.key not in self._asked:
                outcome = INTERRUPTED
        finally:
            self._ended(call.key, outcome)

    def _ended(self, key: str, outcome: Outcome) -> None:
        self._tasks.pop(key, None)
        self._left(key)
        self._deliver([(key, outcome)])

    def interrupt(self, keys: Iterable[str]) -> None:
        self._cancel(keys)

    def cancel(self, keys: Iterable[str]) -> None:
        self._ask(keys)

    def soften(self, keys: Iterable[str]) -> None:
        self._soften(keys)

    force = cancel

    def is_blocked(self, key: str) -> bool:
        return False

    def close(self) -> None:
        pass
