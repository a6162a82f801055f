"""A loop that user code ends again and again is run again, ever more slowly. A broken one: runtime/test_bridge.py."""

from __future__ import annotations

import asyncio
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


def test_an_end_that_is_asked_for_during_a_pause_cancels_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pausing, go_on, cancelled = threading.Event(), threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        pausing.set()
        assert go_on.wait(PATIENCE_SECONDS)

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cancelled.set()

    monkeypatch.setattr(loops, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    thread = LoopThread("test-loop", logging_telemetry())
    asyncio.run_coroutine_threadsafe(linger(), thread.loop)
    thread.loop.call_soon_threadsafe(thread.loop.stop)
    assert pausing.wait(PATIENCE_SECONDS)
    thread.end(wait=False)
    go_on.set()
    thread.thread.join(PATIENCE_SECONDS)
    assert (cancelled.is_set(), thread.loop.is_closed(), thread.is_broken) == (True, True, False)
