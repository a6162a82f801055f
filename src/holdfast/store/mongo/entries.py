"""Entries in MongoDB. The key and the version decide."""

from __future__ import annotations

from collections.abc import Sequence

from pymongo import ASCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from holdfast.lifecycle.records import Entry
from holdfast.store.mongo.documents import Document, key_of

Entries = AsyncCollection[Document]


async def put(entries: Entries, entry: Entry) -> bool:
    key, facts = _key(entry), {"body": entry.body, "version": entry.version}
    if entry.due_at is not None:
        facts["due_at"] = entry.due_at
    names: Document = {"app": entry.app, "kind": entry.kind, "name": entry.name}
    if entry.version == 1:
        try:
            await entries.insert_one({"_id": key} | names | facts)
            return True
        except DuplicateKeyError:
            pass
    else:
        result = await entries.replace_one({"_id": key, "version": entry.version - 1}, names | facts)
        if result.matched_count:
            return True
    found = await entries.find_one({"_id": key})
    return found is not None and _entry(found) == entry


async def listing(entries: Entries, app: str, kind: str, names: Sequence[str] | None) -> list[Entry]:
    """Index: named, or _id."""
    if names is not None:
        keys = [key_of(app, f"{kind}|{name}") for name in names]
        found = await entries.find({"_id": {"$in": keys}}).to_list()
        return sorted(map(_entry, found), key=lambda entry: entry.name)
    cursor = entries.find({"app": app, "kind": kind}, hint="named").sort([("name", ASCENDING)])
    return [_entry(document) for document in await cursor.to_list()]


async def due(entries: Entries, app: str, kind: str, limit: int) -> list[Entry]:
    """Index: due."""
    if limit <= 0:
        return []
    wanted: Document = {"app": app, "kind": kind, "due_at": {"$gte": float("-inf")}}
    order = [("due_at", ASCENDING), ("name", ASCENDING)]
    return [_entry(found) for found in await entries.find(wanted, hint="due").sort(order).limit(limit).to_list()]


async def remove(entries: Entries, entry: Entry) -> bool:
    return (await entries.delete_one({"_id": _key(entry), "version": entry.version})).deleted_count > 0


def _key(entry: Entry) -> str:
    return key_of(entry.app, f"{entry.kind}|{entry.name}")


def _entry(found: Document) -> Entry:
    return Entry(
        app=found["app"],
        kind=found["kind"],
        name=found["name"],
        body=bytes(found["body"]),
        version=found["version"],
        due_at=found.get("due_at"),
    )
