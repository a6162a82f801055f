"""Counts how often the owner of an invocation died or was killed.

A crash counts against the work that was running, as its possible cause. After too many in a row the invocation is ended
instead of being run again, so that a poison pill does not kill one worker after another. An attempt that ended by
itself, even a failed one, resets the count.

Where a runner ends a worker for one call, other calls of that worker are not charged. But one of them may be the cause,
and then it would never end. So these kills are counted too, apart from crashes, by the reason in the history.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.model.records import HistoryEntry, InvocationRecord
from holdfast.model.status import Status

PASSED_THROUGH = frozenset({Status.KILLED, Status.PENDING_RECOVERY, Status.RUNNING_RECOVERY})
_PROGRESS = frozenset({Status.RETRY, Status.SUSPENDED, Status.PARKED})
_COLLATERAL = "; it ran beside that, and is not charged"


def crashes_in_a_row(history: Sequence[HistoryEntry], progress_epoch: int = 0) -> int:
    """Return how many owners died one after the other. For a run, the log has the epoch of its last progress: a crash
    in that epoch is the first in a row.
    """
    count = 0
    for entry in reversed(history):
        if entry.status in _PROGRESS or entry.epoch < progress_epoch:
            break
        count += entry.status is Status.RUNNING_RECOVERY
    return count


def collateral(why: str) -> str:
    """Return the reason for what ran in a worker that was ended for another call."""
    return why + _COLLATERAL


def kills_in_a_row(history: Sequence[HistoryEntry], progress_epoch: int = 0) -> int:
    """Return how often a worker was ended for another call while this invocation ran."""
    count = 0
    for entry in reversed(history):
        if entry.status in _PROGRESS or entry.epoch < progress_epoch:
            break
        count += entry.status is Status.REROUTED and entry.why.endswith(_COLLATERAL)
    return count


def died_since(history: Sequence[HistoryEntry], since: float) -> set[str]:
    """Return the owners from which an invocation was taken since then."""
    epochs = {entry.epoch for entry in history if entry.status in PASSED_THROUGH and entry.at >= since}
    return {entry.owner for entry in history if entry.owner is not None and entry.epoch in epochs}


def last_crash(record: InvocationRecord, max_crashes: int, why: str, progress_epoch: int = 0) -> str | None:
    """Return why an invocation may not be run again after this crash, or None if it may."""
    before = taken_from(record)
    if before is Status.PENDING or (before is Status.CANCELLING and not record.compensates):
        return None
    if record.at_most_once:
        return f"{why}; it is to be run at most once"
    crashes = crashes_in_a_row(record.history, progress_epoch) + (record.status not in PASSED_THROUGH)
    if crashes > max_crashes and record.status is not Status.KILLED:
        return f"{why}; that was crash {crashes} in a row, and {max_crashes} are forgiven: {_story(record)}"
    return None


def has_begun_before(record: InvocationRecord) -> bool:
    """Return whether a run that its owner has not begun yet was begun by an earlier owner."""
    return record.compensates and record.attempt > (record.status is not Status.PENDING)


def taken_from(record: InvocationRecord) -> Status:
    """Return the status that an invocation is or was taken from: it may stand on its way back to the queue."""
    walked = (entry.status for entry in reversed(record.history))
    return next((status for status in walked if status not in PASSED_THROUGH), record.status)


def _story(record: InvocationRecord) -> str:
    """Name the owners that died with this invocation."""
    owners, owner = list[str](), "?"
    for entry in record.history:
        if entry.status is Status.RUNNING_RECOVERY:
            owners.append(owner)
        owner = entry.owner or owner
    return "before, it ran on " + ", ".join(owners[-5:]) if owners else "it had not crashed before"
