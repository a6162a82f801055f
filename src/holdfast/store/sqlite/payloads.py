"""Payloads in SQLite: jobs over one transaction each.

A payload of many pieces is written in many transactions, so that a large one holds up no other writer; its row in
``holdfast_payloads`` comes last and makes it whole. References are written in the transaction of the invocation. The
collection is one transaction, so no payload can be kept, put or referred to between the look and the removal.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.log import stream_logs
from holdfast.model.records import Collected, Piece, StoredPayload
from holdfast.store.sqlite.quarantine import PAYLOADS, PIECES, StoreConnection
from holdfast.store.sqlite.rows import PAYLOAD_COLUMNS, PIECE_COLUMNS, payload_of, piece_of

REFER = "INSERT OR IGNORE INTO holdfast_payload_references (app, digest, id) VALUES (?, ?, ?)"
FORGET = "DELETE FROM holdfast_payload_references WHERE app = ? AND id = ?"  # referring
FORGET_STREAMS = "DELETE FROM holdfast_payload_references WHERE app = ? AND id > ? AND id < ?"  # referring
KEEP = "UPDATE holdfast_payloads SET wanted_at = max(wanted_at, ?) WHERE app = ? AND digest = ?"
PUT = "INSERT OR REPLACE INTO holdfast_payloads (app, digest, size, pieces, wanted_at) VALUES (?, ?, ?, ?, ?)"
PUT_PIECE = """
INSERT OR REPLACE INTO holdfast_payload_pieces (app, digest, number, put_at, packed, data) VALUES (?, ?, ?, ?, ?, ?)
"""
GET = """
SELECT h.size, h.pieces, p.data, p.packed FROM holdfast_payloads AS h
JOIN holdfast_payload_pieces AS p ON p.app = h.app AND p.digest = h.digest AND p.number = 0
WHERE h.app = ? AND h.digest = ?
"""  # one statement, so that the two fit even if they are replaced meanwhile
GET_PIECE = "SELECT data, packed FROM holdfast_payload_pieces WHERE app = ? AND digest = ? AND number = ?"  # pieces
WHOLE = f"SELECT {', '.join(PAYLOAD_COLUMNS)} FROM holdfast_payloads WHERE app = ? AND digest = ?"
WHOLE_PIECE = f"""
SELECT {", ".join(PIECE_COLUMNS)} FROM holdfast_payload_pieces WHERE app = ? AND digest = ? AND number = ?
"""  # pieces
UNWANTED = """
SELECT digest, EXISTS (
    SELECT 1 FROM holdfast_payload_references AS r WHERE r.app = p.app AND r.digest = p.digest
) FROM holdfast_payloads AS p WHERE app = ? AND wanted_at < ? ORDER BY wanted_at LIMIT ?
"""  # payloads_wanted
REMOVE = "DELETE FROM holdfast_payloads WHERE app = ? AND digest = ?"
REMOVE_PIECES = "DELETE FROM holdfast_payload_pieces WHERE app = ? AND digest = ?"
ORPHANS = """
DELETE FROM holdfast_payload_pieces WHERE rowid IN (
    SELECT rowid FROM holdfast_payload_pieces AS p WHERE app = ? AND number > 0 AND put_at < ? AND NOT EXISTS (
        SELECT 1 FROM holdfast_payloads AS h WHERE h.app = p.app AND h.digest = p.digest
    ) ORDER BY put_at LIMIT ?
)
"""  # pieces_put


def refer(connection: StoreConnection, app: str, id: str, digests: Sequence[str]) -> None:
    if digests:
        connection.executemany(REFER, [(app, digest, id) for digest in digests])


def forget(connection: StoreConnection, app: str, ids: Sequence[InvocationId]) -> None:
    """Remove the references of invocations that are removed."""
    connection.executemany(FORGET, [(app, id) for id in ids])


def forget_streams(connection: StoreConnection, app: str, ids: Sequence[InvocationId]) -> None:
    """Remove the references of the streams of invocations that are removed."""
    connection.executemany(FORGET_STREAMS, [(app, *stream_logs(id)) for id in ids])


def keep_payloads(connection: StoreConnection, app: str, digests: Sequence[str]) -> list[bool]:
    return [connection.execute(KEEP, (connection.now, app, digest)).rowcount > 0 for digest in digests]


def put_piece(connection: StoreConnection, app: str, digest: str, number: int, piece: Piece) -> None:
    connection.execute(PUT_PIECE, (app, digest, number, connection.now, piece.packed, piece.data))


def put_payloads(connection: StoreConnection, app: str, payloads: Sequence[StoredPayload]) -> None:
    for payload in payloads:
        put_piece(connection, app, payload.digest, 0, payload.first)
        connection.execute(PUT, (app, payload.digest, payload.size, payload.pieces, connection.now))


def get_payload(connection: StoreConnection, app: str, digest: str) -> StoredPayload | None:
    """Return a payload, or None. Raises `CorruptRecord`."""
    found = connection.execute(GET, (app, digest)).fetchone()
    return None if found is None else payload_of(digest, *found)


def get_piece(connection: StoreConnection, app: str, digest: str, number: int) -> Piece | None:
    """Return a piece of a payload, or None. Raises `CorruptRecord`."""
    found = connection.execute(GET_PIECE, (app, digest, number)).fetchone()
    return None if found is None else piece_of(digest, *found)


def quarantine_payload(connection: StoreConnection, app: str, digest: str, number: int, error: CorruptRecord) -> None:
    """Set aside a payload, and a piece of it, that cannot be read, so that the same value can be stored again."""
    for table, query, values in ((PAYLOADS, WHOLE, (app, digest)), (PIECES, WHOLE_PIECE, (app, digest, number))):
        for row in connection.execute(query, values).fetchall():
            connection.set_aside(table, row, error)


def collect_payloads(connection: StoreConnection, app: str, before: float, limit: int) -> Collected:
    removed = 0
    found = connection.execute(UNWANTED, (app, before, limit)).fetchall()
    for digest, wanted in found:
        if wanted:
            connection.execute(KEEP, (connection.now, app, digest))
        else:
            connection.execute(REMOVE, (app, digest))
            connection.execute(REMOVE_PIECES, (app, digest))
            removed += 1
    orphans = connection.execute(ORPHANS, (app, before, limit)).rowcount
    return Collected(removed, more=max(len(found), orphans) >= limit)
