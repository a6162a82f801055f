"""Exceptions that are thrown into user code from outside.

Into a coroutine, where it waits: asyncio does that for its own CancelledError, and `SoftTimeoutInjector` for ours.
Into a thread, when it next runs Python code: a thread in a system call or in C code goes on until that returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from holdfast.errors import SoftTimeout

BEGIN_SECONDS = 0.2  # for code to reach its own `try`, where a soft timeout is over before it begins


class Stopped(BaseException):
    """Thrown into a thread whose time is over. Not an `Exception`: code that handles those is not to survive it."""


def throw_into(thread: int, error: type[BaseException] | None) -> None:
    """Raise it in that thread, soon; None takes back what was not raised yet."""
    _set(thread, error)
    if sys.version_info < (3, 12) and (error is None or thread != threading.get_ident()):
        _lower_the_flag()


def _set(thread: int, error: type[BaseException] | None) -> None:
    thrown = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), thrown)


class _Nothing(BaseException):
    """Thrown into oneself, and caught at once."""


def _lower_the_flag() -> None:
    """Lower Python 3.11's flag that an exception was thrown into some thread.

    There is one flag for all threads, and it is lowered when the exception is raised: later, for a thread that sits in
    a system call, and never, for a thread that has ended, or whose exception was taken back. While it is up, a tracer
    or profiler anywhere in the process spins for ever, with the interpreter's lock. Raising an exception here lowers
    it. The other thread raises its own all the same: it looks for itself when it comes back for the lock.
    """
    try:
        _set(threading.get_ident(), _Nothing)
        _turn()
    except _Nothing:
        pass
    except BaseException:  # of a signal's handler, which goes first: the nothing is still to come
        with contextlib.suppress(_Nothing):
            _turn()
        raise


def _turn() -> None:
    for _ in range(2):  # what is thrown into a thread is raised at the latest where a loop turns
        pass


class SoftTimeoutInjector:
    """Await a coroutine, and raise `SoftTimeout` in it where it waits, on request.

    `is_early`: the request came before the first step of the coroutine, which is struck when it begins.
    """

    def __init__(self) -> None:
        self._struck = False
        self.is_early = False

    def strike(self, task: asyncio.Task[Any]) -> None:
        """Raise it in this task. On the loop of the task."""
        self._struck, self.is_early = True, False
        task.cancel()

    def awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return _driven(coroutine, self._thrown)

    def _thrown(self, error: BaseException) -> BaseException:
        """Return the exception that its code gets to see instead."""
        task = asyncio.current_task()
        if self._struck and isinstance(error, asyncio.CancelledError) and task is not None:
            self._struck = False
            if task.uncancel() == 0:  # else it was cancelled, too
                return SoftTimeout()
        return error


@types.coroutine
def _driven(
    coroutine: Coroutine[Any, Any, Any], thrown: Callable[[BaseException], BaseException]
) -> Generator[Any, Any, Any]:
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    while True:
        try:
            waiting = step(argument)
        except StopIteration as done:
            return done.value
        try:
            step, argument = coroutine.send, (yield waiting)
        except BaseException as error:
            step, argument = coroutine.throw, thrown(error)
