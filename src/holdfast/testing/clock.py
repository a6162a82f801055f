"""A clock that stands still until it is told to move."""

from __future__ import annotations


class FakeClock:
    """See `holdfast.clock.Clock`. Both of its clocks move only by `advance`, and `set` is somebody setting the host's
    clock: the wall clock jumps and elapsed time does not.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._elapsed = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Let time pass. It cannot run backwards: to set the wall clock back, use `set`."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards ({seconds} s); to set the wall clock back, use set()")
        self._now += seconds
        self._elapsed += seconds

    def set(self, now: float) -> None:
        """Set the wall clock, forwards or back."""
        self._now = now
