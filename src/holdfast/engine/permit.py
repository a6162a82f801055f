"""Whether work may be started: as long as the runner has proof that it counts as alive.

A runner that cannot write its heartbeat may be dead in the eyes of the others, who then give its work away. So it stops
starting work when two thirds of the dead-after time have passed since the last heartbeat that was written, by a clock
that counts suspension. What runs goes on: if it was taken, its end is refused.

Work of a queue that is paused is not started either, whatever the time.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.clock import Clock


class Permit:
    """Starting is allowed until a moment, by the monotonic clock, except for what lies in queues that are paused."""

    paused: frozenset[str] = frozenset()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._told: list[Callable[[], None]] = []
        self._each: list[Callable[[float], None]] = []
        self._on_pause: list[Callable[[frozenset[str]], None]] = []

    def grant(self, until: float) -> None:
        held = self.holds()
        self._until = max(self._until, until)
        for pass_on in self._each:
            pass_on(self._until)
        if not held and self.holds():
            for tell in self._told:
                tell()

    def pause(self, queues: frozenset[str]) -> None:
        """From now on these queues are paused, and no others."""
        if queues != self.paused:
            self.paused = queues
            for tell in self._on_pause:
                tell(queues)

    def on_pause(self, tell: Callable[[frozenset[str]], None]) -> None:
        """Call this with the queues that are paused, whenever they are others than before."""
        self._on_pause.append(tell)

    def holds(self) -> bool:
        return self._clock.monotonic() < self._until

    def on_grant(self, tell: Callable[[], None]) -> None:
        """Call this when starting is allowed again."""
        self._told.append(tell)

    def on_each_grant(self, pass_on: Callable[[float], None]) -> None:
        """Call this with the moment of each grant."""
        self._each.append(pass_on)


class Unlimited(Permit):
    """For a worker that nobody could mistake for dead: in tests, and on a store of its own."""

    def __init__(self) -> None:
        pass

    def grant(self, until: float) -> None:
        pass

    def holds(self) -> bool:
        return True

    def on_grant(self, tell: Callable[[], None]) -> None:
        pass

    def on_pause(self, tell: Callable[[frozenset[str]], None]) -> None:
        pass
