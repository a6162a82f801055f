"""Damaged records: every field of every table and collection, with wrong values of every kind.

A store is furnished with a sound record of each kind. The fields come from these records and from the live schema, so
a table or a field that is added is damaged, too. Each case is a copy of a sound record, under a name of its own, with
one value changed behind the store's back.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import bson
from bson import Binary, Decimal128, Int64, MaxKey, ObjectId, Regex
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from msgspec.structs import replace
from pymongo import MongoClient

from holdfast.codec import Codec, ErrorRecord
from holdfast.fleet.services import Executions
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.ids import derived_id, is_id
from holdfast.model import changes, run_changes
from holdfast.model.cancellation import cancel
from holdfast.model.changes import apply_to
from holdfast.model.claims import Claim, blocked, claimed
from holdfast.model.limits import slot_of
from holdfast.model.log import APPENDED, Page
from holdfast.model.queues import QueuePause
from holdfast.model.records import (
    Cancellation,
    FailedAttempt,
    InboxEntry,
    InvocationRecord,
    Origin,
    Piece,
    ReplyTo,
    RunnerRecord,
    RunState,
    Source,
    StoredPayload,
    Terms,
    WorkerRecord,
    registered,
)
from holdfast.model.status import Status
from holdfast.runtime.pauses import pause_queue, resume_queue
from holdfast.schedules import every
from holdfast.schedules.records import Rules, ScheduleRecord, StoredCall
from holdfast.schedules.records import to_entry as schedule_entry
from holdfast.store.contract import Store
from holdfast.triggers import joins
from holdfast.triggers.events import EventRecord, key_entry
from holdfast.triggers.events import to_entry as event_entry
from holdfast.triggers.rules import OnEnd, OnEvent, TriggerRecord
from holdfast.triggers.rules import to_entry as trigger_entry

APP = "damage"
QUICK, NARROW, STEADY, FLOW = "damage:quick", "damage:narrow", "damage:steady", "damage:flow"
GONE = "gone/1"

Record = dict[str, Any]

_MODELS = ("ready", "later", "orphan", "held", "waiting", "cancelling", "done", "failed", "event", "run", "over")
ID = {name: derived_id(APP, name) for name in _MODELS}
NAMES: dict[object, str] = {id: name for name, id in ID.items()}


# --- sound records


async def furnish(store: Store) -> None:
    """Store a sound record of each kind, as an engine would."""
    now = store.now()
    await store.insert(list(_invocations(now)))
    silent = {"unresponsive_since": now, "begun": ("a",)}
    worker = WorkerRecord(id="1", pid=1, started_at=now, ended={"default": 3}, **silent)
    await store.enrol(
        RunnerRecord(
            id="gone",
            app=APP,
            host="h",
            pid=1,
            version="0",
            started_at=now - 100,
            heartbeat_at=now - 100,
            concurrency=4,
            tasks=(QUICK,),
            queues=("default",),
            weights={"default": 2},
            tags=("eu",),
            workers=(worker,),
            declares=("schedule:steady",),
            sits_out_until=now + 5,
            dead_after_seconds=1.0,
        )
    )
    turns = [
        Execution(id=f"turn {number}", service="core", runner_id="gone", started_at=at, window_ends_at=at + 10)
        for number, at in enumerate((now - 90, now - 80))
    ]
    executions = Executions(store, APP, "core", 60)
    await executions.begin(turns[0])
    await executions.end(turns[0], ExecutionStatus.COMPLETED, now - 85, "")
    await executions.begin(turns[1])
    for name in ("paused", "resumed"):
        await pause_queue(store, QueuePause(app=APP, name=name, at=now, by="ann", reason="busy", operation=f"p {name}"))
    await resume_queue(store, APP, "resumed", "r resumed")
    for number in (1, 0):
        await store.put_piece(APP, "d" * 64, number, Piece(b"piece", False))
    stored = StoredPayload(digest="d" * 64, size=10, pieces=2, first=Piece(b"piece", False))
    await store.put_payloads(APP, [stored])
    for entry in _entries(now):
        assert await store.put_entry(entry)
    facts: dict[str, Any] = {"app": APP, "epoch": 1, "at": now, "events": b"\x90", "payloads": ("d" * 64,)}
    pages = [Page(run=ID[name], first=1, last=3, operation=name, **facts) for name in ("run", "over")]
    assert list(await store.append(pages)) == [APPENDED] * 2


def _invocations(now: float) -> Iterator[InvocationRecord]:
    arguments = Codec().encode_call((1,), {})
    plain = {"app": APP, "arguments": arguments, "created_at": now, "due_at": now}
    error = ErrorRecord(type_name="ValueError", message="no", traceback="at", data=b"\x90", bases=("Exception",))
    rich = {
        "queue": "rich",
        "tags": ("eu", "gpu"),
        "priority": 5,
        "fingerprint": "f",
        "parent_id": "parent",
        "at_most_once": True,
        "rerun_of": "other",
        "terms": Terms(
            retries={"kind": "retries", "more": [1, {"a": None}]},
            key_seconds=5.0,
            key_until=now + 5,
            retention={"success": 4000.0, "failed": None},
            timeout=5.0,
            soft_timeout=4.0,
            start_by=now + 500,
            cancel_grace=1.0,
        ),
        "origin": Origin(trigger="t", sources=(Source(kind="event", id="e", name="n"),), depth=1, path=("a",)),
    }
    nobody = Claim(app=APP, lanes=(), limit=1, owner=GONE, at=now, operation="claimed")

    def fresh(id: str, **more: Any) -> InvocationRecord:
        record = InvocationRecord(**({"id": ID[id], "task": QUICK} | plain | more))
        return registered(record, operation=f"insert {id}", at=now, why="submitted")

    def taken(id: str, **more: Any) -> InvocationRecord:
        record = fresh(id, **more)
        slot = slot_of(record.limit_key, 0) if record.limit_key else None
        return apply_to(claimed(nobody, record, slot), record)

    yield fresh("ready", key="k", dedup_key="t", start_by=now + 500)
    yield fresh("later", due_at=now + 3600, **rich)
    yield taken("orphan")
    held = taken("held", task=NARROW, limit_key=NARROW, **{name: rich[name] for name in ("terms", "origin")})
    yield held
    waiting = fresh("waiting", task=NARROW, limit_key=f"{NARROW}|w")
    yield apply_to(blocked(waiting, operation="blocked", at=now, why="no slot"), waiting)
    asked = Cancellation(by="ann", at=now, until=now + 1, reason="enough")
    running = taken("cancelling")
    stopping = cancel(running, asked, operation="asked")
    assert isinstance(stopping, changes.Change)
    yield apply_to(stopping, running)
    done = taken("done")
    ended = changes.completed(done, result=b"\x01", operation="done", at=now)
    yield apply_to(replace(ended, outbox=("some trigger",)), done)
    failed = replace(
        taken("failed", **rich), errors=(FailedAttempt(number=1, attempt=1, at=now, error=error),), reason="again"
    )
    yield apply_to(changes.failed(failed, error=error, operation="failed", at=now), failed)
    entry = InboxEntry(id="e", kind="child", at=now, call="c#1", generation=1, body=b"\x90")
    state = RunState(tail=3, started_at=now, pushed=1, inbox=(entry,))
    run = taken(
        "run",
        task=FLOW,
        run=state,
        attributes={"stage": "packed"},
        reply_to=ReplyTo(run=ID["over"], call="c#2", generation=1),
    )
    asleep = run_changes.suspended(run, state, wake_at=now + 3600, operation="sleep", at=now, why="sleeps")
    yield apply_to(asleep, run)
    over = taken("over", task=FLOW, run=state)
    yield apply_to(changes.completed(over, result=b"\x01", operation="over", at=now), over)
    assert held.slot is not None
    assert held.status is Status.RUNNING


def _entries(now: float) -> Iterator[Any]:
    call = StoredCall(task=QUICK, arguments=Codec().encode_call((2,), {}), tags=("eu",), terms=Terms(timeout=3.0))
    yield schedule_entry(
        ScheduleRecord(
            app=APP,
            name="model",
            uid="u",
            timing=every("1h"),
            call=call,
            rules=Rules(jitter_seconds=0.1, starts_at=now - 10),
            through=now,
            next_at=now,
            created_at=now,
        )
    )
    conditions = (
        ((OnEvent(name="model.event", where=Codec().encode({"a": 1})),),),
        ((OnEnd(tasks=(QUICK,), statuses=(Status.FAILED,), message="a+"),), (OnEvent(name="other", correlate="id"),)),
    )
    yield trigger_entry(TriggerRecord(app=APP, name="model", clauses=conditions, call=call, created_at=now))
    source = Source(kind="event", id="e", name="n")
    happened = joins.Happened(source=source, at=now, picked=Codec().encode({}), depth=1, path=("a",))
    join = joins.Join(
        app=APP, name="model", trigger="gone", clause=0, members=((happened,), ()), used={"e": now + 5}, version=1
    )
    yield joins.to_entry(join, 60.0, now)
    event = EventRecord(
        app=APP,
        id=ID["event"],
        name="model.event",
        payload=Codec().encode({"a": 1}),
        at=now - 10,
        keep_until=now + 500,
        key="once",
        outbox=("some trigger",),
        path=("a",),
    )
    yield event_entry(event)
    yield key_entry(event)


# --- damage


class Case(NamedTuple):
    """A copy of a sound record with one value changed, and what to call it."""

    where: str  # table or collection
    kind: str  # of model
    field: str
    how: str
    record: Record

    def __str__(self) -> str:
        return f"{self.where}({self.kind}).{self.field} is {self.how}"


class BadText(NamedTuple):
    """A text that is not UTF-8."""

    data: bytes = b"\xff\xfe text"


MISSING = object()
DEEP = 2000
_LONG = "x" * 100_000

NUMBERS: Mapping[str, object] = {
    "a number": 7,
    "negative": -1,
    "huge": 2**62,
    "a fraction": 2.5,
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "in the year 10000": 253_402_300_800.0,
    "beyond all time": 1e300,
}
TEXTS: Mapping[str, object] = {
    "an empty text": "",
    "a text": "text",
    "a long text": _LONG,
    "a text with NUL": "a\0b",
    "a text that is not UTF-8": BadText(),
}
SQLITE_VALUES: Mapping[str, object] = {
    "missing": None,
    **NUMBERS,
    **TEXTS,
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "very deep": "[" * DEEP + "]" * DEEP,
    "a deep object": '{"retries":' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
    "an empty list": "[]",
    "an empty object": "{}",
}
JSON_VALUES: Mapping[str, object] = {
    "missing": MISSING,
    "null": None,
    "true": True,
    "a number": 7,
    "negative": -1,
    "huge": 2**70,
    "a fraction": 2.5,
    "in the year 10000": 253_402_300_800.0,
    "beyond all time": 1e300,
    "a text": "text",
    "an empty text": "",
    "a list": [1],
    "an object": {"a": 1},
    "deep": json.loads("[" * 90 + "]" * 90),
}


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


MONGO_VALUES: Mapping[str, object] = {
    "missing": MISSING,
    "null": None,
    "true": True,
    **NUMBERS,
    "huge": Int64(2**62),
    "NaN": float("nan"),
    **TEXTS,
    "bytes": b"\x00\xff",
    "bytes of another kind": Binary(b"\x00\xff", 128),
    "a list": [1],
    "an object": {"a": 1},
    "deep": _nested(40),
    "a date": dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC),
    "a date beyond all calendars": DatetimeMS(2**62),
    "an id": ObjectId("0" * 24),
    "a decimal": Decimal128("1.5"),
    "an expression": Regex("a+"),
    "the largest key": MaxKey(),
}


def paths(value: object, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where something can be changed in nested data: each field, and the first of each list."""
    items: Sequence[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = [(0, value[0])]
    for key, inside in items:
        yield (*before, key)
        yield from paths(inside, (*before, key))


def changed(data: Any, path: Sequence[str | int], value: object) -> Any:
    after = copy.deepcopy(data)
    place = after
    for key in path[:-1]:
        place = place[key]
    if value is not MISSING:
        place[path[-1]] = value
    else:
        del place[path[-1]]
    return after


# --- SQLite

IDENTITY = {
    "holdfast_invocations": ("id",),
    "holdfast_runners": ("id",),
    "holdfast_entries": ("name",),
    "holdfast_payloads": ("digest",),
    "holdfast_payload_pieces": ("digest",),
    "holdfast_payload_references": ("id",),
    "holdfast_log": ("run",),
    "holdfast_attributes": ("id",),
    "holdfast_quarantine": (),
    "holdfast_signals": (),
}
ALONE = ("holdfast_meta",)  # there is one of it: see test_sqlite_corruption and mongo/test_corruption


def _own_names(where: str, record: Record, number: int) -> Record:
    """The record under a name of its own, so that it is in nobody's way by its name alone."""
    fresh = dict(record)
    for name in IDENTITY[where]:
        mine = record[name]
        fresh[name] = derived_id(mine, str(number)) if is_id(mine) else f"{mine}-{number}"
    for name in ("key", "twin"):
        if fresh.get(name):
            fresh[name] = f"{fresh[name]}{number}"
    if fresh.get("slot"):
        fresh["limit_key"] = f"{fresh['limit_key']}|{number}"
        fresh["slot"] = slot_of(fresh["limit_key"], 0)
    return fresh


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def loosen(path: Path) -> None:
    """Let the tables take values of any type, and none: what a flipped bit in a row's header amounts to."""
    with closing(_connect(path)) as connection:
        (version,) = connection.execute("PRAGMA schema_version").fetchone()
        connection.execute("PRAGMA writable_schema = ON")
        for name, sql in connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name LIKE 'holdfast%'"
        ).fetchall():
            head, _, tail = sql.rpartition(")")
            loose = f"{head.replace(' NOT NULL', '')}){tail.replace('STRICT, ', '').replace('STRICT', '')}"
            for kind in ("TEXT", "INTEGER", "REAL", "BLOB"):
                loose = (
                    loose.replace(f" {kind} DEFAULT", " DEFAULT").replace(f" {kind},", ",").replace(f" {kind}\n", "\n")
                )
            connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (loose, name))
        connection.execute(f"PRAGMA schema_version = {version + 1}")
        connection.execute("PRAGMA writable_schema = OFF")
    with closing(_connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def sqlite_models(path: Path) -> dict[str, list[Record]]:
    with closing(_connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        names = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if name.startswith("holdfast_") and name not in ALONE
        ]
        return {name: [dict(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in names}


def sqlite_cases(models: Mapping[str, Sequence[Record]]) -> Iterator[Case]:
    number = 0
    for where, records in models.items():
        assert records, f"furnish() makes no record of {where}"
        for record in records:
            for field in record:
                for how, value in SQLITE_VALUES.items():
                    number += 1
                    fresh = _own_names(where, record, number) | {field: value}
                    yield Case(where, _kind(record), field, how, fresh)
                for inside, how, value in _inside(field, record[field]):
                    number += 1
                    fresh = _own_names(where, record, number) | {field: value}
                    yield Case(where, _kind(record), f"{field}.{inside}", how, fresh)


def _kind(record: Record) -> str:
    return str(record.get("kind") or NAMES.get(record.get("id")) or record.get("name") or "")


def _inside(field: str, value: object) -> Iterator[tuple[str, str, object]]:
    """What can be changed in a column that holds JSON."""
    text = value.decode() if isinstance(value, bytes) and field == "body" else value
    if not isinstance(text, str) or not text.startswith(("{", "[")):
        return
    is_history = field == "history"
    data = json.loads(f"[{text[:-1]}]" if is_history else text)
    for path in paths(data):
        for how, wrong in JSON_VALUES.items():
            after = changed(data, path, wrong)
            told = "".join(json.dumps(line) + "," for line in after) if is_history else json.dumps(after)
            yield ".".join(map(str, path)), how, told.encode() if isinstance(value, bytes) else told


def damage_sqlite(path: Path, cases: Sequence[Case]) -> int:
    """Insert damaged records; how many are in."""
    with closing(_connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        before = connection.total_changes
        for case in cases:
            columns, values = ", ".join(case.record), list(case.record.values())
            places = ", ".join("CAST(? AS TEXT)" if isinstance(value, BadText) else "?" for value in values)
            bound = [value.data if isinstance(value, BadText) else value for value in values]
            connection.execute(f"INSERT OR IGNORE INTO {case.where} ({columns}) VALUES ({places})", bound)
        connection.execute("COMMIT")
        return connection.total_changes - before


# --- MongoDB


def mongo_models(client: MongoClient[Record], database: str) -> dict[str, list[Record]]:
    there = client[database]
    names = [name for name in there.list_collection_names() if name.startswith("holdfast_") and name not in ALONE]
    return {name: list(there[name].find({"app": APP} if name != "holdfast_signals" else {})) for name in sorted(names)}


def mongo_cases(models: Mapping[str, Sequence[Record]]) -> Iterator[Case]:
    number = 0
    for where, records in models.items():
        assert records, f"furnish() makes no record of {where}"
        for record in records:
            for path in paths(record):
                if path == ("_id",):
                    continue  # it cannot be changed
                for how, value in MONGO_VALUES.items():
                    number += 1
                    fresh = _own_names(
                        where, {k: v for k, v in record.items() if k != "_id"} | _key(where, record), number
                    )
                    fresh["_id"] = _own_key(where, fresh, record, number)
                    fresh = changed(fresh, path, value)
                    yield Case(where, _kind(record), ".".join(map(str, path)), how, fresh)


def _key(where: str, record: Record) -> Record:
    """Payloads have their name in their key only."""
    return {name: str(record["_id"]).split("|")[1] for name in IDENTITY[where] if name not in record}


def _own_key(where: str, fresh: Record, record: Record, number: int) -> object:
    if where in ("holdfast_signals", "holdfast_quarantine"):
        return f"{record['_id']}-{number}"
    if where == "holdfast_entries":
        return f"{APP}|{fresh['kind']}|{fresh['name']}"
    names = "|".join(str(fresh.pop(name)) if name not in record else str(fresh[name]) for name in IDENTITY[where])
    rest = str(record["_id"]).split("|")[2:] if where in ("holdfast_payload_pieces", "holdfast_log") else []
    return "|".join([APP, names, *rest])


_REFUSED = (11000, 171)  # its key is taken; two lists in one index, which no server takes


def damage_mongo(client: MongoClient[Record], database: str, cases: Sequence[Case]) -> int:
    """Insert damaged records; how many are in."""
    there, count = client[database], 0
    for where in {case.where for case in cases}:
        for case in (case for case in cases if case.where == where):
            try:
                there[where].insert_one(_raw(case.record))  # type: ignore[arg-type]
                count += 1
            except Exception as error:
                if getattr(error, "code", None) not in _REFUSED:
                    raise
    return count


def _raw(record: Record) -> Record | RawBSONDocument:
    """The document, with texts that no driver would write."""
    place = "?" * len(BadText().data)
    bad = _replaced(record, place)
    encoded = bson.encode(bad)
    if bad is record:
        return record
    return RawBSONDocument(encoded.replace(place.encode(), BadText().data))


def _replaced(value: Any, place: str) -> Any:
    if isinstance(value, BadText):
        return place
    if isinstance(value, dict):
        after = {name: _replaced(each, place) for name, each in value.items()}
        return value if all(after[name] is value[name] for name in after) else after
    if isinstance(value, list):
        each = [_replaced(one, place) for one in value]
        return value if all(a is b for a, b in zip(each, value, strict=True)) else each
    return value


def spread(cases: Sequence[Case], most: int) -> list[Case]:
    """So many of them, from everywhere."""
    step = max(1, len(cases) // most)
    return list(cases[:: step if step % 2 else step + 1])
