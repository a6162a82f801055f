"""events: what is listed and told, what is emitted, what is refused, and what show says of a cause."""

from __future__ import annotations

import re
from json import dumps
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command, eventually

from holdfast import App
from holdfast.ids import is_id


@pytest.fixture
def app(triggered: App) -> App:
    return triggered


@pytest.fixture
def ready(app: App) -> App:
    """With triggers in the store, and nobody who works."""
    with app.runner():
        pass
    return app


def emitted(holdfast: Command, *arguments: str) -> Any:
    answer = holdfast("events", "emit", *arguments, "--json")
    assert (answer.code, answer.err) == (0, ""), answer.out
    return answer.json


def lines(text: str) -> dict[str, str]:
    """Each line by its first word, with single blanks."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


def ended(app: App, task: str) -> str:
    """The id of the one call of this task, once it has ended."""
    eventually(lambda: app.invocations(task=task, status=["success", "failed"]), f"{task} was called")
    (record,) = app.invocations(task=task)
    return record.id


# --- events


def test_the_list_tells_when_what_and_what_came_of_it(ready: App, holdfast: Command) -> None:
    assert holdfast("events").out == "no events; emit one with: holdfast events emit\n"
    assert holdfast("events", "--json").json == {"events": []}
    first = emitted(holdfast, "order.created", '{"id": 7, "total": 50}')
    long = emitted(holdfast, "nobody.cares", dumps({"text": "é\x1b" * 200}))
    paid = emitted(holdfast, "paid", '{"by": "card"}')
    answer = holdfast("events")
    assert (answer.code, answer.err) == (0, "")
    titles, *rows = answer.out.splitlines()
    assert titles.split() == ["time", "name", "id", "payload", "caused"]
    assert [row.split()[1:3] for row in rows] == [[each["name"], each["id"]] for each in (paid, long, first)]
    decides, calls = (each["invocation"] for each in first["caused"])
    assert '  {"id": 7, "total": 50}  ' in rows[2]
    assert re.search(
        f"  {decides} by shop:inspect#\\w{{8}} \\(its code decides\\), {calls} by shop:reserve#\\w{{8}}$", rows[2]
    )
    assert rows[1].endswith("…  nothing")
    assert rows[0].endswith("nothing by thanks (it waits for the other conditions)")
    assert max(map(len, rows)) < 260
    assert holdfast("events", "--json").json["events"] == [
        {name: each[name] for name in each if name != "fresh"} for each in (paid, long, first)
    ]


def test_the_list_goes_by_name_and_in_pages(ready: App, holdfast: Command) -> None:
    ids = [emitted(holdfast, name)["id"] for name in ("a", "b", "a", "a")]
    assert [each["id"] for each in holdfast("events", "--event", "a", "--json").json["events"]] == [
        ids[3],
        ids[2],
        ids[0],
    ]
    page = holdfast("events", "--limit", "2")
    assert [line.split()[2] for line in page.out.splitlines()[1:]] == [ids[3], ids[2]]
    assert page.err == f"note: there may be more: --before {ids[2]}\n"
    rest = holdfast("events", "--before", ids[2], "--json").json["events"]
    assert [each["id"] for each in rest] == [ids[1], ids[0]]
    assert holdfast("events", "--before", "then").code == 2
    assert holdfast("events", "--limit", "0").code == 2


def test_show_tells_the_payload_and_what_each_trigger_made_of_it(app: App, holdfast: Command) -> None:
    with app.runner():
        event = emitted(holdfast, "order.created", '{"id": 7, "total": 50}', "--key", "order 7")
        small = emitted(holdfast, "order.created", '{"id": 8, "total": 5}')
        inspected = ended(app, "shop:inspect")
        eventually(lambda: len(app.invocations(status="success")) == 5, "all is done")
    answer = holdfast("events", "show", event["id"])
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"the event 'order.created' {event['id']}\n\n")
    told = lines(answer.out)
    assert told["payload"] == '{"id": 7, "total": 50}'
    assert told["key"] == "order 7"
    decides, calls = event["caused"]
    assert told[decides["trigger"]] == f"{decides['invocation']} success its code has called: {inspected}"
    assert told[calls["trigger"]] == f"{calls['invocation']} success"
    facts = holdfast("events", "show", event["id"][:20], "--json").json
    assert facts["payload"] == {"id": 7, "total": 50}
    assert [(each["status"], each["called"]) for each in facts["caused"]] == [
        ("success", [inspected]),
        ("success", None),
    ]
    assert "its code has called nothing" in holdfast("events", "show", small["id"]).out
    app.purge(status="success")
    assert "not kept any more" in holdfast("events", "show", event["id"]).out


def test_show_tells_who_emitted_it(app: App, holdfast: Command) -> None:
    with app.runner():
        emitted(holdfast, "order.created", '{"id": 7, "total": 1}')
        reserved = ended(app, "shop:reserve")
    (event,) = holdfast("events", "--event", "reserved", "--json").json["events"]
    assert (event["emitted_by"], event["depth"], event["path"]) == (reserved, 1, ["shop:reserve"])
    answer = holdfast("events", "show", event["id"]).out
    assert f"emitted by          shop:reserve {reserved}, success\n" in answer
    assert "triggers before it  1: shop:reserve\n" in answer
    assert "no trigger is subscribed to it\n" in answer


def test_an_event_that_is_not_there_is_code_4(ready: App, holdfast: Command) -> None:
    id = emitted(holdfast, "a")["id"]
    for text in ("0" * 26, "nonsense!", "zzzzzzzz"):
        answer = holdfast("events", "show", text, "--json")
        assert (answer.code, answer.json["error"]["type"]) == (4, "EventNotFound"), text
    assert holdfast("events", "show", id[:3]).code == 2
    emitted(holdfast, "a")
    both = holdfast("events", "show", id[:6])
    assert both.code == 2
    assert "write more of it" in both.err
    wrong = holdfast("show", id)
    assert (wrong.code, wrong.err) == (4, f"error: {id} is the event 'a': holdfast events show {id}\n")


# --- emitting


def test_emit_prints_the_id_and_tells_what_came_of_it(ready: App, holdfast: Command) -> None:
    answer = holdfast("events", "emit", "order.created", '{"id": 7, "total": 1}')
    id = answer.out.strip()
    assert answer.code == 0
    assert is_id(id)
    assert answer.err.startswith("it caused: ")
    calls = [record.id for record in ready.invocations()]
    assert all(call in answer.err for call in calls)
    assert len(calls) == 2
    nothing = holdfast("events", "emit", "nobody.cares")
    assert nothing.err == "it caused: nothing\n"
    payload = holdfast("events", "show", nothing.out.strip(), "--json").json["payload"]
    assert payload is None


def test_a_key_emits_once(ready: App, holdfast: Command) -> None:
    first = emitted(holdfast, "order.created", '{"id": 7, "total": 1}', "--key", "7")
    again = emitted(holdfast, "order.created", '{"id": 8, "total": 1}', "--key", "7")
    assert (first["fresh"], again["fresh"]) == (True, False)
    assert first["key"] == "7"
    assert {**again, "fresh": True} == first, "what came of it the first time"
    answer = holdfast("events", "emit", "order.created", "--key", "7")
    assert (answer.out, answer.err) == (f"{first['id']}\n", f"it was emitted before, at {first['at']}\n")
    assert len(ready.invocations()) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", '{"id": 7'], "is no JSON (Expecting ',' delimiter"),
        (["a", "hello"], "is no JSON (Expecting value"),
        (["a", "NaN"], "is no JSON (NaN is no JSON)"),
        (["a", ""], "is no JSON"),
        (["a", "[" * 100_000], "is no JSON"),
        (["a b"], "is no name for an event"),
        (["schedule:x"], "is no name for an event"),
        ([""], "is no name for an event"),
        (["a", "1", "--key", ""], "key"),
    ],
)
def test_what_cannot_be_emitted_is_refused_and_stores_nothing(
    ready: App, holdfast: Command, arguments: list[str], says: str
) -> None:
    answer = holdfast("events", "emit", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert len(answer.err) < 400
    assert holdfast("events", "emit", *arguments, "--json").code == 2
    assert holdfast("events", "--json").json == {"events": []}


def test_looking_and_emitting_make_no_store(shop: Path, holdfast: Command) -> None:
    for command in (["events"], ["triggers"], ["events", "emit", "a"], ["events", "show", "0" * 26]):
        assert holdfast(*command).code == 1
    assert not (shop / "shop.db").exists()


def test_options_of_the_group_count_too(ready: App, holdfast: Command) -> None:
    answer = holdfast("events", "--url", "sqlite:///shop.db", "--json", "emit", "a")
    assert answer.json["name"] == "a"


# --- causes


def test_show_and_history_tell_what_triggered_it(app: App, holdfast: Command) -> None:
    with app.runner():
        event = emitted(holdfast, "order.created", '{"id": 7, "total": 50}')
        paid = emitted(holdfast, "paid", '{"by": "card"}')
        reserved, inspected, thanked = (ended(app, f"shop:{name}") for name in ("reserve", "inspect", "thank"))
    decides, calls = event["caused"]
    by_event = f"the event 'order.created' {event['id']}, by the trigger '{calls['trigger']}'"
    told = holdfast("show", reserved).out
    assert f"triggered by  {by_event}\n" in told
    assert holdfast("history", reserved).out.endswith(f"\ntriggered by {by_event}\n")
    both = f"the end of shop:reserve {reserved} and the event 'paid' {paid['id']}, by the trigger 'thanks'"
    assert f"triggered by  {both}\n" in holdfast("show", thanked).out
    assert f"triggered by  the event 'order.created' {event['id']}," in holdfast("show", inspected).out
    assert f"by the trigger '{decides['trigger']}'" in holdfast("show", decides["invocation"]).out
    origin = {
        "trigger": "thanks",
        "sources": [
            {"kind": "end", "id": reserved, "name": "shop:reserve"},
            {"kind": "event", "id": paid["id"], "name": "paid"},
        ],
        "depth": 2,
        "path": ["shop:reserve", "shop:thank"],
    }
    assert holdfast("show", thanked, "--json").json["origin"] == origin
    assert holdfast("history", thanked, "--json").json["origin"] == origin
    plain = holdfast("submit", "shop:add", "1").out.strip()
    assert "triggered by" not in holdfast("show", plain).out
    assert "triggered by" not in holdfast("history", plain).out
    assert holdfast("show", plain, "--json").json["origin"] is None


def test_tasks_that_decide_can_be_listed_and_are_no_task_to_submit(app: App, holdfast: Command) -> None:
    with app.runner():
        event = emitted(holdfast, "order.created", '{"id": 7, "total": 1}')
    decides = event["caused"][0]
    (listed,) = holdfast("ps", "--task", f"trigger:{decides['trigger']}", "--json").json["invocations"]
    assert listed["id"] == decides["invocation"]
    answer = holdfast("submit", f"trigger:{decides['trigger']}", "event", event["id"])
    assert answer.code == 2
    assert "Declared: shop:add, shop:boom, shop:linger." in answer.err
