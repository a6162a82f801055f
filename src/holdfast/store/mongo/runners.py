"""Queries of the roster in MongoDB. The server stamps heartbeats, and computes their age."""

from __future__ import annotations

from typing import Any

from pymongo import ASCENDING, ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.store.mongo.documents import Document

_AHEAD_SECONDS = 1.0
_NOW: Document = {"$divide": [{"$toLong": "$$NOW"}, 1000]}  # the server's


async def beat(runners: AsyncCollection[Document], key: str, facts: Document) -> Document | None:
    """Refresh a roster entry, and return it as it is then."""
    stage = {"$set": {"heartbeat_at": _NOW} | {name: {"$literal": fact} for name, fact in facts.items()}}
    return await runners.find_one_and_update({"_id": key}, [stage], return_document=ReturnDocument.AFTER)


async def remove(runners: AsyncCollection[Document], key: str, heartbeat_at: float | None, again: bool) -> bool:
    silent = {} if heartbeat_at is None else {"heartbeat_at": heartbeat_at}
    if (await runners.delete_one({"_id": key} | silent)).deleted_count:
        return True
    # If an earlier try may have removed it, two runners that recover its work are better than none.
    return again and await runners.find_one({"_id": key}, {"_id": True}) is None


async def roster(runners: AsyncCollection[Document], app: str) -> list[Document]:
    """Return all entries, oldest first. Index: roster."""
    order = [("started_at", ASCENDING), ("id", ASCENDING)]
    return await runners.find({"app": app}, hint="roster").sort(order).to_list()


async def silent(runners: AsyncCollection[Document], app: str, now: float) -> list[Document]:
    """Return the entry with the oldest heartbeat, and entries that are stamped ahead of the server's time: its clock
    was set back, or another server is the primary. `silent` in each is the age of the heartbeat. Index: heartbeats.
    """
    age = {"$subtract": [_NOW, "$heartbeat_at"]}
    silent = {"$cond": [{"$isNumber": "$heartbeat_at"}, age, 0]}  # what cannot be read is set aside by the caller
    ahead: list[dict[str, Any]] = [
        {"$match": {"app": app, "heartbeat_at": {"$gt": now + _AHEAD_SECONDS}}},
        {"$sort": {"heartbeat_at": 1}},
    ]
    stages: list[dict[str, Any]] = [
        {"$match": {"app": app}},
        {"$sort": {"heartbeat_at": 1}},
        {"$limit": 1},
        {"$unionWith": {"coll": runners.name, "pipeline": ahead}},
        {"$set": {"silent": silent}},
    ]
    found = await (await runners.aggregate(stages, hint="heartbeats")).to_list()
    return list({document["_id"]: document for document in found}.values())
