"""A loop that user code ends again and again is run again, ever more slowly. A broken one: runtime/test_bridge.py."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from tests.support.patience import patient

from holdfast.executors import loop as loops
from holdfast.executors.loop import LoopThread
from holdfast.telemetry.logs import logging_telemetry

PATIENCE_SECONDS = patient(20.0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause before another run is. None takes any time here."""
    taken: list[float] = []
    monkeypatch.setattr(loops, "time", SimpleNamespace(monotonic=time.monotonic, sleep=taken.append))
    return taken


def test_a_loop_that_is_stopped_is_run_again_ever_more_slowly(pauses: list[float]) -> None:
    thread = LoopThread("test-loop", logging_telemetry())
    for number in range(12):
        turned = threading.Event()
        thread.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(PATIENCE_SECONDS), f"it does not turn any more after {number} stops"
        thread.loop.call_soon_threadsafe(thread.loop.stop)
    again = threading.Event()
    thread.loop.call_soon_threadsafe(again.set)
    assert again.wait(PATIENCE_SECONDS)
    thread.end()
    assert pauses[:8] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1]
    assert not thread.is_broken
