"""How many may run at once: limits, their slots, and who gets one.

Invocations with the same limit key share a limit. It has as many slots as may run at once, numbered from 0, and a slot
is held by at most one invocation, which a unique index in the store sees to. So nobody counts and then writes: who has
a slot may run, and who finds none waits outside the queue until somebody who gives one back brings it in again.

The code at hand decides how many slots there are, not what was stored: a limit can be changed by a deploy. If it is
lowered, those who hold slots beyond it keep them to their end, and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from holdfast.lifecycle.status import Status

MOST_BLOCKED = 500  # that one claim moves out of its way; then it answers, and asks for more at once
_MOST_NAMED = 3


class Limit(msgspec.Struct, frozen=True):
    """At most so many at once. Those beyond it wait, or are refused if they have never started."""

    most: int
    waits: bool = True


class Holder(NamedTuple):
    """Who has a slot."""

    id: str
    owner: str | None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A wish: up to `count` of those who wait for this key go back into the queue, if it has so many free slots.

    `most` is the key's limit; None if it is not known here, and then the slots are not counted. Who waits in one of
    the lanes `without` is passed over.
    """

    limit_key: str
    count: int = 1
    most: int | None = None
    without: frozenset[str] = frozenset()


class Candidate(Protocol):
    """What has to be known of an invocation that may be claimed."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def limit_key(self) -> str | None: ...
    @property
    def status(self) -> Status: ...


C = TypeVar("C", bound=Candidate)


class Held:
    """Which slots are held, and by whom: looked up once for each key, then kept up to date."""

    def __init__(self, look: Callable[[str], dict[str, Holder]]) -> None:
        self._look = look
        self._known: dict[str, dict[str, Holder]] = {}

    def of(self, key: str) -> dict[str, Holder]:
        if key not in self._known:
            self._known[key] = self._look(key)
        return self._known[key]


class Allotment(NamedTuple, Generic[C]):
    """What becomes of the candidates of a claim."""

    taken: list[tuple[C, str | None]]  # with their slots, if they need one
    blocked: list[C]
    refused: list[C]
    cut: bool = False  # a limited one was met by a claim that takes none


def limit_key(task: str, digest: str = "") -> str:
    """The key of a task, or of those of its calls that have this digest in common."""
    return f"{task}|{digest}" if digest else task


def task_of(key: str) -> str:
    """The task of a key. No name of a task has a vertical bar."""
    return key.partition("|")[0]


def slot_of(key: str, number: int) -> str:
    return f"{key}#{number}"


def slot_range(key: str) -> tuple[str, str]:
    """All slots of the key lie from the first up to the second. Those of a longer key may lie there too."""
    return f"{key}#", f"{key}$"  # $ is the character after #


def limit_of(candidate: Candidate, limits: Mapping[str, Limit]) -> Limit | None:
    return None if candidate.limit_key is None else limits.get(candidate.task)


def allot(
    candidates: Iterable[C], wanted: int, *, limits: Mapping[str, Limit], limited: bool, held: Held, owner: str
) -> Allotment[C]:
    """Go through candidates in queue order until so many are found that can be taken. `held` is brought up to date."""
    taken: list[tuple[C, str | None]] = []
    blocked: list[C] = []
    refused: list[C] = []
    for candidate in candidates:
        if len(taken) >= wanted or len(blocked) + len(refused) >= MOST_BLOCKED:
            break
        key, limit = candidate.limit_key, limit_of(candidate, limits)
        if key is None or limit is None:
            taken.append((candidate, None))
        elif not limited:
            return Allotment(taken, blocked, refused, cut=True)
        elif (slot := _free_slot(key, limit.most, held.of(key))) is not None:
            held.of(key)[slot] = Holder(candidate.id, owner)
            taken.append((candidate, slot))
        elif limit.waits or candidate.status is not Status.REGISTERED:
            blocked.append(candidate)
        else:
            refused.append(candidate)
    return Allotment(taken, blocked, refused)


def _free_slot(key: str, most: int, holders: Mapping[str, Holder]) -> str | None:
    if len(holders) >= most:
        return None
    return next(slot for number in range(most) if (slot := slot_of(key, number)) not in holders)


def why_blocked(key: str) -> str:
    return f"it waits for a slot of {key}"


def why_refused(key: str, holders: Mapping[str, Holder]) -> str:
    """Who was in the way."""
    named = [f"{holder.id} on {holder.owner}" for _, holder in sorted(holders.items())[:_MOST_NAMED]]
    more = f" and {len(holders) - len(named)} others" if len(holders) > len(named) else ""
    slots = "the only slot" if len(holders) == 1 else f"all {len(holders)} slots"
    return f"{slots} of {key} held by {', '.join(named)}{more}"
