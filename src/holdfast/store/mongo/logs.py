"""Logs of runs and streams in MongoDB: a page is a document, inserted once and never changed.

Its `_id` is the place of the page (app, run, generation, first position), padded so that the order of keys is the order
of the log: the index that every collection has serves appending, reading and fencing.

A read with majority may miss the last pages after an election, until the new primary has written something. An owner
has: its claim, or its page `takeover`, is acknowledged by a majority before the log is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from bson import Binary
from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError, DuplicateKeyError

from holdfast.model.decoding import PAGE, corrupt
from holdfast.model.log import Page, check_page, page_name, stream_logs
from holdfast.store.mongo.documents import Document, check_key, key_of
from holdfast.store.mongo.retry import DUPLICATE

Collection = AsyncCollection[Document]


def prefix(app: str, run: str, generation: int | None = None) -> str:
    """Return what the keys of a log begin with."""
    key = key_of(app, run)
    return f"{key}|" if generation is None else f"{key}|{generation:06d}|"


def page_key(app: str, run: str, generation: int, first: int) -> str:
    return f"{prefix(app, run, generation)}{first:09d}"


def document_of(page: Page) -> Document:
    document: Document = msgspec.structs.asdict(page) | {"events": Binary(page.events)}
    payloads, writer = list(document.pop("payloads")), document.pop("writer")
    more = ({"payloads": payloads} if payloads else {}) | ({"writer": writer} if writer else {})
    return {"_id": page_key(page.app, page.run, page.generation, page.first), **document, **more}


def page_of(document: Mapping[str, Any]) -> Page:
    """Return the page of a document. Raises `CorruptRecord`."""
    try:
        if isinstance(document.get("events"), str):  # a text would be taken for base64
            raise TypeError("Expected `bytes`, got `str` - at `$.events`")
        page = msgspec.convert(dict(document), Page)
        check_key(document, page_key(page.app, page.run, page.generation, page.first))
        return check_page(page)
    except Exception as error:
        raise corrupt(PAGE, page_name(*_place(document)), error) from error


def _place(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return run and first position, from the key: the fields may be damaged."""
    run, _, first = str(document.get("_id")).rpartition("|")
    return run.rpartition("|")[0].partition("|")[2], first.lstrip("0")


async def append(log: Collection, pages: Sequence[Page]) -> list[int]:
    """Insert pages, in one command. Return the indexes of those whose place is taken."""
    documents = [document_of(page) for page in pages]
    if len(documents) == 1:  # a quick step alone: a third of what the driver's bulk costs
        try:
            await log.insert_one(documents[0])
        except DuplicateKeyError:
            return [0]
        return []
    try:
        await log.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        errors = error.details.get("writeErrors", [])
        if error.details.get("writeConcernErrors") or any(item["code"] != DUPLICATE for item in errors):
            raise
        return [item["index"] for item in errors]
    return []


async def read(
    log: Collection,
    app: str,
    run: str,
    generation: int,
    after: int,
    limit: int,
    *,
    until: int | None = None,
    latest: bool = False,
) -> list[Document]:
    """Return pages that begin after this position, and not behind `until`. Index: _id."""
    if limit <= 0:
        return []  # to MongoDB, a limit of 0 is none
    order = [("_id", DESCENDING if latest else ASCENDING)]
    wanted = between(app, run, generation, after, until)
    return await log.find(wanted, hint="_id_").sort(order).limit(limit).to_list()


def between(app: str, run: str, generation: int, after: int, until: int | None = None) -> Document:
    """Return a filter for the pages that begin after this position, and not behind `until`."""
    start = prefix(app, run, generation)
    end = {"$lt": start[:-1] + "}"} if until is None else {"$lte": f"{start}{until:09d}"}  # '}' comes after '|'
    return {"_id": {"$gt": f"{start}{after:09d}", **end}}


async def remove(log: Collection, app: str, run: str, before: int) -> int:
    """Remove generations before this one. Index: _id."""
    wanted = {"_id": {"$gt": prefix(app, run), "$lt": prefix(app, run, before)}}
    return (await log.delete_many(wanted, hint="_id_")).deleted_count


async def remove_all(log: Collection, app: str, id: str) -> None:
    """Remove the log of a run, and those of the streams of an invocation. Index: _id."""
    await log.delete_many(all_of(app, id), hint="_id_")


def all_of(app: str, id: str) -> Document:
    """Return a filter for the pages of all logs of an invocation."""
    start, (first, behind) = prefix(app, id), stream_logs(id)
    own: Document = {"_id": {"$gt": start, "$lt": start[:-1] + "}"}}
    return {"$or": [own, {"_id": {"$gt": key_of(app, first), "$lt": key_of(app, behind)}}]}
