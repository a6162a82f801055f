"""How an invocation is asked to end, and how one ends that was never started in time.

Whatever nobody owns is CANCELLED by one write. An owner is asked: CANCELLING keeps it, its epoch and its slot, and
gives its code time to clean up. Whoever claims, settles or recovers at the same moment meets the same guard as
everybody: one of the two is first, and the other is refused and looks again.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.codec import ErrorRecord
from holdfast.lifecycle.changes import Change, kept_until, owned, unowned
from holdfast.lifecycle.records import Cancellation, InvocationRecord
from holdfast.lifecycle.status import SOURCES, TABLE, Status

_AT_ONCE = frozenset(status for status in SOURCES[Status.CANCELLED] if not TABLE[status].requires_ownership)
_ASKED = SOURCES[Status.CANCELLING]
_NEVER_STARTED = frozenset(
    {Status.REGISTERED, Status.REROUTED, Status.CONCURRENCY_CONTROLLED, Status.PARKED}
)  # that may fail without an owner


def must_end_by(record: InvocationRecord) -> float:
    """Return the moment by which the code of one that runs has to have ended: its timeout, or the grace of one that is
    being cancelled. Infinity if nothing says so.
    """
    if record.status is Status.CANCELLING and record.cancellation is not None:
        return record.cancellation.until
    if record.terms.timeout is None or record.status is Status.PENDING:
        return float("inf")
    begun = (entry.at for entry in reversed(record.history) if entry.status is Status.RUNNING)
    return next(begun, record.changed_at) + record.terms.timeout


def cancel(record: InvocationRecord, cancellation: Cancellation, *, operation: str) -> Change | None:
    """The change that ends it, or asks its owner to; None where there is nothing to ask any more."""
    status = record.status
    if status in _AT_ONCE:
        return _by_anybody("cancelled", record, (Status.CANCELLED,), _AT_ONCE, cancellation, operation)
    if status in _ASKED:
        return _by_anybody("cancelling", record, (Status.CANCELLING,), _ASKED, cancellation, operation)
    if status is Status.PENDING_RECOVERY:  # on its way back to the queue
        path = (Status.REROUTED, Status.CANCELLED)
        return _by_anybody("cancelled", record, path, frozenset({status}), cancellation, operation)
    return None


def _by_anybody(
    name: str,
    record: InvocationRecord,
    path: tuple[Status, ...],
    sources: frozenset[Status],
    cancellation: Cancellation,
    operation: str,
) -> Change:
    """Of whoever has it at the time; who asks and is refused looks again, and asks whoever has it then."""
    return Change(
        name=name,
        app=record.app,
        id=record.id,
        path=path,
        sources=sources,
        epoch=record.epoch,
        operation=operation,
        at=cancellation.at,
        why=str(cancellation),
        cancellation=cancellation,
        retain_until=kept_until(record, path[-1], cancellation.at),
    )


def gave_way(record: InvocationRecord, *, operation: str, at: float, how: str = "") -> Change:
    """The owner of what is being cancelled has ended it, or has never begun."""
    said = str(record.cancellation) if record.cancellation is not None else "cancelled"
    why = f"{said}; {how}" if how else said
    sources = frozenset({Status.CANCELLING})
    return owned("gave_way", record, (Status.CANCELLED,), sources, operation=operation, at=at, why=why)


def is_too_late(record: InvocationRecord, now: float) -> bool:
    """Whether it had to be started before now, and never was; a claim for a first start counts as none."""
    start_by = record.terms.start_by
    started = record.attempt - (record.status is Status.RUNNING)
    return start_by is not None and now >= start_by and started == 0


def expired(record: InvocationRecord, *, error: ErrorRecord, operation: str, at: float) -> Change | None:
    """It was not started in time and ends; None if it has been started, or its owner has to say so."""
    why = why_expired(record, at)
    if record.status in _NEVER_STARTED:
        change = unowned("expired", record, Status.FAILED, _NEVER_STARTED, operation, at, why)
        return replace(change, error=error)
    through = {Status.PENDING: Status.REROUTED, Status.RUNNING: Status.KILLED}.get(record.status)
    if through is None:
        return None
    return owned(
        "expired",
        record,
        (through, Status.FAILED),
        frozenset({record.status}),
        operation=operation,
        at=at,
        why=why,
        error=error,
        never_began=record.status is Status.RUNNING,
    )


def why_expired(record: InvocationRecord, at: float) -> str:
    late = format_duration(max(0.0, at - (record.terms.start_by or at)))
    return f"expired: it was to be started {late} ago at the latest, and never was"
