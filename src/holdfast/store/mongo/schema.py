"""Collections, indexes and their version.

Every index names the query it serves; a test explains each query and fails on a scan of a collection or a sort in
memory. Creating them is idempotent and happens on first use and by `holdfast store prepare`, which also makes good
what is missing and adjusts times to live; a process whose user may not do that goes on with what is there.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from pymongo import ASCENDING, IndexModel
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError, OperationFailure

from holdfast.errors import SchemaMismatch
from holdfast.lifecycle.decoding import shown
from holdfast.lifecycle.status import Status
from holdfast.store.mongo.retry import is_forbidden

SCHEMA_VERSION = 3
MIN_READER = 1
_HIGHEST = 1_000_000

INVOCATIONS = "holdfast_invocations"
RUNNERS = "holdfast_runners"
SIGNALS = "holdfast_signals"
QUARANTINE = "holdfast_quarantine"
EXECUTIONS = "holdfast_executions"
PAYLOADS = "holdfast_payloads"
PIECES = "holdfast_payload_pieces"
QUEUES = "holdfast_queues"
ENTRIES = "holdfast_entries"
META = "holdfast_meta"
COLLECTIONS = (INVOCATIONS, RUNNERS, SIGNALS, QUARANTINE, PAYLOADS, PIECES, EXECUTIONS, QUEUES, ENTRIES, META)

SIGNAL_SECONDS = 3600  # the default of `signal_retention_seconds`


_IN_THE_WAY = frozenset({85, 86})  # the same keys under another name, the same name with other keys


class Index(NamedTuple):
    collection: str
    name: str
    keys: tuple[tuple[str, int], ...]
    serves: str
    options: dict[str, Any]

    @property
    def model(self) -> IndexModel:
        return IndexModel(list(self.keys), name=self.name, **self.options)


def _up(*names: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, ASCENDING) for name in names)


INDEXES = (
    Index(
        INVOCATIONS,
        "ready",
        _up("app", "lane", "rank", "due_at", "id"),
        "claim: only what is ready, so it stays as small as the backlog",
        {"partialFilterExpression": {"ready": True}},
    ),
    Index(
        INVOCATIONS,
        "due",
        # With `ready` among the keys, the lanes can be told by jumping from one to the next, without a document.
        _up("ready", "app", "lane", "due_at"),
        "lanes; when the next invocation of a lane falls due, whatever its priority",
        {"partialFilterExpression": {"ready": True}},
    ),
    Index(
        INVOCATIONS,
        "owned",
        # With `owned` among the keys, the owners can be told by jumping from one to the next, without a document.
        _up("owned", "app", "owner", "claim_token"),
        "a claim repeated after a lost answer; what an owner holds; who owns anything",
        {"partialFilterExpression": {"owned": True}},
    ),
    Index(INVOCATIONS, "status", _up("app", "status", "id"), "find by status; counts", {}),
    Index(INVOCATIONS, "task", _up("app", "task", "id"), "find by task", {}),
    Index(INVOCATIONS, "queue", _up("app", "queue", "id"), "find by queue", {}),
    Index(
        INVOCATIONS,
        "payloads",
        _up("app", "payloads"),
        "whether a payload is referred to",
        {"partialFilterExpression": {"payloads": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "expires",
        _up("expires_at"),
        "removes what need not be kept longer",
        {"expireAfterSeconds": 0, "partialFilterExpression": {"expires_at": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "ended",
        _up("app", "status", "changed_at", "id"),
        "the archive by outcome, latest end first",
        {"partialFilterExpression": {"retain_until": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "rerun",
        _up("app", "rerun_of", "id"),
        "what repeats an ended one",
        {"partialFilterExpression": {"rerun_of": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "outbox",
        _up("app", "changed_at", "id"),
        "ends that somebody is yet to be told of",
        {"partialFilterExpression": {"outbox": {"$exists": True}}},
    ),
    Index(PAYLOADS, "wanted", _up("app", "wanted_at"), "payloads that nobody has wanted for long", {}),
    Index(PIECES, "put", _up("app", "put_at"), "pieces that lost their payload", {}),
    Index(
        QUARANTINE,
        "payloads",
        _up("app", "document.payloads"),
        "whether what was set aside refers to a payload",
        {"partialFilterExpression": {"document.payloads": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "slot",
        _up("app", "limit_key", "slot"),
        "a slot has one holder; who holds those of a key",
        {"unique": True, "partialFilterExpression": {"slot": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "key",
        _up("app", "task", "key"),
        "one key, one invocation; who has a key",
        {"unique": True, "partialFilterExpression": {"key": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "twin",
        _up("app", "twin"),
        "of a kind one waits for its first start; who that is",
        {"unique": True, "partialFilterExpression": {"twin": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "start_by",
        _up("app", "start_by", "id"),
        "what was not started in time",
        {"partialFilterExpression": {"start_by": {"$exists": True}}},
    ),
    Index(
        INVOCATIONS,
        "parent",
        _up("app", "parent_id", "id"),
        "find by parent",
        {"partialFilterExpression": {"parent_id": {"$gt": ""}}},
    ),
    Index(
        INVOCATIONS,
        "waiting",
        # With `status` among the keys, the limit keys can be told by jumping from one to the next, without a document.
        _up("status", "app", "limit_key", "rank", "due_at", "id"),
        "who waits longest for a slot of a limit key; which keys somebody waits for",
        {"partialFilterExpression": {"status": Status.CONCURRENCY_CONTROLLED.value}},
    ),
    Index(
        EXECUTIONS,
        "executing",
        _up("app", "service"),
        "one execution of a service runs at a time",
        {"unique": True, "partialFilterExpression": {"status": "running"}},
    ),
    Index(EXECUTIONS, "executed", _up("app", "service", "started_at", "id"), "the audit trail of a service", {}),
    Index(QUEUES, "paused", _up("app", "name"), "the queues that are paused", {}),
    Index(ENTRIES, "named", _up("app", "kind", "name"), "the entries of a kind", {}),
    Index(
        ENTRIES,
        "due",
        _up("app", "kind", "due_at", "name"),
        "the entries of a kind that are due next",
        {"partialFilterExpression": {"due_at": {"$exists": True}}},
    ),
    Index(
        ENTRIES,
        "expires",
        _up("expires_at"),
        "removes entries that need not be kept longer",
        {"expireAfterSeconds": 0, "partialFilterExpression": {"expires_at": {"$exists": True}}},
    ),
    Index(RUNNERS, "heartbeats", _up("app", "heartbeat_at"), "the runner that was silent longest", {}),
    Index(RUNNERS, "roster", _up("app", "started_at", "id"), "roster", {}),
    Index(QUARANTINE, "app", _up("app", "at"), "quarantined", {}),
    Index(QUARANTINE, "kind", _up("kind", "at"), "how many of each kind were set aside", {}),
    Index(
        SIGNALS,
        "at",
        _up("at"),
        "removes the signals of processes that are gone",
        {"expireAfterSeconds": SIGNAL_SECONDS},
    ),
)


def indexes(signal_seconds: int) -> tuple[Index, ...]:
    """All of them, with the times to live that the settings say."""
    times = {SIGNALS: {"expireAfterSeconds": signal_seconds}}
    return tuple(
        index._replace(options=times.get(index.collection, index.options))
        if "expireAfterSeconds" in index.options
        else index
        for index in INDEXES
    )


def refuse_or_accept(meta: dict[str, Any] | None) -> None:
    """Raise `SchemaMismatch` unless this Holdfast may work on a database with that version document (None:

    a new one).
    """
    if meta is None:
        return
    version, min_reader = meta.get("schema_version"), meta.get("min_reader")
    if not _is_version(version) or not _is_version(min_reader):
        raise SchemaMismatch(
            f"{META} does not tell the schema's version ({shown(meta)}). Restore a backup, or use another database."
        )
    if min_reader > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"the database has schema version {version}, which needs a Holdfast that knows version {min_reader}; "
            f"this one knows {SCHEMA_VERSION}. Upgrade Holdfast here."
        )


def _is_version(value: object) -> TypeGuard[float]:
    """Whether it can be one. It may be a double, if somebody has edited it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _HIGHEST and value == int(value)


async def prepare(database: AsyncDatabase[dict[str, Any]], signal_seconds: int = SIGNAL_SECONDS) -> object:
    """Check the version, then create what is missing. Returns the mark by which this database is known.

    The version is written last: where it is, the rest was. What a newer version has made is left to it.
    """
    meta = database[META]
    found = await meta.find_one({"_id": "schema"})
    refuse_or_accept(found)
    version = 0 if found is None else found["schema_version"]
    if version > SCHEMA_VERSION:
        return found and found.get("mark")
    try:
        await put_right(database, signal_seconds)
    except OperationFailure as error:
        if not is_forbidden(error) or version < SCHEMA_VERSION:
            raise
    if version < SCHEMA_VERSION:
        now = {"schema_version": SCHEMA_VERSION, "min_reader": MIN_READER}
        with contextlib.suppress(DuplicateKeyError):  # another process was faster, with the same
            await meta.update_one({"_id": "schema"}, {"$max": now}, upsert=True)
    return await _mark(meta, found)


async def _mark(meta: AsyncCollection[dict[str, Any]], found: dict[str, Any] | None) -> object:
    """What tells this database from others of its name: made once, by whoever comes first and may."""
    if found is None or "mark" not in found:
        with contextlib.suppress(OperationFailure):
            await meta.update_one({"_id": "schema", "mark": None}, {"$set": {"mark": secrets.token_hex(8)}})
        found = await meta.find_one({"_id": "schema"})
    return (found or {}).get("mark")


async def wait_for_majority(collection: AsyncCollection[dict[str, Any]]) -> None:
    """A write that changes nothing, in whichever collection, and returns when the majority has all that was before."""
    await collection.update_one({"_id": "schema"}, {"$max": {"min_reader": 0}})


async def missing(database: AsyncDatabase[dict[str, Any]]) -> list[str]:
    """Our indexes that are not there."""
    there = {name: await database[name].index_information() for name in COLLECTIONS}
    return [f"{index.collection}.{index.name}" for index in INDEXES if index.name not in there[index.collection]]


async def put_right(database: AsyncDatabase[dict[str, Any]], signal_seconds: int) -> None:
    expected = indexes(signal_seconds)
    for name in COLLECTIONS:
        await _put_right(database, name, [index for index in expected if index.collection == name])


async def _put_right(database: AsyncDatabase[dict[str, Any]], name: str, ours: Sequence[Index]) -> None:
    """Create missing indexes, and give those that remove something their time.

    One that differs otherwise is not touched: `store check` tells of it, and a person decides.
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
            f"{name} has an index that is in the way of one of ours: {(error.details or {}).get('errmsg', error)}. "
            "Drop it (holdfast store check names those that are not ours), then run: holdfast store prepare"
        ) from error
    for index in ours:
        seconds = index.options.get("expireAfterSeconds")
        if seconds is not None and index.name in there and there[index.name].get("expireAfterSeconds") != seconds:
            await database.command("collMod", name, index={"name": index.name, "expireAfterSeconds": seconds})
