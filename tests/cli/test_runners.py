"""runners, runners drain and stop: what they tell and ask, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import Command
from tests.cli.roster import NOW, enrol, entry, set_time

from holdfast import App
from holdfast.cli.reach import with_store
from holdfast.model.records import WorkerRecord


@pytest.fixture
def app(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The shop's store, at a time that the test knows."""
    set_time(monkeypatch, 0)
    with App("sqlite:///shop.db") as app:
        with_store(app, lambda store: store.roster(app.name))
        yield app


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
    assert holdfast("runners", wish, "c1", "--json").json == {"id": "abc1", "asked": wish}
    missing = holdfast("runners", wish, "x", "--json")
    assert (missing.code, missing.json["error"]["type"]) == (4, "RunnerNotFound")
    assert "there are: abc1, abc2, abc" in missing.json["error"]["message"]
    assert holdfast("runners", wish, "").code == 4
    assert entry(app, "abc2").wish == ""


def test_one_that_is_silent_may_not_hear_it(app: App, holdfast: Command) -> None:
    enrol(app, "gone", heartbeat_at=NOW - 60)
    answer = holdfast("runners", "drain", "gone")
    assert answer.code == 0
    assert answer.err == "note: runner gone has not written a heartbeat for 1m and may be dead\n"


def test_runners_is_a_command_and_a_group(app: App, holdfast: Command) -> None:
    told = holdfast("runners", "--help").out
    assert all(word in told for word in ("--json", "drain", "stop"))
    assert "--json" in holdfast("runners", "drain", "--help").out
    assert holdfast("runners", "nonsense").code == 2
    assert holdfast("runners", "drain").code == 2
