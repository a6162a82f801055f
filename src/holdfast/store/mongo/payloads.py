"""Payloads in MongoDB.

A payload is a document named by its content, with its first piece inside; further pieces are documents of their own,
and are put before it. The content alone decides what a piece holds, so that concurrent writers write the same.

A payload that is wanted again is never removed: `keep` renews `wanted_at` in one update, and the collector deletes only
where `wanted_at` is still old. Either the renewal comes first, and the deletion matches nothing; or the deletion does,
the renewal matches nothing, and the payload is put again. Pieces carry the time at which they were put, and are deleted
by that, after their payload. A payload that is put again first puts all its pieces again, so they are never old.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pymongo import ASCENDING, ReplaceOne
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.model.decoding import PAYLOAD, PIECE, corrupt, shown
from holdfast.model.records import Collected, Piece, StoredPayload
from holdfast.store.mongo import schema
from holdfast.store.mongo.documents import Document, key_of, name_of
from holdfast.store.mongo.quarantine import Collections

Collection = AsyncCollection[Document]


def piece_key(app: str, digest: str, number: int) -> str:
    return f"{key_of(app, digest)}|{number:06d}"


async def keep(payloads: Collection, app: str, digests: Sequence[str], now: float) -> list[bool]:
    keys = [key_of(app, digest) for digest in digests]
    result = await payloads.update_many({"_id": {"$in": keys}}, {"$max": {"wanted_at": now}})
    if result.matched_count == len(set(keys)):
        return [True] * len(keys)
    wanted = {"_id": {"$in": keys}, "wanted_at": {"$gte": now}}
    there = {found["_id"] for found in await payloads.find(wanted, {"_id": True}).to_list()}
    return [key in there for key in keys]


async def put_piece(pieces: Collection, app: str, digest: str, number: int, piece: Piece, now: float) -> None:
    document = {"app": app, "put_at": now, "packed": piece.packed, "data": piece.data}
    await pieces.replace_one({"_id": piece_key(app, digest, number)}, document, upsert=True)


async def put(payloads: Collection, app: str, stored: Sequence[StoredPayload], now: float) -> None:
    writes = [
        ReplaceOne(
            {"_id": key_of(app, payload.digest)},
            {
                "app": app,
                "size": payload.size,
                "pieces": payload.pieces,
                "wanted_at": now,
                "packed": payload.first.packed,
                "data": payload.first.data,
            },
            upsert=True,
        )
        for payload in stored
    ]
    await payloads.bulk_write(writes, ordered=False)


def payload_of(found: Document) -> StoredPayload:
    """Return the payload of a document. Raises `CorruptRecord`."""
    digest, first = name_of(found), piece_of(found, PAYLOAD)
    try:
        fields = {"digest": digest, "size": found["size"], "pieces": found["pieces"], "first": first}
        return msgspec.convert(fields, StoredPayload)
    except Exception as error:
        raise corrupt(PAYLOAD, digest, error) from error


def piece_of(found: Document, kind: str = PIECE) -> Piece:
    """Return the piece of a document. Raises `CorruptRecord`."""
    data, packed = found.get("data"), found.get("packed")
    if not isinstance(data, bytes) or not isinstance(packed, bool):
        reason = f"its document has {type(data).__name__} for its bytes, and {shown(packed)} for packed"
        raise corrupt(kind, name_of(found), TypeError(reason))
    return Piece(bytes(data), packed)


async def collect(collections: Collections, app: str, before: float, limit: int, now: float) -> Collected:
    """See `holdfast.store.contract.Store.collect_payloads`."""
    payloads, pieces = collections(schema.PAYLOADS), collections(schema.PIECES)
    found, removed = await _unwanted(payloads, app, before, limit), 0
    for digest in found:
        if await is_referred_to(collections, app, digest):
            await keep(payloads, app, [digest], now)
        else:
            removed += await remove(payloads, pieces, app, digest, before)
    orphans = await _remove_orphans(payloads, pieces, app, before, limit, now)
    return Collected(removed, more=max(len(found), orphans) >= limit)


async def _unwanted(payloads: Collection, app: str, before: float, limit: int) -> list[str]:
    """Return digests, longest unwanted first. Index: wanted."""
    wanted = {"app": app, "wanted_at": {"$lt": before}}
    cursor = payloads.find(wanted, {"_id": True}, hint="wanted").sort([("wanted_at", ASCENDING)]).limit(limit)
    return [found["_id"].rpartition("|")[2] for found in await cursor.to_list()]


async def is_referred_to(collections: Collections, app: str, digest: str) -> bool:
    """Return whether an invocation, a log, an entry or a quarantined record refers to a payload. Index: payloads, of
    each.
    """
    live = [(name, "payloads") for name in (schema.INVOCATIONS, schema.LOG, schema.ENTRIES)]
    for name, field in (*live, (schema.QUARANTINE, _ASIDE)):
        if await collections(name).find_one({"app": app, field: digest}, {"_id": True}, hint="payloads") is not None:
            return True
    return False


_ASIDE = "document.payloads"


async def remove(payloads: Collection, pieces: Collection, app: str, digest: str, before: float) -> bool:
    """Remove a payload that was not wanted again meanwhile, then its pieces."""
    key = key_of(app, digest)
    gone = await payloads.delete_one({"_id": key, "wanted_at": {"$lt": before}})
    if gone.deleted_count:
        await _remove_pieces(pieces, key, before)
    return bool(gone.deleted_count)


async def _remove_pieces(pieces: Collection, key: str, before: float) -> None:
    """Remove old pieces of a payload. '}' is the character after '|', so the range covers all of them."""
    await pieces.delete_many({"_id": {"$gt": f"{key}|", "$lt": f"{key}" + "}"}, "put_at": {"$lt": before}})


async def _remove_orphans(
    payloads: Collection, pieces: Collection, app: str, before: float, limit: int, now: float
) -> int:
    """Remove pieces whose payload was never finished, or whose removal was interrupted. Pieces of a living payload
    count as put now, so that the next look is at others. Return how many pieces were looked at. Index: put.
    """
    wanted = {"app": app, "put_at": {"$lt": before}}
    cursor = pieces.find(wanted, {"_id": True}, hint="put").sort([("put_at", ASCENDING)]).limit(limit)
    found = await cursor.to_list()
    keys = {piece["_id"].rpartition("|")[0] for piece in found}
    living = {payload["_id"] for payload in await payloads.find({"_id": {"$in": list(keys)}}, {"_id": True}).to_list()}
    for key in keys - living:
        await _remove_pieces(pieces, key, before)
    for key in living:
        await pieces.update_many({"_id": {"$gt": f"{key}|", "$lt": f"{key}" + "}"}}, {"$max": {"put_at": now}})
    return len(found)
