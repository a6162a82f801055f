"""The only place where sync meets async.

The inside of Holdfast is asynchronous and runs on one loop in one thread per app. A blocking call sends a coroutine
there and waits; an awaited call on somebody else's loop sends it there and awaits; so no method is written twice. User
code never runs on this loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import BlockingCall, UsageError
from holdfast.execution.loop import LoopThread

T = TypeVar("T")


class Bridge:
    """A loop in a thread, and two ways to it."""

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and wait here. Short work only, if this thread runs a loop of its own."""
        if threading.current_thread() is self._thread.thread:
            work.close()
            raise UsageError("a blocking call from inside the engine would wait for itself for ever")
        future = self._send(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _closed_meanwhile() from None
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and await it here."""
        if asyncio.get_running_loop() is self._thread.loop:
            return await work
        future = self._send(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and future.cancelled():
                raise _closed_meanwhile() from None
            raise

    def _send(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        except RuntimeError:
            work.close()
            raise _closed_meanwhile() from None

    def call(self, function: Callable[[], None]) -> None:
        """Do it there soon, and do not wait: safe from signal handlers."""
        self._thread.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the loop. Calls that still wait get an error instead of waiting for ever."""
        self._closed = True
        self._thread.end()


def _closed_meanwhile() -> UsageError:
    return UsageError("the app was closed while this call was under way; whether it was carried out is not known")


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `BlockingCall` if this thread runs an event loop: a wait without end would stop everything on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCall(f"{call} would block the event loop that runs on this thread; use {instead}")
