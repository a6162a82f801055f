"""A worker does not outlive its runner, whatever its code does.

A worker whose runner is gone hands back what it can and ends by itself. That needs a loop that turns, hooks that end
and an interpreter that is free, none of which user code has to grant. So two others wait for the same event: a thread
that sees the end of the stream, and, for code that never lets go of the interpreter lock, the kernel (Linux only).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from typing import NoReturn

GRACE_SECONDS = 3  # for a worker to hand back what it holds
_PR_SET_PDEATHSIG = 1
_OUTPUTS = (1, 2)


def end_with_runner(stream: socket.socket) -> None:
    """From now on this process, and the programs in its group, end some seconds after the other end of the stream."""
    threading.Thread(target=_watch, args=(stream.dup(),), name="holdfast-lifeline", daemon=True).start()
    with contextlib.suppress(ImportError, OSError, AttributeError):
        _tell_the_kernel()


def _watch(stream: socket.socket | None) -> None:
    poll = select.poll()
    if stream is not None:
        poll.register(stream, 0)  # the other end's close is told unasked, and nothing else is
    terminals = [output for output in _OUTPUTS if os.isatty(output)]
    for terminal in terminals:
        poll.register(terminal, 0)
    while stream is not None or terminals:
        for descriptor, _ in poll.poll():
            if descriptor not in terminals:
                time.sleep(GRACE_SECONDS)
                end_group()
            poll.unregister(descriptor)
            terminals.remove(descriptor)
            _silence(descriptor)


def outlive_the_terminal() -> None:
    """From now on, what is written to a terminal that was closed goes nowhere, instead of being an error."""
    if any(os.isatty(output) for output in _OUTPUTS):
        threading.Thread(target=_watch, args=(None,), name="holdfast-terminal", daemon=True).start()


def let_go_of_a_closed_terminal() -> None:
    """The same, at once: for a signal handler, which must not wait for a thread."""
    for output in _OUTPUTS:
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(output, 0)
            if poll.poll(0) and stat.S_ISCHR(os.fstat(output).st_mode):  # a pipe that nobody reads is another matter
                _silence(output)


def _silence(output: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, output)
        os.close(nowhere)


def end_group() -> NoReturn:
    """End this process, and the programs that its tasks have started: their runner may not be there to do it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _tell_the_kernel() -> None:
    """Have the kernel end us even if no line of Python runs any more, but not at once: coroutines are handed back.

    When the parent dies we get SIGTRAP, and what handles it is the C library's ``alarm``, which takes its argument, the
    number of the signal, for seconds: five. SIGALRM then ends the process. (Not SIGQUIT, which would be three: a person
    or a process manager may send that, to have us drain.)
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGTRAP, ctypes.cast(library.alarm, ctypes.c_void_p))
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGTRAP)
