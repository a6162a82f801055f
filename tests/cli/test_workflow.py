"""`holdfast workflow …`, and what other commands tell about runs: to people and to programs."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App
from holdfast.cli import timeline
from holdfast.cli.invocations import found
from holdfast.ids import LENGTH
from holdfast.model.status import Status
from holdfast.runtime.runs import StepRecord

if TYPE_CHECKING:
    from conftest import Command

STORE = "sqlite:///shop.db"
BY_URL = ("--url", STORE)

SHOP = '''
import asyncio, os
from holdfast import App, context
from holdfast.retries import Fixed
from holdfast.workflows.api import sleep

app = App("sqlite:///shop.db", poll_interval_seconds=0.1, workflow_linger_seconds=0.05)

def count(text):
    """Steps write down that they ran: a replay must not add a line."""
    with open("effects", "a") as file:
        file.write(text + chr(10))

@app.step
async def charge(order: str) -> str:
    count(f"charge {context().idempotency_key}")
    return f"receipt {order}"

@app.step
async def pack(order: str) -> str:
    count("pack")
    return f"box {order}"

@app.step(retries=Fixed(3, "1h"))
async def ship(order: str) -> str:
    raise OSError("no truck")

@app.step(queue="gpu")
async def render(order: str) -> str:
    return order

@app.step
async def slow() -> None:
    await asyncio.sleep(30)

@app.workflow
async def invoice(order: str) -> str:
    return await charge(f"{order} invoice")

@app.workflow
async def checkout(order: str, pause: float = 0.0) -> str:
    receipt = await charge(order)
    context().set(stage="charged")
    boxes = await asyncio.gather(pack(order), pack(f"{order}b"))
    if pause:
        await sleep(pause)
    return f"{receipt}, {len(boxes)}, {await invoice(order)}"

@app.workflow
def plainly(order: str, pause: float) -> str:
    receipt = charge(order)
    sleep(pause)
    return receipt

@app.workflow
async def shipping(order: str) -> str:
    return await ship(order)

@app.workflow
async def rendering(order: str) -> str:
    return await render(order)

@app.workflow
async def waiting(order: str) -> str:
    return await invoice.options(delay="1h").submit(order)

@app.workflow
async def lengthy() -> None:
    await slow()

@app.workflow
async def broken() -> None:
    receipt = await charge("x")
    raise ValueError(receipt)

@app.workflow
async def countdown(left: int) -> int:
    await charge(str(left))
    if left:
        context().restart(left - 1)
    return left

@app.task
def plain() -> None: ...
'''

Runs = dict[str, str]


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the shop that is in this folder, with a runner of it."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("shop", None)
    shop = importlib.import_module("shop")
    with shop.app, shop.app.runner(queues=["default"]):
        yield shop
    del sys.modules["shop"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """A store with runs of every kind."""
    folder = tmp_path_factory.mktemp("flows")
    (folder / "shop.py").write_text(SHOP)
    with pytest.MonkeyPatch.context() as monkeypatch, running(folder, monkeypatch) as shop:
        ended = {"done": shop.checkout.submit("42"), "broken": shop.broken.submit(), "again": shop.countdown.submit(2)}
        asleep = {
            "asleep": shop.checkout.submit("43", 3600.0),
            "plainly": shop.plainly.submit("44", 3600.0),
            "shipping": shop.shipping.submit("45"),
            "rendering": shop.rendering.submit("46"),
            "waiting": shop.waiting.submit("47"),
        }
        others = {"task": shop.plain.submit(), "later": shop.checkout.options(delay="1h").submit("48")}
        eventually(lambda: all(run.record().retain_until for run in ended.values()), "runs have ended")
        eventually(lambda: all(run.status is Status.SUSPENDED for run in asleep.values()), "runs are suspended")
    return folder, {name: run.id for name, run in (ended | asleep | others).items()}


@pytest.fixture
def runs(made: tuple[Path, Runs], folder: Path) -> Runs:
    """The runs, in a copy of that store."""
    shutil.copytree(made[0], folder, dirs_exist_ok=True)
    return made[1]


def change(folder: Path, old: str, new: str) -> None:
    """Deploy other code."""
    text = (folder / "shop.py").read_text()
    assert old in text
    (folder / "shop.py").write_text(text.replace(old, new))
    sys.modules.pop("shop", None)


def effects(folder: Path) -> str:
    return (folder / "effects").read_text()


# --- steps


def test_steps_tell_arguments_results_and_times(runs: Runs, holdfast: Command) -> None:
    answer = holdfast("workflow", "steps", runs["done"], *BY_URL)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0].split() == ["call", "status", "attempt", "start", "took", "what"]
    assert [line.split()[:3] for line in lines[1:]] == [
        [call, "completed", "1"] for call in ("charge#1", "pack#1", "pack#2", "invoice#1")
    ]
    assert "('42') → 'receipt 42'" in lines[1]
    document = holdfast("workflow", "steps", runs["done"], *BY_URL, "--json").json
    assert (document["id"], document["task"], document["status"]) == (runs["done"], "shop:checkout", "success")
    charge, *_, child = document["steps"]
    assert (charge["id"], charge["kind"], charge["name"], charge["attempt"]) == ("charge#1", "step", "charge", 1)
    assert charge["arguments"] == {"args": ["42"], "kwargs": {}}
    assert charge["result"] == {"value": "receipt 42"}
    assert (charge["error"], charge["child"], charge["due_at"], charge["queue"]) == (None, None, None, "default")
    assert charge["seconds"] >= 0
    assert charge["started_at"].endswith("Z")
    assert "shop.py:" in charge["where"]
    assert (child["kind"], len(child["child"])) == ("child", LENGTH)


def test_waits_and_retries_are_listed_with_what_they_wait_for(runs: Runs, holdfast: Command) -> None:
    asleep = holdfast("workflow", "steps", runs["asleep"]).out
    assert "wait#1 sleep" in asleep
    assert "until 20" in asleep
    (retrying,) = holdfast("workflow", "steps", runs["shipping"], "--json").json["steps"]
    assert (retrying["status"], retrying["attempt"], retrying["error"]["message"]) == ("retrying", 1, "no truck")
    assert retrying["due_at"] > retrying["started_at"]
    assert "OSError: no truck; next attempt 20" in holdfast("workflow", "steps", runs["shipping"]).out
    remote = holdfast("workflow", "steps", runs["rendering"]).out
    assert "render#1 on gpu" in remote
    assert " → as " in remote


def test_one_step_is_shown_whole(runs: Runs, holdfast: Command) -> None:
    shown = holdfast("workflow", "steps", runs["shipping"], "ship#1")
    assert shown.out.startswith("ship#1 (retrying)\n\ncall     ('45')\n")
    assert "error    OSError: no truck\n" in shown.out
    assert "  | Traceback (most recent call last):" in shown.out
    (only,) = holdfast("workflow", "steps", runs["done"], "pack#2", "--json").json["steps"]
    assert (only["id"], only["result"]) == ("pack#2", {"value": "box 42b"})


def test_steps_of_a_run_that_began_anew_are_those_since(runs: Runs, holdfast: Command) -> None:
    answer = holdfast("workflow", "steps", runs["again"])
    assert [line.split()[0] for line in answer.out.splitlines()[1:]] == ["charge#1"]
    assert "('0')" in answer.out
    assert answer.err.startswith(
        "note: the run has restarted 2 times; these events are since the last restart. All events: "
    )
    events = holdfast("workflow", "events", runs["again"], "--json").json["events"]
    assert {event["generation"] for event in events if event["type"].startswith("step")} == {
        1,
        2,
    }  # older ones are gone


def test_a_run_that_was_not_started_has_no_steps(runs: Runs, holdfast: Command) -> None:
    assert holdfast("workflow", "steps", runs["later"]).out == "its log has no step yet\n"
    assert holdfast("workflow", "steps", runs["later"], "--json").json["steps"] == []
    events = holdfast("workflow", "events", runs["later"], "--json").json["events"]
    assert [event["type"] for event in events] == ["run_created"]
    missing = holdfast("workflow", "steps", runs["later"], "charge#1")
    assert (missing.code, "its log has no step yet" in missing.err) == (4, True)


# --- events


def test_events_come_in_pages_and_by_call(runs: Runs, holdfast: Command) -> None:
    whole = holdfast("workflow", "events", runs["done"], *BY_URL, "--json").json
    assert whole["after"] is None
    types = [event["type"] for event in whole["events"]]
    assert types[:5] == ["run_created", "run_started", "step_created", "step_started", "step_completed"]
    assert types[-1] == "run_completed"
    created = whole["events"][2]
    assert (created["correlation"], created["name"], created["position"], created["generation"]) == (
        *("charge#1", "charge"),
        *(1, 0),
    )
    assert created["value"] == {"args": ["42"], "kwargs": {}}
    assert created["code"]
    assert whole["events"][-1]["value"] == {"value": "receipt 42, 2, receipt 42 invoice"}
    paged: list[dict[str, Any]] = []
    after: tuple[str, ...] = ()
    while (page := holdfast("workflow", "events", runs["done"], "--limit", 4, *after, "--json").json)["after"]:
        paged += page["events"]
        after = ("--after", page["after"])
    assert [*paged, *page["events"]] == whole["events"]
    only = holdfast("workflow", "events", runs["done"], "--correlation", "pack#2", "--json").json["events"]
    assert {event["correlation"] for event in only} == {"pack#2"}
    short = holdfast("workflow", "events", runs["done"], "--after", "1", "--limit", "1")
    assert short.out.splitlines()[1].split()[0] == "0.2"
    assert short.err == "note: there may be more: --after 0.2\n"


def test_events_say_why_and_until_when(runs: Runs, holdfast: Command) -> None:
    said = holdfast("workflow", "events", runs["asleep"]).out
    assert "wait_created" in said
    assert "sleep, until 20" in said
    assert "OSError: no truck" in holdfast("workflow", "events", runs["shipping"]).out
    assert "run_failed" in holdfast("workflow", "events", runs["broken"]).out


# --- bad input


@pytest.mark.parametrize(
    "arguments",
    [["steps"], ["events"], ["replay"], ["fork", "charge#1"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_is_no_run_is_said_so(runs: Runs, holdfast: Command, arguments: list[str]) -> None:
    command, *more = arguments
    unknown = holdfast("workflow", command, "0" * LENGTH, *more)
    assert (unknown.code, unknown.out) == (4, "")
    task = holdfast("workflow", command, runs["task"], *more, "--json")
    assert (task.code, task.json["error"]["type"]) == (2, "UsageError")
    assert "is a task, and has no log" in task.json["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [["steps", "chrge#1"], ["events", "--correlation", "chrge#1"], ["fork", "chrge#1"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_an_unknown_step_names_the_nearest(runs: Runs, holdfast: Command, arguments: list[str]) -> None:
    command, *more = arguments
    answer = holdfast("workflow", command, runs["done"], *more)
    assert answer.code == 4
    assert "has no step 'chrge#1'. Did you mean 'charge#1'? There are: charge#1, pack#1" in answer.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["events", "done", "--after", "x"], "is no cursor"),
        (["fork", "done", "pack#1", "--arguments", "42"], "neither a JSON list nor an object"),
        (["fork", "done", "pack#1", "--arguments", "nonsense"], "neither a JSON list nor an object"),
        (["fork", "done", "pack#1", "--arguments", '["1", 2, 3]'], "checkout"),
        (["fork", "done", "pack#1", "--arguments", '{"order": "1", "pause": "x"}'], "'pause'"),
        (["fork", "done", "pack#1", "--result", "charge#1"], "not of the form step=value"),
        (["replay", "done", "--pdb", "--json"], "--pdb talks to a person"),
        (["check", "--task", "plain"], "shop:plain is a task"),
        (["check", "--task", "chekout"], "Did you mean 'shop:checkout'"),
        (["check", "--status", "nonsense"], "there is no status 'nonsense'"),
        (["check", "shop:app", "--app", "other:app"], "named twice"),
    ],
)
def test_a_wrong_word_is_a_usage_error(runs: Runs, holdfast: Command, arguments: list[str], says: str) -> None:
    before = holdfast("ps", "--json").json
    answer = holdfast("workflow", *[runs.get(word, word) for word in arguments])
    assert answer.code == 2
    assert says in answer.out + answer.err
    assert holdfast("ps", "--json").json == before


def test_a_check_makes_no_store(folder: Path, holdfast: Command) -> None:
    (folder / "shop.py").write_text(SHOP)
    for command in (["check"], ["replay", "0" * LENGTH]):
        answer = holdfast("workflow", *command)
        assert (answer.code, "there is no store at" in answer.err) == (1, True)
    assert not (folder / "shop.db").exists()


# --- fork and rerun


def test_a_fork_goes_on_before_a_step(runs: Runs, folder: Path, holdfast: Command, monkeypatch: Any) -> None:
    answer = holdfast("workflow", "fork", runs["done"], "pack#1", *BY_URL, "--result", 'charge#1="paid"', "--json")
    assert answer.json == {
        "id": answer.json["id"],
        "task": "shop:checkout",
        "fork_of": runs["done"],
        "step": "pack#1",
        "new_key": False,
    }
    other = holdfast("workflow", "fork", runs["done"], "charge#1", "--arguments", '["50"]', "--new-key")
    assert other.err == f"it goes on before charge#1 of {runs['done']}\n"
    named = holdfast("workflow", "fork", runs["done"], "charge#1", "--arguments", '{"order": "51", "pause": 0}')
    before = effects(folder)
    with running(folder, monkeypatch) as shop:
        results = [shop.app.invocation(id).result(patient(30)) for id in (answer.json["id"], other.out.strip())]
        assert shop.app.invocation(named.out.strip()).result(patient(30)) == "receipt 51, 2, receipt 51 invoice"
    assert results == ["paid, 2, receipt 42 invoice", "receipt 50, 2, receipt 50 invoice"]
    lines = effects(folder).removeprefix(before).splitlines()
    charged = [line.removeprefix("charge ") for line in lines if line.startswith("charge ")]
    own = [key for key in charged if key.startswith(other.out.strip())]
    assert len(charged) == 5  # all have sent an invoice, and two have charged the order
    assert len(own) == 2
    assert all(key in before for key in charged if key not in own)


@pytest.mark.parametrize("new_key", [False, True])
def test_a_rerun_keeps_the_keys_of_effects_unless_told(
    new_key: bool, runs: Runs, folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--new-key",) if new_key else ()
    (made,) = holdfast("rerun", runs["broken"], *options, *BY_URL, "--json").json["reruns"]
    before = effects(folder)
    with running(folder, monkeypatch) as shop, pytest.raises(ValueError, match="receipt x"):
        shop.app.invocation(made["id"]).result(patient(30))
    (key,) = [line.removeprefix("charge ") for line in effects(folder).removeprefix(before).splitlines()]
    assert (key in before) is not new_key
    assert key.startswith(made["id"]) is new_key


# --- check


def test_code_that_has_not_changed_fits_all_runs(runs: Runs, folder: Path, holdfast: Command) -> None:
    before, listed = effects(folder), holdfast("ps", "--json").json
    answer = holdfast("workflow", "check")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "7 runs: 7 fit"
    ended = holdfast("workflow", "check", "shop:app", "--status", "success", "--status", "failed", "--json")
    assert ended.code == 0
    assert {run["id"]: run["verdict"] for run in ended.json["runs"]}.items() >= {
        (runs["done"], "fits"),
        (runs["broken"], "fits"),
        (runs["again"], "fits"),
    }
    assert ended.json["summary"]["diverges"] == ended.json["summary"]["needs_patch"] == 0
    assert ended.json["may_be_more"] is False
    assert effects(folder) == before
    assert holdfast("ps", "--json").json == listed


def test_changed_code_needs_a_patch_or_diverges_and_both_calls_are_named(
    runs: Runs, folder: Path, holdfast: Command
) -> None:
    change(folder, "    receipt = await charge(order)\n", "    print('in the body')\n    receipt = await pack(order)\n")
    answer = holdfast("workflow", "check", "--task", "checkout", "--json")
    assert answer.code == 1
    assert answer.err == "in the body\nin the body\n"
    later, asleep = answer.json["runs"]
    assert (later["id"], later["verdict"], later["events"]) == (runs["later"], "fits", 0)
    assert (asleep["id"], asleep["task"], asleep["status"]) == (runs["asleep"], "shop:checkout", "suspended")
    assert asleep["verdict"] == "needs_patch"
    assert "the log has charge#1 at " in asleep["why"]
    assert "the code waits for pack#1 at " in asleep["why"]
    assert asleep["why"].count("shop.py:") == 2
    assert answer.json["summary"] == {"fits": 1, "diverges": 0, "needs_patch": 1}
    people = holdfast("workflow", "check", "--task", "checkout")
    assert people.out.splitlines()[-1] == "2 runs: 1 fit, 1 need a patch"
    ended = holdfast("workflow", "check", "--task", "shop:checkout", "--status", "success", "--json")
    assert (ended.code, ended.json["runs"][0]["verdict"]) == (1, "diverges")
    assert holdfast("workflow", "check", "--task", "shipping").code == 0


def test_a_patch_makes_it_fit(runs: Runs, folder: Path, holdfast: Command) -> None:
    change(folder, "import sleep", "import patched, sleep")
    there = "    receipt = await charge(order)\n    context"
    change(folder, there, f"    if patched('new'):\n        await pack(order)\n{there}")
    assert holdfast("workflow", "check", "--task", "checkout").code == 0


def test_a_workflow_that_is_gone_does_not_fit(runs: Runs, folder: Path, holdfast: Command) -> None:
    change(folder, "async def rendering(", "async def drawing(")
    answer = holdfast("workflow", "check", "--json")
    assert answer.code == 1
    (gone,) = [run for run in answer.json["runs"] if run["verdict"] != "fits"]
    assert (gone["id"], gone["verdict"]) == (runs["rendering"], "not_declared")
    assert "declares no workflow 'shop:rendering'" in gone["why"]


def test_a_workflow_that_has_become_a_task_does_not_fit(runs: Runs, folder: Path, holdfast: Command) -> None:
    change(folder, "@app.workflow\nasync def rendering(", "@app.task\nasync def rendering(")
    answer = holdfast("workflow", "check", "--json")
    assert answer.code == 1
    (gone,) = [run for run in answer.json["runs"] if run["verdict"] != "fits"]
    assert (gone["id"], gone["verdict"]) == (runs["rendering"], "not_declared")
    assert "declares 'shop:rendering' as a task" in gone["why"]
    assert "is a task in this code" in holdfast("workflow", "replay", runs["rendering"]).err


def test_a_check_is_bounded(runs: Runs, holdfast: Command) -> None:
    answer = holdfast("workflow", "check", "--limit", "2")
    assert answer.out.splitlines()[-1] == "2 runs: 2 fit"
    assert answer.err == "note: there may be more: give a larger --limit, or name a --task\n"


# --- replay


def test_a_replay_tells_where_the_body_waits(runs: Runs, folder: Path, holdfast: Command) -> None:
    before = effects(folder)
    answer = holdfast("workflow", "replay", runs["asleep"])
    assert answer.code == 0
    assert f"shop:checkout {runs['asleep']} (suspended): fits; " in answer.out
    assert "the body waits for wait#1 (sleep of 1h until " in answer.out
    done = holdfast("workflow", "replay", runs["done"], "--json").json
    assert (done["verdict"], done["has_ended"], done["waits_for"], done["why"]) == ("fits", True, [], "")
    change(folder, "await charge(order)\n    context", "await pack(order)\n    context")
    wrong = holdfast("workflow", "replay", runs["asleep"])
    assert (wrong.code, "(suspended): needs a patch: the log has charge#1" in wrong.out) == (1, True)
    assert effects(folder) == before


@pytest.mark.parametrize(
    ("name", "stops_at", "asked", "value"),
    [
        ("asleep", "checkout()", "receipt, boxes", "('receipt 43', ['box 43', 'box 43b'])"),
        ("plainly", "plainly()", "receipt", "'receipt 44'"),
        ("broken", "broken()", "receipt", "'receipt x'"),
        ("done", "checkout()", "len(boxes)", "2"),
    ],
)
def test_a_debugger_stops_in_the_body_with_recorded_results(
    runs: Runs, folder: Path, name: str, stops_at: str, asked: str, value: str
) -> None:
    before = effects(folder)
    said = debug(folder, runs[name], f"p {asked}", "q")
    assert said.returncode == 0, said.stderr
    assert f"){stops_at}\n-> " in said.stdout
    assert f"(Pdb) {value}\n" in said.stdout
    assert effects(folder) == before


def test_a_debugger_stops_where_code_and_log_differ(runs: Runs, folder: Path) -> None:
    helper = "async def first(order):\n    try:\n        return await pack(order)\n    finally:\n        "
    helper += "count('left')\n\n"
    change(folder, "@app.workflow\nasync def checkout", helper + "@app.workflow\nasync def checkout")
    change(folder, "await charge(order)\n    context", "await first(order)\n    context")
    before = effects(folder)
    said = debug(folder, runs["asleep"], "p open('effects').read().count('left')", "up", "p pause", "q")
    assert said.returncode == 1, said.stderr
    assert "needs a patch: the log has charge#1" in said.stdout
    assert ")first()\n-> return await pack(order)" in said.stdout
    assert "(Pdb) 1\n" in said.stdout, "only the replay without a debugger has left its body"
    assert ")checkout()\n-> receipt = await first(order)" in said.stdout
    assert "(Pdb) 3600.0\n" in said.stdout
    assert effects(folder) == f"{before}left\nleft\n"


def debug(folder: Path, id: str, *commands: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "holdfast.cli", "workflow", "replay", id, "--pdb"]
    typed = "\n".join([*commands, ""])
    return subprocess.run(
        words, cwd=folder, input=typed, capture_output=True, text=True, timeout=patient(60), check=False
    )


# --- show, why, wake, ps


def test_show_draws_a_time_line_that_fits_80_columns(
    runs: Runs, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = holdfast("show", runs["asleep"], *BY_URL).out
    assert "attributes  stage=charged\n" in shown
    lines = shown[shown.index("call          status") :].splitlines()
    drawn = lines[: next(number for number, line in enumerate(lines) if line.startswith("= step"))]
    assert max(map(len, drawn)) == 80
    assert [line.split()[0] for line in drawn[1:]] == ["charge#1", "pack#1", "pack#2", "wait#1"]
    assert drawn[0].endswith(" in all")
    assert set(drawn[1].split("|")[1].strip()) == {"="}  # where it begins depends on the time before its first step
    assert drawn[-1].endswith(">|")  # how many dots stand before it depends on the time since
    facts = holdfast("show", runs["asleep"], "--json").json["run"]
    assert facts["steps"] == {"completed": 3, "waiting": 1}
    assert (facts["waits_for"], facts["generation"]) == (["wait#1"], 0)
    assert facts["wake_at"] > facts["started_at"]
    assert holdfast("show", runs["task"], "--json").json["run"] is None
    assert "= step" not in holdfast("show", runs["task"]).out


def test_a_bar_stands_at_its_time() -> None:
    span = timeline.Span(100.0, 110.0)

    def bar(kind: str, status: str, began: float | None, ended: float | None) -> str:
        call = StepRecord(id="a#1", kind=kind, name="a", status=status, started_at=began, ended_at=ended)
        return timeline.bar(call, span, 10)

    assert bar("step", "completed", 100.0, 105.0) == "=====     "
    assert bar("wait", "completed", 105.0, 110.0) == "     ....."
    assert bar("child", "running", 108.0, None) == "        ->"
    assert bar("step", "failed", 102.0, 104.0) == "  =!      "
    assert bar("step", "completed", 110.0, 110.0) == "         ="
    assert bar("step", "completed", 103.0, 103.0) == "   =      "
    assert bar("step", "waiting", None, None) == " " * 10
    assert timeline.bar(StepRecord(id="a#1", kind="step", name="a", status="x"), timeline.Span(1.0, 1.0), 4) == "    "


def test_a_long_log_is_drawn_in_part_and_open_calls_always() -> None:
    calls = [
        StepRecord(id=f"a#{n}", kind="step", name="a", status="completed", started_at=1.0 * n) for n in range(1, 1001)
    ]
    calls[499] = msgspec.structs.replace(calls[499], status="running")
    drawn = [call.id for call in timeline.chosen(calls)]
    assert (drawn[0], drawn[9], drawn[10], drawn[11], drawn[-1]) == ("a#1", "a#10", "a#500", "a#971", "a#1000")
    assert all(len(row) == 5 for row in timeline.rows(calls, "default", timeline.Span(0.0, 1000.0), 80))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("asleep", ["It waits for wait#1: a sleep until 20", ", in 59m", "shop.py:", ", for "]),
        ("shipping", ["ship#1: attempt 2 at 20", ", in 59m", "after OSError: no truck", "; the first was "]),
        ("rendering", ["render#1: the step on the queue 'gpu', as ", "waiting, for ", "no runner is alive"]),
        ("waiting", ["invoice#1: the child ", "waiting, for ", "not due for another "]),
    ],
)
def test_why_names_what_is_waited_for_and_since_when(runs: Runs, holdfast: Command, name: str, says: list[str]) -> None:
    said = holdfast("why", runs[name], *BY_URL).out
    assert [part for part in says if part not in said] == []


def test_why_names_a_step_that_runs(folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "shop.py").write_text(SHOP)
    with running(folder, monkeypatch) as shop:
        run = shop.lengthy.submit()
        eventually(lambda: run.steps(), "its start is recorded")
        assert "It waits for slow#1: the step is running, attempt 1 (" in holdfast("why", run.id, *BY_URL).out
        shown = holdfast("show", run.id, *BY_URL).out
        assert shown[: shown.index("= step")].rstrip().endswith("=>|")
        run.cancel()


def test_wake_ends_a_sleep(runs: Runs, folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sleep" in holdfast("wake", "--help").out
    answer = holdfast("wake", runs["asleep"], *BY_URL)
    assert (answer.code, answer.out) == (0, f"{runs['asleep']} is back in the queue\n")
    with running(folder, monkeypatch) as shop:
        assert shop.app.invocation(runs["asleep"]).result(patient(30)) == "receipt 43, 2, receipt 43 invoice"
    refused = holdfast("wake", runs["waiting"], *BY_URL)
    assert (refused.code, "does not sleep" in refused.err) == (1, True)


def test_ps_lists_runs_alone_and_by_time(runs: Runs, holdfast: Command) -> None:
    def listed(*options: object) -> set[str]:
        return {each["id"] for each in holdfast("ps", *BY_URL, "--json", *options).json["invocations"]}

    every = listed()
    assert runs["task"] in every
    assert listed("--workflows") >= {id for name, id in runs.items() if name != "task"}
    assert runs["task"] not in listed("--workflows")
    assert listed("--workflows", "--task", "shop:shipping", "--status", "suspended") == {runs["shipping"]}
    assert listed("--workflows", "--attribute", "stage=charged", "--status", "suspended") == {runs["asleep"]}
    assert listed("--since", "1h") == listed("--until", "0s") == every
    assert listed("--since", "0s") == listed("--until", "1h") == set()
    page = holdfast("ps", *BY_URL, "--workflows", "--limit", "1")
    assert page.err.startswith("note: there may be more: --before ")
    assert holdfast("ps", "--since", "yesterday").code == 2


def test_a_run_that_does_not_fit_is_parked_and_says_how_to_look(
    runs: Runs, folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder, "    receipt = await charge(order)\n", "    receipt = await pack(order)\n")
    holdfast("wake", runs["asleep"], *BY_URL)
    with running(folder, monkeypatch) as shop:
        eventually(lambda: shop.app.invocation(runs["asleep"]).status is Status.PARKED, "it is parked")
    said = holdfast("why", runs["asleep"], *BY_URL).out
    assert f"To see where they differ: holdfast workflow replay {runs['asleep']} --pdb." in said
    with App(STORE) as app:
        assert found(app, runs["asleep"]).status is Status.PARKED
