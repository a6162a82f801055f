"""One message goes wrong, on each kind of write: the reply is lost, or the connection breaks in the middle of it.

Once in a row the driver heals by itself, where it can; twice and five times in a row is left to the store. Whatever
happens, the write has taken place exactly once in the end, and its caller is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from tests.mongo.tools import auntil, opened, with_options
from tests.mongod import ReplicaSet
from tests.proxy import Fate, Rule

from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import Applied
from holdfast.lifecycle.records import READY, Hint
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Filter
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import START, ids_of, invocation, owned, runner, the, wish

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow, pytest.mark.usefixtures("hasty_driver")]

INVOCATIONS, RUNNERS, SIGNALS = "holdfast_invocations", "holdfast_runners", "holdfast_signals"
QUARANTINE, META = "holdfast_quarantine", "holdfast_meta"
RUNNING = Filter(statuses=frozenset({Status.RUNNING}))
DATABASE = "messages"

Documents = Collection[dict[str, Any]]


class Stage(NamedTuple):
    """What a scenario gets: an open store, the way to break its next messages, and a look from outside."""

    store: MongoStore
    break_next: Callable[[str, str], Rule]
    url: str
    invocations: Documents


async def insert(stage: Stage) -> None:
    await stage.store.insert([invocation("taken", operation="somebody else's")])
    stage.break_next("insert", INVOCATIONS)
    assert list(await stage.store.insert([invocation("a"), invocation("taken"), invocation("b")])) == [
        True,
        False,
        True,
    ]
    assert stage.invocations.count_documents({}) == 3


async def claim_one(stage: Stage) -> None:
    await stage.store.insert([invocation(id) for id in "abc"])
    stage.break_next("findAndModify", INVOCATIONS)
    claimed = await stage.store.claim(wish(limit=1))
    assert [(record.id, record.epoch, record.attempt) for record in claimed.records] == [("a", 1, 1)]
    assert ids_of(await stage.store.find("shop", RUNNING, 10)) == ["a"], "nothing is ours and unknown to us"


async def claim_many(stage: Stage) -> None:
    await stage.store.insert([invocation(f"i{n:02}") for n in range(30)])
    stage.break_next("update", INVOCATIONS)
    first = await stage.store.claim(wish("first", limit=10))
    assert ids_of(first.records) == [f"i{n:02}" for n in range(10)]
    second = await stage.store.claim(wish("second", limit=20))
    assert ids_of(second.records) == [f"i{n:02}" for n in range(10, 30)]
    everything = await stage.store.get("shop", [f"i{n:02}" for n in range(30)])
    assert {(record.epoch, record.version, record.attempt) for record in everything if record} == {(1, 3, 1)}


async def claim_asked_again(stage: Stage) -> None:
    """The write before the read that finds what an earlier try got."""
    await stage.store.insert([invocation(id) for id in "abc"])
    (first,) = (await stage.store.claim(wish(limit=1))).records
    stage.break_next("update", META)
    again = await stage.store.claim(wish(limit=1, again=True))
    assert [(record.id, record.epoch) for record in again.records] == [(first.id, 1)]


async def starts(stage: Stage) -> None:
    records = [await owned(stage.store, id, start=False) for id in "abc"]
    begun = [changes.started(record, operation=f"start {record.id}", at=START + 1) for record in records]
    stage.break_next("update", INVOCATIONS)
    assert all(isinstance(verdict, Applied) for verdict in await stage.store.apply(begun))
    for id in "abc":
        record = await the(stage.store, id)
        assert (record.status, record.version, record.attempt) == (Status.RUNNING, 3, 1)


async def ends(stage: Stage) -> None:
    records = [await owned(stage.store, id) for id in "abc"]
    ended = [changes.completed(r, result=b"\x07", operation=f"end {r.id}", at=START + 1) for r in records]
    stage.break_next("update", INVOCATIONS)
    assert all(isinstance(verdict, Applied) for verdict in await stage.store.apply(ended))
    for id in "abc":
        record = await the(stage.store, id)
        assert (record.status, record.version, record.result) == (Status.SUCCESS, 4, b"\x07")


async def enrol(stage: Stage) -> None:
    stage.break_next("update", RUNNERS)
    await stage.store.enrol(runner("r", concurrency=7))
    assert [(entry.id, entry.concurrency) for entry in await stage.store.roster("shop")] == [("r", 7)]


async def heartbeat(stage: Stage) -> None:
    await stage.store.enrol(runner("r"))
    stage.break_next("findAndModify", RUNNERS)
    assert await stage.store.heartbeat("shop", "r")
    (entry,) = await stage.store.roster("shop")
    assert entry.heartbeat_at > START


async def leave(stage: Stage) -> None:
    await stage.store.enrol(runner("r"))
    stage.break_next("delete", RUNNERS)
    await stage.store.leave("shop", "r")
    assert await stage.store.roster("shop") == []


async def setting_aside(stage: Stage, command: str, collection: str) -> None:
    await stage.store.insert([invocation("bad"), invocation("good")])
    stage.invocations.update_one({"id": "bad"}, {"$unset": {"arguments": ""}})
    stage.break_next(command, collection)
    claimed = await stage.store.claim(wish(limit=5))
    assert ids_of(claimed.records) == ["good"]
    assert [entry.id for entry in await stage.store.quarantined("shop")] == ["bad"]
    assert [found["id"] for found in stage.invocations.find({})] == ["good"]


async def set_aside_a_copy(stage: Stage) -> None:
    await setting_aside(stage, "update", QUARANTINE)


async def set_aside_the_original(stage: Stage) -> None:
    await setting_aside(stage, "delete", INVOCATIONS)


async def hints(stage: Stage) -> None:
    """A hint may be lost with its message; the next one must not."""
    heard: list[str] = []
    async with opened(with_options(stage.url, appname="listener")) as listener:
        channel, sender = listener.hints(), stage.store.hints()
        assert channel is not None
        assert sender is not None
        channel.listen(READY, lambda hint: heard.extend(hint.subjects))
        await auntil(lambda: channel.trust)
        rule = stage.break_next("update", SIGNALS)
        sender.send([Hint(READY, ("first",))])
        await auntil(lambda: rule.met)
        await auntil(lambda: sender._sender is None or sender._sender.done(), seconds=20)
        rule.end()
        sender.send([Hint(READY, ("second",))])
        await auntil(lambda: "second" in heard)
        if rule.fate is Fate.REPLY_LOST:
            assert "first" in heard


KINDS: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "insert": insert,
    "claim of one": claim_one,
    "claim of many": claim_many,
    "claim asked again": claim_asked_again,
    "start": starts,
    "end": ends,
    "enrol": enrol,
    "heartbeat": heartbeat,
    "leave": leave,
    "set aside, the copy": set_aside_a_copy,
    "set aside, the original": set_aside_the_original,
    "hints": hints,
}


@pytest.fixture(scope="module")
def client(servers: ReplicaSet) -> Iterator[MongoClient[dict[str, Any]]]:
    servers.heal()
    client: MongoClient[dict[str, Any]] = MongoClient(servers.url(DATABASE), w="majority")
    with client:
        yield client


@pytest.fixture
def invocations(servers: ReplicaSet, client: MongoClient[dict[str, Any]]) -> Iterator[Documents]:
    for name in (INVOCATIONS, RUNNERS, QUARANTINE):
        client[DATABASE][name].delete_many({})
    yield client[DATABASE][INVOCATIONS]
    servers.forget()


LOST = [(Fate.REPLY_LOST, times) for times in (1, 2, 5)]
CUT = [(fate, times) for fate in (Fate.REPLY_CUT, Fate.REQUEST_CUT, Fate.REPLY_NOT_AWAITED) for times in (1, 2, 5)]
FEW = [*LOST, (Fate.REPLY_CUT, 2), (Fate.REQUEST_CUT, 2)]


def cases(*given: tuple[Fate, int], marks: tuple[pytest.MarkDecorator, ...] = ()) -> list[Any]:
    return [pytest.param(fate, times, id=f"{fate.name} {times}", marks=marks) for fate, times in given]


@pytest.mark.parametrize(
    ("fate", "times"),
    [*cases(*FEW), *cases(*(case for case in CUT if case not in FEW), marks=(pytest.mark.torture,))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_whose_message_goes_wrong(
    servers: ReplicaSet, invocations: Documents, kind: str, fate: Fate, times: int
) -> None:
    rules: list[Rule] = []

    def break_next(command: str, collection: str) -> Rule:
        rules.append(servers.meddle(fate, command, collection, times))
        return rules[-1]

    async def play() -> None:
        async with opened(url_of(servers)) as store:
            await KINDS[kind](Stage(store, break_next, url_of(servers), invocations))

    asyncio.run(play())
    assert 1 <= sum(rule.met for rule in rules) <= times
    for found in invocations.find({}):
        assert [line["v"] for line in found["history"]] == list(range(1, found["version"] + 1))


def url_of(servers: ReplicaSet) -> str:
    return with_options(servers.url(DATABASE), serverMonitoringMode="poll")


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("limit", "command", "crowded"),
    [(1, "findAndModify", False), (3, "update", False), (3, "update", True)],
    ids=["one", "many", "many in a crowd"],
)
def test_a_claim_that_arrives_late(
    servers: ReplicaSet, invocations: Documents, limit: int, command: str, crowded: bool, times: int
) -> None:
    """The client has given up the connection and asked again, and only then the server reads the first request.

    Whatever it takes then would be RUNNING in our name, with nobody to do it.
    """

    async def play() -> None:
        async with opened(url_of(servers)) as store:
            await store.insert([invocation(f"i{n:02}") for n in range(4 * limit)])
            store._crowded = crowded  # then the candidates are chosen by chance
            late = servers.meddle(Fate.REQUEST_LATE, command, INVOCATIONS, times)
            claimed = await store.claim(wish(limit=limit))
            late.end()
            await auntil(lambda: late.answered == late.met == times)
            assert len(claimed.records) == limit
            assert sorted(map(str, ids_of(await store.find("shop", RUNNING, 100)))) == ids_of(claimed.records)

    asyncio.run(play())
