"""holdfast world: a server that a parent process starts, its messages, and runs of TypeScript beside other runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.processes import hear_interrupts
from tests.support.patience import patient
from tests.world.serving import Client, serving

from holdfast import App

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.processes import Process

    from conftest import Command

TOKEN = "a-token-of-the-tests-0123456789"


@pytest.mark.slow
def test_a_child_says_where_it_is_and_ends_with_its_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{folder}/flows.db")
    monkeypatch.setenv("HOLDFAST_WORLD_TOKEN", TOKEN)
    child = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "world", "serve", "--child"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        client = Client(json.loads(child.stdout.readline())["url"], TOKEN)
        assert client.url.startswith("http://127.0.0.1:")
        run = client.run()
        assert client.call("runs.get", runId=run)["status"] == "pending"
        child.stdin.close()
        assert child.wait(patient(60)) == 0
        assert child.stdout.read() == b""
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
def test_a_server_stops_by_a_signal(shop: Path, start: Callable[..., Process]) -> None:
    server = start("world", "serve", "shop:app", "--port", "0")
    client = Client(server.says("the World is at ").split()[-1])
    assert client.call("submit", task="shop:add", args=[1], operationId="o")["id"]
    server.signal(signal.SIGTERM)
    answer = server.ends()
    assert answer.code == 0, answer.err


def test_messages_are_listed_shown_and_delivered_again(shop: Path, holdfast: Command) -> None:
    url = f"sqlite:///{shop}/shop.db"
    with App(url) as app, serving(app) as served:
        run = served.client.run()
        id = served.client.queue(run, delaySeconds=3600, idempotencyKey="k")
        assert id in holdfast("world", "messages", "--url", url).out
        listed = holdfast("world", "messages", "list", "--url", url)
        assert (listed.code, id in listed.out, "waiting" in listed.out, run in listed.out) == (0, True, True, True)
        (document,) = holdfast("world", "messages", "list", "--url", url, "--run", run, "--json").json["messages"]
        assert (document["id"], document["status"], document["attempt"]) == (id, "waiting", 1)
        shown = holdfast("world", "messages", "show", id, "--url", url)
        assert (shown.code, "1 of 48" in shown.out, f"{{'runId': '{run}'}}" in shown.out) == (0, True, True)
        whole = holdfast("world", "messages", "show", id, "--url", url, "--json").json
        assert (whole["content"], whole["key"]) == ({"runId": run}, "__wkf_workflow_checkout:k")
        again = holdfast("world", "messages", "redeliver", id, "--url", url, "--json").json["messages"]
        assert [each["id"] for each in again] == [id]
        assert again[0]["as"] != id
        ended = holdfast("world", "messages", "list", "--url", url, "--ended").out
        assert "cancelled" in ended
    for command in ("show", "redeliver"):
        missing = holdfast("world", "messages", command, "msg_" + "0" * 26, "--url", url)
        assert (missing.code, "has no message" in missing.err) == (4, True)


def test_runs_of_typescript_are_seen_beside_those_of_python(shop: Path, holdfast: Command) -> None:
    url = f"sqlite:///{shop}/shop.db"
    task = holdfast("submit", "add", "1", "--app", "shop:app").out.strip()
    with App(url) as app, serving(app) as served:
        run = served.client.run()
        id = run.removeprefix("wrun_").lower()
        served.client.create(run, "run_started")
        served.client.create(run, "step_created", "step_1", stepName="step//./shop.ts//charge", input=b"devl[[1],42]")
    by_kind = {kind: holdfast("ps", "--url", url, "--kind", kind).out for kind in ("task", "workflow", "world")}
    assert [kind for kind, said in by_kind.items() if id in said] == ["world"]
    assert [kind for kind, said in by_kind.items() if task in said] == ["task"]
    assert "charge" in holdfast("show", id, "--url", url).out
    assert "No server delivers" in holdfast("why", id, "--url", url).out
    assert "charge" in holdfast("show", run, "--url", url).out  # as Workflow DevKit writes it
    assert "No server delivers" in holdfast("why", run, "--url", url).out
    assert "charge" in holdfast("workflow", "steps", run, "--url", url).out
    assert "step_created" in holdfast("workflow", "events", id, "--url", url).out
    drawn = holdfast("show", run, "--url", url).out  # the id as TypeScript has it
    assert (id in drawn, "charge step_1" in drawn) == (True, True)
    assert "No server delivers" in holdfast("why", run, "--url", url).out
    assert holdfast("show", run[:-1], "--url", url).code == 0
    assert holdfast("cancel", id, "--reason", "too late", "--url", url).code == 0
    said = holdfast("why", id, "--url", url).out
    assert ("cancelled by the World: too late (by " in said, said.count("too late")) == (True, 1)
    assert holdfast("ps", "--url", url, "--status", "cancelled", "--json").json["invocations"][0]["id"] == id
    again = holdfast("rerun", id, "--url", url, "--json")
    assert again.code == 0, again.err


def test_an_open_address_needs_a_token(shop: Path, holdfast: Command) -> None:
    answer = holdfast("world", "serve", "shop:app", "--host", "0.0.0.0", "--port", "0")
    assert (answer.code, "world_token is empty" in answer.err) == (1, True)


def test_the_variables_of_workflow_devkit_are_shown(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKFLOW_MONGODB_URI", "mongodb://u:secret@127.0.0.1:1")
    monkeypatch.setenv("WORKFLOW_CONCURRENCY", "5")
    rows = {row["name"]: row for row in holdfast("config", "--json").json["settings"]}
    assert rows["url"]["value"] == "mongodb://u:***@127.0.0.1:1/workflow"
    assert rows["url"]["source"] == "environment WORKFLOW_MONGODB_URI"
    assert (rows["world_concurrency"]["value"], rows["world_concurrency"]["source"]) == (
        5,
        "environment WORKFLOW_CONCURRENCY",
    )


def test_a_missing_library_is_named(shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.world.serving", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    answer = holdfast("world", "serve", "shop:app")
    assert (answer.code, "pip install 'holdfast[monitor]'" in answer.err) == (1, True)
