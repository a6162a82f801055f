"""Exceptions that are thrown into threads: they arrive, and leave nothing behind that others stumble over."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast.executors.interrupts import Stopped, throw_into

_PROFILED = """
import sys, threading
from holdfast.executors.interrupts import Stopped, throw_into

lock = threading.Lock()
lock.acquire()
waiting = threading.Thread(target=lock.acquire, daemon=True)
waiting.start()
throw_into(waiting.ident, Stopped)
{then}
seen = []
sys.setprofile(lambda frame, event, argument: seen.append(event))
(lambda: None)()
sys.setprofile(None)
assert "call" in seen
"""


@pytest.mark.parametrize(
    "then",
    [
        "",
        "throw_into(waiting.ident, None)",
        "lock.release(); waiting.join()",
        "throw_into(threading.get_ident(), None)",
    ],
)
def test_a_profiler_goes_on_beside_a_thread_that_has_not_heard_yet(then: str) -> None:
    """Apart, since it would hang this interpreter."""
    told = subprocess.run(
        [sys.executable, "-c", _PROFILED.format(then=then)],
        capture_output=True,
        text=True,
        timeout=patient(20),
        check=False,
    )
    assert told.returncode == 0, told.stderr


def test_one_that_sits_in_a_call_hears_of_it_when_that_returns() -> None:
    lock, heard = threading.Lock(), list[Any]()
    lock.acquire()

    def wait() -> None:
        try:
            lock.acquire()
            for _ in range(10**9):
                pass
        except Stopped as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(3):
        throw_into(thread.ident or 0, Stopped)
    lock.release()
    thread.join(20)
    assert len(heard) == 1


def test_one_that_runs_hears_of_it() -> None:
    runs, heard = threading.Event(), threading.Event()

    def run() -> None:
        try:
            while True:
                runs.set()
        except Stopped:
            heard.set()

    thread = threading.Thread(target=run)
    thread.start()
    runs.wait(20)
    throw_into(thread.ident or 0, Stopped)
    assert heard.wait(20)
    thread.join(20)
