"""MongoDB was away for a moment: every operation is asked again, with growing pauses, and not for ever."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from benchmarks.commands import CommandCounter
from pymongo import MongoClient, errors
from pymongo.database import Database
from tests.store.mongo.tools import Events, auntil, database_of, failing, make_store, play, with_options

from holdfast.clock import SystemClock
from holdfast.errors import CorruptRecord, StoreError, StoreFull, StoreReadOnly, StoreUnauthorised, StoreUnavailable
from holdfast.fleet.slots import Execution
from holdfast.model import changes
from holdfast.model.changes import Applied
from holdfast.model.limits import Release
from holdfast.model.queues import QueuePause
from holdfast.model.records import READY, Entry, Hint, Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.store.contract import Filter
from holdfast.store.mongo import hints
from holdfast.store.mongo.lane_scanner import LaneScanner
from holdfast.store.mongo.retry import READS, Retrier, RetryPolicy, is_transient
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import START, ids_of, invocation, owned, page, runner, the, wish

pytestmark = [pytest.mark.xdist_group("mongo"), pytest.mark.usefixtures("hasty_driver")]

Client = MongoClient[dict[str, Any]]
Raw = Database[dict[str, Any]]
Operation = Callable[[MongoStore], Awaitable[object]]

APP = "holdfast-retries"
COMMANDS = (
    "insert",
    "find",
    "update",
    "delete",
    "findAndModify",
    "aggregate",
    "distinct",
    "getMore",
    "count",
    "dbStats",
)


@pytest.fixture
def url(mongo_url: str) -> str:
    """The driver's own retries are off, so that each failure reaches the store."""
    return with_options(
        mongo_url, appname=APP, retryWrites=False, retryReads=False, serverMonitoringMode="poll", directConnection=True
    )


# --- which errors pass by themselves


def server_error(code: int) -> errors.OperationFailure:
    return errors.OperationFailure("no", code)


def bulk_error(*codes: int, concern: bool = False) -> errors.BulkWriteError:
    failures = [{"code": code, "index": n} for n, code in enumerate(codes)]
    return errors.BulkWriteError({"writeErrors": failures, "writeConcernErrors": [{"code": 64}] if concern else []})


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (errors.AutoReconnect("gone"), True),
        (errors.ConnectionFailure("gone"), True),
        (errors.NetworkTimeout("late"), True),
        (errors.NotPrimaryError("moved"), True),
        (errors.ServerSelectionTimeoutError("nobody"), True),
        (errors.WaitQueueTimeoutError("busy"), True),
        (errors.CursorNotFound("gone", 43), True),
        (errors.ExecutionTimeout("late", 50), True),
        (errors.WriteConcernError("late", 64), True),
        *[
            (server_error(code), True)
            for code in (6, 7, 89, 91, 112, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436)
        ],
        (bulk_error(91), True),
        (bulk_error(concern=True), True),
        (bulk_error(11000, 11600), True),  # the duplicate will be found again, and the other one may work
        (bulk_error(11000, concern=True), True),
        (bulk_error(11000), False),
        (bulk_error(14), False),
        (errors.DuplicateKeyError("there", 11000), False),
        (server_error(2), False),
        (server_error(13), False),
        (server_error(18), False),
        (errors.OperationFailure("no", 18, {"errorLabels": ["RetryableWriteError"]}), False),
        (errors.OperationFailure("bad auth", 8000, {"errorLabels": ["RetryableWriteError"]}), False),
        (server_error(14031), False),
        (errors.ConfigurationError("what?"), False),
        (errors.InvalidOperation("closed"), False),
    ],
    ids=str,
)
def test_an_error_is_transient_or_final(error: errors.PyMongoError, transient: bool) -> None:
    assert is_transient(error) is transient


# --- no operation bypasses it


class Marker(Exception):
    pass


async def ask_nobody(what: str, attempt: object) -> Any:
    raise Marker


DIGEST = "d" * 64
PAYLOAD = StoredPayload(digest=DIGEST, size=6, pieces=2, first=Piece(b"one"))
EXECUTION = Execution(id="e", service="core", runner_id="r", started_at=START, window_ends_at=START + 9)
ENTRY = Entry(app="shop", kind="schedule", name="nightly", body=b"{}")
RELEASE = Release(limit_key="k", max_running=1)
PAUSE = QueuePause(app="shop", name="mail", at=START, by="ann", reason="", operation="p")
OPERATIONS: dict[str, Operation] = {
    "insert": lambda store: store.insert([invocation("new")]),
    "claim": lambda store: store.claim(wish("many", limit=3)),
    "lanes": lambda store: store.lanes("shop"),
    "release_waiters": lambda store: store.release_waiters("shop", [RELEASE], operation="r", at=START),
    "waiting_keys": lambda store: store.waiting_keys("shop"),
    "apply": lambda store: _end(store),
    "exists": lambda store: store.exists(),
    "get": lambda store: store.get("shop", ["a"]),
    "find_conflicts": lambda store: store.find_conflicts([invocation("a", key="k")]),
    "put_entry": lambda store: store.put_entry(ENTRY),
    "entries": lambda store: store.entries("shop", "schedule"),
    "remove_entry": lambda store: store.remove_entry(ENTRY),
    "find": lambda store: store.find("shop", Filter(), 10),
    "apps": lambda store: store.apps(),
    "sizes": lambda store: store.sizes(),
    "counts": lambda store: store.counts("shop"),
    "append": lambda store: store.append([page(1)]),
    "read_log": lambda store: store.read_log("shop", "a", limit=10),
    "remove_log": lambda store: store.remove_log("shop", "a", before=1),
    "abort_transactions": lambda store: store.abort_transactions(["a/0"]),
    "keep_payloads": lambda store: store.keep_payloads("shop", [DIGEST]),
    "put_piece": lambda store: store.put_piece("shop", DIGEST, 1, Piece(b"two")),
    "put_payloads": lambda store: store.put_payloads("shop", [PAYLOAD]),
    "get_payload": lambda store: store.get_payload("shop", DIGEST),
    "get_piece": lambda store: store.get_piece("shop", DIGEST, 1),
    "collect_payloads": lambda store: store.collect_payloads("shop", store.now() + 1, 10),
    "silent": lambda store: store.silent("shop"),
    "owners": lambda store: store.owners("shop"),
    "remove_runner": lambda store: store.remove_runner("shop", "r", heartbeat_at=START),
    "ask_runner": lambda store: store.ask_runner("shop", "r", wish="drain"),
    "remove_ended": lambda store: store.remove_ended("shop", ["a"]),
    "remove_expired": lambda store: store.remove_expired("shop", START + 9, 10),
    "queue_depths": lambda store: store.queue_depths("shop", START),
    "enrol": lambda store: store.enrol(runner("new")),
    "heartbeat": lambda store: store.heartbeat("shop", "r"),
    "roster": lambda store: store.roster("shop"),
    "quarantined": lambda store: store.quarantined("shop"),
    "quarantine_entry": lambda store: store.quarantine_entry(ENTRY, CorruptRecord("it says nothing")),
    "quarantine_hidden": lambda store: store.quarantine_hidden("shop"),
    "check": lambda store: store.check(deep=True),
}


async def _end(store: MongoStore) -> object:
    return await store.apply(
        [changes.completed(await the(store, "held"), result=b"\x01", operation="end", at=START + 1)]
    )


def test_every_operation_is_here() -> None:
    methods = inspect.getmembers(MongoStore, inspect.iscoroutinefunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    assert set(OPERATIONS) == public - {"open", "close"}


def test_no_operation_reaches_the_driver_by_another_way(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: MongoStore) -> None:
        record = await owned(store, "held")
        monkeypatch.setattr(store._retry, "ask", ask_nobody)
        end = changes.completed(record, result=b"\x01", operation="end", at=START + 1)
        with CommandCounter(database_of(url)) as sent:
            for name, operation in (OPERATIONS | {"apply": lambda store: store.apply([end])}).items():
                with pytest.raises(Marker):
                    await operation(store)
                    pytest.fail(f"{name} did not ask")
        assert sent.all == {}
        closed = make_store(url)
        monkeypatch.setattr(closed._retry, "ask", ask_nobody)
        with pytest.raises(Marker):
            await closed.open()

    play(url, scenario)


def test_only_hints_and_their_stream_go_another_way(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no caller who would wait for them. Each is bounded by itself: see the next two."""

    async def scenario(store: MongoStore) -> None:
        monkeypatch.setattr(store._retry, "ask", ask_nobody)
        channel = store.hints()
        assert channel is not None
        with CommandCounter(database_of(url)) as sent:
            channel.listen(READY, lambda hint: None)
            await auntil(lambda: channel.trust)
            channel.send([Hint(READY, ("lane",))])
            await auntil(lambda: channel._sender is None or channel._sender.done())
        assert set(sent.all) == {("aggregate", "holdfast_signals"), ("update", "holdfast_signals")}

    play(url, scenario)


@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize("how", [{"errorCode": 91}, {"closeConnection": True}, {"errorCode": 13}, {"errorCode": 2}])
def test_a_hint_is_given_up_and_counted_and_the_next_one_is_sent(
    url: str, raw: Raw, client: Client, how: dict[str, Any]
) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        channel = store.hints()
        assert channel is not None
        for turn in (1, 2):
            with failing(client, "update", app=APP, times=1, **how):
                channel.send([Hint(READY, (f"lost {turn}",))])
                await auntil(lambda: channel.given_up == turn)  # noqa: B023
        channel.send([Hint(READY, ("sent",))])
        await auntil(lambda: raw.holdfast_signals.find_one({"hints.subjects": "sent"}))

    play(url, scenario, events)
    assert [facts["so_far"] for facts in events.named("hints_not_sent")] == [1, 2]


@pytest.mark.usefixtures("failpoints")
def test_a_hint_and_the_opening_of_a_stream_wait_for_a_limited_time(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_SEND_SECONDS", 0.1)
    for name in ("_AWAIT_SECONDS", "_GRACE_SECONDS", "_FIRST_PAUSE_SECONDS"):
        monkeypatch.setattr(hints, name, 0.1)
    events = Events()

    async def scenario(store: MongoStore) -> None:
        channel = store.hints()
        assert channel is not None
        with failing(client, "update", "aggregate", app=APP, times=2, blockConnection=True, blockTimeMS=1500):
            channel.send([Hint(READY, ("late",))])
            channel.listen(READY, lambda hint: None)
            await auntil(lambda: channel.given_up and events.named("change_stream_broken"), 1.0)
            await auntil(lambda: channel.trust)

    play(url, scenario, events)
    assert [facts["why"] for facts in events.named("hints_not_sent")] == ["NetworkTimeout: no answer within 0.1 s"]


async def stocked(store: MongoStore) -> None:
    await owned(store, "held")
    await store.insert([invocation(id) for id in "abc"])
    await store.enrol(runner("r"))
    await store.put_piece("shop", DIGEST, 1, Piece(b"two"))
    await store.put_payloads("shop", [PAYLOAD])


@pytest.mark.slow
@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize("times", [1, 2])
def test_every_operation_survives_failures(
    url: str, raw: Raw, client: Client, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LaneScanner, "look_soon", lambda *_: None
    )  # what it asks may fail, too; failures are counted here
    events = Events()

    async def survives(store: MongoStore, name: str, **how: Any) -> None:
        raw.holdfast_invocations.delete_many({})
        await stocked(store)
        events.all.clear()
        with failing(client, *COMMANDS, app=APP, times=times, **how):
            await OPERATIONS[name](store)
        assert len(events.named("retry")) == times, name
        assert [facts["tries"] for facts in events.named("recovered")][-1:] == [times], name
        assert events.named("gave_up") == []
        everything = await store.find("shop", Filter(), 100)
        assert len(everything) == 4 + (name == "insert")
        for record in everything:
            operations = [(entry.version, entry.operation) for entry in record.history]
            assert len(set(operations)) == len(operations) == record.version

    async def scenario(store: MongoStore) -> None:
        for name, code in zip(OPERATIONS, itertools.cycle((91, 189, 11600, 10107, 13435))):
            await survives(store, name, errorCode=code if times == 2 else 91)
            await survives(store, name, closeConnection=True)

    play(url, scenario, events)


@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize("command", ["getMore", "find"])
def test_a_cursor_that_breaks_half_way_is_read_again(url: str, client: Client, command: str) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        ids = [f"i{n:03}" for n in range(250)]
        await store.insert([invocation(id) for id in ids])
        with failing(client, command, app=APP, times=2, errorCode=11600):
            assert ids_of(await store.get("shop", ids)) == ids
        with failing(client, command, app=APP, times=1, closeConnection=True):
            assert ids_of(await store.find("shop", Filter(), 250)) == ids[::-1]
        with failing(client, command, app=APP, times=1, errorCode=43):
            claimed = await store.claim(wish(limit=200))
        assert ids_of(claimed.records) == ids[:200]
        assert {record.epoch for record in claimed.records} == {1}

    play(url, scenario, events)
    assert len(events.named("retry")) == 4


@pytest.mark.usefixtures("failpoints")
def test_opening_is_retried_too(url: str, client: Client) -> None:
    events = Events()
    with failing(client, *COMMANDS, "listIndexes", "createIndexes", app=APP, times=2, errorCode=91):
        play(url, lambda store: store.counts("shop"), events)
    assert [facts["what"] for facts in events.named("retry")] == ["opening"] * 2


# --- how long


@pytest.mark.usefixtures("failpoints")
def test_the_pauses_double_and_are_spread(url: str, client: Client) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        with failing(client, "find", app=APP, errorCode=91), pytest.raises(StoreUnavailable):
            await store.get("shop", ["a"])

    play(url, scenario, events, max_retries=6, retry_base_delay=0.004, retry_max_delay=0.05)
    delays = [facts["delay"] for facts in events.named("retry")]
    longest = [0.004, 0.008, 0.016, 0.032, 0.05, 0.05]
    assert all(most / 2 <= delay <= most for delay, most in zip(delays, longest, strict=True)), delays
    assert {facts["what"] for facts in events.named("retry")} == {"get"}
    assert [facts["try"] for facts in events.named("retry")] == [1, 2, 3, 4, 5, 6]
    (end,) = events.named("gave_up")
    assert end["tries"] == 7


@pytest.mark.usefixtures("failpoints")
def test_who_gives_up_says_what_and_where_and_what_to_do(url: str, client: Client) -> None:
    async def scenario(store: MongoStore) -> None:
        with failing(client, "insert", app=APP, errorCode=91), pytest.raises(StoreUnavailable) as caught:
            await store.insert([invocation("a")])
        text = str(caught.value)
        assert "insert was tried 2 times" in text
        assert store._retry._where in text
        assert "Is it running" in text
        assert isinstance(caught.value.__cause__, errors.PyMongoError)

    play(url, scenario, max_retries=1)


@pytest.mark.usefixtures("failpoints")
def test_time_limits_the_retries_as_well(url: str, client: Client) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        with failing(client, "find", app=APP, errorCode=91), pytest.raises(StoreUnavailable):
            await store.get("shop", ["a"])

    play(url, scenario, events, max_retries=1000, retry_max_time=0.1)
    assert 1 <= len(events.named("retry")) < 1000


@pytest.mark.usefixtures("failpoints")
def test_indefinitely_means_whatever_the_other_limits(url: str, client: Client) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        with failing(client, "find", app=APP, times=9, errorCode=91):
            assert list(await store.get("shop", ["a"])) == [None]

    play(url, scenario, events, max_retries=0, retry_max_time=0, retry_indefinitely=True)
    assert len(events.named("retry")) == 9


@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize(
    ("code", "writing", "reading"),
    [
        (2, StoreError, StoreError),
        (13, StoreReadOnly, StoreUnauthorised),
        (18, StoreUnauthorised, StoreUnauthorised),
        (14031, StoreFull, StoreFull),
    ],
)
def test_a_refusal_is_not_asked_again(
    url: str, client: Client, code: int, writing: type[StoreError], reading: type[StoreError]
) -> None:
    events = Events()

    async def scenario(store: MongoStore) -> None:
        await store.enrol(runner("r"))
        with failing(client, "insert", "find", "findAndModify", app=APP, errorCode=code):
            for operation, kind in (
                (store.insert([invocation("a")]), writing),
                (store.get("shop", ["a"]), reading),
                (store.heartbeat("shop", "r"), writing),
                (store.claim(wish()), writing),
            ):
                with pytest.raises(StoreError) as caught:
                    await operation
                assert type(caught.value) is kind

    play(url, scenario, events)
    assert events.named("retry") == events.named("gave_up") == []


@pytest.mark.parametrize(
    ("said", "code", "kind", "advice"),
    [
        ("Authentication failed.", 18, StoreUnauthorised, "password"),
        ("Unsupported mechanism SCRAM-SHA-1", 334, StoreUnauthorised, "authMechanism"),
        ("command createIndexes requires authentication", 13, StoreUnauthorised, "the URL has no user"),
        ("not authorized on shop to execute command { update: 1 }", 13, StoreReadOnly, "roles"),
        # A hosted MongoDB answers for its servers with one code of its own.
        ("bad auth : authentication failed", 8000, StoreUnauthorised, "password"),
        ("user is not allowed to do action [insert] on [shop.x]", 8000, StoreReadOnly, "roles"),
        ("you are over your space quota, using 512 MB of 512 MB", 8000, StoreFull, "space"),
        ("something else", 8000, StoreError, "something else"),
    ],
)
def test_a_refusal_has_a_class_and_advice(said: str, code: int, kind: type[StoreError], advice: str) -> None:
    asked = []

    async def refuse(again: bool) -> None:
        asked.append(again)
        raise errors.OperationFailure(said, code)

    retry = Retrier(RetryPolicy(retry_indefinitely=True), SystemClock(), random.Random(1), Events(), "here")
    with pytest.raises(StoreError, match=advice) as caught:
        asyncio.run(retry.ask("insert", refuse))
    assert type(caught.value) is kind
    assert asked == [False]


def test_every_reading_operation_is_known_as_one() -> None:
    """Who may not read is told something else than who may not write, so each operation is one or the other."""
    writes = {"insert", "claim", "release_waiters", "apply", "enrol", "heartbeat"}
    writes |= {"put_entry", "remove_entry", "quarantine_entry", "quarantine_hidden"}
    writes |= {"keep_payloads", "put_piece", "put_payloads", "collect_payloads"}
    writes |= {"remove_runner", "ask_runner"}
    writes |= {"remove_ended", "remove_expired"}
    writes |= {"append", "remove_log", "abort_transactions"}
    assert {name.replace("_", " ") for name in set(OPERATIONS) - writes} == READS


@pytest.mark.slow
def test_what_is_too_large_is_refused_clearly(url: str) -> None:
    """The driver says so with an error that is none of its own family, the server with one of several codes."""

    async def scenario(store: MongoStore) -> None:
        with pytest.raises(StoreError, match=r"16\s?MB"):
            await store.insert([invocation("a", arguments=b"\x00" * 17_000_000)])
        await store.insert([invocation("a", arguments=b"\x00" * 9_000_000)])
        (record,) = (await store.claim(wish())).records
        for size in (9_000_000, 17_000_000):
            end = changes.completed(record, result=b"\x00" * size, operation="end", at=START)
            with pytest.raises(StoreError, match=r"large|16\s?MB"):
                await store.apply([end])
        assert (await the(store, "a")).status is Status.RUNNING

    play(url, scenario)


def test_an_end_that_the_server_refuses_is_not_called_lost(url: str, client: Client) -> None:
    """Nobody was faster, so to say `Lost` would leave it RUNNING for ever. The others in the batch are written."""

    async def scenario(store: MongoStore) -> None:
        database = store._collection("holdfast_invocations").database
        record, other = await owned(store, "a"), await owned(store, "b")
        ends = [
            changes.completed(record, result=b"\x07", operation="end a", at=START),
            changes.completed(other, result=b"\x01", operation="end b", at=START),
        ]
        rule = {"$or": [{"id": {"$ne": "a"}}, {"status": {"$ne": "success"}}]}
        await database.command("collMod", "holdfast_invocations", validator=rule)
        try:
            with pytest.raises(StoreError, match="validation"):
                await store.apply(ends)
        finally:
            await database.command("collMod", "holdfast_invocations", validator={})
        assert (await the(store, "b")).status is Status.SUCCESS
        assert all(isinstance(verdict, Applied) for verdict in await store.apply(ends))

    play(url, scenario)


def test_a_cancelled_caller_is_not_kept_waiting() -> None:
    async def run() -> None:
        async def fail(again: bool) -> None:
            raise errors.AutoReconnect("away")

        policy = RetryPolicy(retry_base_delay=60)
        retry = Retrier(policy, SystemClock(), random.Random(1), Events(), "here")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await retry.ask("something", fail)

    asyncio.run(run())
