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
import sys
import threading
import time
from typing import NoReturn

# How long a worker has to hand back what it holds. That this is the number of SIGQUIT is no accident: see below.
GRACE_SECONDS = int(signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def end_with_runner(stream: socket.socket) -> None:
    """From now on this process, and the programs in its group, end some seconds after the other end of the stream."""
    threading.Thread(target=_watch, args=(stream.dup(),), name="holdfast-lifeline", daemon=True).start()
    with contextlib.suppress(ImportError, OSError, AttributeError):
        _tell_the_kernel()


def _watch(stream: socket.socket) -> None:
    poll = select.poll()
    poll.register(stream, 0)  # the other end's close is told unasked, and nothing else is
    poll.poll()
    time.sleep(GRACE_SECONDS)
    end_group()


def end_group() -> NoReturn:
    """End this process, and the programs that its tasks have started: their runner may not be there to do it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _tell_the_kernel() -> None:
    """Have the kernel end us even if no line of Python runs any more, but not at once: coroutines are handed back.

    When the parent dies we get SIGQUIT, and what handles it is the C library's ``alarm``, which takes its argument, the
    number of the signal, for seconds. SIGALRM then ends the process.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGQUIT, ctypes.cast(library.alarm, ctypes.c_void_p))
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
