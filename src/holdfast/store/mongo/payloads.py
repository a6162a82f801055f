"""Payloads in MongoDB.

A payload is a document named by its content, with its first piece inside; further pieces are documents of their own,
and are put before it. What a piece holds follows from the payload's content alone, so writers that meet write the same.

How a payload can be removed while somebody finds it: whoever wants it renews `wanted_at` in one update, and the
collector deletes only where `wanted_at` is still old. So either the renewal comes first, and the deletion matches
nothing; or the deletion does, the renewal matches nothing, and the payload is put again. Pieces carry the time at which
they were put, and are deleted by that, after their payload; whoever puts a payload again puts all of its pieces again
first, so those of a new life are never old.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pymongo import ASCENDING, ReplaceOne
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.lifecycle.decoding import PAYLOAD, PIECE, corrupt, shown
from holdfast.lifecycle.records import Piece, StoredPayload
from holdfast.store.mongo.documents import Document, key_of, name_of

Collection = AsyncCollection[Document]


def _piece_key(app: str, digest: str, number: int) -> str:
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
    await pieces.replace_one({"_id": _piece_key(app, digest, number)}, document, upsert=True)


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


async def get(payloads: Collection, app: str, digest: str) -> Document | None:
    return await payloads.find_one({"_id": key_of(app, digest)})


async def get_piece(pieces: Collection, app: str, digest: str, number: int) -> Document | None:
    return await pieces.find_one({"_id": _piece_key(app, digest, number)})


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
        told = f"its document has {type(data).__name__} for its bytes, and {shown(packed)} for packed"
        raise corrupt(kind, name_of(found), TypeError(told))
    return Piece(bytes(data), packed)


async def unwanted(payloads: Collection, app: str, before: float, limit: int) -> list[str]:
    """Digests, longest unwanted first. Index: wanted."""
    wanted = {"app": app, "wanted_at": {"$lt": before}}
    cursor = payloads.find(wanted, {"_id": True}, hint="wanted").sort([("wanted_at", ASCENDING)]).limit(limit)
    return [found["_id"].rpartition("|")[2] for found in await cursor.to_list()]


async def is_referred_to(invocations: Collection, quarantine: Collection, app: str, digest: str) -> bool:
    """Index: payloads, of each of the two."""
    wanted = {"app": app, "payloads": digest}
    if await invocations.find_one(wanted, {"_id": True}, hint="payloads") is not None:
        return True
    aside = {"app": app, "document.payloads": digest}
    return await quarantine.find_one(aside, {"_id": True}, hint="payloads") is not None


async def remove(payloads: Collection, pieces: Collection, app: str, digest: str, before: float) -> bool:
    """Remove a payload unless somebody has wanted it by now, then its pieces."""
    key = key_of(app, digest)
    gone = await payloads.delete_one({"_id": key, "wanted_at": {"$lt": before}})
    if gone.deleted_count:
        await _remove_pieces(pieces, key, before)
    return bool(gone.deleted_count)


async def _remove_pieces(pieces: Collection, key: str, before: float) -> None:
    """'}' is the character after '|', so the range is all of a payload's pieces."""
    await pieces.delete_many({"_id": {"$gt": f"{key}|", "$lt": f"{key}" + "}"}, "put_at": {"$lt": before}})


async def remove_orphans(
    payloads: Collection, pieces: Collection, app: str, before: float, limit: int, now: float
) -> int:
    """Pieces whose payload was never finished, or whose removal was. Those of a living payload count as put now, so
    that the next look is at others. How many pieces it looked at. Index: put.
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
