"""How often those who wait look by themselves.

Where hints arrive reliably (a change stream is open), a look is only a safety net, and an idle fleet should cost the
database next to nothing. Where none arrive from other processes, looking is all there is: often while something
happens, and ever more seldom while nothing does, down to once per polling interval.
"""

from __future__ import annotations

from holdfast.wakeup.fallback import look_after

QUICKEST_SECONDS = 0.02
_SLOWER = 1.3


class Pace:
    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._pause = interval_seconds

    def quicken(self) -> None:
        """Something happened, so something may happen again soon."""
        self._pause = min(QUICKEST_SECONDS, self._interval)

    def pause(self, *, trust: int) -> float:
        """Seconds until the next look, if hints can be relied on for `trust` polling intervals."""
        if trust:
            return look_after(self._interval * trust)
        pause, self._pause = self._pause, min(self._pause * _SLOWER, self._interval)
        return look_after(pause)
