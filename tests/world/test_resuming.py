"""Hooks of World runs that Python resumes, as it does its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import App
from holdfast.errors import HookNotFound, PayloadDoesNotFit, UsageError
from holdfast.world import devl
from holdfast.world.queue import Messages, as_message
from holdfast.world.storage import WorldStorage


class Approval(msgspec.Struct):
    ok: bool
    at: datetime


class Waiting:
    """An app with a World run that waits for a hook."""

    def __init__(self, app: App, spec: int = 5) -> None:
        self.app = app
        data = {"deploymentId": "d", "workflowName": "workflow//./shop//buy", "input": b"1"}
        self.run = self.create(None, "run_created", spec=spec, eventData=data)["run"]["runId"]
        if spec > 1:
            self.create(self.run, "run_started")
            self.create(self.run, "hook_created", correlationId="hook_1", eventData={"token": "approve:42"})

    def create(self, run: str | None, kind: str, spec: int = 5, **more: Any) -> Any:
        async def do() -> Any:
            storage = (await self.app.runtime.engine()).part(WorldStorage)
            return await storage.events_create(run_id=run, event={"eventType": kind, "specVersion": spec, **more})

        return self.app.runtime.run(do())

    def events(self) -> list[dict[str, Any]]:
        async def do() -> list[dict[str, Any]]:
            storage = (await self.app.runtime.engine()).part(WorldStorage)
            found: list[dict[str, Any]] = (await storage.events_list(run_id=self.run))["data"]
            return found

        return self.app.runtime.run(do())

    def messages(self) -> list[Any]:
        async def do() -> list[Any]:
            messages = (await self.app.runtime.engine()).part(Messages)
            return [as_message(record) for record in await messages.find(run=self.run)]

        return self.app.runtime.run(do())


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App(f"sqlite:///{tmp_path / 'store.db'}", name="shop") as app:
        yield app


def test_a_payload_from_python_is_written_and_wakes_the_run(app: App) -> None:
    waiting = Waiting(app)
    at = datetime(2030, 1, 1, tzinfo=UTC)
    invocation = app.resume_hook("approve:42", Approval(True, at), resume_id="r1")
    assert f"wrun_{invocation.id.upper()}" == waiting.run
    received = waiting.events()[-1]
    assert (received["eventType"], received["correlationId"], received["resumeId"]) == ("hook_received", "hook_1", "r1")
    assert devl.loads(received["eventData"]["payload"]) == {"ok": True, "at": at}
    (message,) = waiting.messages()
    assert (message.run, message.queue) == (waiting.run, "__wkf_workflow_workflow//./shop//buy")


def test_a_payload_that_is_sent_again_is_one(app: App) -> None:
    waiting = Waiting(app)
    for _ in range(2):
        app.resume_hook("approve:42", {"ok": True}, resume_id="r1")
    app.resume_hook("approve:42", {"ok": False})
    assert [event["eventType"] for event in waiting.events()].count("hook_received") == 2
    assert len(waiting.messages()) == 2


def test_hooks_that_take_nothing_more(app: App) -> None:
    waiting = Waiting(app)
    assert app.hook("approve:42").task == "world:buy"
    with pytest.raises((PayloadDoesNotFit, UsageError)):
        app.resume_hook("approve:42", object())
    waiting.create(waiting.run, "hook_disposed", correlationId="hook_1")
    with pytest.raises(HookNotFound):
        app.resume_hook("approve:42", 1)
    waiting.create(waiting.run, "hook_created", correlationId="hook_2", eventData={"token": "approve:43"})
    waiting.create(waiting.run, "run_completed", eventData={"output": b"1"})
    with pytest.raises(HookNotFound):
        app.resume_hook("approve:43", 1)
    assert waiting.messages() == []


def test_one_space_of_tokens_for_python_and_typescript(app: App) -> None:
    Waiting(app)

    async def conflict() -> Any:
        waiting = await app.runtime.engine()
        storage = waiting.part(WorldStorage)
        run = (
            await storage.events_create(
                run_id=None,
                event={
                    "eventType": "run_created",
                    "specVersion": 5,
                    "eventData": {"deploymentId": "d", "workflowName": "w", "input": b"1"},
                },
            )
        )["run"]["runId"]
        return await storage.events_create(
            run_id=run,
            event={
                "eventType": "hook_created",
                "specVersion": 5,
                "correlationId": "hook_1",
                "eventData": {"token": "approve:42"},
            },
        )

    assert app.runtime.run(conflict())["event"]["eventType"] == "hook_conflict"
    assert [hook.token for hook in app.hooks()] == ["approve:42"]
