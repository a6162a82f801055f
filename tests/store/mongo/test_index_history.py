"""MongoDB keeps removed index entries for minutes; nothing that is asked often may step over them, or hide behind them.

`keysExamined` does not count them: `serverStatus` does.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from pymongo import MongoClient
from pymongo.database import Database
from tests.store.mongo.tools import auntil, database_of, opened, play, until
from tests.support.mongod import fresh_database
from tests.support.patience import patient

from holdfast import App
from holdfast.clock import SystemClock
from holdfast.ids import Ids
from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.records import READY, Hint, InvocationRecord, lane_of, registered, work_hint
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Filter, Order
from holdfast.store.mongo.lane_scanner import LaneScanner
from holdfast.store.mongo.marks import FRESH_SECONDS, Marks, Seen
from holdfast.store.mongo.store import MongoStore

pytestmark = [pytest.mark.xdist_group("mongo")]

Raw = Database[dict[str, Any]]

APP, TASK = "shop", "shop:echo"
LANE = lane_of("default", TASK)
FEW = 1000
MOST_HIDDEN_SECONDS = 2.0
BUSY_SECONDS = 1.5  # that a busy machine may add
_COUNTERS = [f"Total number of entries skipped by cursor {way} calls" for way in ("next", "prev")]
ids = Ids(SystemClock(), random.Random(7))


def skipped(client: MongoClient[dict[str, Any]]) -> int:
    """How many removed index entries cursors of the server have stepped over so far."""
    cursor = client.admin.command("serverStatus")["wiredTiger"]["cursor"]
    return sum(cursor[name] for name in _COUNTERS)


def record(at: float, **fields: Any) -> InvocationRecord:
    given: dict[str, Any] = {"id": ids.new(), "app": APP, "task": TASK, "arguments": b"\x90"}
    facts = given | {"created_at": at, "due_at": at} | fields
    return registered(InvocationRecord(**facts), operation=ids.operation(), at=at)


def wish(store: MongoStore, limit: int) -> Claim:
    facts: dict[str, Any] = {"app": APP, "lanes": (LANE,), "owner": "r1/1", "operation": ids.operation()}
    return Claim(limit=limit, at=store.now(), **facts)


def pass_through(raw: Raw, count: int) -> None:
    """Let so many invocations go from REGISTERED over RUNNING to SUCCESS, as far as the indexes can tell."""
    now = time.time()
    document = {
        "_id": {"$concat": [f"{APP}|", "$n"]},
        "id": "$n",
        "app": APP,
        "task": TASK,
        "queue": "default",
        "lane": LANE,
        "rank": {"$toInt": "0"},
        "due_at": {"$subtract": [now, {"$rand": {}}]},
        "status": "registered",
        "ready": True,
    }
    number = {"$concat": ["00passed", {"$toString": "$n"}]}
    numbers = [{"$documents": [{"n": {"$range": [0, count]}}]}, {"$unwind": "$n"}, {"$set": {"n": number}}]
    raw.aggregate([*numbers, {"$replaceWith": document}, {"$merge": "holdfast_invocations"}])
    began: list[dict[str, Any]] = [
        {"$set": {"status": "running", "owner": "r1/1", "claim_token": "$id", "ready": "$$REMOVE"}}
    ]
    ended = {"$set": {"status": "success", "owner": None}}
    raw.holdfast_invocations.update_many({"app": APP}, began)
    raw.holdfast_invocations.update_many({"app": APP}, ended)


PASSED = 15_000


@pytest.fixture(scope="module")
def busy_url(replica_set: str, client: MongoClient[dict[str, Any]]) -> Iterator[str]:
    """A database through which much has just passed."""
    with fresh_database(replica_set) as url:
        play(url, lambda store: store.lanes(APP))  # makes the schema
        pass_through(client[database_of(url)], PASSED)
        yield url


@pytest.mark.slow
def test_claims_and_lists_step_over_few_removed_entries(busy_url: str, client: MongoClient[dict[str, Any]]) -> None:
    async def scenario(store: MongoStore) -> None:
        async def lone() -> None:
            await store.insert([record(store.now())])
            (got,) = (await store.claim(wish(store, 1))).records
            await store.apply([changes.completed(got, result=b"", operation=ids.operation(), at=store.now())])

        async def batch() -> None:
            await store.insert([record(store.now()) for _ in range(20)])
            got = (await store.claim(wish(store, 20))).records
            assert len(got) == 20
            await store.apply(
                [changes.completed(one, result=b"", operation=ids.operation(), at=store.now()) for one in got]
            )

        async def none(limit: int) -> None:
            claimed = await store.claim(wish(store, limit))
            assert (claimed.records, claimed.next_due_at) == ((), None)

        steps: dict[str, Callable[[], Awaitable[object]]] = {
            "insert, claim and end one": lone,
            "insert, claim and end twenty": batch,
            "claim one of nothing": lambda: none(1),
            "claim ten of nothing": lambda: none(10),
        }
        passing = {Status.REGISTERED, Status.RUNNING}  # of these, the entries that were removed are asked for
        for status in sorted(set(Status) - passing):
            where = Filter(statuses=frozenset({status}))
            steps[f"find {status}"] = lambda where=where: store.find(APP, where, 20)  # type: ignore[misc]
        steps["start_limits"] = lambda: store.find(APP, Filter(), 100, order=Order.START_BY, set_aside=True)
        steps["outboxes"] = lambda: store.find(APP, Filter(until=store.now()), 100, order=Order.OUTBOX, set_aside=True)
        steps["waiting_keys"] = lambda: store.waiting_keys(APP)
        steps["find all"] = lambda: store.find(APP, Filter(), 20)
        await lone()  # the first look has to be at all of it
        await auntil(lambda: has_sentinels(client, busy_url))
        counted: dict[str, int] = {}
        for name, step in steps.items():
            for _ in range(3):  # a look at the whole lane comes now and then, and is nobody's in particular
                before = skipped(client)
                await step()
                counted[name] = min(skipped(client) - before, counted.get(name, PASSED))
        assert {name: count for name, count in counted.items() if count > FEW} == {}
        for status in passing:  # each at most once: nobody goes back, or over what was removed elsewhere
            before = skipped(client)
            await store.find(APP, Filter(statuses=frozenset({status})), 20)
            assert skipped(client) - before <= PASSED + FEW, status

    play(busy_url, scenario)


def has_sentinels(client: MongoClient[dict[str, Any]], url: str) -> bool:
    there = client[database_of(url)].holdfast_invocations
    return there.count_documents({"_id.sentinel": {"$exists": True}, "lane": LANE}) == 2


@pytest.mark.slow
def test_a_lone_task_with_all_that_a_runner_does_steps_over_few_removed_entries(
    busy_url: str, client: MongoClient[dict[str, Any]]
) -> None:
    with App(busy_url, name=APP) as app:
        echo = app.task(name=TASK)(echoed)
        with app.runner():
            for number in range(5):
                echo.submit(number).result(timeout=patient(10))
            until(lambda: has_sentinels(client, busy_url))
            before, count = skipped(client), 40
            for number in range(count):
                assert echo.submit(number).result(timeout=patient(10)) == number
            assert (skipped(client) - before) / count <= FEW


@pytest.mark.faults
def test_after_fifty_thousand_tasks_through_a_runner_a_lone_one_steps_over_few_removed_entries(
    new_url: str, client: MongoClient[dict[str, Any]]
) -> None:
    count, left, done = 50_000, iter(range(49_999)), threading.Event()
    with App(new_url, name=APP) as app:

        @app.task(name=TASK)
        def count_down(number: int) -> int:
            if next(left, None) is None:
                done.set()
            return number

        with app.runner():
            before = skipped(client)
            count_down.map(range(count))
            assert done.wait(300)
            assert (skipped(client) - before) / count <= FEW
            for number in range(5):
                count_down.submit(number).result(timeout=patient(10))
            before = skipped(client)
            for number in range(50):
                count_down.submit(number).result(timeout=patient(10))
            assert (skipped(client) - before) / 50 <= FEW


def echoed(number: int) -> int:
    return number


# --- nothing stays hidden behind a mark


LATE = [{"due_at": -3600.0}, {"priority": -5}, {"priority": 7}, {"priority": 7, "due_at": -3600.0}]


def late(now: float, how: dict[str, Any]) -> InvocationRecord:
    return record(now, **how | {"due_at": now + how.get("due_at", 0.0)})


@pytest.mark.parametrize("limit", [1, 5])
def test_what_arrives_behind_the_marks_without_a_hint_is_claimed_within_two_seconds(mongo_url: str, limit: int) -> None:
    async def scenario(ours: MongoStore) -> None:
        async with opened(mongo_url) as theirs:
            await theirs.insert([record(ours.now())])
            assert len((await ours.claim(wish(ours, 5))).records) == 1
            assert not (await ours.claim(wish(ours, 5))).records
            hidden = [late(ours.now(), how) for how in LATE]
            await theirs.insert([one for one in hidden if one.due_at < ours.now() - 60])
            assert not (await ours.claim(wish(ours, limit))).records, "else this test says nothing"
            began = time.monotonic()
            await theirs.insert([one for one in hidden if one.due_at >= ours.now() - 60])
            missed = {one.id for one in hidden}
            while missed:
                missed -= {one.id for one in (await ours.claim(wish(ours, limit))).records}
                assert time.monotonic() - began <= MOST_HIDDEN_SECONDS + BUSY_SECONDS, f"{len(missed)} are hidden"
                await asyncio.sleep(0.02)

    play(mongo_url, scenario)


def test_a_busy_claimer_of_single_ones_is_told_of_what_is_hidden(mongo_url: str) -> None:
    """It gets one whenever it asks for one, so it never finds too little, and looks no more."""
    told: list[Hint] = []

    async def scenario(ours: MongoStore) -> None:
        hints = ours.hints()
        assert hints is not None
        hints.listen(READY, told.append)
        await auntil(lambda: hints.trust, what="the change stream is open")
        await ours.claim(wish(ours, 5))
        async with opened(mongo_url) as theirs:
            await theirs.insert([hidden := record(ours.now() - 3600)])
            told.clear()
            await ours.insert([new := record(ours.now())])
            assert [one.id for one in (await ours.claim(wish(ours, 1))).records] == [new.id]
            waited = await auntil(lambda: any(LANE in hint.subjects for hint in told))
        assert waited <= MOST_HIDDEN_SECONDS + BUSY_SECONDS
        assert [one.id for one in (await ours.claim(wish(ours, 1))).records] == [hidden.id]

    play(mongo_url, scenario)


@pytest.mark.parametrize("how", LATE, ids=str)
def test_a_hint_that_names_something_older_lowers_the_marks_of_others(mongo_url: str, how: dict[str, Any]) -> None:
    async def scenario(ours: MongoStore) -> None:
        heard: list[Hint] = []
        async with opened(mongo_url) as theirs:
            listening, sending = ours.hints(), theirs.hints()
            assert listening is not None
            assert sending is not None
            listening.listen(READY, heard.append)
            await auntil(lambda: listening.trust, what="the change stream is open")
            await ours.claim(wish(ours, 5))
            hidden = late(ours.now(), how)
            await theirs.insert([hidden])
            heard.clear()
            sending.send([work_hint([(hidden.lane, hidden.due_at, hidden.priority)])])
            await auntil(lambda: heard)
            assert heard[0].since == hidden.due_at
            assert [one.id for one in (await ours.claim(wish(ours, 1))).records] == [hidden.id]

    play(mongo_url, scenario)


def test_work_that_goes_back_to_its_old_place_is_claimed_at_once(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([old := record(store.now() - 3600)])
        (got,) = (await store.claim(wish(store, 1))).records
        await store.claim(wish(store, 5))  # nothing is left, and the marks say so
        why = "its owner is dead"
        await store.apply([changes.recovered(got, by="r9", operation=ids.operation(), at=store.now(), why=why)])
        assert [one.id for one in (await store.claim(wish(store, 1))).records] == [old.id]

    play(mongo_url, scenario)


def test_delayed_work_of_another_priority_is_claimed_when_it_is_due(mongo_url: str) -> None:
    async def scenario(ours: MongoStore) -> None:
        async with opened(mongo_url) as theirs:
            await ours.claim(wish(ours, 5))
            await theirs.insert([later := record(ours.now(), due_at=ours.now() + 0.3, priority=4)])
            claimed = await ours.claim(wish(ours, 5))
            assert (claimed.records, claimed.next_due_at) == ((), later.due_at)
            await auntil(lambda: ours.now() >= later.due_at)
            assert [one.id for one in (await ours.claim(wish(ours, 1))).records] == [later.id]

    play(mongo_url, scenario)


def test_a_runner_finds_what_somebody_put_behind_its_marks_while_it_is_busy(mongo_url: str, raw: Raw) -> None:
    """A submitter that stood still between making an invocation and storing it, and died before its hint."""
    with App(mongo_url, name=APP) as app:
        echo = app.task(name=TASK)(echoed)
        with app.runner():
            echo.submit(1).result(timeout=patient(10))
            template = raw.holdfast_invocations.find_one({"app": APP, "task": TASK})
            assert template is not None
            hidden = ids.new()
            late = record(time.time() - 3600, id=hidden, arguments=bytes(template["arguments"]))
            play(mongo_url, lambda store: store.insert([late]))
            began = time.monotonic()
            while app.invocation(hidden).status not in FINAL:
                echo.submit(2).result(timeout=patient(10))
                assert time.monotonic() - began <= MOST_HIDDEN_SECONDS + BUSY_SECONDS
            assert app.invocation(hidden).status is Status.SUCCESS


# --- the marks alone


class Queue:
    """What lies in a queue, and who was told of it. Everything that was told of must be within the marks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.marks = Marks(lambda: self.now)
        self.there: dict[int, Seen] = {}
        self.told: set[int] = set()
        self.number = 0
        self.look()

    def arrive(self) -> None:
        self.number += 1
        rank = self.rng.choice([0.0, 0.0, -3.0, 2.0])
        due_at = self.now + self.rng.choice([0.0, 0.0, -0.2, -50.0, 5.0])
        self.there[self.number] = Seen(self.rng.choice("ab"), rank, due_at)
        how = self.rng.random()
        if how < 0.4:
            self.marks.lower(APP, *self.there[self.number])
        elif how < 0.6:
            seen = self.there[self.number]
            self.marks.take_hint(Hint(READY, (seen.lane,), 1, seen.due_at, (int(-seen.rank),)))
        elif how < 0.75 and due_at <= self.now:
            self.marks.forget(APP, [self.there[self.number].lane])
        elif how < 0.8 and due_at <= self.now:
            self.marks.take_hint(Hint(READY, ()))  # hints may have been lost
        else:
            return  # it is found by a look at the whole lane
        self.told.add(self.number)

    def look(self) -> None:
        limit, at = self.rng.choice([1, 3, 50]), self.now
        look = self.marks.begin(APP, "ab", whole=self.rng.random() < 0.2)
        within = [
            (number, seen)
            for number, seen in self.there.items()
            if seen.due_at <= at
            and any(
                each.lane == seen.lane and (each.rank is None or (each.rank == seen.rank and seen.due_at >= each.since))
                for each in look.ranges
            )
        ]
        found = sorted(within, key=lambda item: (item[1].rank, item[1].due_at))[:limit]
        for _ in range(self.rng.randrange(3)):
            self.arrive()  # while the look is under way, which does not see it
        self.marks.end(look, [seen for _, seen in found], limit, at)
        for number, _ in found:
            del self.there[number]
            self.told.discard(number)

    def hidden(self) -> list[Seen]:
        """Those that somebody was told of, that are due, and that a look from the marks on would not see. A rank that
        no look got to is no matter: who finds too little looks for such ranks.
        """
        known = set(self.marks.known(APP, "ab"))
        return [
            seen
            for number, seen in self.there.items()
            if number in self.told and seen.due_at <= self.now and self.marks.is_behind(APP, seen)
            if (seen.lane, seen.rank) in known or not self.marks.may_hide_ranks(APP, [seen.lane])
        ]


@pytest.mark.parametrize("seed", range(30))
def test_what_was_told_of_is_never_behind_a_mark(seed: int) -> None:
    queue = Queue(seed)
    for _ in range(300):
        queue.now += queue.rng.random()
        queue.rng.choice([queue.arrive, queue.look])()
        assert queue.hidden() == []


def test_a_look_that_ends_late_does_not_raise_a_mark_over_what_another_saw() -> None:
    marks = Marks(lambda: 1000.0)
    first = marks.begin(APP, "a")
    marks.end(first, [], 10, 1000.0)
    slow, whole = marks.begin(APP, "a"), marks.begin(APP, "a", whole=True)
    old = Seen("a", 0.0, 500.0)
    marks.end(whole, [old], 10, 1000.0)
    marks.end(slow, [], 10, 1000.0)
    assert not marks.is_behind(APP, old)


def test_what_this_process_returns_to_a_queue_is_not_behind_its_own_marks() -> None:
    scanner = LaneScanner(lambda name: None, lambda: 1000.0, lambda: 1000.0, print)  # type: ignore[arg-type,return-value]
    marks, taken = scanner.marks, replace(record(400.0), status=Status.RUNNING, owner="r1/1", epoch=1)
    changed = changes.handed_back(taken, operation="h", at=500.0, why="a test")
    for change in (replace(changed, due_at=500.0), changed):  # at another place, or at its old one
        marks.end(marks.begin(APP, [LANE], whole=True), [], 10, 1000.0)
        assert marks.is_behind(APP, Seen(LANE, 0.0, 500.0))
        scanner.note_changes([change])
        assert not marks.is_behind(APP, Seen(LANE, 0.0, 500.0))


def test_whole_lanes_are_looked_at_often_enough() -> None:
    assert FRESH_SECONDS < MOST_HIDDEN_SECONDS


# --- sentinels are nobody's business


def test_nobody_meets_a_sentinel(mongo_url: str, raw: Raw, client: MongoClient[dict[str, Any]]) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([one := record(store.now()), other := record(store.now(), task="shop:other")])
        claimed = await store.claim(wish(store, 5))
        assert [each.id for each in claimed.records] == [one.id]
        await auntil(lambda: has_sentinels(client, mongo_url))
        assert {each["_id"]["sentinel"] for each in raw.holdfast_invocations.find({"_id.sentinel": {"$exists": True}})}
        old: dict[str, Any] = {"app": APP, "lane": LANE, "ready": True}  # as a Holdfast asks that knows no sentinels
        assert raw.holdfast_invocations.count_documents(old | {"due_at": {"$lte": store.now() + 1e9}}) == 0
        assert raw.holdfast_invocations.count_documents(old | {"due_at": {"$gte": float("-inf")}}) == 0
        everything = await store.find(APP, Filter(), 100)
        assert {each.id for each in everything} == {one.id, other.id}
        for status in Status:
            listed = await store.find(APP, Filter(statuses=frozenset({status})), 100)
            assert {each.id for each in listed} <= {one.id, other.id}
        assert await store.counts(APP) == {Status.RUNNING: 1, Status.REGISTERED: 1}
        assert await store.lanes(APP) == [other.lane]
        assert await store.owners(APP) == ["r1/1"]
        (depth,) = await store.queue_depths(APP, store.now())
        assert (depth.running, depth.waiting, depth.scheduled) == (1, 1, 0)
        assert await store.find(APP, Filter(), 10, order=Order.START_BY) == []
        assert await store.find(APP, Filter(), 10, order=Order.OUTBOX) == []
        assert await store.waiting_keys(APP) == {}
        assert await store.remove_expired(APP, store.now() + 1e9, 100) == 0
        records = [finding for finding in await store.check(deep=True) if finding.subject == "records"]
        assert [finding.detail for finding in records] == ["2 read, 0 unreadable"]
        for other_app in ("", APP[:-1], APP + "~core"):
            assert await store.find(other_app, Filter(), 10) == []
            assert await store.counts(other_app) == {}
            assert await store.lanes(other_app) == []
            assert await store.owners(other_app) == []

    play(mongo_url, scenario)


def test_a_collection_that_takes_no_sentinel_is_claimed_from_nevertheless(mongo_url: str, raw: Raw) -> None:
    raw.command("collMod", "holdfast_invocations", validator={"_id": {"$type": "string"}})
    try:

        async def scenario(store: MongoStore) -> None:
            await store.insert([record(store.now())])
            assert len((await store.claim(wish(store, 5))).records) == 1
            await asyncio.sleep(0.1)  # they are made beside
            await store.insert([record(store.now())])
            assert len((await store.claim(wish(store, 1))).records) == 1

        play(mongo_url, scenario)
    finally:
        raw.command("collMod", "holdfast_invocations", validator={})
