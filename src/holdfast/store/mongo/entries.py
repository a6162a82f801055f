"""Entries in MongoDB. The key, the version and the body decide."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import msgspec
from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from holdfast.lifecycle.decoding import check_body, corrupt
from holdfast.lifecycle.records import Entry
from holdfast.lifecycle.retention import FOREVER
from holdfast.store.mongo.documents import Document, check_key, key_of, name_of

Entries = AsyncCollection[Document]


async def put(entries: Entries, entry: Entry, over: Entry | None = None) -> bool:
    key, facts = _key(entry), _facts(entry)
    names: Document = {"app": entry.app, "kind": entry.kind, "name": entry.name}
    if entry.version == 1:
        try:
            await entries.insert_one({"_id": key} | names | facts)
            return True
        except DuplicateKeyError:
            pass
    else:
        before: Document = {"_id": key, "version": entry.version - 1} | ({"body": over.body} if over else {})
        result = await entries.replace_one(before, names | facts)
        if result.matched_count:
            return True
    return False


def document_of(entry: Entry) -> Document:
    """A new entry as it is stored."""
    return {"_id": _key(entry), "app": entry.app, "kind": entry.kind, "name": entry.name} | _facts(entry)


def in_the_way(entry: Entry, found: Document | None, now: float) -> Entry | None:
    """What has the name of a new entry, unless it need not be kept any longer."""
    there = None if found is None else entry_of(found)
    return there if there is None or there.keep_until is None or there.keep_until > now else None


async def get(entries: Entries, entry: Entry) -> Document | None:
    """What has its name."""
    return await entries.find_one({"_id": _key(entry)})


async def listing(entries: Entries, app: str, kind: str, names: Sequence[str] | None) -> list[Document]:
    """Index: named, or _id."""
    if names is not None:
        keys = [key_of(app, f"{kind}|{name}") for name in names]
        return await entries.find({"_id": {"$in": keys}}).sort([("_id", ASCENDING)]).to_list()
    cursor = entries.find({"app": app, "kind": kind}, hint="named").sort([("name", ASCENDING)])
    return await cursor.to_list()


async def due(entries: Entries, app: str, kind: str, limit: int) -> list[Document]:
    """Index: due. What is due at no time at all comes first, so somebody looks at it, and sets it aside."""
    if limit <= 0:
        return []
    wanted: Document = {"app": app, "kind": kind, "due_at": {"$exists": True}}
    order = [("due_at", ASCENDING), ("name", ASCENDING)]
    return await entries.find(wanted, hint="due").sort(order).limit(limit).to_list()


async def latest(entries: Entries, app: str, kind: str, limit: int, before: str | None) -> list[Document]:
    """Index: named."""
    if limit <= 0:
        return []
    wanted: Document = {"app": app, "kind": kind} | ({} if before is None else {"name": {"$lt": before}})
    return await entries.find(wanted, hint="named").sort([("name", DESCENDING)]).limit(limit).to_list()


async def remove_expired(entries: Entries, app: str, at: float, limit: int) -> int:
    """Index: expires. One that was changed meanwhile, and is kept longer, stays."""
    if limit <= 0:
        return 0
    over: Document = {"expires_at": {"$lte": dt.datetime.fromtimestamp(at, dt.UTC)}}
    found = entries.find(over | {"app": app}, {"_id": True}, hint="expires").sort([("expires_at", ASCENDING)])
    keys = [one["_id"] for one in await found.limit(limit).to_list()]
    return (await entries.delete_many({"_id": {"$in": keys}} | over)).deleted_count if keys else 0


async def remove(entries: Entries, entry: Entry) -> bool:
    there: Document = {"_id": _key(entry), "version": entry.version, "body": entry.body}
    return (await entries.delete_one(there)).deleted_count > 0


def _key(entry: Entry) -> str:
    return key_of(entry.app, f"{entry.kind}|{entry.name}")


def _facts(entry: Entry) -> Document:
    facts: Document = {"body": entry.body, "version": entry.version}
    if entry.due_at is not None:
        facts["due_at"] = entry.due_at
    if entry.keep_until is not None:
        facts["keep_until"] = entry.keep_until
        if entry.keep_until < FOREVER:
            facts["expires_at"] = dt.datetime.fromtimestamp(entry.keep_until, dt.UTC)
    return facts


def entry_of(document: Document) -> Entry:
    """Return the entry of a document. Raises `CorruptRecord`; what its body says is not looked at."""
    kind, _, name = name_of(document).partition("|")
    try:
        body, version = (
            check_body(document["body"]),
            document["version"],
        )  # the version has a default, and must be there
        entry = msgspec.convert(document | {"version": version, "body": body}, Entry)
        check_key(document, _key(entry))
        return entry
    except Exception as error:
        raise corrupt(kind, name, error) from error
