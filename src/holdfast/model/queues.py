"""Queues: their depths and their pauses.

A queue is only a name that invocations share: it exists as soon as it is used. Only a pause is stored. It keeps runners
from taking work of that queue; running invocations go on, and submitted ones wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.model.decoding import PAUSE, Moment
from holdfast.model.records import Entry, RunnerRecord, entry_reader

MAX_OPERATIONS = 16  # the last pauses that are kept for a queue
RATE_SECONDS = 300.0  # over which rates are measured
_SHORTEST_SECONDS = 10.0  # of a worker's life, below which no rate is shown


class QueuePause(msgspec.Struct, frozen=True, kw_only=True):
    """A paused queue: since when, by which user or program, and why. `operation` is that of the pause."""

    app: str
    name: str
    at: Moment
    by: str
    reason: str
    operation: str


class QueueState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an entry of the kind "pause": a queue that is paused, or was."""

    paused_at: Moment | None = None
    by: str = ""
    reason: str = ""
    operations: tuple[str, ...] = ()  # the latest; while the queue is paused, the last one is the present pause


def _check(state: QueueState) -> None:
    if state.paused_at is not None and not state.operations:
        raise ValueError("it is paused, and no operation did it")


state_of = entry_reader(QueueState, PAUSE, check=_check)


def pause_of(entry: Entry) -> QueuePause | None:
    """Return the pause of a queue; None if it is not paused. Raises `CorruptRecord`."""
    state = state_of(entry)
    if state.paused_at is None:
        return None
    by, reason, operation = state.by, state.reason, state.operations[-1]
    return QueuePause(app=entry.app, name=entry.name, at=state.paused_at, by=by, reason=reason, operation=operation)


def unpaused(app: str, name: str) -> Entry:
    """Return the first entry of a queue."""
    return Entry(app=app, kind=PAUSE, name=name, body=msgspec.json.encode(QueueState()))


def paused(wanted: QueuePause, before: Entry) -> Entry:
    """Return the entry of a queue that is paused from now on."""
    return _following(before, QueueState(paused_at=wanted.at, by=wanted.by, reason=wanted.reason), wanted.operation)


def resumed(before: Entry, operation: str) -> Entry:
    """Return the entry of a queue that is paused no more."""
    return _following(before, QueueState(), operation)


def _following(before: Entry, state: QueueState, operation: str) -> Entry:
    operations = (*state_of(before).operations, operation)[-MAX_OPERATIONS:]
    body = msgspec.json.encode(msgspec.structs.replace(state, operations=operations))
    return msgspec.structs.replace(before, body=body, version=before.version + 1)


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a queue at a moment."""

    name: str
    waiting: int = 0  # due, for a runner
    scheduled: int = 0  # not due yet
    blocked: int = 0  # for a slot of a limit
    running: int = 0  # with an owner
    oldest_due_at: float | None = None  # of those that wait for a runner


def gathered(parts: Iterable[QueueDepth]) -> list[QueueDepth]:
    """Merge depths of parts of queues, into one for each queue. Order: by name."""
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
    """Return the depth of a lane, as a part of its queue."""
    oldest = oldest_due_at if waiting else None
    return QueueDepth(name=queue_in(lane), waiting=waiting, scheduled=scheduled, oldest_due_at=oldest)


def queue_in(lane: str) -> str:
    """Return the queue of a lane. Names of queues have no vertical bar."""
    return lane.partition("|")[0]


def rates(roster: Sequence[RunnerRecord], now: float) -> Mapping[str, float]:
    """Return how many calls of each queue end in a minute, as the workers of these runners have counted of late."""
    found: dict[str, float] = {}
    for worker in [worker for runner in roster for worker in runner.workers]:
        seconds = min(RATE_SECONDS, max(_SHORTEST_SECONDS, now - worker.started_at))
        for queue, count in worker.ended.items():
            found[queue] = found.get(queue, 0.0) + count * 60 / seconds
    return found
