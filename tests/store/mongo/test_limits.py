"""Limits on MongoDB: what they cost, and the moments between two commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from benchmarks.commands import Command, CommandCounter, Sent
from pymongo import MongoClient
from pymongo.database import Database
from tests.store.mongo.test_plans import bad_plans, explained, number
from tests.store.mongo.tools import Events, database_of, opened, play
from tests.support.proxy import Proxy

from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.limits import Limit, Release
from holdfast.model.records import InvocationRecord, lane_of
from holdfast.model.status import Status
from holdfast.store.contract import Filter, Order
from holdfast.store.mongo.queries import WHOLE_LOOK
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import LANE, START, TASK, ids_of, invocation, the, wish

pytestmark = [pytest.mark.xdist_group("mongo")]

Raw = Database[dict[str, Any]]
KEY = "k"
WAITING = Filter(statuses=frozenset({Status.CONCURRENCY_CONTROLLED}))


def limited(id: str, **fields: Any) -> InvocationRecord:
    return invocation(id, **({"limit_key": KEY} | fields))


def bounded(operation: str, most: int = 1, **fields: Any) -> Claim:
    return wish(operation, limits={TASK: Limit(most)}, **fields)


async def sent_by(store: MongoStore, url: str, work: Callable[[MongoStore], Awaitable[object]]) -> list[str]:
    """The commands that it sends, in order. An insert is of sentinels, and some finds are looks at whole lanes: both
    are made beside whatever is done, when it is time.
    """
    with CommandCounter(database_of(url)) as counter:
        await work(store)
    beside = [name == "insert" or command.get("comment") == WHOLE_LOOK for (name, _), command in counter.commands]
    return [name for ((name, _), _), other in zip(counter.commands, beside, strict=True) if not other]


# --- what it costs


def test_few_commands_take_what_is_limited(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([limited("a")])
        lone = await sent_by(store, mongo_url, lambda store: store.claim(bounded("1", limit=1)))
        assert lone == ["find", "find", "update"]  # candidates, who holds slots, take
        await store.insert([limited(f"b{n}", limit_key=f"k{n}") for n in range(5)] + [invocation("c")])
        many = await sent_by(store, mongo_url, lambda store: store.claim(bounded("2", limit=6)))
        assert many == ["find", "find", "update"]
        await store.insert([invocation("d")])
        free = await sent_by(store, mongo_url, lambda store: store.claim(bounded("3", limit=1)))
        assert free == ["find", "update"]
        held = await the(store, "a")
        await store.apply([changes.completed(held, result=b"", operation="end", at=START)])
        nobody = [Release(limit_key=f"k{n}", max_running=1) for n in range(5)]
        told = await sent_by(
            store, mongo_url, lambda store: store.release_waiters("shop", nobody, operation="r", at=START)
        )
        assert told == ["distinct"], "where nobody waits, an end costs one look, for however many keys"

    play(mongo_url, scenario)


def test_a_claim_of_tasks_without_limits_costs_what_it_always_did(mongo_url: str) -> None:
    """Somebody knows of limits, but not of tasks that it asks for: one command."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a"), limited("b")])
        for operation in "12":
            claim = wish(operation, limit=1, limits={"shop:other": Limit(1)})
            assert await sent_by(store, mongo_url, lambda store: store.claim(claim)) == ["findAndModify"]  # noqa: B023
        assert [record.slot for record in await store.find("shop", Filter(), 9)] == [None, None]

    play(mongo_url, scenario)


CROWD = 10_000
FEW_KEYS = 400  # a few windows


@pytest.mark.slow
def test_ten_thousand_limited_ones_at_the_head_are_passed_without_a_scan(mongo_url: str, raw: Raw) -> None:
    """Those of a task without a limit are not even seen; the others are blocked once, window by window."""
    free = lane_of("default", "shop:free")
    sent: list[tuple[Sent, Command]] = []

    async def scenario(store: MongoStore) -> None:
        for first in range(0, CROWD, 1000):
            await store.insert([limited(f"{n:05}", priority=9) for n in range(first, first + 1000)])
        await store.insert([invocation("free", task="shop:free"), invocation("last")])
        with CommandCounter(database_of(mongo_url)) as counter:
            (got,) = (await store.claim(bounded("1", lanes=(free,), limit=1))).records
            assert got.id == "free"
            assert ids_of((await store.claim(bounded("2", limit=5))).records) == ["00000"]
        sent.extend(counter.commands)
        claims = 0
        while not (await store.claim(bounded(f"more {claims}", limit=5))).records:
            claims += 1
        assert claims < CROWD / 200
        assert (await the(store, "last")).status is Status.RUNNING
        assert await store.counts("shop") == {Status.RUNNING: 3, Status.CONCURRENCY_CONTROLLED: CROWD - 1}

    play(mongo_url, scenario)
    assert bad_plans(raw, sent) == []
    for key, command in sent:
        if key[0] in {"find", "findAndModify", "distinct"}:
            assert number("totalKeysExamined", explained(raw, command)) < FEW_KEYS, (key, command)


@pytest.mark.slow
def test_a_release_does_not_pay_for_ten_thousand_who_wait(mongo_url: str, raw: Raw) -> None:
    sent: list[tuple[Sent, Command]] = []

    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(f"{n:05}") for n in range(CROWD)])
        raw.holdfast_invocations.update_many(
            {}, [{"$set": {"status": "concurrency_controlled", "ready": "$$REMOVE"}}]
        )  # a shortcut: what their history says does not matter here
        with CommandCounter(database_of(mongo_url)) as counter:
            await store.release_waiters("shop", [Release(limit_key=KEY, max_running=1)], operation="r", at=START)
            assert await store.waiting_keys("shop") == {KEY: 0}
        sent.extend(counter.commands)

    play(mongo_url, scenario)
    for key, command in sent:
        if key[0] in {"find", "findAndModify", "distinct"}:
            assert number("totalKeysExamined", explained(raw, command)) < 10, (key, command)


# --- between two commands


class Interrupted(MongoStore):
    """Something happens between a claimer's look at the slots and what it does then."""

    between: Callable[[], Awaitable[object]] | None = None

    def interrupt(self, between: Callable[[], Awaitable[object]]) -> None:
        carry_out = self._claims._carry_out
        happened = False

        async def later(*args: Any) -> Any:
            nonlocal happened
            if not happened:
                happened = True
                await between()
            return await carry_out(*args)

        self._claims._carry_out = later  # type: ignore[assignment, method-assign]


def test_a_slot_given_back_while_somebody_is_being_blocked_is_not_lost(mongo_url: str) -> None:
    """The holder ends and looks for who waits, and finds nobody: the other one is about to, having seen no free slot.
    The claimer looks once more after it has blocked it.
    """

    async def scenario(store: MongoStore) -> None:
        store.__class__ = Interrupted
        assert isinstance(store, Interrupted)
        await store.insert([limited("a")])
        (holder,) = (await store.claim(bounded("first"))).records
        await store.insert([limited("b"), limited("c")])

        async def end_and_release() -> None:
            await store.apply([changes.completed(holder, result=b"", operation="end", at=START)])
            assert not await store.release_waiters(
                "shop", [Release(limit_key=KEY, max_running=1)], operation="r", at=START
            )

        store.interrupt(end_and_release)
        claimed = await store.claim(bounded("second", limit=1))
        assert claimed.released == (LANE,)
        assert ids_of(claimed.records) == ["b"], "it goes on in the same claim, and keeps its place"
        assert ids_of(await store.find("shop", WAITING, 9)) == ["c"]

    play(mongo_url, scenario)


def test_a_slot_that_somebody_else_takes_first_is_left_to_it(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        store.__class__ = Interrupted
        assert isinstance(store, Interrupted)
        await store.insert([limited("a"), limited("b", priority=-1), invocation("free", priority=-2)])

        async def take_it() -> None:
            async with opened(mongo_url) as other:
                got = await other.claim(bounded("theirs", ids=("b",), owner="runner/2"))
                assert ids_of(got.records) == ["b"]

        store.interrupt(take_it)
        claimed = await store.claim(bounded("ours", limit=2))
        assert ids_of(claimed.records) == ["free"]
        assert ids_of(await store.find("shop", WAITING, 9)) == ["a"]
        assert ids_of(await store.find("shop", Filter(limit_key=KEY), 9, order=Order.SLOT)) == ["b"]

    play(mongo_url, scenario)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_thirty_claimers_share_the_slots_of_a_key(mongo_url: str, most: int) -> None:
    """Each on a store of its own: they meet only in the database."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(f"{n:02}") for n in range(30)])
        others = [opened(mongo_url) for _ in range(30)]
        stores = await asyncio.gather(*[each.__aenter__() for each in others])
        try:
            claims = [bounded(f"{n}", most, limit=2, owner=f"runner/{n}") for n in range(30)]
            got = await asyncio.gather(*[one.claim(claim) for one, claim in zip(stores, claims, strict=True)])
            got.append(await store.claim(bounded("the rest", most, limit=30)))  # those who collide may leave something
        finally:
            await asyncio.gather(*[each.__aexit__(None, None, None) for each in others])
        taken = [record for each in got for record in each.records]
        assert len(taken) == most
        assert {record.slot for record in taken} == {f"{KEY}#{n}" for n in range(most)}
        assert len(await store.find("shop", WAITING, 99)) == 30 - most

    play(mongo_url, scenario)


# --- replies that are lost


@pytest.mark.usefixtures("hasty_driver")
@pytest.mark.parametrize("lost", ["update", "find"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_claim_with_slots_is_recognised_when_its_reply_was_lost(
    replica_set: str, mongo_url: str, lost: str, times: int
) -> None:
    hosts = replica_set.partition("://")[2].partition("/")[0].rpartition("@")[2]
    events = Events()

    async def scenario(store: MongoStore) -> None:
        keys = [f"k{n % 4}" for n in range(12)]
        await store.insert([limited(f"{n:02}", limit_key=key) for n, key in enumerate(keys)])
        proxy.lose_replies(lost, "holdfast_invocations", times)
        claimed = await store.claim(bounded("op", 2, limit=8))
        assert ids_of(claimed.records) == [f"{n:02}" for n in range(8)]
        records = await store.find("shop", Filter(), 99)
        assert {(record.status, record.epoch) for record in records} == {
            (Status.RUNNING, 1),
            (Status.CONCURRENCY_CONTROLLED, 0),
        } or {record.status for record in records} == {Status.RUNNING, Status.REGISTERED}
        slots = [record.slot for record in records if record.status is Status.RUNNING]
        assert sorted(slot or "" for slot in slots) == sorted(f"k{n}#{m}" for n in range(4) for m in range(2))

    with Proxy(hosts.partition(",")[0]) as proxy:
        options = "directConnection=true&retryWrites=false&retryReads=false&serverMonitoringMode=poll"
        play(f"mongodb://{proxy.address}/{database_of(mongo_url)}?{options}", scenario, events)
        assert proxy.lost >= 1


def test_a_waiter_that_cannot_be_released_is_set_aside_and_the_next_one_goes(
    mongo_url: str, client: MongoClient[dict[str, Any]]
) -> None:
    raw = client[database_of(mongo_url)]

    async def scenario(store: MongoStore) -> None:
        await store.insert([limited(id) for id in "abc"])
        await store.claim(bounded("op"))
        raw.holdfast_invocations.update_one({"id": "b"}, {"$set": {"history": "?"}})
        gone = await store.release_waiters("shop", [Release(limit_key=KEY)], operation="r", at=START)
        assert ids_of(gone) == ["c"]
        assert [each.id for each in await store.quarantined("shop")] == ["b"]

    play(mongo_url, scenario)


@pytest.mark.parametrize("limit", [1, 5])
def test_a_bad_document_among_limited_ones_is_set_aside_and_the_others_are_taken(
    mongo_url: str, client: MongoClient[dict[str, Any]], limit: int
) -> None:
    raw = client[database_of(mongo_url)]

    async def scenario(store: MongoStore) -> None:
        await store.insert([limited("a"), limited("b"), limited("c", limit_key="other"), invocation("d")])
        raw.holdfast_invocations.update_one({"id": "a"}, {"$set": {"history": "?"}})
        got: list[str | None] = []
        for turn in range(4):
            got += ids_of((await store.claim(bounded(f"{turn}", limit=limit))).records)
        assert sorted(str(id) for id in got) == ["b", "c", "d"]
        assert [each.id for each in await store.quarantined("shop")] == ["a"]

    play(mongo_url, scenario)
