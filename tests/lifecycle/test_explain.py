"""Every answer that `explain` can give so far, each with what would release the invocation."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.lifecycle.explain import explain
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord, Serves, lane_of
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
