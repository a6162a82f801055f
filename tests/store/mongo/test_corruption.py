"""One bad document neither stops a loop nor is lost: it is set aside whole, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bson
import pytest
from bson import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, errors
from pymongo.database import Database
from tests.store.mongo.tools import Events, database_of, opened, play

from holdfast.errors import CorruptRecord, SchemaMismatch, StoreError
from holdfast.model import changes
from holdfast.model.changes import APPLIED, MISSING, Applied, Missing
from holdfast.model.limits import Release
from holdfast.model.log import APPENDED, Behind, Fenced
from holdfast.model.records import Entry
from holdfast.model.status import OWNED, Status
from holdfast.store.contract import EntryOrder, Filter, Order
from holdfast.store.mongo.retry import is_about_the_document
from holdfast.store.mongo.schema import INVOCATIONS
from holdfast.store.mongo.sentinels import NO_SENTINEL
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.conformance_limits import KEY, bounded, limited
from holdfast.testing.conformance_outbox import end
from holdfast.testing.samples import RUN, START, ids_of, invocation, owned, page, pushing, runner, the, wish

pytestmark = [pytest.mark.xdist_group("mongo")]

Raw = Database[dict[str, Any]]

DAMAGE: dict[str, dict[str, Any]] = {
    "history is a text": {"$set": {"history": "gone"}},
    "history is null": {"$set": {"history": None}},
    "history is missing": {"$unset": {"history": ""}},
    "history has a strange line": {"$set": {"history": [{"v": 1, "s": "registered"}]}},
    "epoch is a text": {"$set": {"epoch": "one"}},
    "epoch is missing": {"$unset": {"epoch": ""}},
    "version is true": {"$set": {"version": True}},
    "attempt is a list": {"$set": {"attempt": [1]}},
    "status is unknown": {"$set": {"status": "sleeping"}},
    "status is missing": {"$unset": {"status": ""}},
    "status is final": {"$set": {"status": "success"}},
    "arguments are missing": {"$unset": {"arguments": ""}},
    "rank is a text": {"$set": {"rank": "high"}},
    "rank is missing": {"$unset": {"rank": ""}},
    "task is a number": {"$set": {"task": 7}},
    "origin is a text": {"$set": {"origin": "somewhere"}},
}
STOPS_A_PIPELINE = ("history is a text", "epoch is a text", "attempt is a list", "version is true")


def damage(raw: Raw, id: str, how: str) -> None:
    assert raw.holdfast_invocations.update_one({"_id": f"shop|{id}"}, DAMAGE[how]).modified_count == 1


@pytest.mark.parametrize("limit", [1, 10])
def test_a_document_without_room_for_its_claim_is_set_aside_and_the_others_are_claimed(
    mongo_url: str, raw: Raw, limit: int
) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abc"])
        size = len(bson.encode(raw.holdfast_invocations.find_one({"id": "b"}) or {}))
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"arguments": b"x" * (16 * 2**20 - size - 100)}})
        got: list[str | None] = []
        for turn in range(5):
            got += ids_of((await store.claim(wish(f"claim {turn}", limit=limit))).records)
        assert sorted(map(str, got)) == ["a", "c"]
        (aside,) = await store.quarantined("shop")
        assert list(await store.quarantined("shop", latest=5)) == [aside]
        assert (await store.sizes()).keys() == {"data", "indexes"}
        assert aside.id == "b"
        assert "in 2 documents, of: shop|b" in aside.raw
        parts = raw.holdfast_quarantine.find({"kind": "part", "of": "shop|b"}).sort("number")
        whole = bson.decode(b"".join(part["part"] for part in parts))
        assert (whole["id"], whole["status"]) == ("b", "registered")
        assert raw.holdfast_invocations.count_documents({"id": "b"}) == 0
        (counted,) = [one for one in await store.check() if one.subject == "quarantine"]
        assert "1 record was set aside (1 invocation)" in counted.detail

    play(mongo_url, scenario)


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_bad_document_among_candidates_is_set_aside_and_the_others_are_claimed(
    mongo_url: str, raw: Raw, how: str, limit: int
) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abcde"])
        damage(raw, "c", how)
        got: list[str | None] = []
        for turn in range(8):
            claimed = await store.claim(wish(f"claim {turn}", limit=limit))
            assert all(record.epoch == 1 and record.status is Status.RUNNING for record in claimed.records)
            got += ids_of(claimed.records)
        assert sorted(map(str, got)) == ["a", "b", "d", "e"]
        assert claimed.next_due_at is None, "a runner would look for it again and again"

        (aside,) = await store.quarantined("shop")
        assert (aside.app, aside.id) == ("shop", "c")
        assert "shop:send" in aside.raw or how == "task is a number"
        assert ids_of(await store.get("shop", ["c"])) == [None]

    play(mongo_url, scenario, events)
    assert [facts["id"] for facts in events.named("quarantine")] == ["c"]


def test_a_text_that_is_no_utf_8_is_set_aside_once(mongo_url: str, raw: Raw) -> None:
    """It is read as escapes, and no filter that compares it with these finds the document again."""
    events = Events()

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a"), invocation("b")])
        document = raw[INVOCATIONS].find_one_and_delete({"id": "a"})
        assert document is not None
        packed = bson.encode(document | {"version": "XXXX text"})
        raw[INVOCATIONS].insert_one(RawBSONDocument(packed.replace(b"XXXX text", b"\xff\xfe\xff\xfe text")))  # type: ignore[arg-type]
        for _ in range(2):
            assert ids_of(await store.find("shop", Filter(), 10, set_aside=True)) == ["b"]
        assert raw[INVOCATIONS].count_documents({"id": "a"}) == 0
        assert [aside.id for aside in await store.quarantined("shop")] == ["a"]

    play(mongo_url, scenario, events)
    assert [facts["id"] for facts in events.named("quarantine")] == ["a"]


@pytest.mark.parametrize("how", [{"outbox": "t"}, {"outbox": [1]}, {"origin": {"depth": "deep"}}, {"history": 1}])
def test_an_unreadable_end_is_set_aside_and_the_others_are_told(mongo_url: str, raw: Raw, how: dict[str, Any]) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        for id in "abc":
            await end(store, id)
        raw.holdfast_invocations.update_many({"id": {"$in": ["a", "b"]}}, {"$set": how})
        assert ids_of(await store.find("shop", Filter(), 2, order=Order.OUTBOX, set_aside=True)) == ["c"]
        assert sorted(aside.id for aside in await store.quarantined("shop")) == ["a", "b"]
        assert ids_of(await store.get("shop", ["a", "b"])) == [None, None]

    play(mongo_url, scenario, events)
    assert sorted(facts["id"] for facts in events.named("quarantine")) == ["a", "b"]


def test_an_unreadable_end_that_is_too_large_to_move_stops_nobody(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        for id in "ab":
            await end(store, id)
        size = len(bson.encode(raw.holdfast_invocations.find_one({"id": "a"}) or {}))
        full = {"arguments": b"x" * (16 * 2**20 - size - 100), "outbox": [1]}
        raw.holdfast_invocations.update_one({"id": "a"}, {"$set": full})
        assert ids_of(await store.find("shop", Filter(), 2, order=Order.OUTBOX, set_aside=True)) == ["b"]
        assert [aside.id for aside in await store.quarantined("shop")] == ["a"]

    play(mongo_url, scenario)


def test_a_damaged_document_of_16_mb_is_transferred_once(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await owned(store, "a")
        await store.put_entry(Entry(app="shop", kind="k", name="n", body=b"1"))
        for there in (raw.holdfast_invocations, raw.holdfast_entries):
            size = len(bson.encode(there.find_one() or {}))
            room = b"x" * (16 * 2**20 - size - 100)
            there.update_one({"app": "shop"}, {"$set": {"pad": room, "attempt": "x", "version": "x"}})
        before = raw.command("serverStatus")["network"]["bytesOut"]
        for _ in range(3):
            assert await store.find("shop", Filter(statuses=OWNED), 10, set_aside=True) == []
            assert await store.find("shop", Filter(), 10, set_aside=True) == []
            assert await store.entries("shop", "k", ["n"]) == []
            assert await store.quarantine_hidden("shop") == 0
        assert raw.command("serverStatus")["network"]["bytesOut"] - before < 70 * 2**20
        assert await store.put_entry(Entry(app="shop", kind="k", name="n", body=b"1"))
        assert sorted(aside.id for aside in await store.quarantined("shop")) == ["a", "n"]

    play(mongo_url, scenario)


@pytest.mark.parametrize("how", STOPS_A_PIPELINE)
def test_what_an_update_took_before_it_met_a_bad_document_is_not_forgotten(mongo_url: str, raw: Raw, how: str) -> None:
    """An updateMany stops at the first error, and what it changed before stays changed."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abcdefgh"])
        damage(raw, "e", how)
        (claimed, again) = [await store.claim(wish("one claim", limit=20, again=again)) for again in (False, True)]
        assert sorted(map(str, ids_of(claimed.records))) == list("abcdfgh")
        assert ids_of(again.records) == ids_of(claimed.records)
        running = await store.find("shop", Filter(statuses=frozenset({Status.RUNNING})), 20)
        assert {record.version for record in running} == {3}, "each was claimed once"

    play(mongo_url, scenario)


def test_many_bad_documents_at_the_head_do_not_hide_the_good_ones(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(f"a{n:02}") for n in range(50)] + [invocation("z")])
        raw.holdfast_invocations.update_many({"id": {"$regex": "^a"}}, {"$set": {"history": 1, "status": "odd"}})
        got: list[str | None] = []
        for turn in range(20):
            got += ids_of((await store.claim(wish(f"claim {turn}", limit=10))).records)
        assert got == ["z"]
        assert len(await store.quarantined("shop")) == 50

    play(mongo_url, scenario)


def test_a_claimer_that_has_company_is_not_stopped_either(mongo_url: str, raw: Raw) -> None:
    """Others took what it wanted, so it takes from a share: what is damaged there must not stop it."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(f"i{n}", priority=n % 3) for n in range(20)])
        damage(raw, "i3", "rank is a text")
        damage(raw, "i4", "rank is missing")
        got = []
        for turn in range(10):
            store._claims.contention.learn(2, 0, START)
            got += ids_of((await store.claim(wish(f"claim {turn}", limit=3))).records)
        assert len(got) == len(set(got)) == 18

    play(mongo_url, scenario)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how not in {"status is final", "version is true"}])
def test_a_change_to_a_bad_document_finds_nothing_or_is_applied_whole(mongo_url: str, raw: Raw, how: str) -> None:
    async def scenario(store: MongoStore) -> None:
        bad, good = await owned(store, "bad"), await owned(store, "good")
        damage(raw, "bad", how)
        ends = [changes.completed(r, result=b"\x01", operation=f"end {r.id}", at=START) for r in (bad, good)]
        verdicts = await store.apply(ends)
        assert verdicts[0] in (Missing(), Applied())
        assert verdicts[1] == Applied()
        assert (await the(store, "good")).status is Status.SUCCESS
        if verdicts[0] == Missing():
            assert [aside.id for aside in await store.quarantined("shop")] == ["bad"]
        else:  # what is damaged does not stand in the way of this change
            (stored,) = raw.holdfast_invocations.find({"id": "bad"})
            assert (stored["status"], stored["result"]) == ("success", b"\x01")

    play(mongo_url, scenario)


def test_a_bad_roster_entry_does_not_hide_the_others(mongo_url: str, raw: Raw) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        for id in "abc":
            await store.enrol(runner(id))
        raw.holdfast_runners.update_one({"id": "b"}, {"$set": {"concurrency": "many"}})
        assert [entry.id for entry in await store.roster("shop")] == ["a", "c"]

    play(mongo_url, scenario, events)
    assert [(facts["kind"], facts["id"]) for facts in events.named("quarantine")] == [("runner", "b")]


def test_what_is_set_aside_keeps_its_values(mongo_url: str, raw: Raw) -> None:
    """Also a large one: a text of it would be too large to store."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("large", arguments=b"\x00" * 6_000_000)])
        raw.holdfast_invocations.update_one({"id": "large"}, {"$set": {"epoch": "one", "extra": {"kept": [1, 2.5]}}})
        assert (await store.claim(wish())).records == ()
        (aside,) = await store.quarantined("shop")
        assert "'kept': [1, 2.5]" in aside.raw

    play(mongo_url, scenario)
    (kept,) = raw.holdfast_quarantine.find()
    assert len(kept["document"]["arguments"]) == 6_000_000


def test_a_foreign_document_in_the_collection_is_left_alone(mongo_url: str, raw: Raw) -> None:
    raw.holdfast_invocations.insert_one({"hello": "world"})

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a")])
        assert ids_of((await store.claim(wish())).records) == ["a"]
        assert await store.quarantined("shop") == []

    async def deep() -> None:
        async with opened(mongo_url) as store:
            (finding,) = [found for found in await store.check(deep=True) if found.subject == "records"]
            assert not finding.ok

    play(mongo_url, scenario)
    play(mongo_url, lambda store: deep())


# --- what the server refuses for a reason of its own


@contextmanager
def refusing(raw: Raw, ids: list[str], status: str) -> Iterator[None]:
    """A rule that somebody has given the collection: these never get that status."""
    rule = {"$or": [{"id": {"$nin": ids}}, {"status": {"$ne": status}}]}
    raw.command("collMod", "holdfast_invocations", validator=rule)
    try:
        yield
    finally:
        raw.command("collMod", "holdfast_invocations", validator={})


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("good", [["a", "c"], ["a"]])
def test_what_a_validator_refuses_is_neither_moved_nor_in_the_way(
    mongo_url: str, raw: Raw, good: list[str], limit: int
) -> None:
    events = Events()
    bad = [f"b{n}" for n in range(10)]

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in [*good, *bad]])
        got: list[str | None] = []
        with refusing(raw, bad, "running"):
            with pytest.raises(StoreError, match="validation"):
                for turn in range(4):
                    got += ids_of((await store.claim(wish(f"claim {turn}", limit=limit))).records)
            assert got == good
            assert await store.quarantined("shop") == []
        assert ids_of((await store.claim(wish("later", limit=20))).records) == bad

    play(mongo_url, scenario, events)
    assert [facts["id"] for facts in events.named("refused")] == bad, "each is told once"


def test_a_waiter_that_a_validator_refuses_stays_and_the_next_one_goes(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(id) for id in "abc"])
        await store.claim(bounded("op"))
        wishes = [Release(limit_key=KEY)]
        with refusing(raw, ["b"], "rerouted"):
            assert ids_of(await store.release_waiters("shop", wishes, operation="r", at=START)) == ["c"]
        assert await store.quarantined("shop") == []
        assert ids_of(await store.release_waiters("shop", wishes, operation="s", at=START)) == ["b"]

    play(mongo_url, scenario)


@pytest.mark.parametrize(
    ("code", "about"), [(14, True), (10334, True), (17419, True), (28664, True), (121, False), (2, False), (77, False)]
)
def test_only_what_is_known_to_be_the_documents_own_fault_is(code: int, about: bool) -> None:
    assert is_about_the_document(errors.OperationFailure("no", code)) is about
    bulk = {"writeErrors": [{"code": code, "index": 0}, {"code": 11000, "index": 1}]}
    assert is_about_the_document(errors.BulkWriteError(bulk)) is about


@pytest.mark.parametrize("name", ["key", "dedup_key"])
@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "task is a number"])  # then it has another key
def test_what_cannot_be_read_takes_no_key_and_no_dedup_key(mongo_url: str, raw: Raw, how: str, name: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("c", **{name: "k"})])
        damage(raw, "c", how)
        again = invocation("d", **{name: "k"})
        assert await store.insert([again]) == [False]
        assert await store.find_conflicts([again]) == [None]
        assert await store.insert([again]) == [True]
        assert [aside.id for aside in await store.quarantined("shop")] == ["c"]

    play(mongo_url, scenario)


def test_what_is_too_large_to_be_moved_gives_its_key_back(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("c", key="k")])
        size = len(bson.encode(raw.holdfast_invocations.find_one({"id": "c"}) or {}))
        damage = {"arguments": b"x" * (16 * 2**20 - size - 100), "version": "seven"}
        raw.holdfast_invocations.update_one({"id": "c"}, {"$set": damage})
        again = invocation("d", key="k")
        assert await store.find_conflicts([again]) == [None]
        assert await store.insert([again]) == [True]
        assert raw.holdfast_invocations.count_documents({"id": "c"}) == 0

    play(mongo_url, scenario)


def test_an_id_stays_taken_by_what_cannot_be_read(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("c", key="k")])
        raw.holdfast_invocations.update_one({"id": "c"}, {"$set": {"version": "seven"}})
        with pytest.raises(CorruptRecord):
            await store.find_conflicts([invocation("c", key="k")])
        assert await store.quarantined("shop") == []

    play(mongo_url, scenario)


# --- every kind of record


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("value", [Int64(2**62), 7, 2.5, True, "text", None, [1], {"a": 1}])
def test_arguments_of_another_type_are_set_aside_and_the_neighbours_are_claimed(
    mongo_url: str, raw: Raw, value: object, limit: int
) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abc"])
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"arguments": value}})
        got: list[str | None] = []
        for turn in range(4):
            got += ids_of((await store.claim(wish(f"claim {turn}", limit=limit))).records)
        assert sorted(map(str, got)) == ["a", "c"]
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [("invocation", "b")]

    play(mongo_url, scenario)


def test_recovery_goes_on_beside_an_invocation_that_cannot_be_read(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        for id in "abc":
            await owned(store, id, owner="gone/1")
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"arguments": Int64(2**62)}})
        where = Filter(runner="gone", statuses=OWNED)
        assert ids_of(await store.find("shop", where, 10, set_aside=True)) == ["c", "a"]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    play(mongo_url, scenario)


ROSTER_DAMAGE: dict[str, dict[str, Any]] = {
    "concurrency is a text": {"$set": {"concurrency": "many"}},
    "tasks are missing": {"$unset": {"tasks": ""}},
    "workers is a number": {"$set": {"workers": Int64(2**62)}},
    "heartbeat is NaN": {"$set": {"heartbeat_at": float("nan")}},
    "heartbeat is missing": {"$unset": {"heartbeat_at": ""}},
    "heartbeat is a text": {"$set": {"heartbeat_at": "now"}},
    "started in another age": {"$set": {"started_at": 1e300}},
}


@pytest.mark.parametrize("how", ROSTER_DAMAGE)
def test_an_unreadable_roster_entry_hides_nobody(mongo_url: str, raw: Raw, how: str) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        for number, id in enumerate("abc"):
            await store.enrol(runner(id, started_at=START + number))
        raw.holdfast_runners.update_one({"id": "a"}, ROSTER_DAMAGE[how])
        found = await store.silent("shop")
        assert [runner.id for runner, _ in found] == ["b"]
        assert [each.id for each in await store.roster("shop")] == ["b", "c"]
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [("runner", "a")]

    play(mongo_url, scenario, events)
    assert len([event for event, _ in events.all if event in ("quarantine", "unreadable")]) == 1


ENTRY_DAMAGE: dict[str, dict[str, Any]] = {
    "version is missing": {"$unset": {"version": ""}},
    "version is a text": {"$set": {"version": "one"}},
    "body is missing": {"$unset": {"body": ""}},
    "body is a number": {"$set": {"body": Int64(2**62)}},
    "body is a text": {"$set": {"body": "{}"}},
    "body is null": {"$set": {"body": None}},
    "body is a document": {"$set": {"body": {"a": 1}}},
    "body is no JSON": {"$set": {"body": b"{"}},
    "body is very deep": {"$set": {"body": b'{"a":' * 2000 + b"1" + b"}" * 2000}},
    "due at NaN": {"$set": {"due_at": float("nan")}},
    "due at a text": {"$set": {"due_at": "soon"}},
    "name is a number": {"$set": {"name": 7}},
}


@pytest.mark.parametrize("kind", ["schedule", "event", "trigger", "join"])
@pytest.mark.parametrize("how", ENTRY_DAMAGE)
def test_an_unreadable_entry_is_set_aside_and_the_others_are_found(
    mongo_url: str, raw: Raw, how: str, kind: str
) -> None:
    async def scenario(store: MongoStore) -> None:
        for name in "abc":
            await store.put_entry(Entry(app="shop", kind=kind, name=name, body=b"{}", due_at=START))
        raw.holdfast_entries.update_one({"name": "a"}, ENTRY_DAMAGE[how])
        assert [each.name for each in await store.entries("shop", kind, order=EntryOrder.DUE, limit=2)] == ["b", "c"]
        assert [each.name for each in await store.entries("shop", kind, order=EntryOrder.LATEST, limit=9)] == ["c", "b"]
        assert [each.name for each in await store.entries("shop", kind)] == ["b", "c"]
        assert await store.entries("shop", kind, ["a"]) == []
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [(kind, "a")]
        assert await store.put_entry(Entry(app="shop", kind=kind, name="a", body=b"{}")), "its name is free"

    play(mongo_url, scenario)


def test_the_check_counts_by_kind_what_was_set_aside(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "ab"])
        await store.enrol(runner("r"))
        raw.holdfast_invocations.update_many({}, {"$set": {"arguments": Int64(2**62)}})
        raw.holdfast_runners.update_many({}, {"$unset": {"tasks": ""}})
        await store.claim(wish())
        await store.roster("shop")
        (bad,) = [finding for finding in await store.check() if finding.subject == "quarantine"]
        assert not bad.ok
        assert "3 records were set aside (2 invocations, 1 runner)" in bad.detail

    play(mongo_url, scenario)


@pytest.mark.parametrize("version", [-1, 2.5, float("nan"), float("inf"), Int64(2**62)])
def test_a_database_whose_schema_version_cannot_be_one_is_refused(new_url: str, client: Any, version: Any) -> None:
    client[database_of(new_url)].holdfast_meta.insert_one({"_id": "schema", "schema_version": version, "min_reader": 1})

    async def nothing(store: MongoStore) -> None:
        pass

    with pytest.raises(SchemaMismatch, match=r"no valid schema version.*Restore a backup"):
        play(new_url, nothing)


@pytest.mark.parametrize("seconds", [1.0, 0.0], ids=["in time", "out of time"])
def test_an_audit_reads_as_many_waiting_records_as_its_time_allows(
    mongo_url: str, raw: Raw, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("holdfast.store.mongo.queries.MAX_WALKED", 2)
    monkeypatch.setattr("holdfast.store.mongo.store.WALK_SECONDS", seconds)

    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(id) for id in "abcdefg"])
        raw.holdfast_invocations.update_one({"id": "g"}, {"$set": {"lane": "nowhere"}})
        audits = [await store.quarantine_hidden("shop") for _ in range(4)]
        assert audits == ([1, 0, 0, 0] if seconds else [0, 0, 0, 1]), "the next audit goes on where this one ended"

    play(mongo_url, scenario)


@pytest.mark.parametrize("change", [{"arguments": 7}, {"status": "?"}, {"owner": None}, {"owner": "x"}, {"history": 1}])
def test_a_damaged_holder_gives_its_slot_back(mongo_url: str, raw: Raw, change: dict[str, Any]) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(id) for id in "ab"])
        assert ids_of((await store.claim(bounded("first", limit=1))).records) == ["a"]
        raw.holdfast_invocations.update_one({"id": "a"}, {"$set": change})
        assert ids_of((await store.claim(bounded("second"))).records) == []
        assert await store.quarantine_hidden("shop") == 1
        assert await store.quarantine_hidden("shop") == 0
        assert [aside.id for aside in await store.quarantined("shop")] == ["a"]
        released = await store.release_waiters("shop", [Release(limit_key=KEY)], operation="r", at=START)
        assert ids_of(released) == ["b"]

    play(mongo_url, scenario)


@pytest.mark.parametrize(
    "how",
    [
        {"$set": {"lane": "nonsense|x|"}},
        {"$set": {"lane": 7}},
        {"$set": {"due_at": "tomorrow"}},
        {"$set": {"due_at": None}},
        {"$set": {"due_at": float("nan")}},
        {"$unset": {"ready": ""}},
        {"$unset": {"tags": ""}},
    ],
    ids=str,
)
def test_one_that_waits_and_that_no_claim_would_find_is_set_aside(
    mongo_url: str, raw: Raw, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.mongo.queries.MAX_WALKED", 2)

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abcde"])
        await store.claim(wish("op", limit=1))  # makes the sentinels
        everything = raw.holdfast_invocations.count_documents(NO_SENTINEL)
        raw.holdfast_invocations.update_one({"id": "d"}, how)
        assert sum([await store.quarantine_hidden("shop") for _ in range(4)]) == 1
        assert [aside.id for aside in await store.quarantined("shop")] == ["d"]
        assert raw.holdfast_invocations.count_documents(NO_SENTINEL) == everything - 1
        assert ids_of((await store.claim(wish("again"))).records) == ["b", "c", "e"]

    play(mongo_url, scenario)


@pytest.mark.parametrize("name", ["key", "dedup_key"])
def test_in_a_users_own_transaction_a_damaged_document_takes_no_key(mongo_url: str, raw: Raw, name: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("b", **{name: "k"})])
        await store.put_entry(Entry(app="shop", kind="event-key", name="n", body=b"1"))
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"arguments": 2**62}})
        raw.holdfast_entries.update_one({"name": "n"}, {"$set": {"body": 5}})
        again, entry = invocation("c", **{name: "k"}), Entry(app="shop", kind="event-key", name="n", body=b"2")
        for commits in (False, True):
            with raw.client.start_session() as session:
                session.start_transaction()
                transaction = store.joined(session)
                assert list(transaction.insert([again], [])) == [None]
                assert list(transaction.put_entries([entry])) == [None]
                session.commit_transaction() if commits else session.abort_transaction()
            assert sorted(one.id for one in await store.quarantined("shop")) == (["b", "n"] if commits else [])
        assert ids_of(await store.find("shop", Filter(), 9)) == ["c"]
        assert [one.body for one in await store.entries("shop", "event-key")] == [b"2"]

    play(mongo_url, scenario)


def test_in_an_asynchronous_transaction_a_damaged_document_takes_no_key(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("b", key="k")])
        await store.put_entry(Entry(app="shop", kind="event-key", name="n", body=b"1"))
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"arguments": 2**62}})
        raw.holdfast_entries.update_one({"name": "n"}, {"$set": {"body": 5}})
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as own, own.start_session() as session:
            async with await session.start_transaction():
                transaction = store.joined(session)
                assert list(await transaction.ainsert([invocation("c", key="k")], [])) == [None]
                entry = Entry(app="shop", kind="event-key", name="n", body=b"2")
                assert list(await transaction.aput_entries([entry])) == [None]
        assert sorted(one.id for one in await store.quarantined("shop")) == ["b", "n"]
        assert ids_of(await store.find("shop", Filter(), 9)) == ["c"]

    play(mongo_url, scenario)


def test_a_deep_check_finds_a_missing_page(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        for first, last in ((1, 1), (2, 3), (4, 4)):
            await store.append([page(first, last, run=run) for run in "abc"])
        assert "unreadable" not in await details(store)
        raw.holdfast_log.delete_one({"run": "b", "first": 2})
        assert "8 read, 1 unreadable (1 page)" in await details(store)
        assert "before it ends at 1" in await details(store)

    async def details(store: MongoStore) -> str:
        return " ".join(finding.detail for finding in await store.check(deep=True) if not finding.ok)

    play(mongo_url, scenario)


@pytest.mark.parametrize(
    "how",
    [
        {"$set": {"last": 1}},
        {"$set": {"events": "text"}},
        {"$set": {"run": "b"}},
        {"$set": {"first": 3}},
        {"$unset": {"epoch": ""}},
        {"$set": {"payloads": 7}},
    ],
    ids=str,
)
def test_a_damaged_page_stops_its_own_log_and_nothing_else(mongo_url: str, raw: Raw, how: dict[str, Any]) -> None:
    async def scenario(store: MongoStore) -> None:
        for first, last in ((1, 1), (2, 3), (4, 4)):
            await store.append([page(first, last, run=run) for run in "ab"])
        raw.holdfast_log.update_one({"run": "a", "first": 2}, how)
        with pytest.raises(CorruptRecord, match=r"the page 'a#2' cannot be read") as raised:
            await store.read_log("shop", "a", limit=9)
        assert raised.value.kind == "page"
        assert len(await store.read_log("shop", "a", limit=1)) == 1
        assert len(await store.read_log("shop", "b", limit=9)) == 3
        batch = [page(2, run="a", operation="x"), page(2, run="b", operation="x"), page(1, run="c")]
        behind, other, fresh = await store.append(batch)
        assert (behind, fresh) == (Behind(()), APPENDED)
        assert isinstance(other, Behind)
        assert len(other.pages) == 2
        assert await store.quarantined("shop") == [], "its place would be free"
        assert [finding.subject for finding in await store.check() if not finding.ok] == []
        (bad,) = [finding for finding in await store.check(deep=True) if not finding.ok]
        assert "a#2" in bad.detail
        assert await store.remove_log("shop", "a", before=1) == 3

    play(mongo_url, scenario)


def test_damaged_state_of_a_run_is_quarantined_and_its_log_stays(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        for id in "abc":
            await owned(store, id, run=RUN)
        await store.append([page(1, run="b")])
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"run.inbox": "?"}})
        assert list(await store.apply([pushing(id) for id in "abc"])) == [APPLIED, MISSING, APPLIED]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]
        assert len(await store.read_log("shop", "b", limit=9)) == 1

    play(mongo_url, scenario)


@pytest.mark.parametrize("commits", [True, False])
def test_a_page_is_appended_in_a_users_own_transaction(mongo_url: str, raw: Raw, commits: bool) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.append([page(1)])
        second = page(2, payloads=("d" * 64,))
        with raw.client.start_session() as session:
            session.start_transaction()
            transaction = store.joined(session)
            assert list(transaction.append([second], [])) == [APPENDED]
            assert list(transaction.append([second], [])) == [APPENDED], "repeated"
            assert list(transaction.append([page(2, operation="x")], [])) == [Behind((second,))]
            assert list(transaction.append([page(1, epoch=0, operation="y")], [])) == [Fenced(1)]
            assert len(await store.read_log("shop", "a", limit=9)) == 1, "not yet"
            assert not transaction.is_over
            session.commit_transaction() if commits else session.abort_transaction()
        assert list(await store.read_log("shop", "a", limit=9, after=1)) == ([second] if commits else [])
        if not commits:
            assert list(await store.append([page(2, operation="another")])) == [APPENDED]

    play(mongo_url, scenario)


def test_a_page_is_appended_in_an_asynchronous_transaction(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as own, own.start_session() as session:
            async with await session.start_transaction():
                assert list(await store.joined(session).aappend([page(1), page(1, run="b")], [])) == [APPENDED] * 2
        assert [len(await store.read_log("shop", run, limit=9)) for run in "ab"] == [1, 1]

    play(mongo_url, scenario)


def test_a_page_that_another_writes_meanwhile_is_a_transient_transaction_error(mongo_url: str, raw: Raw) -> None:
    async def scenario(store: MongoStore) -> None:
        with raw.client.start_session() as session:
            session.start_transaction()
            transaction = store.joined(session)
            assert list(transaction.append([page(1, run="b")], [])) == [APPENDED]
            await store.append([page(1, operation="of the next owner", epoch=2)])
            with pytest.raises(errors.OperationFailure) as raised:
                transaction.append([page(1)], [])
            assert raised.value.has_error_label("TransientTransactionError")
            session.abort_transaction()
        with raw.client.start_session() as session:
            session.start_transaction()
            assert list(store.joined(session).append([page(1)], [])) == [Fenced(2)]
            session.abort_transaction()

    play(mongo_url, scenario)
