"""Which lanes a worker asks for: those that it serves, without the queues that are paused, in turns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.engine.turns import Turn, Turns
from holdfast.lifecycle.eligibility import Offer, open_lanes
from holdfast.lifecycle.queues import queue_in
from holdfast.lifecycle.records import Serves


class Ask(NamedTuple):
    """What the next claim is for: up to so many of these lanes, which are one queue's if it is that one's turn."""

    lanes: Collection[str]
    most: int
    turn: Turn | None = None


class Lanes:
    def __init__(self, serves: Serves) -> None:
        self._offer = Offer(serves=serves)
        self._known: set[str] = set()
        self.turns = Turns(serves.weights)

    @property
    def paused(self) -> frozenset[str]:
        return self._offer.paused

    def pause(self, queues: frozenset[str]) -> None:
        """From now on these queues are paused, and no others."""
        self._offer = replace(self._offer, paused=queues)

    def hear(self, lanes: Iterable[str]) -> list[str]:
        """There may be work in these lanes; those of them from which it may be taken."""
        served = open_lanes(lanes, replace(self._offer, paused=frozenset()) if self._offer.paused else self._offer)
        if not self._known.issuperset(served):
            self._known.update(served)
            self.turns.queues = {queue_in(lane) for lane in self._known}
        accepted = open_lanes(served, self._offer) if self._offer.paused else served
        if self.turns.are_on:
            for lane in accepted:
                self.turns.hear(queue_in(lane))
        return accepted

    def know(self, lanes: Iterable[str], now: float) -> None:
        """These lanes have work, and no others."""
        self.turns.know({queue_in(lane) for lane in self.hear(lanes)}, now)

    def next(self, wanted: int) -> Ask:
        lanes: Collection[str] = open_lanes(self._known, self._offer) if self._offer.paused else self._known
        turn = self.turns.next(wanted)
        if turn is None:
            return Ask(lanes, wanted)
        return Ask([lane for lane in lanes if queue_in(lane) == turn.queue], turn.most, turn)
