"""The server's time, carried by the monotonic clock of the host.

Many hosts compare due times, so all of them are in the server's time. It is learnt from the server's answers and
carried on by the monotonic clock, which counts suspension and cannot be set: a host with a wrong wall clock stamps the
right time all the same.

An answer proves only that the server's clock showed its time at some moment between question and answer. So each answer
gives an interval for the difference of the two clocks, as wide as its round trip, and the truth lies where all
intervals overlap, as in NTP: a slow answer says little and moves nothing. The interval grows by the drift of two
clocks. An answer that contradicts it shows that the server's clock was set, or that another server answers; then that
answer alone counts. The middle of the interval is the time, half its width the error.

A runner learns with every heartbeat. Other processes ask again when drift has made the error more than a few
milliseconds.
"""

from __future__ import annotations

from holdfast.clock import Clock

DRIFT = 1e-4  # seconds per second, at most, by which two clocks drift apart; usually it is a tenth of that
_RESOLUTION_SECONDS = 0.001  # the server reports whole milliseconds, rounded down
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
        """Learn the server's time at some moment between `asked` (monotonic) and now."""
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
