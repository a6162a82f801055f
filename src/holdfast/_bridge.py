"""The only place where sync meets async.

The inside of Holdfast is asynchronous and runs on one loop in one thread per app. A blocking call sends a coroutine
there and waits; an awaited call on somebody else's loop sends it there and awaits; so no method is written twice.
User code never runs on this loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import BlockingCall, UsageError

T = TypeVar("T")


class Bridge:
    """A loop in a thread, and two ways to it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and wait here. Short work only, if this thread runs a loop of its own."""
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a blocking call from inside the engine would wait for itself for ever")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and await it here."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: Callable[[], None]) -> None:
        """Do it there soon, and do not wait: safe from signal handlers."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `BlockingCall` if this thread runs an event loop: a wait without end would stop everything on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCall(f"{call} would block the event loop that runs on this thread; use {instead}")
