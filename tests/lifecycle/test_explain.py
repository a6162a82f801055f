"""Every answer that `explain` can give so far, each with what would release the invocation."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.lifecycle.explain import explain
from holdfast.lifecycle.records import (
    Cancellation,
    HistoryEntry,
    InvocationRecord,
    RunnerRecord,
    Serves,
    Terms,
    lane_of,
)
from holdfast.lifecycle.status import Status

NOW = 1_000_000.0
RECORD = InvocationRecord(
    id="i1", app="shop", task="shop:mail", arguments=b"", created_at=NOW - 60, due_at=NOW - 60, changed_at=NOW - 60
)
RUNNER = RunnerRecord(
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


def why(record: InvocationRecord, *roster: RunnerRecord) -> str:
    return explain(record, roster, NOW, 15.0)


@pytest.mark.parametrize(
    ("record", "roster", "says"),
    [
        ({"due_at": NOW + 90}, [RUNNER], "not due for another 1m30s"),
        ({}, [], "no runner is alive"),
        ({}, [replace(RUNNER, heartbeat_at=NOW - 60)], "no runner is alive"),
        ({}, [replace(RUNNER, draining=True)], "no runner is alive"),
        ({}, [replace(RUNNER, tasks=("shop:other",))], "no runner knows the task 'shop:mail'"),
        ({"queue": "slow"}, [replace(RUNNER, queues=("default",))], "no live runner serves the queue 'slow'"),
        ({"tags": ("gpu",)}, [RUNNER], "with the tags gpu"),
        ({"tags": ("gpu",)}, [replace(RUNNER, tags=("gpu", "eu"))], "1 runner serves it"),
        ({}, [RUNNER, replace(RUNNER, id="r2")], "for a free place; 2 runners serve it"),
        ({"status": Status.RUNNING, "owner": "r1/0"}, [RUNNER], "its code is running on r1/0 for 1m"),
        ({"status": Status.RUNNING, "owner": "gone/0"}, [RUNNER], "no longer on the roster"),
        (
            {"status": Status.RUNNING, "owner": "r1/0"},
            [replace(RUNNER, heartbeat_at=NOW - 60)],
            "silent for 1m and counts as dead: its work waits for recovery",
        ),
        ({"status": Status.PARKED, "reason": "it no longer binds"}, [RUNNER], "it no longer binds"),
        ({"status": Status.PARKED, "reason": "x"}, [RUNNER], "holdfast wake i1"),
        ({"status": Status.FAILED, "reason": "ValueError: no"}, [RUNNER], "ended with an error: ValueError: no"),
        ({"status": Status.SUCCESS}, [], "ended with a result"),
        (
            {"status": Status.CANCELLED, "cancellation": CANCELLATION, "reason": f"{CANCELLATION}; it was stopped"},
            [],
            "cancelled by ann: enough (it was stopped), 5s ago.",
        ),
        (
            {"status": Status.CANCELLING, "owner": "r1/0", "cancellation": CANCELLATION},
            [RUNNER],
            "cancelled by ann: enough; asked to end on r1/0 for 1m, it has 5s left to clean up",
        ),
        (
            {"status": Status.CANCELLING, "owner": "gone/0", "cancellation": replace(CANCELLATION, until=NOW - 1)},
            [RUNNER],
            "its time to clean up is over, but that runner is no longer on the roster",
        ),
        ({"start_by": NOW + 90}, [], "Start one with `holdfast run`. It expires in 1m30s unless it is started."),
        (
            {"status": Status.RUNNING, "owner": "r1/0", "terms": Terms(timeout=90.0)},
            [RUNNER],
            "for 1m of the 1m30s that it may take",
        ),
    ],
)
def test_it_says_what_holds_an_invocation_back(record: dict[str, Any], roster: list[RunnerRecord], says: str) -> None:
    assert says in why(replace(RECORD, **record), *roster)


def test_every_status_has_an_explanation() -> None:
    for status in Status:
        assert len(why(replace(RECORD, status=status, owner="r1/0"), RUNNER)) > 10


def test_a_runner_accepts_what_it_knows_serves_and_has_tags_for() -> None:
    serves = Serves(tasks=frozenset({"t"}), queues=frozenset({"q"}), tags=frozenset({"gpu", "eu"}))
    assert serves.accepts(lane_of("q", "t"))
    assert serves.accepts(lane_of("q", "t", ("gpu",)))
    assert serves.accepts(lane_of("q", "t", ("eu", "gpu")))
    assert not serves.accepts(lane_of("q", "other"))
    assert not serves.accepts(lane_of("default", "t"))
    assert not serves.accepts(lane_of("q", "t", ("gpu", "us")))
    assert Serves(tasks=frozenset({"t"})).accepts(lane_of("any", "t"))


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
    assert says in explain(waiting, [RUNNER], NOW, 15.0, holders)
