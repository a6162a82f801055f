"""Documents that cannot be read are set aside, whole, so that one bad document neither stops a loop nor is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import bson
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.records import InvocationRecord
from holdfast.store.contract import Observe
from holdfast.store.mongo import schema
from holdfast.store.mongo.documents import Document, from_document
from holdfast.store.mongo.retry import text_of

_MOST_TOLD = 1000
_MOST_ENTRY_BYTES = 16 * 2**20 - 4096


class Collections(Protocol):
    """The collections of an open store by name; what is read with `majority` is durable."""

    def __call__(self, name: str, *, majority: bool = False) -> AsyncCollection[Document]: ...


class Quarantine:
    def __init__(self, collection: Collections, now: Callable[[], float], observe: Observe) -> None:
        self._collection = collection
        self._now = now
        self._observe = observe
        self._told: set[str] = set()

    async def readable(self, documents: Sequence[Document]) -> list[InvocationRecord]:
        """The records of documents, in queue order. Those that cannot be read are set aside."""
        records = []
        for document in documents:
            try:
                records.append(from_document(document))
            except CorruptRecord as error:
                await self.set_aside(document, error)
        return sorted(records, key=lambda record: (-record.priority, record.due_at, record.id))

    def leave(self, key: str, error: OperationFailure) -> None:
        """The server refuses to change a document, and nothing says that the document is to blame: it stays where it
        is, and that is said once.
        """
        if key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._observe("refused", {"id": str(key).rpartition("|")[2], "why": text_of(error)})

    async def set_aside(self, document: Document, error: CorruptRecord) -> None:
        """Move a document to quarantine:

        first the copy, then the deletion, so that a crash in between loses nothing. One that has no room for the few
        words of a quarantine entry stays where it is, out of the queue, and without a slot, a key or a twin.
        """
        key = document["_id"]
        app, _, id = str(key).rpartition("|")
        entry = {"app": app, "id": id, "at": self._now(), "why": str(error), "document": document}
        quarantine, invocations = self._collection(schema.QUARANTINE), self._collection(schema.INVOCATIONS)
        if len(bson.encode(entry)) < _MOST_ENTRY_BYTES:
            await quarantine.replace_one({"_id": key}, entry, upsert=True)
            await invocations.delete_one({"_id": key})
        else:
            entry["document"] = f"too large to move: it stays in {schema.INVOCATIONS}"
            await quarantine.replace_one({"_id": key}, entry, upsert=True)
            gone = dict.fromkeys(("ready", "owned", "limit_key", "slot", "key", "twin", "outbox"), "")
            await invocations.update_one({"_id": key}, {"$unset": gone})
        self._observe("quarantine", {"id": id, "why": str(error)})
