"""What lies beside the records: payloads and their pieces.

The contract of a store has no list of them, since nobody needs one but a judge. So each of our own stores is looked
into; of another one nothing is known, and nothing is said.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.store.contract import Store


class Kept(msgspec.Struct, frozen=True):
    """A payload, and when it was last wanted, by the store's time."""

    digest: str
    wanted_at: float
    pieces: int = 1


class KeptPiece(msgspec.Struct, frozen=True):
    """A piece of a payload beyond the first, which lies with the payload."""

    digest: str
    number: int
    put_at: float


class Stock(msgspec.Struct, frozen=True):
    payloads: tuple[Kept, ...] = ()
    pieces: tuple[KeptPiece, ...] = ()


async def stock(store: Store, app: str) -> Stock | None:
    """All payloads and pieces of an app; None if this store cannot be looked into."""
    there: Any = store
    match type(store).__name__:
        case "MemoryStore":
            return _in_memory(there, app)
        case "SqliteStore":
            return await _in_sqlite(there, app)
        case "MongoStore":
            return await _in_mongo(there, app)
    return None


def _in_memory(store: Any, app: str) -> Stock:
    payloads = [Kept(name, at, payload.pieces) for (own, name), (at, payload) in store._payloads.items() if own == app]
    pieces = [KeptPiece(name, number, at) for (own, name, number), (at, _) in store._pieces.items() if own == app]
    return Stock(tuple(payloads), tuple(pieces))


async def _in_sqlite(store: Any, app: str) -> Stock:
    payloads = "SELECT digest, wanted_at, pieces FROM holdfast_payloads WHERE app = ?"
    pieces = "SELECT digest, number, put_at FROM holdfast_payload_pieces WHERE app = ? AND number > 0"
    found = [
        await store._read(lambda connection, query=query: connection.execute(query, (app,)).fetchall())
        for query in (payloads, pieces)
    ]
    return Stock(tuple(Kept(*row) for row in found[0]), tuple(KeptPiece(*row) for row in found[1]))


async def _in_mongo(store: Any, app: str) -> Stock:
    facts = {"wanted_at": True, "pieces": True, "put_at": True}
    payloads, pieces = [
        await store._collection(name, majority=True).find({"app": app}, facts).to_list()
        for name in ("holdfast_payloads", "holdfast_payload_pieces")
    ]
    parts = [(*piece["_id"].rsplit("|", 2)[1:], piece["put_at"]) for piece in pieces]
    return Stock(
        tuple(Kept(each["_id"].rpartition("|")[2], each["wanted_at"], each["pieces"]) for each in payloads),
        tuple(KeptPiece(digest, int(number), at) for digest, number, at in parts),
    )
