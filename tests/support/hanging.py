"""A test that hangs fails, says where, and the others go on. A run with several processes would else never end.

The signal of a timer raises in the main thread, which runs the test. Where that is of no use, `faulthandler_timeout` of
pytest ends the process: then its tests are given to another one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from types import FrameType

import pytest

SECONDS = int(os.environ.get("HOLDFAST_TEST_SECONDS", "600"))


def _give_up(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback()
    pytest.fail(f"it has not ended within {SECONDS} s: where all threads are is in the output")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
