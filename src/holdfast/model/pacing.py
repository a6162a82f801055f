"""Debounce and throttle, for calls that come too often.

Both know calls *of a kind*: of a task, or with the same values of some arguments, or with the same name that the caller
gave. While a call of a kind waits for its start, another is not stored.

To *debounce* is to wait until no further call comes: a later call replaces the arguments of the waiting one and moves
its due time, in one write that holds only until a claim. To *throttle* is to run at once, and then not again for a
while: a later call in that time gets the first invocation.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from holdfast.model.changes import Change, ChangeFacts, change_of
from holdfast.model.records import InvocationRecord


class Debounce(msgspec.Struct, frozen=True, kw_only=True):
    """Runs `max_seconds` after the first call, however many follow."""

    seconds: float
    max_seconds: float | None = None
    key: str | None = None

    def first_due(self, now: float) -> float:
        return now + (self.seconds if self.max_seconds is None else min(self.seconds, self.max_seconds))

    def last_due(self, now: float) -> float:
        """Return when a call of now is due at the latest, however many follow."""
        return math.inf if self.max_seconds is None else now + self.max_seconds

    def next_due(self, waiting: InvocationRecord, now: float) -> float:
        """Return when the waiting invocation is due after another call."""
        due = now + self.seconds
        return due if self.max_seconds is None else min(due, waiting.created_at + self.max_seconds)


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    key: str | None = None


Pacing = Debounce | Throttle


def paced(record: InvocationRecord, pacing: Pacing) -> InvocationRecord:
    """Return a new call of the kind that its dedup key names."""
    if isinstance(pacing, Debounce):
        return replace(record, due_at=pacing.first_due(record.created_at))
    terms = replace(record.terms, key_until=record.created_at + pacing.seconds)
    return replace(record, key=f"throttle {record.dedup_key}", terms=terms)


def amended(waiting: InvocationRecord, by: InvocationRecord, *, due_at: float) -> Change:
    """Replace the arguments of a waiting invocation by those of a later call, whose operation it gets."""
    call, status = by.history[0], waiting.status
    why = "debounced: a later call has taken its place"
    facts: ChangeFacts = {
        "operation": call.operation,
        "at": call.at,
        "why": why,
        "due_at": due_at,
        "arguments": by.arguments,
    }
    return change_of("amended", waiting, (status,), frozenset({status}), **facts)
