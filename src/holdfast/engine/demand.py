"""What a worker knows about what waits for it, and so whether it is worth to look.

Hints say how many there may be; a claim that got all it asked for says that there may be more; one that got less, that
there is nothing until something falls due. What is heard while a claim is under way counts for the next one.
"""

from __future__ import annotations

from holdfast.engine.lanes import Ask
from holdfast.engine.pace import Pace
from holdfast.engine.turns import Turns
from holdfast.lifecycle.claims import Claimed

MANY = 1 << 30


class Demand:
    def __init__(self, poll_interval_seconds: float) -> None:
        self._pace = Pace(poll_interval_seconds)
        self.look = True
        self.expected = MANY  # how many invocations are waiting, as far as we were told
        self.slot_next = False  # what comes next in the queue needs a slot, and is not claimed ahead
        self._next_due: float | None = None

    def heard(self, count: int = MANY) -> None:
        """So many more may be waiting."""
        self.expected += count
        self.look = True

    def anything(self) -> None:
        """Nobody knows how many are waiting: look."""
        self.look, self.expected = True, MANY

    def taken(self) -> int:
        """A claim begins, which sees all that was heard of until now: how many that is."""
        expected, self.expected, self.look = self.expected, 0, False
        return expected

    def learn(self, turns: Turns, ask: Ask, claimed: Claimed, expected: int) -> None:
        """What a claim tells about the next one."""
        got, wanted = len(claimed.records), ask.most
        if claimed.cut:
            self.slot_next = True
            self.heard(expected - got)
        elif ask.turn is not None:  # of one queue nothing follows for the others
            turns.took(ask.turn, got)
            self.heard(max(1, expected - got))
        elif got < wanted:
            self._next_due = claimed.next_due_at
            turns.end()
        elif expected > wanted:
            self.heard(expected - wanted)  # there may be more; perhaps a place has to become free first
            turns.begin()
        else:
            turns.end()
        if got:
            self._pace.quicken()

    def pause(self, now: float, trust: int) -> float:
        """Seconds until it is worth to look unasked."""
        if self.look:
            return 0.0
        pause = self._pace.pause(trust=trust)
        return pause if self._next_due is None else min(pause, max(0.0, self._next_due - now))
