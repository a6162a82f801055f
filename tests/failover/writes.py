"""Each kind of write that the MongoDB store sends, as a scenario in which its next message goes wrong.

Whatever happens to the message, the write has taken place exactly once in the end, and its caller is told so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec.structs import replace
from pymongo.collection import Collection
from tests.store.mongo.tools import auntil, opened, with_options
from tests.support.proxy import Fate, Rule

from holdfast.errors import CorruptRecord
from holdfast.fleet.services import Executions
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model import changes
from holdfast.model.changes import Applied
from holdfast.model.limits import Release
from holdfast.model.log import Appended
from holdfast.model.queues import QueuePause
from holdfast.model.records import DRAIN, READY, RETENTION_SECONDS, Entry, Hint, Piece, RunState, StoredPayload
from holdfast.model.status import Status
from holdfast.runtime.pauses import pause_queue, pauses_of, resume_queue
from holdfast.store.contract import Filter
from holdfast.store.mongo.schema import (
    ENTRIES,
    INVOCATIONS,
    LOG,
    META,
    PAYLOADS,
    PIECES,
    QUARANTINE,
    RUNNERS,
    SIGNALS,
)
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.conformance_limits import KEY, bounded, holding, limited, waiters
from holdfast.testing.samples import (
    START,
    delivery,
    freeing,
    ids_of,
    invocation,
    owned,
    page,
    pushing,
    runner,
    the,
    wish,
)

RUNNING = Filter(statuses=frozenset({Status.RUNNING}))
PAYLOAD = StoredPayload(digest="ab" * 32, size=3, pieces=1, first=Piece(b"abc"))

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
    stored = await stage.store.insert([invocation("a"), invocation("taken"), invocation("b")])
    assert list(stored) == [True, False, True]
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
    await stage.store.remove_runner("shop", "r")
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


async def asked_runner(stage: Stage) -> None:
    await stage.store.enrol(runner("r"))
    stage.break_next("update", RUNNERS)
    assert await stage.store.ask_runner("shop", "r", wish=DRAIN)
    assert [entry.wish for entry in await stage.store.roster("shop")] == [DRAIN]


async def death(stage: Stage) -> None:
    await stage.store.enrol(runner("r"))
    (entry,) = await stage.store.roster("shop")
    stage.break_next("delete", RUNNERS)
    assert await stage.store.remove_runner(entry.app, entry.id, heartbeat_at=entry.heartbeat_at), (
        "if nobody has declared it, nobody sees to its work"
    )
    assert await stage.store.roster("shop") == []


async def kept_payload(stage: Stage) -> None:
    await stage.store.put_payloads("shop", [PAYLOAD])
    stage.break_next("update", PAYLOADS)
    assert list(await stage.store.keep_payloads("shop", [PAYLOAD.digest, "other"])) == [True, False]


async def payload(stage: Stage) -> None:
    stage.break_next("update", PAYLOADS)
    await stage.store.put_payloads("shop", [PAYLOAD])
    assert await stage.store.get_payload("shop", PAYLOAD.digest) == PAYLOAD


async def piece(stage: Stage) -> None:
    stage.break_next("update", PIECES)
    await stage.store.put_piece("shop", PAYLOAD.digest, 1, PAYLOAD.first)
    assert await stage.store.get_piece("shop", PAYLOAD.digest, 1) == PAYLOAD.first


async def collected(stage: Stage) -> None:
    await stage.store.put_payloads("shop", [PAYLOAD])
    stage.break_next("delete", PAYLOADS)
    await stage.store.collect_payloads("shop", stage.store.now() + 60, 10)
    assert await stage.store.get_payload("shop", PAYLOAD.digest) is None


def execution(id: str) -> Execution:
    return Execution(id=id, service="upkeep", runner_id="r", started_at=START, window_ends_at=START + 10)


def upkeep(stage: Stage) -> Executions:
    return Executions(stage.store, "shop", "upkeep", 60)


async def execution_begins(stage: Stage) -> None:
    stage.break_next("insert", ENTRIES)
    assert await upkeep(stage).begin(execution("one")) is None
    assert await upkeep(stage).begin(execution("two")) == execution("one"), "one at a time"


async def execution_ends(stage: Stage) -> None:
    await upkeep(stage).begin(execution("one"))
    stage.break_next("update", ENTRIES)
    assert await upkeep(stage).end(execution("one"), ExecutionStatus.COMPLETED, START + 5, "done")
    (ended,) = await upkeep(stage).trail(10)
    assert (ended.status, ended.ended_at) == (ExecutionStatus.COMPLETED, START + 5)


async def execution_forgotten(stage: Stage) -> None:
    await upkeep(stage).begin(execution("one"))
    await upkeep(stage).end(execution("one"), ExecutionStatus.COMPLETED, START + 5, "done")
    await upkeep(stage).begin(execution("two"))
    stage.break_next("delete", ENTRIES)
    await upkeep(stage).forget([execution("one")], 10)
    assert await upkeep(stage).trail(10) == [execution("two")]


async def key_freed(stage: Stage) -> None:
    await stage.store.insert([invocation("a", key="k")])
    stage.break_next("update", INVOCATIONS)
    await stage.store.apply([freeing("a", "k")])
    assert (await the(stage.store, "a")).key is None
    assert list(await stage.store.insert([invocation("b", key="k")])) == [True]


async def ended_removed(stage: Stage) -> None:
    record = await owned(stage.store, "a")
    await stage.store.apply([changes.completed(record, result=b"\x07", operation="end", at=START + 1)])
    await stage.store.insert([invocation("b")])
    stage.break_next("delete", INVOCATIONS)
    await stage.store.remove_ended("shop", ["a", "b"])
    assert [found["id"] for found in stage.invocations.find({})] == ["b"]


async def expired_removed(stage: Stage) -> None:
    record = await owned(stage.store, "a")
    await stage.store.apply([changes.completed(record, result=b"\x07", operation="end", at=START + 1)])
    stage.break_next("delete", INVOCATIONS)
    await stage.store.remove_expired("shop", START + 2 + RETENTION_SECONDS, 10)
    assert list(stage.invocations.find({})) == []


async def told(stage: Stage) -> None:
    record = await owned(stage.store, "a")
    end = changes.completed(record, result=b"\x07", operation="end", at=START + 1)
    await stage.store.apply([replace(end, outbox=("t",))])
    stage.break_next("update", INVOCATIONS)
    await stage.store.apply(delivery("a"))
    (found,) = stage.invocations.find({})
    assert "outbox" not in found
    assert "expires_at" in found


async def queue_paused(stage: Stage) -> None:
    stage.break_next("insert", ENTRIES)
    pause = QueuePause(app="shop", name="mail", at=START, by="ann", reason="", operation="p")
    assert await pause_queue(stage.store, pause) == pause
    assert list(await pauses_of(stage.store, "shop")) == [pause]


async def queue_resumed(stage: Stage) -> None:
    await pause_queue(stage.store, QueuePause(app="shop", name="m", at=START, by="ann", reason="", operation="p"))
    stage.break_next("update", ENTRIES)
    assert await resume_queue(stage.store, "shop", "m", "r")
    assert list(await pauses_of(stage.store, "shop")) == []


ENTRY = Entry(app="shop", kind="schedule", name="nightly", body=b"{}")


async def entry_made(stage: Stage) -> None:
    stage.break_next("insert", ENTRIES)
    assert await stage.store.put_entry(ENTRY)
    assert list(await stage.store.entries("shop", "schedule")) == [ENTRY]


async def entry_changed(stage: Stage) -> None:
    await stage.store.put_entry(ENTRY)
    changed = replace(ENTRY, version=2, due_at=START)
    stage.break_next("update", ENTRIES)
    assert await stage.store.put_entry(changed)
    assert list(await stage.store.entries("shop", "schedule")) == [changed]


async def entry_removed(stage: Stage) -> None:
    await stage.store.put_entry(ENTRY)
    stage.break_next("delete", ENTRIES)
    await stage.store.remove_entry(ENTRY)
    assert list(await stage.store.entries("shop", "schedule")) == []


async def entry_set_aside(stage: Stage) -> None:
    await stage.store.put_entry(ENTRY)
    stage.break_next("delete", ENTRIES)
    await stage.store.quarantine_entry(ENTRY, CorruptRecord("it says nothing", kind="schedule", id="nightly"))
    assert list(await stage.store.entries("shop", "schedule")) == []
    assert [each.id for each in await stage.store.quarantined("shop")] == ["nightly"]


async def hidden_set_aside(stage: Stage) -> None:
    await stage.store.insert([invocation("a"), invocation("b")])
    stage.invocations.update_one({"id": "a"}, {"$set": {"status": "levitating"}})
    stage.break_next("delete", INVOCATIONS)
    assert await stage.store.quarantine_hidden("shop") <= 1  # none, if the reply was lost and it asked again
    assert [each.id for each in await stage.store.quarantined("shop")] == ["a"]


async def waiter_released(stage: Stage) -> None:
    holder = await holding(stage.store, "a")
    await stage.store.insert([limited("b")])
    assert (await stage.store.claim(bounded("too many"))).records == ()
    assert await waiters(stage.store) == ["b"]
    await stage.store.apply([changes.completed(holder, result=b"\x07", operation="end", at=START + 1)])
    stage.break_next("findAndModify", INVOCATIONS)
    await stage.store.release_waiters(
        "shop", [Release(limit_key=KEY, max_running=1)], operation="release", at=START + 1
    )
    record = await the(stage.store, "b")
    assert [entry.status for entry in record.history].count(Status.REROUTED) == 1


async def page_appended(stage: Stage) -> None:
    await stage.store.insert([invocation("run", run=RunState())])
    stage.break_next("insert", LOG)
    first = page(1, run="run")
    assert list(await stage.store.append([first])) == [Appended()]
    assert list(await stage.store.read_log("shop", first.run, limit=10)) == [first]


async def log_removed(stage: Stage) -> None:
    await stage.store.append([page(1, run="run")])
    stage.break_next("delete", LOG)
    await stage.store.remove_log("shop", page(1, run="run").run, before=1)
    assert not list(await stage.store.read_log("shop", page(1, run="run").run, limit=10))


async def message_pushed(stage: Stage) -> None:
    await stage.store.insert([invocation("run", run=RunState())])
    stage.break_next("update", INVOCATIONS)
    await stage.store.apply([pushing("run")])
    record = await the(stage.store, "run")
    assert record.run is not None
    assert (len(record.run.inbox), record.run.pushed) == (1, 1)


class Kind(NamedTuple):
    """A kind of write: the store's method, and a scenario that breaks it."""

    method: str
    play: Callable[[Stage], Awaitable[None]]


KINDS = {
    "insert": Kind("insert", insert),
    "claim of one": Kind("claim", claim_one),
    "claim of many": Kind("claim", claim_many),
    "claim asked again": Kind("claim", claim_asked_again),
    "start": Kind("apply", starts),
    "end": Kind("apply", ends),
    "enrol": Kind("enrol", enrol),
    "heartbeat": Kind("heartbeat", heartbeat),
    "leave": Kind("remove_runner", leave),
    "hints": Kind("hints", hints),
    "set aside, the copy": Kind("claim", set_aside_a_copy),
    "set aside, the original": Kind("claim", set_aside_the_original),
    "order to a runner": Kind("ask_runner", asked_runner),
    "death of a runner": Kind("remove_runner", death),
    "payload kept": Kind("keep_payloads", kept_payload),
    "payload put": Kind("put_payloads", payload),
    "piece put": Kind("put_piece", piece),
    "payload collected": Kind("collect_payloads", collected),
    "execution begins": Kind("put_entry", execution_begins),
    "execution ends": Kind("put_entry", execution_ends),
    "execution forgotten": Kind("remove_entry", execution_forgotten),
    "key freed": Kind("apply", key_freed),
    "ended removed": Kind("remove_ended", ended_removed),
    "expired removed": Kind("remove_expired", expired_removed),
    "end told": Kind("apply", told),
    "queue paused": Kind("put_entry", queue_paused),
    "queue resumed": Kind("put_entry", queue_resumed),
    "entry made": Kind("put_entry", entry_made),
    "entry changed": Kind("put_entry", entry_changed),
    "entry removed": Kind("remove_entry", entry_removed),
    "entry set aside": Kind("quarantine_entry", entry_set_aside),
    "hidden ones set aside": Kind("quarantine_hidden", hidden_set_aside),
    "waiter released": Kind("release_waiters", waiter_released),
    "page appended": Kind("append", page_appended),
    "log removed": Kind("remove_log", log_removed),
    "message pushed": Kind("apply", message_pushed),
}
