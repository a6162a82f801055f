"""Submit inside a user's own MongoDB transaction: if it commits, the invocation is stored, else it never was.

The session belongs to a client of the user, blocking or asynchronous, and only that client can use it. So the writes
run on the user's thread or loop. Nothing is retried here, and errors pass through as the driver raised them, labels and
all: the user's `with_transaction` decides. A key is read before it is inserted, because a duplicate would end the
transaction; a race for a key is a write conflict, which the server labels as transient.

Both kinds of sessions share one code: generators that yield what the driver answers, to be awaited or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from pymongo import ReadPreference
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import OperationFailure
from pymongo.synchronous.client_session import ClientSession

from holdfast.errors import CorruptRecord, UsageError
from holdfast.model.identity import find_conflict, key_is_over
from holdfast.model.log import APPENDED, MAX_BEHIND, AppendVerdict, Page, judge, until_damaged
from holdfast.model.records import Entry, InvocationRecord, StoredPayload
from holdfast.store.contract import Observe
from holdfast.store.mongo import logs, schema
from holdfast.store.mongo.connection import LENIENT
from holdfast.store.mongo.documents import Document, from_document, key_of, to_document
from holdfast.store.mongo.entries import conflict_of, document_of
from holdfast.store.mongo.quarantine import as_read, copies, facts_of
from holdfast.store.mongo.queries import holders, names_of
from holdfast.store.mongo.retry import is_forbidden

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""Yields what each call of the driver returns, and gets its answer."""

_SNAPSHOT_UNAVAILABLE = 246

# Which databases, by name and mark, each client was seen to reach.
_reached: WeakKeyDictionary[Any, set[tuple[str, object]]] = WeakKeyDictionary()


def _blocking(steps: Steps[T]) -> T:
    answer = None
    try:
        while True:
            answer = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _awaited(steps: Steps[T]) -> T:
    try:
        asking = next(steps)
        while True:
            try:
                answer = await asking
            except Exception as error:
                asking = steps.throw(error)
            else:
                asking = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


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
        self._number: object = None  # of this transaction among those of its session; known after the first insert

    @property
    def is_over(self) -> bool:
        """Return whether this transaction is over: another may have begun on the same session."""
        return self._session.has_ended or not self._session.in_transaction or self._number != _number(self._session)

    def insert(
        self, records: Sequence[InvocationRecord], payloads: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return _blocking(self._insert(records))

    async def ainsert(
        self, records: Sequence[InvocationRecord], payloads: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return await _awaited(self._insert(records))

    def put_entries(self, fresh: Sequence[Entry], payloads: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        return _blocking(self._put_entries(fresh))

    async def aput_entries(
        self, fresh: Sequence[Entry], payloads: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]:
        return await _awaited(self._put_entries(fresh))

    def append(self, pages: Sequence[Page], payloads: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        return _blocking(self._append(pages))

    async def aappend(self, pages: Sequence[Page], payloads: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        return await _awaited(self._append(pages))

    def _insert(self, records: Sequence[InvocationRecord]) -> Steps[list[InvocationRecord | None]]:
        yield from self._check_reached()
        app, invocations, session = records[0].app, self._database[schema.INVOCATIONS], self._session
        keys = [key_of(app, record.id) for record in records]
        found: dict[object, InvocationRecord] = {}
        with _explained():
            for wanted, hint in [({"_id": {"$in": keys}}, "_id_"), *holders(app, names_of(records))]:
                for document in (yield invocations.find(wanted, hint=hint, session=session).to_list()):
                    try:
                        found[document["_id"]] = from_document(document)
                    except CorruptRecord as error:
                        if document["_id"] in keys:
                            raise  # an id stays taken
                        yield from self._quarantine(schema.INVOCATIONS, document, error)
            there, over = _conflicts(records, list(found.values()))
            if over:
                yield invocations.update_many({"_id": {"$in": over}}, {"$unset": {"key": ""}}, session=session)
            pairs = zip(records, there, strict=True)
            if fresh := [to_document(record) for record, holder in pairs if holder is None]:
                yield invocations.insert_many(fresh, session=session)
        self._number = _number(session)
        return there

    def _put_entries(self, fresh: Sequence[Entry]) -> Steps[list[Entry | None]]:
        yield from self._check_reached()
        stored, session, there = self._database[schema.ENTRIES], self._session, list[Entry | None]()
        with _explained():
            for entry in fresh:
                document = document_of(entry)
                found = yield stored.find_one({"_id": document["_id"]}, session=session)
                try:
                    holder = conflict_of(found, self._now())
                except CorruptRecord as error:
                    yield from self._quarantine(schema.ENTRIES, found, error)
                    found = holder = None
                there.append(holder)
                if found is None:
                    yield stored.insert_one(document, session=session)
                elif holder is None:
                    yield stored.replace_one({"_id": document["_id"]}, document, session=session)
        self._number = _number(session)
        return there

    def _append(self, pages: Sequence[Page]) -> Steps[list[AppendVerdict]]:
        yield from self._check_reached()
        log, session, verdicts = self._database[schema.LOG], self._session, list[AppendVerdict]()
        with _explained():
            for page in pages:
                wanted = logs.between(page.app, page.run, page.generation, page.first - 1)
                there = log.find(wanted, hint="_id_", session=session).sort("_id").limit(MAX_BEHIND)
                found = yield there.to_list()
                if found and found[0]["_id"] == logs.page_key(page.app, page.run, page.generation, page.first):
                    verdicts.append(judge(page, until_damaged(found, logs.page_of)))
                else:
                    yield log.insert_one(logs.document_of(page), session=session)
                    verdicts.append(APPENDED)
        self._number = _number(session)
        return verdicts

    def _check_reached(self) -> Steps[None]:
        """Raise `UsageError` unless the session's client reaches the database of the app."""
        name, client = self._database.name, self._session.client
        if (name, self._mark) in _reached.get(client, ()):
            return
        # The truth is on the primary, whatever the user's client prefers.
        meta = self._database[schema.META].with_options(read_preference=ReadPreference.PRIMARY)
        found = yield meta.find_one({"_id": "schema"})
        if self._mark is None or (found or {}).get("mark") != self._mark:
            raise UsageError(
                f"the session's client reaches another MongoDB: its database '{name}' is not the one "
                "that this app works on. Nothing was written."
            )
        _reached.setdefault(client, set()).add((name, self._mark))

    def _quarantine(self, name: str, document: Document, error: CorruptRecord) -> Steps[None]:
        """Quarantine a conflicting document, if the transaction commits. Raise the error where this user may not."""
        facts = facts_of(document, error)
        try:
            for copy in copies(document, facts, name, self._now()):
                quarantine = self._database[schema.QUARANTINE]
                yield quarantine.replace_one({"_id": copy["_id"]}, copy, upsert=True, session=self._session)
            yield self._database[name].delete_one(as_read(document), session=self._session)
        except OperationFailure as refusal:
            if not is_forbidden(refusal):
                raise
            raise error from refusal
        self._observe("quarantine", facts)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what to do about collections that are newer than the transaction. Class, code and labels of the error stay,
    so that `with_transaction` runs it again.
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
    """Return the driver's count of a session's transactions. It is private, and may be missing."""
    return getattr(session, "_transaction_id", None)


def _conflicts(
    records: Sequence[InvocationRecord], found: Sequence[InvocationRecord]
) -> tuple[list[InvocationRecord | None], list[str]]:
    """Return the conflicting invocation of each record, and the keys of those whose idempotency key is over."""
    now = records[0].created_at
    over = [one for one in found if one.key is not None and key_is_over(one, now)]
    still = [replace(one, key=None) if one in over else one for one in found]
    there = []
    for record in records:
        there.append(holder := find_conflict(record, still))
        if holder is None and (record.dedup_key or record.key):
            still.append(record)  # conflicts with the next of its kind
    return there, [key_of(one.app, one.id) for one in over]


def joined(
    session: object, database: str, mark: object, now: Callable[[], float], observe: Observe
) -> MongoTransaction:
    """Return the transaction of a session. Raises `UsageError` unless it is in one."""
    if not isinstance(session, ClientSession | AsyncClientSession):
        raise UsageError(
            f"session= takes a session of pymongo's MongoClient or AsyncMongoClient, not {type(session).__name__}"
        )
    if not session.in_transaction:
        raise UsageError("the session is in no transaction; call submit inside session.start_transaction()")
    return MongoTransaction(session, database, mark, now, observe)
