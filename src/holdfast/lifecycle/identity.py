"""Which calls are one and the same, for how long.

A call may have a *key*: while that is taken, no other call of the task has it. It is taken until a moment, or for some
time after the call has ended. And it may have a *twin*: while one of the same name waits to be started, another is not
stored. Both are unique in the store, so whoever inserts first has won, and nobody counts and then writes.

A key whose time is over stays with its invocation until somebody wants it; then it is freed, and that one gets it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import FINAL


def key_is_over(holder: InvocationRecord, now: float) -> bool:
    """Whether the key of this one may be given to another."""
    terms = holder.terms
    if terms.key_until is not None:
        return now >= terms.key_until
    return holder.status in FINAL and now >= holder.changed_at + terms.key_seconds


def in_the_way(wanted: InvocationRecord, found: Iterable[InvocationRecord]) -> InvocationRecord | None:
    """Which of those that were found, all of one app, has its id, else its key, else its twin."""
    by_key = by_twin = None
    for one in found:
        if one.id == wanted.id:
            return one
        if wanted.key is not None and (one.task, one.key) == (wanted.task, wanted.key):
            by_key = one
        if wanted.twin is not None and one.twin == wanted.twin:
            by_twin = one
    return by_key or by_twin
