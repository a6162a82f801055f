"""Which calls count as the same, and for how long.

A call may have a *key*: while it is taken, no other call of the task has it. It is taken until a moment, or for some
time after the call has ended. A call may have a *dedup key*: while a call with the same dedup key waits for its start,
another is not stored. Both are unique in the store, so that the first insert wins, without counting before writing.

A key whose time is over stays with its invocation until another call wants it; then it is freed, and that call gets it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL


def key_is_over(holder: InvocationRecord, now: float) -> bool:
    """Return whether the key of an invocation may be given to another."""
    terms = holder.terms
    if terms.key_until is not None:
        return now >= terms.key_until
    return holder.status in FINAL and now >= holder.changed_at + terms.key_seconds


def find_conflict(wanted: InvocationRecord, found: Iterable[InvocationRecord]) -> InvocationRecord | None:
    """Return the first of the found invocations that has the id of `wanted`, else its key, else its dedup key."""
    by_key = by_dedup_key = None
    for one in found:
        if one.id == wanted.id:
            return one
        if wanted.key is not None and (one.task, one.key) == (wanted.task, wanted.key):
            by_key = one
        if wanted.dedup_key is not None and one.dedup_key == wanted.dedup_key:
            by_dedup_key = one
    return by_key or by_dedup_key
