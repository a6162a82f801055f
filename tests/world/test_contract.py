"""The community's contract tests of Worlds, in Python: 8 of serialisation, 14 of outputs, 6 of hooks, 7 of streams and
14 of guards, on each store. The 4 of queues are in `test_queue_contract.py`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.world.worlds import World

from holdfast.world.errors import WorldError

JUNE = datetime(2024, 6, 15, 10, 30, tzinfo=UTC)
NESTED = datetime(2024, 1, 1, tzinfo=UTC)


def created(world: World, input: Any = (), **more: Any) -> str:
    data = {"deploymentId": "test-deployment", "workflowName": "test-workflow", "input": list(input)}
    run: str = world.create(None, "run_created", data=data, **more)["run"]["runId"]
    return run


def stepped(world: World, run: str, id: str = "step_1", input: Any = ()) -> Any:
    return world.create(run, "step_created", id, data={"stepName": "test-step", "input": list(input)})["step"]


def completed(world: World, run: str, output: Any) -> Any:
    world.create(run, "run_completed", data={"output": output})
    return world.get(run)["output"]


def step_completed(world: World, run: str, result: Any, id: str = "step_1") -> Any:
    world.create(run, "step_started", id)
    world.create(run, "step_completed", id, data={"result": result})
    return world.call("steps_get", run_id=run, step_id=id)


# --- serialisation


def test_dates_in_the_input_of_runs(world: World) -> None:
    run = created(world, [JUNE, {"nested": NESTED}])
    assert world.get(run)["input"] == [JUNE, {"nested": NESTED}]


def test_null_is_not_undefined(world: World) -> None:
    assert world.get(created(world, [{"explicit": None}]))["input"] == [{"explicit": None}]


def test_nested_structures(world: World) -> None:
    value = {
        "string": "test",
        "number": 42,
        "float": 3.14159,
        "boolean": True,
        "null": None,
        "array": [1, "two", NESTED],
        "nested": {"deep": {"deeper": {"value": "found", "date": JUNE}}},
    }
    assert world.get(created(world, [value]))["input"] == [value]


def test_dates_in_the_input_of_steps(world: World) -> None:
    run = created(world)
    assert stepped(world, run, input=[JUNE])["input"] == [JUNE]
    assert world.call("steps_get", run_id=run, step_id="step_1")["input"] == [JUNE]


def test_dates_in_the_output_of_steps(world: World) -> None:
    run = created(world)
    stepped(world, run)
    assert step_completed(world, run, [{"at": JUNE}])["output"] == [{"at": JUNE}]


def test_dates_in_event_data(world: World) -> None:
    run = created(world)
    stepped(world, run)
    world.create(run, "step_completed", "step_1", data={"result": {"at": JUNE}})
    assert world.events(run)[-1]["eventData"] == {"result": {"at": JUNE}}


def test_order_and_data_of_events(world: World) -> None:
    run = created(world)
    for number in range(3):
        stepped(world, run, f"step_{number}", [{"number": number, "at": NESTED}])
    found = [event["eventData"]["input"] for event in world.events(run)[1:]]
    assert found == [[{"number": number, "at": NESTED}] for number in range(3)]


def test_dates_in_the_metadata_of_hooks(world: World) -> None:
    run = created(world)
    world.hook(run, "hook_1", "token-1", metadata={"at": JUNE})
    assert world.call("hooks_get_by_token", token="token-1")["metadata"] == {"at": JUNE}
    assert world.call("hooks_get", hook_id="hook_1")["metadata"] == {"at": JUNE}


# --- outputs and inputs


@pytest.mark.parametrize(
    "output",
    [
        133,
        {"finalAttempt": 3},
        {"childRunId": "wrun_1", "result": {"value": 21, "list": [1, {"deep": True}]}},
        "a text",
        [1, "two", {"three": 3}],
        True,
        None,
        0,
        "",
    ],
    ids=["number", "object", "complex", "string", "array", "boolean", "null", "zero", "empty"],
)
def test_outputs_of_runs(world: World, output: Any) -> None:
    got = completed(world, created(world), output)
    assert (got, type(got)) == (output, type(output))
    if output is True:
        assert completed(world, created(world), False) is False


def test_a_step_shows_its_output_and_attempt(world: World) -> None:
    run = created(world)
    stepped(world, run)
    world.create(run, "step_started", "step_1")
    world.create(run, "step_retrying", "step_1", data={"error": "first"})
    step = step_completed(world, run, {"attempt": 2})
    assert (step["attempt"], step["output"]) == (2, {"attempt": 2})


@pytest.mark.parametrize("result", [17, {"list": [1, 2], "deep": {"text": "x"}}], ids=["result", "complex"])
def test_outputs_of_steps(world: World, result: Any) -> None:
    run = created(world)
    stepped(world, run)
    assert step_completed(world, run, result)["output"] == result


def test_the_input_of_a_run_is_kept(world: World) -> None:
    run = created(world, [123, "x"])
    completed(world, run, 1)
    assert world.get(run)["input"] == [123, "x"]


def test_the_input_of_a_step_is_kept(world: World) -> None:
    run = created(world)
    stepped(world, run, input=[1, {"a": 2}])
    assert step_completed(world, run, 1)["input"] == [1, {"a": 2}]


# --- hooks


@pytest.mark.parametrize("kind", ["run_completed", "run_failed", "run_cancelled"])
def test_hooks_end_with_their_run(world: World, kind: str) -> None:
    run = created(world)
    world.hook(run, "hook_1", "token-1")
    assert world.call("hooks_get_by_token", token="token-1")["runId"] == run
    world.create(run, kind, data={"output": 1} if kind == "run_completed" else {"error": "x"})
    for method, field in (("hooks_get_by_token", {"token": "token-1"}), ("hooks_get", {"hook_id": "hook_1"})):
        with pytest.raises(WorldError) as caught:
            world.call(method, **field)
        assert (caught.value.name, caught.value.status) == ("HookNotFoundError", 404)
    assert world.call("hooks_list")["data"] == world.call("hooks_list", run_id=run)["data"] == []


def test_a_token_is_free_again_after_the_run(world: World) -> None:
    first, second = created(world), created(world)
    world.hook(first, "hook_1", "token-1")
    completed(world, first, 1)
    assert world.hook(second, "hook_2", "token-1")["hook"]["runId"] == second
    assert world.call("hooks_get_by_token", token="token-1")["hookId"] == "hook_2"


def test_a_token_of_an_active_run_is_a_conflict(world: World) -> None:
    first, second = created(world), created(world)
    world.hook(first, "hook_1", "token-1")
    event = world.other().hook(second, "hook_2", "token-1")["event"]
    assert event["eventType"] == "hook_conflict"
    assert event["eventData"] == {"token": "token-1", "conflictingRunId": first}


def test_several_hooks_of_a_run_end(world: World) -> None:
    run = created(world)
    for number in range(3):
        world.hook(run, f"hook_{number}", f"token-{number}")
    assert len(world.call("hooks_list", run_id=run)["data"]) == 3
    completed(world, run, 1)
    for number in range(3):
        with pytest.raises(WorldError):
            world.call("hooks_get_by_token", token=f"token-{number}")


# --- streams


def read(world: World, run: str, name: str = "stream", start: int = 0) -> list[bytes]:
    async def chunks() -> list[bytes]:
        _, found = await world.storage.streams_read(run_id=run, name=name, start=start)
        return [chunk async for chunk in found]

    return world.do(chunks())


def write(world: World, run: str, *chunks: bytes | str, name: str = "stream", close: bool = True) -> None:
    for chunk in chunks:
        world.call("streams_write", run_id=run, name=name, chunks=[chunk])
    if close:
        world.call("streams_close", run_id=run, name=name)


def test_text_in_streams(world: World) -> None:
    run = created(world)
    write(world, run, "Hello, World! ü")
    assert b"".join(read(world, run)).decode() == "Hello, World! ü"


def test_bytes_in_streams(world: World) -> None:
    run = created(world)
    write(world, run, bytes(range(256)))
    assert read(world, run) == [bytes(range(256))]


def test_null_bytes_in_streams(world: World) -> None:
    run = created(world)
    write(world, run, "a\0b", b"\0\0")
    assert b"".join(read(world, run)) == b"a\0b\0\0"


def test_the_order_of_several_writes(world: World) -> None:
    run = created(world)
    write(world, run, *[f"chunk-{number}" for number in range(10)])
    assert read(world, run) == [f"chunk-{number}".encode() for number in range(10)]


def test_streams_with_names_are_separate(world: World) -> None:
    run, other = created(world), created(world)
    write(world, run, "one", name="first")
    write(world, run, "two", name="second")
    write(world, other, "three", name="first")
    assert (read(world, run, "first"), read(world, run, "second")) == ([b"one"], [b"two"])
    assert read(world, other, "first") == [b"three"]


def test_the_streams_of_a_run_are_listed(world: World) -> None:
    run, other = created(world), created(world)
    for name in ("b", "a"):
        write(world, run, "x", name=name)
    write(world, other, "x", name="c")
    assert world.call("streams_list", run_id=run)["names"] == ["a", "b"]


def test_json_in_streams(world: World) -> None:
    run, lines = created(world), [{"type": "delta", "text": "é"}, {"type": "end", "list": [1, None]}]
    write(world, run, *[json.dumps(line) + "\n" for line in lines])
    assert [json.loads(line) for line in b"".join(read(world, run)).splitlines()] == lines


# --- guards


def refused(world: World, status: int, words: str, *given: Any, **more: Any) -> None:
    with pytest.raises(WorldError, match=words) as caught:
        world.create(*given, **more)
    assert caught.value.status == status


def test_a_client_may_give_the_id_of_a_new_run(world: World) -> None:
    run = world.new_id()
    assert world.run(id=run) == run


def test_events_but_run_created_need_a_run_id(world: World) -> None:
    refused(world, 400, "runId is required", None, "run_started")


def test_events_of_steps_need_a_correlation_id(world: World) -> None:
    refused(world, 400, "correlationId", created(world), "step_started")


def test_cancelling_twice_is_cancelling_once(world: World) -> None:
    run = created(world)
    world.create(run, "run_cancelled")
    again = world.create(run, "run_cancelled")
    assert (again["run"]["status"], again["event"]["eventType"]) == ("cancelled", "run_cancelled")


def test_no_transition_from_a_terminal_state(world: World) -> None:
    run = created(world)
    completed(world, run, {"ok": True})
    refused(world, 410, "terminal state", run, "run_started")
    refused(world, 409, "terminal state", run, "run_failed", data={"error": "x"})


def test_no_new_entities_on_terminal_runs(world: World) -> None:
    run = created(world)
    completed(world, run, 1)
    refused(world, 409, "terminal run", run, "step_created", "step_1", data={"stepName": "s", "input": []})
    refused(world, 409, "terminal run", run, "hook_created", "hook_1", data={"token": "t", "metadata": {}})


def test_no_change_of_terminal_steps(world: World) -> None:
    run = created(world)
    stepped(world, run)
    step_completed(world, run, 1)
    refused(world, 409, "terminal state", run, "step_started", "step_1", data={})


def test_a_start_before_retry_after_is_too_early(world: World) -> None:
    run = created(world)
    stepped(world, run)
    world.create(run, "step_started", "step_1")
    later = datetime.fromtimestamp(world.clock.now() + 60, UTC)
    world.create(run, "step_retrying", "step_1", data={"error": {"message": "later"}, "retryAfter": later})
    refused(world, 425, "retryAfter", run, "step_started", "step_1", data={})


def test_hook_disposed_needs_a_hook(world: World) -> None:
    refused(world, 404, "hook", created(world), "hook_disposed", "hook_missing")


def test_runs_without_their_data(world: World) -> None:
    run = created(world, [{"important": "secret"}])
    completed(world, run, {"result": 123})
    shown = world.get(run, resolve_data="none")
    assert not {"input", "output", "error"} & set(shown)
    assert (shown["workflowName"], shown["status"]) == ("test-workflow", "completed")


def test_steps_without_their_data(world: World) -> None:
    run = created(world)
    stepped(world, run, input=[{"input": "secret"}])
    step_completed(world, run, [{"output": "secret"}])
    shown = world.call("steps_get", run_id=run, step_id="step_1", resolve_data="none")
    assert not {"input", "output", "error"} & set(shown)
    assert (shown["stepName"], shown["attempt"]) == ("test-step", 1)


def test_hooks_and_events_without_their_data(world: World) -> None:
    run = created(world)
    world.hook(run, "hook_1", "token-1", metadata={"apiKey": "secret"})
    world.create(run, "wait_created", "wait_1", data={"resumeAt": JUNE})
    assert "metadata" not in world.call("hooks_get_by_token", token="token-1", resolve_data="none")
    events = world.events(run, resolve_data="none")
    assert events[0]["eventData"] == {"deploymentId": "test-deployment", "workflowName": "test-workflow"}
    assert events[1]["eventData"] == {"token": "token-1"}
    assert events[2]["eventData"] == {"resumeAt": JUNE}


def test_legacy_runs(world: World) -> None:
    run = created(world, spec=1)
    assert world.create(run, "wait_completed", "wait_1")["event"]["eventType"] == "wait_completed"
    received = world.create(run, "hook_received", "hook_1", data={"payload": {"ok": True}})
    assert received["event"]["eventType"] == "hook_received"
    refused(world, 409, "not supported for legacy runs", run, "run_completed", data={"output": {"done": True}})
    assert world.create(run, "run_cancelled")["run"]["status"] == "cancelled"


def test_runs_of_a_future_spec_version(world: World) -> None:
    run = created(world, spec=8)
    with pytest.raises(WorldError) as caught:
        world.create(run, "run_started")
    assert caught.value.name == "RunNotSupportedError"
