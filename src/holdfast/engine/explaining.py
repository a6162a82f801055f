"""Gathers what surrounds an invocation, for `holdfast.lifecycle.explain` to say why it stands where it stands."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.lifecycle.explain import MOST_NAMED, Explanation, Surroundings, explain
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import AVAILABLE, FINAL, OWNED, Status
from holdfast.store.contract import Filter, Store

_OPEN = frozenset(Status) - FINAL

LimitOf = Callable[[str], Limit | None]
"""The limit of a task, if that is known."""


async def explained(
    store: Store, record: InvocationRecord, limit_of: LimitOf, dead_after_seconds: float
) -> Explanation:
    """Of the children of one that runs, the first is explained too, but not what that one may wait for in turn."""
    around = Surroundings(roster=await store.roster(record.app), now=store.now(), dead_after_seconds=dead_after_seconds)
    around = await _with_queue(store, record, limit_of, around)
    if record.status in OWNED:
        children = await store.find(record.app, Filter(parent=record.id, statuses=_OPEN), MOST_NAMED + 1)
        if children:
            beside = await _with_queue(store, children[0], limit_of, around)
            held_up = explain(children[0], beside).text
            around = msgspec.structs.replace(around, children=children, first_child=held_up)
    return explain(record, around)


async def _with_queue(store: Store, record: InvocationRecord, limit_of: LimitOf, around: Surroundings) -> Surroundings:
    """With what holds this one back, if it waits."""
    if record.status not in AVAILABLE and record.status is not Status.CONCURRENCY_CONTROLLED:
        return around
    return msgspec.structs.replace(
        around,
        pauses=await store.pauses(record.app),
        holders=await store.slot_holders(record.app, record.limit_key) if record.limit_key else (),
        limit=limit_of(record.task),
    )
