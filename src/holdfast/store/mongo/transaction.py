"""Submit inside a user's own MongoDB transaction: the invocation is there if that commits, else it never was.

The session belongs to a client of the user, blocking or asynchronous, and only that client can use it; so the insert
runs where the user's own writes run, on the user's thread or loop, and not on ours. Nothing is tried again here and
every error passes through as the driver raised it, labels and all: the user's `with_transaction` decides. A key is read
before it is inserted, because a duplicate would end the transaction; a race for it is a write conflict, which the
server labels as transient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from pymongo import ReadPreference
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import OperationFailure
from pymongo.synchronous.client_session import ClientSession

from holdfast.errors import CorruptRecord, UsageError
from holdfast.lifecycle.identity import in_the_way, key_is_over
from holdfast.lifecycle.records import Entry, InvocationRecord, StoredPayload
from holdfast.store.contract import Observe
from holdfast.store.mongo import schema
from holdfast.store.mongo.connection import LENIENT
from holdfast.store.mongo.documents import Document, from_document, key_of, to_document
from holdfast.store.mongo.entries import document_of
from holdfast.store.mongo.entries import in_the_way as in_its_way
from holdfast.store.mongo.quarantine import as_read, copies, facts_of
from holdfast.store.mongo.queries import holders, names_of
from holdfast.store.mongo.retry import is_forbidden

_SNAPSHOT_UNAVAILABLE = 246

# Which databases, by name and mark, each client was seen to reach.
_reached: WeakKeyDictionary[Any, set[tuple[str, object]]] = WeakKeyDictionary()


class MongoTransaction:
    """See `holdfast.store.contract.Transaction`."""

    carries_payloads = False

    def __init__(self, session: Any, database: str, mark: object, now: Callable[[], float], observe: Observe) -> None:
        self._now = now
        self._observe = observe
        self.is_async = isinstance(session, AsyncClientSession)
        self._session = session
        self._database = session.client.get_database(database, codec_options=LENIENT)
        self._mark = mark
        self._number: object = None  # of this transaction among those of its session; known once something was inserted

    @property
    def is_over(self) -> bool:
        """Whether this one is: another may have begun on the same session."""
        return self._session.has_ended or not self._session.in_transaction or self._number != _number(self._session)

    @property
    def _is_known(self) -> bool:
        return (self._database.name, self._mark) in _reached.get(self._session.client, ())

    @property
    def _meta(self) -> Any:
        """Read where the truth is, whatever the user's client prefers."""
        return self._database[schema.META].with_options(read_preference=ReadPreference.PRIMARY)

    def _check(self, meta: Document | None) -> None:
        if self._mark is None or (meta or {}).get("mark") != self._mark:
            raise UsageError(
                f"the session's client reaches another MongoDB: its database '{self._database.name}' is not the one "
                "that this app works on. Nothing was written."
            )
        _reached.setdefault(self._session.client, set()).add((self._database.name, self._mark))

    def insert(
        self, records: Sequence[InvocationRecord], payloads: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        if not self._is_known:
            self._check(self._meta.find_one({"_id": "schema"}))
        invocations, session = self._database[schema.INVOCATIONS], self._session
        found: list[Document] = []
        with _explained():
            for wanted, hint in _looks(records):
                found += invocations.find(wanted, hint=hint, session=session).to_list()
            sound, damaged = _sorted_out(records, found)
            for document, error in damaged:
                self._set_aside(schema.INVOCATIONS, document, error)
            there, over = _in_the_way(records, sound)
            if over:
                invocations.update_many({"_id": {"$in": over}}, {"$unset": {"key": ""}}, session=session)
            if fresh := _fresh(records, there):
                invocations.insert_many(fresh, session=session)
        self._number = _number(session)
        return there

    async def ainsert(
        self, records: Sequence[InvocationRecord], payloads: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        if not self._is_known:
            self._check(await self._meta.find_one({"_id": "schema"}))
        invocations, session = self._database[schema.INVOCATIONS], self._session
        found: list[Document] = []
        with _explained():
            for wanted, hint in _looks(records):
                found += await invocations.find(wanted, hint=hint, session=session).to_list()
            sound, damaged = _sorted_out(records, found)
            for document, error in damaged:
                await self._aset_aside(schema.INVOCATIONS, document, error)
            there, over = _in_the_way(records, sound)
            if over:
                await invocations.update_many({"_id": {"$in": over}}, {"$unset": {"key": ""}}, session=session)
            if fresh := _fresh(records, there):
                await invocations.insert_many(fresh, session=session)
        self._number = _number(session)
        return there

    def put_entries(self, fresh: Sequence[Entry]) -> Sequence[Entry | None]:
        if not self._is_known:
            self._check(self._meta.find_one({"_id": "schema"}))
        stored, session, there = self._database[schema.ENTRIES], self._session, list[Entry | None]()
        with _explained():
            for entry in fresh:
                document = document_of(entry)
                found = stored.find_one({"_id": document["_id"]}, session=session)
                try:
                    holder = in_its_way(entry, found, self._now())
                except CorruptRecord as error:
                    self._set_aside(schema.ENTRIES, found, error)
                    found = holder = None
                there.append(holder)
                if found is None:
                    stored.insert_one(document, session=session)
                elif holder is None:
                    stored.replace_one({"_id": document["_id"]}, document, session=session)
        self._number = _number(session)
        return there

    async def aput_entries(self, fresh: Sequence[Entry]) -> Sequence[Entry | None]:
        if not self._is_known:
            self._check(await self._meta.find_one({"_id": "schema"}))
        stored, session, there = self._database[schema.ENTRIES], self._session, list[Entry | None]()
        with _explained():
            for entry in fresh:
                document = document_of(entry)
                found = await stored.find_one({"_id": document["_id"]}, session=session)
                try:
                    holder = in_its_way(entry, found, self._now())
                except CorruptRecord as error:
                    await self._aset_aside(schema.ENTRIES, found, error)
                    found = holder = None
                there.append(holder)
                if found is None:
                    await stored.insert_one(document, session=session)
                elif holder is None:
                    await stored.replace_one({"_id": document["_id"]}, document, session=session)
        self._number = _number(session)
        return there

    def _set_aside(self, name: str, document: Document, error: CorruptRecord) -> None:
        """Move a document that is in the way to quarantine, if the transaction commits."""
        quarantine = self._database[schema.QUARANTINE]
        facts = facts_of(document, error)
        with _if_allowed(error):
            for copy in copies(document, facts, name, self._now()):
                quarantine.replace_one({"_id": copy["_id"]}, copy, upsert=True, session=self._session)
            self._database[name].delete_one(as_read(document), session=self._session)
        self._observe("quarantine", facts)

    async def _aset_aside(self, name: str, document: Document, error: CorruptRecord) -> None:
        quarantine = self._database[schema.QUARANTINE]
        facts = facts_of(document, error)
        with _if_allowed(error):
            for copy in copies(document, facts, name, self._now()):
                await quarantine.replace_one({"_id": copy["_id"]}, copy, upsert=True, session=self._session)
            await self._database[name].delete_one(as_read(document), session=self._session)
        self._observe("quarantine", facts)


@contextlib.contextmanager
def _if_allowed(error: CorruptRecord) -> Iterator[None]:
    """Raise what is wrong with the document where this user may not set it aside."""
    try:
        yield
    except OperationFailure as refusal:
        if not is_forbidden(refusal):
            raise
        raise error from refusal


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What a transaction cannot see because it is newer than that: say what to do. Class, code and labels stay, so that
    `with_transaction` runs it again.
    """
    try:
        yield
    except OperationFailure as error:
        if error.code != _SNAPSHOT_UNAVAILABLE:
            raise
        why = (error.details or {}).get("errmsg", "the snapshot is too old")
        raise OperationFailure(
            f"{why} Your transaction began before Holdfast's collections or indexes were made. Run it again, as "
            "session.with_transaction does; to avoid this, run `holdfast store prepare` once before.",
            error.code,
            error.details,
        ) from error


def _number(session: Any) -> object:
    """The driver counts the transactions of a session, and shows it to nobody; without it we do what we can."""
    return getattr(session, "_transaction_id", None)


def _looks(records: Sequence[InvocationRecord]) -> Iterator[tuple[Document, str]]:
    """Filter and index of each look for what would make an insert fail, and the transaction with it."""
    app = records[0].app
    yield {"_id": {"$in": [key_of(app, record.id) for record in records]}}, "_id_"
    yield from holders(app, names_of(records))


def _sorted_out(
    records: Sequence[InvocationRecord], documents: Iterable[Document]
) -> tuple[list[InvocationRecord], list[tuple[Document, CorruptRecord]]]:
    """Who has an id, a key or a twin of these, and what cannot be read. Raises for one of those with an id of theirs:
    it stays, and is told of.
    """
    ids = {key_of(record.app, record.id) for record in records}
    sound: list[InvocationRecord] = []
    damaged: dict[object, tuple[Document, CorruptRecord]] = {}
    for document in documents:
        try:
            sound.append(from_document(document))
        except CorruptRecord as error:
            if document["_id"] in ids:
                raise
            damaged[document["_id"]] = document, error
    return sound, list(damaged.values())


def _in_the_way(
    records: Sequence[InvocationRecord], found: Sequence[InvocationRecord]
) -> tuple[list[InvocationRecord | None], list[str]]:
    """Who stands in the way of each, and the keys of those whose time is over, which do not."""
    now = records[0].created_at
    over = [one for one in found if one.key is not None and key_is_over(one, now)]
    still = [replace(one, key=None) if one in over else one for one in found]
    there = []
    for record in records:
        there.append(holder := in_the_way(record, still))
        if holder is None and (record.twin or record.key):
            still.append(record)  # the next of its kind meets this one
    return there, [key_of(one.app, one.id) for one in over]


def _fresh(records: Sequence[InvocationRecord], there: Sequence[InvocationRecord | None]) -> list[Document]:
    return [to_document(record) for record, holder in zip(records, there, strict=True) if holder is None]


def joined(
    session: object, database: str, mark: object, now: Callable[[], float], observe: Observe
) -> MongoTransaction:
    """Raises `UsageError` unless the session is in a transaction."""
    if not isinstance(session, ClientSession | AsyncClientSession):
        raise UsageError(
            f"session= takes a session of pymongo's MongoClient or AsyncMongoClient, not {type(session).__name__}"
        )
    if not session.in_transaction:
        raise UsageError("the session is in no transaction; call submit inside session.start_transaction()")
    return MongoTransaction(session, database, mark, now, observe)
