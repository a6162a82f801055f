"""Queues, as the store knows them: what lies in each, and which of them are paused.

A queue is nothing but a name that invocations share: it is there as soon as somebody uses it. Only a pause is stored
for itself. It keeps runners from taking work of that queue; what runs goes on, and what is submitted waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.lifecycle.decoding import Moment
from holdfast.lifecycle.records import RunnerRecord

MOST_OPERATIONS = 16  # of the last ones that are remembered of a queue
RATE_SECONDS = 300.0  # over which rates are told
_SHORTEST_SECONDS = 10.0  # of a worker's life that a rate is told over


class QueuePause(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that is paused: since when, by whom and why. `operation` is the one that did it."""

    app: str
    name: str
    at: Moment
    by: str
    reason: str
    operation: str


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a queue at a moment."""

    name: str
    waiting: int = 0  # due, for a runner
    scheduled: int = 0  # not due yet
    blocked: int = 0  # for a slot of a limit
    running: int = 0  # with an owner
    oldest_due_at: float | None = None  # of those that wait for a runner


def gathered(parts: Iterable[QueueDepth]) -> list[QueueDepth]:
    """The depths of several parts of queues, as one for each queue. In the order of their names."""
    found: dict[str, QueueDepth] = {}
    for part in parts:
        before = found.get(part.name, QueueDepth(name=part.name))
        oldest = [at for at in (before.oldest_due_at, part.oldest_due_at) if at is not None]
        found[part.name] = QueueDepth(
            name=part.name,
            waiting=before.waiting + part.waiting,
            scheduled=before.scheduled + part.scheduled,
            blocked=before.blocked + part.blocked,
            running=before.running + part.running,
            oldest_due_at=min(oldest, default=None),
        )
    return [found[name] for name in sorted(found)]


def in_lane(lane: str, waiting: int, scheduled: int, oldest_due_at: float | None) -> QueueDepth:
    """What lies in a lane, as a part of its queue."""
    oldest = oldest_due_at if waiting else None
    return QueueDepth(name=queue_in(lane), waiting=waiting, scheduled=scheduled, oldest_due_at=oldest)


def queue_in(lane: str) -> str:
    """The queue of a lane. No name of a queue has a vertical bar."""
    return lane.partition("|")[0]


def rates(roster: Sequence[RunnerRecord], now: float) -> Mapping[str, float]:
    """How many calls of each queue end in a minute, as the workers of these runners have counted them of late."""
    found: dict[str, float] = {}
    for worker in [worker for runner in roster for worker in runner.workers]:
        seconds = min(RATE_SECONDS, max(_SHORTEST_SECONDS, now - worker.started_at))
        for queue, count in worker.ended.items():
            found[queue] = found.get(queue, 0.0) + count * 60 / seconds
    return found
