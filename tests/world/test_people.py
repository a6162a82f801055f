"""World runs are seen, explained, cancelled and run again like other runs; triggers in Python follow their ends."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.patience import eventually, patient
from tests.world.application import Application, Delivered
from tests.world.serving import Served, serving

from holdfast import App, Status, on_status
from holdfast.errors import InvocationStatusTransitionError, StepNotFound, UsageError
from holdfast.ids import InvocationId
from holdfast.world import devl
from holdfast.world.errors import WorldError

CHARGE, MAIL = "step//./shop.ts//charge", "step//./shop.ts//mail"


@pytest.fixture
def served() -> Iterator[Served]:
    with App("memory://", name="shop", poll_interval_seconds=0.1) as app, serving(app) as served:
        yield served


def handle(served: Served, run: str) -> Any:
    return served.app.invocation(InvocationId(run.removeprefix("wrun_").lower()))


def a_run_with_everything(served: Served) -> str:
    client, run = served.client, served.client.run()
    client.create(run, "run_started")
    client.create(run, "step_created", "step_1", stepName=CHARGE, input=devl.dumps(["42", {"cents": 5}]))
    client.create(run, "step_started", "step_1")
    client.create(run, "step_completed", "step_1", result=devl.dumps({"receipt": "r"}))
    client.create(run, "step_created", "step_2", stepName=MAIL, input=b"encr....")
    client.create(run, "step_started", "step_2")
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    failure = devl.dumps({"name": "TypeError", "message": "no mail"})
    client.create(run, "step_retrying", "step_2", error=failure, retryAfter=later)
    client.create(run, "wait_created", "wait_1", resumeAt=later)
    client.create(run, "hook_created", "hook_1", token="approve:42", metadata=devl.dumps(None))
    client.call("streams.write", runId=run, name="out", chunks=[b"a"], operationId=run)
    return run


def test_its_steps_waits_hooks_events_and_streams_are_shown(served: Served) -> None:
    run = a_run_with_everything(served)
    seen = handle(served, run)
    charge, mail = seen.steps()
    assert (charge.name, charge.status, charge.attempt) == ("charge", "completed", 1)
    assert (charge.arguments, charge.result) == ((("42", {"cents": 5}), {}), {"receipt": "r"})
    assert (mail.name, mail.status, str(mail.error)) == ("mail", "retrying", "TypeError: no mail")
    assert "it is encrypted" in mail.arguments[0][0]
    assert seen.step("step_1") == charge
    with pytest.raises(StepNotFound):
        seen.step("step_9")
    events = seen.events()
    assert [event.type for event in events][:3] == ["run_created", "run_started", "step_created"]
    assert (events[2].name, events[2].value) == ("charge", {"args": ["42", {"cents": 5}], "kwargs": {}})
    assert seen.events(after=events[2].cursor, limit=2) == events[3:5]
    assert [event.type for event in seen.events(correlation="wait_1")] == ["wait_created"]
    assert [stream.name for stream in seen.streams()] == ["out"]
    assert seen.record().task == "world:checkout"


def test_why_names_the_delivery_the_sleep_and_the_hook(served: Served) -> None:
    run = a_run_with_everything(served)
    served.client.queue(run, baseUrl="http://127.0.0.1:9", delaySeconds=3600)
    said = handle(served, run).explain()
    for part in ("It waits for a delivery, attempt 1 of 48, due in 1h", "It sleeps (wait_1) until"):
        assert part in said
    assert "It waits for a payload for the hook approve:42 (hook_1)." in said
    assert "The step mail waits for attempt 2" in said
    assert "no server" not in said.lower()


def test_why_names_what_a_run_waits_for_before_a_missing_message(served: Served) -> None:
    said = handle(served, a_run_with_everything(served)).explain()
    assert 0 <= said.index("It waits for a payload") < said.index("No message is on its way to it")


def test_why_tells_a_failing_application_from_a_missing_server() -> None:
    with App("memory://", name="shop") as app, Application(lambda delivered: (502, b"")) as application:
        with serving(app) as served:
            run = served.client.run()
            served.client.queue(run, baseUrl=application.url)
            eventually(lambda: "the last answer was HTTP 502" in handle(served, run).explain())
            assert f"a delivery to {application.url}, attempt 2 of 48" in handle(served, run).explain()
            served.stop()
        assert "No server delivers: start one with `holdfast world serve`." in handle(served, run).explain()


def test_a_delivery_under_way_is_named() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def answer(delivered: Delivered) -> tuple[int, bytes]:
        begun.set()
        goes_on.wait(patient(30))
        return 200, b""

    with App("memory://", name="shop") as app, Application(answer) as application, serving(app) as served:
        run = served.client.run()
        served.client.queue(run, baseUrl=application.url)
        assert begun.wait(patient(30))
        assert "is under way" in handle(served, run).explain()
        goes_on.set()


def test_a_cancel_is_an_event_and_ends_the_run(served: Served) -> None:
    run = a_run_with_everything(served)
    assert handle(served, run).cancel("too late", by="ann") is Status.CANCELLED
    assert handle(served, run).cancel() is Status.CANCELLED
    events = served.client.call("events.list", runId=run)["data"]
    assert [event["eventType"] for event in events].count("run_cancelled") == 1
    assert events[-1]["eventData"]["cancelReason"] == "too late (by ann)"
    assert served.client.call("runs.get", runId=run)["status"] == "cancelled"
    with pytest.raises(WorldError) as refused:
        served.client.call("hooks.getByToken", token="approve:42")
    assert refused.value.status == 404
    completed = served.client.run()
    served.client.create(completed, "run_started")
    served.client.create(completed, "run_completed", output=devl.dumps(1))
    assert handle(served, completed).cancel() is Status.SUCCESS


def test_a_rerun_is_a_new_run_with_the_same_input_and_a_message() -> None:
    with App("memory://", name="shop") as app, Application() as application, serving(app) as served:
        served.client.call("start", baseUrl=application.url)
        run = served.client.run()
        served.client.create(run, "run_started")
        served.client.create(run, "run_failed", error=devl.dumps({"message": "oh"}), errorCode="USER_ERROR")
        with pytest.raises(InvocationStatusTransitionError):
            handle(served, served.client.run()).rerun()
        again = handle(served, run).rerun(request="once")
        assert handle(served, run).rerun(request="once").id == again.id
        fresh = served.client.call("runs.get", runId=f"wrun_{again.id.upper()}")
        old = served.client.call("runs.get", runId=run)
        assert (fresh["status"], fresh["input"], fresh["workflowName"]) == (
            "pending",
            old["input"],
            old["workflowName"],
        )
        assert fresh["attributes"]["$rerunOf"] == run
        eventually(lambda: application.got)
        assert application.got[0].message == {"runId": fresh["runId"]}


def test_a_sleeping_run_is_woken() -> None:
    with App("memory://", name="shop") as app, Application() as application, serving(app) as served:
        served.client.call("start", baseUrl=application.url)
        run = a_run_with_everything(served)
        handle(served, run).wake()
        assert served.client.call("events.list", runId=run)["data"][-1]["eventType"] == "wait_completed"
        eventually(lambda: application.got)
        with pytest.raises(InvocationStatusTransitionError, match="does not sleep"):
            handle(served, run).wake()


def test_a_python_task_follows_the_end_of_a_world_run(served: Served) -> None:
    called = threading.Event()

    @served.app.task(name="report", triggers=[on_status("world:checkout", "failed")])
    def report() -> None:
        called.set()

    with served.app.runner(concurrency=1):
        run = served.client.run()
        served.client.create(run, "run_started")
        served.client.create(run, "run_failed", error=devl.dumps({"message": "oh"}), errorCode="USER_ERROR")
        assert called.wait(patient(30))
    assert handle(served, run).status is Status.FAILED


def test_archive_has_ended_runs(served: Served) -> None:
    run = served.client.run()
    served.client.create(run, "run_cancelled")
    (found,) = served.app.archive(task="world:checkout", status="cancelled")
    assert f"wrun_{found.id.upper()}" == run


def test_it_is_not_forked(served: Served) -> None:
    run = handle(served, a_run_with_everything(served))
    with pytest.raises(UsageError, match="is a run of a World"):
        run.fork("step_1")
