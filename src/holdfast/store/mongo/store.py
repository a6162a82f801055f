"""The MongoDB store: a fleet of runners on a replica set, or one process on a standalone.

Atomic is one document per write, guarded by status and epoch, or by the version, in the filter. A crash between two
commands leaves each command whole: a claim whose answer was lost is found again by its token, or by recovery. Submit is
one insert, a lone claim one findOneAndUpdate, a batch of claims a find and an update, a batch of ends one update, a
result one find.

Every state change is written with ``w: majority, j: true``, claims included: a claim that was rolled back would give
the same epoch out twice. Answers that leave the process, or decide an unknown outcome, are read with read concern
majority; what such a read does not find is read once more, for certain. Candidates are read locally, since the guard
of the write decides.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import msgspec
import pymongo
from msgspec.structs import replace
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, StoreError, StoreReadOnly, StoreUnauthorised, StoreUnavailable, UsageError
from holdfast.ids import InvocationId
from holdfast.model.changes import (
    Change,
    FieldReset,
    MoveUp,
    NoteUpdate,
    Push,
    RunUpdate,
    StreamMark,
    Verdict,
    WaitNote,
    Write,
    pushes_by_run,
    rounds,
)
from holdfast.model.claims import Claim, Claimed
from holdfast.model.decoding import EARLIEST, INVOCATION, LATEST, corrupt, shown
from holdfast.model.identity import find_conflict
from holdfast.model.keeping import Kept
from holdfast.model.limits import Release
from holdfast.model.log import APPENDED, MAX_BEHIND, AppendVerdict, Page, checked, judge, until_damaged
from holdfast.model.queues import QueueDepth
from holdfast.model.records import (
    Collected,
    Entry,
    Hint,
    InvocationRecord,
    Piece,
    Quarantined,
    RunnerRecord,
    StoredPayload,
    WorkerRecord,
)
from holdfast.model.status import AVAILABLE, Status
from holdfast.store.contract import ALL_KEYS, Ability, EntryOrder, Filter, Finding, Observe, Order
from holdfast.store.mongo import (
    connection,
    entries,
    invocations,
    listing,
    logs,
    payloads,
    queries,
    runners,
    schema,
    sessions,
)
from holdfast.store.mongo.claims import Claims
from holdfast.store.mongo.documents import Document, from_document, key_of, runner_document, runner_of, to_document
from holdfast.store.mongo.hints import StreamHints
from holdfast.store.mongo.inspection import inspect
from holdfast.store.mongo.invocations import Invocations
from holdfast.store.mongo.lane_scanner import LaneScanner
from holdfast.store.mongo.quarantine import Quarantine
from holdfast.store.mongo.retry import (
    BAD_VALUE,
    NO_SUCH_INDEX,
    Retrier,
    RetryPolicy,
    is_forbidden,
    is_missing_index,
    is_transient,
    text_of,
)
from holdfast.store.mongo.sessions import MongoStepTransaction, SessionClients
from holdfast.store.mongo.time import ServerTime
from holdfast.store.mongo.transaction import MongoTransaction, joined

T = TypeVar("T")
P = ParamSpec("P")

_MAJORITY = WriteConcern(w="majority", j=True)
_CERTAIN_SECONDS = 5.0  # how long one try of a certain read waits for the majority
_MAX_PASSES = 100
WALK_SECONDS = 1.0  # for pages of waiting invocations, in an audit
_MAX_BYTES = 14 * 2**20
_KNOWN = frozenset(status.value for status in Status)

Look = Callable[[AsyncCollection[Document], str], Awaitable[list[Document]]]


class MongoOptions(RetryPolicy, frozen=True, kw_only=True):
    """The settings of the store."""

    use_change_streams: bool = True
    signal_retention_seconds: int = schema.SIGNAL_SECONDS


class MongoStore:
    """See `holdfast.store.contract.Store`."""

    abilities = (
        Ability.MULTI_PROCESS
        | Ability.DURABLE
        | Ability.COSTLY_CLAIMS
        | Ability.TRANSACTIONS
        | Ability.TTL
        | Ability.SHARED_CLOCK
    )
    schema_version = schema.SCHEMA_VERSION

    def __init__(
        self, url: str, options: MongoOptions, *, clock: Clock, observe: Observe, rng: random.Random | None = None
    ) -> None:
        self._url = url
        self._options = options
        self._clock = clock
        self._observe = observe
        rng = rng or random.SystemRandom()
        self._retry = Retrier(options, clock, rng, observe, url)
        self._time = ServerTime(clock)
        self._quarantine = Quarantine(self._collection, self.now, observe)
        self._invocations = Invocations(self._collection, self._quarantine)
        self._scanner = LaneScanner(self._collection, clock.monotonic, self.now, self._deliver_hint)
        self._claims = Claims(self._collection, self._invocations, rng, self._scanner)
        self._database: AsyncDatabase[Document] | None = None
        self._mark: object = None  # differs from that of another database of the same name
        self._reported_index = False
        self._walked: dict[tuple[str, str], str] = {}  # how far the audit of waiting invocations got
        self._may_write = True  # until a write is refused
        self._alone = False  # a standalone: no majority, and no other process that would get a hint
        self._hints: StreamHints | None = None
        self._sessions = SessionClients(url)

    def now(self) -> float:
        return self._time.now()

    def clock_error(self) -> float:
        return self._time.error()

    def needs_restart(self, *, by_children: bool = False) -> str:
        return ""

    # --- opening and closing

    async def open(self, session: object = None) -> None:
        if self._database is not None:
            return
        client = connection.acquire(self._url)
        try:
            database = self._database_of(client)
            await self._retry.ask("opening", lambda again: self._prepare(database))
        except BaseException:
            await connection.release(self._url)
            raise
        self._database = database
        if unchecked := connection.unchecked_option(self._url):
            why = f"the certificate of MongoDB is not checked ({unchecked}), so any server may take its place"
            self._observe("risk", {"why": why})
        self._hints = StreamHints(
            database[schema.SIGNALS].with_options(read_concern=ReadConcern("majority")),  # a stream takes no other
            use_change_streams=self._options.use_change_streams,
            observe=self._observe,
            has_listeners=lambda: not self._alone,
            on_hint=self._scanner.marks.take_hint,
        )

    def _database_of(self, client: AsyncMongoClient[Document]) -> AsyncDatabase[Document]:
        return client.get_database(
            connection.database_name(self._url),
            codec_options=connection.LENIENT,
            write_concern=_MAJORITY,
            read_concern=ReadConcern("local"),
            read_preference=ReadPreference.PRIMARY,
        )

    async def _prepare(self, database: AsyncDatabase[Document]) -> None:
        """Read the server's time, check the schema's version, create missing collections and indexes."""
        await self._learn_time(database)
        self._mark = await schema.prepare(database, self._options.signal_retention_seconds)

    async def _learn_time(self, database: AsyncDatabase[Document]) -> None:
        asked = self._clock.monotonic()
        hello = await database.command("hello")
        self._time.learn(hello["localTime"].timestamp(), asked)
        self._alone = "setName" not in hello and hello.get("msg") != "isdbgrid"
        if self._alone:
            self.abilities &= ~Ability.TRANSACTIONS

    def _deliver_hint(self, hint: Hint) -> None:
        """Deliver a hint of this process to itself."""
        if self._hints is not None:
            self._hints.deliver(hint)

    async def close(self) -> None:
        await self._scanner.close()
        if self._hints is not None:
            await self._hints.close()
            self._hints = None
        await self._sessions.close()
        if self._database is not None:
            self._database = None
            await connection.release(self._url)

    def joined(self, session: object) -> MongoTransaction:
        return joined(session, connection.database_name(self._url), self._mark, self.now, self._observe)

    def transaction(self, *, is_async: bool, owner: str = "") -> MongoStepTransaction:
        if self._alone:
            raise UsageError("a standalone MongoDB has no transactions; a transactional step needs a replica set")
        return MongoStepTransaction(functools.partial(self._sessions.client, owner), is_async=is_async)

    async def abort_transactions(self, owners: Collection[str]) -> int:
        if self._alone or not owners:
            return 0
        return await self._do("abort transactions", sessions.abort, self._collection(schema.META), owners)

    def hints(self) -> StreamHints | None:
        return self._hints

    async def exists(self) -> bool:
        """Return whether a store was ever made here. It need not be open, and is not made."""
        async with connection.borrowed(self._url) as client:
            meta = self._database_of(client)[schema.META]
            return await self._do("exists", meta.find_one, {"_id": "schema"}) is not None

    # --- the way to the server

    def _collection(self, name: str, *, majority: bool = False) -> AsyncCollection[Document]:
        if self._database is None:
            raise StoreUnavailable("the MongoDB store is not open")
        collection = self._database[name]
        return collection.with_options(read_concern=ReadConcern("majority")) if majority else collection

    async def _certainly(self, name: str, read: Callable[[AsyncCollection[Document]], Awaitable[T]]) -> T:
        """Read what a read with majority did not show. After an election the new primary may not know yet that the
        majority has what its predecessor acknowledged, so a write makes it find out. A user without the right to write
        reads linearizable instead, which is slower. Only reads of what is not there pay for this.
        """
        if self._alone:
            return await read(self._collection(name))
        if self._may_write:
            try:
                await schema.wait_for_majority(self._collection(schema.SIGNALS))  # a submitter may write there
                return await read(self._collection(name, majority=True))
            except OperationFailure as error:
                if not is_forbidden(error):
                    raise
                self._may_write = False
        with pymongo.timeout(_CERTAIN_SECONDS):
            return await read(self._collection(name).with_options(read_concern=ReadConcern("linearizable")))

    async def _one(self, name: str, key: str) -> Document | None:
        """Return a document that is durable, or None if there is certainly none."""
        found = await self._collection(name, majority=True).find_one({"_id": key})
        return await self._certainly(name, lambda there: there.find_one({"_id": key})) if found is None else found

    async def _do(self, what: str, call: Callable[P, Awaitable[T]], *args: P.args, **more: P.kwargs) -> T:
        return await self._ask(what, lambda again: call(*args, **more))

    async def _ask(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Run an operation, with retries. Every operation passes here; now and then one reads the server's time
        first.
        """
        if self._time.is_old() and (database := self._database) is not None:
            await self._retry.ask("time", lambda again: self._learn_time(database))
        return await self._retry.ask(what, lambda again: self._mended(attempt, again))

    async def _mended(self, attempt: Callable[[bool], Awaitable[T]], again: bool) -> T:
        """Run an attempt; if it names an index that was dropped, make the index and run it again."""
        try:
            return await attempt(again)
        except OperationFailure as error:
            if not is_missing_index(error) or (database := self._database) is None:
                raise
        await self._make_indexes(database)
        return await attempt(True)

    async def _make_indexes(self, database: AsyncDatabase[Document]) -> None:
        """Make missing indexes. A user without that right reports it once; the operation is retried later."""
        names = ""
        try:
            schema.refuse_or_accept(await schema.version_of(database))  # a newer Holdfast may have dropped it
            names = ", ".join(await schema.missing(database))
            await schema.put_right(database, self._options.signal_retention_seconds)
            await self._prepare(database)  # the whole database may have been dropped
        except OperationFailure as error:
            if is_transient(error):
                raise
            which = f"the index {names}" if names else "an index of Holdfast"
            reason = f"{which} is missing; run: holdfast store prepare. To make it again failed: {text_of(error)}"
            if not self._reported_index:
                self._reported_index = True
                self._observe("index_missing", {"why": reason})
            raise OperationFailure(f"{reason} ({NO_SUCH_INDEX})", BAD_VALUE) from error
        self._reported_index = False
        self._observe("index_made", {"why": f"{names or 'an index of Holdfast'} had been dropped"})

    async def _readable(
        self, what: str, name: str, read: Callable[[], Awaitable[Sequence[Document]]], decode: Callable[[Document], T]
    ) -> list[T]:
        """Read documents of a collection. Corrupt ones are quarantined, and make room for the next."""

        async def attempt(again: bool) -> list[T]:
            found: list[T] = []
            for _ in range(_MAX_PASSES):
                found, moved = await self._quarantine.sorted_out(name, await read(), decode)
                if not moved:
                    break
            return found

        return await self._ask(what, attempt)

    async def _set_aside(self, name: str, document: Document | None, error: CorruptRecord) -> bool:
        """Quarantine a document of a collection. Return False if this user may not."""
        return document is not None and await self._do("set aside", self._quarantine.set_aside, document, error, name)

    # --- invocations

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        if not records:
            return []
        for record in records:
            if len(record.arguments) > _MAX_BYTES:
                raise StoreError(
                    f"the arguments of {record.task} take {len(record.arguments) / 2**20:.1f} MB; a MongoDB document "
                    f"has 16 MB, and {_MAX_BYTES / 2**20:.0f} MB is the most that leaves room for its history and end."
                )
        try:
            return await self._do("insert", self._invocations.insert, records, [to_document(one) for one in records])
        finally:
            self._scanner.marks.lower_for(records)  # whatever the answer was: they may be there

    async def find_conflicts(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        if not records:
            return []
        app, names = records[0].app, queries.names_of(records)
        keys = [key_of(app, record.id) for record in records]
        there = self._collection(schema.INVOCATIONS, majority=True)
        found = []
        for document in await self._do("find conflicts", queries.find_conflicts, there, app, keys, names):
            try:
                found.append(from_document(document))
            except CorruptRecord as error:  # an id stays taken; a key does not, where this user may quarantine
                if document["_id"] in keys or not await self._set_aside(schema.INVOCATIONS, document, error):
                    raise
        return [find_conflict(record, found) for record in records]

    async def lanes(self, app: str) -> Sequence[str]:
        return await self._do("lanes", queries.lanes, self._collection(schema.INVOCATIONS), app)

    async def claim(self, claim: Claim) -> Claimed:
        return await self._ask("claim", lambda again: self._claims.claim(claim, again or claim.again))

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        records = await self._do("release waiters", self._invocations.release_waiters, app, wishes, operation, at)
        self._scanner.marks.lower_for(records)
        return records

    async def waiting_keys(
        self, app: str, within: Sequence[tuple[str, str]] = ALL_KEYS, most: int | None = None
    ) -> Mapping[str, int]:
        there = self._collection(schema.INVOCATIONS)
        return await self._do("waiting keys", invocations.waiting_keys, there, app, within, most)

    async def owners(self, app: str) -> Sequence[str]:
        return await self._do("owners", queries.owners, self._collection(schema.INVOCATIONS), app)

    async def apply(self, changes: Sequence[Write]) -> Sequence[Verdict]:
        verdicts: dict[int, Verdict] = {}
        try:
            if (runs := pushes_by_run(changes)) is not None:
                for indexes in runs:
                    together = [push for index in indexes if isinstance(push := changes[index], Push)]
                    verdicts.update(zip(indexes, await self._push(together), strict=True))
                return [verdicts[index] for index in range(len(changes))]
            for this_round in rounds(changes):
                steps = [(index, change) for index, change in this_round if isinstance(change, Change | FieldReset)]
                if steps:
                    verdicts.update(await self._do("apply", self._invocations.apply, steps))
                moves = [(index, write) for index, write in this_round if isinstance(write, MoveUp)]
                if moves:
                    moved = await self._do("move up", self._invocations.move_up, [move for _, move in moves])
                    verdicts.update(zip([index for index, _ in moves], moved, strict=True))
                times = [(index, write) for index, write in this_round if isinstance(write, Kept)]
                if times:
                    kept = await self._do("keep", self._invocations.keep_until, [write for _, write in times])
                    verdicts.update(zip([index for index, _ in times], kept, strict=True))
                notes = [(index, write) for index, write in this_round if isinstance(write, NoteUpdate)]
                if notes:
                    noted = await self._do("note", self._invocations.note, [note for _, note in notes])
                    verdicts.update(zip([index for index, _ in notes], noted, strict=True))
                for index, write in this_round:
                    if not isinstance(write, Change | FieldReset | MoveUp | Kept | NoteUpdate):
                        verdicts[index] = await self._write_run(write)
        finally:
            self._scanner.note_changes(change for change in changes if isinstance(change, Change | MoveUp))
        return [verdicts[index] for index in range(len(changes))]

    async def _write_run(self, write: RunUpdate | StreamMark | WaitNote | Push) -> Verdict:
        if isinstance(write, Push):
            return (await self._push([write]))[0]
        return await self._do("update run", self._invocations.update_run, write)

    async def _push(self, pushes: Sequence[Push]) -> list[Verdict]:
        verdicts, after = await self._do("push", self._invocations.push, pushes)
        if after is not None and after.status in AVAILABLE:
            self._scanner.marks.lower_for([after])
        return verdicts

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        keys = [key_of(app, id) for id in ids]
        found = {document["_id"]: from_document(document) for document in await self._do("get", self._get, keys)}
        return [found.get(key) for key in keys]

    async def _get(self, keys: Sequence[str]) -> list[Document]:
        found = await queries.by_key(self._collection(schema.INVOCATIONS, majority=True), keys)
        if not (missing := set(keys) - {document["_id"] for document in found}):
            return found
        return found + await self._certainly(schema.INVOCATIONS, lambda there: queries.by_key(there, sorted(missing)))

    async def find(
        self, app: str, where: Filter, limit: int, *, order: Order = Order.NEWEST, set_aside: bool = False
    ) -> Sequence[InvocationRecord]:
        there = self._collection(schema.INVOCATIONS, majority=True)
        if set_aside:
            return await self._readable(
                "find", schema.INVOCATIONS, lambda: listing.find(there, app, where, order, limit), from_document
            )
        found: list[InvocationRecord] = []
        while len(found) < limit:
            documents = await self._do("find", listing.find, there, app, where, order, limit - len(found))
            found += (some := self._listed(documents))
            if len(some) == len(documents) or order is not Order.NEWEST:
                break
            where = replace(where, before_id=str(documents[-1]["_id"]).rpartition("|")[2])
        return found

    def _listed(self, documents: Sequence[Document]) -> list[InvocationRecord]:
        """Return the records of documents, without the corrupt ones."""
        records = []
        for document in documents:
            try:
                records.append(from_document(document))
            except CorruptRecord as error:
                self._observe("unreadable", {"kind": error.kind, "id": error.id, "why": str(error)})
        return records

    async def apps(self) -> Sequence[str]:
        kinds = (schema.INVOCATIONS, schema.ENTRIES, schema.RUNNERS)
        found = [await self._do("apps", queries.apps, self._collection(kind, majority=True)) for kind in kinds]
        return sorted({app for names in found for app in names})

    async def counts(
        self, app: str, most: int | None = None, among: Iterable[Status] = tuple(Status)
    ) -> Mapping[Status, int]:
        names = [status.value for status in among]
        found = await self._do("counts", queries.counts, self._collection(schema.INVOCATIONS), app, most, names)
        return {Status(name): count for name, count in found.items() if name in _KNOWN}

    async def queue_depths(self, app: str, at: float, most: int | None = None) -> Sequence[QueueDepth]:
        there = self._collection(schema.INVOCATIONS)
        if most is not None:
            return await self._do("queue depths", invocations.some_depths, there, app, at, most)
        return await self._do("queue depths", invocations.depths, there, app, at)

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        keys = [key_of(app, id) for id in ids]
        return await self._do("remove ended", invocations.remove, self._collection, keys)

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        return await self._do("remove expired", self._remove_expired, app, at, limit)

    async def _remove_expired(self, app: str, at: float, limit: int) -> int:
        removed = await invocations.remove_expired(self._collection, app, at, limit)
        return removed + await entries.remove_expired(self._collection(schema.ENTRIES), app, at, limit - removed)

    # --- logs

    async def append(self, pages: Sequence[Page]) -> Sequence[AppendVerdict]:
        taken = await self._do("append", logs.append, self._collection(schema.LOG), pages) if pages else []
        verdicts: dict[int, AppendVerdict] = {}
        for index in taken:
            page = pages[index]
            where = (page.app, page.run, page.generation, page.first - 1, MAX_BEHIND)
            there = await self._do("read log", self._read_certainly, *where)
            verdicts[index] = judge(page, until_damaged(there, logs.page_of))
        return [verdicts.get(index, APPENDED) for index in range(len(pages))]

    async def _read_certainly(self, app: str, run: str, generation: int, after: int, limit: int) -> list[Document]:
        return await self._certainly(schema.LOG, lambda log: logs.read(log, app, run, generation, after, limit))

    async def read_log(
        self,
        app: str,
        run: InvocationId,
        *,
        generation: int = 0,
        after: int = 0,
        until: int | None = None,
        limit: int,
        latest: bool = False,
    ) -> Sequence[Page]:
        log = self._collection(schema.LOG, majority=True)
        where = (app, run, generation, after, limit)
        found = await self._do("read log", logs.read, log, *where, until=until, latest=latest)
        pages = [logs.page_of(document) for document in found]
        checked(pages[::-1] if latest else pages, from_start=after == 0 and not latest)
        return pages

    async def remove_log(self, app: str, run: InvocationId, *, before: int) -> int:
        return await self._do("remove log", logs.remove, self._collection(schema.LOG), app, run, before)

    # --- entries

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        there = self._collection(schema.ENTRIES, majority=True)
        while True:
            if await self._do("put entry", entries.put, there, entry, over):
                return True
            found = await self._do("put entry", entries.get, there, entry)
            try:
                return found is not None and entries.entry_of(found) == entry
            except CorruptRecord as error:
                if not await self._set_aside(schema.ENTRIES, found, error):
                    raise

    async def entries(
        self,
        app: str,
        kind: str,
        names: Sequence[str] | None = None,
        *,
        order: EntryOrder = EntryOrder.NAME,
        limit: int | None = None,
        before: str | None = None,
        subject: str | None = None,
    ) -> Sequence[Entry]:
        there = self._collection(schema.ENTRIES, majority=True)
        look = entries.look(app, kind, names, order, before, subject)
        found = await self._readable(
            "entries", schema.ENTRIES, lambda: entries.listing(there, look, limit), entries.entry_of
        )
        return found if names is None else sorted(found, key=lambda entry: entry.name)

    async def remove_entry(self, entry: Entry) -> bool:
        return await self._do("remove entry", entries.remove, self._collection(schema.ENTRIES), entry)

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        found = await self._do("quarantine entry", entries.get, self._collection(schema.ENTRIES), entry)
        if found is None or (found.get("version"), found.get("body")) != (entry.version, entry.body):
            return False
        return await self._set_aside(schema.ENTRIES, found, error)

    # --- payloads

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        there = self._collection(schema.PAYLOADS, majority=True)
        return await self._do("keep payloads", payloads.keep, there, app, digests, self.now())

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        pieces = self._collection(schema.PIECES)
        await self._do("put piece", payloads.put_piece, pieces, app, digest, number, piece, self.now())

    async def put_payloads(self, app: str, stored: Sequence[StoredPayload]) -> None:
        await self._do("put payloads", payloads.put, self._collection(schema.PAYLOADS), app, stored, self.now())

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        found = await self._do("get payload", self._one, schema.PAYLOADS, key_of(app, digest))
        try:
            return None if found is None else payloads.payload_of(found)
        except CorruptRecord as error:  # the next submit of the same value stores it again
            await self._set_aside(schema.PAYLOADS, found, error)
            raise

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        found = await self._do("get piece", self._one, schema.PIECES, payloads.piece_key(app, digest, number))
        try:
            return None if found is None else payloads.piece_of(found)
        except CorruptRecord as error:
            await self._set_aside(schema.PIECES, found, error)
            whole = self._collection(schema.PAYLOADS).find_one
            await self._set_aside(schema.PAYLOADS, await self._do("get payload", whole, key_of(app, digest)), error)
            raise

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        return await self._do("collect payloads", payloads.collect, self._collection, app, before, limit, self.now())

    # --- runners

    async def enrol(self, runner: RunnerRecord) -> None:
        document, there = runner_document(runner), self._collection(schema.RUNNERS)
        await self._do("enrol", there.replace_one, {"_id": document["_id"]}, document, upsert=True)

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        facts = {"workers": msgspec.to_builtins(list(workers)), "can_run_atomic_service": ticks, "draining": draining}
        found = await self._do("heartbeat", self._beat, key_of(app, runner_id), facts)
        try:
            return None if found is None else runner_of(found)
        except CorruptRecord as error:  # the runner enrols again, like a runner that was declared dead
            await self._set_aside(schema.RUNNERS, found, error)
            return None

    async def _beat(self, key: str, facts: Document) -> Document | None:
        """Let the server stamp the time, so that a wrong clock makes no runner look dead or live for ever. Its answer
        shows the difference of the clocks.
        """
        asked = self._clock.monotonic()
        found = await runners.beat(self._collection(schema.RUNNERS), key, facts)
        if found is not None:
            self._time.learn(found["heartbeat_at"], asked)
        return found

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        there = self._collection(schema.RUNNERS)
        return await self._readable(
            *("silent", schema.RUNNERS, lambda: runners.silent(there, app, self.now())),
            lambda found: (runner_of(found), float(found["silent"])),
        )

    async def remove_runner(self, app: str, runner_id: str, *, heartbeat_at: float | None = None) -> bool:
        there, key = self._collection(schema.RUNNERS), key_of(app, runner_id)
        return await self._ask("remove runner", lambda again: runners.remove(there, key, heartbeat_at, again))

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        asked = {"wish": wish, "sits_out_until": sits_out_until}
        facts = {"$set": {name: value for name, value in asked.items() if value is not None}}
        there, key = self._collection(schema.RUNNERS), key_of(app, runner_id)
        return (await self._do("ask runner", there.update_one, {"_id": key}, facts)).matched_count > 0

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        there = self._collection(schema.RUNNERS, majority=True)
        return await self._readable("roster", schema.RUNNERS, lambda: runners.roster(there, app), runner_of)

    # --- corrupt records, and the rest

    async def quarantined(self, app: str, id: str | None = None, *, latest: int | None = None) -> Sequence[Quarantined]:
        there = self._collection(schema.QUARANTINE)
        documents = await self._do("quarantined", queries.quarantined, there, app, id, latest)
        return [_quarantined(found) for found in documents]

    async def sizes(self) -> Mapping[str, int]:
        """Return the bytes of the database: stored data, and indexes; nothing if this user may not ask."""
        database = self._collection(schema.META).database
        try:
            found = await self._do("sizes", database.command, "dbStats")
        except (StoreReadOnly, StoreUnauthorised):
            return {}
        return {"data": int(found.get("storageSize", 0)), "indexes": int(found.get("indexSize", 0))}

    async def quarantine_hidden(self, app: str) -> int:
        count = 0
        for look, decode in _AUDITS:
            count += await self._do("quarantine hidden", self._audit, look, app, decode)
        until = self._clock.monotonic() + WALK_SECONDS
        for status in sorted(AVAILABLE):
            count += await self._do("quarantine hidden", self._walk, app, status)
            while self._walked[app, status] and self._clock.monotonic() < until:
                count += await self._do("quarantine hidden", self._walk, app, status)
        return count

    async def _audit(self, look: Look, app: str, decode: Callable[[Document], object]) -> int:
        found = await look(self._collection(schema.INVOCATIONS), app)
        return (await self._quarantine.sorted_out(schema.INVOCATIONS, found, decode))[1]

    async def _walk(self, app: str, status: Status) -> int:
        """Quarantine waiting invocations of a status that no claim would find."""
        there, after = self._collection(schema.INVOCATIONS), self._walked.get((app, status), "")
        found, following = await queries.waiting_after(there, app, status.value, after)
        moved = (await self._quarantine.sorted_out(schema.INVOCATIONS, found, from_document))[1]
        self._walked[app, status] = following
        return moved

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        async with connection.borrowed(self._url) as client:
            database, seconds = self._database_of(client), self._options.signal_retention_seconds
            look = functools.partial(inspect, observe=self._observe)
            return await self._do("check", look, database, self._clock, deep=deep, signal_seconds=seconds)


def _without_owner(document: Document) -> None:
    reason = f"its owner is {shown(document.get('owner'))}, so no runner could recover it"
    raise corrupt(INVOCATION, str(document["_id"]).rpartition("|")[2], ValueError(reason))


_AUDITS: Sequence[tuple[Look, Callable[[Document], object]]] = (
    (queries.of_unknown_status, from_document),
    (queries.without_owner, _without_owner),
    (queries.all_slot_holders, from_document),
)


def _quarantined(found: Document) -> Quarantined:
    """Return a quarantined record, as far as its entry can be read."""
    at = found.get("at")
    texts = {name: str(found.get(name, "")) for name in ("app", "id", "why")}
    moment = float(at) if isinstance(at, int | float) and EARLIEST <= at <= LATEST else 0.0
    return Quarantined(**texts, at=moment, raw=repr(found.get("document")), kind=str(found.get("kind") or INVOCATION))
