"""One message goes wrong, on each kind of write: the reply is lost, or the connection breaks in the middle of it.

Once in a row the driver heals by itself, where it can; twice and five times in a row is left to the store. Whatever
happens, the write has taken place exactly once in the end, and its caller is told so.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.database import Database
from pymongo.read_concern import ReadConcern
from tests.failover.writes import KINDS, Documents, Stage
from tests.store.mongo.tools import opened, until, with_options
from tests.support.mongod import ReplicaSet
from tests.support.patience import patient
from tests.support.proxy import Fate, Rule

from holdfast import App
from holdfast.runtime import worker_duties as audit
from holdfast.store.mongo.lane_scanner import LaneScanner
from holdfast.store.mongo.schema import COLLECTIONS, INVOCATIONS, META
from holdfast.store.mongo.store import MongoStore

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow, pytest.mark.usefixtures("hasty_driver")]

DATABASE = "messages"
READS = {
    *("lanes", "get", "find", "counts", "get_payload", "get_piece", "roster", "silent", "owners"),
    *("quarantined", "check", "exists", "waiting_keys", "find_conflicts"),
    *("queue_depths", "entries", "read_log", "sizes", "apps"),
}
MOST_IMPORTANT = ("insert", "claim of one", "claim of many", "end", "enrol", "heartbeat", "leave", "hints")


def test_every_write_of_the_store_is_here() -> None:
    methods = inspect.getmembers(MongoStore, inspect.iscoroutinefunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    written = {kind.method for kind in KINDS.values()}
    assert not written & READS
    # What abort_transactions does is done by the server, and twice is once: the transactions of dead owners end.
    assert written == public - READS - {"open", "close", "abort_transactions"} | {"hints"}


@pytest.fixture(scope="module")
def client(servers: ReplicaSet) -> Iterator[MongoClient[dict[str, Any]]]:
    servers.heal()
    client: MongoClient[dict[str, Any]] = MongoClient(servers.url(DATABASE), w=1)
    with client:
        yield client


@pytest.fixture
def invocations(servers: ReplicaSet, client: MongoClient[dict[str, Any]]) -> Iterator[Documents]:
    while not is_emptied(client[DATABASE]):
        pass
    yield client[DATABASE][INVOCATIONS]
    servers.forget()


def is_emptied(database: Database[dict[str, Any]]) -> bool:
    """Empty the collections. Return False if a majority read, as the store's are, still finds something.

    The servers vote within a second, so a busy machine elects another primary now and then. It takes back what one
    server alone had deleted, and what the test before has left would be there in the next one.
    """
    names = [name for name in COLLECTIONS if name != META]
    for name in names:
        database[name].delete_many({})
    database.get_collection(INVOCATIONS, write_concern=WriteConcern("majority")).delete_many({})
    there = [database.get_collection(name, read_concern=ReadConcern("majority")) for name in names]
    return not any(collection.find_one({}, {"_id": 1}) for collection in there)


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked beside claims may meet a fate, too; here the message of the test is to meet it."""
    monkeypatch.setattr(LaneScanner, "look_soon", lambda *_: None)


def cases() -> Iterator[Any]:
    """Every kind with lost replies, the most important ones also with connections cut; all of them as torture."""
    for kind in KINDS:
        for fate in (Fate.REPLY_LOST, Fate.REPLY_CUT, Fate.REQUEST_CUT, Fate.REPLY_NOT_AWAITED):
            for times in (1, 2, 5):
                cut = fate in (Fate.REPLY_CUT, Fate.REQUEST_CUT) and times == 2 and kind in MOST_IMPORTANT
                marks = () if cut or fate is Fate.REPLY_LOST else pytest.mark.torture
                yield pytest.param(kind, fate, times, id=f"{kind}, {fate.name}, {times}", marks=marks)


@pytest.mark.parametrize(("kind", "fate", "times"), list(cases()))
def test_a_write_whose_message_goes_wrong(
    servers: ReplicaSet, invocations: Documents, kind: str, fate: Fate, times: int
) -> None:
    rules: list[Rule] = []

    def break_next(command: str, collection: str) -> Rule:
        rules.append(servers.meddle(fate, command, f"{DATABASE}.{collection}", times))
        return rules[-1]

    async def play() -> None:
        async with opened(url_of(servers)) as store:
            await KINDS[kind].play(Stage(store, break_next, url_of(servers), invocations))

    asyncio.run(play())
    assert 1 <= sum(rule.met for rule in rules) <= times
    for found in invocations.find({}):
        assert [line["v"] for line in found["history"]] == list(range(1, found["version"] + 1))


def url_of(servers: ReplicaSet) -> str:
    return with_options(servers.url(DATABASE), serverMonitoringMode="poll")


class Late:
    """A runner whose first claims arrive late, and what it has executed."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(audit, "AUDIT_SECONDS", 0.3)
        self.app = App(url, name="shop", retry_base_delay=0.01, poll_interval_seconds=0.5)
        self.gate = threading.Event()
        self.executed: list[int] = []
        self.task = self.app.task(name="work")(self._work)

    def _work(self, number: int) -> int:
        self.executed.append(number)
        assert self.gate.wait(30)
        return number

    def statuses(self) -> Counter[str]:
        return Counter(str(entry.status) for entry in self.app.invocations(limit=100))


@pytest.mark.parametrize(
    ("places", "command", "crowded", "times"),
    [
        pytest.param(1, "findAndModify", False, 1, id="one, once"),
        pytest.param(1, "findAndModify", False, 2, id="one, twice"),
        pytest.param(3, "update", False, 1, id="many, once"),
        pytest.param(3, "update", False, 2, id="many, twice"),
        pytest.param(3, "update", True, 1, id="many in a crowd, once"),
        pytest.param(3, "update", True, 2, id="many in a crowd, twice"),
    ],
)
def test_a_claim_that_arrives_late(
    servers: ReplicaSet,
    invocations: Documents,
    monkeypatch: pytest.MonkeyPatch,
    places: int,
    command: str,
    crowded: bool,
    times: int,
) -> None:
    """The client has given up the connection and asked again, and only then the server reads the first request.

    Whatever it takes then is RUNNING in the name of a worker that does not know of it. Its audit finds out, and
    everything is executed once.
    """
    late = Late(url_of(servers), monkeypatch)
    with late.app:
        handles = late.task.map(range(8 * places))
        store: Any = late.app.runtime.run(late.app.runtime.engine()).store
        if crowded:
            store._claims.contention.learn(2, 0, time.time())  # then only a share is looked at
        rule = servers.meddle(Fate.REQUEST_LATE, command, f"{DATABASE}.{INVOCATIONS}", times)
        with late.app.runner(concurrency=places):
            until(lambda: len(late.executed) == places, what="what the repetition got is begun")
            rule.end()
            until(lambda: rule.answered == rule.met == times, what="the late requests are answered")
            strays = late.statuses()["running"] - places
            late.gate.set()
            assert handles.results(patient(30)) == list(range(8 * places))
        assert sorted(late.executed) == list(range(8 * places)), "nothing is executed twice"
        recovered = [any("does not know of it" in line.why for line in handle.history()) for handle in handles]
        assert recovered.count(True) == strays
        if command == "findAndModify":
            assert strays == times - 1, (
                "the driver repeats it once as the same statement; the server carries it out once"
            )
