"""The server's time, carried by the monotonic clock of the host.

Due times are compared by many hosts, so they are all in the server's time. It is learnt from its answers, and carried
on by the clock that nobody can set and that counts suspension: a host whose wall clock is wrong, or is set while it
runs, stamps the right time all the same.

An answer proves that the server's clock showed that time at some moment between question and answer; no more. So each
gives an interval for the difference of the two clocks, as wide as its round trip, and what all of them allow is where
the truth lies, as NTP has it: a slow answer says little and moves nothing. While time passes the interval grows by
as much as two clocks drift apart. An answer that contradicts it tells that the server's clock was set, or that another
server answers; then that answer alone is believed. The middle of the interval is the time, half its width the error.

A runner learns with every heartbeat. Others ask again when drift has made the error more than a few milliseconds.
"""

from __future__ import annotations

from holdfast.clock import Clock

DRIFT = 1e-4  # seconds per second, at most, by which two clocks drift apart; usually it is a tenth of that
_RESOLUTION_SECONDS = 0.001  # the server tells milliseconds, cut off
_FRESH_SECONDS = 30.0
_GOOD_SECONDS = 0.005


class ServerTime:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._low = self._high = clock.now() - clock.monotonic()  # how far it is ahead of the monotonic clock
        self._learnt_at: float | None = None

    def now(self) -> float:
        return self._clock.monotonic() + (self._low + self._high) / 2

    def error(self) -> float:
        """Return by how many seconds `now` may be off."""
        return (self._high - self._low) / 2 + self._drift()

    def learn(self, server: float, asked: float) -> None:
        """Take note that the server said so, at some time between `asked` (monotonic) and now."""
        answered = self._clock.monotonic()
        drift = (answered - asked) * DRIFT
        low, high = server - answered - drift, server + _RESOLUTION_SECONDS - asked + drift
        if self._learnt_at is not None:
            drift = self._drift()
            before, after = max(low, self._low - drift), min(high, self._high + drift)
            if before <= after:
                low, high = before, after
        self._low, self._high, self._learnt_at = low, high, answered

    def is_old(self) -> bool:
        """Return whether it is worth to ask for the time."""
        if self._learnt_at is None or self._clock.monotonic() - self._learnt_at < _FRESH_SECONDS:
            return False
        return self.error() > _GOOD_SECONDS

    def _drift(self) -> float:
        return 0.0 if self._learnt_at is None else (self._clock.monotonic() - self._learnt_at) * DRIFT
