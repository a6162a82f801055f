"""services: whose turn it is, why others wait, and what was performed, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path

import pytest
from tests.cli.processes import Command
from tests.cli.roster import NOW, enrol, set_time

from holdfast import App
from holdfast.cli.reach import with_store
from holdfast.fleet.services import Executions, line_of
from holdfast.fleet.slots import Execution, ExecutionStatus


@pytest.fixture
def app(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The shop's store, at a time that the test knows."""
    set_time(monkeypatch, 0)
    with App("sqlite:///shop.db") as app:
        with_store(app, lambda store: store.roster(app.name))
        yield app


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
    assert [line for line in told.splitlines() if len(line) > 80] == []
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
    assert in_grace == ("scheduled_runner_in_grace", "the runner with this turn has joined too recently")


def test_who_is_silent_is_said_to_be(app: App, holdfast: Command) -> None:
    enrol(app, "fit")
    enrol(app, "gone", started_at=NOW - 7200, heartbeat_at=NOW - 60)
    assert decisions(holdfast)["gone"][0] == "silent"
    assert "counts as dead" in decisions(holdfast)["gone"][1]


def test_who_is_at_it_goes_on_though_it_is_about_to_stop(app: App, holdfast: Command) -> None:
    enrol(app, "leaving", draining=True)
    at_it = Execution(id="e", service="core", runner_id="leaving", started_at=NOW - 5, window_ends_at=NOW + 30)
    with_store(app, lambda store: Executions(store, app.name, "core", 60).begin(at_it))
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
        if status is ExecutionStatus.RUNNING:
            with_store(app, lambda store, mine=execution: Executions(store, app.name, "core", 600).begin(mine))
        else:
            with_store(app, methodcaller("put_entry", line_of(app.name, execution, 600)))
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
