"""The server's time, carried by the monotonic clock of the host.

Due times are compared by many hosts, so they are all in the server's time. It is learnt from its answers, and carried
on by the clock that nobody can set and that counts suspension: a host whose wall clock is wrong, or is set while it
runs, stamps the right time all the same. The two clocks drift apart by some 10 ms in ten minutes, so the time is learnt
again that often; a runner learns it with every heartbeat.
"""

from __future__ import annotations

from holdfast.clock import Clock

_FRESH_SECONDS = 600.0


class ServerTime:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = clock.now() - clock.monotonic()  # of the monotonic clock
        self._learnt_at: float | None = None

    def now(self) -> float:
        return self._clock.monotonic() + self._ahead

    def learn(self, server: float, asked: float) -> None:
        """The server said so, some time between `asked` (monotonic) and now."""
        answered = self._clock.monotonic()
        self._ahead = server - (asked + answered) / 2
        self._learnt_at = answered

    def is_old(self) -> bool:
        return self._learnt_at is not None and self._clock.monotonic() - self._learnt_at > _FRESH_SECONDS
