"""Every answer that `explain` can give so far, each with what would release the invocation."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.codec import ErrorRecord
from holdfast.model.eligibility import INVOCATION, QUEUE, RUNNER, Offer, Reason, lane_obstacle
from holdfast.model.explain import _SAYS, Surroundings, explain
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import (
    Cancellation,
    FailedAttempt,
    HistoryEntry,
    InvocationRecord,
    RunnerRecord,
    RunState,
    Serves,
    Terms,
    WorkerRecord,
    lane_of,
)
from holdfast.model.status import Status

NOW = 1_000_000.0
RECORD = InvocationRecord(
    id="i1", app="shop", task="shop:mail", arguments=b"", created_at=NOW - 60, due_at=NOW - 60, changed_at=NOW - 60
)
LIVE = RunnerRecord(
    id="r1",
    app="shop",
    host="h",
    pid=1,
    version="0",
    started_at=NOW - 100,
    heartbeat_at=NOW - 1,
    concurrency=10,
    tasks=("shop:mail",),
)


CANCELLATION = Cancellation(by="ann", reason="enough", at=NOW - 5, until=NOW + 5)


def around(*roster: RunnerRecord, **more: Any) -> Surroundings:
    return Surroundings(roster=roster, now=NOW, dead_after_seconds=15.0, **more)


def why(record: InvocationRecord, *roster: RunnerRecord) -> str:
    return explain(record, around(*roster)).text


@pytest.mark.parametrize(
    ("record", "roster", "says"),
    [
        ({"due_at": NOW + 90}, [LIVE], "not due for another 1m30s"),
        ({}, [], "no runner is alive"),
        ({}, [replace(LIVE, heartbeat_at=NOW - 60)], "no runner is alive"),
        ({}, [replace(LIVE, draining=True)], "the only runner, r1, is draining, and takes nothing new"),
        ({}, [replace(LIVE, draining=True), replace(LIVE, id="r2", draining=True)], "all 2 runners are draining"),
        ({}, [replace(LIVE, tasks=("shop:other",))], "no runner knows the task 'shop:mail'"),
        ({"task": "shop:mail@1", "run": RunState()}, [LIVE], "It is of version 1 of shop:mail: keep a runner"),
        (
            {"run": RunState()},
            [replace(LIVE, tasks=("shop:mail@2",))],
            "It is of shop:mail without a version: keep a runner with the code that declares that "
            "(they declare shop:mail@2)",
        ),
        ({"queue": "slow"}, [replace(LIVE, queues=("default",))], "no live runner serves the queue 'slow'"),
        (
            {"queue": "slow", "tags": ("eu", "gpu")},
            [replace(LIVE, queues=("default",))],
            "holdfast run --queues slow --tags eu,gpu",
        ),
        ({"tags": ("gpu",)}, [LIVE], "no live runner serves the queue 'default' with the tag gpu (1 alive: r1)"),
        ({"tags": ("eu", "gpu")}, [LIVE], "with all of the tags eu, gpu"),
        (
            {"status": Status.SUSPENDED, "wake_at": NOW + 60},
            [LIVE],
            "suspended for 1m, until 1970-01-12 13:47:40 UTC, in 1m.",
        ),
        (
            {"status": Status.SUSPENDED, "wake_at": NOW + 60, "terms": Terms(timeout=300.0)},
            [LIVE],
            "in 1m (the end of its wait or of its time limit of 5m, whichever is first).",
        ),
        ({"status": Status.PAUSED, "owner": "r1/0"}, [LIVE], "on r1/0 for 1m."),
        ({"tags": ("gpu",)}, [replace(LIVE, tags=("gpu", "eu"))], "1 runner serves it"),
        (
            {},
            [LIVE, replace(LIVE, id="r2")],
            "to be claimed; 2 runners serve it, and 0 of 20 slots are busy. A runner takes it",
        ),
        (
            {},
            [replace(LIVE, heartbeat_at=NOW - 6)],
            "the only runner that serves it was last heard 6 s ago (it counts as dead after 15s). If it was killed",
        ),
        ({}, [replace(LIVE, heartbeat_at=NOW - 6), replace(LIVE, id="r2")], "2 runners serve it, and 0 of 20"),
        ({"status": Status.RUNNING, "owner": "r1/0"}, [LIVE], "its code is running on r1/0 for 1m"),
        ({"status": Status.RUNNING, "owner": "gone/0"}, [LIVE], "no longer on the roster"),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(LIVE, heartbeat_at=NOW - 60)],
            "silent for 1m and counts as dead: its work waits for recovery",
        ),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(LIVE, heartbeat_at=NOW - 60)],
            "and no runner is alive on this store. Start one with `holdfast run`",
        ),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(LIVE, heartbeat_at=NOW - 60), replace(LIVE, id="r2")],
            "counts as dead: its work waits for recovery.",
        ),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(LIVE, heartbeat_at=NOW - 6)],
            "for 1m; that runner was last heard 6 s ago (it counts as dead after 15s).",
        ),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(LIVE, heartbeat_at=NOW + 3600)],
            "the clock of that runner is 1h ahead of this one.",
        ),
        ({"status": Status.PARKED, "reason": "it no longer binds"}, [LIVE], "it no longer binds"),
        ({"status": Status.PARKED, "reason": "x"}, [LIVE], "holdfast wake i1"),
        ({"status": Status.FAILED, "reason": "ValueError: no"}, [LIVE], "ended with an error: ValueError: no"),
        ({"status": Status.SUCCESS}, [], "ended with a result"),
        (
            {"status": Status.CANCELLED, "cancellation": CANCELLATION, "reason": f"{CANCELLATION}; it was stopped"},
            [],
            "cancelled by ann: enough (it was stopped), 5s ago.",
        ),
        (
            {"status": Status.CANCELLING, "owner": "r1/0", "cancellation": CANCELLATION},
            [LIVE],
            "cancelled by ann: enough; asked to end on r1/0 for 1m, it has 5s left to clean up",
        ),
        (
            {"status": Status.CANCELLING, "owner": "gone/0", "cancellation": replace(CANCELLATION, until=NOW - 1)},
            [LIVE],
            "its time to clean up is over, but that runner is no longer on the roster",
        ),
        ({"start_by": NOW + 90}, [], "Start one with `holdfast run`. It expires in 1m30s unless it is started."),
        (
            {"status": Status.RUNNING, "owner": "r1/0", "terms": Terms(timeout=90.0)},
            [LIVE],
            "for 1m of the 1m30s that it may take",
        ),
    ],
)
def test_it_says_what_holds_an_invocation_back(record: dict[str, Any], roster: list[RunnerRecord], says: str) -> None:
    assert says in why(replace(RECORD, **record), *roster)


def test_one_that_runs_may_wait_for_its_children() -> None:
    running = replace(RECORD, status=Status.RUNNING, owner="r1/0")
    children = [replace(RECORD, id=f"c{number}", parent_id="i1") for number in range(4)]

    def told(count: int, *roster: RunnerRecord) -> str:
        beside = around(*roster, children=children[:count], first_child="not due for another 5s.")
        return explain(running, beside).text

    assert told(0, LIVE) == "its code is running on r1/0 for 1m."
    assert told(1, LIVE) == (
        "its code is running on r1/0 for 1m. It may be waiting for its child c0 (shop:mail, registered). "
        "c0: not due for another 5s."
    )
    assert "its children c0 (shop:mail, registered), c1 (shop:mail, registered). c0: not" in told(2, LIVE)
    assert "c2 (shop:mail, registered) and more. c0: not" in told(4, LIVE)
    assert "child" not in told(1)  # that of a dead runner waits for recovery


def test_every_status_has_an_explanation() -> None:
    for status in Status:
        assert len(why(replace(RECORD, status=status, owner="r1/0"), LIVE)) > 10


def test_a_runner_takes_what_it_knows_serves_and_has_tags_for() -> None:
    offer = Offer(serves=Serves(tasks=frozenset({"t"}), queues=frozenset({"q"}), tags=frozenset({"gpu", "eu"})))
    for tags in ((), ("gpu",), ("eu", "gpu")):
        assert lane_obstacle(lane_of("q", "t", tags), offer) is None
    assert lane_obstacle(lane_of("q", "other"), offer) is Reason.UNKNOWN_TASK
    assert lane_obstacle(lane_of("default", "t"), offer) is Reason.QUEUE_NOT_SERVED
    assert lane_obstacle(lane_of("q", "t", ("gpu", "us")), offer) is Reason.TAGS_MISSING
    assert lane_obstacle(lane_of("q", "t"), replace(offer, paused=frozenset({"q"}))) is Reason.QUEUE_PAUSED
    assert lane_obstacle(lane_of("q", "t"), replace(offer, draining=True)) is Reason.DRAINING
    assert lane_obstacle(lane_of("any", "t"), Offer(serves=Serves(tasks=frozenset({"t"})))) is None


def test_every_reason_is_decided_in_one_place_and_has_a_sentence() -> None:
    decided = [condition.reason for condition in (*INVOCATION, *QUEUE, *RUNNER)]
    assert len(decided) == len(set(decided))
    assert set(decided) | {Reason.NO_RUNNER} == set(Reason)
    assert set(_SAYS) == set(Reason) - {Reason.NOT_IN_QUEUE}


PAUSE = QueuePause(app="shop", name="default", at=NOW - 7200, by="ann@desk", reason="the relay is down", operation="x")


def test_a_pause_is_told_with_who_when_why_and_how_to_end_it() -> None:
    found = explain(RECORD, around(LIVE, pauses=[PAUSE]))
    assert found.reasons == (Reason.QUEUE_PAUSED,)
    assert found.text == (
        "the queue 'default' was paused by ann@desk 2h ago, at 1970-01-12 11:46:40 UTC (the relay is down). "
        "To let it go on: holdfast queues resume default."
    )
    assert explain(RECORD, around(LIVE, pauses=[replace(PAUSE, name="mail")])).reasons == ()


def test_all_that_holds_it_back_is_told_the_first_one_first() -> None:
    found = explain(replace(RECORD, due_at=NOW + 90), around(pauses=[PAUSE]))
    assert found.reasons == (Reason.NOT_DUE, Reason.QUEUE_PAUSED, Reason.NO_RUNNER)
    assert found.text.startswith("not due for another 1m30s, until 1970-01-12 13:48:10 UTC. Besides, the queue")
    assert "Besides, waiting for 1m: no runner is alive" in found.text


def test_of_several_runners_the_one_that_comes_closest_is_told_of() -> None:
    strangers = [replace(LIVE, tasks=()), replace(LIVE, id="r2", draining=True)]
    assert explain(RECORD, around(*strangers)).reasons == (Reason.UNKNOWN_TASK,)
    near = replace(LIVE, id="r3", queues=("mail",))
    assert explain(RECORD, around(*strangers, near)).reasons == (Reason.QUEUE_NOT_SERVED,)
    assert explain(RECORD, around(*strangers, near, LIVE)).reasons == ()


def test_a_failed_attempt_is_told_with_its_error() -> None:
    error = ErrorRecord(type_name="ValueError", message="no", traceback="", data=b"")
    failed = FailedAttempt(number=2, attempt=3, at=NOW - 1, error=error)
    record = replace(RECORD, status=Status.RETRY, due_at=NOW + 30, errors=(failed,))
    found = explain(record, around(LIVE))
    assert found.reasons == (Reason.IN_BACKOFF,)
    assert found.text == "failed 2 times, last with ValueError: no; the next attempt is due in 30s."


def test_busy_places_are_counted() -> None:
    worker = WorkerRecord(id="0", pid=1, started_at=NOW, running=10)
    assert "1 runner serves it, and all of its slots are busy" in why(RECORD, replace(LIVE, workers=(worker,)))
    busy = replace(LIVE, workers=(replace(worker, running=3),))
    assert "2 runners serve it, and 3 of 20 slots are busy" in why(RECORD, busy, replace(LIVE, id="r2"))


def test_a_runner_whose_workers_do_not_start_is_told() -> None:
    lacks = replace(LIVE, supervises=True)
    assert why(RECORD, lacks) == (
        "waiting for 1m for a worker: 1 runner serves it, and none of its worker processes has started. If that lasts, "
        "the runner's log says why they end."
    )
    worker = WorkerRecord(id="0", pid=1, started_at=NOW, starting=True)
    assert "none of its worker" in why(RECORD, replace(lacks, workers=(worker,)))
    started = replace(lacks, id="r2", workers=(worker, replace(worker, starting=False)))
    assert "to be claimed" in why(RECORD, lacks, started)


def test_a_worker_that_does_not_answer_is_told() -> None:
    silent = WorkerRecord(id="0", pid=1, started_at=NOW, running=1, unresponsive_since=NOW - 24)
    alone, one_of_two = (
        replace(LIVE, workers=(silent,)),
        replace(LIVE, workers=(silent, replace(silent, id="1", running=0, unresponsive_since=None))),
    )
    assert why(RECORD, alone).endswith("its only worker has not answered for 24 s.")
    assert why(RECORD, one_of_two).endswith("; 1 worker has not answered, for up to 24 s.")
    running = replace(RECORD, status=Status.RUNNING, owner="r1/0", changed_at=NOW - 30)
    told = why(running, one_of_two)
    assert "but its worker has not answered for 24 s: its code may hold the interpreter lock" in told
    assert "It has no timeout that would end it" in told
    assert "not answered" not in why(replace(running, owner="r1/1"), one_of_two)
    limited = replace(running, terms=Terms(timeout=60.0))
    assert why(limited, alone).endswith("kills that worker when the time of this call is over.")
    reserved = replace(running, status=Status.PENDING)
    assert why(reserved, alone).endswith("has not answered for 24 s: its runner takes it back in a moment.")
    for since, silence in ((NOW - 24, "has not answered for 24 s"), (None, "does not answer")):
        others = replace(alone, workers=(replace(silent, unresponsive_since=since, begun=("another",)),))
        ahead = (
            f"claimed by r1/0 for 30s, its code has not begun, and its worker {silence}: its runner takes it back in"
        )
        assert ahead in why(limited, others)
    assert "its code is running" in why(limited, replace(alone, workers=(replace(silent, begun=(running.id,)),)))
    long = replace(alone, workers=(replace(silent, unresponsive_since=NOW - 3725),))
    assert "its worker has not answered for 1h2m5s" in why(running, long)


HOLDER = replace(
    RECORD,
    id="h1",
    status=Status.PAUSED,
    owner="r1/0",
    changed_at=NOW - 1,
    history=(
        HistoryEntry(version=1, status=Status.PENDING, at=NOW - 900, operation="x"),
        HistoryEntry(version=2, status=Status.PENDING, at=NOW - 30, operation="x"),
        HistoryEntry(version=3, status=Status.PAUSED, at=NOW - 1, operation="x"),
    ),
)


@pytest.mark.parametrize(
    ("holders", "says"),
    [
        ([HOLDER], "waits for a slot of shop:mail|x for 1m, held by invocation h1 on r1/0 for 30s."),
        ([replace(HOLDER, owner="gone/0")], "h1 on gone/0 for 30s, whose runner is not alive: its work waits for rec"),
        ([replace(HOLDER, id=f"h{n}") for n in range(5)], "h0 on r1/0 for 30s; invocation h1 on"),
        ([replace(HOLDER, id=f"h{n}") for n in range(5)], "h2 on r1/0 for 30s and 2 others."),
        ([], "one is free, so it goes back to the queue in a moment"),
    ],
)
def test_it_says_who_holds_the_slot_that_an_invocation_waits_for(holders: list[InvocationRecord], says: str) -> None:
    waiting = replace(RECORD, status=Status.CONCURRENCY_CONTROLLED, limit_key="shop:mail|x")
    assert says in explain(waiting, around(LIVE, holders=holders)).text


def test_it_says_who_holds_the_slot_that_one_in_the_queue_will_not_get() -> None:
    limited = replace(RECORD, limit_key="shop:mail|x")
    found = explain(limited, around(LIVE, holders=[HOLDER], limit=Limit(1)))
    assert found.reasons == (Reason.NO_SLOT,)
    assert "no slot of shop:mail|x is free, held by invocation h1 on r1/0 for 30s" in found.text
    assert explain(limited, around(LIVE, holders=[HOLDER], limit=Limit(2))).reasons == ()
    assert explain(limited, around(LIVE, holders=[HOLDER])).reasons == ()
