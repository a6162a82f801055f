"""The only place where sync meets async.

The inside of Holdfast is asynchronous and runs on one loop in one thread per process: so apps on the same database
share a client and its connections. A blocking call sends a coroutine there and waits; an awaited call on somebody
else's loop sends it there and awaits; so no method is written twice. User code never runs on this loop.

An app that is closed frees those who wait for it, ends its engine, and leaves the others alone: what runs on the loop
is not only ours, since apps share a client, and that has tasks of its own. The thread ends with the last app.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from holdfast.errors import BlockingCall, StoreError, UsageError
from holdfast.execution.loop import LoopThread

T = TypeVar("T")


class Errand(Generic[T]):
    """Work for the loop, and what became of it. All but `outcome` happens on the loop.

    Whoever waits holds no lock that the loop might want, as one does at times with a future of the standard library: a
    signal handler may interrupt him anywhere, and close the app, and would then wait for a loop that waits for him.
    """

    def __init__(self, work: Coroutine[Any, Any, T], tell: Callable[[], object]) -> None:
        self._work = work
        self._tell = tell
        self._task: asyncio.Task[T] | None = None
        self._outcome: Callable[[], T] | None = None

    def start(self, ended: Callable[[Errand[Any]], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._finish)
        self._task.add_done_callback(lambda _: ended(self))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cut(self, refuse: Callable[[], Any] | None = None) -> None:
        """End it, and do not keep anybody waiting until it has ended: they get what `refuse` raises."""
        if self._task is None:
            self._work.close()
        if self._outcome is None:
            self._outcome = refuse or _raise_closed
            self._tell()
        self.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # somebody has looked at it, even if nobody waits any more
        if self._outcome is None:
            self._outcome = _raise_closed if task.cancelled() else task.result
            self._tell()

    def outcome(self) -> T:
        assert self._outcome is not None
        return self._outcome()


class Bridge:
    """Two ways to the loop, for one app."""

    def __init__(self) -> None:
        self._thread = _acquire()
        self._closed = False
        self._sending = threading.RLock()  # nothing is sent once it is closed; a signal handler may close it
        self._errands: set[Errand[Any]] = set()  # touched by the loop alone
        self._on_their_way: set[Errand[Any]] = set()  # on their way to it
        self._unwatch = self._thread.on_broken(self._broken)

    def _broken(self) -> None:
        """The loop will never turn again: free those who wait for it."""
        with self._sending:
            for errand in (*self._errands, *self._on_their_way):
                errand.cut(_raise_broken)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and wait here. Short work only, if this thread runs a loop of its own."""
        if threading.current_thread() is self._thread.thread:
            work.close()
            raise UsageError("a blocking call from inside the engine would wait for itself for ever")
        gate = threading.Lock()
        gate.acquire()
        errand = self._send(work, gate.release)
        try:
            gate.acquire()
        except BaseException:
            self._call(errand.cancel)
            raise
        return errand.outcome()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and await it here."""
        own = asyncio.get_running_loop()
        if own is self._thread.loop:
            return await work
        told = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                own.call_soon_threadsafe(told.set)

        errand = self._send(work, tell)
        try:
            await told.wait()
        except BaseException:
            self._call(errand.cancel)
            raise
        return errand.outcome()

    def _send(self, work: Coroutine[Any, Any, T], tell: Callable[[], object]) -> Errand[T]:
        errand = Errand(work, tell)
        with self._sending:
            self._on_their_way.add(errand)
            if not self._closed and not self._thread.is_broken and self._call(functools.partial(self._begin, errand)):
                return errand
            self._on_their_way.discard(errand)
        work.close()
        if self._thread.is_broken:
            _raise_broken()
        raise _closed_meanwhile()

    def _begin(self, errand: Errand[Any]) -> None:
        self._on_their_way.discard(errand)
        if self._closed:
            errand.cut()
        else:
            self._errands.add(errand)
            errand.start(self._errands.discard)

    def _call(self, function: Callable[[], None]) -> bool:
        try:
            self.call(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

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
        self._unwatch()
        if self._thread.is_broken:
            return _release()  # nothing can be ended there any more
        gate = threading.Lock()
        gate.acquire()
        ending = Errand(self._end(end), gate.release)
        self.call(functools.partial(ending.start, lambda _: None))
        try:
            if threading.current_thread() is not self._thread.thread:
                gate.acquire()
                ending.outcome()
        finally:
            _release()

    async def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for errand in tuple(self._errands):
            errand.cut()
        await asyncio.sleep(0)  # so that they are cancelled first
        await end()


# --- the thread that all bridges of a process lead to

_lock = threading.RLock()
_thread: LoopThread | None = None
_users = 0
_of_parents: list[LoopThread] = []


def _acquire() -> LoopThread:
    global _thread, _users
    with _lock:
        if _thread is None or _thread.is_broken:
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


def _raise_closed() -> Any:
    raise _closed_meanwhile()


def _raise_broken() -> Any:
    raise StoreError(
        "the event loop on which Holdfast works in this process is broken: code of this process closed a descriptor "
        "that was not its own, with os.close or os.closerange say. Whether this call was carried out is not known; "
        "restart the process"
    )


def _closed_meanwhile() -> UsageError:
    return UsageError("the app was closed while this call was under way; whether it was carried out is not known")


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `BlockingCall` if this thread runs an event loop: a wait without end would stop everything on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCall(f"{call} would block the event loop that runs on this thread; use {instead}")
