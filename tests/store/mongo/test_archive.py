"""What has ended on MongoDB is removed by the server, at its time and not before."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator

import pytest
from pymongo import MongoClient
from tests.store.mongo.tools import opened, play
from tests.support.mongod import quick_server

from holdfast.model.records import FOREVER, RETENTION_SECONDS, Entry, Terms
from holdfast.model.status import Status
from holdfast.store.contract import Filter, Order
from holdfast.store.mongo import listing
from holdfast.store.mongo.sentinels import NO_SENTINEL
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.conformance_archive import DAY, end
from holdfast.testing.conformance_outbox import end as outboxed
from holdfast.testing.samples import START, delivery, ids_of, invocation, the

pytestmark = [pytest.mark.xdist_group("mongo")]


@pytest.fixture(scope="module")
def removing() -> Iterator[str]:
    """A server that removes what a TTL index says, every second."""
    with quick_server(removes=True) as server:
        yield server.url("ttl")


@pytest.mark.slow
def test_the_server_removes_what_is_over_and_nothing_else(removing: str) -> None:
    async def scenario(store: MongoStore) -> None:
        now = store.now()
        await store.insert([invocation("live")])
        await end(store, "forever", terms=Terms(retention={"success": None}))
        await end(store, "now", at=now)
        await end(store, "over")  # years ago
        await outboxed(store, "untold")
        await outboxed(store, "told")
        await store.apply(delivery("told"))
        for name, keep_until in (("over", START), ("now", now + DAY), ("forever", FOREVER), ("always", None)):
            await store.put_entry(Entry(app="shop", kind="event", name=name, body=b"", keep_until=keep_until))

    play(removing, scenario)
    with MongoClient[dict[str, object]](removing) as client:
        there, deadline = client.get_default_database().holdfast_invocations, time.monotonic() + 30
        entries, gone = client.get_default_database().holdfast_entries, {"id": {"$in": ["over", "told"]}}
        while (there.find_one(gone) or entries.find_one({"name": "over"})) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sorted(str(found["id"]) for found in there.find(NO_SENTINEL)) == ["forever", "live", "now", "untold"]
        assert sorted(str(found["name"]) for found in entries.find()) == ["always", "forever", "now"]


def test_the_date_that_the_index_reads_is_that_of_the_record(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await end(store, "a", at=START + 0.25)
        await end(store, "b", terms=Terms(retention={"success": None}))

    play(mongo_url, scenario)
    with MongoClient[dict[str, object]](mongo_url, tz_aware=True) as client:
        a, b = client.get_default_database().holdfast_invocations.find(NO_SENTINEL).sort("id")
    assert a["retain_until"] == START + 0.25 + RETENTION_SECONDS
    assert a["expires_at"] == dt.datetime.fromtimestamp(START + 0.25 + RETENTION_SECONDS, dt.UTC)
    assert (b["retain_until"], "expires_at" in b) == (FOREVER, False)


def test_the_date_is_there_once_everybody_was_told(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        for id in "ac":
            await outboxed(store, id, at=START + 0.25)
        await outboxed(store, "b", terms=Terms(retention={"success": None}))
        await store.apply(delivery("a", "b"))

    play(mongo_url, scenario)
    with MongoClient[dict[str, object]](mongo_url, tz_aware=True) as client:
        a, b, c = client.get_default_database().holdfast_invocations.find(NO_SENTINEL).sort("id")
    assert a["expires_at"] == dt.datetime.fromtimestamp(START + 0.25 + RETENTION_SECONDS, dt.UTC)
    assert [(one["retain_until"], "expires_at" in one, "outbox" in one) for one in (b, c)] == [
        (FOREVER, False, False),
        (START + 0.25 + RETENTION_SECONDS, False, True),
    ]


def test_the_look_for_those_to_be_told_costs_what_it_finds(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        for number in range(30):
            await end(store, f"{number:02}", at=START + number)
        await outboxed(store, "a", at=START + 5)
        there = store._collection("holdfast_invocations")
        for app, keys in (("shop", 2), ("another", 1)):
            wanted = {"app": app, "outbox": {"$exists": True}, "changed_at": {"$lte": START + 9}}
            plan = (await there.find(wanted, hint="outbox").explain())["executionStats"]
            assert plan["totalKeysExamined"] <= keys

    play(mongo_url, scenario)


def test_what_an_older_version_has_ended_is_told_how_long_it_is_kept(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        for number in range(5):
            await end(store, f"{number}", terms=Terms(retention={"success": DAY}) if number == 3 else Terms())
        with MongoClient[dict[str, object]](mongo_url) as client:
            everything = client.get_default_database().holdfast_invocations
            everything.update_many({}, {"$unset": {"retain_until": "", "expires_at": ""}})
            client.get_default_database().holdfast_meta.update_one({"_id": "schema"}, {"$set": {"schema_version": 3}})
        await store.insert([invocation("live")])
        await store.close()
        await store.open()
        kept = [(await the(store, f"{number}")).retain_until for number in range(5)]
        assert kept == [START + (DAY if number == 3 else RETENTION_SECONDS) for number in range(5)]
        assert await store.remove_expired("shop", START + DAY, 10) == 1
        assert ids_of(await store.get("shop", ["3", "live"])) == [None, "live"]

    play(mongo_url, scenario)


def test_a_page_of_the_archive_costs_the_same_however_much_is_in_it(mongo_url: str) -> None:
    """The server looks at about as many keys as it answers, for any page of any outcome."""

    async def scenario(store: MongoStore) -> None:
        for number in range(60):
            await end(store, f"{number:02}", at=START + number, task=f"shop:{number % 3}", fails=number % 10 == 0)
        where = [
            Filter(),
            Filter(before=(START + 30, "30")),
            Filter(statuses=frozenset({Status.FAILED}), before=(START + 30, "30")),
            Filter(since=START + 20, until=START + 40),
        ]
        async with opened(mongo_url) as other:
            there = other._collection("holdfast_invocations")
            for each in where:
                for look in listing.looks("shop", each, Order.LATEST_END):
                    assert look.hint == "ended"
                    found = there.find(look.wanted, hint="ended").sort(look.order).limit(5)
                    plan = (await found.explain())["executionStats"]
                    assert plan["totalKeysExamined"] <= 5 + 2 * 4, (each, plan)
                    assert plan["totalDocsExamined"] <= 5

    play(mongo_url, scenario)
