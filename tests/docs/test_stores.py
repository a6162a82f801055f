"""The reference of each store has every table, collection, field and index of the code."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from pymongo import MongoClient
from pymongo.database import Database
from tests.docs.pages import DOCS, listed, names, rows
from tests.store.mongo.tools import play

from holdfast import App, context
from holdfast.fleet import services
from holdfast.groups import records as groups
from holdfast.model import changes, rates
from holdfast.model.queues import PAUSE
from holdfast.model.records import Entry, HistoryEntry, Origin, RunState, Source
from holdfast.retries import Fixed
from holdfast.schedules import records as schedules
from holdfast.stats import records as stats_records
from holdfast.stats import rules as stats_rules
from holdfast.store.mongo import schema
from holdfast.store.mongo.sentinels import NO_SENTINEL
from holdfast.store.mongo.store import MongoStore
from holdfast.streams import records as streams
from holdfast.testing.samples import REPLY_TO, START, WAITING, invocation, owned, page, pushing, suspended, wish
from holdfast.triggers import events, joins, subscriptions
from holdfast.triggers import rules as triggers
from holdfast.workflows import hooks_records as hooks
from holdfast.world import hooks as world_hooks
from holdfast.world.delivery import ADDRESS_KIND


def test_the_page_on_mongodb_has_every_collection() -> None:
    assert listed("reference/mongodb.md", "## Collections") == set(schema.COLLECTIONS)


def fields_of(document: Mapping[str, Any], *, whole: str = "document") -> set[str]:
    """Its fields; those of documents inside with a dot. What is set aside is a whole, whatever is in it."""
    found = set()
    for name, value in document.items():
        inside = value if isinstance(value, list) else [value]
        parts = [part for part in inside if isinstance(part, dict)] if name != whole else []
        found |= {f"{name}.{field}" for part in parts for field in part} or {name}
    return found


class Seen:
    """The fields that the documents of each collection were seen to have."""

    def __init__(self, database: Database[dict[str, Any]]) -> None:
        self._database = database
        self._fields: dict[str, set[str]] = {name: set() for name in schema.COLLECTIONS}

    def look(self) -> dict[str, set[str]]:
        for name, fields in self._fields.items():
            for document in self._database[name].find(NO_SENTINEL):
                fields |= fields_of(document)
        return {
            name: {field for field in fields if not any(other.startswith(f"{field}.") for other in fields)}
            for name, fields in self._fields.items()
        }


async def triggered(store: MongoStore) -> None:
    """What only triggers write, and the owner of a stream."""
    source = Source(kind="end", id="b", name="pay")
    origin = Origin(trigger="paid", sources=(source,), depth=1, path=("pay",))
    await store.insert([invocation("a", origin=origin)])
    (record,) = (await store.claim(wish())).records
    await store.apply([changes.StreamMark(app="shop", id=record.id, epoch=record.epoch, actor=record.owner or "")])
    end = changes.completed(record, result=b"", operation="end", at=START)
    await store.apply([replace(end, outbox=("paid",))])
    kept = {"keep_until": store.now() + 3600, "subject": "i"}
    await store.put_entry(Entry(app="shop", kind="event", name="e", body=b"{}", **kept))


async def suspends(store: MongoStore) -> None:
    """What only runs of workflows write."""
    more: dict[str, Any] = {"run": RunState(has_hooks=True), "reply_to": REPLY_TO, "attributes": {"stage": "packed"}}
    await store.insert([invocation("run", task="flow", queue="flows", **more)])
    await store.apply([pushing("run")])
    (record,) = (await store.claim(wish("run", lanes=("flows|flow",)))).records
    await store.apply([suspended(record)])
    await store.append([page(1, run="run", payloads=("d" * 64,))])
    await store.append([page(1, run="run/words", writer="step")])


async def waits(store: MongoStore) -> None:
    """What only the owner of a call that waits for others writes."""
    record = await owned(store, "waits")
    waiting = replace(WAITING, keeps_slot="there are many")
    note = changes.WaitNote(app="shop", id=record.id, epoch=1, actor=record.owner or "", waiting=waiting)
    await store.apply([note])


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
def test_the_page_on_mongodb_has_every_field(mongo_url: str) -> None:
    """A small run leaves at least one document of each kind, and nothing that the page does not have."""
    wanted = {name: listed("reference/mongodb.md", f"### {name}") for name in schema.COLLECTIONS}
    gate = threading.Event()
    with (
        MongoClient[dict[str, Any]](mongo_url) as client,
        App(mongo_url, inline_limit=1024, chunk_threshold=1024) as app,
    ):
        database = client.get_default_database()

        @app.task(name="fails", at_most_once=True, limit=1, retention="1d")
        def fails(data: bytes) -> None:
            gate.wait(60)
            raise KeyError(len(data))

        @app.task(name="again", retries=Fixed(1, 3600), unique=True)
        def again() -> None:
            raise KeyError

        limits: dict[str, Any] = {"timeout": 60, "soft_timeout": 30, "cancel_grace": 1, "cancel_children": False}

        @app.task(name="parent", log_lines=5, **limits)
        def parent() -> None:
            context().progress(1, 2)
            context().checkpoint(1)
            logging.getLogger("shop").warning("a line")
            doomed = again.options(delay="1h", expires="2h").submit()
            doomed.cancel("no longer wanted", children=False)

        app.invocations()  # now the collections are there
        fails.map([b"small", os.urandom(3 * 2**20)])  # beyond a piece of 1 MB
        bad = database[schema.INVOCATIONS].find_one({"payloads": {"$exists": False}})
        assert bad is not None
        database[schema.INVOCATIONS].update_one({"_id": bad["_id"]}, {"$set": {"history": "gone"}})
        play(mongo_url, triggered)
        play(mongo_url, suspends)
        play(mongo_url, waits)
        seen, deadline = Seen(database), time.monotonic() + 30
        again.options(key="once").submit()
        again.submit()
        parent.options(expires="2h", attributes={"customer": "c-17"}).submit()
        app.queues.pause("later")
        app.schedules.create("nightly", again, cron="0 3 * * *")
        app.schedules.create("large", fails, [os.urandom(2048)], cron="0 3 * * *")
        seen.look()  # while they are ready
        with app.runner():
            while (there := seen.look()) != wanted and time.monotonic() < deadline:
                if "slot" in there[schema.INVOCATIONS]:
                    gate.set()
                if gate.is_set() and "rerun_of" not in there[schema.INVOCATIONS]:
                    app.rerun(status="failed")
                if "hints.since" not in there[schema.SIGNALS]:
                    again.submit()  # a signal has the last hints of its process: this one is of new work
                time.sleep(0.05)
    for name in wanted:
        assert there[name] == wanted[name], (name, there[name] ^ wanted[name])
    assert there == wanted


@pytest.fixture
def file(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A fresh SQLite store."""
    with App(f"sqlite:///{tmp_path / 'shop.db'}") as app:
        app.invocations()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        yield connection


def test_the_page_on_sqlite_has_every_table_and_column(file: sqlite3.Connection) -> None:
    tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    text = (DOCS / "reference/sqlite.md").read_text()
    assert set(re.findall(r"^### (holdfast_\w+)$", text, re.MULTILINE)) == set(tables)
    for table in tables:
        columns = {row[1] for row in file.execute(f"PRAGMA table_info({table})")}
        assert listed("reference/sqlite.md", f"### {table}") == columns, table


def test_the_pages_say_the_types_of_sqlites_columns(file: sqlite3.Connection) -> None:
    tables = file.execute("SELECT name, strict FROM pragma_table_list WHERE name LIKE 'holdfast%'").fetchall()
    assert {strict for _, strict in tables} == {1}
    types = {
        (table, column): kind
        for table, _ in tables
        for _, column, kind, *_ in file.execute(f"PRAGMA table_info({table})")
    }
    blobs = {column for column, kind in types.items() if kind == "BLOB"}
    invocations = {("holdfast_invocations", "arguments"), ("holdfast_invocations", "result")}
    others = {("holdfast_entries", "body"), ("holdfast_log", "events"), ("holdfast_payload_pieces", "data")}
    assert blobs == invocations | others
    for name in ("reference/sqlite.md", "operations/damaged-records.md"):
        text = " ".join((DOCS / name).read_text().split())
        assert "very table is `STRICT`" in text
        assert all(f"`{column}`" in text for _, column in blobs)
    times = {column for (_, column), kind in types.items() if kind == "REAL"}
    assert {column for column in times if not column.endswith("at")} == {"keep_until", "retain_until", "start_by"}


def test_the_page_on_damage_has_every_key_of_a_history() -> None:
    wanted = {field.encode_name for field in msgspec.structs.fields(HistoryEntry)}
    assert {names(row[0])[0] for row in rows("operations/damaged-records.md", "## Repairing and removing")} == wanted


def test_the_page_on_sqlite_has_every_index(file: sqlite3.Connection) -> None:
    there = {}
    for table, index in file.execute("SELECT tbl_name, name FROM sqlite_master WHERE type = 'index' AND sql NOT NULL"):
        (facts,) = [row for row in file.execute(f"PRAGMA index_list({table})") if row[1] == index]
        columns = [row[2] for row in file.execute(f"PRAGMA index_info({index})")]
        there[index] = ([table], columns, bool(facts[2]), bool(facts[4]))
    listing = rows("reference/sqlite.md", "## Indexes, and the queries they serve")
    assert there == {
        names(index)[0]: (names(table), names(columns), "unique" in condition, "where" in condition)
        for table, index, columns, condition, _ in listing
    }


def test_both_pages_name_every_kind_of_entry() -> None:
    kinds = {
        *(schedules.KIND, triggers.KIND, subscriptions.VERSION_KIND, events.KIND, events.KEY_KIND, joins.KIND, PAUSE),
        *(services.GATE, services.LINE, *(level.kind for level in stats_rules.LEVELS), stats_records.DEPLOYS),
        *(groups.KIND, rates.RATE, rates.CHANGE, hooks.HOOK, hooks.WEBHOOK, hooks.ANSWER, streams.KIND),
        *(world_hooks.KIND, ADDRESS_KIND),
    }
    for path in ("reference/mongodb.md", "reference/sqlite.md"):
        (row,) = [line for line in (DOCS / path).read_text().splitlines() if "Kinds: `" in line]
        assert kinds <= set(re.findall(r"`([a-z._-]+)`", row)), path
