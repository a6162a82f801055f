"""Who waits is woken by other processes: by the change stream where there is one, else by looking often enough.

Two apps in this process are strangers to each other, as two processes are: each has its own loop, client and stream.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bson
import pytest
from benchmarks.commands import CommandCounter
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, MongoClient
from pymongo.database import Database
from tests.store.mongo.parties import LONG, SOON, Party, settle_down, two
from tests.store.mongo.tools import Events, auntil, database_of, failing, nudge, opened, until, with_options
from tests.support.mongod import Mongod
from tests.support.patience import patient

from holdfast.model.records import ENDED, READY, Hint
from holdfast.model.status import Status
from holdfast.runtime.claim import DOUBT_SECONDS
from holdfast.store.contract import Observe
from holdfast.store.mongo import hints as hints_module
from holdfast.store.mongo.hints import StreamHints
from holdfast.store.mongo.store import MongoStore

pytestmark = [pytest.mark.xdist_group("mongo"), pytest.mark.usefixtures("hasty_driver")]

Client = MongoClient[dict[str, Any]]
Raw = Database[dict[str, Any]]

STREAMING = "holdfast-streaming"
# --- with a stream


def test_a_submit_elsewhere_wakes_a_runner(mongo_url: str) -> None:
    with two(mongo_url) as (runner, other):
        settle_down(runner)
        began = time.monotonic()
        other.task.submit()
        until(lambda: runner.started)
        assert runner.started[0] - began < SOON


def test_a_submit_whose_submitter_died_before_its_hint_does_not_hold_up_the_next_one(mongo_url: str) -> None:
    with two(mongo_url) as (runner, other):
        settle_down(runner)
        hub, hints = other.app.runtime.run(other.app.runtime.engine()).hub, other.hints
        hub.connect(None)  # whoever dies between insert and hint sends none
        other.task.submit()
        hub.connect(hints)
        other.task.submit()
        until(lambda: len(runner.started) == 2, DOUBT_SECONDS + SOON, "the hint leads to both of them")


def test_an_end_elsewhere_wakes_who_waits(mongo_url: str) -> None:
    with two(mongo_url) as (runner, other):
        runner.gate.clear()
        handle = other.task.submit()
        waited: list[float] = []

        def wait() -> None:
            assert handle.result(timeout=patient(20)) == 7
            waited.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: runner.started)
        settle_down(other)  # it has read that it is still running, and waits
        let_go = time.monotonic()
        runner.gate.set()
        waiting.join(20)
        assert waited[0] - let_go < SOON


def test_a_submit_in_a_transaction_wakes_a_runner_though_the_next_one_has_begun(mongo_url: str, client: Client) -> None:
    with two(mongo_url) as (runner, other), client.start_session() as session:
        settle_down(runner)
        with session.start_transaction():
            other.task.options(session=session).submit()
        committed = time.monotonic()
        with session.start_transaction():
            client[other.database].orders.insert_one({}, session=session)
            until(lambda: runner.started, what="it is woken while the second one is open")
        assert runner.started[0] - committed < SOON


def test_the_same_with_an_asynchronous_client(mongo_url: str) -> None:
    async def run(runner: Party, other: Party) -> None:
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
            async with await session.start_transaction():
                await other.task.options(session=session).asubmit()
            committed = time.monotonic()
            async with await session.start_transaction():
                await client[other.database].orders.insert_one({}, session=session)
                await auntil(lambda: runner.started, what="it is woken while the second one is open")
            assert runner.started[0] - committed < SOON

    with two(mongo_url) as (runner, other):
        settle_down(runner)
        asyncio.run(run(runner, other))


def test_a_submit_in_a_transaction_wakes_nobody_before_it_is_committed(mongo_url: str, client: Client) -> None:
    with two(mongo_url) as (runner, other), client.start_session() as session:
        settle_down(runner)
        with session.start_transaction():
            with CommandCounter(other.database) as sent:
                other.task.options(session=session).submit()
                other.task.options(session=session).submit()
                engine = other.app.runtime.run(other.app.runtime.engine())
                assert len(engine.submitter._waiting) == 2
                assert sent.all["update", "holdfast_signals"] == 0
        until(lambda: len(runner.started) == 2, SOON)


@pytest.mark.slow
def test_a_submit_just_before_the_end_of_a_program_wakes_a_runner(mongo_url: str) -> None:
    """`holdfast submit` and scripts do nothing else: the hint must be out before they close."""
    program = f"""
from holdfast import App
app = App({mongo_url!r}, name="shop")
task = app.task(name="work")(lambda: None)
app.invocations()
input()
task.submit()
app.close()
"""
    runner = Party(mongo_url)
    with runner.app, runner.app.runner():
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        settle_down(runner)
        process.communicate(b"\n", timeout=patient(20))
        until(lambda: runner.started, LONG / 3)  # long before it would look by itself


def test_closing_sends_what_was_gathered(mongo_url: str) -> None:
    heard: list[Hint] = []

    async def run() -> None:
        async with opened(mongo_url) as listener:
            channel = listener.hints()
            assert channel is not None
            channel.listen(READY, heard.append)
            await auntil(lambda: channel.trust)
            heard.clear()
            async with opened(mongo_url) as sender:
                sending = sender.hints()
                assert sending is not None
                sending.send([Hint(READY, ("first",))])
                await asyncio.sleep(0)  # the first is on its way, the others gather
                sending.send([Hint(READY, ("second",)), Hint(ENDED, ("x",))])
            await auntil(lambda: len(heard) >= 2, SOON)

    asyncio.run(run())
    assert [hint.subjects for hint in heard] == [("first",), ("second",)]


@pytest.mark.slow
def test_a_close_is_not_held_up_by_a_server_that_is_away(mongo_url: str, client: Client, failpoints: None) -> None:
    async def run() -> None:
        url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")
        async with opened(url) as store:
            channel = store.hints()
            assert channel is not None
            block = {"blockConnection": True, "blockTimeMS": 1500}
            with failing(client, "update", app=STREAMING, **block):
                channel.send([Hint(READY, ("lane",))])
                await asyncio.sleep(0)
                began = time.monotonic()
                await store.close()
                assert time.monotonic() - began < 1.4

    asyncio.run(run())


def test_own_hints_do_not_come_back_and_those_of_one_moment_come_as_one(mongo_url: str) -> None:
    heard: dict[str, list[Hint]] = {"mine": [], "theirs": []}

    async def run() -> None:
        async with opened(mongo_url) as one, opened(mongo_url) as other:
            mine, theirs = one.hints(), other.hints()
            assert mine is not None
            assert theirs is not None
            for channel, name in ((mine, "mine"), (theirs, "theirs")):
                channel.listen(READY, heard[name].append)
                await auntil(lambda: channel.trust)  # noqa: B023
            heard["mine"].clear(), heard["theirs"].clear()
            for n in range(1000):
                mine.send([Hint(READY, (f"lane{n % 3}",))])
            await auntil(lambda: sum(hint.count for hint in heard["theirs"]) == 1000)

    asyncio.run(run())
    assert heard["mine"] == []
    assert len(heard["theirs"]) <= 3
    assert set().union(*(hint.subjects for hint in heard["theirs"])) == {"lane0", "lane1", "lane2"}


# --- when the stream breaks


@pytest.mark.usefixtures("failpoints")
def test_polling_takes_over_and_the_stream_is_taken_up_again(mongo_url: str, client: Client) -> None:
    url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")
    with two(url, poll_interval_seconds=0.5) as (runner, other):
        settle_down(runner)
        with failing(client, "getMore", "aggregate", app=STREAMING, closeConnection=True):
            other.task.submit()  # the stream's wait ends with this event, and then it is gone
            until(lambda: runner.events.named("change_stream_broken"), 3)
            assert not runner.listens()
            began = time.monotonic()
            other.task.submit()
            until(lambda: len(runner.started) >= 2)
            assert runner.started[1] - began < SOON, "nobody looks"
        until(runner.listens, 8)
        assert len(runner.events.named("change_stream_open")) >= 2
        settle_down(runner)


@pytest.mark.slow
@pytest.mark.usefixtures("failpoints")
def test_a_broken_stream_makes_everybody_look(mongo_url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent while it was broken may never arrive, and the next unasked look may be far away."""
    monkeypatch.setattr(hints_module, "_FIRST_PAUSE_SECONDS", 0.05)
    url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")
    runner, other = Party(url), Party(with_options(mongo_url, appname="somebody-else"), use_change_streams=False)
    with runner.app, other.app, runner.app.runner():
        settle_down(runner)
        with failing(client, "getMore", "aggregate", app=STREAMING, closeConnection=True):
            break_stream(client)
            until(lambda: runner.events.named("change_stream_broken"), 3)
            other.task.submit()  # without a hint
        began = time.monotonic()
        until(lambda: runner.started)
        assert runner.started[0] - began < 3


def break_stream(client: Client) -> None:
    """End the wait of the stream, by the server's hand."""
    for operation in client.admin.aggregate([{"$currentOp": {"idleCursors": True}}]):
        if operation.get("appName") == STREAMING and "cursor" in operation:
            database, _, collection = operation["ns"].partition(".")
            client[database].command("killCursors", collection, cursors=[operation["cursor"]["cursorId"]])
    nudge(client)


@pytest.mark.usefixtures("failpoints")
def test_a_stream_that_broke_often_in_its_life_is_taken_up_at_once_nevertheless(
    mongo_url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses grow while it does not open, not with every break for ever."""
    monkeypatch.setattr(hints_module, "_FIRST_PAUSE_SECONDS", 0.05)
    events = Events()
    url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")

    async def run() -> None:
        async with opened(url, events) as store, opened(mongo_url) as other:
            channel, sender = store.hints(), other.hints()
            assert channel is not None
            assert sender is not None
            channel.listen(READY, lambda hint: None)
            for turn in range(1, 8):
                await auntil(lambda: len(events.named("change_stream_open")) >= turn, SOON)  # noqa: B023
                with failing(client, "getMore", "aggregate", app=STREAMING, closeConnection=True):
                    sender.send([Hint(READY, ("x",))])
                    await auntil(lambda: len(events.named("change_stream_broken")) >= turn)  # noqa: B023

    asyncio.run(run())


def test_a_dropped_collection_does_not_end_the_hints(mongo_url: str, raw: Raw) -> None:
    heard: list[Hint] = []
    events = Events()

    async def run() -> None:
        async with opened(mongo_url, events) as one, opened(mongo_url) as other:
            listening, sending = one.hints(), other.hints()
            assert listening is not None
            assert sending is not None
            listening.listen(READY, heard.append)
            await auntil(lambda: listening.trust)
            await asyncio.to_thread(raw.holdfast_signals.drop)
            await auntil(lambda: len(events.named("change_stream_open")) >= 2, 5)
            heard.clear()
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: [hint for hint in heard if hint.subjects == ("lane",)], SOON)

    asyncio.run(run())


def test_what_somebody_else_wrote_into_the_signals_hurts_nobody(mongo_url: str, raw: Raw) -> None:
    heard: list[Hint] = []

    async def run() -> None:
        async with opened(mongo_url) as one, opened(mongo_url) as other:
            listening, sending = one.hints(), other.hints()
            assert listening is not None
            assert sending is not None
            listening.listen(READY, heard.append)
            await auntil(lambda: listening.trust)
            heard.clear()
            odd: list[Any] = [None, 1, "text", {"kind": READY}, []]
            odd += [{"kind": 1, "subjects": 2, "count": "x"}, {"kind": READY, "subjects": [7], "count": 1}]
            for n, body in enumerate([*odd, odd]):
                raw.holdfast_signals.insert_one({"_id": f"odd{n}", "hints": body})
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: heard and heard[-1].subjects == ("lane",), SOON)

    asyncio.run(run())


def test_a_receiver_that_fails_does_not_end_the_hints(mongo_url: str) -> None:
    heard: list[Hint] = []
    events, trusted = Events(), list[int]()

    def receive(hint: Hint) -> None:
        if hint.subjects == ("bad",):
            raise RuntimeError("a mistake of ours")
        heard.append(hint)

    async def run() -> None:
        async with opened(mongo_url) as one, opened(mongo_url) as other:
            sending = other.hints()
            assert sending is not None

            def observe(event: str, facts: Mapping[str, Any]) -> None:
                events(event, facts)
                trusted.extend([listening.trust] if event == "change_stream_broken" else [])

            listening = channel_of(one, observe)
            listening.listen(READY, receive)
            await auntil(lambda: listening.trust)
            sending.send([Hint(READY, ("bad",))])
            await auntil(lambda: events.named("change_stream_broken"))
            await auntil(lambda: len(events.named("change_stream_open")) == 2)
            heard.clear()
            sending.send([Hint(READY, ("good",))])
            await auntil(lambda: heard, SOON)
            await listening.close()

    asyncio.run(run())
    assert trusted == [0], "it was trusted when nobody listened"
    assert "a mistake of ours" in events.named("change_stream_broken")[0]["why"]
    assert [hint.subjects for hint in heard] == [("good",)], "it began anew before the bad one"


def test_one_receiver_that_fails_keeps_no_other_from_looking(mongo_url: str) -> None:
    heard: list[Hint] = []

    def fail(hint: Hint) -> None:
        raise RuntimeError("a mistake of ours")

    async def run() -> None:
        async with opened(mongo_url) as store:
            listening = channel_of(store, Events())
            listening.listen(READY, fail)
            listening.listen(ENDED, heard.append)
            await auntil(lambda: heard, SOON)
            assert listening.trust
            await listening.close()

    asyncio.run(run())


def test_an_event_that_cannot_be_read_does_not_end_the_hints(mongo_url: str, raw: Raw) -> None:
    """Text that is no UTF-8, which the server takes. A strict driver would refuse the whole event."""
    heard: list[Hint] = []
    events = Events()
    odd = bson.encode({"_id": "odd", "hints": [], "text": "12345678"}).replace(b"12345678", b"\xff\xfe" * 4)

    async def run() -> None:
        async with opened(mongo_url, events) as one, opened(mongo_url) as other:
            listening, sending = one.hints(), other.hints()
            assert listening is not None
            assert sending is not None
            listening.listen(READY, heard.append)
            await auntil(lambda: listening.trust)
            sending.send([Hint(READY, ("before",))])
            await auntil(lambda: heard[-1].subjects == ("before",))  # from here on it could be resumed
            await asyncio.to_thread(raw.holdfast_signals.insert_one, RawBSONDocument(odd))
            heard.clear()
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: heard, SOON)

    try:
        asyncio.run(run())
    finally:
        raw.holdfast_signals.delete_one({"_id": "odd"})
    assert events.named("change_stream_broken") == []


def test_those_of_one_process_who_listen_share_a_stream(mongo_url: str) -> None:
    async def run() -> None:
        events = Events()
        async with opened(mongo_url, observe=events) as one, opened(mongo_url) as other, opened(mongo_url) as sender:
            first, second, sending = one.hints(), other.hints(), sender.hints()
            assert first is not None
            assert second is not None
            assert sending is not None
            heard: list[tuple[str, Hint]] = []
            first.listen(READY, lambda hint: heard.append(("first", hint)))
            await auntil(lambda: first.trust)
            second.listen(READY, lambda hint: heard.append(("second", hint)))
            assert second.trust == first.trust > 0
            assert ("second", Hint(READY, ())) in heard  # it looks, as it came late
            assert first._stream is second._stream
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: {who for who, hint in heard if hint.subjects} == {"first", "second"})
            await other.close()
            assert first.trust > 0
            heard.clear()
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: [who for who, _ in heard] == ["first"])
        assert hints_module._streams == {}

    asyncio.run(run())


def test_a_stream_that_nobody_follows_is_not_trusted(mongo_url: str) -> None:
    async def run() -> None:
        async with opened(mongo_url) as store:
            channel = store.hints()
            assert channel is not None
            channel.listen(READY, lambda hint: None)
            await auntil(lambda: channel.trust)
            assert channel._stream is not None
            assert channel._stream._task is not None
            channel._stream._task.cancel()
            await asyncio.wait({channel._stream._task}, timeout=SOON)
            assert channel.trust == 0

    asyncio.run(run())


# --- when a hint cannot be sent


@pytest.mark.parametrize("first", ["a name that no document can hold", "a mistake of ours"])
def test_what_cannot_be_sent_does_not_hold_up_the_others(mongo_url: str, first: str) -> None:
    heard: list[Hint] = []
    events = Events()

    async def run() -> None:
        async with opened(mongo_url) as one, opened(mongo_url, events) as other:
            listening, sending = one.hints(), other.hints()
            assert listening is not None
            assert sending is not None
            for kind in (READY, ENDED):
                listening.listen(kind, heard.append)
            await auntil(lambda: listening.trust)
            heard.clear()
            if first == "a mistake of ours":
                sending._signals = FailingOnce(sending._signals)  # type: ignore[assignment]
                sending.send([Hint(READY, ("first",))])
            else:
                sending.send([Hint(READY, ("\ud800",)), Hint(ENDED, ("x",))])
            await asyncio.sleep(0)  # that one is on its way, and this one gathers
            sending.send([Hint(READY, ("lane",))])
            await auntil(lambda: heard and heard[-1].subjects == ("lane",), SOON)

    asyncio.run(run())
    if first == "a mistake of ours":
        assert [facts["why"] for facts in events.named("hints_not_sent")] == ["RuntimeError: a mistake of ours"]
    else:
        assert heard[:2] == [Hint(READY, ()), Hint(ENDED, ())], "whoever it was for shall look"


class FailingOnce:
    """A collection whose first write fails in a way that nobody foresaw."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self._failed = False

    async def replace_one(self, *arguments: Any, **more: Any) -> Any:
        if not self._failed:
            self._failed = True
            raise RuntimeError("a mistake of ours")
        return await self._collection.replace_one(*arguments, **more)


# --- without one


def channel_of(store: MongoStore, observe: Observe, ask_again_seconds: float = 0.02) -> StreamHints:
    """Another channel on the store, which asks for a change stream again soon where there is none."""
    return StreamHints(
        store._collection("holdfast_signals", majority=True),
        "another process",
        use_change_streams=True,
        observe=observe,
        ask_again_seconds=ask_again_seconds,
    )


@pytest.mark.usefixtures("failpoints")
@pytest.mark.parametrize("code", [13, 8000, 40573])
def test_a_change_stream_is_asked_for_again_quietly_where_there_is_none(
    mongo_url: str, client: Client, code: int
) -> None:
    events, looked = Events(), list[Hint]()
    url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")

    async def run() -> None:
        async with opened(url) as store:
            channel = channel_of(store, events)
            with failing(client, "aggregate", app=STREAMING, times=4, errorCode=code):
                channel.listen(READY, looked.append)
                await auntil(lambda: events.named("no_change_streams"))
                assert channel.trust == 0
                await auntil(lambda: channel.trust)  # that was four times later
            await channel.close()

    asyncio.run(run())
    assert [event for event, _ in events.all] == ["no_change_streams", "change_stream_open"]
    assert len(looked) == 2, "once because there is none, and once because there is one"


@pytest.mark.usefixtures("failpoints")
def test_a_role_that_is_taken_away_and_given_back(mongo_url: str, client: Client) -> None:
    events = Events()
    url = with_options(mongo_url, appname=STREAMING, serverMonitoringMode="poll")

    async def run() -> None:
        async with opened(url) as store, opened(mongo_url) as other:
            channel, sending = channel_of(store, events), other.hints()
            assert sending is not None
            channel.listen(READY, lambda hint: None)
            for turn in (1, 2):
                await auntil(lambda: len(events.named("change_stream_open")) == turn)  # noqa: B023
                with failing(client, "getMore", "aggregate", app=STREAMING, errorCode=13):
                    sending.send([Hint(READY, ("x",))])  # the stream's wait ends with this event
                    await auntil(lambda: len(events.named("no_change_streams")) == turn)  # noqa: B023
                    assert channel.trust == 0
            await auntil(lambda: channel.trust)
            await channel.close()

    asyncio.run(run())
    assert events.named("change_stream_broken") == []


@pytest.mark.slow
def test_a_standalone_that_becomes_a_replica_set_gets_its_change_stream(tmp_path: Path) -> None:
    server = Mongod(tmp_path / "db")
    url = with_options(server.url("shop"), serverMonitoringMode="poll")
    events = Events()

    async def run() -> None:
        async with opened(url) as store:
            channel = channel_of(store, events, 0.1)
            channel.listen(READY, lambda hint: None)
            await auntil(lambda: events.named("no_change_streams"))
            await asyncio.to_thread(server.kill)
            server.replica_set = "rs0"
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(server.initiate)
            await auntil(lambda: channel.trust, 30)
            await channel.close()

    server.start()
    try:
        asyncio.run(run())
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a standalone", "a setting"])
def test_without_a_stream_looking_often_does_it(request: pytest.FixtureRequest, kind: str) -> None:
    if kind == "a standalone":
        url, settings = request.getfixturevalue("alone_url"), {}
    else:
        url, settings = request.getfixturevalue("mongo_url"), {"use_change_streams": False}
    with two(url, poll_interval_seconds=1.0, **settings) as (runner, other):
        began = time.monotonic()
        handle = other.task.submit()
        assert handle.result(timeout=patient(20)) == 7
        assert time.monotonic() - began < 1.5
        assert runner.hints.trust == other.hints.trust == 0
        if kind == "a standalone":
            assert len(runner.events.named("no_change_streams")) == 1
        assert runner.events.named("change_stream_broken") == []
        assert [record.status for record in other.app.invocations()] == [Status.SUCCESS]


def test_on_a_standalone_no_signal_is_written(alone_url: str) -> None:
    """Nobody could hear it."""
    with two(alone_url, poll_interval_seconds=0.1) as (_, other):
        other.task.submit().result(timeout=patient(20))
    with MongoClient[dict[str, Any]](alone_url) as client:
        assert client[database_of(alone_url)].holdfast_signals.count_documents({}) == 0


def test_where_streams_are_not_wanted_no_signal_is_written(mongo_url: str, raw: Raw) -> None:
    with two(mongo_url, poll_interval_seconds=0.1, use_change_streams=False) as (_, other):
        other.task.submit().result(timeout=patient(20))
    assert raw.holdfast_signals.count_documents({}) == 0
