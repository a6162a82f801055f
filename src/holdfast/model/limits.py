"""Concurrency limits, their slots, and their holders.

Invocations with the same limit key share a limit. It has as many slots as invocations may run at once, numbered from 0.
A slot has at most one holder, by a unique index in the store, so that nothing is counted before a write. An invocation
with a slot may run; one without waits outside the queue until a slot is given back.

The code at hand decides how many slots there are: a deploy can change a limit. If it is lowered, invocations that hold
slots beyond it keep them to their end, and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status

MAX_BLOCKED = 500  # that one claim moves out of its way; then it answers, and asks for more at once
_MAX_NAMED = 3


class Limit(msgspec.Struct, frozen=True):
    """At most so many invocations at once. Those beyond it wait, or are refused if they have never started."""

    max_running: int
    waits: bool = True


class Holder(NamedTuple):
    """The invocation that has a slot."""

    id: str
    owner: str | None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Ask that up to `count` waiters of a limit key go back to the queue, as far as the key has free slots.

    `max_running` is the key's limit; None if it is not known here: then slots are not counted. Waiters in the lanes
    `without` are passed over.
    """

    limit_key: str
    count: int = 1
    max_running: int | None = None
    without: frozenset[str] = frozenset()


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
    blocked: list[InvocationRecord]
    refused: list[InvocationRecord]
    cut: bool = False  # a limited one was met by a claim that takes none


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


def allot(
    candidates: Iterable[InvocationRecord],
    wanted: int,
    *,
    limits: Mapping[str, Limit],
    limited: bool,
    held: Held,
    owner: str,
) -> Allotment:
    """Go through candidates in queue order until enough can be taken. `held` is brought up to date."""
    taken: list[tuple[InvocationRecord, str | None]] = []
    blocked: list[InvocationRecord] = []
    refused: list[InvocationRecord] = []
    for candidate in candidates:
        if len(taken) >= wanted or len(blocked) + len(refused) >= MAX_BLOCKED:
            break
        key, limit = candidate.limit_key, limit_of(candidate, limits)
        if key is None or limit is None:
            taken.append((candidate, None))
        elif not limited:
            return Allotment(taken, blocked, refused, cut=True)
        elif (slot := _free_slot(key, limit.max_running, held.of(key))) is not None:
            held.of(key)[slot] = Holder(candidate.id, owner)
            taken.append((candidate, slot))
        elif limit.waits or candidate.status is not Status.REGISTERED:
            blocked.append(candidate)
        else:
            refused.append(candidate)
    return Allotment(taken, blocked, refused)


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
