"""A reply that is lost after the write was carried out: asked again, the store recognises its own work.

The driver repeats some writes by itself, but not all, and only once; here it is told not to, so that what is tested is
the store's own memory: the operation ids in what it has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.commands import CommandCounter
from pymongo import MongoClient
from pymongo.database import Database
from tests.store.mongo.tools import Events, auntil, database_of, nudge, play
from tests.support.proxy import Proxy

from holdfast.errors import StoreUnavailable
from holdfast.model import changes
from holdfast.model.changes import Applied
from holdfast.model.log import APPENDED, Behind
from holdfast.model.status import Status
from holdfast.store.contract import Filter
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import (
    LANE,
    RUN,
    START,
    ids_of,
    in_status,
    invocation,
    owned,
    page,
    pushing,
    runner,
    the,
    wish,
)

pytestmark = [pytest.mark.xdist_group("mongo"), pytest.mark.usefixtures("hasty_driver")]

Raw = Database[dict[str, Any]]
INVOCATIONS = "holdfast_invocations"
RUNNING = Filter(statuses=frozenset({Status.RUNNING}))

times = pytest.mark.parametrize("times", [1, 2, 5])


@pytest.fixture
def proxy(replica_set: str) -> Iterator[Proxy]:
    hosts = replica_set.partition("://")[2].partition("/")[0].rpartition("@")[2]
    with Proxy(hosts.partition(",")[0]) as proxy:
        yield proxy


@pytest.fixture
def url(proxy: Proxy, mongo_url: str) -> str:
    """The module's database, through the proxy."""
    options = "directConnection=true&retryWrites=false&retryReads=false&serverMonitoringMode=poll"
    return f"mongodb://{proxy.address}/{database_of(mongo_url)}?{options}"


@times
def test_an_insert_is_recognised(url: str, raw: Raw, proxy: Proxy, times: int) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("taken", operation="somebody else's")])
        proxy.lose_replies("insert", INVOCATIONS, times)
        stored = await store.insert([invocation("a"), invocation("taken"), invocation("b")])
        assert list(stored) == [True, False, True]
        assert len((await the(store, "a")).history) == 1

    play(url, scenario, events)
    assert proxy.lost == times == len(events.named("retry"))
    assert raw[INVOCATIONS].count_documents({}) == 3


@times
def test_a_lone_claim_is_recognised(url: str, proxy: Proxy, times: int) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(id) for id in "abc"])
        proxy.lose_replies("findAndModify", INVOCATIONS, times)
        claimed = await store.claim(wish(limit=1))
        assert ids_of(claimed.records) == ["a"]
        assert (await the(store, "a")).epoch == 1
        assert ids_of(await store.find("shop", RUNNING, 10)) == ["a"]

    play(url, scenario)
    assert proxy.lost == 1, "the second try finds what the first one got"


@pytest.mark.parametrize(
    "lost", ["update", "find"], ids=["the reply to the update is lost", "the reply to the read-back is lost"]
)
@times
def test_a_claim_of_many_is_recognised(url: str, proxy: Proxy, times: int, lost: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(f"i{n:02}") for n in range(30)])
        proxy.lose_replies(lost, INVOCATIONS, times)
        first = await store.claim(wish("first", limit=10))
        assert ids_of(first.records) == [f"i{n:02}" for n in range(10)]
        second = await store.claim(wish("second", limit=20))
        assert ids_of(second.records) == [f"i{n:02}" for n in range(10, 30)]
        everything = await store.get("shop", [f"i{n:02}" for n in range(30)])
        assert {(record.epoch, record.version, record.attempt) for record in everything if record} == {(1, 3, 1)}

    play(url, scenario)
    assert 1 <= proxy.lost <= times


@times
def test_ends_are_recognised(url: str, proxy: Proxy, times: int) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        records = [await owned(store, id) for id in "abc"]
        ends = [changes.completed(r, result=b"\x07", operation=f"end {r.id}", at=START + 1) for r in records]
        proxy.lose_replies("update", INVOCATIONS, times)
        verdicts = await store.apply(ends)
        assert all(isinstance(verdict, Applied) for verdict in verdicts)
        for id in "abc":
            record = await the(store, id)
            assert (record.status, record.version, record.result) == (Status.SUCCESS, 4, b"\x07")

    play(url, scenario, events)
    assert proxy.lost == times == len(events.named("retry"))


def test_changes_of_one_invocation_in_a_row_are_recognised_one_by_one(url: str, proxy: Proxy) -> None:
    async def scenario(store: MongoStore) -> None:
        record = await owned(store, "a", start=False)
        start = changes.started(record, operation="start", at=START + 1)
        end = changes.completed(record, result=b"\x01", operation="end", at=START + 2)
        proxy.lose_replies("update", INVOCATIONS, 2)
        assert all(isinstance(verdict, Applied) for verdict in await store.apply([start, end]))
        operations = [entry.operation for entry in (await the(store, "a")).history]
        assert operations == ["insert a", "claim a", "start", "end"]

    play(url, scenario)


def test_a_roster_entry_is_not_doubled(url: str, raw: Raw, proxy: Proxy) -> None:
    async def scenario(store: MongoStore) -> None:
        proxy.lose_replies("update", "holdfast_runners", 2)
        await store.enrol(runner("r"))
        proxy.lose_replies("findAndModify", "holdfast_runners", 1)
        assert await store.heartbeat("shop", "r")
        proxy.lose_replies("delete", "holdfast_runners", 1)
        await store.remove_runner("shop", "r")

    play(url, scenario)
    assert proxy.lost == 4
    assert raw.holdfast_runners.count_documents({}) == 0


@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize("limit", [1, 10])
def test_a_claim_asked_again_waits_for_what_its_first_try_is_still_doing(
    url: str, client: MongoClient[dict[str, Any]], proxy: Proxy, limit: int
) -> None:
    """The connection breaks while the first try waits for the majority, so a read of what the majority has shows
    nothing yet. To claim others instead would leave the first ones RUNNING in our name, with nobody to do them.
    """
    command = "findAndModify" if limit == 1 else "update"

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(f"i{n:02}") for n in range(3 * limit)])
        proxy.lose_replies(command, INVOCATIONS, 1, wait=False)
        with CommandCounter(database_of(url)) as sent:
            with majority_held_up(client):
                claiming = asyncio.create_task(store.claim(wish(limit=limit, owner="me")))
                await auntil(lambda: sum(n for (name, _), n in sent.all.items() if name in WRITES) == 2, seconds=3)
            claimed = await claiming
        running = await store.find("shop", RUNNING, 100)
        assert sorted(map(str, ids_of(running))) == ids_of(claimed.records) == [f"i{n:02}" for n in range(limit)]

    play(url, scenario)
    assert proxy.lost == 1


@pytest.mark.usefixtures("failpoints")
def test_so_do_an_insert_and_an_end(url: str, client: MongoClient[dict[str, Any]], proxy: Proxy) -> None:
    async def scenario(store: MongoStore) -> None:
        record = await owned(store, "held")
        await store._scanner.close()  # what it writes a moment after a claim would be lost instead
        end = changes.completed(record, result=b"\x01", operation="end", at=START + 1)
        for command, ask in (
            ("insert", lambda: store.insert([invocation("new")])),
            ("update", lambda: store.apply([end])),
        ):
            proxy.lose_replies(command, INVOCATIONS, 1, wait=False)
            with CommandCounter(database_of(url)) as sent:
                with majority_held_up(client):
                    asking = asyncio.create_task(ask())
                    await auntil(lambda: sent.all[command, INVOCATIONS] == 2, seconds=3)  # noqa: B023
                (answer,) = await asking
            assert answer in (True, Applied(), Applied(again=True)), command

    play(url, scenario)
    assert proxy.lost == 2


WRITES = frozenset({"update", "findAndModify"})


@contextmanager
def majority_held_up(client: MongoClient[dict[str, Any]]) -> Iterator[None]:
    """What is written is there, but for the majority it is not."""
    client.admin.command({"configureFailPoint": "disableSnapshotting", "mode": "alwaysOn"})
    try:
        yield
    finally:
        client.admin.command({"configureFailPoint": "disableSnapshotting", "mode": "off"})
        nudge(client)


def test_an_unknown_outcome_is_told_as_unavailable_and_found_out_later(url: str, proxy: Proxy) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a")])
        proxy.lose_replies("findAndModify", INVOCATIONS, 1)
        claim = wish(limit=1)
        with pytest.raises(StoreUnavailable):
            await store.claim(claim)
        again = await store.claim(wish(limit=1, lanes=(LANE,), again=True))
        assert [(r.id, r.epoch) for r in again.records] == [("a", 1)]

    play(url, scenario, max_retries=0)


@times
def test_pages_are_recognised(url: str, raw: Raw, proxy: Proxy, times: int) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.append([page(1, run="taken", operation="another's")])
        proxy.lose_replies("insert", "holdfast_log", times)
        mine, taken, other = await store.append([page(1), page(1, run="taken"), page(1, run="b")])
        assert (mine, other) == (APPENDED, APPENDED)
        assert isinstance(taken, Behind)
        assert raw.holdfast_log.count_documents({}) == 3

    play(url, scenario)
    assert proxy.lost == times


def test_a_push_is_recognised(url: str, proxy: Proxy) -> None:
    async def scenario(store: MongoStore) -> None:
        await in_status(store, Status.SUSPENDED, run=RUN)
        proxy.lose_replies("update", INVOCATIONS, 2)
        (verdict,) = await store.apply([pushing("a")])
        assert isinstance(verdict, Applied)
        record = await the(store, "a")
        assert record.run is not None
        assert (len(record.run.inbox), record.run.pushed, record.version) == (1, 1, 5)

    play(url, scenario)
    assert proxy.lost == 1, "it looks first, and sends no second"
