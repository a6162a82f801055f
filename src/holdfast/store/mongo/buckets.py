"""Buckets of rates in MongoDB: read for a claim in one command, and written in one, by version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import InsertOne, ReplaceOne
from pymongo.errors import BulkWriteError

from holdfast.errors import CorruptRecord
from holdfast.model.decoding import RATE
from holdfast.model.rates import RateBuckets
from holdfast.model.records import Entry
from holdfast.store.contract import EntryOrder
from holdfast.store.mongo import entries, schema
from holdfast.store.mongo.documents import Document
from holdfast.store.mongo.quarantine import Collections, Quarantine
from holdfast.store.mongo.retry import DUPLICATE, is_transient

Written = tuple[Entry, Entry | None]


async def read(
    collection: Collections, quarantine: Quarantine, app: str, keys: Sequence[str], at: float
) -> RateBuckets:
    """Return the buckets of these keys. Damaged entries are quarantined."""
    found: dict[str, Entry] = {}
    if keys:
        there = collection(schema.ENTRIES)
        look = entries.look(app, RATE, sorted(set(keys)), EntryOrder.NAME, None)
        for document in await entries.listing(there, look, None):
            try:
                entry = entries.entry_of(document)
                found[entry.name] = entry
            except CorruptRecord as error:
                await quarantine.set_aside(document, error, schema.ENTRIES)
    return RateBuckets(app, at, found.get)


async def write(collection: Collections, buckets: RateBuckets) -> None:
    """Store the buckets that a claim has changed, as far as no other claimer was faster; forget the others."""
    written = buckets.changed()
    if not written:
        return
    there = collection(schema.ENTRIES)
    try:
        result = await there.bulk_write([_write(*each) for each in written], ordered=False)
        stored = result.matched_count + result.inserted_count
    except BulkWriteError as error:
        errors = (error.details or {}).get("writeErrors", [])
        if is_transient(error) or any(item.get("code") != DUPLICATE for item in errors):
            raise
        stored = 0
    if stored == len(written):
        buckets.wrote(entry for entry, _ in written)
        return
    look = entries.look(written[0][0].app, RATE, [entry.name for entry, _ in written], EntryOrder.NAME, None)
    bodies = {document["name"]: document.get("body") for document in await entries.listing(there, look, None)}
    ours = [entry for entry, _ in written if bodies.get(entry.name) == entry.body]
    buckets.wrote(ours)
    buckets.forget({entry.name for entry, _ in written} - {entry.name for entry in ours})


def _write(entry: Entry, before: Entry | None) -> InsertOne[Document] | ReplaceOne[Document]:
    document: dict[str, Any] = entries.document_of(entry)
    if before is None:
        return InsertOne(document)
    where = {"_id": document.pop("_id"), "version": before.version, "body": before.body}
    return ReplaceOne(where, document)
