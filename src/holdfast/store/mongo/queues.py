"""Queues in MongoDB: what lies in each, and which are paused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from pymongo import ASCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from holdfast.lifecycle.decoding import PAUSE, corrupt
from holdfast.lifecycle.queues import MOST_OPERATIONS, QueueDepth, QueuePause, gathered, in_lane
from holdfast.lifecycle.status import Status
from holdfast.store.mongo.documents import Document, check_key, key_of, name_of
from holdfast.store.mongo.queries import is_moment
from holdfast.store.mongo.sentinels import REAL_DUE

Queues = AsyncCollection[Document]


async def depths(invocations: AsyncCollection[Document], app: str, at: float) -> list[QueueDepth]:
    """Index: due, without reading a document; owned; waiting."""
    parts: list[QueueDepth] = []
    for stages, hint in looks(app, at):
        for found in await (await invocations.aggregate(stages, hint=hint)).to_list():
            parts.append(_part(found, hint))
    return gathered(parts)


def looks(app: str, at: float) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The questions, and the index of each."""
    is_due = {"$lte": ["$due_at", at]}
    counted = {
        "waiting": {"$sum": {"$cond": [is_due, 1, 0]}},
        "scheduled": {"$sum": {"$cond": [is_due, 0, 1]}},
        "oldest": {"$min": "$due_at"},
    }
    yield [{"$match": {"ready": True, "app": app, "due_at": REAL_DUE}}, {"$group": {"_id": "$lane", **counted}}], "due"
    by_queue = {"$group": {"_id": "$queue", "n": {"$sum": 1}}}
    yield [{"$match": {"owned": True, "app": app}}, by_queue], "owned"
    yield [{"$match": {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app}}, by_queue], "waiting"


def _part(found: Document, hint: str) -> QueueDepth:
    name = str(found["_id"])
    if hint == "due":
        return in_lane(
            name, found["waiting"], found["scheduled"], oldest if is_moment(oldest := found["oldest"]) else None
        )
    return QueueDepth(name=name, running=found["n"]) if hint == "owned" else QueueDepth(name=name, blocked=found["n"])


async def pause(queues: Queues, wanted: QueuePause) -> Document | None:
    """The queue as it is then. Index: _id. It applies to one that is not paused, and was not by this very operation."""
    key = key_of(wanted.app, wanted.name)
    facts: Document = {"app": wanted.app, "name": wanted.name}
    facts |= {"paused_at": wanted.at, "paused_by": wanted.by, "reason": wanted.reason}
    free = {"_id": key, "paused_at": None, "operations": {"$ne": wanted.operation}}
    with contextlib.suppress(DuplicateKeyError):  # there is one, and it is not free
        await queues.update_one(free, {"$set": facts, "$push": _remembered(wanted.operation)}, upsert=True)
    return await queues.find_one({"_id": key})


async def resume(queues: Queues, app: str, name: str, operation: str) -> bool:
    """Index: _id."""
    key = key_of(app, name)
    gone = {"paused_at": None, "paused_by": "", "reason": ""}
    paused = {"_id": key, "paused_at": {"$gt": 0}, "operations": {"$ne": operation}}
    result = await queues.update_one(paused, {"$set": gone, "$push": _remembered(operation)})
    return result.modified_count > 0 or await queues.find_one({"_id": key, "operations": operation}) is not None


async def pauses(queues: Queues, app: str) -> list[Document]:
    """Index: paused."""
    order = [("name", ASCENDING)]
    return await queues.find({"app": app, "paused_at": {"$ne": None}}, hint="paused").sort(order).to_list()


def _remembered(operation: str) -> Document:
    return {"operations": {"$each": [operation], "$slice": -MOST_OPERATIONS}}


def pause_of(document: Document) -> QueuePause | None:
    """Return the pause of a queue's document; None if it is not paused. Raises `CorruptRecord`."""
    try:
        operations = msgspec.convert(document["operations"], list[str])
        fields = {"app": document["app"], "name": document["name"], "operation": operations[-1]}
        fields |= {"at": document["paused_at"], "by": document["paused_by"], "reason": document["reason"]}
        is_paused = fields["at"] is not None
        found = msgspec.convert(fields if is_paused else fields | {"at": 0.0}, QueuePause)
        check_key(document, key_of(found.app, found.name))
        return found if is_paused else None
    except Exception as error:
        raise corrupt(PAUSE, name_of(document), error) from error
