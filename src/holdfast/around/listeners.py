"""Listeners: user code that is called when an invocation reaches a stage, in the process that wrote the change.

The engine never waits for them. A subscriber of telemetry puts each event into a queue, and a thread with its own loop
calls the listeners, one after the other. A full queue drops events and logs that. Errors of listeners are logged. A
process that ends gives the listeners a moment to finish. Events that are left then, or when the process is killed, are
lost: use triggers for work that must happen.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from holdfast.around.rules import KINDS, STAGES, LifecycleEvent, lifecycle_events
from holdfast.errors import UsageError
from holdfast.executors.context import STEP
from holdfast.executors.loop import LoopThread
from holdfast.runtime.app_runtime import DeclaredTask
from holdfast.telemetry import Telemetry
from holdfast.telemetry import events as e

MAX_WAITING = 10_000
F = TypeVar("F", bound=Callable[..., Any])
END_SECONDS = 2.0


class _Listener(NamedTuple):
    function: Callable[[LifecycleEvent], Any]
    stages: frozenset[str]
    tasks: frozenset[str] | None  # None: all of the app


class Listeners:
    """The listeners of an app in this process. It subscribes to telemetry when the first one is declared."""

    def __init__(self, app: str, telemetry: Telemetry, tasks: Mapping[str, DeclaredTask]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._tasks = tasks
        self._listeners: list[_Listener] = []
        self._wanted: frozenset[str] = frozenset()
        self._begin()

    def _begin(self) -> None:
        """Begin without a thread and without events: also in a fork, which has neither the threads nor the locks."""
        self._pid = os.getpid()
        self._waiting: deque[LifecycleEvent] = deque()
        self._lock = threading.RLock()  # a signal handler may submit in the middle of it
        self._idle = threading.Condition(self._lock)
        self._thread: LoopThread | None = None
        self._is_calling = False
        self._dropped = 0

    def declaring(self, stages: Iterable[str], tasks: Iterable[str] | None = None) -> Callable[[F], F]:
        """Return a decorator that adds a function. Raises `UsageError` for stages that are none."""
        chosen = _checked(stages)

        def declare(function: F) -> F:
            self.add(function, chosen, tasks)
            return function

        return declare

    def add(
        self, function: Callable[[LifecycleEvent], Any], stages: Iterable[str], tasks: Iterable[str] | None = None
    ) -> None:
        """Call a function, plain or async, at these stages. Raises `UsageError`."""
        stages = _checked(stages)
        if not callable(function):
            raise UsageError(f"a listener is a function that takes a LifecycleEvent, not {function!r:.80}")
        is_first = not self._listeners
        chosen = None if tasks is None else frozenset(tasks)
        self._listeners.append(_Listener(function, stages or frozenset(STAGES), chosen))
        self._wanted |= self._listeners[-1].stages
        if is_first:
            self._telemetry.subscribe(_Subscription(self))

    # --- on whatever thread something happens

    def wants(self, kind: type[e.Event]) -> bool:
        return not self._wanted.isdisjoint(KINDS.get(kind, frozenset()))

    def take(self, event: e.Event) -> None:
        if not self.wants(type(event)):
            return
        reached = [each for each in lifecycle_events(event) if each.stage in self._wanted and self._is_ours(each)]
        if not reached:
            return
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            room = MAX_WAITING - len(self._waiting)
            self._waiting.extend(reached[:room])
            self._drop(len(reached) - room)
            if not self._is_calling:
                self._loop().call_soon_threadsafe(self._go_on)
                self._is_calling = True

    def _is_ours(self, reached: LifecycleEvent) -> bool:
        if reached.app != self._app or reached.task.startswith(STEP):
            return False
        task = self._tasks.get(reached.task)
        return task is None or not task.definition.is_hidden

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None or self._thread.is_broken:
            self._thread = LoopThread("holdfast-listeners", self._telemetry)
        return self._thread.loop

    def _drop(self, count: int) -> None:
        """Report the first event that does not fit, and from then on how many did not once there is room again."""
        if count > 0:
            if not self._dropped:
                self._telemetry.emit(e.ListenersBehind(f"{MAX_WAITING:,} events wait for them; more are dropped"))
            self._dropped += count

    # --- on the thread of the listeners

    def _go_on(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._call_all())

    async def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_calling = False
                    self._idle.notify_all()
                    return
                reached = self._waiting.popleft()
                dropped = self._dropped if not self._waiting else 0
                self._dropped -= dropped
            if dropped:
                self._telemetry.emit(e.ListenersBehind(f"{dropped:,} events were dropped"))
            for listener in tuple(self._listeners):
                if reached.stage in listener.stages and (listener.tasks is None or reached.task in listener.tasks):
                    await self._call(listener, reached)

    async def _call(self, listener: _Listener, reached: LifecycleEvent) -> None:
        try:
            answer = listener.function(reached)
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:  # its loop has to go on, and cancels nothing itself before the end
            name = getattr(listener.function, "__qualname__", repr(listener.function))
            why = f"{type(error).__name__}: {error}"
            self._telemetry.emit(e.ListenerFailed(name, reached.stage, reached.invocation_id, why, error))

    # --- the end

    def settle(self, seconds: float = END_SECONDS) -> bool:
        """Wait up to `seconds` until all events are delivered. Return whether they are. Not for use on the listeners'
        own thread.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return True
        if threading.current_thread() is thread.thread:
            return False
        with self._idle:
            return self._idle.wait_for(lambda: not self._is_calling, seconds)

    def finish(self, seconds: float = END_SECONDS) -> None:
        """Give the listeners a moment, and end their thread."""
        if not self.settle(seconds):
            self._telemetry.emit(e.ListenersBehind(f"the app ends, and {len(self._waiting) + 1:,} events may be lost"))
            return
        with self._lock:
            if self._is_calling or self._pid != os.getpid():  # something has happened since
                return
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.end(wait=False)


def _checked(stages: Iterable[str]) -> frozenset[str]:
    """Return the stages. Raises `UsageError` for an unknown stage."""
    chosen = frozenset(stages)
    for stage in chosen:
        if callable(stage):
            raise UsageError('listen() takes stages: write @app.listen("failed"), or @app.listen() for all of them')
        if stage not in STAGES:
            near = difflib.get_close_matches(str(stage), STAGES, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UsageError(f"listen({stage!r:.40}): there is no such stage.{hint} There are: {', '.join(STAGES)}.")
    return chosen


class _Subscription:
    """Take what the engine reports. It does not keep the listeners of an app that was forgotten."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = weakref.ref(listeners)

    def wants(self, kind: type[e.Event]) -> bool:
        listeners = self._listeners()
        return listeners is not None and listeners.wants(kind)

    def check_for(self, kind: type[e.Event]) -> Callable[[], bool] | None:
        return partial(self.wants, kind) if kind in KINDS else None

    def __call__(self, event: e.Event) -> None:
        if type(event) in KINDS and (listeners := self._listeners()) is not None:
            listeners.take(event)
