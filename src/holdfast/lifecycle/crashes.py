"""How often an invocation has taken its owner with it.

A crash counts against the work that was running: it may be the cause. After so many in a row it is ended instead of
being run again, so that a poison pill does not kill one worker after another for ever. An attempt that came to an end
of its own, even a failed one, shows that the work can be run, and the count starts anew.

Where a runner ends a worker for one call, what ran beside that is not charged: who was past its time is known, and who
kept the worker from seeing to it is not. But it may be one of those, and then it would never end, nor let others end.
So these kills are counted too, apart from crashes, by the reason that the line of the history gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lifecycle.records import HistoryEntry, InvocationRecord
from holdfast.lifecycle.status import Status

PASSED_THROUGH = frozenset({Status.KILLED, Status.PENDING_RECOVERY, Status.RUNNING_RECOVERY})
_PROGRESS = frozenset({Status.RETRY, Status.SUSPENDED, Status.PARKED})
_BESIDE = "; it ran beside that, and is not charged"


def crashes_in_a_row(history: Sequence[HistoryEntry]) -> int:
    count = 0
    for entry in reversed(history):
        if entry.status in _PROGRESS:
            break
        count += entry.status is Status.RUNNING_RECOVERY
    return count


def beside(why: str) -> str:
    """Return the reason for what ran in a worker that was ended for another call."""
    return why + _BESIDE


def kills_in_a_row(history: Sequence[HistoryEntry]) -> int:
    """How often its worker was ended for another call while it ran."""
    count = 0
    for entry in reversed(history):
        if entry.status in _PROGRESS:
            break
        count += entry.status is Status.REROUTED and entry.why.endswith(_BESIDE)
    return count


def last_crash(record: InvocationRecord, most: int, why: str) -> str | None:
    """Why this crash is the last one that the invocation is forgiven, or None if it may be run again."""
    if taken_from(record) in (Status.PENDING, Status.CANCELLING):
        return None
    if record.at_most_once:
        return f"{why}; it is to be run at most once"
    crashes = crashes_in_a_row(record.history) + (record.status not in PASSED_THROUGH)
    if crashes > most and record.status is not Status.KILLED:
        return f"{why}; that was crash {crashes} in a row, and {most} are forgiven: {_story(record)}"
    return None


def taken_from(record: InvocationRecord) -> Status:
    """The status that it is taken from, or was: it may stand on its way back to the queue."""
    walked = (entry.status for entry in reversed(record.history))
    return next((status for status in walked if status not in PASSED_THROUGH), record.status)


def _story(record: InvocationRecord) -> str:
    """The owners that it was taken from."""
    owners, owner = list[str](), "?"
    for entry in record.history:
        if entry.status is Status.RUNNING_RECOVERY:
            owners.append(owner)
        owner = entry.owner or owner
    return "before, it ran on " + ", ".join(owners[-5:]) if owners else "it had not crashed before"
