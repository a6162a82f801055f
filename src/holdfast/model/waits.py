"""Waits of an invocation for others, and circles of waits, which can never end.

An invocation whose code waits needs each invocation that it waits for. An invocation that waits for a slot of a limit
needs one of the holders of that limit to end. A run of a workflow needs one of its awaited invocations. All other
invocations can go on by themselves. After these have ended, an invocation that still cannot go on stands in a circle or
behind one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.ids import InvocationId
from holdfast.model.changes import WORKING, Change, ChangeFacts, owned
from holdfast.model.records import InvocationRecord, Waiting
from holdfast.model.status import Status

Path = Sequence["Link"]


def paused(record: InvocationRecord, waiting: Waiting, *, operation: str, at: float, why: str) -> Change:
    """Give the owner's place back while its code waits for other invocations. A slot of a limit is kept."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "waiting": waiting}
    return owned("paused", record, (Status.PAUSED,), WORKING, **facts)


def resumed(record: InvocationRecord, *, operation: str, at: float) -> Change:
    """Let code go on that has waited: the owner has a place for it again."""
    facts: ChangeFacts = {"operation": operation, "at": at, "waiting": None}
    return owned("resumed", record, (Status.RESUMED,), frozenset({Status.PAUSED}), **facts)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The condition for an invocation to continue: the end of each invocation that its code waits for (`awaited`), or
    of one of the `holders`: of a limit's slots, or the children of a run.
    """

    task: str
    awaited: tuple[InvocationId, ...] = ()
    holders: tuple[InvocationId, ...] = ()
    limit_key: str | None = None

    @property
    def others(self) -> tuple[InvocationId, ...]:
        return self.awaited or self.holders


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An invocation on the way round a circle, and the limit key through which it waits for the next one, if so."""

    id: InvocationId
    task: str
    limit_key: str | None = None


def find_circle(start: InvocationId, needs: Mapping[InvocationId, Need]) -> tuple[Link, ...]:
    """Return the circle that this invocation waits in, beginning with it; empty if it can go on one day. What is not
    among the needs can go on.
    """
    stuck = _stuck(needs)
    if start not in stuck:
        return ()
    way: list[InvocationId] = _way_back(start, needs, stuck)
    return tuple(
        Link(id=id, task=needs[id].task, limit_key=None if needs[id].awaited else needs[id].limit_key) for id in way
    )


def _stuck(needs: Mapping[InvocationId, Need]) -> set[InvocationId]:
    """Return what can never go on: all that is left once everything that can go on has done so."""
    stuck = set(needs)
    while freed := {id for id in stuck if _can_go_on(needs[id], stuck)}:
        stuck -= freed
    return stuck


def _can_go_on(need: Need, stuck: set[InvocationId]) -> bool:
    if need.awaited:
        return stuck.isdisjoint(need.awaited)
    return not need.holders or not stuck.issuperset(need.holders)


def _way_back(start: InvocationId, needs: Mapping[InvocationId, Need], stuck: set[InvocationId]) -> list[InvocationId]:
    """Return a shortest circle of stuck invocations through this one; empty if it only waits for a circle."""
    before: dict[InvocationId, InvocationId] = {}
    frontier = [start]
    while frontier:
        following = []
        for id in frontier:
            for other in needs[id].others:
                if other == start:
                    way = [id]
                    while way[-1] != start:
                        way.append(before[way[-1]])
                    return way[::-1]
                if other in stuck and other not in before:
                    before[other] = id
                    following.append(other)
        frontier = following
    return []


def path_in_words(circle: Path) -> str:
    """Return the way round a circle: ``a (shop:f) → b (shop:g), for a slot of shop:g → a``."""
    links = [_in_words(link) for link in circle]
    return " → ".join([*links, circle[0].id])


def _in_words(link: Link) -> str:
    slot = f", for a slot of {link.limit_key}, held by" if link.limit_key is not None else ""
    return f"{link.id} ({link.task}){slot}"
