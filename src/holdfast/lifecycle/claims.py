"""Claims: how work is taken from the queue, and what becomes of those that a limit turns away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import UnsetType

from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import Change, unowned
from holdfast.lifecycle.limits import Allotment, Held, Limit, why_blocked, why_refused
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import AVAILABLE, Status


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's wish: up to `limit` invocations that are due and lie in these lanes, for this owner.

    `start` walks PENDING → RUNNING in the same write, for work that begins at once; without it the work is only
    reserved. `ids` narrows the wish to these invocations. `again` tells that a claim with this operation id was sent
    before and its answer was lost.

    `limits` are those of the claimer's tasks, by name. An invocation that has a key and whose task has a limit is
    taken with a slot or not at all. Without `limited`, the claim ends before the first of them: for work that is only
    taken ahead, since a slot is not to be held by what does not run.
    """

    app: str
    lanes: tuple[str, ...]
    limit: int
    owner: str
    operation: str
    at: float
    start: bool = True
    ids: tuple[InvocationId, ...] = ()
    again: bool = False
    limits: Mapping[str, Limit] = msgspec.field(default_factory=dict)
    limited: bool = True

    @property
    def path(self) -> tuple[Status, ...]:
        return (Status.PENDING, Status.RUNNING) if self.start else (Status.PENDING,)


class Claimed(msgspec.Struct, frozen=True):
    """What a claim got, in order.

    If that is less than it asked for: when the next invocation of these lanes falls due, or None if nothing waits in
    them. What is due already was not looked at, or somebody else was faster.

    `refused` are the ids of those that ended because they met a limit and were not to wait, `released` the lanes of
    those that could go on; whoever waits for either has to be told. `cut`: a limited one is next, and the claim was
    to take none; then nothing is said about the time.
    """

    records: tuple[InvocationRecord, ...]
    next_due_at: float | None = None
    refused: tuple[InvocationId, ...] = ()
    released: tuple[str, ...] = ()
    cut: bool = False


def claimed(claim: Claim, record: InvocationRecord, slot: str | None = None) -> Change:
    """The change that a claim makes to one record, with the slot that it needs, if it does."""
    return Change(
        name="claimed",
        app=claim.app,
        id=record.id,
        path=claim.path,
        sources=AVAILABLE,
        epoch=None,
        operation=claim.operation,
        at=claim.at,
        actor=claim.owner,
        slot=slot,
    )


_WAITING = frozenset({Status.CONCURRENCY_CONTROLLED})


def blocked(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """A claim has found no free slot for it: it leaves the queue, keeps its place in it, and waits."""
    return unowned("blocked", record, Status.CONCURRENCY_CONTROLLED, AVAILABLE, operation, at, why)


def refused(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """A claim has found no free slot for it, and it is not to wait. Only what has never started can end so."""
    target, sources = Status.CONCURRENCY_CONTROLLED_FINAL, frozenset({Status.REGISTERED})
    return unowned("refused", record, target, sources, operation, at, why)


def turned_away(
    claim: Claim, allotment: Allotment[InvocationRecord], held: Held
) -> Iterator[tuple[InvocationRecord, Change]]:
    """What a claim makes of those for whom there was no slot."""
    for record in allotment.blocked:
        why = why_blocked(record.limit_key or "")
        yield record, blocked(record, operation=claim.operation, at=claim.at, why=why)
    for record in allotment.refused:
        why = why_refused(record.limit_key or "", held.of(record.limit_key or ""))
        yield record, refused(record, operation=claim.operation, at=claim.at, why=why)


def released(record: InvocationRecord, *, operation: str, at: float, why: str = "a slot is free") -> Change:
    """A slot is free: who has waited for one goes back to the queue, to its old place."""
    return unowned("released", record, Status.REROUTED, _WAITING, operation, at, why)


def back_in_queue(record: InvocationRecord, change: Change) -> tuple[str, float, int]:
    """Return the lane, due time and priority of an invocation that a change made available."""
    lane = record.lane if isinstance(change.lane, UnsetType) else change.lane
    return lane, record.due_at if isinstance(change.due_at, UnsetType) else change.due_at, record.priority
