"""Every query has an index: what the store sends is caught on its way and explained by the server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from benchmarks.commands import Command, CommandCounter, Sent
from msgspec.structs import replace
from pymongo import MongoClient
from pymongo.database import Database
from tests.store.mongo.tools import database_of, opened, play

from holdfast.errors import CorruptRecord
from holdfast.fleet.services import Executions
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model import changes
from holdfast.model.keeping import Kept
from holdfast.model.limits import Limit, Release
from holdfast.model.queues import QueuePause
from holdfast.model.records import RETENTION_SECONDS, Entry, Piece, lane_of
from holdfast.model.status import Status
from holdfast.runtime.pauses import pause_queue, pauses_of, resume_queue
from holdfast.store.contract import EntryOrder, Filter, Order
from holdfast.store.mongo import schema
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.conformance_payloads import digest_of, large, put, stored
from holdfast.testing.conformance_runs import updating
from holdfast.testing.samples import (
    LANE,
    RUN,
    START,
    TASK,
    delivery,
    freeing,
    ids_of,
    invocation,
    owned,
    page,
    pushing,
    runner,
    suspended,
    wish,
)

pytestmark = [pytest.mark.xdist_group("mongo")]

Raw = Database[dict[str, Any]]
Step = Callable[[MongoStore], Awaitable[object]]

FEW_KEYS = 60
TASKS = [f"shop:task{number}" for number in range(500)]
MANY_LANES = tuple(lane_of("default", task) for task in TASKS)


# --- explaining


def explained(raw: Raw, command: Command) -> list[dict[str, Any]]:
    """The server's explanations of a command that was sent to it, one for each update in it."""
    kept = {
        name: value
        for name, value in command.items()
        if name not in {"lsid", "txnNumber", "writeConcern", "readConcern", "ordered"} and not name.startswith("$")
    }
    singles = [kept | {"updates": [one]} for one in kept["updates"]] if "updates" in kept else [kept]
    singles = [
        single | {"deletes": [one]} for single in singles for one in single.get("deletes", [None]) if one
    ] or singles
    return [raw.command("explain", single, verbosity="executionStats") for single in singles]


def stages(plan: object) -> Iterator[str]:
    """All stages of the winning plans in an explanation."""
    if isinstance(plan, list):
        for part in plan:
            yield from stages(part)
    if isinstance(plan, dict):
        for name, value in plan.items():
            if name == "stage" and isinstance(value, str):
                yield value
            elif name != "rejectedPlans":
                yield from stages(value)


def number(name: str, explanation: object) -> int:
    """The largest value of that name in an explanation."""
    if isinstance(explanation, list):
        return max((number(name, part) for part in explanation), default=0)
    if isinstance(explanation, dict):
        here = explanation.get(name, 0)
        return max([here if isinstance(here, int) else 0, *(number(name, part) for part in explanation.values())])
    return 0


def bad_plans(raw: Raw, commands: list[tuple[Sent, Command]]) -> list[tuple[Command, set[str]]]:
    found = []
    for (name, _), command in commands:
        if name in ("insert", "buildInfo", "dbStats"):  # they search nothing
            continue
        for explanation in explained(raw, command):
            used = set(stages(explanation))
            assert used, explanation
            if used & {"COLLSCAN", "SORT"}:
                found.append((command, used))
    return found


def caught(url: str, step: Step) -> list[tuple[Sent, Command]]:
    """The commands that a step sends, inserts aside: they search nothing."""

    async def run() -> list[tuple[Sent, Command]]:
        async with opened(url, use_change_streams=False) as store:
            with CommandCounter(database_of(url)) as sent:
                await step(store)
            return [(key, command) for key, command in sent.commands if key[0] not in {"insert", "listIndexes"}]

    return asyncio.run(run())


# --- every operation


async def stocked(store: MongoStore) -> None:
    """Some of everything, so that the planner has a choice."""
    for app in ("shop", "other"):
        for task in (TASK, "shop:other"):
            records = [
                invocation(f"{task}{n:03}", app=app, task=task, queue=f"q{n % 3}", priority=n % 5, due_at=START + n % 7)
                for n in range(60)
            ]
            await store.insert(records)
        lanes = tuple(lane_of(f"q{n}", TASK) for n in range(3))
        taken = await store.claim(wish(f"stock {app}", app=app, lanes=lanes, limit=30, at=START + 10))
        await store.apply(
            [changes.completed(r, result=b"\x01", operation=f"end {r.id}", at=START) for r in taken.records[:15]]
        )
        await store.apply(
            [
                replace(changes.completed(r, result=b"", operation=f"end {r.id}", at=START + n), outbox=("t",))
                for n, r in enumerate(taken.records[15:20])
            ]
        )
        limited = [invocation(f"l{n}", app=app, queue="limited", limit_key=f"k{n % 3}") for n in range(90)]
        await store.insert(limited[:60])
        await store.claim(wish(f"limited {app}", app=app, lanes=(LIMITED,), limit=60, limits=LIMITS))
        await store.insert(limited[60:])
        having = [{"stage": "packed" if n % 2 else "sent", "color": "red"} for n in range(40)]
        await store.insert([invocation(f"with{n}", app=app, attributes=some) for n, some in enumerate(having)])
        for n in range(30):
            await pause_queue(store, paused(f"q{n}", app))
            await store.put_entry(Entry(app=app, kind="event", name=f"e{n:02}", body=b"{}", keep_until=START + n))
        for n in range(3):
            await store.enrol(runner(f"r{n}", app=app))
            await Executions(store, app, f"s{n}", 60).begin(execution(f"e{n}", service=f"s{n}"))
        await put(store, *range(40), app=app, pieces=2)
        for n in range(40, 60):
            await store.put_piece(app, digest_of(n), 1, Piece(b"orphan"))
        referring = [invocation(f"large{n}", app=app, arguments=large(n).data) for n in range(20)]
        await store.insert(referring)
        await stock_runs(store, app)


async def stock_runs(store: MongoStore, app: str) -> None:
    runs = [invocation(f"run{n:02}", app=app, queue="runs", run=RUN) for n in range(40)]
    await store.insert(runs)
    taken = await store.claim(wish(f"runs {app}", app=app, lanes=(lane_of("runs", TASK),), limit=40))
    await store.apply(
        [suspended(r, wake_at=START + n, operation=f"s {r.id}") for n, r in enumerate(taken.records[:15])]
    )
    ends = [changes.completed(r, result=b"", operation=f"e {r.id}", at=START) for r in taken.records[15:30]]
    await store.apply(ends)
    for r in taken.records:
        payloads = (digest_of(39),) if r.id == "run00" else ()
        await store.append([page(1, run=r.id, app=app, payloads=payloads)])
        await store.append([page(2, run=r.id, app=app)])


FAILED = frozenset({Status.FAILED})


def paused(name: str, app: str = "shop") -> QueuePause:
    return QueuePause(app=app, name=name, at=START, by="ann", reason="", operation=f"pause {name}")


def execution(id: str, service: str = "s0") -> Execution:
    return Execution(id=id, service=service, runner_id="r0", started_at=START, window_ends_at=START + 1)


async def declare_one_dead(store: MongoStore) -> None:
    (*_, last) = await store.roster("shop")
    assert await store.remove_runner(last.app, last.id, heartbeat_at=last.heartbeat_at)


async def collect(store: MongoStore) -> None:
    """Twice: what is still referred to is wanted again, and the pieces of the others are gone."""
    assert (await store.collect_payloads("shop", store.now() + 1, 100)).removed > 0
    assert (await store.collect_payloads("shop", store.now() + 1, 100)).removed == 0


async def apply_twice(store: MongoStore) -> None:
    record = await owned(store, "to end")
    change = changes.completed(record, result=b"\x01", operation="end", at=START)
    await store.apply([change])
    await store.apply([change])


async def update_run(store: MongoStore) -> None:
    (record,) = await store.get("shop", ["run36"])
    assert record is not None
    assert list(await store.apply([updating(record, replace(RUN, tail=9))])) == [changes.APPLIED]


async def put_twice(store: MongoStore) -> None:
    assert await store.put_entry(ENTRY)
    assert await store.put_entry(ENTRY), "found to be there"


LANES = tuple(lane_of(f"q{n}", TASK) for n in range(3))
LIMITED = lane_of("limited", TASK)
LIMITS = {TASK: Limit(2)}
RELEASES = [Release(limit_key=f"k{n}", count=2, max_running=4, without=frozenset({"a|b"})) for n in range(3)]
ENTRY = Entry(app="shop", kind="schedule", name="nightly", body=b"{}")
PACKED = frozenset({("stage", "packed")})
STEPS: dict[str, Step] = {
    "claim one": lambda store: store.claim(wish("c1", lanes=LANES, limit=1, at=START + 10)),
    "claim many": lambda store: store.claim(wish("c2", lanes=LANES, limit=10, at=START + 10)),
    "claim ids": lambda store: store.claim(wish("c3", lanes=LANES, limit=2, ids=(f"{TASK}040", f"{TASK}041"))),
    "claim nothing": lambda store: store.claim(wish("c4", lanes=("none|x",), limit=10)),
    "claim one of nothing": lambda store: store.claim(wish("c5", lanes=("none|x",), limit=1)),
    "claim again": lambda store: store.claim(wish("stock shop", lanes=LANES, limit=40, at=START + 10, again=True)),
    "claim limited ones": lambda store: store.claim(wish("c6", lanes=(LIMITED,), limit=3, limits=LIMITS)),
    "claim a lone limited one": lambda store: store.claim(wish("c7", lanes=(LIMITED,), limit=1, limits=LIMITS)),
    "release_waiters": lambda store: store.release_waiters("shop", RELEASES[:1], operation="r1", at=START),
    "release_waiters of many keys": lambda store: store.release_waiters("shop", RELEASES, operation="r2", at=START),
    "waiting_keys": lambda store: store.waiting_keys("shop"),
    "find by slot": lambda store: store.find("shop", Filter(limit_key="k1"), 10, order=Order.SLOT),
    "lanes": lambda store: store.lanes("shop"),
    "waiting_keys of ranges": lambda store: store.waiting_keys("shop", [("k", "l")], 2),
    "find by start": lambda store: store.find("shop", Filter(), 10, order=Order.START_BY),
    "find children": lambda store: store.find("shop", Filter(parent="p", statuses=frozenset({Status.RETRY})), 10),
    "apply": apply_twice,
    "insert again": lambda store: store.insert([invocation(f"{TASK}000"), invocation("new")]),
    "get": lambda store: store.get("shop", [f"{TASK}000", "none"]),
    "find_conflicts": lambda store: store.find_conflicts(
        [invocation("x", key="k", dedup_key="t"), invocation("y", key="l")]
    ),
    "free_key": lambda store: store.apply([freeing(f"{TASK}000", "k")]),
    "put_entry": put_twice,
    "put_entry again": lambda store: store.put_entry(replace(ENTRY, version=2, due_at=START)),
    "entries": lambda store: store.entries("shop", "schedule"),
    "entries by name": lambda store: store.entries("shop", "schedule", ["nightly", "weekly"]),
    "due_entries": lambda store: store.entries("shop", "schedule", order=EntryOrder.DUE, limit=5),
    "latest_entries": lambda store: store.entries("shop", "schedule", order=EntryOrder.LATEST, limit=5),
    "entries by subject": lambda store: store.entries("shop", "schedule", subject="i"),
    "latest_entries before": lambda store: store.entries(
        "shop", "schedule", order=EntryOrder.LATEST, limit=5, before="s"
    ),
    "remove_entry": lambda store: store.remove_entry(replace(ENTRY, version=2)),
    "find all": lambda store: store.find("shop", Filter(), 10),
    "find next page": lambda store: store.find("shop", Filter(before_id=f"{TASK}040"), 10),
    "find by status": lambda store: store.find(
        "shop", Filter(statuses=frozenset({Status.SUCCESS, Status.RUNNING})), 10
    ),
    "find by task": lambda store: store.find("shop", Filter(tasks=frozenset({TASK, "shop:other"})), 10),
    "find by queue": lambda store: store.find("shop", Filter(queues=frozenset({"q0", "q2"}), before_id="z"), 10),
    "find by all": lambda store: store.find(
        "shop",
        Filter(statuses=frozenset({Status.REGISTERED}), tasks=frozenset({TASK}), queues=frozenset({"q1"})),
        10,
    ),
    "find by attribute": lambda store: store.find("shop", Filter(attributes=PACKED, before_id="z"), 10),
    "find by attributes": lambda store: store.find(
        "shop", Filter(attributes=PACKED | {("color", "red")}, statuses=frozenset({Status.SUCCESS})), 10
    ),
    "find ends by attribute": lambda store: store.find("shop", Filter(attributes=PACKED), 10, order=Order.LATEST_END),
    "set attributes": lambda store: store.apply(
        [changes.NoteUpdate(app="shop", id=invocation("with0").id, epoch=1, actor="r/w", attributes={"a": "b"})]
    ),
    "find by many tasks": lambda store: store.find("shop", Filter(tasks=frozenset(TASKS)), 10),
    "find by the end of an id": lambda store: store.find("shop", Filter(id_ends="040"), 10),
    "find by the end of an id and task": lambda store: store.find(
        "shop", Filter(id_ends="040", tasks=frozenset({TASK})), 10
    ),
    "apps": lambda store: store.apps(),
    "kept until another time": lambda store: store.apply([Kept(app="shop", id=f"{TASK}000", until=START)]),
    "counts": lambda store: store.counts("shop"),
    "counts of some": lambda store: store.counts("shop", 5),
    "queue_depths of some": lambda store: store.queue_depths("shop", START, 5),
    "quarantined latest": lambda store: store.quarantined("shop", latest=5),
    "keep_payloads that are there": lambda store: store.keep_payloads("shop", [digest_of(0), digest_of(1)]),
    "keep_payloads that are not": lambda store: store.keep_payloads("shop", [digest_of(0), digest_of(99)]),
    "put_piece": lambda store: store.put_piece("shop", digest_of(70), 1, Piece(b"p")),
    "put_payloads": lambda store: store.put_payloads("shop", [stored(70), stored(0)]),
    "get_payload": lambda store: store.get_payload("shop", digest_of(0)),
    "get_piece": lambda store: store.get_piece("shop", digest_of(0), 1),
    "collect_payloads": collect,
    "an execution begins": lambda store: Executions(store, "shop", "s0", 60).begin(execution("new")),
    "an execution ends": lambda store: Executions(store, "shop", "s1", 60).end(
        execution("e1", "s1"), ExecutionStatus.COMPLETED, START, ""
    ),
    "executions": lambda store: Executions(store, "shop", "s0", 0).trail(10),
    "executions are forgotten": lambda store: Executions(store, "shop", "s1", 60).forget([execution("e1", "s1")], 10),
    "owners": lambda store: store.owners("shop"),
    "find by end": lambda store: store.find("shop", Filter(), 5, order=Order.LATEST_END),
    "find by end and outcome": lambda store: store.find(
        "shop", Filter(statuses=FAILED, since=START), 5, order=Order.LATEST_END
    ),
    "find by end, next page": lambda store: store.find(
        "shop", Filter(before=(START, "z"), until=START + 9), 5, order=Order.LATEST_END
    ),
    "find by rerun": lambda store: store.find("shop", Filter(rerun_of="a", before_id="z"), 5),
    "find by outbox": lambda store: store.find("shop", Filter(until=START + 9), 5, order=Order.OUTBOX),
    "find by wake_at": lambda store: store.find("shop", Filter(), 5, order=Order.WAKE_AT),
    "find by wake_at and task": lambda store: store.find(
        "shop", Filter(tasks=frozenset({TASK})), 5, order=Order.WAKE_AT
    ),
    "append to what another has written": lambda store: store.append([page(1, run="run01", operation="x")]),
    "read_log": lambda store: store.read_log("shop", "run01", limit=10),
    "read_log from its end": lambda store: store.read_log("shop", "run01", limit=1, after=1, latest=True),
    "read_log up to a position": lambda store: store.read_log("shop", "run01", limit=1, until=5, latest=True),
    "mark of streams": lambda store: store.apply(
        [changes.StreamMark(app="shop", id=f"{TASK}000", epoch=1, actor="r0/w0")]
    ),
    "push": lambda store: store.apply([pushing("run01"), pushing("run35")]),
    "update of a run": update_run,
    "remove_log": lambda store: store.remove_log("shop", "run01", before=1),
    "remove_ended of runs": lambda store: store.remove_ended("shop", ["run16", "run17"]),
    "remove_expired of runs": lambda store: store.remove_expired("shop", START + RETENTION_SECONDS, 100),
    "delivered": lambda store: store.apply(delivery(f"{TASK}000", f"{TASK}001")),
    "remove_ended": lambda store: store.remove_ended("shop", [f"{TASK}000", f"{TASK}001"]),
    "remove_expired": lambda store: store.remove_expired("shop", START + RETENTION_SECONDS, 5),
    "silent": lambda store: store.silent("shop"),
    "ask_runner": lambda store: store.ask_runner("shop", "r0", wish="stop"),
    "remove_runner that is silent": declare_one_dead,
    "enrol": lambda store: store.enrol(runner("new")),
    "heartbeat": lambda store: store.heartbeat("shop", "r1"),
    "remove_runner": lambda store: store.remove_runner("shop", "r1"),
    "roster": lambda store: store.roster("shop"),
    "quarantined": lambda store: store.quarantined("shop"),
    "quarantined by id": lambda store: store.quarantined("shop", "a"),
    "quarantine_hidden": lambda store: store.quarantine_hidden("shop"),
    "quarantine_entry": lambda store: store.quarantine_entry(ENTRY, CorruptRecord("no")),
    "queue_depths": lambda store: store.queue_depths("shop", START),
    "a queue is paused": lambda store: pause_queue(store, paused("new")),
    "a queue is paused that is": lambda store: pause_queue(store, paused("q1")),
    "a queue is resumed": lambda store: resume_queue(store, "shop", "q0", "r"),
    "a queue is resumed that is not paused": lambda store: resume_queue(store, "shop", "none", "r"),
    "pauses": lambda store: pauses_of(store, "shop"),
    "check": lambda store: store.check(),
}


@pytest.mark.slow
def test_no_operation_scans_a_collection_or_sorts_in_memory(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    bad = {}
    for name, step in STEPS.items():
        commands = [
            item
            for item in caught(mongo_url, step)
            if item[0][0] not in {"buildInfo", "count", "getDefaultRWConcern", "getParameter"}
        ]
        assert commands, name
        bad[name] = bad_plans(raw, commands)
    assert {name: plans for name, plans in bad.items() if plans} == {}


def test_setting_aside_needs_no_scan(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    raw.holdfast_invocations.update_many({"app": "shop", "ready": True}, {"$set": {"history": "?"}})
    commands = caught(mongo_url, lambda store: store.claim(wish("c", lanes=LANES, limit=2, at=START + 10)))
    assert ("delete", "holdfast_invocations") in dict(commands)
    assert bad_plans(raw, commands) == []


def test_counting_reads_no_document(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    ((_, command),) = caught(mongo_url, STEPS["counts"])
    (explanation,) = explained(raw, command)
    assert number("totalDocsExamined", explanation) == 0


def test_the_depths_of_what_is_ready_are_counted_without_reading_a_document(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    (_, ready), *rest = caught(mongo_url, STEPS["queue_depths"])
    (explanation,) = explained(raw, ready)
    assert number("totalDocsExamined", explanation) == 0
    assert len(rest) == 2


def test_the_lanes_are_told_by_jumping_from_one_to_the_next(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    ((_, command),) = caught(mongo_url, STEPS["lanes"])
    (explanation,) = explained(raw, command)
    assert "DISTINCT_SCAN" in set(stages(explanation["queryPlanner"]))
    assert number("totalDocsExamined", explanation) == 0


def test_the_keys_that_somebody_waits_for_are_told_by_jumping_from_one_to_the_next(mongo_url: str, raw: Raw) -> None:
    play(mongo_url, stocked)
    (_, keys), (_, held) = caught(mongo_url, STEPS["waiting_keys"])
    (explanation,) = explained(raw, keys)
    assert "DISTINCT_SCAN" in set(stages(explanation["queryPlanner"]))
    assert number("totalDocsExamined", explanation) == 0
    assert number("totalKeysExamined", explained(raw, held)) < 12  # there are 6 slots


def test_every_method_is_explained() -> None:
    """A new method of the store has to be added above."""
    public = {name for name, _ in inspect.getmembers(MongoStore) if not name.startswith("_")}
    tried = {name.split()[0] for name in STEPS} | {"insert"}
    assert public - tried == {
        "abilities",
        "schema_version",
        "now",
        "clock_error",
        "needs_restart",
        "open",
        "close",
        "exists",
        "sizes",
        "hints",
        "joined",
        "transaction",
        "abort_transactions",  # it asks for sessions, which no index has
    }


# --- claims in a crowd


CROWD = 200_000


def gather_a_crowd(raw: Raw) -> None:
    """Half are others' work at the head of the queue, half our own at a higher priority but not due for long."""
    cases = [
        ({"$lt": ["$n", CROWD // 2]}, "shop", "default|a:foreign"),
        ({"$lt": ["$n", CROWD * 3 // 4]}, "shop", "default|z:foreign"),
        ({"$lt": ["$n", CROWD]}, "another", LANE),
    ]

    def chosen(column: int, otherwise: object) -> dict[str, object]:
        branches = [{"case": case[0], "then": case[column]} for case in cases]
        return {"$switch": {"branches": branches, "default": otherwise}}

    theirs = {"$lt": ["$n", CROWD]}
    document = {
        "_id": {"$concat": ["crowd", {"$toString": "$n"}]},
        "id": {"$toString": "$n"},
        "app": chosen(1, "shop"),
        "lane": chosen(2, LANE),
        "rank": {"$cond": [theirs, -100, -50]},
        "due_at": {"$cond": [theirs, START - 1000, LATE]},
        "status": "registered",
        "ready": True,
    }
    numbers = [{"$documents": [{"n": {"$range": [0, 2 * CROWD]}}]}, {"$unwind": "$n"}]
    raw.drop_collection("holdfast_invocations")
    raw.aggregate([*numbers, {"$replaceWith": document}, {"$out": "holdfast_invocations"}])
    # The others are built on every field of the crowd and take most of the time.
    wanted = {(schema.INVOCATIONS, "ready"), (schema.INVOCATIONS, "due")}
    needed = [index.model for index in schema.INDEXES if index[:2] in wanted]
    raw.holdfast_invocations.create_indexes(needed)


LATE = START + 1e6


@pytest.mark.slow
def test_a_claim_looks_at_few_keys_in_a_crowd(new_url: str, client: MongoClient[dict[str, Any]]) -> None:
    raw = client[database_of(new_url)]
    play(new_url, stocked)  # makes the schema
    gather_a_crowd(raw)
    own = [invocation(f"own{n}", priority=n % 3) for n in range(30)]
    sent: list[tuple[Sent, Command]] = []

    async def scenario(store: MongoStore) -> None:
        await store.insert(own)
        with CommandCounter(database_of(new_url)) as counter:
            ten = await store.claim(wish("ten", limit=10))
            one = await store.claim(wish("one", limit=1))
            rest = await store.claim(wish("rest", limit=100))
            lanes = await store.lanes("shop")
        assert [len(got.records) for got in (ten, one, rest)] == [10, 1, 19]
        assert {record.priority for record in ten.records} == {2}
        assert rest.next_due_at == LATE
        assert lanes == sorted({"default|a:foreign", LANE, "default|z:foreign"})
        sent.extend(counter.commands)

    play(new_url, scenario)
    raw.holdfast_invocations.delete_many({"_id": {"$in": [f"shop|{record.id}" for record in own]}})
    play(new_url, lambda store: store.insert(own))  # so that what is explained has something to find
    searches = [item for item in sent if item[0][0] in {"find", "findAndModify", "distinct"}]
    assert len(searches) >= 6
    assert bad_plans(raw, sent) == []
    for key, command in searches:
        assert number("totalKeysExamined", explained(raw, command)) < FEW_KEYS, (key, command)


# --- more lanes than MongoDB merges


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "ready_lanes"), [(1, 3), (10, 3), (1, 500)])
def test_five_hundred_lanes_are_claimed_in_order_without_a_sort(
    mongo_url: str, raw: Raw, limit: int, ready_lanes: int
) -> None:
    chosen = TASKS[:: len(TASKS) // ready_lanes][:ready_lanes]
    records = [invocation(f"i{n:03}", task=task, priority=n % 7) for n, task in enumerate(chosen)]
    late = invocation("later", task=TASKS[-1], due_at=START + 9)
    expected = sorted(records, key=lambda record: (-record.priority, record.id))[:limit]

    async def scenario(store: MongoStore) -> None:
        await store.insert([*records, late])
        claimed = await store.claim(wish("first", lanes=MANY_LANES, limit=limit))
        assert ids_of(claimed.records) == ids_of(expected)
        everything = await store.claim(wish("rest", lanes=MANY_LANES, limit=1000))
        assert len(everything.records) == len(records) - len(expected)
        assert everything.next_due_at == START + 9
        nothing = await store.claim(wish("none", lanes=MANY_LANES[:-1], limit=limit))
        assert (nothing.records, nothing.next_due_at) == ((), None)

    commands = caught(mongo_url, scenario)
    play(mongo_url, lambda store: store.insert([invocation(f"n{n}", task=t) for n, t in enumerate(TASKS)]))
    assert bad_plans(raw, commands) == []
