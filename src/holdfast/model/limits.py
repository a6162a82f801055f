"""Concurrency limits, their slots, and their holders.

Invocations with the same limit key share a limit. It has as many slots as invocations may run at once, numbered from 0.
A slot has at most one holder, by a unique index in the store, so that nothing is counted before a write. An invocation
with a slot may run; one without waits outside the queue until a slot is given back.

The code at hand decides how many slots there are: a deploy can change a limit. If it is lowered, invocations that hold
slots beyond it keep them to their end, and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import NamedTuple

import msgspec

from holdfast.model.rates import Rate, RateBuckets, rate_for, why_over, why_waits
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status

MAX_BLOCKED = 500  # moved out of the way by one claim; then it answers, and the next claim follows at once
MAX_PASSED = 50  # limited invocations that a claim passes over, if it takes none
_MAX_NAMED = 3


class Limit(msgspec.Struct, frozen=True):
    """At most `max_running` invocations at once. Those beyond it wait, or are refused if they have never started."""

    max_running: int
    waits: bool = True


class Holder(NamedTuple):
    """The invocation that has a slot."""

    id: str
    owner: str | None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Ask that up to `count` waiters of a limit key go back to the queue, as far as the key has free slots.

    `max_running` is the key's limit; None if it is not known here: then slots are not counted. Waiters in the lanes
    `without` are passed over. With `dues`, one for each of the `count`, they fall due then.
    """

    limit_key: str
    count: int = 1
    max_running: int | None = None
    without: frozenset[str] = frozenset()
    dues: tuple[float, ...] = ()


def dues_of(wish: Release) -> Iterator[float | None]:
    """Return when each of the released falls due; None: as before."""
    return iter(wish.dues) if wish.dues else repeat(None)


class Held:
    """The held slots and their holders, looked up once for each key, then kept up to date."""

    def __init__(self, look: Callable[[str], dict[str, Holder]]) -> None:
        self._look = look
        self._known: dict[str, dict[str, Holder]] = {}

    def of(self, key: str) -> dict[str, Holder]:
        if key not in self._known:
            self._known[key] = self._look(key)
        return self._known[key]


class Allotment(NamedTuple):
    """The decision about the candidates of a claim."""

    taken: list[tuple[InvocationRecord, str | None]]  # with their slots, if they need one
    blocked: list[tuple[InvocationRecord, str]]  # and what they wait for
    refused: list[tuple[InvocationRecord, str]]  # and why
    held_up: list[tuple[InvocationRecord, str]]  # without a start: they wait outside the queue
    deferred: list[tuple[InvocationRecord, str, float]]  # without a start: they wait in it, and are due then
    cut: bool = False  # limited ones were passed over by a claim that takes none

    @property
    def away(self) -> int:
        """Return how many leave the place in the queue that they had."""
        return len(self.blocked) + len(self.refused) + len(self.held_up) + len(self.deferred)

    def among(self, stays: Callable[[InvocationRecord], bool]) -> Allotment:
        """Return what was decided about some of the records."""
        return Allotment(
            taken=[each for each in self.taken if stays(each[0])],
            blocked=[each for each in self.blocked if stays(each[0])],
            refused=[each for each in self.refused if stays(each[0])],
            held_up=[each for each in self.held_up if stays(each[0])],
            deferred=[each for each in self.deferred if stays(each[0])],
            cut=self.cut,
        )

    def rate_keys(self) -> set[str]:
        """Return the keys of the rates that its records are under."""
        decided = (self.taken, self.refused, self.held_up, self.deferred)
        return {key for each in decided for record, *_ in each if (key := record.terms.rate_key) is not None}


def limit_key(task: str, digest: str = "") -> str:
    """Return the limit key of a task, or of its calls with this digest."""
    return f"{task}|{digest}" if digest else task


def task_of(key: str) -> str:
    """Return the task of a limit key. Names of tasks have no vertical bar."""
    return key.partition("|")[0]


def slot_of(key: str, number: int) -> str:
    return f"{key}#{number}"


def slot_range(key: str) -> tuple[str, str]:
    """Return bounds between which all slots of the key lie. Slots of a longer key may lie there too."""
    return f"{key}#", f"{key}$"  # $ is the character after #


def limit_of(candidate: InvocationRecord, limits: Mapping[str, Limit]) -> Limit | None:
    return None if candidate.limit_key is None else limits.get(candidate.task)


class Bounds(NamedTuple):
    """What a claim goes by: the limits and rates of its tasks, whether it takes calls under them, and its owner; the
    slots and buckets, which it brings up to date.
    """

    limits: Mapping[str, Limit]
    rates: Mapping[str, Rate]
    limited: bool
    owner: str
    held: Held
    buckets: RateBuckets


def is_bounded(record: InvocationRecord) -> bool:
    """Return whether a claimed invocation has a slot, or has taken a start."""
    return record.slot is not None or record.terms.rate_key is not None


def allot(candidates: Iterable[InvocationRecord], wanted: int, bounds: Bounds) -> Allotment:
    """Go through candidates in queue order until enough can be taken."""
    limits, rates, limited, owner, held, buckets = bounds
    found, passed = Allotment([], [], [], [], []), 0
    for candidate in candidates:
        if len(found.taken) >= wanted or found.away >= MAX_BLOCKED:
            break
        key, limit, rate = candidate.limit_key, limit_of(candidate, limits), rate_for(candidate, rates)
        slot = None
        if (limit is not None or rate is not None) and not limited:
            if (passed := passed + 1) >= MAX_PASSED:
                break
            continue
        if key is not None and limit is not None:
            slot = _free_slot(key, limit.max_running, held.of(key))
            if slot is None:
                if limit.waits or candidate.status is not Status.REGISTERED:
                    found.blocked.append((candidate, why_blocked(key)))
                else:
                    found.refused.append((candidate, why_refused(key, held.of(key))))
                continue
        if rate is not None and not buckets.start(candidate.terms.rate_key or "", rate, candidate):
            _put_off(found, candidate, rate, buckets)
            continue
        if key is not None and slot is not None:
            held.of(key)[slot] = Holder(candidate.id, owner)
        found.taken.append((candidate, slot))
    return found._replace(cut=passed > 0)


def _put_off(found: Allotment, candidate: InvocationRecord, rate: Rate, buckets: RateBuckets) -> None:
    """Decide about a candidate without a start: it falls due at one, waits outside the queue, or is refused."""
    key = candidate.terms.rate_key or ""
    if not rate.waits and candidate.status is Status.REGISTERED:
        found.refused.append((candidate, why_over(key, rate)))
    elif (due_at := buckets.due_at(key, rate)) is not None:
        found.deferred.append((candidate, why_waits(key, rate), due_at))
    else:
        found.held_up.append((candidate, why_waits(key, rate)))


def _free_slot(key: str, max_running: int, holders: Mapping[str, Holder]) -> str | None:
    if len(holders) >= max_running:
        return None
    return next(slot for number in range(max_running) if (slot := slot_of(key, number)) not in holders)


def why_blocked(key: str) -> str:
    return f"it waits for a slot of {key}"


def why_refused(key: str, holders: Mapping[str, Holder]) -> str:
    """Name the holders of the slots."""
    named = [f"{holder.id} on {holder.owner}" for _, holder in sorted(holders.items())[:_MAX_NAMED]]
    more = f" and {len(holders) - len(named)} others" if len(holders) > len(named) else ""
    slots = "the only slot" if len(holders) == 1 else f"all {len(holders)} slots"
    return f"{slots} of {key} held by {', '.join(named)}{more}"
