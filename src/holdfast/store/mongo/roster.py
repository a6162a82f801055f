"""Looks at the roster in MongoDB. Heartbeats are stamped by the server, and it tells how old they are."""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.collection import AsyncCollection

from holdfast.store.mongo.documents import Document

_AHEAD_SECONDS = 1.0


async def silent(runners: AsyncCollection[Document], app: str, now: float) -> list[Document]:
    """Return the entry with the oldest heartbeat, and those that the server has stamped ahead of its time: its clock
    was set back, or another server is the primary. `silent` in each is how old the heartbeat is. Index: heartbeats.
    """
    age = {"$subtract": [{"$divide": [{"$toLong": "$$NOW"}, 1000]}, "$heartbeat_at"]}
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
