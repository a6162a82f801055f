"""How many calls of each queue a worker has ended of late.

Kept in memory, in portions of ten seconds, and told with each heartbeat: so a rate costs no write and no index, and is
known for as long as the worker lives.
"""

from __future__ import annotations

from collections import Counter, deque

from holdfast.lifecycle.queues import RATE_SECONDS

_PORTION_SECONDS = 10.0


class Throughput:
    def __init__(self) -> None:
        self._portions: deque[tuple[float, Counter[str]]] = deque()  # with the times when they began

    def current(self, now: float) -> Counter[str]:
        """To be counted up: what ends now, by queue."""
        if not self._portions or now - self._portions[-1][0] >= _PORTION_SECONDS:
            self._forget(now)
            self._portions.append((now, Counter()))
        return self._portions[-1][1]

    def lately(self, now: float) -> dict[str, int]:
        """How many have ended within `RATE_SECONDS`."""
        self._forget(now)
        return dict(sum((portion for _, portion in self._portions), Counter[str]()))

    def _forget(self, now: float) -> None:
        while self._portions and now - self._portions[0][0] > RATE_SECONDS:
            self._portions.popleft()
