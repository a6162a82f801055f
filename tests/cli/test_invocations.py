"""ps, show, history and wake: what they tell, to people and to programs."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from tests.support.patience import patient

from holdfast import App
from holdfast.cli import live
from holdfast.cli.output import Output
from holdfast.cli.reach import with_store
from holdfast.errors import InvocationStatusRaceConditionError
from holdfast.ids import LENGTH
from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.notes import CallProgress, LogLine, Notes
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status

if TYPE_CHECKING:
    from conftest import Command

UNKNOWN_ID = "0" * LENGTH


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    """The shop's store, opened by the test too."""
    with App("sqlite:///shop.db") as app:
        yield app


def claimed(app: App, id: str) -> InvocationRecord:
    record = app.invocation(id).record()
    claim = Claim(app=app.name, owner="runner/0", lanes=(record.lane,), limit=1, operation="c" + id, at=record.due_at)
    return with_store(app, lambda store: store.claim(claim)).records[0]


def park(app: App, id: str) -> None:
    change = changes.parked(
        claimed(app, id), fingerprint="old", operation="p" + id, at=app.runtime.clock.now(), why="odd\x1b[31m\ncode"
    )
    assert with_store(app, lambda store: store.apply([change])) == [changes.APPLIED]


def submit(holdfast: Command, *arguments: object) -> str:
    answer = holdfast("submit", *arguments)
    assert answer.code == 0, answer.err
    return answer.out.strip()


# --- submit


def test_submit_prints_the_id_and_stores_the_call(shop: Path, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1", "two words", "--priority", 7, "--delay", "5m", "--queue", "mail")
    facts = holdfast("show", id, "--json").json
    assert facts["arguments"] == {"args": [1, "two words"], "kwargs": {}}
    assert (facts["priority"], facts["queue"], facts["status"]) == (7, "mail", "registered")
    assert re.search("not due for another (4m5|5m,)", facts["explanation"])


def test_keywords_come_as_an_object_or_one_by_one(shop: Path, holdfast: Command) -> None:
    id = submit(holdfast, "shop:add", "--kwargs", '{"a": [1, 2]}', "-k", "b=NaN")
    assert holdfast("show", id, "--json").json["arguments"] == {"args": [], "kwargs": {"a": [1, 2], "b": "NaN"}}
    at = submit(holdfast, "add", "--at", "2031-01-02T03:04:05Z", "--", "-5")
    facts = holdfast("show", at, "--json").json
    assert (facts["due_at"], facts["arguments"]["args"]) == ("2031-01-02T03:04:05.000Z", [-5])


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["ad", "1"], "UnknownTask"),
        (["add"], "ArgumentsDoNotBind"),
        (["add", "1", "--kwargs", "[1]"], "UsageError"),
        (["add", "1", "-k", "b"], "UsageError"),
        (["add", "-k", "a=1", "-k", "a=2"], "UsageError"),
        (["add", "1", "--at", "tomorrow"], "UsageError"),
        (["add", "1", "--at", "2031-01-02T03:04:05"], "UsageError"),
        (["add", "1", "--delay", "soon"], "UsageError"),
        (["add", "1", "--timeout", "3s"], "UsageError"),
        (["add", "1", "--priority", "101"], "UsageError"),
    ],
)
def test_a_wrong_submit_is_a_usage_error_and_stores_nothing(
    shop: Path, holdfast: Command, arguments: list[str], kind: str
) -> None:
    answer = holdfast("submit", "--json", *arguments)
    assert (answer.code, answer.json["error"]["type"], answer.err) == (2, kind, "")
    people = holdfast("submit", *arguments)
    assert (people.code, people.out) == (2, "")
    assert people.err == f"error: {answer.json['error']['message']}\n"
    holdfast("store", "prepare")
    assert holdfast("ps", "--json").json["invocations"] == []


def test_a_short_name_must_be_unambiguous(folder: Path, holdfast: Command) -> None:
    code = "from holdfast import App\napp = App('sqlite:///both.db')\n"
    code += "".join(f"@app.task(name='{place}:go')\ndef {place}(): ...\n" for place in ("east", "west"))
    (folder / "both.py").write_text(code)
    answer = holdfast("submit", "go")
    assert (answer.code, answer.err) == (2, "error: 'go' may be east:go or west:go; write the whole name\n")
    assert holdfast("submit", "west:go").code == 0


def test_waiting_in_vain_tells_the_id_and_that_nobody_works(shop: Path, holdfast: Command) -> None:
    answer = holdfast("submit", "add", "1", "--wait", "--timeout", "10ms", "--json")
    assert answer.code == 3
    assert len(answer.json["id"]) == LENGTH
    assert answer.json["error"]["type"] == "ResultTimeout"
    assert "no runner is alive" in answer.json["error"]["message"]


# --- ps, show, history


def test_ps_lists_the_newest_first_and_filters(shop: Path, holdfast: Command) -> None:
    ids = [submit(holdfast, task, "1") for task in ("add", "boom", "add")]
    listed = [facts["id"] for facts in holdfast("ps", "--json").json["invocations"]]
    assert listed == ids[::-1]
    page = holdfast("ps", "--limit", "1", "--before", ids[2])
    assert ids[1] in page.out
    assert ids[0] not in page.out
    assert f"--before {ids[1]}" in page.err
    assert [facts["id"] for facts in holdfast("ps", "--task", "shop:boom", "--json").json["invocations"]] == [ids[1]]
    assert holdfast("ps", "--status", "failed").out == "no invocations\n"
    wrong = holdfast("ps", "--status", "nonsense")
    assert wrong.code == 2
    assert "there is no status 'nonsense'" in wrong.err


def test_a_long_reason_stays_one_short_line_of_a_list(shop: Path, app: App, holdfast: Command) -> None:
    reason = "enough " * 1000
    id = submit(holdfast, "add", "1")
    app.invocation(id).cancel(reason, by="ann")
    for command in ("ps", "archive"):
        (line,) = [line for line in holdfast(command).out.splitlines() if line.startswith(id)]
        assert line.endswith("…")
        assert len(line) < 350
        assert len(holdfast(command, "--json").json["invocations"][0]["reason"]) > 2000


def test_ps_lists_what_one_has_submitted(shop: Path, app: App, holdfast: Command) -> None:
    add = app.task(name="shop:add")(lambda a: a)
    above = app.task(name="above")(lambda: add.submit(1).id).submit()
    submit(holdfast, "add", "2")
    with app.runner():
        child = above.result(patient(30))
    assert [facts["id"] for facts in holdfast("ps", "--parent", above.id[:20], "--json").json["invocations"]] == [child]
    assert holdfast("ps", "--parent", above.id, "--queue", "mail").out == "no invocations\n"
    assert holdfast("ps", "--parent", "nonsense").code != 0


def test_stored_text_cannot_act_on_the_terminal(shop: Path, app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "x\x1b[2J\u202e\ny")
    park(app, id)
    for command in (["ps"], ["show", id], ["history", id]):
        out = holdfast(*command).out
        assert all(line.isprintable() for line in out.split("\n"))
        assert "odd\\x1b[31m\\ncode" in out
    assert "x\\x1b[2J\\u202e\\ny" in holdfast("show", id).out


def test_show_tells_the_result_the_error_and_the_history(shop: Path, app: App, holdfast: Command) -> None:
    good, bad = submit(holdfast, "add", "1", "-k", "b=2"), submit(holdfast, "boom", "x")
    codec = app.runtime.codec
    done = changes.completed(claimed(app, good), result=codec.encode(3), operation="d", at=app.runtime.clock.now())
    error = codec.encode_error(ValueError("it broke"))
    failed = changes.failed(
        claimed(app, bad), error=error, operation="f", at=app.runtime.clock.now(), why="ValueError: it broke"
    )
    with_store(app, lambda store: store.apply([done, failed]))
    shown = holdfast("show", good).out
    assert "shop:add(1, b=2)" in shown
    assert "result   3" in shown
    assert holdfast("show", good, "--json").json["result"] == {"value": 3}
    facts = holdfast("show", bad, "--json").json
    assert facts["error"]["type"] == "builtins:ValueError"
    assert [entry["status"] for entry in facts["history"]] == ["registered", "pending", "running", "failed"]
    assert "  | ValueError: it broke" in holdfast("show", bad).out


def test_show_tells_retries_to_people_and_as_they_are_stored_to_programs(folder: Path, holdfast: Command) -> None:
    (folder / "shop.py").write_text(
        "from holdfast import App\napp = App('sqlite:///shop.db')\n"
        "@app.task(retries=3)\ndef add(a): ...\n"
        "@app.task\ndef plain(a): ...\n"
    )
    ids = [submit(holdfast, task, "1") for task in ("add", "plain")]
    assert "  3 more attempts, after about 1s, then 2 times" in holdfast("show", ids[0]).out
    assert holdfast("show", ids[0], "--json").json["retries"]["kind"] == "exponential"
    assert "\nretries" not in holdfast("show", ids[1]).out


def test_show_says_why_arguments_cannot_be_read(shop: Path, app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1")
    with sqlite3.connect("shop.db") as connection:
        connection.execute("UPDATE holdfast_invocations SET arguments = ?", (b"\xc1\xc1",))
    connection.close()
    answer = holdfast("show", id)
    assert answer.code == 0
    assert "its 2 bytes of arguments cannot be read here" in answer.out
    assert "unreadable" in holdfast("show", id, "--json").json["arguments"]
    with sqlite3.connect("shop.db") as connection:
        connection.execute("UPDATE holdfast_invocations SET arguments = ?", (b"\xc1",))
    connection.close()
    assert "its 1 byte of arguments cannot be read here" in holdfast("show", id).out


def set_aside(app: App, holdfast: Command) -> str:
    """The id of an invocation that could not be read."""
    id = submit(holdfast, "add", "1")
    lane = app.invocation(id).record().lane
    with sqlite3.connect("shop.db") as connection:
        connection.execute("UPDATE holdfast_invocations SET history = 'nonsense,'")
    connection.close()
    claim = Claim(app=app.name, owner="runner/0", lanes=(lane,), limit=1, operation="c", at=app.runtime.clock.now() + 1)
    assert with_store(app, lambda store: store.claim(claim)).records == ()
    return id


@pytest.mark.parametrize("command", ["show", "why", "history", "wake", "cancel", "rerun"])
def test_each_command_says_that_a_record_was_set_aside(shop: Path, app: App, holdfast: Command, command: str) -> None:
    id = set_aside(app, holdfast)
    for text in (id, id[:20]):
        answer = holdfast(command, text)
        assert answer.code == 1
        assert f"error: {id} was set aside at " in answer.err
        assert "cannot be read" in answer.err
        assert "See docs/operations/damaged-records.md" in answer.err


@pytest.mark.parametrize("command", ["show", "history", "wake"])
def test_an_unknown_id_is_one_clear_error(shop: Path, holdfast: Command, command: str) -> None:
    holdfast("store", "prepare")
    answer = holdfast(command, UNKNOWN_ID, "--json")
    assert (answer.code, answer.json["error"]["type"]) == (4, "InvocationNotFound")


@pytest.mark.parametrize("command", ["show", "history", "wake"])
def test_the_beginning_of_an_id_will_do_if_it_means_one(shop: Path, app: App, holdfast: Command, command: str) -> None:
    ids = [submit(holdfast, "add", "1", "--key", key, "--queue", key) for key in "abc"]
    park(app, ids[1])
    assert holdfast(command, ids[1][:18]).code == 0
    answer = holdfast(command, ids[1][:5])
    assert (answer.code, "too short" in answer.err) == (2, True)
    for wrong in ("ABCDEF", "zzzzzz", "012345/", f"{ids[1]}0"):
        answer = holdfast(command, wrong)
        assert answer.code == 4
        assert f"'{wrong}'" in answer.err


def test_an_ambiguous_beginning_of_an_id_lists_what_it_may_be(shop: Path, app: App, holdfast: Command) -> None:
    one = app.invocation(submit(holdfast, "add", "1")).record()
    ids = [f"abcdef{n}".ljust(LENGTH, "0") for n in range(7)]
    others = [replace(one, id=id) for id in ids]
    assert all(with_store(app, lambda store: store.insert(others)))
    answer = holdfast("show", "abcdef")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: 'abcdef' may be {ids[6]} (shop:add, registered), {ids[5]} (")
    assert answer.err.endswith(f"{ids[2]} (shop:add, registered) and others; write more of it\n")
    assert holdfast("show", "abcdef3", "--json").json["id"] == ids[3]


def test_a_key_makes_one_call_of_many_and_show_tells_it(shop: Path, holdfast: Command) -> None:
    first = submit(holdfast, "add", "1", "--key", "order 8")
    again = holdfast("submit", "add", "1", "--key", "order 8")
    assert (again.out, again.err) == (f"{first}\n", f"{first} was there already\n")
    waiting = holdfast("submit", "add", "1", "--key", "order 8", "--wait", "--timeout", "0")
    assert waiting.err.startswith(f"{first} was there already\n")
    told = [holdfast("submit", "add", "1", "--key", f"order {number}", "--json").json["new"] for number in (8, 9)]
    assert told == [False, True]
    taken = holdfast("submit", "add", "2", "--key", "order 8")
    assert (taken.code, "belongs to" in taken.err) == (2, True)
    assert holdfast("submit", "add", "1", "--key", "").code == 2
    assert len(holdfast("ps", "--json").json["invocations"]) == 2
    assert "\nkey      order 8\n" in holdfast("show", first).out
    assert holdfast("show", first, "--json").json["key"] == "order 8"
    assert holdfast("show", submit(holdfast, "add", "1"), "--json").json["key"] is None


def test_what_stands_for_a_value_is_not_quoted_as_if_it_were_one(shop: Path, holdfast: Command) -> None:
    id = submit(holdfast, "add", "x" * 100_000, "-k", "b=<text>")
    assert ", b='<text>')" in holdfast("show", id).out
    assert "shop:add(<payload of 100,005 bytes, " in holdfast("show", id).out


def test_history_tells_each_edge_with_time_and_delta(shop: Path, app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1")
    park(app, id)
    title, *lines = holdfast("history", id).out.splitlines()
    assert title.split() == ["version", "time", "delta", "status", "epoch", "owner", "why"]
    assert [line.split()[3] for line in lines] == ["registered", "pending", "running", "parked"]
    assert lines[0].split()[2] == "+0s"
    assert [entry["version"] for entry in holdfast("history", id, "--json").json["history"]] == [1, 2, 3, 4]


def test_history_tells_who_performed_a_recovery_and_why(shop: Path, app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1")
    change = changes.recovered(
        claimed(app, id), by="runner9", operation="r", at=app.runtime.clock.now(), why="its owner r/0 is dead"
    )
    with_store(app, lambda store: store.apply([change]))
    lines = holdfast("history", id).out.splitlines()[-2:]
    assert [line.endswith("its owner r/0 is dead (by runner9)") for line in lines] == [True, True]
    told = [(entry["by"], entry["why"]) for entry in holdfast("history", id, "--json").json["history"]]
    assert told[-3:] == [(None, ""), *[("runner9", "its owner r/0 is dead")] * 2]


def test_on_a_terminal_tables_are_drawn_without_markup_and_ids_stay_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [(UNKNOWN_ID, "failed", "[bold]x[/bold]"), (UNKNOWN_ID, "success", None)]
    Output(json=False, terminal=True).table(("id", "status", "why"), rows)
    drawn = capsys.readouterr().out
    assert "[bold]x[/bold]" in drawn
    assert drawn.count(UNKNOWN_ID) == 2
    assert "─" in drawn


# --- wake


def test_wake_puts_parked_work_back(shop: Path, app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1")
    park(app, id)
    assert "holdfast wake" in holdfast("show", id).out
    assert holdfast("wake", id, "--json").json == {"id": id, "woken": True}
    record = app.invocation(id).record()
    assert (record.status, record.history[-1].why) == (Status.REROUTED, "woken by hand")


def test_only_parked_work_can_be_woken(shop: Path, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1")
    answer = holdfast("wake", id)
    assert answer.code == 1
    assert (
        answer.err
        == f"error: shop:add {id} is registered; only a parked invocation, or a workflow that sleeps, can be woken\n"
    )


def test_a_wake_that_comes_second_says_so(
    shop: Path, app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = submit(holdfast, "add", "1")
    park(app, id)
    stale = app.invocation(id).record()
    app.invocation(id).wake()

    async def as_it_was(*_: object) -> InvocationRecord:
        return stale

    monkeypatch.setattr("holdfast.invocation.Invocation._record", as_it_was)
    with pytest.raises(InvocationStatusRaceConditionError, match="is rerouted now"):
        app.invocation(id).wake()


def test_ps_lists_by_attributes(app: App, holdfast: Command) -> None:
    ids = [submit(holdfast, "add", "1", "2") for _ in range(2)]
    record = claimed(app, ids[0])
    facts = {"app": app.name, "id": record.id, "epoch": record.epoch, "actor": record.owner}
    update = changes.NoteUpdate(attributes={"stage": "packed", "to": "a=b"}, **facts)  # type: ignore[arg-type]
    assert with_store(app, lambda store: store.apply([update])) == [changes.APPLIED]
    for wanted in (["stage=packed"], ["stage=packed", "to=a=b"]):
        options = [text for each in wanted for text in ("--attribute", each)]
        (found,) = holdfast("ps", *options, "--json").json["invocations"]
        assert (found["id"], found["attributes"]) == (ids[0], {"stage": "packed", "to": "a=b"})
    assert holdfast("ps", "--attribute", "stage=sent").out == "no invocations\n"
    assert "stage=packed, to=a=b" in holdfast("show", ids[0]).out
    for wrong in (["stage"], ["=x"], ["stage=a", "stage=b"]):
        answer = holdfast("ps", *[text for each in wrong for text in ("--attribute", each)])
        assert answer.code != 0
        assert "--attribute" in answer.err


# --- what code says of itself


def _noted(app: App, id: str, **said: object) -> InvocationRecord:
    record = claimed(app, id)
    facts = {"app": app.name, "id": record.id, "epoch": record.epoch, "actor": record.owner}
    at = app.runtime.clock.now()
    log = (LogLine(at=at, level="WARNING", text="row 40 is\x1b[31m odd", logger="shop.rows"),)
    progress = CallProgress(current=40, total=100, message="rows", at=at)
    notes = Notes(progress=progress, checkpoint=app.runtime.codec.encode({"row": 40}), checkpoint_at=at, log=log)
    update = changes.NoteUpdate(notes=notes, **facts)  # type: ignore[arg-type]
    assert with_store(app, lambda store: store.apply([update])) == [changes.APPLIED]
    return record


def test_notes_are_shown(app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1", "2")
    _noted(app, id)
    shown = holdfast("show", id).out
    facts = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    assert facts["progress"].strip().startswith("40 of 100 rows (40%), ")
    assert "'row': 40" in facts["checkpoint"]
    assert "row 40 is\\x1b[31m odd" in shown
    assert "40 of 100 rows (40%)" in holdfast("ps").out
    assert "40 of 100 rows (40%)" in holdfast("why", id).out
    found = holdfast("show", id, "--json").json
    assert {name: found["progress"][name] for name in ("current", "total", "fraction")} == {
        "current": 40,
        "total": 100,
        "fraction": 0.4,
    }
    assert (found["checkpoint"], found["log"][0]["level"]) == ({"value": {"row": 40}}, "WARNING")
    (listed,) = holdfast("ps", "--json").json["invocations"]
    assert listed["progress"]["message"] == "rows"


def test_show_follows_until_the_end(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    id = submit(holdfast, "add", "1", "2")
    record = _noted(app, id)

    def meanwhile(seconds: float) -> None:
        end = changes.completed(record, result=app.runtime.codec.encode(3), operation="e", at=app.runtime.clock.now())
        assert with_store(app, lambda store: store.apply([end])) == [changes.APPLIED]

    monkeypatch.setattr(live, "pause", meanwhile)
    lines = holdfast("show", id, "--follow").out.splitlines()
    assert "row 40 is\\x1b[31m odd" in lines[0]
    assert "running, 40 of 100 rows (40%)" in lines[1]
    assert "success, 40 of 100 rows (40%)" in lines[2]
    assert any(line.startswith("result") for line in lines)
    documents = [json.loads(line) for line in holdfast("show", id, "--follow", "--json").out.splitlines()]
    assert [document.get("status") for document in documents] == [None, "success"]


def test_ps_is_drawn_again_until_it_is_interrupted(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = submit(holdfast, "add", "1", "2")
    pauses: list[float] = []

    def meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt
        _noted(app, id)

    monkeypatch.setattr(live, "pause", meanwhile)
    answer = holdfast("ps", "--watch")
    assert answer.code == 130
    assert answer.out.count(id) == 2
    assert answer.out.count("40 of 100 rows (40%)") == 1


def test_attributes_are_given_at_submit(app: App, holdfast: Command) -> None:
    id = submit(holdfast, "add", "1", "2", "--attribute", "customer=c-17", "--attribute", "to=a=b")
    (found,) = holdfast("ps", "--attribute", "customer=c-17", "--json").json["invocations"]
    assert (found["id"], found["attributes"]) == (id, {"customer": "c-17", "to": "a=b"})
    for wrong in ("customer", "=x", "a="):
        assert holdfast("submit", "add", "1", "2", "--attribute", wrong).code == 2
