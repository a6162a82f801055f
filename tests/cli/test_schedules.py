"""schedules: what is listed and told, what is made and changed, and what is refused."""

from __future__ import annotations

import datetime as dt
import io
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command, Process, eventually

from holdfast import App
from holdfast.cli.reach import with_store
from holdfast.errors import UnknownSchedule
from holdfast.ids import is_id
from holdfast.model.records import Entry
from holdfast.schedules import cron, every, once
from holdfast.schedules.records import Pause, Progress, ScheduleRecord, StoredCall, to_entry

NOW = dt.datetime(2026, 3, 28, 12, tzinfo=dt.UTC).timestamp()  # a day before Rome's clock jumps
LATER = "2090-01-01T00:00:00Z"
DAILY = ("--cron", "30 9 * * *", "--timezone", "Europe/Rome")


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    """The shop's store, without its code."""
    with App("sqlite:///shop.db") as app:
        with_store(app, lambda store: store.roster(app.name))
        yield app


@pytest.fixture
def on_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.reach.time_of", lambda _: NOW)


def made(holdfast: Command, *arguments: str) -> Any:
    answer = holdfast("schedules", "create", *arguments, "--json")
    assert (answer.code, answer.err) == (0, ""), answer.out
    return answer.json


def put(app: App, record: ScheduleRecord) -> None:
    assert with_store(app, methodcaller("put_entry", to_entry(record)))


def stored(app: App, name: str, **fields: Any) -> None:
    """A schedule as if it had been there for long, on that day."""
    given: dict[str, Any] = {"timing": every("1h"), "next_at": NOW + 3600, "through": NOW} | fields
    call = StoredCall(task="shop:add", arguments=b"")
    put(app, ScheduleRecord(app=app.name, name=name, uid=f"uid of {name}", call=call, **given))


def lines(text: str) -> dict[str, str]:
    """Each line by its first word, with single blanks."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# --- looking


@pytest.mark.usefixtures("on_that_day")
def test_the_list_tells_when_what_next_last_and_state(app: App, holdfast: Command) -> None:
    assert holdfast("schedules").out == "no schedules; make one with: holdfast schedules create\n"
    assert holdfast("schedules", "--json").json == {"schedules": [], "unreadable": {}}
    done = holdfast("submit", "shop:add", "1").out.strip()
    rome = cron("30 9 * * *", timezone="Europe/Rome")
    tick = NOW - 3.5 * 3600  # half past nine in Rome, that day
    stored(app, "a", timing=rome, next_at=rome.next_after(NOW), progress=Progress(last_tick=tick, last_id=done))
    stored(app, "b", next_at=NOW - 90, progress=Progress(last_tick=NOW - 3600, last_id="0" * 26))
    stored(app, "c", next_at=None, pause=Pause(at=NOW, by="ann", why="the disk is full"))
    stored(app, "d", next_at=None, retired_at=NOW, declared=True)
    stored(app, "e", timing=once(NOW - 60), next_at=None)
    stored(app, "f", timing=once(NOW - 60), next_at=None, progress=Progress(queued=(NOW - 60,)))
    told = lines(holdfast("schedules").out)
    assert told["a"] == (
        "by cron '30 9 * * *', on the clock of Europe/Rome shop:add "
        "Sun 2026-03-29 09:30:00 CEST, in 19h30m Sat 2026-03-28 09:30:00 CET: registered active"
    )
    assert "Sat 2026-03-28 11:58:30 UTC, due for 1m30s Sat 2026-03-28 11:00:00 UTC: not kept any more" in told["b"]
    assert told["c"].endswith("shop:add paused by ann because the disk is full")
    assert told["d"].endswith("shop:add retired")
    assert told["e"].endswith("once, at 2026-03-28 11:59:00 UTC shop:add over")
    assert told["f"].endswith("shop:add active"), "a tick of it still waits for its turn"
    facts = {each["name"]: each for each in holdfast("schedules", "--json").json["schedules"]}
    states = {name: each["state"] for name, each in facts.items()}
    assert states == {"a": "active", "b": "active", "c": "paused", "d": "retired", "e": "over", "f": "active"}
    assert facts["a"]["last"] == {"tick": "2026-03-28T08:30:00.000Z", "id": done, "status": "registered"}
    assert facts["a"]["timing"] == {"kind": "cron", "expression": "30 9 * * *", "timezone": "Europe/Rome"}
    assert facts["a"]["next_at"] == "2026-03-29T07:30:00.000Z"
    assert facts["b"]["last"]["status"] is None
    assert facts["c"]["pause"] == {"at": "2026-03-28T12:00:00.000Z", "by": "ann", "why": "the disk is full"}
    assert (facts["d"]["declared"], facts["d"]["retired_at"]) == (True, "2026-03-28T12:00:00.000Z")
    assert (facts["e"]["last"], facts["f"]["ticks"]["queued"]) == (None, ["2026-03-28T11:59:00.000Z"])


@pytest.mark.usefixtures("on_that_day")
def test_times_are_told_on_the_schedule_s_own_clock_and_in_utc(app: App, holdfast: Command) -> None:
    rome = cron("30 2 * * *", timezone="Europe/Rome")
    stored(app, "nightly", timing=rome, next_at=rome.next_after(NOW))
    answer = holdfast("schedules", "next", "nightly", "-n", "2")
    assert answer.out.splitlines()[1:] == [
        "Sun 2026-03-29 03:00:00 CEST  2026-03-29T01:00:00.000Z  in 13h",
        "Mon 2026-03-30 02:30:00 CEST  2026-03-30T00:30:00.000Z  in 1d12h",
    ]
    assert len(holdfast("schedules", "next", "nightly").out.splitlines()) == 6
    times = ["2026-03-29T01:00:00.000Z"]
    assert holdfast("schedules", "next", "nightly", "-n", "1", "--json").json == {
        "name": "nightly",
        "state": "active",
        "next": times,
    }
    app.schedules.pause("nightly", by="ann")
    assert holdfast("schedules", "next", "nightly").out == "nothing is to come: it is paused by ann\n"
    assert holdfast("schedules", "next", "nightly", "--json").json["next"] == []
    assert holdfast("schedules", "next", "nightly", "-n", "0").code == 2


def test_show_tells_everything(shop: Path, holdfast: Command) -> None:
    rules = ["--overlap", "queue", "--catch-up", "all", "--catch-up-most", "7", "--jitter", "5m", "--unique"]
    bounds = ["--start", "2080-01-01T00:00:00Z", "--end", "2080-01-02T00:00:00Z"]
    made(holdfast, "hourly", "add", "1", "-k", "b=2", "--every", "1h", *rules, *bounds, "--queue", "mail")
    answer = holdfast("schedules", "show", "hourly")
    assert answer.out.startswith("hourly is active: every 1h\n\n")
    told = lines(answer.out)
    assert told["call"] == "shop:add(1, b=2)"
    assert told["queue"] == "mail, priority 0"
    assert (told["overlap"], told["catch-up"], told["unique"]) == ("queue", "all, the last 7 of them", "yes")
    assert (told["jitter"], told["ticks"]) == ("up to 5m", "0 fired, 0 skipped, 0 missed, 0 queued")
    assert (told["start"], told["end"]) == ("Mon 2080-01-01 00:00:00 UTC", "Tue 2080-01-02 00:00:00 UTC")
    facts = holdfast("schedules", "show", "hourly", "--json").json
    assert facts["arguments"] == {"args": [1], "kwargs": {"b": 2}}
    assert facts["next"] == [f"2080-01-01T0{hour}:00:00.000Z" for hour in range(5)]
    assert facts["rules"] == {
        "overlap": "queue",
        "catch_up": "all",
        "catch_up_most": 7,
        "jitter_seconds": 300.0,
        "start": "2080-01-01T00:00:00.000Z",
        "end": "2080-01-02T00:00:00.000Z",
        "unique": True,
    }
    (listed,) = holdfast("schedules", "--json").json["schedules"]
    more = {name: facts[name] for name in ("arguments", "next", "past", "notes")}
    assert listed | more == facts


def test_one_that_cannot_be_read_is_named_and_can_be_deleted(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(holdfast, "good", "add", "1", "--at", LATER)
    bad = Entry(app=app.name, kind="schedule", name="bad", body=b"{}", version=1, due_at=None)
    assert with_store(app, methodcaller("put_entry", bad))
    answer = holdfast("schedules")
    assert (answer.code, list(lines(answer.out))) == (0, ["name", "good"])
    assert answer.err.startswith("note: the schedule 'bad' cannot be read: ")
    facts = holdfast("schedules", "--json").json
    assert ([each["name"] for each in facts["schedules"]], list(facts["unreadable"])) == (["good"], ["bad"])
    assert holdfast("schedules", "show", "bad").code == 1
    answers(monkeypatch, "y\n")
    deleted = holdfast("schedules", "delete", "bad")
    assert (deleted.code, "'bad' (which cannot be read)?" in deleted.err) == (0, True)
    assert holdfast("schedules").err == ""


# --- making and changing


def test_create_says_what_was_made_and_again_does_nothing(app: App, holdfast: Command) -> None:
    answer = holdfast("schedules", "create", "nightly", "add", "1", *DAILY)
    assert (answer.code, answer.err) == (0, "")
    first, second = answer.out.splitlines()
    assert first == "nightly is active: by cron '30 9 * * *', on the clock of Europe/Rome"
    assert second.startswith("next: ")
    assert "09:30:00 CE" in second
    made_first = app.schedules.get("nightly")
    assert holdfast("schedules", "create", "nightly", "shop:add", "1", *DAILY).code == 0
    assert app.schedules.get("nightly") == made_first
    other = holdfast("schedules", "create", "nightly", "add", "2", *DAILY, "--json")
    assert (other.code, other.json["error"]["type"]) == (2, "ScheduleExists")
    assert app.schedules.get("nightly") == made_first


def test_create_makes_the_store_and_can_begin_paused(shop: Path, holdfast: Command) -> None:
    facts = made(holdfast, "resting", "add", "1", "--every", "90s", "--paused", "--priority", "9")
    assert (shop / "shop.db").exists()
    assert (facts["state"], facts["next_at"], facts["priority"]) == ("paused", None, 9)


def test_update_changes_what_is_given_and_leaves_the_rest(app: App, holdfast: Command) -> None:
    before = made(holdfast, "nightly", "add", "1", *DAILY, "--overlap", "skip", "--end", LATER, "--unique")
    change = ["schedules", "update", "nightly", "--json"]
    after = holdfast(*change, "--every", "90s").json
    assert after["timing"] == {"kind": "every", "seconds": 90.0, "anchor": 0.0}
    assert (after["rules"], after["uid"]) == (before["rules"], before["uid"])
    assert holdfast(*change, "--end", "none", "--no-unique").json["rules"] == before["rules"] | {
        "end": None,
        "unique": False,
    }
    called = holdfast(*change, "boom", "2", "--queue", "mail").json
    assert (called["task"], called["queue"], called["rules"]["overlap"]) == ("shop:boom", "mail", "skip")
    assert called["timing"] == after["timing"]
    assert holdfast("schedules", "show", "nightly", "--json").json["arguments"] == {"args": [2], "kwargs": {}}
    for wrong in (["--queue", "mail"], ["-k", "a=1"], ["--priority", "1"], []):
        assert holdfast("schedules", "update", "nightly", *wrong).code == 2
    url = ["--url", "sqlite:///shop.db"]
    needs_code = holdfast("schedules", "update", "nightly", "boom", "2", *url)
    assert (needs_code.code, "needs the code" in needs_code.err) == (2, True)


def test_pause_keeps_who_and_why_and_resume_goes_on(app: App, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    paused = holdfast("schedules", "pause", "nightly", "--reason", "the disk is full")
    who = app.schedules.get("nightly").pause
    assert who is not None
    assert paused.out == (
        f"nightly is paused by {who.by} because the disk is full: by cron '30 9 * * *', on the clock of Europe/Rome\n"
    )
    again = holdfast("schedules", "pause", "nightly", "--reason", "other", "--json").json
    assert again["pause"]["why"] == "the disk is full"
    resumed = holdfast("schedules", "resume", "nightly", "--json").json
    assert (resumed["state"], resumed["pause"]) == ("active", None)
    assert resumed["next_at"] is not None


def test_delete_asks_first(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    for refusal in ("n\n", "\n", ""):
        answers(monkeypatch, refusal)
        refused = holdfast("schedules", "delete", "nightly")
        assert (refused.code, refused.out) == (1, "")
        assert "Delete the schedule 'nightly' (shop:add, by cron '30 9 * * *'" in refused.err
        assert "nothing was done" in refused.err
    programs = holdfast("schedules", "delete", "nightly", "--json")
    assert (programs.code, programs.json["error"]["type"]) == (2, "UsageError")
    assert app.schedules.get("nightly").name == "nightly"
    answers(monkeypatch, "y\n")
    deleted = holdfast("schedules", "delete", "nightly")
    assert (deleted.code, deleted.out) == (0, "the schedule 'nightly' is deleted\n")
    with pytest.raises(UnknownSchedule):
        app.schedules.get("nightly")
    made(holdfast, "nightly", "add", "1", *DAILY)
    assert holdfast("schedules", "delete", "nightly", "--yes", "--json").json == {"name": "nightly", "deleted": True}


def test_what_the_code_declares_is_told_where_a_change_will_not_last(app: App, holdfast: Command) -> None:
    stored(app, "declared", declared=True)
    stored(app, "retired", declared=True, retired_at=NOW, next_at=None)
    assert "makes it again what the code says" in holdfast("schedules", "update", "declared", "--jitter", "5s").err
    assert "no code declares it any more" in holdfast("schedules", "resume", "retired").err
    assert "stores it again" in holdfast("schedules", "delete", "declared", "--yes").err
    assert holdfast("schedules", "delete", "retired", "--yes").err == ""


def test_run_submits_its_call_now(app: App, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", "-k", "b=2", "--at", LATER)
    id = holdfast("schedules", "run", "nightly").out.strip()
    assert is_id(id)
    assert holdfast("show", id, "--json").json["arguments"] == {"args": [1], "kwargs": {"b": 2}}
    other = holdfast("schedules", "run", "nightly", "--json").json
    assert (other["name"], other["id"] != id) == ("nightly", True)
    assert len(app.invocations()) == 2


def test_one_request_is_done_once(app: App, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    made_up = ["backfill", "nightly", "--from", "2026-03-01T00:00:00Z", "--to", "2026-03-03T00:00:00Z", "--yes"]
    for command in (["run", "nightly"], made_up):
        first, again = (holdfast("schedules", *command, "--request", "march").out for _ in range(2))
        assert first == again != holdfast("schedules", *command).out


def test_backfill_says_how_many_and_asks(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    command = ["schedules", "backfill", "nightly", "--from", "2026-03-28T08:30:00Z", "--to", "2026-03-30T07:30:00Z"]
    ticks = ["2026-03-28T08:30:00.000Z", "2026-03-29T07:30:00.000Z", "2026-03-30T07:30:00.000Z"]
    assert holdfast(*command, "--dry-run", "--json").json == {"name": "nightly", "count": 3, "ticks": ticks}
    shown = holdfast(*command, "--dry-run").out.splitlines()
    assert [line.split()[4] for line in shown[1:]] == ticks
    answers(monkeypatch, "n\n")
    refused = holdfast(*command)
    assert refused.code == 1
    assert refused.err.startswith(
        "Submit 3 calls of shop:add, for the ticks from Sat 2026-03-28 09:30:00 CET to Mon 2026-03-30 09:30:00 CEST? "
    )
    assert holdfast(*command, "--json").code == 2
    assert app.invocations() == []
    answers(monkeypatch, "yes\n")
    done = holdfast(*command)
    assert done.code == 0
    assert {record.id for record in app.invocations()} == set(done.out.split())
    assert len(done.out.split()) == 3
    assert done.err.endswith("submitted 3 calls\n")
    ids = holdfast(*command, "--yes", "--json").json
    assert (ids["count"], len(app.invocations())) == (3, 6)


def test_a_backfill_without_ticks_asks_nobody(app: App, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    command = ["schedules", "backfill", "nightly", "--from", "2026-03-28T10:00:00Z", "--to", "2026-03-28T11:00:00Z"]
    assert holdfast(*command, "--dry-run").out == "no tick is due in that time\n"
    assert (holdfast(*command).code, holdfast(*command, "--json").json["count"]) == (0, 0)
    wrong = holdfast("schedules", "backfill", "nightly", "--from", LATER, "--to", "2026-03-28T11:00:00Z", "--yes")
    assert (wrong.code, "the range is empty" in wrong.err) == (2, True)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--cron, --every or --at"),
        (["--cron", "0 0 31 2 *"], "31"),
        (["--cron", "61 * * * *"], "61"),
        (["--cron", "0 0 * * *", "--timezone", "Europe/Roma"], "Europe/Rome"),
        (["--every", "1h", "--overlap", "sometimes"], "sometimes"),
        (["--every", "1h", "--catch-up", "some"], "some"),
        (["--every", "1h", "--catch-up-most", "0"], "from 1 to 10,000"),
        (["--every", "1h", "--jitter", "long"], "long"),
        (["--every", "1h", "--cron", "0 0 * * *"], "--cron and --every"),
        (["--every", "1h", "--timezone", "UTC"], "does not go with --every"),
        (["--every", "0.1s"], "at least a second"),
        (["--at", "tomorrow"], "--at 'tomorrow' is no time"),
        (["--at", "2030-01-01T00:00:00"], "no time zone"),
        (["--at", "none"], "--at 'none' is no time"),
        (["--every", "1h", "--start", LATER, "--end", "2080-01-01T00:00:00Z"], "ends before it starts"),
        (["--every", "1h", "-k", "z=1"], "z"),
        (["--every", "1h", "--priority", "101"], "101"),
    ],
)
def test_what_makes_no_sense_is_refused(app: App, holdfast: Command, options: list[str], message: str) -> None:
    answer = holdfast("schedules", "create", "nightly", "add", "1", *options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    programs = holdfast("schedules", "create", "nightly", "add", "1", *options, "--json")
    assert (programs.code, programs.err) == (2, "")
    assert message in programs.json["error"]["message"]
    assert app.schedules.list() == []


@pytest.mark.parametrize(
    "command",
    [
        ["show", "nope"],
        ["next", "nope"],
        ["update", "nope", "--every", "1h"],
        ["update", "nope", "shop:add", "1"],
        ["pause", "nope"],
        ["resume", "nope"],
        ["delete", "nope"],
        ["delete", "nope", "--yes"],
        ["run", "nope"],
        ["backfill", "nope", "--from", LATER, "--to", LATER],
    ],
    ids=" ".join,
)
def test_one_that_is_not_there_is_told_by_the_exit_code(app: App, holdfast: Command, command: list[str]) -> None:
    answer = holdfast("schedules", *command)
    assert (answer.code, answer.out) == (4, "")
    assert "there is no schedule 'nope'" in answer.err
    assert holdfast("schedules", *command, "--json").json["error"]["type"] == "UnknownSchedule"


def test_a_task_that_is_not_there_is_named(app: App, holdfast: Command) -> None:
    answer = holdfast("schedules", "create", "nightly", "ad", "--every", "1h")
    assert (answer.code, "Did you mean 'shop:add'?" in answer.err) == (2, True)
    assert holdfast("schedules", "create", "a|b", "add", "1", "--every", "1h").code == 2


def test_schedules_is_a_command_and_a_group(folder: Path, holdfast: Command) -> None:
    told = holdfast("schedules", "--help").out
    commands = ["show", "next", "create", "update", "pause", "resume", "delete", "run", "backfill"]
    for command in commands:
        assert command in told
        answer = holdfast("schedules", command, "--help")
        assert (answer.code, "--json" in answer.out) == (0, True)
    assert holdfast("schedules", "nonsense").code == 2
    assert holdfast("schedules", "--url", "sqlite:///nowhere.db").code == 1
    assert not (folder / "nowhere.db").exists()


# --- without code, and with a runner


def works_without_code(holdfast: Command, *where: str) -> None:
    """Everything but a new call."""
    assert holdfast("schedules", *where).code == 0
    for command in (
        ["show", "nightly"],
        ["next", "nightly"],
        ["update", "nightly", "--every", "1h", "--catch-up", "none"],
        ["pause", "nightly"],
        ["resume", "nightly"],
        ["run", "nightly"],
        ["backfill", "nightly", "--from", "2026-03-28T10:00:00Z", "--to", "2026-03-28T11:00:00Z", "--yes"],
        ["delete", "nightly", "--yes"],
    ):
        answer = holdfast("schedules", *command, *where)
        assert (answer.code, answer.out != "") == (0, True), answer.err
    assert holdfast("schedules", "show", "nightly", *where).code == 4


def test_with_the_store_alone_all_but_a_new_call_works(shop: Path, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    (shop / "shop.py").unlink()
    works_without_code(holdfast, "--url", "sqlite:///shop.db")


@pytest.mark.xdist_group("mongo")
def test_with_the_store_alone_all_but_a_new_call_works_on_mongodb(
    shop: Path, holdfast: Command, mongo_url: str
) -> None:
    (shop / "shop.py").write_text((shop / "shop.py").read_text().replace("sqlite:///shop.db", mongo_url))
    made(holdfast, "nightly", "add", "1", *DAILY)
    (shop / "shop.py").unlink()
    works_without_code(holdfast, "--url", mongo_url)


def test_who_asks_for_a_list_is_told_how(folder: Path, holdfast: Command) -> None:
    for group in ("schedules", "events", "queues", "runners"):
        answer = holdfast(group, "list")
        assert (answer.code, f"No such command 'list'. `holdfast {group}` alone lists them." in answer.err) == (2, True)
        told = holdfast(group, "list", "--json").json["error"]["message"]
        assert told.endswith(f"`holdfast {group}` alone lists them.")


def test_options_before_the_subcommand_count(app: App, holdfast: Command) -> None:
    made(holdfast, "nightly", "add", "1", *DAILY)
    before = holdfast("schedules", "--url", "sqlite:///shop.db", "--json", "show", "nightly")
    assert (before.code, before.json["name"]) == (0, "nightly")
    assert holdfast("schedules", "--app", "nowhere:app", "create", "other", "add", "--every", "1h").code == 1


def test_one_made_at_the_command_line_fires_in_a_runner(
    app: App, holdfast: Command, start: Callable[..., Process]
) -> None:
    runner = start("run", "shop:app", "--workers", "0")
    made(holdfast, "often", "add", "1", "-k", "b=2", "--every", "1s")

    def ends_well() -> bool:
        last = holdfast("schedules", "show", "often", "--json").json["last"]
        return last is not None and last["status"] == "success"

    eventually(ends_well, lambda: f"a tick in {runner.err}")
    facts = holdfast("schedules", "show", "often", "--json").json
    assert facts["ticks"]["fired"] >= 1
    done = holdfast("ps", "--status", "success", "--task", "add", "--json").json["invocations"]
    assert {app.invocation(each["id"]).result(1) for each in done} == {3}


def test_one_that_was_set_aside_is_told_of_with_what_to_do(app: App, holdfast: Command) -> None:
    stored(app, "nightly")
    with closing(sqlite3.connect("shop.db", timeout=10)) as connection, connection:
        connection.execute("UPDATE holdfast_entries SET body = x'ff00' WHERE name = 'nightly'")
    assert app.schedules.list() == []
    answer = holdfast("schedules", "show", "nightly", "--app", "shop:app")
    assert answer.code != 0
    assert "'nightly'" in answer.err
    assert "it could not be read, and was set aside" in answer.err
    assert "stored again by a runner" in answer.err
    assert "docs/operations/damaged-records.md" in answer.err
    made(holdfast, "nightly", "shop:add", "1", "--every", "1h")
    answer = holdfast("schedules", "show", "nightly", "--app", "shop:app")
    assert answer.code == 0
    assert "an earlier schedule of this name could not be read, and was set aside" in answer.err
    assert "set aside" not in holdfast("schedules", "show", "hourly", "--app", "shop:app").err
