"""Entries in MongoDB. The key, the version and the body decide."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import msgspec
from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from holdfast.model.decoding import check_body, corrupt
from holdfast.model.records import FOREVER, Entry
from holdfast.store.contract import EntryOrder
from holdfast.store.mongo.documents import Document, check_key, key_of, name_of
from holdfast.store.mongo.listing import Query

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
    """Return a new entry as it is stored."""
    return {"_id": _key(entry), "app": entry.app, "kind": entry.kind, "name": entry.name} | _facts(entry)


def conflict_of(found: Document | None, now: float) -> Entry | None:
    """Return the entry that has the name of a new one, unless its time to be kept is over."""
    there = None if found is None else entry_of(found)
    return there if there is None or there.keep_until is None or there.keep_until > now else None


async def get(entries: Entries, entry: Entry) -> Document | None:
    """Return the document with the name of an entry."""
    return await entries.find_one({"_id": _key(entry)})


def look(
    app: str, kind: str, names: Sequence[str] | None, order: EntryOrder, before: str | None, subject: str | None = None
) -> Query:
    """Return the query of a listing. Index: _id, named, subject or due. An entry without a proper due time comes first,
    so that it is read and quarantined.
    """
    if names is not None:
        return Query({"_id": {"$in": [key_of(app, f"{kind}|{name}") for name in names]}}, None, [("_id", ASCENDING)])
    wanted: Document = {"app": app, "kind": kind}
    if order is EntryOrder.DUE:
        return Query(wanted | {"due_at": {"$exists": True}}, "due", [("due_at", ASCENDING), ("name", ASCENDING)])
    if before is not None:
        wanted["name"] = {"$lt": before}
    if subject is not None:
        wanted["subject"] = subject
    index = "named" if subject is None else "subject"
    return Query(wanted, index, [("name", DESCENDING if order is EntryOrder.LATEST else ASCENDING)])


async def listing(entries: Entries, look: Query, limit: int | None) -> list[Document]:
    if limit is not None and limit <= 0:
        return []  # to MongoDB, a limit of 0 is none
    return await entries.find(look.wanted, hint=look.hint).sort(look.order).limit(limit or 0).to_list()


async def remove_expired(entries: Entries, app: str, at: float, limit: int) -> int:
    """Remove entries whose time is over. An entry that was changed meanwhile, and is kept longer, stays. Index:
    expires.
    """
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
    if entry.subject is not None:
        facts["subject"] = entry.subject
    if entry.payloads:
        facts["payloads"] = list(entry.payloads)
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
