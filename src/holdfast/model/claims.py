"""Claims: how work is taken from the queue, and what a limit does to invocations without a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import UnsetType

from holdfast.ids import InvocationId
from holdfast.model.changes import Change, change_of, entries
from holdfast.model.limits import Allotment, Bounds, Held, Limit, Release
from holdfast.model.rates import Rate, RateBuckets, is_rate_key
from holdfast.model.records import HistoryEntry, InvocationRecord, cut, is_cut_at
from holdfast.model.status import AVAILABLE, Status


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request for up to `limit` due invocations of these lanes, for this owner.

    `start` walks PENDING → RUNNING in the same write, for work that begins at once; without it the work is only
    reserved. `ids` narrows the request to these invocations. `again`: a claim with this operation id was sent before
    and its answer was lost.

    `limits` are those of the claimer's tasks, by name. An invocation with a key and a limit is taken with a slot or not
    at all. So are `rates`: an invocation under one is taken with a start of its bucket. Without `limited`, the claim
    passes over both: it is for work that is only taken ahead, and waiting work holds no slot. `refusal_outboxes` name
    the triggers of refusals, by task.
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
    refusal_outboxes: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    rates: Mapping[str, Rate] = msgspec.field(default_factory=dict)

    def bounds(self, task: str) -> bool:
        """Return whether calls of a task need a slot or a start."""
        return task in self.limits or task in self.rates

    @property
    def path(self) -> tuple[Status, ...]:
        return (Status.PENDING, Status.RUNNING) if self.start else (Status.PENDING,)


class Claimed(msgspec.Struct, frozen=True):
    """The records that a claim got, in order.

    If there are fewer than it asked for, `next_due_at` is when the next invocation of these lanes falls due, or None if
    nothing waits in them. Invocations that are due already were not looked at, or another claimer was faster.

    `refused` are the ids of invocations that ended because they met a limit and were not to wait. `released` are the
    lanes of released waiters. The caller sends hints for both. `cut`: the claim has passed over invocations under
    limits, since it was to take none; then nothing is said about the time. `start_at` is when a call under a rate is
    due that this claim has put off, or let go on.
    """

    records: tuple[InvocationRecord, ...]
    next_due_at: float | None = None
    refused: tuple[InvocationId, ...] = ()
    released: tuple[str, ...] = ()
    cut: bool = False
    start_at: float | None = None


def claimed(claim: Claim, record: InvocationRecord, slot: str | None = None) -> Change:
    """Return the change that a claim makes to one record, with its slot if it needs one."""
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


Lines = tuple[HistoryEntry, ...]


class Taking:
    """What a claim makes of the records that it takes, as `apply_to(claimed(…), record)` would.

    The new lines of a history depend on a record's version and epoch alone, so most records of a batch share them.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._lines: dict[tuple[int, int], tuple[Lines, bool]] = {}

    def take(self, record: InvocationRecord, slot: str | None) -> tuple[InvocationRecord, Lines]:
        """Return the record as the claim leaves it, and the new lines of its history."""
        claim, key = self._claim, (record.history[-1].version if record.history else 0, record.epoch)
        if key not in self._lines:
            lines = entries(claimed(claim, record), version=key[0], epoch=record.epoch, owner=record.owner)
            self._lines[key] = lines, is_cut_at(lines[-1].version)
        lines, is_cut = self._lines[key]
        last, history = lines[-1], record.history + lines
        taken = msgspec.structs.replace(
            record,
            status=last.status,
            owner=last.owner,
            epoch=last.epoch,
            attempt=record.attempt + claim.start,
            changed_at=claim.at,
            reason="",
            history=cut(history) if is_cut else history,
            claim_token=claim.operation,
            slot=slot or record.slot,
            dedup_key=None,
            start_by=None if claim.start else record.start_by,
        )
        return taken, lines


_WAITING = frozenset({Status.CONCURRENCY_CONTROLLED})


def blocked(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """Move an invocation without a free slot out of the queue. It keeps its place, and waits."""
    path = (Status.CONCURRENCY_CONTROLLED,)
    return change_of("blocked", record, path, AVAILABLE, operation=operation, at=at, why=why)


def refused(record: InvocationRecord, *, operation: str, at: float, why: str, outbox: tuple[str, ...] = ()) -> Change:
    """End an invocation without a free slot that is not to wait. It must never have started."""
    path, sources = (Status.CONCURRENCY_CONTROLLED_FINAL,), frozenset({Status.REGISTERED})
    change = change_of("refused", record, path, sources, operation=operation, at=at, why=why)
    return msgspec.structs.replace(change, outbox=(*(change.outbox or ()), *outbox)) if outbox else change


def put_off(record: InvocationRecord, *, operation: str, at: float, why: str, due_at: float) -> Change:
    """Let an invocation without a start wait in the queue until it gets one."""
    path = (Status.CONCURRENCY_CONTROLLED, Status.REROUTED)
    return change_of("put_off", record, path, AVAILABLE, operation=operation, at=at, why=why, due_at=due_at)


def turned_away(claim: Claim, allotment: Allotment) -> Iterator[tuple[InvocationRecord, Change]]:
    """Yield the changes of the records for which a claim found no slot, or no start."""
    operation, at = claim.operation, claim.at
    for record, why in allotment.blocked:
        yield record, blocked(record, operation=operation, at=at, why=why)
    for record, why in allotment.held_up:
        change = blocked(record, operation=operation, at=at, why=why)
        if record.status is Status.REROUTED and is_rate_key(record.limit_key or ""):
            change = msgspec.structs.replace(change, due_at=record.created_at)  # it was due at a start that is gone
        yield record, change
    for record, why in allotment.refused:
        outbox = claim.refusal_outboxes.get(record.task, ())
        yield record, refused(record, operation=operation, at=at, why=why, outbox=outbox)
    for record, why, due_at in allotment.deferred:
        yield record, put_off(record, operation=operation, at=at, why=why, due_at=due_at)


def released(
    record: InvocationRecord, *, operation: str, at: float, why: str = "a slot is free", due_at: float | None = None
) -> Change:
    """Return a waiter to its old place in the queue: a slot is free. With `due_at`, it gets a start then."""
    if due_at is None:
        return change_of("released", record, (Status.REROUTED,), _WAITING, operation=operation, at=at, why=why)
    why = "a start comes"
    return change_of(
        "released", record, (Status.REROUTED,), _WAITING, operation=operation, at=at, why=why, due_at=due_at
    )


def bounds_of(claim: Claim, held: Held, buckets: RateBuckets) -> Bounds:
    return Bounds(claim.limits, claim.rates, claim.limited, claim.owner, held, buckets)


def next_starts(buckets: RateBuckets) -> list[Release]:
    """Return the releases of waiters by a claim, each due at its start."""
    return [Release(limit_key=key, count=len(dues), dues=dues) for key, dues in buckets.free_spots()]


def back_in_queue(record: InvocationRecord, change: Change) -> tuple[str, float, int]:
    """Return the lane, due time and priority of an invocation that a change made available."""
    lane = record.lane if isinstance(change.lane, UnsetType) else change.lane
    return lane, record.due_at if isinstance(change.due_at, UnsetType) else change.due_at, record.priority
