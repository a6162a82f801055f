"""Decides which invocations a runner may claim, and if not, why not.

A runner asks the store for lanes, and gets due invocations of them. The conditions of a lane decide which lanes it asks
for. The conditions of an invocation are repeated by the stores' claims as filters; a property test compares the two on
every store. `explain` walks the same conditions and says them in words.

To add a reason: a member of `Reason`, a condition in one of the tables if it keeps a claim from taking something, and a
sentence in `holdfast.model.explain`. A test fails as long as one of them is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.model.limits import Limit
from holdfast.model.rates import Bucket
from holdfast.model.records import InvocationRecord, RunnerRecord, Serves
from holdfast.model.status import AVAILABLE, Status


class Reason(StrEnum):
    """Why an invocation is not taken by a runner."""

    NOT_IN_QUEUE = "not_in_queue"  # its status says more: see `explain`
    NOT_DUE = "not_due"
    IN_BACKOFF = "in_backoff"
    NO_SLOT = "no_slot"
    NO_START = "no_start"
    QUEUE_PAUSED = "queue_paused"
    NO_RUNNER = "no_runner"
    UNKNOWN_TASK = "unknown_task"
    QUEUE_NOT_SERVED = "queue_not_served"
    TAGS_MISSING = "tags_missing"
    DRAINING = "draining"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner takes at a moment."""

    serves: Serves
    paused: frozenset[str] = frozenset()  # queues from which no runner takes anything
    draining: bool = False


class Lane(NamedTuple):
    """The parts of a lane, as `holdfast.model.records.lane_of` joins them."""

    queue: str
    task: str
    tags: frozenset[str]

    @classmethod
    def of(cls, lane: str) -> Lane:
        queue, _, rest = lane.partition("|")
        task, _, tags = rest.partition("|")
        return cls(queue, task, frozenset(tags.split(",")) if tags else frozenset())


class Standing(NamedTuple):
    """An invocation at a moment: how far its key's limit and rate, if it has them here, are used up."""

    record: InvocationRecord
    at: float
    limit: Limit | None = None
    held: int = 0
    bucket: Bucket | None = None  # of its rate


class LaneCondition(NamedTuple):
    reason: Reason
    fails: Callable[[Lane, Offer], bool]


class Condition(NamedTuple):
    reason: Reason
    fails: Callable[[Standing], bool]


INVOCATION: tuple[Condition, ...] = (
    Condition(Reason.NOT_IN_QUEUE, lambda it: it.record.status not in AVAILABLE),
    Condition(Reason.IN_BACKOFF, lambda it: it.record.due_at > it.at and it.record.status is Status.RETRY),
    Condition(Reason.NOT_DUE, lambda it: it.record.due_at > it.at and it.record.status is not Status.RETRY),
    Condition(
        Reason.NO_SLOT,
        lambda it: it.record.limit_key is not None and it.limit is not None and it.held >= it.limit.max_running,
    ),
    Condition(
        Reason.NO_START,
        lambda it: it.bucket is not None and it.record.due_at <= it.at and not it.bucket.left(it.at),
    ),
)
QUEUE: tuple[LaneCondition, ...] = (LaneCondition(Reason.QUEUE_PAUSED, lambda lane, offer: lane.queue in offer.paused),)
RUNNER: tuple[LaneCondition, ...] = (
    LaneCondition(Reason.DRAINING, lambda lane, offer: offer.draining),
    LaneCondition(Reason.UNKNOWN_TASK, lambda lane, offer: lane.task not in offer.serves.tasks),
    LaneCondition(Reason.QUEUE_NOT_SERVED, lambda lane, offer: not _serves(lane.queue, offer.serves.queues)),
    LaneCondition(Reason.TAGS_MISSING, lambda lane, offer: not lane.tags <= offer.serves.tags),
)
"""In the order in which they are said: of several runners, the runner that fails at the last condition comes
closest.
"""


def _serves(queue: str, queues: frozenset[str] | None) -> bool:
    return queues is None or queue in queues


def lane_obstacle(lane: str, offer: Offer, conditions: Sequence[LaneCondition] = (*QUEUE, *RUNNER)) -> Reason | None:
    """Return the first condition that keeps a runner from taking anything of this lane, or None."""
    parts = Lane.of(lane)
    return next((condition.reason for condition in conditions if condition.fails(parts, offer)), None)


def open_lanes(lanes: Iterable[str], offer: Offer) -> list[str]:
    """Return the lanes that a runner asks for."""
    return [lane for lane in lanes if lane_obstacle(lane, offer) is None]


def obstacle(standing: Standing, offer: Offer) -> Reason | None:
    """Return what keeps a runner with this offer from taking an invocation now, or None."""
    own = next((condition.reason for condition in INVOCATION if condition.fails(standing)), None)
    return own or lane_obstacle(standing.record.lane, offer)


def held_back(standing: Standing, offers: Sequence[Offer], paused: frozenset[str]) -> list[Reason]:
    """Return everything that keeps all runners from taking an invocation, in order. Empty if at least one may take it
    now.

    `offers` are those of the runners that are alive; no runner takes anything from a `paused` queue.
    """
    lane = standing.record.lane
    found = [condition.reason for condition in INVOCATION if condition.fails(standing)]
    nobody = Offer(serves=Serves(tasks=frozenset()), paused=paused)
    found += [reason for reason in [lane_obstacle(lane, nobody, QUEUE)] if reason is not None]
    if not offers:
        return [*found, Reason.NO_RUNNER]
    of_runners = [reason for offer in offers if (reason := lane_obstacle(lane, offer, RUNNER)) is not None]
    if len(of_runners) < len(offers):
        return found
    return [*found, max(of_runners, key=_ORDER.index)]


_ORDER = [condition.reason for condition in RUNNER]


def offer_of(runner: RunnerRecord, paused: frozenset[str] = frozenset()) -> Offer:
    return Offer(serves=runner.serves, paused=paused, draining=runner.draining)
