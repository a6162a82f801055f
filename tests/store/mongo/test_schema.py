"""Collections and indexes: made once, by whoever comes first; checked before they are trusted; kept in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.commands import CommandCounter
from msgspec.structs import replace
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure
from tests.store.mongo.tools import Events, database_of, make_store, opened, play

from holdfast import App
from holdfast.errors import SchemaMismatch
from holdfast.model import changes
from holdfast.model.changes import Applied
from holdfast.model.limits import Release
from holdfast.model.records import RETENTION_SECONDS
from holdfast.model.status import Status
from holdfast.store.contract import Filter, Finding, Order
from holdfast.store.mongo import connection, open_mongo, schema
from holdfast.store.mongo.sentinels import NO_SENTINEL
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import START, ids_of, invocation, the, wish

pytestmark = [pytest.mark.xdist_group("mongo")]

Raw = Database[dict[str, Any]]
EXPECTED = {(index.collection, index.name) for index in schema.INDEXES}


@pytest.fixture
def fresh(client: MongoClient[dict[str, Any]], new_url: str) -> Raw:
    return client[database_of(new_url)]


def indexes(raw: Raw) -> set[tuple[str, str]]:
    return {
        (name, index)
        for name in raw.list_collection_names()
        for index in raw[name].index_information()
        if index != "_id_"
    }


def meta(raw: Raw) -> dict[str, Any]:
    (found,) = raw.holdfast_meta.find()
    assert len(found.pop("mark")) == 16  # by chance: it tells this database from others of the same name
    return found


def findings(url: str, **options: Any) -> dict[str, Finding]:
    found: list[Finding] = []

    async def scenario(store: MongoStore) -> None:
        found.extend(await store.check(**options))

    play(url, scenario)
    return {finding.subject: finding for finding in found}


# --- making it


def test_five_stores_at_once_make_it_once(new_url: str, fresh: Raw) -> None:
    async def run() -> None:
        # Each with a client of its own, as five processes have.
        stores = [make_store(f"{new_url}&appname=store{n}") for n in range(5)]
        await asyncio.gather(*(store.open() for store in stores))
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(run())
    assert indexes(fresh) == EXPECTED
    assert meta(fresh) == {"_id": "schema", "schema_version": schema.SCHEMA_VERSION, "min_reader": schema.MIN_READER}


def test_opening_a_known_database_is_cheap_and_changes_nothing(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, lambda store: store.counts("shop"))
    before = [meta(raw), *[raw[name].index_information() for name in schema.COLLECTIONS]]

    async def run() -> None:
        with CommandCounter(database_of(mongo_url)) as sent:
            async with opened(mongo_url):
                pass
        assert {name for name, _ in sent.all} <= {"find", "listIndexes"}
        assert sent.all.total() <= len(schema.COLLECTIONS)

    asyncio.run(run())
    assert [meta(raw), *[raw[name].index_information() for name in schema.COLLECTIONS]] == before


def test_a_crash_before_the_version_was_written_is_made_good(new_url: str, fresh: Raw) -> None:
    fresh.holdfast_invocations.create_indexes([schema.INDEXES[0].model])
    play(new_url, lambda store: store.counts("shop"))
    assert indexes(fresh) == EXPECTED
    assert meta(fresh)["schema_version"] == schema.SCHEMA_VERSION


# --- versions


def test_a_newer_schema_that_we_can_read_is_used_and_left_as_it_is(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, lambda store: store.counts("shop"))
    version = {"schema_version": schema.SCHEMA_VERSION + 3, "min_reader": schema.SCHEMA_VERSION, "more": 1}
    raw.holdfast_meta.update_one({"_id": "schema"}, {"$set": version})
    try:
        play(mongo_url, lambda store: store.insert([invocation("a")]))
        assert meta(raw) == {"_id": "schema", **version}
    finally:
        raw.holdfast_meta.delete_many({})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"schema_version": 9, "min_reader": schema.SCHEMA_VERSION + 1}, "Upgrade Holdfast"),
        ({}, "has no valid schema version"),
        ({"schema_version": 1}, "has no valid schema version"),
        ({"schema_version": "1", "min_reader": "1"}, "has no valid schema version"),
        ({"schema_version": None, "min_reader": 1}, "has no valid schema version"),
        ({"schema_version": [1], "min_reader": 1}, "has no valid schema version"),
        ({"schema_version": True, "min_reader": True}, "has no valid schema version"),
    ],
)
def test_what_we_cannot_read_is_refused(mongo_url: str, raw: Raw, found: dict[str, Any], said: str) -> None:
    raw.holdfast_meta.replace_one({"_id": "schema"}, found, upsert=True)
    try:
        with pytest.raises(SchemaMismatch, match=said):
            play(mongo_url, lambda store: store.counts("shop"))
        assert raw.holdfast_meta.find_one() == {"_id": "schema", **found}
    finally:
        raw.holdfast_meta.delete_many({})


@pytest.mark.parametrize("version", [1, 2])
def test_a_database_of_an_older_version_is_brought_up_to_date_and_goes_on(
    new_url: str, fresh: Raw, version: int
) -> None:
    play(new_url, lambda store: store.insert([invocation("a"), invocation("b")]))
    fresh.drop_collection("holdfast_entries")
    for name in ("outbox", "ended", "rerun", "expires"):
        fresh.holdfast_invocations.drop_index(name)
    fresh.holdfast_meta.update_one({"_id": "schema"}, {"$set": {"schema_version": version}})

    async def scenario(store: MongoStore) -> None:
        assert indexes(fresh) == EXPECTED
        records = (await store.claim(wish())).records
        ends = [changes.completed(r, result=b"", operation=f"end {r.id}", at=START) for r in records]
        await store.apply([ends[0], replace(ends[1], outbox=("t",))])
        assert ids_of(await store.find("shop", Filter(), 9, order=Order.OUTBOX, set_aside=True)) == ["b"]
        assert await store.remove_expired("shop", START + RETENTION_SECONDS, 9) == 1

    play(new_url, scenario)
    assert meta(fresh)["schema_version"] == schema.SCHEMA_VERSION


def test_a_version_that_a_shell_wrote_as_a_double_is_a_version(mongo_url: str, raw: Raw) -> None:
    raw.holdfast_meta.replace_one({"_id": "schema"}, {"schema_version": 1.0, "min_reader": 1.0}, upsert=True)
    play(mongo_url, lambda store: store.counts("shop"))


def test_fields_of_a_newer_version_survive_every_write(mongo_url: str, raw: Raw) -> None:
    unknown = {"colour": "blue", "inbox": [{"n": 1}], "deep": {"$odd": 1}}

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abc"])
        raw.holdfast_invocations.update_many({}, [{"$set": {name: {"$literal": unknown[name]} for name in unknown}}])
        one = (await store.claim(wish("one", limit=1, start=False))).records
        more = (await store.claim(wish("more", limit=5, start=False))).records
        back = changes.handed_back(one[0], operation="back", at=START + 1, why="")
        starts = [changes.started(record, operation=f"start {record.id}", at=START + 1) for record in more]
        ends = [changes.completed(r, result=b"\x01", operation=f"end {r.id}", at=START + 2) for r in more]
        assert await store.apply([back, *starts, *ends]) == [Applied()] * 5
        assert (await the(store, "c")).status is Status.SUCCESS

    play(mongo_url, scenario)
    for document in raw.holdfast_invocations.find(NO_SENTINEL):
        assert {name: document[name] for name in unknown} == unknown


# --- the time after which something is removed


@pytest.mark.parametrize("known", [True, False], ids=["in a known database", "in one that was half made"])
def test_another_time_to_live_is_adjusted(mongo_url: str, raw: Raw, known: bool) -> None:
    play(mongo_url, lambda store: store.counts("shop"))
    change = {"name": "at", "expireAfterSeconds": 42}
    raw.command("collMod", "holdfast_signals", index=change)
    if not known:
        raw.holdfast_meta.delete_many({})
    play(mongo_url, lambda store: store.counts("shop"))
    assert raw.holdfast_signals.index_information()["at"]["expireAfterSeconds"] == schema.SIGNAL_SECONDS
    assert meta(raw)["schema_version"] == schema.SCHEMA_VERSION


def test_the_time_to_live_is_a_setting(mongo_url: str, raw: Raw) -> None:
    for seconds in (3600, 600):
        with App(mongo_url, signal_retention_seconds=seconds) as app:
            app.invocations()
        assert raw.holdfast_signals.index_information()["at"]["expireAfterSeconds"] == seconds

    async def scenario(store: MongoStore) -> None:
        raw.command("collMod", "holdfast_signals", index={"name": "at", "expireAfterSeconds": 77})
        (finding,) = [found for found in await store.check() if not found.ok]
        assert finding.subject == "index holdfast_signals.at"
        assert "for 77 s; signal_retention_seconds is 600 here" in finding.detail
        assert finding.advice == "holdfast store prepare"

    play(mongo_url, scenario, signal_retention_seconds=600)


# --- looking it over


def test_a_sound_database_is_sound(mongo_url: str) -> None:
    found = findings(mongo_url, deep=True)
    assert all(finding.ok for finding in found.values()), found
    assert set(found) == {
        *("schema", "indexes", "replica set", "clock", "write concern", "index history", "quarantine", "records"),
        "MongoDB",
    }
    assert f"version {schema.SCHEMA_VERSION}" in found["schema"].detail
    assert "with 1 members" in found["replica set"].detail
    assert "majority" in found["write concern"].detail


@pytest.mark.parametrize(("seconds", "advised"), [(300, False), (77, False), (900, True)])
def test_a_check_tells_how_long_removed_index_entries_are_kept(
    mongo_url: str, client: MongoClient[dict[str, Any]], seconds: int, advised: bool
) -> None:
    parameter = "minSnapshotHistoryWindowInSeconds"
    client.admin.command({"setParameter": 1, parameter: seconds})
    try:
        found = findings(mongo_url)["index history"]
    finally:
        client.admin.command({"setParameter": 1, parameter: 300})
    assert found.ok
    assert f"for {seconds} s ({parameter})" in found.detail
    assert bool(found.advice) is advised


def test_a_standalone_says_what_it_lacks(alone_url: str) -> None:
    found = findings(alone_url)
    assert found["replica set"].ok
    assert "no change streams" in found["replica set"].detail
    assert found["replica set"].advice


def test_missing_differing_and_foreign_indexes_are_told(new_url: str, fresh: Raw) -> None:
    found: dict[str, Finding] = {}

    async def scenario(store: MongoStore) -> None:
        invocations = fresh.holdfast_invocations
        invocations.drop_index("task")
        invocations.drop_index("queue")
        invocations.create_index([("queue", 1)], name="queue")
        invocations.drop_index("parent")
        invocations.create_index([("app", 1), ("parent_id", 1), ("id", 1)], name="parent")
        invocations.create_index([("colour", 1)], name="by_colour")
        found.update({finding.subject: finding for finding in await store.check()})

    def of(name: str) -> Finding:
        return found[f"index holdfast_invocations.{name}"]

    play(new_url, scenario)
    assert not of("task").ok
    assert "missing" in of("task").detail
    assert "holdfast store prepare" in of("task").advice
    for differing in ("queue", "parent"):
        assert not of(differing).ok
        assert "differs" in of(differing).detail
        assert of(differing).advice
    assert of("by_colour").ok
    assert "not ours" in of("by_colour").detail
    assert "indexes" not in found


def looked_at(url: str, *, deep: bool = False) -> dict[str, Finding]:
    """What a store says that was not opened, as `holdfast store check` asks it."""
    store = make_store(url)
    found = asyncio.run(_checked(store, deep))
    assert connection._clients == {}
    return {finding.subject: finding for finding in found}


async def _checked(store: MongoStore, deep: bool) -> Sequence[Finding]:
    return await store.check(deep=deep)


def test_a_signal_index_that_removes_nothing_is_told(new_url: str, fresh: Raw) -> None:
    play(new_url, lambda store: store.counts("shop"))
    signals = fresh[schema.SIGNALS]
    signals.drop_index("at")
    signals.create_index([("at", 1)], name="at")
    finding = looked_at(new_url)["index holdfast_signals.at"]
    assert finding.detail == "removes nothing; signal_retention_seconds is 3600 here"


def test_an_index_that_is_in_the_way_is_named(new_url: str, fresh: Raw) -> None:
    play(new_url, lambda store: store.counts("shop"))
    runners = fresh[schema.RUNNERS]
    runners.drop_index("roster")
    runners.create_index([("app", 1), ("started_at", 1), ("id", 1)], name="mine")
    with pytest.raises(
        SchemaMismatch, match=r"holdfast_runners has an index that conflicts with an index of Holdfast: .*mine"
    ):
        play(new_url, lambda store: store.counts("shop"))


def test_a_store_is_looked_at_as_it_is(new_url: str, fresh: Raw) -> None:
    """Opening it would make the missing index first, and nobody would ever hear of it."""
    play(new_url, lambda store: store.counts("shop"))
    fresh.holdfast_invocations.drop_index("task")
    fresh.command("collMod", "holdfast_signals", index={"name": "at", "expireAfterSeconds": 42})
    for deep in (False, True):
        found = looked_at(new_url, deep=deep)
        wrong = {subject for subject, finding in found.items() if not finding.ok}
        assert wrong == {"index holdfast_invocations.task", "index holdfast_signals.at"}
    assert indexes(fresh) == EXPECTED - {("holdfast_invocations", "task")}
    play(new_url, lambda store: store.counts("shop"))
    assert all(finding.ok for finding in looked_at(new_url, deep=True).values())


def test_looking_makes_nothing(new_url: str, fresh: Raw) -> None:
    found = looked_at(new_url, deep=True)
    assert not found["schema"].ok
    assert found["schema"].advice == "holdfast store prepare"
    assert fresh.list_collection_names() == []


@pytest.mark.parametrize(
    ("version", "said", "advice"),
    [
        ({"schema_version": 9, "min_reader": 9}, "Upgrade Holdfast", ""),
        ({"schema_version": "?", "min_reader": 1}, "has no valid schema version", ""),
        ({"schema_version": 0, "min_reader": 0}, "version 0", "holdfast store prepare; else"),
    ],
)
def test_a_version_that_would_be_refused_is_told(
    mongo_url: str, raw: Raw, version: dict[str, Any], said: str, advice: str
) -> None:
    play(mongo_url, lambda store: store.counts("shop"))
    raw.holdfast_meta.update_one({"_id": "schema"}, {"$set": version})
    try:
        found = looked_at(mongo_url)["schema"]
    finally:
        raw.holdfast_meta.delete_many({})
    assert not found.ok
    assert said in found.detail
    assert found.advice.startswith(advice)


def test_a_missing_index_is_made_again_by_preparing(new_url: str, fresh: Raw) -> None:
    """`holdfast store prepare` is what the finding advises, so it has to help."""
    play(new_url, lambda store: store.counts("shop"))
    fresh.holdfast_invocations.drop_index("task")

    play(new_url, lambda store: store.counts("shop"))
    assert indexes(fresh) == EXPECTED


@pytest.mark.parametrize("name", ["ready", "due", "slot", "waiting", "status"])
def test_an_index_that_somebody_drops_is_made_again(mongo_url: str, raw: Raw, name: str) -> None:
    """Statements name their index, so without it each of them would fail for ever."""
    events = Events()

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abc"])
        raw.holdfast_invocations.drop_index(name)
        assert ids_of((await store.claim(wish("one", limit=1))).records) == ["a"]
        assert ids_of((await store.claim(wish("one", limit=1, again=True))).records) == ["a"]
        assert ids_of((await store.claim(wish("more", limit=5))).records) == ["b", "c"]
        assert await store.find("shop", Filter(limit_key="k"), 9, order=Order.SLOT) == []
        assert await store.counts("shop") == {Status.RUNNING: 3}
        await store.release_waiters("shop", [Release(limit_key="k")], operation="r", at=START)

    play(mongo_url, scenario, events)
    assert len(events.named("index_made")) == 1
    assert f"holdfast_invocations.{name}" in events.named("index_made")[0]["why"]
    assert events.named("retry") == []
    assert name in raw.holdfast_invocations.index_information()


def test_an_index_that_a_newer_version_has_dropped_is_not_made_again(mongo_url: str, raw: Raw) -> None:
    """A runner of an older version that goes on through an upgrade says so, and leaves the new schema alone."""
    newer = {"schema_version": schema.SCHEMA_VERSION + 1, "min_reader": schema.SCHEMA_VERSION + 1}

    async def scenario(store: MongoStore) -> None:
        raw.holdfast_invocations.drop_index("ready")
        raw.holdfast_meta.update_one({"_id": "schema"}, {"$set": newer})
        with pytest.raises(SchemaMismatch, match="Upgrade Holdfast here"):
            await store.claim(wish("one", limit=1))
        assert "ready" not in raw.holdfast_invocations.index_information()

    try:
        play(mongo_url, scenario)
    finally:
        raw.holdfast_meta.delete_many({})


@pytest.mark.parametrize(("code", "said"), [(13, "not authorized"), (8000, "user is not allowed to do action")])
def test_who_may_not_make_indexes_goes_on_with_what_is_there(
    mongo_url: str, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    """8000 is what a hosted MongoDB says; there is none here to ask."""
    play(mongo_url, lambda store: store.counts("shop"))

    async def refuse(*_: object) -> None:
        raise OperationFailure(said, code)

    monkeypatch.setattr(schema, "put_right", refuse)
    play(mongo_url, lambda store: store.counts("shop"))


def test_a_wrong_clock_is_told(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        store._clock = FakeClock(START)
        (clock,) = [finding for finding in await store.check() if finding.subject == "clock"]
        assert not clock.ok
        assert "NTP" in clock.advice

    play(mongo_url, scenario)


def test_the_servers_time_counts(mongo_url: str) -> None:
    """A host whose clock is wrong at first, and set to something else later, stamps the server's time."""

    async def scenario() -> None:
        clock = FakeClock(START)
        store = open_mongo(mongo_url, clock=clock, observe=Events(), options={})
        await store.open()
        try:
            assert abs(store.now() - time.time()) < 5
            clock.set(START + 86400)
            assert abs(store.now() - time.time()) < 5
            clock.advance(100)
            assert abs(store.now() - time.time() - 100) < 5
            clock.advance(1000)  # this clock runs fast: an operation learns the time again
            await store.counts("shop")
            assert abs(store.now() - time.time()) < 5
        finally:
            await store.close()

    asyncio.run(scenario())


def test_quarantine_and_unreadable_records_are_told(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a"), invocation("b")])
        raw.holdfast_invocations.update_one({"id": "a"}, {"$set": {"epoch": "?"}})
        await store.claim(wish())
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"epoch": "?"}})

    play(mongo_url, scenario)
    found = findings(mongo_url, deep=True)
    assert not found["quarantine"].ok
    assert "1 record was set aside (1 invocation)" in found["quarantine"].detail
    assert not found["records"].ok
    assert "the stored invocation b" in found["records"].detail
