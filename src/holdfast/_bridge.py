"""The only place where sync meets async.

The inside of Holdfast is asynchronous and runs on one loop in one thread per process: so apps on the same database
share a client and its connections. A blocking call sends a coroutine there and waits; an awaited call on somebody
else's loop sends it there and awaits; so no method is written twice. User code never runs on this loop.

An app that is closed frees those who wait for it, ends its engine, and leaves the others alone: what runs on the loop
is not only ours, since apps share a client, and that has tasks of its own. The thread ends with the last app.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import BlockingCall, UsageError
from holdfast.execution.loop import LoopThread

T = TypeVar("T")


class Bridge:
    """Two ways to the loop, for one app."""

    def __init__(self) -> None:
        self._thread = _acquire()
        self._closed = False
        self._sending = threading.RLock()  # nothing is sent once it is closed; a signal handler may close it
        self._sent: set[concurrent.futures.Future[Any]] = set()

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
        with self._sending:
            try:
                if not self._closed:
                    self._sent.add(future := asyncio.run_coroutine_threadsafe(work, self._thread.loop))
                    future.add_done_callback(self._sent.discard)
                    self._cancel_if_closed(future)
                    return future
            except RuntimeError:  # and the loop with it
                pass
        work.close()
        raise _closed_meanwhile()

    def _cancel_if_closed(self, future: concurrent.futures.Future[Any]) -> None:
        if self._closed:  # by a signal handler, in between
            future.cancel()

    def call(self, function: Callable[[], None]) -> None:
        """Do it there soon, and do not wait: safe from signal handlers."""
        self._thread.loop.call_soon_threadsafe(function)

    def close(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """First free those who still wait: they get an error, and not what they would find in a house that is being
        torn down. Then do `end` there.
        """
        with self._sending:
            if self._closed:
                return
            self._closed = True
        for future in tuple(self._sent):
            future.cancel()
        ending = asyncio.run_coroutine_threadsafe(self._end(end), self._thread.loop)
        try:
            if threading.current_thread() is not self._thread.thread:
                ending.result()
        finally:
            _release()

    @staticmethod
    async def _end(end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(0)  # what was handed over a moment ago gets its task, so that it can be cancelled first
        await end()


# --- the thread that all bridges of a process lead to

_lock = threading.RLock()
_thread: LoopThread | None = None
_users = 0
_of_parents: list[LoopThread] = []


def _acquire() -> LoopThread:
    global _thread, _users
    with _lock:
        if _thread is None:
            _thread = LoopThread("holdfast-engine")
        _users += 1
        return _thread


def _release() -> None:
    global _thread, _users
    with _lock:
        _users -= 1
        ended = _thread if _users == 0 else None
        if ended is not None:
            _thread = None
    if ended is not None:
        ended.end()


def _forget() -> None:
    """A forked child has none of its parent's threads. What it has of their loop it must neither use nor let go of:
    that would close connections that are the parent's.
    """
    global _lock, _thread, _users
    if _thread is not None:
        _of_parents.append(_thread)
    _lock, _thread, _users = threading.RLock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _closed_meanwhile() -> UsageError:
    return UsageError("the app was closed while this call was under way; whether it was carried out is not known")


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `BlockingCall` if this thread runs an event loop: a wait without end would stop everything on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCall(f"{call} would block the event loop that runs on this thread; use {instead}")
