"""Every guard of the contract, and the table of errors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.world.worlds import World

from holdfast.testing.clock import FakeClock
from holdfast.world import errors
from holdfast.world.errors import WorldError

CONFLICT, EXPIRED = "EntityConflictError", "RunExpiredError"
NO_RUN, NO_STEP, NO_HOOK = "WorkflowRunNotFoundError", "StepNotFoundError", "HookNotFoundError"
ENDS: dict[str, dict[str, Any]] = {
    "run_completed": {"output": b"1"},
    "run_failed": {"error": b"1"},
    "run_cancelled": {},
}
CREATION = {"deploymentId": "d", "workflowName": "w", "input": b"1"}


def end(world: World, run: str, kind: str = "run_completed") -> Any:
    return world.create(run, kind, data=ENDS[kind])


def at(world: World, seconds: float) -> datetime:
    return datetime.fromtimestamp(world.clock.now() + seconds, UTC)


@pytest.fixture
def started(quick: World) -> str:
    return quick.run(started=True)


# --- the table


def test_the_table_of_errors_is_that_of_the_protocol() -> None:
    documented = {
        ("WorkflowWorldError", 400): errors.bad_request("x"),
        ("WorkflowRunNotFoundError", 404): errors.run_not_found("x"),
        ("StepNotFoundError", 404): errors.step_not_found("x", "y"),
        ("HookNotFoundError", 404): errors.hook_not_found("x"),
        ("EventNotFoundError", 404): errors.event_not_found("x"),
        ("EntityConflictError", 409): errors.conflict("x"),
        ("RunExpiredError", 410): errors.expired("x"),
        ("PreconditionFailedError", 412): WorldError(errors.PRECONDITION, 412, "x"),
        ("PayloadTooLargeError", 413): errors.too_large("x"),
        ("AttributeValidationError", 400): errors.attribute_error("x"),
        ("RunNotSupportedError", 409): errors.not_supported(9, 7),
        ("TooEarlyError", 425): errors.too_early("x", 2.0),
        ("ThrottleError", 429): WorldError(errors.THROTTLE, 429, "x", 1.0),
        ("Unauthorized", 401): WorldError(errors.UNAUTHORIZED, 401, "x"),
    }
    assert {(error.name, error.status) for error in documented.values()} == set(documented)
    assert {name for name, _ in documented} == set(errors.STATUSES)
    timed = {status for (_, status), error in documented.items() if error.retry_after is not None}
    assert timed == {425, 429}


# --- runs


def test_run_created_twice_is_a_conflict(quick: World) -> None:
    run = quick.run(started=True)
    quick.step(run)
    quick.refused(CONFLICT, 409, run, "run_created", data=CREATION)
    assert quick.get(run)["status"] == "running"


def test_run_created_without_an_id_makes_one(quick: World) -> None:
    run = quick.create(None, "run_created", data=CREATION)["run"]["runId"]
    assert quick.get(run)["status"] == "pending"


@pytest.mark.parametrize("seconds", [-86_400 - 60, 300 + 60])
def test_the_time_in_the_id_of_a_new_run_is_checked(quick: World, seconds: float) -> None:
    assert isinstance(quick.clock, FakeClock)
    run = quick.new_id()
    quick.clock.set(quick.clock.now() - seconds)
    for kind in ("run_created", "run_started"):
        with pytest.raises(WorldError, match="its time is") as caught:
            quick.create(run, kind, data=CREATION)
        assert caught.value.status == 400
    assert quick.call("runs_list")["data"] == []


def test_an_old_run_exists_for_a_server_that_has_not_read_its_log(quick: World) -> None:
    assert isinstance(quick.clock, FakeClock)
    run = quick.new_id()
    made = quick.run(id=run, operation="make")
    quick.clock.advance(2 * 86_400)
    quick.refused(CONFLICT, 409, run, "run_created", data=CREATION)
    other = quick.other()
    with pytest.raises(WorldError, match="exists already") as caught:
        other.create(run, "run_created", data=CREATION)
    assert (caught.value.name, caught.value.status) == (CONFLICT, 409)
    assert quick.other().create(run, "run_created", data=CREATION, operation="make")["run"]["runId"] == made
    assert other.kinds(run) == ["run_created"]


@pytest.mark.parametrize("run", ["", "wrun_", "wrun_x", "wrun_client_provided_id", "wrun_8" + "0" * 25, 7])
def test_the_id_of_a_new_run_has_to_be_a_ulid(quick: World, run: object) -> None:
    with pytest.raises(WorldError) as caught:
        quick.create(run, "run_created", data=CREATION)  # type: ignore[arg-type]
    assert (caught.value.name, caught.value.status) == ("WorkflowWorldError", 400)


def test_run_started_on_a_running_run_writes_nothing(quick: World, started: str) -> None:
    answer = quick.create(started, "run_started")
    assert answer["run"]["status"] == "running"
    assert "event" not in answer
    assert quick.kinds(started) == ["run_created", "run_started"]


def test_run_started_creates_a_run_from_its_input(quick: World) -> None:
    run = quick.new_id()
    answer = quick.create(run, "run_started", data={**CREATION, "attributes": {"a": "1"}})
    assert (answer["run"]["status"], answer["run"]["input"], answer["run"]["attributes"]) == (
        "running",
        b"1",
        {"a": "1"},
    )
    assert quick.kinds(run) == ["run_created", "run_started"]
    assert quick.events(run)[1].get("eventData") is None
    quick.refused(CONFLICT, 409, run, "run_created", data=CREATION)


def test_run_started_of_a_missing_run_without_input(quick: World) -> None:
    quick.refused(NO_RUN, 404, quick.new_id(), "run_started")


@pytest.mark.parametrize("kind", ENDS)
def test_run_started_on_an_ended_run_is_expired(quick: World, started: str, kind: str) -> None:
    end(quick, started, kind)
    quick.refused(EXPIRED, 410, started, "run_started")
    quick.refused(EXPIRED, 410, started, "run_started", data=CREATION)


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", ENDS)
def test_a_run_ends_once(quick: World, started: str, first: str, second: str) -> None:
    status = end(quick, started, first)["run"]["status"]
    if first == second == "run_cancelled":
        again = end(quick, started, second)
        assert (again["run"]["status"], again["event"]["eventType"]) == ("cancelled", "run_cancelled")
        assert quick.kinds(started).count("run_cancelled") == 1
    else:
        quick.refused(CONFLICT, 409, started, second, data=ENDS[second])
    assert quick.get(started)["status"] == status


def test_an_end_of_a_run_that_was_never_started(quick: World) -> None:
    run = quick.run()
    assert end(quick, run, "run_failed")["run"]["status"] == "failed"


def test_the_started_time_is_that_of_the_first_start(quick: World, started: str) -> None:
    assert isinstance(quick.clock, FakeClock)
    before = quick.get(started)["startedAt"]
    quick.clock.advance(60)
    quick.create(started, "run_started")
    assert quick.get(started)["startedAt"] == before


# --- steps


def test_step_created_twice_is_a_conflict(quick: World, started: str) -> None:
    quick.step(started)
    quick.refused(CONFLICT, 409, started, "step_created", "step_1", data={"stepName": "s", "input": b"1"})
    quick.refused(CONFLICT, 409, started, "step_started", "step_1", data={"stepName": "s", "input": b"1"})


def test_step_created_on_an_ended_run_is_a_conflict(quick: World, started: str) -> None:
    end(quick, started)
    quick.refused(CONFLICT, 409, started, "step_created", "step_1", data={"stepName": "s", "input": b"1"})
    quick.refused(CONFLICT, 409, started, "step_started", "step_1", data={"stepName": "s", "input": b"1"})


@pytest.mark.parametrize("kind", ["step_started", "step_completed", "step_failed", "step_retrying"])
def test_events_of_a_missing_step(quick: World, started: str, kind: str) -> None:
    quick.refused(NO_STEP, 404, started, kind, "step_1", data={})
    quick.refused(NO_RUN, 404, quick.new_id(), kind, "step_1", data={})


def test_step_started_counts_attempts_and_keeps_its_first_start(quick: World, started: str) -> None:
    assert isinstance(quick.clock, FakeClock)
    first = quick.step(started, started=True)
    quick.clock.advance(5)
    again = quick.create(started, "step_started", "step_1")["step"]
    assert (first["attempt"], again["attempt"], again["startedAt"]) == (1, 2, first["startedAt"])


@pytest.mark.parametrize("last", ["step_completed", "step_failed"])
@pytest.mark.parametrize("kind", ["step_started", "step_completed", "step_failed", "step_retrying"])
def test_an_ended_step_stays_ended(quick: World, started: str, last: str, kind: str) -> None:
    quick.step(started, started=True)
    quick.create(started, last, "step_1", data={"result": b"1", "error": b"1"})
    quick.refused(CONFLICT, 409, started, kind, "step_1", data={})


def test_step_retrying_keeps_the_error_and_bars_an_early_start(quick: World, started: str) -> None:
    assert isinstance(quick.clock, FakeClock)
    quick.step(started, started=True)
    retry = {"error": b"oops", "retryAfter": at(quick, 10)}
    step = quick.create(started, "step_retrying", "step_1", data=retry)["step"]
    assert (step["status"], step["error"], step["retryAfter"]) == ("pending", b"oops", at(quick, 10))
    quick.clock.advance(7.5)
    assert quick.refused("TooEarlyError", 425, started, "step_started", "step_1").retry_after == 3.0
    quick.clock.advance(2.5)
    step = quick.create(started, "step_started", "step_1")["step"]
    assert (step["attempt"], "retryAfter" in step) == (2, False)


def test_a_running_step_may_end_on_an_ended_run_and_no_other(quick: World, started: str) -> None:
    quick.step(started, "step_1", started=True)
    quick.step(started, "step_2")
    end(quick, started)
    for kind in ("step_started", "step_completed", "step_failed", "step_retrying"):
        quick.refused(EXPIRED, 410, started, kind, "step_2", data={})
    done = quick.create(started, "step_completed", "step_1", data={"result": b"1"})
    assert done["step"]["status"] == "completed"
    assert quick.get(started)["status"] == "completed"


# --- hooks


def test_hook_created_twice_is_a_conflict(quick: World, started: str) -> None:
    quick.hook(started, "hook_1", "a")
    quick.refused(CONFLICT, 409, started, "hook_created", "hook_1", data={"token": "b"})
    assert quick.hook(quick.run(), "hook_9", "b")["hook"]["token"] == "b"  # its claim was released


def test_the_token_of_another_hook_is_stored_as_a_conflict(quick: World, started: str) -> None:
    quick.hook(started, "hook_1", "order:42")
    other = quick.run(started=True)
    for run in (other, started):
        answer = quick.hook(run, "hook_2", "order:42")
        assert answer["event"]["eventType"] == "hook_conflict"
        assert answer["event"]["eventData"] == {"token": "order:42", "conflictingRunId": started}
        assert "hook" not in answer
    assert quick.call("hooks_get_by_token", token="order:42")["runId"] == started
    quick.refused(NO_HOOK, 404, other, "hook_received", "hook_2", data={"payload": b"1"})


def test_hook_created_on_an_ended_run_is_a_conflict(quick: World, started: str) -> None:
    end(quick, started)
    quick.refused(CONFLICT, 409, started, "hook_created", "hook_1", data={"token": "a"})
    assert quick.hook(quick.run(), "hook_1", "a")["hook"]["token"] == "a"


@pytest.mark.parametrize("kind", ["hook_received", "hook_disposed"])
def test_events_of_a_missing_hook(quick: World, started: str, kind: str) -> None:
    quick.refused(NO_HOOK, 404, started, kind, "hook_1", data={})
    quick.hook(started, "hook_2", "b")
    end(quick, started)
    quick.refused(NO_HOOK, 404, started, kind, "hook_2", data={})


def test_a_hook_that_was_disposed_of(quick: World, started: str) -> None:
    quick.hook(started, "hook_1", "a")
    quick.create(started, "hook_received", "hook_1", data={"payload": b"1"})
    quick.create(started, "hook_disposed", "hook_1")
    quick.refused(CONFLICT, 409, started, "hook_disposed", "hook_1")
    quick.refused(NO_HOOK, 404, started, "hook_received", "hook_1", data={"payload": b"2"})
    for field in ({"token": "a"}, {"hook_id": "hook_1"}):
        with pytest.raises(WorldError) as caught:
            quick.call("hooks_get_by_token" if "token" in field else "hooks_get", **field)
        assert (caught.value.name, caught.value.status) == (NO_HOOK, 404)
    assert quick.hook(started, "hook_2", "a")["hook"]["token"] == "a"


def test_a_resume_that_is_sent_twice_is_one(quick: World, started: str) -> None:
    quick.hook(started, "hook_1", "a")
    given = {"data": {"payload": b"1"}, "params": {"resumeId": "r1"}}
    first = quick.create(started, "hook_received", "hook_1", **given)
    again = quick.create(started, "hook_received", "hook_1", **given)
    assert again["event"] == first["event"]
    assert first["event"]["resumeId"] == "r1"
    assert quick.kinds(started).count("hook_received") == 1


# --- waits


def test_waits_are_created_and_completed_once(quick: World, started: str) -> None:
    due = {"resumeAt": at(quick, 60)}
    assert quick.create(started, "wait_created", "wait_1", data=due)["wait"]["status"] == "waiting"
    quick.refused(CONFLICT, 409, started, "wait_created", "wait_1", data=due)
    assert quick.create(started, "wait_completed", "wait_1")["wait"]["status"] == "completed"
    quick.refused(CONFLICT, 409, started, "wait_completed", "wait_1")
    quick.refused("EventNotFoundError", 404, started, "wait_completed", "wait_2")
    quick.create(started, "wait_created", "wait_3", data=due)
    end(quick, started)
    quick.refused(CONFLICT, 409, started, "wait_created", "wait_4", data=due)
    quick.refused(CONFLICT, 409, started, "wait_completed", "wait_3")


# --- attributes


def changes(**values: object) -> dict[str, Any]:
    return {"changes": [{"key": key, "value": value} for key, value in values.items()], "writer": {"type": "workflow"}}


@pytest.mark.parametrize(
    "data",
    [
        changes(**{f"k{number}": "v" for number in range(65)}),
        changes(**{"k" * 257: "v"}),
        changes(k="v" * 257),
        changes(k="é" * 129),
        changes(**{"$root": "v"}),
        changes(k=7),
        {"changes": [{"key": "a", "value": "1"}, {"key": "a", "value": "2"}]},
        {"changes": [{"key": "", "value": "1"}]},
    ],
)
def test_attributes_that_are_refused_for_good(quick: World, started: str, data: dict[str, Any]) -> None:
    quick.refused("AttributeValidationError", 400, started, "attr_set", data=data)


def test_64_attributes_are_allowed_and_reserved_ones_for_frameworks(quick: World, started: str) -> None:
    quick.create(started, "attr_set", data=changes(**{f"k{number}": "v" for number in range(63)}))
    data = {**changes(**{"$root": "v"}), "allowReservedAttributes": True}
    assert len(quick.create(started, "attr_set", data=data)["run"]["attributes"]) == 64
    quick.refused("AttributeValidationError", 400, started, "attr_set", data=changes(more="v"))
    quick.create(started, "attr_set", "attr_1", data=changes(k0="x"))
    quick.refused(CONFLICT, 409, started, "attr_set", "attr_1", data=changes(k0="x"))
    end(quick, started)
    quick.refused(CONFLICT, 409, started, "attr_set", data=changes(k0="y"))


def test_an_attribute_of_a_new_run_is_a_text(quick: World) -> None:
    with pytest.raises(WorldError) as caught:
        quick.run(data={"attributes": {"a": None}})
    assert caught.value.name == "AttributeValidationError"


def test_attributes_of_a_new_run_are_checked(quick: World) -> None:
    data = {**CREATION, "attributes": {"$root": "v"}}
    run = quick.new_id()
    for kind in ("run_created", "run_started"):
        with pytest.raises(WorldError, match="reserved"):
            quick.create(run, kind, data=data)
    assert quick.create(run, "run_created", data={**data, "allowReservedAttributes": True})["run"]["attributes"] == {
        "$root": "v"
    }


# --- requests that are none


@pytest.mark.parametrize("kind", ["hook_conflict", "noop", "run_paused", "", None, 7])
def test_events_that_cannot_be_created(quick: World, started: str, kind: Any) -> None:
    quick.refused("WorkflowWorldError", 400, started, kind, "x", data={})


@pytest.mark.parametrize("kind", ["run_started", "run_completed", "step_started"])
def test_a_run_id_is_required(quick: World, kind: str) -> None:
    with pytest.raises(WorldError, match="runId is required") as caught:
        quick.create(None, kind, "step_1", data={})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "kind", ["step_created", "step_started", "step_completed", "hook_created", "hook_received", "wait_created"]
)
def test_a_correlation_id_is_required(quick: World, started: str, kind: str) -> None:
    assert "correlationId" in quick.refused("WorkflowWorldError", 400, started, kind, data={}).message


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("step_created", {}),
        ("step_created", {"stepName": 7}),
        ("step_created", "text"),
        ("hook_created", {"token": ""}),
        ("hook_created", {"token": "t" * 2049}),
        ("hook_created", {"token": "a", "isWebhook": "yes"}),
        ("wait_created", {}),
        ("wait_created", {"resumeAt": "tomorrow"}),
        ("wait_created", {"resumeAt": datetime.max}),
        ("run_cancelled", {"cancelReason": "x" * 513}),
        ("attr_set", {"changes": "all"}),
        ("attr_set", {"changes": [7]}),
        ("attr_set", {}),
        ("run_failed", {"error": b"1", "errorCode": 7}),
        ("step_completed", {"result": object()}),
        ("step_started", {"stepName": "\ud800"}),
        ("step_started", {"input": b"1"}),
    ],
)
def test_fields_of_a_wrong_type(quick: World, started: str, kind: str, data: Any) -> None:
    quick.refused("WorkflowWorldError", 400, started, kind, "call_1", data=data)


@pytest.mark.parametrize("params", [{"sinceCursor": "x"}, {"sinceCursor": 3}, {"eventCount": "3"}, {"eventCount": -1}])
def test_a_wrong_place_in_the_log_is_refused_before_anything_is_written(
    quick: World, started: str, params: dict[str, Any]
) -> None:
    quick.refused("WorkflowWorldError", 400, started, "step_created", "step_1", data={"stepName": "s"}, params=params)


def test_facts_that_are_too_large(quick: World, started: str) -> None:
    data = {"stepName": "s", "input": b"1", "note": "x" * 300_000}
    quick.refused("PayloadTooLargeError", 413, started, "step_created", "step_1", data=data)


def test_pagination_that_is_none(quick: World, started: str) -> None:
    for pagination in ({"limit": 0}, {"limit": "1"}, {"sortOrder": "up"}, {"cursor": 7}, {"cursor": "x"}, "all"):
        for method in ("events_list", "steps_list", "hooks_list"):
            with pytest.raises(WorldError) as caught:
                quick.call(method, run_id=started, pagination=pagination)
            assert caught.value.status == 400
    with pytest.raises(WorldError):
        quick.call("runs_get", run_id=started, resolve_data="some")


# --- spec versions


@pytest.mark.parametrize("spec", [2, 3, 4, 5, 6, 7])
def test_a_run_keeps_the_spec_version_it_began_with(quick: World, spec: int) -> None:
    run = quick.run(spec=spec)
    quick.create(run, "run_started", spec=7)
    assert quick.get(run)["specVersion"] == spec
    quick.step(run, started=True)
    quick.create(run, "step_completed", "step_1", data={"result": b"1"})
    quick.create(run, "wait_created", "wait_1", data={"resumeAt": at(quick, timedelta(days=2).total_seconds())})
    quick.create(run, "wait_completed", "wait_1")
    quick.hook(run, "hook_1", f"token-{spec}")
    end(quick, run)
    assert quick.get(run)["status"] == "completed"
    assert len(quick.events(run)) == 9


@pytest.mark.parametrize("spec", [0, 1, None])
def test_legacy_runs_take_three_events_only(quick: World, spec: int | None) -> None:
    run = quick.run(spec=spec)
    assert quick.create(run, "wait_completed", "wait_1")["event"]["eventType"] == "wait_completed"
    assert quick.create(run, "hook_received", "hook_1", data={"payload": b"1"})["event"]["correlationId"] == "hook_1"
    for kind, call in (("run_started", None), ("run_completed", None), ("step_created", "s"), ("hook_created", "h")):
        error = quick.refused(CONFLICT, 409, run, kind, call, data={"stepName": "s", "token": "t"})
        assert "legacy" in error.message
    assert end(quick, run, "run_cancelled")["run"]["status"] == "cancelled"
    quick.refused(CONFLICT, 409, run, "wait_completed", "wait_1")


def test_a_run_of_a_newer_spec_version_stays_untouched(quick: World) -> None:
    run = quick.run(spec=8)
    for kind in ("run_started", "run_completed", "run_cancelled"):
        quick.refused("RunNotSupportedError", 409, run, kind, data={})
    assert quick.get(run)["specVersion"] == 8
    with pytest.raises(WorldError) as caught:
        quick.create(quick.new_id(), "run_started", data=CREATION, spec=8)
    assert caught.value.name == "RunNotSupportedError"


@pytest.mark.parametrize(("spec", "expected"), [(4, True), (5, False)])
def test_errors_before_version_5_are_structured(quick: World, spec: int, expected: bool) -> None:
    run = quick.run(spec=spec, started=True)
    quick.step(run, started=True)
    error = {"error": "no card", "stack": "at charge"}
    step = quick.create(run, "step_failed", "step_1", data=error)["step"]
    assert step["error"] == ({"message": "no card", "stack": "at charge"} if expected else "no card")
    quick.create(run, "run_failed", data={"error": {"message": "bad"}, "errorCode": "USER_ERROR"})
    got = quick.get(run)
    assert got["error"] == ({"message": "bad", "code": "USER_ERROR"} if expected else {"message": "bad"})
    assert got["errorCode"] == "USER_ERROR"
