"""Runs, events and entities of a World, on each store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.checker import Ledgers, check_worlds, dump_worlds
from tests.world.worlds import Server, World

from holdfast.model.log import Page
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.store.contract import Store
from holdfast.world.errors import WorldError
from holdfast.world.records import invocation_of


def invocation(world: World, run: str) -> InvocationRecord:
    id = invocation_of(run)
    assert id is not None
    (record,) = world.do(world.engine.store.get("app", [id]))
    assert record is not None
    return record


def test_a_workflow_from_its_creation_to_its_end(world: World) -> None:
    run = world.run("workflow//./shop//checkout", data={"attributes": {"order": "42"}})
    assert invocation(world, run).status is Status.REGISTERED
    started = world.create(run, "run_started")
    assert started["run"]["status"] == "running"
    assert [event["eventType"] for event in started["events"]] == ["run_created", "run_started"]
    record = invocation(world, run)
    assert (record.status, record.task, record.owner) == (Status.SUSPENDED, "world:checkout", None)
    lazy = world.create(run, "step_started", "step_1", data={"stepName": "charge", "input": b"in"})
    assert lazy["stepCreated"] is True
    assert (lazy["step"]["status"], lazy["step"]["attempt"], lazy["step"]["input"]) == ("running", 1, b"in")
    world.create(run, "step_completed", "step_1", data={"result": b"out"})
    done = world.create(run, "run_completed", data={"output": b"devl[42]"})
    assert (done["run"]["status"], done["run"]["output"]) == ("completed", b"devl[42]")
    record = invocation(world, run)
    assert (record.status, world.engine.codec.decode(record.result or b"")) == (Status.SUCCESS, b"devl[42]")
    assert record.attributes == {"order": "42"}
    assert record.retain_until is not None
    assert world.kinds(run) == [
        *("run_created", "run_started", "step_created", "step_started", "step_completed", "run_completed"),
    ]
    assert [event["eventId"] for event in world.events(run)] == [f"evnt_{number:026d}" for number in range(1, 7)]
    assert "input" not in world.events(run)[3].get("eventData", {})


def test_a_second_server_reads_what_the_first_wrote(world: World) -> None:
    run = world.run(started=True)
    other = world.other()
    other.step(run, started=True)
    world.create(run, "step_completed", "step_1", data={"result": b"1"})  # its log was out of date
    other.refused("EntityConflictError", 409, run, "step_completed", "step_1", data={"result": b"2"})
    assert world.get(run) == other.get(run)
    assert world.events(run) == other.events(run)


def test_a_failed_run_shows_its_error_to_python(world: World) -> None:
    run = world.run(started=True)
    error = b'devl[["Error",1],{"name":2,"message":3},"TypeError","no card"]'
    world.create(run, "run_failed", data={"error": error, "errorCode": "USER_ERROR"})
    record = invocation(world, run)
    assert record.status is Status.FAILED
    assert record.error is not None
    assert (record.error.message, record.error.type_name) == ("no card", "workflow:TypeError")
    got = world.get(run)
    assert (got["status"], got["error"], got["errorCode"]) == ("failed", error, "USER_ERROR")


def test_a_cancelled_run_says_why(world: World) -> None:
    run = world.run()
    world.create(run, "run_cancelled", data={"cancelReason": "changed their mind"})
    record = invocation(world, run)
    assert record.status is Status.CANCELLED
    assert record.cancellation is not None
    assert record.cancellation.reason == "changed their mind"


def test_large_payloads_are_stored_apart(world: World) -> None:
    large = bytes(range(256)) * 1024
    run = world.run(input=large, started=True)
    world.step(run, input=large)
    other = world.other()
    assert other.get(run)["input"] == large
    assert other.events(run)[2]["eventData"]["input"] == large
    world.create(run, "run_completed", data={"output": large})
    assert other.get(run)["output"] == large


def test_attributes_are_merged_and_shown_by_the_invocation(world: World) -> None:
    run = world.run(started=True, data={"attributes": {"a": "1", "b": "2"}})
    changes = [{"key": "a", "value": None}, {"key": "c", "value": "3"}]
    assert world.call("runs_set_attributes", run_id=run, changes=changes)["attributes"] == {"b": "2", "c": "3"}
    assert dict(invocation(world, run).attributes) == {"b": "2", "c": "3"}
    assert invocation(world, run).status is Status.SUSPENDED


@pytest.mark.parametrize("kind", ["run_created", "step_started", "run_completed", "hook_created"])
def test_an_operation_that_is_repeated_happens_once(world: World, kind: str) -> None:
    run = world.new_id() if kind == "run_created" else world.run(started=True)
    call = None if kind.startswith("run") else f"{kind}_1"
    data: dict[str, dict[str, Any]] = {
        "run_created": {"deploymentId": "d", "workflowName": "w", "input": b"1"},
        "step_started": {"stepName": "s", "input": b"1"},
        "run_completed": {"output": b"1"},
        "hook_created": {"token": "t"},
    }
    first = world.create(run, kind, call, data=data[kind], operation="op-1")
    kinds = world.kinds(run)
    for server in (world, world.other()):
        assert server.create(run, kind, call, data=data[kind], operation="op-1") == first
    assert world.kinds(run) == kinds


def test_a_repeated_operation_is_answered_as_the_first_time(world: World) -> None:
    run = world.run(started=True)
    data = {"stepName": "s", "input": b"1"}
    first = world.create(run, "step_started", "step_1", data=data, operation="op-1")
    world.create(run, "step_completed", "step_1", data={"result": b"1"})
    again = world.other().create(run, "step_started", "step_1", data=data, operation="op-1")
    assert again == first
    assert (again["step"]["status"], again["stepCreated"]) == ("running", True)


def test_parallel_writers_of_two_servers_lose_nothing(world: World) -> None:
    run = world.run(started=True)
    servers = [world, world.other()]
    created = [
        servers[number % 2].storage.events_create(
            run_id=run,
            event={
                "eventType": "step_created",
                "correlationId": f"step_{number}",
                "specVersion": 5,
                "eventData": {"stepName": "s", "input": b"1"},
            },
        )
        for number in range(30)
    ]
    answers = world.together(*created)
    assert all(isinstance(answer, dict) for answer in answers), answers
    assert len(world.call("steps_list", run_id=run, pagination={"limit": 1000})["data"]) == 30
    events = world.events(run)
    assert [event["eventId"] for event in events] == [f"evnt_{number:026d}" for number in range(1, 33)]


def test_of_racing_ends_one_is_written(world: World) -> None:
    run = world.run(started=True)
    servers = [world, world.other(), world.other()]
    ends = [("run_completed", {"output": b"1"}), ("run_failed", {"error": b"2"}), ("run_cancelled", {})]
    answers = world.together(
        *[
            server.storage.events_create(run_id=run, event={"eventType": kind, "specVersion": 5, "eventData": data})
            for server, (kind, data) in zip(servers, ends, strict=True)
        ]
    )
    assert len([answer for answer in answers if isinstance(answer, dict)]) == 1
    assert all(isinstance(each, dict | WorldError) for each in answers)
    assert len(world.events(run)) == 3


def test_a_live_reader_gets_chunks_and_the_end(world: World) -> None:
    run = world.run(started=True)
    other = world.other()

    async def read(start: int) -> tuple[int, list[bytes]]:
        first, chunks = await other.storage.streams_read(run_id=run, name="out", start=start)
        return first, [chunk async for chunk in chunks]

    async def write() -> None:
        for number in range(5):
            await world.storage.streams_write(run_id=run, name="out", chunks=[f"{number}", bytes([number])])
            await asyncio.sleep(0)
        await world.storage.streams_close(run_id=run, name="out")

    async def both() -> tuple[int, list[bytes]]:
        reader = asyncio.create_task(read(0))
        await asyncio.sleep(0)
        await write()
        return await reader

    expected = [part for number in range(5) for part in (str(number).encode(), bytes([number]))]
    assert world.do(both()) == (0, expected)
    assert world.do(read(-3)) == (7, expected[-3:])
    assert world.do(read(4)) == (4, expected[4:])
    assert world.call("streams_get_info", run_id=run, name="out") == {"tailIndex": 9, "done": True}
    assert world.call("streams_list", run_id=run) == {"names": ["out"]}


def test_times_are_of_utc_to_the_millisecond(world: World) -> None:
    run = world.run(started=True)
    at = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    made = world.create(run, "wait_created", "wait_1", data={"resumeAt": at})
    assert made["wait"]["resumeAt"] == at
    assert made["event"]["eventData"] == {"resumeAt": at}
    created = made["event"]["createdAt"]
    assert created.tzinfo is UTC
    assert created.microsecond % 1000 == 0


def test_a_stream_whose_run_is_not_known(world: World) -> None:
    run = world.run()
    names = ["strm_" + run.removeprefix("wrun_") + "_user", "__health_check_1"]
    owners = [run, "wrun_health_check"]

    async def read(name: str) -> list[bytes]:
        _, chunks = await world.storage.streams_read(run_id="-", name=name)
        return [chunk async for chunk in chunks]

    async def write(owner: str, name: str) -> None:
        await world.storage.streams_write(run_id=owner, name=name, chunks=["a"])
        await world.storage.streams_close(run_id=owner, name=name)

    async def both(owner: str, name: str) -> list[bytes]:
        reader = asyncio.create_task(read(name))
        await asyncio.sleep(0)
        await write(owner, name)
        return await reader

    for owner, name in zip(owners, names, strict=True):
        assert world.call("streams_get_info", run_id="-", name=name)["tailIndex"] == -1
        assert world.do(both(owner, name)) == [b"a"]
        assert world.call("streams_get_info", run_id="-", name=name) == {"tailIndex": 0, "done": True}
        assert world.call("streams_get_chunks", run_id="-", name=name)["data"] == [{"index": 0, "data": b"a"}]


def test_what_is_written_after_the_close_is_dropped(world: World) -> None:
    run = world.run()
    world.call("streams_write", run_id=run, name="s", chunks=["a"])
    world.call("streams_close", run_id=run, name="s")
    for server in (world, world.other()):
        server.call("streams_write", run_id=run, name="s", chunks=["b"])
        server.call("streams_close", run_id=run, name="s")
    assert world.call("streams_get_info", run_id=run, name="s") == {"tailIndex": 0, "done": True}


def test_a_repeated_write_to_a_stream_happens_once(world: World) -> None:
    run = world.run()
    large = [bytes([number]) * 60_000 for number in range(30)]  # several pages
    world.call("streams_write", run_id=run, name="s", chunks=large, operation_id="op-1")
    other = world.other()
    for server in (world, other):
        server.call("streams_write", run_id=run, name="s", chunks=["x"])
        server.call("streams_write", run_id=run, name="s", chunks=large, operation_id="op-1")
    found = world.call("streams_get_chunks", run_id=run, name="s", limit=1000)["data"]
    assert [chunk["data"] for chunk in found] == [*large, b"x", b"x"]


def test_a_hook_that_is_refused_leaves_the_token_to_the_one_that_is_there(world: World) -> None:
    run, other = world.run(started=True), world.other()
    other.get(run)  # its log is out of date from here on
    world.hook(run, "hook_1", "t")
    with pytest.raises(WorldError, match="exists already"):
        other.create(run, "hook_created", "hook_1", data={"token": "t"})
    assert other.hook(other.run(), "hook_2", "t")["event"]["eventType"] == "hook_conflict"
    assert world.call("hooks_get_by_token", token="t")["runId"] == run


def test_a_run_that_was_removed_is_gone_from_every_memory(world: World) -> None:
    run, other = world.run(started=True), world.other()
    world.create(run, "run_completed", data={"output": b"1"})
    assert other.get(run)["status"] == "completed"
    world.do(world.engine.store.remove_expired("app", world.clock.now() + 8 * 86_400, 100))
    for server in (world, other):
        with pytest.raises(WorldError) as caught:
            server.get(run)
        assert caught.value.name == "WorkflowRunNotFoundError"


def test_an_open_run_that_ended_elsewhere_and_was_removed_is_gone(world: World) -> None:
    run, other = world.run(started=True), world.other()
    assert other.get(run)["status"] == "running"
    world.create(run, "run_completed", data={"output": b"1"})
    world.do(world.engine.store.remove_expired("app", world.clock.now() + 8 * 86_400, 100))
    with pytest.raises(WorldError) as caught:
        other.get(run)
    assert caught.value.name == "WorkflowRunNotFoundError"


def test_a_run_that_was_removed_takes_no_event_of_a_server_that_has_not_looked_for_long(quick: World) -> None:
    run, other = quick.run(started=True), quick.other()
    assert other.get(run)["status"] == "running"
    quick.create(run, "run_completed", data={"output": b"1"})
    quick.clock.advance(8 * 86_400)
    quick.do(quick.engine.store.remove_expired("app", quick.clock.now(), 100))
    with pytest.raises(WorldError) as caught:
        other.step(run)
    assert caught.value.name == "WorkflowRunNotFoundError"
    assert quick.do(quick.engine.store.read_log("app", invocation_of(run), limit=1)) == []


class _BusyReplies:
    """A store whose replies to `append` come after other work."""

    def __init__(self, store: Store, meanwhile: Callable[[], Awaitable[Any]]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, pages: Sequence[Page]) -> Any:
        verdicts = await self._store.append(pages)
        await self._meanwhile()
        return verdicts


def test_an_answer_is_of_its_own_event_whatever_readers_see_meanwhile(quick: World) -> None:
    run, other = quick.run(started=True), quick.other()

    async def meanwhile() -> None:
        event = {"eventType": "step_created", "correlationId": "step_2", "eventData": {"stepName": "b"}}
        await other.storage.events_create(run_id=run, event=event)
        await busy.storage.runs_get(run_id=run)  # in the server whose reply is on its way

    store: Any = _BusyReplies(quick.engine.store, meanwhile)
    busy = Server(quick.do, store, quick.clock, 7)
    answer = busy.create(run, "step_created", "step_1", data={"stepName": "a"})
    assert (answer["event"]["correlationId"], answer["step"]["stepId"]) == ("step_1", "step_1")
    assert answer["event"]["eventId"] == f"evnt_{3:026d}"


class _BusyPayloads:
    """A store in which other work is done before payloads are kept."""

    def __init__(self, store: Store, meanwhile: Callable[[], Awaitable[Any]]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_payloads(self, *given: Any, **more: Any) -> Any:
        await self._meanwhile()
        return await self._store.put_payloads(*given, **more)


def test_an_event_is_judged_again_if_readers_read_on_while_its_payload_is_kept(quick: World) -> None:
    run, other = quick.run(started=True), quick.other()
    quick.step(run, started=True)

    async def meanwhile() -> None:
        event = {"eventType": "step_completed", "correlationId": "step_1", "eventData": {"result": b"1"}}
        with contextlib.suppress(WorldError):
            await other.storage.events_create(run_id=run, event=event)
        await busy.storage.runs_get(run_id=run)  # in the server that has judged its own end already

    store: Any = _BusyPayloads(quick.engine.store, meanwhile)
    busy = Server(quick.do, store, quick.clock, 7)
    with contextlib.suppress(WorldError):
        busy.create(run, "step_completed", "step_1", data={"result": bytes(100_000)})
    quick.create(run, "run_completed", data={"output": b"1"})
    assert check_worlds(quick.do(dump_worlds(quick.engine)), Ledgers()) == []
    assert quick.kinds(run)[-3:] == ["step_started", "step_completed", "run_completed"]
