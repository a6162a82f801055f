"""What a worker knows about what waits for it, and so whether it is worth to look.

Hints say how many there may be; a claim that got less than it asked for says that there is nothing until something
falls due. A claim that got all it asked for proves nothing: a submitter that died before its hint leaves work that
nobody counted, and the claim may have got that instead of what the hint announced. So a full claim always looks again:
at once if more was announced, else after a second without another claim, and after two in any case. So a lone task
costs no look of its own, and many of them share one.

Looks are due by a clock that nobody sets, and counted from the last look that found less than it asked for: neither
outcomes nor hints nor a clock that is set back put them off. What is heard while a claim is under way counts for the
next one.
"""

from __future__ import annotations

from holdfast.engine.lanes import Ask
from holdfast.engine.pace import Pace
from holdfast.engine.turns import Turns
from holdfast.lifecycle.claims import Claimed

MANY = 1 << 30
DOUBT_SECONDS = 1.0  # after a claim that got exactly what was announced
MOST_DOUBT_SECONDS = 2.0  # after the first of several


class Demand:
    """`elapsed` is the loop's time, `now` the store's."""

    def __init__(self, poll_interval_seconds: float, *, doubts: bool = True) -> None:
        self._doubts = doubts
        self._pace = Pace(poll_interval_seconds)
        self.look = True
        self.expected = MANY  # how many invocations are waiting, as far as we were told
        self.slot_next = False  # what comes next in the queue needs a slot, and is not claimed ahead
        self._next_due: float | None = None
        self._found_all_at = float("-inf")  # when a claim last got less than it asked for
        self._in_doubt: tuple[float, float] | None = None  # the first and the last claim after that, which were full
        self._pause: tuple[int, float] | None = None  # until the next look, and with which trust

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

    def learn(self, turns: Turns, ask: Ask, claimed: Claimed, expected: int, elapsed: float) -> None:
        """What a claim tells about the next one."""
        got, wanted = len(claimed.records), ask.most
        if claimed.cut:
            self.slot_next = True
            self.heard(max(1, expected - got))
        elif ask.turn is not None:  # of one queue nothing follows for the others, and turns are on since they are full
            turns.took(ask.turn, got)
            self.anything()
        elif got < wanted:
            self._next_due = claimed.next_due_at
            self._found_all_at, self._in_doubt = elapsed, None
            turns.end()
        elif expected > wanted:
            self.heard(expected - wanted)  # there may be more; perhaps a place has to become free first
            turns.begin()
        else:
            self._in_doubt = (elapsed if self._in_doubt is None else self._in_doubt[0], elapsed)
            turns.end()
        if got:
            self._pace.quicken()
        self._pause = None

    def pause(self, now: float, elapsed: float, trust: int) -> float:
        """Seconds until it is worth to look unasked."""
        if self.look:
            return 0.0
        if self._pause is None or self._pause[0] != trust:
            self._pause = (trust, self._pace.pause(trust=trust))
        look_at = self._found_all_at + self._pause[1]
        if self._in_doubt is not None and self._doubts:
            first, last = self._in_doubt
            look_at = min(look_at, first + MOST_DOUBT_SECONDS, last + DOUBT_SECONDS)
        pause = look_at - elapsed
        return max(0.0, pause if self._next_due is None else min(pause, self._next_due - now))
