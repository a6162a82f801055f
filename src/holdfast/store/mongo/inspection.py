"""What `holdfast store check` looks at in a MongoDB database. It changes nothing.

Whoever may not look at a thing is told so, in the line of that thing; the others are looked at. Who may not even read
the version has no business here, and gets an error.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pymongo import DESCENDING
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure

from holdfast.clock import Clock, format_duration
from holdfast.errors import SchemaMismatch
from holdfast.lifecycle.decoding import INVOCATION, shown
from holdfast.store import findings
from holdfast.store.contract import Finding
from holdfast.store.mongo import schema
from holdfast.store.mongo.documents import Document, from_document, runner_of
from holdfast.store.mongo.entries import entry_of
from holdfast.store.mongo.executions import execution_of
from holdfast.store.mongo.payloads import payload_of, piece_of
from holdfast.store.mongo.quarantine import PART
from holdfast.store.mongo.queues import pause_of
from holdfast.store.mongo.retry import is_forbidden
from holdfast.store.mongo.sentinels import NO_SENTINEL

_SKEW_SECONDS = 1.0
_HISTORY_WINDOW = "minSnapshotHistoryWindowInSeconds"


async def inspect(database: AsyncDatabase[Document], clock: Clock, *, deep: bool, signal_seconds: int) -> list[Finding]:
    hello_before = clock.now()
    hello = await database.command("hello")
    seen = clock.now()
    return [
        await _version(database),
        *await _indexes(database, signal_seconds),
        _replica_set(hello),
        _clock(hello, hello_before, seen),
        await _write_concern(database),
        await _history_window(database),
        *await _allowed("quarantine", _quarantine(database)),
        *(await _allowed("records", _deep(database)) if deep else []),
    ]


async def _allowed(subject: str, looking: Awaitable[Finding]) -> list[Finding]:
    try:
        return [await looking]
    except OperationFailure as error:
        if not is_forbidden(error):
            raise
        return [_forbidden(subject)]


def _forbidden(subject: str) -> Finding:
    detail = "not allowed to look"
    return Finding(subject=subject, ok=False, detail=detail, advice="ask as another user, or see: holdfast store roles")


async def _version(database: AsyncDatabase[Document]) -> Finding:
    found = await database[schema.META].find_one({"_id": "schema"})
    if found is None:
        advice = "holdfast store prepare"
        return Finding(subject="schema", ok=False, detail="Holdfast's collections are not there", advice=advice)
    try:
        schema.refuse_or_accept(found)
    except SchemaMismatch as error:
        return Finding(subject="schema", ok=False, detail=str(error))
    detail = (
        f"version {found['schema_version']}, readable from version {found['min_reader']}; "
        f"this Holdfast knows {schema.SCHEMA_VERSION}"
    )
    if found["schema_version"] < schema.SCHEMA_VERSION:
        advice = "holdfast store prepare; else the first use brings it up to date"
        return Finding(subject="schema", ok=False, detail=detail, advice=advice)
    return Finding(subject="schema", ok=True, detail=detail)


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
    wrong = 0
    for (collection, name), index in expected.items():
        facts = there.get((collection, name))
        subject = f"index {collection}.{name}"
        if facts is None:
            wrong += 1
            yield Finding(
                subject=subject, ok=False, detail=f"missing; it serves: {index.serves}", advice="holdfast store prepare"
            )
        elif _differing(index, facts) == ["expireAfterSeconds"]:
            wrong += 1
            kept, said = facts.get("expireAfterSeconds"), index.options["expireAfterSeconds"]
            now = "removes nothing" if kept is None else f"keeps what it serves for {kept} s"
            detail = f"{now}; signal_retention_seconds is {said} here"
            yield Finding(subject=subject, ok=False, detail=detail, advice="holdfast store prepare")
        elif _differing(index, facts):
            wrong += 1
            yield Finding(
                subject=subject, ok=False, detail="differs from ours", advice="drop it, then: holdfast store prepare"
            )
    for collection, name in sorted(there.keys() - expected.keys()):
        yield Finding(subject=f"index {collection}.{name}", ok=True, detail="not ours; every write pays for it")
    if not wrong and expected:
        yield Finding(subject="indexes", ok=True, detail=f"{len(expected)} of {len(expected)} are there")


def _differing(index: schema.Index, facts: dict[str, Any]) -> list[str]:
    """In what an index differs from ours."""
    keys = [] if list(facts["key"]) == list(index.keys) else ["keys"]
    return keys + [option for option, value in index.options.items() if facts.get(option) != value]


def _replica_set(hello: dict[str, Any]) -> Finding:
    if "setName" not in hello:
        return Finding(
            subject="replica set",
            ok=True,
            detail="a standalone: no change streams (hints by polling), no transactions, no failover",
            advice="for production run a replica set; one node is enough for change streams",
        )
    members = len(hello.get("hosts", []))
    return Finding(
        subject="replica set",
        ok=bool(hello.get("isWritablePrimary")),
        detail=f"{hello['setName']} with {members} members, primary {hello.get('primary', 'unknown')}",
        advice="" if members != 2 else "with two members, the loss of either stops all writes; add a third",
    )


def _clock(hello: dict[str, Any], before: float, after: float) -> Finding:
    difference = abs(hello["localTime"].timestamp() - (before + after) / 2)
    ok = difference < _SKEW_SECONDS
    return Finding(
        subject="clock",
        ok=ok,
        detail=f"this host and the server differ by {format_duration(round(difference, 3))}",
        advice="" if ok else "nothing breaks, since the server's time counts, but logs will confuse; run NTP",
    )


async def _write_concern(database: AsyncDatabase[Document]) -> Finding:
    detail = "every state change is written with w: majority, j: true"
    try:
        found = await database.client.admin.command("getDefaultRWConcern")
        default = found.get("defaultWriteConcern", {}).get("w", "not set")
        detail += f"; the cluster's default for others is w: {default}"
    except OperationFailure:
        pass  # a standalone, or a user that may not ask
    return Finding(subject="write concern", ok=True, detail=detail)


async def _history_window(database: AsyncDatabase[Document]) -> Finding:
    """Tell for how long the server keeps removed index entries, which its cursors step over. Nothing breaks by it."""
    subject = "index history"
    try:
        found = await database.client.admin.command({"getParameter": 1, _HISTORY_WINDOW: 1})
    except OperationFailure as error:
        why = "this user may not read it" if is_forbidden(error) else "this server does not tell it"
        return Finding(subject=subject, ok=True, detail=f"{_HISTORY_WINDOW}: {why}; 300 by default")
    seconds = found.get(_HISTORY_WINDOW)
    return Finding(
        subject=subject,
        ok=True,
        detail=f"removed index entries are kept for {seconds} s ({_HISTORY_WINDOW})",
        advice="see 'Index history' in docs/operating-mongodb.md" if isinstance(seconds, int) and seconds > 300 else "",
    )


_NO_PART: Document = {"kind": {"$ne": PART}}


async def _quarantine(database: AsyncDatabase[Document]) -> Finding:
    stages: list[dict[str, Any]] = [
        {"$match": _NO_PART},
        {"$group": {"_id": "$kind", "n": {"$sum": 1}}},
    ]
    quarantine = database[schema.QUARANTINE]
    kinds: Counter[str] = Counter()
    for found in await (await quarantine.aggregate(stages, hint="kind")).to_list():
        kinds[shown(found["_id"]) if found["_id"] else INVOCATION] += found["n"]
    order = [("kind", DESCENDING), ("at", DESCENDING)]
    some = await quarantine.find(_NO_PART, {"why": True}, hint="kind").sort(order).limit(findings.SHOWN).to_list()
    whys = [shown(str(each.get("why"))) for each in some]
    return findings.set_aside(kinds, whys, f"the collection {schema.QUARANTINE}")


async def _deep(database: AsyncDatabase[Document]) -> Finding:
    reading = findings.Reading()
    for name, decode in _DECODERS:
        async for document in database[name].find(NO_SENTINEL if name == schema.INVOCATIONS else {}):
            reading.read(functools.partial(decode, document))
    return reading.finding()


def _entry(document: Document) -> None:
    findings.read_body(entry_of(document))


_DECODERS: Sequence[tuple[str, Callable[[Document], object]]] = (
    (schema.INVOCATIONS, from_document),
    (schema.RUNNERS, runner_of),
    (schema.ENTRIES, _entry),
    (schema.EXECUTIONS, execution_of),
    (schema.QUEUES, pause_of),
    (schema.PAYLOADS, payload_of),
    (schema.PIECES, piece_of),
)
