"""Collections, indexes and their version.

Every index names the queries that it serves; a test explains each query and fails on a scan of a collection or a sort
in memory. Indexes are created on first use and by `holdfast store prepare`, which also adds missing ones and adjusts
times to live. A process without that right uses the existing indexes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from pymongo import ASCENDING, IndexModel, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure

from holdfast.errors import SchemaMismatch
from holdfast.model.decoding import shown
from holdfast.model.records import OUTCOMES
from holdfast.model.status import Status
from holdfast.store.migration import entries_of_executions, entry_of_pause, kept_until
from holdfast.store.mongo.documents import Document, expiry
from holdfast.store.mongo.entries import document_of
from holdfast.store.mongo.retry import DUPLICATE, is_forbidden

Collection = AsyncCollection[Document]

SCHEMA_VERSION = 7
MIN_READER = 6  # older versions would end a run without its compensation, and leave its log behind
_HIGHEST = 1_000_000
_ENTRIES_SINCE = 5  # what was moved to entries then, and got a time to be kept; later versions add only indexes

INVOCATIONS = "holdfast_invocations"
RUNNERS = "holdfast_runners"
SIGNALS = "holdfast_signals"
QUARANTINE = "holdfast_quarantine"
PAYLOADS = "holdfast_payloads"
PIECES = "holdfast_payload_pieces"
ENTRIES = "holdfast_entries"
LOG = "holdfast_log"
META = "holdfast_meta"
COLLECTIONS = (INVOCATIONS, LOG, RUNNERS, SIGNALS, QUARANTINE, PAYLOADS, PIECES, ENTRIES, META)

SIGNAL_SECONDS = 3600  # the default of `signal_retention_seconds`


_IN_THE_WAY = frozenset({85, 86})  # the same keys under another name, the same name with other keys
_NO_INDEX = 27  # IndexNotFound
_AT_ONCE = 500
OLD_COLLECTIONS = ("holdfast_queues", "holdfast_executions")
OLD_INDEXES = ("owned", "status")  # that were there before version 5, or had other keys


class Index(NamedTuple):
    collection: str
    name: str
    keys: tuple[tuple[str, int], ...]
    serves: str
    options: dict[str, Any]

    @property
    def model(self) -> IndexModel:
        return IndexModel(list(self.keys), name=self.name, **self.options)


def _index(collection: str, name: str, keys: str, serves: str, where: dict[str, Any] | str = "", **more: Any) -> Index:
    """Return an ascending index of these fields. `where`: only documents that match, or that have this field."""
    partial = {where: {"$exists": True}} if isinstance(where, str) else where
    options = ({"partialFilterExpression": partial} if where else {}) | more
    return Index(collection, name, tuple((key, ASCENDING) for key in keys.split()), serves, options)


_ENDED_RUN = {"run": {"$exists": True}, "retain_until": {"$exists": True}}
_ENDED_STREAMED = {"has_streams": True, "retain_until": {"$exists": True}}
INDEXES = (
    _index(INVOCATIONS, "ready", "app lane rank due_at id", "claim: as small as the backlog", {"ready": True}),
    # With `ready` among the keys, a distinct scan jumps from lane to lane, without a document.
    _index(INVOCATIONS, "due", "ready app lane due_at", "lanes; what falls due next, of any priority", {"ready": True}),
    # Only owned invocations have an owner, so all others of a status lie by their ids.
    _index(INVOCATIONS, "status", "app status owner id", "find by status; counts; owners; a claim's lost answer"),
    _index(INVOCATIONS, "task", "app task id", "find by task"),
    _index(INVOCATIONS, "queue", "app queue id", "find by queue"),
    _index(INVOCATIONS, "payloads", "app payloads", "whether an invocation refers to a payload", "payloads"),
    _index(INVOCATIONS, "expires", "expires_at", "removes expired invocations", "expires_at", expireAfterSeconds=0),
    _index(INVOCATIONS, "ended", "app status changed_at id", "the archive, latest end first", "retain_until"),
    _index(INVOCATIONS, "rerun", "app rerun_of id", "reruns of an ended invocation", "rerun_of"),
    _index(INVOCATIONS, "outbox", "app changed_at id", "ends whose triggers are yet to be called", "outbox"),
    _index(INVOCATIONS, "wake", "app wake_at id", "runs that go on by themselves", {"status": Status.SUSPENDED.value}),
    _index(INVOCATIONS, "over", "app retain_until", "removes expired runs, after their logs", _ENDED_RUN),
    _index(INVOCATIONS, "streamed", "app retain_until", "removes expired tasks, after their streams", _ENDED_STREAMED),
    _index(INVOCATIONS, "attributes", "app attributes id", "find by attribute", "attributes"),
    _index(LOG, "payloads", "app payloads", "whether a log refers to a payload", "payloads"),
    _index(PAYLOADS, "wanted", "app wanted_at", "payloads that were not wanted for long"),
    _index(PIECES, "put", "app put_at", "pieces without a payload"),
    _index(QUARANTINE, "payloads", "app document.payloads", "payloads of quarantined records", "document.payloads"),
    _index(INVOCATIONS, "slot", "app limit_key slot", "one holder per slot; the holders of a key", "slot", unique=True),
    _index(INVOCATIONS, "key", "app task key", "one invocation per key", "key", unique=True),
    _index(INVOCATIONS, "twin", "app twin", "one waiting invocation per dedup key", "twin", unique=True),
    _index(INVOCATIONS, "start_by", "app start_by id", "invocations not started in time", "start_by"),
    _index(INVOCATIONS, "parent", "app parent_id id", "find by parent", {"parent_id": {"$gt": ""}}),
    _index(
        *(INVOCATIONS, "waiting"),
        # With `status` among the keys, a distinct scan jumps from limit key to limit key, without a document.
        "status app limit_key rank due_at id",
        "the longest waiter for a limit key; limit keys with waiters",
        {"status": Status.CONCURRENCY_CONTROLLED.value},
    ),
    _index(ENTRIES, "named", "app kind name", "entries by kind and name"),
    _index(ENTRIES, "payloads", "app payloads", "whether an entry refers to a payload", "payloads"),
    _index(ENTRIES, "subject", "app kind subject name", "entries that belong to a run", "subject"),
    _index(ENTRIES, "due", "app kind due_at name", "entries of each kind that are due next", "due_at"),
    _index(ENTRIES, "expires", "expires_at", "removes expired entries", "expires_at", expireAfterSeconds=0),
    _index(RUNNERS, "heartbeats", "app heartbeat_at", "the runner that was silent longest"),
    _index(RUNNERS, "roster", "app started_at id", "roster"),
    _index(QUARANTINE, "app", "app at", "quarantined"),
    _index(QUARANTINE, "kind", "kind at", "how many of each kind were quarantined"),
    _index(SIGNALS, "at", "at", "removes the signals of ended processes", expireAfterSeconds=SIGNAL_SECONDS),
)


def indexes(signal_seconds: int) -> tuple[Index, ...]:
    """Return all indexes, with the time to live of signals that the settings say."""
    seconds = {"expireAfterSeconds": signal_seconds}
    return tuple(index._replace(options=seconds) if index.collection == SIGNALS else index for index in INDEXES)


async def version_of(database: AsyncDatabase[Document]) -> Document | None:
    """Return the version document; None if Holdfast has none there."""
    return await database[META].find_one({"_id": "schema"})


def refuse_or_accept(meta: dict[str, Any] | None) -> None:
    """Raise `SchemaMismatch` unless this Holdfast may work on a database with that version document."""
    if meta is None:
        return
    version, min_reader = meta.get("schema_version"), meta.get("min_reader")
    if not _is_version(version) or not _is_version(min_reader):
        raise SchemaMismatch(
            f"{META} has no valid schema version ({shown(meta)}). Restore a backup, or use another database."
        )
    if min_reader > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the database has schema version {version}, which needs a Holdfast that knows version {min_reader}; "
            f"this one knows {SCHEMA_VERSION}. Upgrade Holdfast here."
        )


def _is_version(value: object) -> TypeGuard[float]:
    """Return whether a value can be a version. It may be a double after a manual edit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _HIGHEST and value == int(value)


async def prepare(database: AsyncDatabase[Document], signal_seconds: int = SIGNAL_SECONDS) -> object:
    """Check the version, then create what is missing. Return the mark by which this database is known.

    The version is written last: an interrupted migration is repeated, which does no harm. A newer schema is left as it
    is.
    """
    meta = database[META]
    found = await version_of(database)
    refuse_or_accept(found)
    version = 0 if found is None else found["schema_version"]
    if version > SCHEMA_VERSION:
        return found and found.get("mark")
    try:
        if 0 < version < _ENTRIES_SINCE:
            await _drop_old_indexes(database[INVOCATIONS])
        await put_right(database, signal_seconds)
    except OperationFailure as error:
        if not is_forbidden(error) or version < SCHEMA_VERSION:
            raise
    if version < SCHEMA_VERSION:
        if 0 < version < _ENTRIES_SINCE:
            await _migrate(database[INVOCATIONS], database[ENTRIES], [database[name] for name in OLD_COLLECTIONS])
        now = {"schema_version": SCHEMA_VERSION, "min_reader": MIN_READER}
        with contextlib.suppress(DuplicateKeyError):  # another process was faster, with the same
            await meta.update_one({"_id": "schema"}, {"$max": now}, upsert=True)
    return await _mark(meta, found)


async def _drop_old_indexes(invocations: Collection) -> None:
    """Drop what older versions had, unless another process has put an index of ours in its place."""
    ours = {index.name: index.keys for index in INDEXES if index.collection == INVOCATIONS}
    for name, facts in (await invocations.index_information()).items():
        if name in OLD_INDEXES and tuple(facts["key"]) != ours.get(name):
            try:
                await invocations.drop_index(name)
            except OperationFailure as error:
                if error.code != _NO_INDEX:  # another process was faster
                    raise


async def _mark(meta: Collection, found: dict[str, Any] | None) -> object:
    """Return the random mark of this database, which another database of the same name lacks. The first process with
    the right to write makes it.
    """
    if found is None or "mark" not in found:
        with contextlib.suppress(OperationFailure):
            await meta.update_one({"_id": "schema", "mark": None}, {"$set": {"mark": secrets.token_hex(8)}})
        found = await meta.find_one({"_id": "schema"})
    return (found or {}).get("mark")


async def wait_for_majority(collection: Collection) -> None:
    """Write without changing anything, and return when the majority has all earlier writes."""
    await collection.update_one({"_id": "schema"}, {"$max": {"min_reader": 0}})


async def missing(database: AsyncDatabase[Document]) -> list[str]:
    """Return our indexes that are not there."""
    there = {name: await database[name].index_information() for name in COLLECTIONS}
    return [f"{index.collection}.{index.name}" for index in INDEXES if index.name not in there[index.collection]]


async def put_right(database: AsyncDatabase[Document], signal_seconds: int) -> None:
    expected = indexes(signal_seconds)
    for name in COLLECTIONS:
        await _put_right(database, name, [index for index in expected if index.collection == name])


async def _put_right(database: AsyncDatabase[Document], name: str, ours: Sequence[Index]) -> None:
    """Create missing indexes, and adjust times to live.

    An index that differs otherwise is not touched: `store check` reports it, and a person decides.
    """
    there = await database[name].index_information() if ours else {}
    missing = [index.model for index in ours if index.name not in there]
    try:
        if missing:
            await database[name].create_indexes(missing)
    except OperationFailure as error:
        if error.code not in _IN_THE_WAY:
            raise
        raise SchemaMismatch(
            f"{name} has an index that conflicts with an index of Holdfast: "
            f"{(error.details or {}).get('errmsg', error)}. "
            "Drop it (holdfast store check names indexes of others), then run: holdfast store prepare"
        ) from error
    for index in ours:
        seconds = index.options.get("expireAfterSeconds")
        if seconds is not None and index.name in there and there[index.name].get("expireAfterSeconds") != seconds:
            await database.command("collMod", name, index={"name": index.name, "expireAfterSeconds": seconds})


# --- migration: each step can be repeated, and run in two processes at once


async def _migrate(invocations: Collection, entries: Collection, old: Sequence[Collection]) -> None:
    queues, executions = [await collection.find({}).to_list() for collection in old]
    moved = [*map(entry_of_pause, queues), *entries_of_executions(executions)]
    if moved:
        await _insert(entries, [document_of(entry) for entry in moved])
    await _retain_old(invocations)
    for collection in old:
        try:
            await collection.drop()
        except OperationFailure as error:
            if not is_forbidden(error):  # then they stay unused
                raise


async def _insert(entries: Collection, documents: list[Document]) -> None:
    """Insert the entries that are missing."""
    try:
        await entries.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        details = error.details or {}
        errors = details.get("writeErrors", [])
        if details.get("writeConcernErrors") or any(item.get("code") != DUPLICATE for item in errors):
            raise


async def _retain_old(invocations: Collection) -> None:
    """Set how long invocations are kept that ended under an older version. Reads the whole collection, once."""
    wanted: Document = {"status": {"$in": list(OUTCOMES)}, "retain_until": {"$exists": False}}
    fields = dict.fromkeys(("status", "changed_at", "terms", "key"), True)
    updates: list[UpdateOne] = []
    async for found in invocations.find(wanted, fields):
        until = kept_until(found["status"], found.get("key"), found.get("terms"), found.get("changed_at", 0.0))
        still: Document = {"_id": found["_id"], "retain_until": {"$exists": False}}
        updates.append(UpdateOne(still, {"$set": expiry(until)}))
        if len(updates) == _AT_ONCE:
            await invocations.bulk_write(updates, ordered=False)
            updates = []
    if updates:
        await invocations.bulk_write(updates, ordered=False)
