"""What follows when user code raised: another attempt, or the end.

The policy is the one that was stored with the invocation when it was submitted, not the one that the code at hand
declares: a deploy does not change what was promised. One that cannot be read, because a newer version wrote it, parks
the invocation: to fail it would break that promise, and to guess would break another.

`RetryLater` says when, and with a policy that says whether. Without one it is a wish that is granted each time.
"""

from __future__ import annotations

from holdfast.clock import format_duration
from holdfast.errors import NotDecodable
from holdfast.execution.call import Raised
from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import Change
from holdfast.lifecycle.decoding import ahead
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.retries import GiveUp, Retry, RetryDecision, decide, load_policy


def change_after(
    record: InvocationRecord, raised: Raised, *, operation: str, at: float, random_unit: float, fingerprint: str | None
) -> Change:
    """The change that this failure means."""
    try:
        decision = _decision(record, raised, at, random_unit)
    except NotDecodable as error:
        why = f"{raised.why}; whether it is to be tried again is not known: {error}"
        return changes.parked(record, fingerprint=fingerprint, operation=operation, at=at, why=why, error=raised.error)
    if isinstance(decision, Retry):
        return changes.retried(
            record,
            error=raised.error,
            due_at=ahead(at, decision.wait_seconds),
            queue=decision.queue,
            operation=operation,
            at=at,
            why=f"{raised.why}; {decision.why}",
        )
    why = f"{raised.why}; {decision.why}" if decision.why else raised.why
    return changes.failed(record, error=raised.error, operation=operation, at=at, why=why)


def _decision(record: InvocationRecord, raised: Raised, at: float, random_unit: float) -> RetryDecision:
    number = record.failures + 1
    if raised.fatal:
        return GiveUp("it is not to be tried again" if record.terms.retries else "")
    wait = raised.retry_after
    if record.terms.retries is None:
        if wait is None:
            return GiveUp("")
        return Retry(wait, None, f"failure {number}; it asks to be tried again in {format_duration(wait)}")
    decision = decide(
        load_policy(record.terms.retries),
        attempt=number,
        age_seconds=at - record.created_at,
        error_types=raised.kinds,
        random_unit=random_unit,
    )
    if wait is None or isinstance(decision, GiveUp):
        return decision
    return Retry(wait, decision.queue, f"{decision.why}, but it asks for {format_duration(wait)}")
