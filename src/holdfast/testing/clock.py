"""A clock that a test moves."""

from __future__ import annotations


class FakeClock:
    """Implement `holdfast.clock.Clock` with time that moves only by `advance`.

    `set` changes the wall clock, as an operator may, and leaves elapsed time as it is.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._elapsed = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Move both clocks forwards. To set the wall clock back, use `set`."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards ({seconds} s); to set the wall clock back, use set()")
        self._now += seconds
        self._elapsed += seconds

    def set(self, now: float) -> None:
        """Set the wall clock, forwards or back."""
        self._now = now
