"""Calls that come too often: debounce and throttle.

Both know calls *of a kind*: those of a task, or with the same values of some arguments, or with the same name that the
caller gave. While one of a kind waits for its start, another is not stored.

To *debounce* is to wait until it is quiet: a later call gives the one that waits its own arguments and moves its due
time, in one write that holds only while nobody has claimed it. Whoever comes too late for that is a new call. To
*throttle* is to do it at once, and then not again for a while: a later call in that time is the first one.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from holdfast.lifecycle.changes import Change
from holdfast.lifecycle.records import InvocationRecord


class Debounce(msgspec.Struct, frozen=True, kw_only=True):
    """`most_seconds` after the first call it runs, however many come."""

    seconds: float
    most_seconds: float | None = None
    key: str | None = None

    def first_due(self, now: float) -> float:
        return now + (self.seconds if self.most_seconds is None else min(self.seconds, self.most_seconds))

    def last_due(self, now: float) -> float:
        """When a call of now is due at the latest, however many follow."""
        return math.inf if self.most_seconds is None else now + self.most_seconds

    def next_due(self, waiting: InvocationRecord, now: float) -> float:
        """When the one that waits is due after another call."""
        due = now + self.seconds
        return due if self.most_seconds is None else min(due, waiting.created_at + self.most_seconds)


class Throttle(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    key: str | None = None


Pacing = Debounce | Throttle


def paced(record: InvocationRecord, pacing: Pacing) -> InvocationRecord:
    """A new call of this kind, which its twin names."""
    if isinstance(pacing, Debounce):
        return replace(record, due_at=pacing.first_due(record.created_at))
    terms = replace(record.terms, key_until=record.created_at + pacing.seconds)
    return replace(record, key=f"throttle {record.twin}", terms=terms)


def amended(waiting: InvocationRecord, by: InvocationRecord, *, due_at: float) -> Change:
    """The one that waits is called as the later one would have been. The operation is that of the later call."""
    call = by.history[0]
    return Change(
        name="amended",
        app=waiting.app,
        id=waiting.id,
        path=(waiting.status,),
        sources=frozenset({waiting.status}),
        epoch=waiting.epoch,
        operation=call.operation,
        at=call.at,
        why="debounced: a later call has taken its place",
        due_at=due_at,
        arguments=by.arguments,
    )
