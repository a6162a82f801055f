"""Slots, and those who wait for them.

The unique index `slot` lets nobody hold a slot twice, so there is nothing to lock and nothing to count before a write.
Letting a waiter go back to the queue is one findOneAndUpdate that takes the first of the index `waiting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pymongo import ReturnDocument
from pymongo.errors import OperationFailure

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.lifecycle.claims import released
from holdfast.lifecycle.limits import Holder, Release
from holdfast.lifecycle.records import InvocationRecord
from holdfast.store.mongo import queries
from holdfast.store.mongo.documents import Document, pipeline
from holdfast.store.mongo.quarantine import Quarantine
from holdfast.store.mongo.queries import Invocations
from holdfast.store.mongo.retry import is_about_everything, is_about_the_document

_MOST_LEFT = 100


async def held_slots(invocations: Invocations, app: str, keys: Sequence[str]) -> dict[str, dict[str, Holder]]:
    """For each of these keys its slots that are held, and by whom."""
    held: dict[str, dict[str, Holder]] = {key: {} for key in keys}
    for found in await queries.held(invocations, app, keys):
        held[found["limit_key"]][found["slot"]] = Holder(str(found.get("id")), str(found.get("owner")))
    return held


async def waiting_keys(invocations: Invocations, app: str) -> dict[str, int]:
    keys = await queries.waiting_keys(invocations, app)
    return {key: len(slots) for key, slots in (await held_slots(invocations, app, keys)).items()} if keys else {}


async def release_waiters(
    invocations: Invocations, quarantine: Quarantine, app: str, wishes: Sequence[Release], operation: str, at: float
) -> list[InvocationRecord]:
    # Hardly ever does anybody wait: then one question is all. Who begins to wait later looks once more himself.
    if len(wishes) == 1:
        wishes = wishes if await queries.does_anybody_wait(invocations, app, wishes[0].limit_key) else []
    elif wishes:
        waiting = await queries.waiting_keys(invocations, app, [wish.limit_key for wish in wishes])
        wishes = [wish for wish in wishes if wish.limit_key in waiting]
    counted = [wish.limit_key for wish in wishes if wish.most is not None]
    held = await held_slots(invocations, app, counted) if counted else {}
    gone: list[InvocationRecord] = []
    for wish in wishes:
        free = wish.count if wish.most is None else min(wish.count, wish.most - len(held[wish.limit_key]))
        for _ in range(free):
            found = await _release_one(invocations, quarantine, app, wish, operation, at)
            if found is None:
                break
            gone += await quarantine.readable([found])
    return gone


async def _release_one(
    invocations: Invocations, quarantine: Quarantine, app: str, wish: Release, operation: str, at: float
) -> Document | None:
    """The one that has waited longest goes back to the queue. One that cannot is set aside, or left if the server
    refuses it for a reason of its own, and the next one goes.
    """
    nobody = InvocationRecord(id=InvocationId("*"), app=app, task="*", arguments=b"", created_at=0, due_at=0)
    update = pipeline(released(nobody, operation=operation, at=at))
    wanted, left = queries.waiting(app, wish.limit_key, wish.without), list[str]()
    while True:
        try:
            return await invocations.find_one_and_update(
                wanted, update, sort=queries.QUEUE_ORDER, hint="waiting", return_document=ReturnDocument.AFTER
            )
        except OperationFailure as error:
            if is_about_everything(error):
                raise
            document = await invocations.find_one(wanted, sort=queries.QUEUE_ORDER, hint="waiting")
            if document is None:
                return None
            if is_about_the_document(error):
                await quarantine.set_aside(document, CorruptRecord(f"{document['_id']} cannot be released: {error}"))
            elif len(left) < _MOST_LEFT:
                quarantine.leave(document["_id"], error)
                left.append(document["_id"])
                wanted["_id"] = {"$nin": left}
            else:
                raise
