"""Queues take turns, so that a flood in one of them does not keep the others waiting.

Within a queue, order is by priority, then by due time. Among queues there is none: whoever has more to do than places
takes from each queue in turn, as many from each as its weight says, whatever the priorities and however old the work.

It matters only where something is left behind. As long as all that waits finds a place, or a worker knows of one queue
only, a claim is for all lanes at once, as if there were no turns: nothing is asked for it and nothing changes. After a
claim that got all that it wanted, with more to be had, turns begin. Then the worker asks which lanes have work, again
after each second, and hears of more by hints; the claims that follow are each for one queue, the one that has got
least so far. One that has no more to give is left out until there is news of it. When at most one is left, claims are
for all lanes again, and with the first of them that gets less than it wanted, turns are over.

What it costs: one question a second, whose cost grows with the lanes and not with what lies in them, and while several
queues are full, a claim for each share instead of one for all: at most four shares to a claim. Each worker takes its
own turns; where several claim from one queue, the stores' ways to keep them apart (`holdfast.store.mongo.crowd`) work
within that queue. A queue that was empty has saved nothing up: it begins where the others are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

ASK_AGAIN_SECONDS = 1.0
MOST_SHARES = 4


class Turn(NamedTuple):
    """This queue is next, with so many."""

    queue: str
    most: int


class Turns:
    """`weights` are those of queues that have another one than 1."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self.queues: set[str] = set()  # that are known
        self.are_on = False
        self._got: dict[str, float] = {}  # by queues that have work: how much of it was taken, for its weight
        self._ask_at = 0.0

    def begin(self) -> None:
        """There was more than could be taken."""
        if not self.are_on and len(self.queues) > 1:
            self.are_on, self._got, self._ask_at = True, {}, float("-inf")

    def end(self) -> None:
        self.are_on = False

    def wants_to_know(self, now: float) -> bool:
        """Whether to find out which queues have work."""
        return self.are_on and now >= self._ask_at

    def know(self, queues: Collection[str], now: float) -> None:
        """These have work, and no others."""
        self._ask_at = now + ASK_AGAIN_SECONDS
        self._got = {queue: got for queue, got in self._got.items() if queue in queues}
        for queue in queues:
            self.hear(queue)

    def hear(self, queue: str) -> None:
        """There is news of this queue."""
        if self.are_on and queue not in self._got:
            self._got[queue] = min(self._got.values(), default=0.0)

    def next(self, wanted: int) -> Turn | None:
        """Who is next to give something; None: all of them."""
        if not self.are_on or len(self._got) < 2:
            return None
        queue = min(self._got, key=lambda queue: (self._got[queue], queue))
        whole = sum(self._weight(each) for each in self._got)
        share = wanted * max(self._weight(queue) / whole, 1 / MOST_SHARES)
        behind = (max(self._got.values()) - self._got[queue]) * self._weight(queue)
        return Turn(queue, min(wanted, max(1, round(share), round(behind))))

    def took(self, turn: Turn, got: int) -> None:
        """What came of a turn. A queue that gave less than was asked for has no more."""
        self._got[turn.queue] = self._got.get(turn.queue, 0.0) + got / self._weight(turn.queue)
        if got < turn.most:
            del self._got[turn.queue]

    def _weight(self, queue: str) -> int:
        return self._weights.get(queue, 1)
