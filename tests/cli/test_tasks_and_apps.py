"""What tasks and apps there are, and how people name them and what they look for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.patience import eventually, patient

from holdfast import App

if TYPE_CHECKING:
    from conftest import Command

TASKS = """
from holdfast import App, Retries, every, on_event

app = App("sqlite:///shop.db")

@app.task(retries=Retries(3, backoff="fixed", wait="5s"), retention={"failed": "30d"}, limit=2, limit_by="customer",
          timeout=30, queue="mail", validate="submit", triggers=[every("1h"), on_event("paid")])
def send(customer: str = "all") -> None: ...

@app.task(rate="100/m", burst=3, rate_by="customer", log_lines=20)
def notify(customer: str) -> None: ...

@app.task(debounce="5s", priority=3)
async def sync() -> None: ...

@app.workflow
async def checkout(order: str) -> None: ...
"""
BY_URL = ("--url", "sqlite:///shop.db")


@pytest.fixture
def declared(folder: Path) -> Path:
    (folder / "shop.py").write_text(TASKS)
    return folder


def test_tasks_lists_what_the_code_declares(declared: Path, holdfast: Command) -> None:
    listed = holdfast("tasks")
    assert listed.code == 0
    for text in ("shop:send", "thread", "mail", "3 more attempts, 5s apart", "2 by customer", "30s", "every 1h"):
        assert text in listed.out
    known = {each["name"]: each for each in holdfast("tasks", "--json").json["tasks"]}
    assert list(known) == ["shop:checkout", "shop:notify", "shop:send", "shop:sync"]
    assert known["shop:checkout"]["kind"] == "workflow"
    assert (known["shop:sync"]["pacing"], known["shop:sync"]["priority"]) == ("debounce 5s", 3)
    assert not (declared / "shop.db").exists()


def test_a_task_is_shown_with_all_of_its_options(declared: Path, holdfast: Command) -> None:
    shown = holdfast("tasks", "send")
    for text in ("shop:send(customer: str = 'all') -> None", "failed 30d", "validate", "the event 'paid'"):
        assert text in shown.out
    facts = holdfast("tasks", "send", "--json").json
    assert (facts["limit"], facts["validate"], facts["retention"]) == ("2 by customer", True, {"failed": "30d"})
    limited = holdfast("tasks", "notify", "--json").json
    assert (limited["rate"], limited["log_lines"]) == ("100/m, burst 3 by customer", 20)
    wrong = holdfast("tasks", "sned")
    assert (wrong.code, "Did you mean 'shop:send'?" in wrong.err) == (2, True)


def test_apps_lists_who_shares_a_store_and_a_wrong_name_is_told(folder: Path, holdfast: Command) -> None:
    for name, count in (("shop", 2), ("billing", 1)):
        with App("sqlite:///shop.db", name=name) as app:
            app.task(name="t")(lambda: None).map([()] * count)
    listed = holdfast("apps", *BY_URL, "--json").json["apps"]
    assert listed == [
        {"name": "billing", "invocations": 1, "open": 1, "runners": 0},
        {"name": "shop", "invocations": 2, "open": 2, "runners": 0},
    ]
    assert holdfast("ps", *BY_URL, "--name", "shop").code == 0
    for name in (("--name", "shp"), ()):
        wrong = holdfast("ps", *BY_URL, *name)
        assert wrong.code == 1
        assert f"has no app '{name[-1] if name else 'default'}'; it has: billing, shop" in wrong.err
        findings = holdfast("doctor", *BY_URL, *name, "--json").json["findings"]
        (told,) = [each for each in findings if each["subject"] == "name"]
        assert (told["state"], "it has: billing, shop" in told["detail"]) == ("hint", True)


def test_a_name_alone_is_not_taken_for_the_app_of_the_folder(declared: Path, holdfast: Command) -> None:
    wrong = holdfast("ps", "--name", "shop")
    assert (wrong.code, "--name alone means an app of that store: give its --url, or --app" in wrong.err) == (1, True)


def test_limits_are_changed_by_the_short_name_of_their_task(declared: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare").code == 0
    done = holdfast("limits", "set", "notify", "--rate", "5/s")
    assert "'shop:notify' is changed: rate 5/s" in done.out
    listed = {each["name"]: each for each in holdfast("limits", "--json").json["limits"]}
    assert (listed["shop:notify"]["rate"], listed["shop:notify"]["declared_rate"]) == ("5/s", "100/m")
    assert "none has taken a start under its rate" in holdfast("limits", "show", "notify").out
    assert "did you mean 'shop:notify'?" in holdfast("limits", "show", "notfy").err
    assert "'shop:notify' is as the code declares it" in holdfast("limits", "clear", "notify").out
    assert "did you mean 'shop:notify'?" in holdfast("limits", "set", "notfy", "--rate", "5/s").err


def test_calls_that_hold_the_slots_of_a_limit_are_shown(folder: Path, holdfast: Command) -> None:
    may_end = threading.Event()
    with App("sqlite:///shop.db", name="shop", poll_interval_seconds=0.2) as app:

        @app.task(name="shop:hold", limit=1)
        def hold(number: int) -> None:
            may_end.wait(patient(30.0))

        with app.runner():
            calls = hold.map([1, 2])
            eventually(lambda: sorted(call.status for call in calls) == ["concurrency_controlled", "running"])
            asked = ("limits", "show", "shop:hold", *BY_URL, "--name", "shop")
            shown, (key,) = holdfast(*asked), holdfast(*asked, "--json").json["waiting"]
            (holder,) = [call.id for call in calls if call.status == "running"]
            may_end.set()
    assert ["shop:hold", "1", holder] in [line.split() for line in shown.out.splitlines()]
    assert (key["key"], key["held"], key["holders"][0]["id"]) == ("shop:hold", 1, holder)


def test_an_empty_store_refuses_no_name(folder: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare", *BY_URL).code == 0
    assert "no app has anything in this store yet" in holdfast("apps", *BY_URL).out
    assert holdfast("ps", *BY_URL, "--name", "new").code == 0


def test_our_own_tasks_are_listed_when_asked_for(shop: Path, holdfast: Command) -> None:
    with App("sqlite:///shop.db", poll_interval_seconds=0.2) as app:
        work = app.task(name="shop:add")(lambda: 1)
        engine = app.runtime.ready()
        core = engine.core
        with app.runner():
            work.submit().result(timeout=patient(20))

            async def seen() -> bool:
                return bool(await core.store.counts(core.app))

            while not app.runtime.run(seen()):
                pass
    listed = holdfast("ps", "--core", "--json").json["invocations"]
    assert {each["task"] for each in listed} <= {
        "holdfast:recover_pending_invocations",
        "holdfast:recover_running_invocations",
    }
    assert not any(each["task"].startswith("holdfast:") for each in holdfast("ps", "--json").json["invocations"])
    id = listed[0]["id"]
    for command in ("show", "why", "history"):
        assert holdfast(command, id).code == holdfast(command, id[-10:]).code == 0
    assert holdfast("ps", "--core", "--task", listed[0]["task"], "--json").json["invocations"]


def test_an_id_is_found_by_its_beginning_or_its_end(shop: Path, holdfast: Command) -> None:
    first, second = (holdfast("submit", "add", number).out.strip() for number in (1, 2))
    for part in (first[:20], first[-6:], first[-20:], first):
        assert holdfast("show", part, "--json").json["id"] == first
    assert holdfast("cancel", second[-8:]).code == 0
    assert holdfast("show", second, "--json").json["status"] == "cancelled"
    unknown = holdfast("show", "zzzzzz")
    assert (unknown.code, "no invocation whose id begins or ends with 'zzzzzz'" in unknown.err) == (4, True)
    short = holdfast("show", first[-5:])
    assert (short.code, "write 6 characters or more of its beginning, or of its end" in short.err) == (2, True)


def test_an_event_is_found_by_its_end(shop: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare").code == 0
    id = holdfast("events", "emit", "paid", "{}", "--json").json["id"]
    assert holdfast("events", "show", id[-8:], "--json").json["id"] == id
    assert holdfast("events", "show", "zzzzzz").code == 4


def test_a_call_is_found_by_its_key(shop: Path, holdfast: Command) -> None:
    id = holdfast("submit", "add", 1, "--key", "order 7", "--retries", 2, "--retention", "30d").out.strip()
    holdfast("submit", "add", 1)
    facts = holdfast("show", id, "--json").json
    assert facts["retries"]["attempts"] == 2
    for options in ((), ("--task", "add"), BY_URL):
        assert [each["id"] for each in holdfast("ps", *options, "--key", "order 7", "--json").json["invocations"]] == [
            id
        ]
    assert holdfast("ps", "--key", "order 8", "--json").json["invocations"] == []
    assert holdfast("ps", "--key", "order 7", "--status", "failed", "--json").json["invocations"] == []


def test_what_has_ended_is_kept_for_another_time(shop: Path, holdfast: Command) -> None:
    with App("sqlite:///shop.db", poll_interval_seconds=0.2) as app:
        add = app.task(name="shop:add")(lambda a: a)
        with app.runner():
            group = add.map([1, 2])
            group.results(timeout=patient(20))
        waits = add.submit(3)
        first = group[0]
    asked = holdfast("archive", "retain", "30d", "--task", "add")
    assert "2 invocations would be kept for another time; nothing was done" in asked.err
    done = holdfast("archive", "retain", "30d", "--task", "add", "--yes", "--json").json
    assert (done["matched"], len(done["ids"]), done["over"], done["dry_run"]) == (2, 2, 0, False)
    assert holdfast("archive", "retain", "30d", "--task", "add", "--yes", "--json").json["matched"] == 0
    refused = holdfast("archive", "retain", "forever", first.id, waits.id, "--yes")
    assert refused.code == 1
    assert f"{waits.id} stays as it is: it is registered" in refused.out
    assert "for ever" in holdfast("show", first.id).out
    wrong = holdfast("archive", "retain", "5m", first.id, "--yes")
    assert (wrong.code, "is too short" in wrong.err) == (2, True)
    assert holdfast("archive", "retain", "30d", "--yes").code == 2
