"""Changes that ask an invocation to end, or end it if it was not started in time.

An invocation without an owner is CANCELLED by one write. An owner is asked: CANCELLING keeps the owner, its epoch and
its slot, and gives its code time to clean up. A claim, an end or a recovery at the same moment meets the same guard:
one write is first, and the other is refused and looks again.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.codec import ErrorRecord
from holdfast.model.changes import Change, ChangeFacts, Push, change_of, owned
from holdfast.model.decoding import ahead
from holdfast.model.records import Cancellation, InboxEntry, InvocationRecord
from holdfast.model.state_writes import CANCEL_ENTRY
from holdfast.model.status import FINAL, SOURCES, TABLE, Status

_AT_ONCE = frozenset(status for status in SOURCES[Status.CANCELLED] if not TABLE[status].requires_ownership)
_ASKED = SOURCES[Status.CANCELLING]
_NEVER_STARTED = frozenset(
    {Status.REGISTERED, Status.REROUTED, Status.CONCURRENCY_CONTROLLED, Status.PARKED}
)  # that may fail without an owner


def must_end_by(record: InvocationRecord) -> float:
    """Return the moment by which running code has to have ended: its timeout, or the grace of a cancellation. Infinity
    if there is neither.
    """
    if record.status is Status.CANCELLING and record.cancellation is not None:
        return record.cancellation.until
    if record.terms.timeout is None or record.status is Status.PENDING or record.run is not None:
        return float("inf")  # the body of a run is asked to end, and its steps have limits of their own
    begun = (entry.at for entry in reversed(record.history) if entry.status is Status.RUNNING)
    return next(begun, record.changed_at) + record.terms.timeout


def cancel(record: InvocationRecord, cancellation: Cancellation, *, operation: str) -> Change | Push | None:
    """Return the change that ends an invocation, or asks its owner to end it; None if it has ended or is ending. A run
    that has started and has no owner gets the request into its inbox: its body may compensate.

    A caller that is refused, since the owner changed meanwhile, looks again and asks the new owner.
    """
    status, path = record.status, tuple[Status, ...]()
    if record.compensates and status not in _ASKED and status is not Status.PARKED:
        return _push(record, cancellation, operation)
    if status in _AT_ONCE:
        name, path, sources = "cancelled", (Status.CANCELLED,), _AT_ONCE
    elif status in _ASKED:
        name, path, sources = "cancelling", (Status.CANCELLING,), _ASKED
    elif status is Status.PENDING_RECOVERY:  # on its way back to the queue
        name, path, sources = "cancelled", (Status.REROUTED, Status.CANCELLED), frozenset({status})
    else:
        return None
    why = str(cancellation)
    facts: ChangeFacts = {"operation": operation, "at": cancellation.at, "why": why, "cancellation": cancellation}
    return change_of(name, record, path, sources, **facts)


def _push(record: InvocationRecord, cancellation: Cancellation, operation: str) -> Push | None:
    if record.status in FINAL or record.status is Status.CANCELLING or record.cancellation is not None:
        return None
    at = cancellation.at
    return Push(
        app=record.app,
        id=record.id,
        entry=InboxEntry(id=CANCEL_ENTRY, kind=CANCEL_ENTRY, at=at),
        operation=operation,
        at=at,
        why=str(cancellation),
        cancellation=cancellation,
    )


def gave_way(record: InvocationRecord, *, operation: str, at: float, how: str = "") -> Change:
    """End an invocation that is being cancelled: its owner has ended its code, or has never begun."""
    said = str(record.cancellation) if record.cancellation is not None else "cancelled"
    why = f"{said}; {how}" if how else said
    sources = frozenset({Status.CANCELLING})
    return owned("gave_way", record, (Status.CANCELLED,), sources, operation=operation, at=at, why=why)


def is_too_late(record: InvocationRecord, now: float) -> bool:
    """Return whether an invocation had to be started before now, and never was; a claim for a first start counts as
    none.
    """
    start_by = record.terms.start_by
    started = record.attempt - (record.status is Status.RUNNING)
    return start_by is not None and now >= start_by and started == 0


def expired(record: InvocationRecord, *, error: ErrorRecord, operation: str, at: float) -> Change | None:
    """End an invocation that was not started in time; None if it has been started, or its owner has to decide."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why_expired(record, at), "error": error}
    if record.status in _NEVER_STARTED:
        return change_of("expired", record, (Status.FAILED,), _NEVER_STARTED, **facts)
    through = {Status.PENDING: Status.REROUTED, Status.RUNNING: Status.KILLED}.get(record.status)
    if through is None:
        return None
    facts["never_began"] = through is Status.KILLED
    return owned("expired", record, (through, Status.FAILED), frozenset({record.status}), **facts)


def why_expired(record: InvocationRecord, at: float) -> str:
    late = format_duration(max(0.0, at - (record.terms.start_by or at)))
    return f"expired: it was to be started {late} ago at the latest, and never was"


def asked_to_compensate(record: InvocationRecord, *, operation: str, at: float, is_said: bool = True) -> Change:
    """Ask a run to end whose cancellation came while it had no owner: its new owner makes this change. Unless the body
    has the request already (`is_said`), its grace begins now.
    """
    asked = record.cancellation
    facts: ChangeFacts = {"operation": operation, "at": at, "why": "cancelled" if asked is None else str(asked)}
    if asked is not None and not is_said:
        terms = record.terms.cancel_grace  # `until` grows with each owner that dies before the body knows
        grace = asked.until - asked.at if terms is None else terms
        facts["cancellation"] = replace(asked, until=max(asked.until, ahead(at, grace)))
    return owned("cancelling", record, (Status.CANCELLING,), frozenset({Status.RUNNING, Status.RESUMED}), **facts)
