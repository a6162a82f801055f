"""Documents that cannot be read are set aside, whole, so that one bad document neither stops a loop nor is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import bson
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure

from holdfast.errors import CorruptRecord
from holdfast.model.decoding import INVOCATION, shown
from holdfast.model.records import InvocationRecord
from holdfast.store.contract import Observe
from holdfast.store.mongo import schema
from holdfast.store.mongo.documents import Document, from_document, name_of
from holdfast.store.mongo.retry import is_forbidden, is_transient, text_of

T = TypeVar("T")

_MAX_REPORTED = 1000
_MAX_ENTRY_BYTES = 16 * 2**20 - 4096
_PART_BYTES = 8 * 2**20
PART = "part"


class Collections(Protocol):
    """The collections of an open store by name; a read with `majority` shows durable data only."""

    def __call__(self, name: str, *, majority: bool = False) -> AsyncCollection[Document]: ...


_CHANGING = ("version", "body", "heartbeat_at")


class Quarantine:
    def __init__(self, collection: Collections, now: Callable[[], float], observe: Observe) -> None:
        self._collection = collection
        self._now = now
        self._observe = observe
        self._reported: set[str] = set()

    async def readable(self, documents: Sequence[Document]) -> list[InvocationRecord]:
        """Return the records of documents, in queue order. Corrupt ones are quarantined."""
        records, _ = await self.sorted_out(schema.INVOCATIONS, documents, from_document)
        return sorted(records, key=lambda record: (-record.priority, record.due_at, record.id))

    async def sorted_out(
        self, name: str, documents: Sequence[Document], decode: Callable[[Document], T]
    ) -> tuple[list[T], int]:
        """Return decoded documents of a collection, and how many corrupt ones were quarantined."""
        found: list[T] = []
        moved = 0
        for document in documents:
            try:
                found.append(decode(document))
            except CorruptRecord as error:
                moved += await self.set_aside(document, error, name)
        return found, moved

    def leave(self, key: str, error: OperationFailure) -> None:
        """Report once that the server refuses to change a document which is not known to be at fault. It stays."""
        if key not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(key)
            self._observe("refused", {"id": str(key).rpartition("|")[2], "why": text_of(error)})

    async def set_aside(self, document: Document, error: CorruptRecord, name: str = schema.INVOCATIONS) -> bool:
        """Quarantine a document of a collection. Return False if this user may not, which is observed.

        The copy comes before the deletion, so that a crash in between loses nothing.
        """
        facts = facts_of(document, error)
        try:
            await self._move(document, facts, name)
        except OperationFailure as refusal:
            if not is_forbidden(refusal):
                raise
            self._observe("unreadable", facts)
            return False
        self._observe("quarantine", facts)
        return True

    async def _move(self, document: Document, facts: Document, name: str) -> None:
        quarantine, there = self._collection(schema.QUARANTINE), self._collection(name)
        *parts, entry = copies(document, facts, name, self._now())
        for part in parts:
            await quarantine.replace_one({"_id": part["_id"]}, part, upsert=True)
        try:
            await quarantine.replace_one({"_id": entry["_id"]}, entry, upsert=True)
        except OperationFailure as refusal:
            if is_transient(refusal) or is_forbidden(refusal):
                raise
            entry["document"] = bson.encode(document)  # it is nested as deep as the server allows
            await quarantine.replace_one({"_id": entry["_id"]}, entry, upsert=True)
        await there.delete_one(as_read(document))


def facts_of(document: Document, error: CorruptRecord) -> Document:
    """Return what is reported of a document that is quarantined."""
    return {"kind": error.kind or INVOCATION, "id": error.id or name_of(document), "why": shown(str(error))}


def copies(document: Document, facts: Document, name: str, at: float) -> list[Document]:
    """Return what to store in quarantine for a document of a collection, its entry last.

    Where it has no room for the few words of an entry, its BSON comes before, in parts.
    """
    key, app = document["_id"], document.get("app")
    app = app if isinstance(app, str) else str(key).partition("|")[0]
    aside = key if name == schema.INVOCATIONS else f"{name}|{key}"
    entry = {"_id": aside, "app": app, "at": at, **facts, "document": document}
    whole = bson.encode(document)
    if len(whole) < _MAX_ENTRY_BYTES:
        return [entry]
    pieces = [whole[start : start + _PART_BYTES] for start in range(0, len(whole), _PART_BYTES)]
    reason = f"its BSON is in {len(pieces)} documents, of: {aside}"
    entry["document"] = {"too large for one": reason} | _payloads(document)
    parts: list[Document] = [
        {"_id": f"{aside}|part {number}", "kind": PART, "of": aside, "number": number, "part": piece}
        for number, piece in enumerate(pieces)
    ]
    return [*parts, entry]


def as_read(document: Document) -> Document:
    """Return a filter for a document as it was read: it may have been repaired meanwhile."""
    same = {name: _like(document[name]) for name in _CHANGING if name in document}
    if len(bson.encode(same)) > _PART_BYTES:  # a query may have no room for that
        same = {}
    return {"_id": document["_id"]} | same


def _like(value: object) -> Document:
    """Match a value as it was read. Bytes that are no UTF-8 are read as escapes, which no stored text equals."""
    return {"$type": "string"} if isinstance(value, str) and "\\x" in value else {"$eq": value}


def _payloads(document: Document) -> Document:
    """Return the payloads of a document, so that they are kept."""
    payloads = document.get("payloads")
    is_list = isinstance(payloads, list) and len(bson.encode({"payloads": payloads})) < _PART_BYTES
    return {"payloads": payloads} if is_list else {}
