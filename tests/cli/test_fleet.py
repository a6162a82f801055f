"""runners, runners drain and stop, services: what they tell and ask, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command

from holdfast import App
from holdfast.cli.reach import with_store
from holdfast.lifecycle.records import RunnerRecord, WorkerRecord
from holdfast.lifecycle.slots import Execution, ExecutionStatus

NOW = 1_800_000_000.0  # the start of a cycle of one minute


@pytest.fixture
def app(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The shop's store, at a time that the test knows."""
    set_time(monkeypatch, 0)
    with App("sqlite:///shop.db") as app:
        with_store(app, lambda store: store.roster(app.name))
        yield app


def set_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("holdfast.cli.fleet.time_of", lambda _: NOW + seconds)


def enrol(app: App, *ids: str, **facts: Any) -> None:
    for number, id in enumerate(ids):
        given: dict[str, Any] = {"started_at": NOW - 3600 + number, "heartbeat_at": NOW - 1} | facts
        runner = RunnerRecord(
            id=id, app=app.name, host="h", pid=1, version="9.9", concurrency=4, tasks=("shop:add",), **given
        )
        with_store(app, methodcaller("enrol", runner))


def entry(app: App, id: str) -> RunnerRecord:
    (found,) = [runner for runner in with_store(app, lambda store: store.roster(app.name)) if runner.id == id]
    return found


# --- runners


def test_runners_tell_who_is_alive_and_what_each_does(app: App, holdfast: Command) -> None:
    assert holdfast("runners").out == "no runners; start one with: holdfast run\n"
    assert holdfast("runners", "--json").json == {"runners": []}
    workers = (
        WorkerRecord(id="1", pid=4711, started_at=NOW - 60, running=3),
        WorkerRecord(id="7", pid=4712, started_at=NOW - 5, running=0, unresponsive_since=NOW - 24),
    )
    enrol(app, "busy", workers=workers, queues=("bulk", "mail"), tags=("gpu",))
    enrol(app, "leaving", draining=True, wish="drain")
    enrol(app, "silent", heartbeat_at=NOW - 3600)
    enrol(app, "early", heartbeat_at=NOW + 3600)
    enrol(app, "lazy", sits_out_until=NOW + 120)
    enrol(app, "hung", can_run_atomic_service=False)
    facts = {each["id"]: each for each in holdfast("runners", "--json").json["runners"]}
    assert {id: each["state"] for id, each in facts.items()} == {
        "busy": "alive",
        "leaving": "draining",
        "silent": "dead",
        "early": "alive",
        "lazy": "alive",
        "hung": "alive",
    }
    busy = facts["busy"]
    assert (busy["running"], busy["capacity"], busy["heartbeat_age_seconds"]) == (3, 8, 1.0)
    assert [(each["pid"], each["running"]) for each in busy["workers"]] == [(4711, 3), (4712, 0)]
    assert busy["workers"][0]["started_at"] == "2027-01-15T07:59:00.000Z"
    assert [each["unresponsive_since"] for each in busy["workers"]] == [None, "2027-01-15T07:59:36.000Z"]
    assert (facts["leaving"]["wish"], facts["lazy"]["sits_out_until"]) == ("drain", "2027-01-15T08:02:00.000Z")
    assert (facts["silent"]["alive"], facts["hung"]["can_run_atomic_service"]) == (False, False)
    lines = {line.split()[0]: " ".join(line.split()) for line in holdfast("runners").out.splitlines()}
    assert lines["busy"] == (
        "busy alive h 1 9.9 3 of 8 bulk, mail gpu yes 1s ago "
        "1: pid 4711, 3 running; 7: pid 4712, 0 running, has not answered for 24 s"
    )
    assert lines["leaving"] == "leaving draining, asked to drain h 1 9.9 0 of 4 any no 1s ago"
    assert lines["silent"] == "silent dead h 1 9.9 0 of 4 any no 1h ago"
    assert lines["early"].endswith(" 1h ahead of this clock")
    assert lines["lazy"] == "lazy alive h 1 9.9 0 of 4 any sits out for 2m 1s ago"
    assert lines["hung"] == "hung alive h 1 9.9 0 of 4 any no 1s ago"


@pytest.mark.parametrize("wish", ["drain", "stop"])
def test_a_runner_is_asked_by_the_beginning_of_its_id(app: App, holdfast: Command, wish: str) -> None:
    enrol(app, "abc1", "abc2", "abc")
    answer = holdfast("runners", wish, "abc1")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f"runner abc1 is asked to {wish}; it obeys with its next heartbeat\n"
    assert holdfast("runners", "--app", "shop:app", wish, "abc", "--json").json == {"id": "abc", "asked": wish}
    assert [entry(app, id).wish for id in ("abc1", "abc2", "abc")] == [wish, "", wish]
    wrong = holdfast("runners", wish, "ab")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'ab' may be abc1 or abc2 or abc; write more of it" in wrong.err
    missing = holdfast("runners", wish, "x", "--json")
    assert (missing.code, missing.json["error"]["type"]) == (4, "RunnerNotFound")
    assert "there are: abc1, abc2, abc" in missing.json["error"]["message"]
    assert holdfast("runners", wish, "").code == 4
    assert entry(app, "abc2").wish == ""


def test_one_that_is_silent_may_not_hear_it(app: App, holdfast: Command) -> None:
    enrol(app, "gone", heartbeat_at=NOW - 60)
    answer = holdfast("runners", "drain", "gone")
    assert answer.code == 0
    assert answer.err == "note: runner gone has been silent for 1m and may not hear it\n"


def test_runners_is_a_command_and_a_group(app: App, holdfast: Command) -> None:
    told = holdfast("runners", "--help").out
    assert all(word in told for word in ("--json", "drain", "stop"))
    assert "--json" in holdfast("runners", "drain", "--help").out
    assert holdfast("runners", "nonsense").code == 2
    assert holdfast("runners", "drain").code == 2


# --- services


def decisions(holdfast: Command, *options: str) -> dict[str, tuple[str, str]]:
    facts = holdfast("services", "--json", *options).json
    return {each["id"]: (each["decision"], each["why"]) for each in facts["runners"]}


def test_services_tell_the_slots_and_why_who_does_not_run(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no runners; start one with: holdfast run\n" in holdfast("services").out
    enrol(app, "old", "middle", "young", "youngest", heartbeat_at=NOW + 30)
    set_time(monkeypatch, 21)
    facts = holdfast("services", "--json").json
    assert facts["cycle"] == {"starts_at": "2027-01-15T08:00:00.000Z", "ends_at": "2027-01-15T08:01:00.000Z"}
    assert [
        (slot["runner"], slot["starts_at"][17:], slot["ends_at"][17:], slot["is_now"]) for slot in facts["slots"]
    ] == [
        ("old", "00.000Z", "19.000Z", False),
        ("middle", "20.000Z", "39.000Z", True),
        ("young", "40.000Z", "59.000Z", False),
    ]
    assert decisions(holdfast) == {
        "old": ("not_assigned_slot", "the turn of middle; its own begins in 39s"),
        "middle": ("run", "its turn until 2027-01-15T08:00:39.000Z"),
        "young": ("not_assigned_slot", "the turn of middle; its own begins in 19s"),
        "youngest": ("not_assigned_slot", "the 3 oldest take turns, and it is younger"),
    }
    set_time(monkeypatch, 38.9)
    assert decisions(holdfast)["middle"] == ("late_start", "its turn, but too late to start in it")
    set_time(monkeypatch, 39.5)
    assert decisions(holdfast)["old"] == ("not_assigned_slot", "the gap between two slots; its own begins in 20s")
    told = holdfast("services").out
    assert "3 of 4 runners in turn" in told
    assert [line.split()[-1] for line in told.splitlines() if line[:1] in "012" and "Z" in line] == [
        "over",
        "over",
        "500ms",
    ]


def test_services_tell_who_shares_no_cycle_and_why(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol(app, "fit")
    enrol(app, "leaving", draining=True)
    enrol(app, "hung", can_run_atomic_service=False)
    enrol(app, "lazy", sits_out_until=NOW + 120)
    enrol(app, "outdated", schema=-1)
    found = decisions(holdfast)
    assert found["fit"][0] == "run"
    assert {id: why for id, (_, why) in found.items() if id != "fit"} == {
        "leaving": "it is about to stop",
        "hung": "its service loop does not move",
        "lazy": "it left its slot unused, and sits out for another 2m",
        "outdated": "its code is older than the store's schema, which a newer runner has brought",
    }
    monkeypatch.setenv("HOLDFAST_ATOMIC_SERVICE_MEMBERSHIP_STABILIZATION_MINUTES", "1d")
    in_grace = decisions(holdfast, "--url", "sqlite:///shop.db")["fit"]
    assert in_grace == ("scheduled_runner_in_grace", "whose turn it is has joined too recently")


def test_who_is_silent_is_said_to_be(app: App, holdfast: Command) -> None:
    enrol(app, "fit")
    enrol(app, "gone", started_at=NOW - 7200, heartbeat_at=NOW - 60)
    assert decisions(holdfast)["gone"][0] == "silent"
    assert "counts as dead" in decisions(holdfast)["gone"][1]


def test_who_is_at_it_goes_on_though_it_is_about_to_stop(app: App, holdfast: Command) -> None:
    enrol(app, "leaving", draining=True)
    at_it = Execution(id="e", service="core", runner_id="leaving", started_at=NOW - 5, window_ends_at=NOW + 30)
    with_store(app, methodcaller("put_execution", app.name, at_it))
    decision, why = decisions(holdfast)["leaving"]
    assert decision == "run"
    assert why.startswith("it has been at it for 5s")


def test_services_say_when_nobody_is_able_to(app: App, holdfast: Command) -> None:
    enrol(app, "hung", can_run_atomic_service=False)
    assert decisions(holdfast) == {
        "hung": ("no_stable_runners", "no runner is able to; its service loop does not move")
    }
    assert "no runner has a slot" in holdfast("services").out


def test_services_tell_what_was_performed_and_who_is_at_it(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the services have not been performed yet" in holdfast("services").out
    enrol(app, "a", "b", heartbeat_at=NOW + 30)
    ends = [
        ("a", ExecutionStatus.COMPLETED, ""),
        ("b", ExecutionStatus.ABANDONED, "owner gone"),
        ("a", ExecutionStatus.BLOCKED, "runner b has been at it"),
        ("a", ExecutionStatus.RUNNING, ""),
    ]
    for number, (runner, status, reason) in enumerate(ends):
        started_at = NOW - 90 + 30 * number
        execution = Execution(
            id=f"e{number}",
            service="core",
            runner_id=runner,
            started_at=started_at,
            window_ends_at=started_at + 29,
            status=status,
            ended_at=None if status is ExecutionStatus.RUNNING else started_at + 10 + number,
            reason=reason,
        )
        with_store(app, methodcaller("put_execution", app.name, execution))
    set_time(monkeypatch, 28)
    facts = holdfast("services", "--json").json
    assert (facts["running"]["runner"], facts["running"]["seconds"]) == ("a", 28.0)
    assert [(one["runner"], one["status"], one["seconds"], one["reason"]) for one in facts["executions"]] == [
        ("a", "running", 28.0, ""),
        ("a", "blocked", 12.0, "runner b has been at it"),
        ("b", "abandoned", 11.0, "owner gone"),
        ("a", "completed", 10.0, ""),
    ]
    assert decisions(holdfast)["a"] == ("run", "it has been at it for 28s, until 2027-01-15T08:00:29.000Z")
    set_time(monkeypatch, 31)
    assert decisions(holdfast)["b"] == (
        "run",
        "its turn until 2027-01-15T08:00:59.000Z, but a has been at it since 2027-01-15T08:00:00.000Z",
    )
    few = holdfast("services", "--limit", "2", "--json").json
    assert [one["status"] for one in few["executions"]] == ["running", "blocked"]
    told = holdfast("services").out.splitlines()
    assert " ".join(told[-2].split()[1:]) == "b abandoned 11s owner gone"
    assert holdfast("services", "--limit", "0").code == 2
