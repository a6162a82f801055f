"""Lifespans: user code around the life of a worker. It opens pools before the first task, and closes them after the
last.

All of it runs on the loop of user coroutines, so tasks can use the pools. It runs in one asyncio task, since a task
group, for instance, has to be left in the task that entered it. Plain functions block that loop for a moment; nothing
else runs there yet, or any more.

It is user code, so it may raise, hang, or find its loop blocked by a task that never ends. An error at the start ends
the worker. An error at the end is logged, and the worker ends all the same: its work is done and written.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from holdfast.errors import UsageError
from holdfast.executors.around import Middleware, Resources
from holdfast.executors.loop import LoopThread
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import HookFailed

ENTER_SECONDS = 300.0  # for all of the start: it may load a large model
LEAVE_ONE_SECONDS, LEAVE_SECONDS = 5.0, 10.0  # for one at the end, and for all of them
TURN_SECONDS = 2.0  # a loop that does not turn for so long at the end is blocked by a task


class Hooks:
    """Functions to call when a worker starts and stops, and contexts that span its life. True if there are any.

    `middleware` surrounds each call of a task, `of_tasks` has that of single ones by their names. `provided` are
    resources that no worker has to open.
    """

    def __init__(self) -> None:
        self.starts: list[Callable[[], Any]] = []
        self.stops: list[Callable[[], Any]] = []
        self.spans: list[Callable[[], Any]] = []
        self.middleware: list[Middleware] = []
        self.of_tasks: dict[str, list[Middleware]] = {}
        self.provided: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self.starts or self.stops or self.spans)

    def middleware_of(self, task: str) -> list[Middleware]:
        """Return what surrounds the calls of a task, from the outermost."""
        return [*self.middleware, *self.of_tasks.get(task, ())]

    def without_lives(self) -> Hooks:
        """Return the same middleware and provided resources, without what a worker has to open: for tests."""
        other = Hooks()
        other.middleware, other.of_tasks, other.provided = self.middleware, self.of_tasks, self.provided
        return other

    @contextlib.asynccontextmanager
    async def around(self, thread: LoopThread) -> AsyncIterator[Resources]:
        """Enter in the order of declaration, leave in the reverse order. Yield what the lifespans yield.

        What a start raises, this raises; `TimeoutError` if it takes too long.
        """
        life = _Life(self, thread.loop, thread.telemetry)
        try:
            yield await life.enter()
        finally:
            try:
                await life.leave()
            finally:
                thread.end(wait=False)

    async def enter(self, exits: ExitCallbacks, loop: asyncio.AbstractEventLoop | None = None) -> Resources:
        """Start the hooks on the present loop. Return what the lifespans yield."""
        resources = Resources(self.provided, loop)
        for span in self.spans:
            exits.at = name = f"the lifespan {_name(span)}"
            context = span()
            if hasattr(context, "__aenter__"):
                value = await context.__aenter__()
                exits.add(name, partial(context.__aexit__, None, None, None))
            elif hasattr(context, "__enter__"):
                value = context.__enter__()
                exits.add(name, partial(_left, context))
            else:
                raise UsageError(
                    f"{name} returned {context!r:.80}, which is no context manager: decorate it with @contextmanager "
                    "or @asynccontextmanager"
                )
            resources.add(span, value)
        for stop in self.stops:
            exits.add(f"the stop hook {_name(stop)}", partial(_call, stop))
        for start in self.starts:
            exits.at = f"the start hook {_name(start)}"
            await _call(start)
        return resources


class ExitCallbacks:
    """The callbacks for the end, one for each thing that was entered. `at` names the callback that runs now."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.at = "the start"
        self._exits: list[tuple[str, Callable[[], Awaitable[Any]]]] = []

    def add(self, name: str, leave: Callable[[], Awaitable[Any]]) -> None:
        self._exits.append((name, leave))

    async def leave(self) -> None:
        """Call them all, in the reverse order, whatever becomes of one."""
        while self._exits:
            self.at, leave = self._exits.pop()
            limit = asyncio.timeout(LEAVE_ONE_SECONDS)
            try:
                async with limit:
                    await leave()
            except BaseException as error:
                late = limit.expired()
                why = f"it was not done after {LEAVE_ONE_SECONDS:g} s" if late else "it failed at the worker's end"
                self.telemetry.emit(HookFailed(self.at, why, None if late else error))


class _Life:
    """One task on the loop of user coroutines, and its handle for the engine's loop, which never waits for ever."""

    def __init__(self, hooks: Hooks, loop: asyncio.AbstractEventLoop, telemetry: Telemetry) -> None:
        self._hooks = hooks
        self._loop = loop
        self._entered, self._leaving, self._ended = Future[Resources](), Future[None](), Future[None]()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._exits = ExitCallbacks(telemetry)

    # --- on the engine's loop

    async def enter(self) -> Resources:
        self._loop.call_soon_threadsafe(self._begin)
        if not await _done(self._entered, ENTER_SECONDS):
            raise TimeoutError(f"{self._exits.at} was not done after {ENTER_SECONDS:g} s")
        return self._entered.result()

    async def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._let_go)
        if not await _done(self._leaving, TURN_SECONDS):
            self._gave_up("the event loop is blocked, so nothing more is called there at the end")
        elif not await _done(self._ended, LEAVE_SECONDS):
            self._gave_up(f"it is not done after {LEAVE_SECONDS:g} s; the worker ends without it")

    def _gave_up(self, why: str) -> None:
        self._exits.telemetry.emit(HookFailed(self._exits.at, why))

    # --- on the loop of user coroutines

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._live())

    def _let_go(self) -> None:
        self._over.set()
        if self._task is not None and not self._entered.done():
            self._loop.call_soon(self._task.cancel)  # a stop does not wait for a start; only, let it have begun

    async def _live(self) -> None:
        try:
            self._entered.set_result(await self._hooks.enter(self._exits, self._loop))
            self._exits.at = "a task"
            await self._over.wait()
        except BaseException as error:
            if not self._entered.done() and not self._over.is_set():  # else no caller waits for it any more
                self._entered.set_exception(error)
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            self._leaving.set_result(None)
            await self._exits.leave()
            self._ended.set_result(None)


async def _call(function: Callable[[], Any]) -> None:
    answer = function()
    if inspect.isawaitable(answer):
        await answer


async def _left(context: contextlib.AbstractContextManager[Any]) -> None:
    context.__exit__(None, None, None)


def _name(function: Callable[[], Any]) -> str:
    return str(getattr(function, "__qualname__", function))


async def _done(future: Future[Any], seconds: float) -> bool:
    done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=seconds)
    return any(each.exception() or True for each in done)  # retrieved, or asyncio logs that it was not
