"""Runs of a World beside others: pages and routes about them, their messages and the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.cli.roster import enrol
from tests.web.shop import HOSTILE, TOKEN
from tests.web.stepping import Steps

from holdfast import App
from holdfast.ids import derived_id
from holdfast.web import web_app
from holdfast.web.reading.diagnosis import DiagnosisReading
from holdfast.world.queue import Messages
from holdfast.world.records import run_name
from holdfast.world.storage import WorldStorage

QUEUE = "__wkf_workflow_checkout"


class World:
    """An app with runs of a World, without a server that delivers."""

    def __init__(self, url: str = "memory://") -> None:
        self.app = App(url, name="shop", api_token=TOKEN)
        self._made = 0

    def run(self, name: str = "step//./shop.ts//checkout") -> str:
        self._made += 1

        async def made() -> str:
            engine = await self.app.runtime.aready()
            id = run_name(derived_id("test", str(self._made), at=engine.store.now()))
            data = {"deploymentId": "dpl", "workflowName": name, "input": b"devl[[]]"}
            event = {"eventType": "run_created", "specVersion": 5, "eventData": data}
            await self.app.runtime.arun(engine.part(WorldStorage).events_create(run_id=id, event=event))
            return id

        return self.app.runtime.run(made())

    def message(self, run: str, **more: Any) -> str:
        self._made += 1

        async def sent() -> str:
            messages = (await self.app.runtime.engine()).part(Messages)
            content = {"runId": run, **more}
            sent = await messages.send(queue_name=QUEUE, message=content, operation_id=f"{self._made}")
            return str(sent["messageId"])

        return self.app.runtime.run(sent())


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with world.app:
        yield world


@pytest.fixture
def client(world: World) -> Iterator[TestClient]:
    with TestClient(web_app(world.app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


def test_a_store_without_a_world_says_so(client: TestClient) -> None:
    assert "This store has no World" in client.get("/world").text
    assert client.get("/api/v1/world/runs").json() == {"runs": [], "before": None}
    assert client.get("/api/v1/world/messages").json() == {"messages": [], "before": None}
    assert client.get("/api/v1/world/servers").json() == {"servers": []}


def test_runs_and_messages_are_listed_in_pages(world: World, client: TestClient) -> None:
    runs = [world.run() for _ in range(3)]
    messages = [world.message(runs[0], text=HOSTILE) for _ in range(3)]
    for path, name, wanted in (
        ("runs", "run", set(runs)),
        ("messages", "id", set(messages)),
        (f"messages?run={runs[0]}", "id", set(messages)),
        (f"messages?run={runs[1]}", "id", set()),
    ):
        found: list[str] = []
        before = None
        while True:
            sign = "&" if "?" in path else "?"
            page = client.get(f"/api/v1/world/{path}{sign}limit=2{(before and f'&before={before}') or ''}").json()
            found += [each[name] for each in page[path.partition("?")[0]]]
            before = page["before"]
            if before is None:
                break
        assert (set(found), len(found)) == (wanted, len(wanted)), path
    assert [each["workflow"] for each in client.get("/api/v1/world/runs").json()["runs"]] == ["checkout"] * 3
    shown = client.get("/world").text
    assert "no server delivers" in shown
    assert all(each in shown for each in [*runs, *messages])
    assert "No run of this status" in client.get("/world?status=failed").text
    assert client.get("/world?status=lost").status_code == 400
    assert client.get("/api/v1/world/runs?status=lost").json()["path"] == "query.status"


def test_a_message_is_shown_and_delivered_again(world: World, client: TestClient) -> None:
    id = world.message(world.run(), text=HOSTILE)
    one = client.get(f"/api/v1/world/messages/{id}").json()
    assert (one["id"], one["status"], one["attempt"], one["content"]["text"]) == (id, "waiting", 1, HOSTILE)
    shown = client.get(f"/world/messages/{id}").text
    assert "&lt;script&gt;" in shown
    assert "<script>alert" not in shown
    path = f"/api/v1/world/messages/{id}/redeliver"
    assert "its attempts count from 1" in client.post(path, json={"preview": True}).json()["summary"]
    assert client.get(f"/api/v1/world/messages/{id}").json()["status"] == "waiting"
    again = client.post(path, json={"request": "r-1", "reason": "it was lost"}).json()["id"]
    assert again != id
    assert client.post(path, json={"request": "r-1"}).json()["id"] == again
    assert client.get(f"/api/v1/world/messages/{id}").json()["status"] == "cancelled"
    assert [each["id"] for each in client.get("/api/v1/world/messages").json()["messages"]] == [again]
    assert {each["id"] for each in client.get("/api/v1/world/messages?ended=yes").json()["messages"]} == {id, again}


@pytest.mark.parametrize("id", ["msg_" + "0" * 26, "msg_", "x", "%00", "msg_" + "é" * 26])
def test_a_message_that_is_not_there_is_not_found(client: TestClient, id: str) -> None:
    assert client.get(f"/world/messages/{id}").status_code == 404
    assert client.get(f"/api/v1/world/messages/{id}").status_code == 404
    assert client.post(f"/api/v1/world/messages/{id}/redeliver", json={}).status_code == 404


def test_the_page_does_not_pay_for_what_is_stored(tmp_path: Path) -> None:
    world = World(f"sqlite:///{tmp_path}/shop.db")
    with world.app, TestClient(web_app(world.app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        steps = Steps(world.app)

        def fill(count: int) -> None:
            for _ in range(count):
                world.message(world.run())

        fill(60)
        few = steps.of(lambda: client.get("/world"))
        fill(240)
        assert steps.of(lambda: client.get("/world")) < few * 1.1 + 500


def test_runs_that_wait_for_a_server_are_no_work_without_a_runner(world: World, client: TestClient) -> None:
    world.message(world.run())
    enrol(world.app, "r1", heartbeat_at=time.time(), queues=("default",))
    assert "which no runner serves" not in client.get("/api/v1/health").json()["sentence"]
    assert '<span class="status is-bad">no runner</span>' not in client.get("/queues").text
    found = DiagnosisReading(world.app.runtime, None).diagnose()
    assert not [each for each in found.symptoms if each.subject.startswith("lane")]
