"""queues, queues pause and resume, why: what they tell and do, without any process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.processes import Command, Process, eventually

from holdfast import App
from holdfast.cli.run import _names, _weighted


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    """The shop's store, as another process has it, with a task of its own."""
    with App("sqlite:///shop.db") as app:

        @app.task(name="shop:add")
        def add(a: int, b: int = 0) -> int:
            return a + b

        app.invocations()
        yield app


def test_queues_are_listed_paused_and_resumed(app: App, holdfast: Command) -> None:
    app.get_task("shop:add").options(queue="mail").map([1, 2])
    app.get_task("shop:add").options(queue="mail", delay="1h").submit(3)
    lines = holdfast("queues").out.splitlines()
    titles = "queue waiting scheduled blocked running oldest per minute runners paused"
    assert " ".join(lines[0].split()) == titles
    assert [line.split()[:5] for line in lines[1:]] == [["default", "0", "0", "0", "0"], ["mail", "2", "1", "0", "0"]]
    done = holdfast("queues", "pause", "mail", "--reason", "the relay is down", "--by", "ann")
    assert done == (0, "the queue 'mail' is paused; to let it go on: holdfast queues resume mail\n", "")
    assert "by ann: the relay is down" in holdfast("queues").out
    again = holdfast("queues", "pause", "mail")
    assert again.code == 0
    assert again.out.startswith("the queue 'mail' was paused already: for ")
    assert holdfast("queues", "resume", "mail").out == "the queue 'mail' is resumed\n"
    assert holdfast("queues", "resume", "mail").out == "the queue 'mail' was not paused\n"


def test_a_queue_that_nobody_uses_may_be_paused_and_that_is_said(app: App, holdfast: Command) -> None:
    app.get_task("shop:add").options(queue="mail").submit(1)
    done = holdfast("queues", "pause", "mial")
    assert done.code == 0
    assert "no call is in the queue 'mial'" in done.err
    assert "did you mean 'mail'?" in done.err
    assert "paused are: mial" in holdfast("queues", "resume", "mail").out
    assert holdfast("queues", "pause", "mail").err == ""


def test_what_is_no_name_is_refused(app: App, holdfast: Command) -> None:
    done = holdfast("queues", "pause", "a b", "--json")
    assert done.code == 2
    assert "no name for a queue" in done.json["error"]["message"]


def test_queues_answer_in_json(app: App, holdfast: Command) -> None:
    app.get_task("shop:add").options(queue="mail").submit(1)
    done = holdfast("queues", "pause", "mail", "--reason", "r", "--by", "ann", "--json").json
    assert (done["queue"], done["paused"], done["changed"], done["pause"]["by"]) == ("mail", True, True, "ann")
    assert not holdfast("queues", "--json", "pause", "mail").json["changed"]
    mail = {queue["name"]: queue for queue in holdfast("queues", "--json").json["queues"]}["mail"]
    assert mail.pop("oldest_seconds") >= 0
    assert mail.pop("pause")["reason"] == "r"
    numbers = {"waiting": 1, "scheduled": 0, "blocked": 0, "running": 0, "per_minute": 0.0, "runners": 0}
    assert mail == {"name": "mail"} | numbers
    assert holdfast("queues", "resume", "mail", "--json").json == {"queue": "mail", "paused": False, "changed": True}


def test_why_says_what_holds_an_invocation_back(app: App, holdfast: Command) -> None:
    invocation = app.get_task("shop:add").options(queue="mail").submit(1)
    app.queues.pause("mail", reason="the relay is down", by="ann")
    told = holdfast("why", invocation.id[:-3]).out
    assert told.startswith(f"shop:add {invocation.id} (registered): the queue 'mail' was paused by ann ")
    assert "(the relay is down). To let it go on: holdfast queues resume mail. Besides, waiting for " in told
    assert "no runner is alive on this store." in told
    facts = holdfast("why", invocation.id, "--json").json
    assert facts["reasons"] == ["queue_paused", "no_runner"]
    assert facts["status"] == "registered"
    assert json.dumps(facts["explanation"])[1:33] in holdfast("show", invocation.id, "--json").out
    assert holdfast("why", "nothing").code == 4


def test_a_pause_reaches_worker_processes(shop: Path, holdfast: Command, start: Callable[..., Process]) -> None:
    (shop / "shop.py").write_text(
        (shop / "shop.py").read_text().replace("@app.task\ndef add", "@app.task(queue='mail')\ndef add")
    )
    assert holdfast("queues", "pause", "mail", "--url", "sqlite:///shop.db").code == 1  # there is no store yet
    assert holdfast("store", "prepare").code == 0
    assert holdfast("queues", "pause", "other").code == 0
    runner = start("run", "shop:app", "--workers", "2", "--queues", "mail=3,default")
    assert holdfast("submit", "add", "1", "--wait").out.strip() == "1"
    assert holdfast("queues", "pause", "mail").code == 0
    runner.says("paused queue 'mail'")
    waits = holdfast("submit", "add", "2").out.strip()
    assert holdfast("submit", "linger", "0", "--wait").out.strip() == "done"
    assert holdfast("show", waits, "--json").json["status"] == "registered"
    assert holdfast("queues", "resume", "mail").code == 0
    eventually(lambda: holdfast("show", waits, "--json").json["status"] == "success", "it goes on")
    rates = lambda: {q["name"]: q["per_minute"] for q in holdfast("queues", "--json").json["queues"]}  # noqa: E731
    eventually(lambda: rates()["mail"] > 0, "the rate is told")
    assert "default, mail=3" in holdfast("runners").out


@pytest.mark.parametrize(
    ("given", "queues"),
    [("a,b", {"a": 1, "b": 1}), ("a=3,b", {"a": 3, "b": 1}), ("k=v,x=y=2", {"k=v": 1, "x=y": 2}), ("=3", {"=3": 1})],
)
def test_queues_are_given_with_their_weights(given: str, queues: dict[str, int]) -> None:
    assert _weighted(_names([given])) == queues


def test_a_weight_that_makes_no_sense_is_refused(shop: Path, holdfast: Command) -> None:
    refused = holdfast("run", "shop:app", "--queues", "mail=0")
    assert refused.code == 2
    assert "the weight 0" in refused.err
