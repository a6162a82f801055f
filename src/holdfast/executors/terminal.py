"""Outlive the terminal: what a process writes to a terminal that was closed goes nowhere, instead of being an error."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading

_OUTPUTS = (1, 2)


def outlive_the_terminal() -> None:
    """Watch the terminal of this process, if it has one, on a thread."""
    if terminals := [output for output in _OUTPUTS if os.isatty(output)]:
        threading.Thread(target=_watch, args=(terminals,), name="holdfast-terminal", daemon=True).start()


def _watch(terminals: list[int]) -> None:
    poll = select.poll()
    for terminal in terminals:
        poll.register(terminal, 0)  # a close is reported unasked
    for _ in terminals:
        for descriptor, _ in poll.poll():
            poll.unregister(descriptor)
            _silence(descriptor)


def let_go_of_a_closed_terminal() -> None:
    """Do the same at once: for a signal handler, which must not wait for a thread."""
    for output in _OUTPUTS:
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(output, 0)
            if poll.poll(0) and stat.S_ISCHR(os.fstat(output).st_mode):  # a pipe without a reader is another matter
                _silence(output)


def _silence(output: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, output)
        os.close(nowhere)
