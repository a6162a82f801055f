"""What `holdfast store check` looks at in a MongoDB database. It changes nothing.

Things that the user may not read are listed as unchecked. Only the version must be readable: else an error is raised.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pymongo
from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from holdfast.clock import Clock, format_duration
from holdfast.errors import SchemaMismatch
from holdfast.model.decoding import INVOCATION, shown
from holdfast.model.records import read_body
from holdfast.store import findings
from holdfast.store.contract import Finding, Observe
from holdfast.store.mongo import schema
from holdfast.store.mongo.documents import Document, from_document, runner_of
from holdfast.store.mongo.entries import entry_of
from holdfast.store.mongo.logs import page_key, page_of
from holdfast.store.mongo.payloads import payload_of, piece_of
from holdfast.store.mongo.quarantine import PART
from holdfast.store.mongo.retry import is_forbidden
from holdfast.store.mongo.sentinels import NO_SENTINEL

_SKEW_SECONDS = 1.0
_HISTORY_WINDOW = "minSnapshotHistoryWindowInSeconds"


async def inspect(
    database: AsyncDatabase[Document], clock: Clock, *, deep: bool, signal_seconds: int, observe: Observe
) -> list[Finding]:
    hello_before = clock.now()
    hello = await database.command("hello")
    seen = clock.now()
    return [
        await _version(database),
        await _server(database),
        *await _indexes(database, signal_seconds),
        _replica_set(hello),
        _clock(hello, hello_before, seen),
        await _write_concern(database),
        await _history_window(database),
        await _allowed("quarantine", _quarantine(database)),
        *([await _allowed("records", _deep(database, observe))] if deep else []),
    ]


async def _allowed(subject: str, looking: Awaitable[Finding]) -> Finding:
    try:
        return await looking
    except OperationFailure as error:
        if not is_forbidden(error):
            raise
        return _forbidden(subject)


def _finding(subject: str, ok: bool, detail: str, advice: str = "") -> Finding:
    return Finding(subject=subject, ok=ok, detail=detail, advice=advice)


def _forbidden(subject: str) -> Finding:
    return _finding(subject, False, "not allowed to look", "ask as another user, or see: holdfast store roles")


async def _version(database: AsyncDatabase[Document]) -> Finding:
    found = await database[schema.META].find_one({"_id": "schema"})
    if found is None:
        return _finding("schema", False, "Holdfast's collections are not there", "holdfast store prepare")
    try:
        schema.refuse_or_accept(found)
    except SchemaMismatch as error:
        return _finding("schema", False, str(error))
    version, known = found["schema_version"], schema.SCHEMA_VERSION
    detail = f"version {version}, readable from version {found['min_reader']}; this Holdfast knows {known}"
    advice = "holdfast store prepare; else the first use brings it up to date" if version < known else ""
    return _finding("schema", not advice, detail, advice)


async def _server(database: AsyncDatabase[Document]) -> Finding:
    found = await database.command("buildInfo")
    return _finding("MongoDB", True, f"server {found.get('version', 'unknown')}, driver {pymongo.version}")


async def _indexes(database: AsyncDatabase[Document], signal_seconds: int) -> list[Finding]:
    there: dict[tuple[str, str], Any] = {}
    forbidden = []
    for name in schema.COLLECTIONS:
        try:
            found = await database[name].index_information()
        except OperationFailure as error:
            if not is_forbidden(error):
                raise
            forbidden.append(name)
        else:
            there |= {(name, index): facts for index, facts in found.items() if index != "_id_"}
    ours = [index for index in schema.indexes(signal_seconds) if index.collection not in forbidden]
    return [*_compared(there, ours), *(_forbidden(f"indexes of {name}") for name in forbidden)]


def _compared(there: dict[tuple[str, str], Any], ours: Sequence[schema.Index]) -> Iterator[Finding]:
    expected = {(index.collection, index.name): index for index in ours}
    well = bool(expected)
    for (collection, name), index in expected.items():
        facts, advice = there.get((collection, name)), "holdfast store prepare"
        if facts is None:
            detail = f"missing; it serves: {index.serves}"
        elif not (differing := _differing(index, facts)):
            continue
        elif differing == ["expireAfterSeconds"]:
            kept, said = facts.get("expireAfterSeconds"), index.options["expireAfterSeconds"]
            now = "removes nothing" if kept is None else f"keeps what it serves for {kept} s"
            detail = f"{now}; signal_retention_seconds is {said} here"
        else:
            detail, advice = "differs from ours", "drop it, then: holdfast store prepare"
        well = False
        yield _finding(f"index {collection}.{name}", False, detail, advice)
    for collection, name in sorted(there.keys() - expected.keys()):
        yield _finding(f"index {collection}.{name}", True, "not ours; every write pays for it")
    if well:
        yield _finding("indexes", True, f"{len(expected)} of {len(expected)} are there")


def _differing(index: schema.Index, facts: dict[str, Any]) -> list[str]:
    """Return in what an index differs from ours."""
    keys = [] if list(facts["key"]) == list(index.keys) else ["keys"]
    return keys + [option for option, value in index.options.items() if facts.get(option) != value]


def _replica_set(hello: dict[str, Any]) -> Finding:
    if "setName" not in hello:
        detail = "a standalone: no change streams (hints by polling), no transactions, no failover"
        advice = "for production run a replica set; one node is enough for change streams"
        return _finding("replica set", True, detail, advice)
    members = len(hello.get("hosts", []))
    detail = f"{hello['setName']} with {members} members, primary {hello.get('primary', 'unknown')}"
    advice = "with two members, the loss of either stops all writes; add a third" if members == 2 else ""
    return _finding("replica set", bool(hello.get("isWritablePrimary")), detail, advice)


def _clock(hello: dict[str, Any], before: float, after: float) -> Finding:
    difference = abs(hello["localTime"].timestamp() - (before + after) / 2)
    ok = difference < _SKEW_SECONDS
    detail = f"this host and the server differ by {format_duration(round(difference, 3))}"
    advice = "" if ok else "nothing breaks, since the server's time counts, but logs will confuse; run NTP"
    return _finding("clock", ok, detail, advice)


async def _write_concern(database: AsyncDatabase[Document]) -> Finding:
    detail = "every state change is written with w: majority, j: true"
    try:
        found = await database.client.admin.command("getDefaultRWConcern")
        default = found.get("defaultWriteConcern", {}).get("w", "not set")
        detail += f"; the cluster's default for others is w: {default}"
    except OperationFailure:
        pass  # a standalone, or a user that may not ask
    return _finding("write concern", True, detail)


async def _history_window(database: AsyncDatabase[Document]) -> Finding:
    """Report for how long the server keeps removed index entries, which its cursors step over. Nothing breaks by it."""
    subject = "index history"
    try:
        found = await database.client.admin.command({"getParameter": 1, _HISTORY_WINDOW: 1})
    except OperationFailure as error:
        why = "this user may not read it" if is_forbidden(error) else "this server does not report it"
        return _finding(subject, True, f"{_HISTORY_WINDOW}: {why}; 300 by default")
    seconds = found.get(_HISTORY_WINDOW)
    advice = "see 'Index history' in docs/operations/mongodb.md" if isinstance(seconds, int) and seconds > 300 else ""
    return _finding(subject, True, f"removed index entries are kept for {seconds} s ({_HISTORY_WINDOW})", advice)


_NO_PART: Document = {"kind": {"$ne": PART}}


async def _quarantine(database: AsyncDatabase[Document]) -> Finding:
    stages: list[dict[str, Any]] = [{"$match": _NO_PART}, {"$group": {"_id": "$kind", "n": {"$sum": 1}}}]
    quarantine = database[schema.QUARANTINE]
    kinds: Counter[str] = Counter()
    for found in await (await quarantine.aggregate(stages, hint="kind")).to_list():
        kinds[shown(found["_id"]) if found["_id"] else INVOCATION] += found["n"]
    order = [("kind", DESCENDING), ("at", DESCENDING)]
    some = await quarantine.find(_NO_PART, {"why": True}, hint="kind").sort(order).limit(findings.SHOWN).to_list()
    whys = [shown(str(each.get("why"))) for each in some]
    return findings.set_aside(kinds, whys, f"the collection {schema.QUARANTINE}")


async def _deep(database: AsyncDatabase[Document], observe: Observe) -> Finding:
    reading = findings.Reading(lambda count: observe("walked", {"count": count}))
    for name, decode in _DECODERS:
        found = database[name].find(NO_SENTINEL if name == schema.INVOCATIONS else {})
        async for document in found.sort("_id", ASCENDING) if name == schema.LOG else found:
            reading.read(functools.partial(decode, document))
    for page, expected in reading.after_gaps:
        key = page_key(page.app, page.run, page.generation, page.first)
        if await database[schema.LOG].find_one({"_id": key}, {"_id": True}):  # else the log was removed meanwhile
            reading.count_gap(page, expected)
    return reading.finding()


def _entry(document: Document) -> None:
    read_body(entry_of(document))


_DECODERS: Sequence[tuple[str, Callable[[Document], object]]] = (
    (schema.INVOCATIONS, from_document),
    (schema.RUNNERS, runner_of),
    (schema.LOG, page_of),
    (schema.ENTRIES, _entry),
    (schema.PAYLOADS, payload_of),
    (schema.PIECES, piece_of),
)
