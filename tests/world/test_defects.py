"""The defects of the World that exists for MongoDB, by their numbers in our notes, as far as they are about storage and
streams. Those of its queue (8 to 15, 28, 29) and of connecting (26, 27) are tested with our queue and server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.world.worlds import Server, World

from holdfast.clock import SystemClock
from holdfast.model.status import FINAL
from holdfast.testing.clock import FakeClock
from holdfast.world.errors import WorldError
from holdfast.world.records import invocation_of

STEP = {"stepName": "s", "input": b"1"}


def at_once(world: World, *asked: tuple[Server, str, str, dict[str, Any]], run: str) -> Sequence[Any]:
    """Write events side by side, each on its server."""
    return world.together(
        *[
            server.storage.events_create(
                run_id=run,
                event={"eventType": kind, "correlationId": call, "specVersion": 5, "eventData": data},
            )
            for server, kind, call, data in asked
        ]
    )


def successes(answers: Sequence[Any]) -> list[Any]:
    assert all(isinstance(answer, dict | WorldError) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, dict)]


async def take(server: Server, run: str, count: int | None = None, start: int = 0) -> list[bytes]:
    _, chunks = await server.storage.streams_read(run_id=run, name="s", start=start)
    found: list[bytes] = []
    async for chunk in chunks:
        found.append(chunk)
        if len(found) == count:
            break
    return found


def test_01_an_entity_is_never_ahead_of_its_event(world: World) -> None:
    run = world.run(started=True)
    world.step(run, started=True)
    world.create(run, "step_completed", "step_1", data={"result": b"1"})
    for server in (world, world.other()):
        assert server.call("steps_get", run_id=run, step_id="step_1")["status"] == "completed"
        assert server.kinds(run)[-1] == "step_completed"


def test_02_two_starts_of_a_step_are_two_attempts_and_one_end_wins(world: World) -> None:
    run, other = world.run(started=True), world.other()
    world.step(run)
    starts = at_once(world, (world, "step_started", "step_1", {}), (other, "step_started", "step_1", {}), run=run)
    assert sorted(answer["step"]["attempt"] for answer in successes(starts)) == [1, 2]
    ends = at_once(
        world,
        (world, "step_completed", "step_1", {"result": b"1"}),
        (other, "step_failed", "step_1", {"error": b"2"}),
        run=run,
    )
    assert len(successes(ends)) == 1
    assert len([kind for kind in world.kinds(run) if kind in ("step_completed", "step_failed")]) == 1


def test_03_of_concurrent_creations_of_a_step_one_succeeds(world: World) -> None:
    run = world.run(started=True)
    servers = [world, world.other(), world.other()]
    answers = at_once(world, *[(server, "step_created", "step_1", STEP) for server in servers], run=run)
    assert len(successes(answers)) == 1
    assert [error.name for error in answers if isinstance(error, WorldError)] == ["EntityConflictError"] * 2


def test_04_a_run_is_not_made_anew(world: World) -> None:
    run = world.run(started=True)
    world.create(run, "run_completed", data={"output": b"1"})
    before = world.get(run)
    for server in (world, world.other()):
        with pytest.raises(WorldError) as caught:
            server.run(id=run)
        assert caught.value.status == 409
    assert world.other().get(run) == before


def test_05_a_wake_of_a_running_run_writes_nothing(world: World) -> None:
    run = world.run(started=True)
    for server in (world, world.other()):
        assert server.create(run, "run_started")["run"]["status"] == "running"
    assert world.kinds(run) == ["run_created", "run_started"]


def test_06_a_wait_wakes_once(world: World) -> None:
    run, other = world.run(started=True), world.other()
    due = {"resumeAt": datetime.fromtimestamp(world.clock.now(), UTC)}
    created = at_once(world, (world, "wait_created", "w", due), (other, "wait_created", "w", due), run=run)
    assert len(successes(created)) == 1
    woken = at_once(world, (world, "wait_completed", "w", {}), (other, "wait_completed", "w", {}), run=run)
    assert len(successes(woken)) == 1


def test_07_events_are_in_the_order_of_their_writes_whatever_the_clocks(quick: World) -> None:
    run, behind = quick.run(started=True), quick.other()
    store: Any = behind.engine.store
    assert isinstance(quick.clock, FakeClock)
    for number in range(4):
        quick.clock.set(quick.clock.now() + (3600 if number % 2 == 0 else -3600))
        behind.step(run, f"step_{number}")
    events = quick.events(run)
    assert [event["eventId"] for event in events] == [f"evnt_{number:026d}" for number in range(1, 7)]
    times = [event["createdAt"] for event in events]
    assert times == sorted(times)
    assert store is quick.engine.store


def test_16_everything_of_the_contract_is_there(quick: World) -> None:
    methods = [
        *("events_create", "events_get", "events_list", "events_list_by_correlation_id", "runs_get", "runs_list"),
        *("runs_set_attributes", "steps_get", "steps_list", "hooks_get", "hooks_get_by_token", "hooks_list"),
        *("streams_write", "streams_close", "streams_list", "streams_get_chunks", "streams_get_info", "streams_read"),
    ]
    assert all(callable(getattr(quick.storage, method)) for method in methods)
    run = quick.run(started=True)
    hook = quick.hook(run, "hook_1", "t", isWebhook=True)["hook"]
    assert hook["isWebhook"] is True
    event = quick.call("events_get", run_id=run, event_id="evnt_" + "3".zfill(26))
    assert event["eventType"] == "hook_created"
    for id in ("evnt_" + "4".zfill(26), "evnt_4", "x"):
        with pytest.raises(WorldError) as caught:
            quick.call("events_get", run_id=run, event_id=id)
        assert caught.value.name == "EventNotFoundError"


def test_17_and_18_errors_have_a_name_a_status_and_a_number_of_seconds(quick: World) -> None:
    run = quick.run(started=True)
    quick.step(run, started=True)
    later = datetime.fromtimestamp(quick.clock.now() + 30, UTC)
    quick.create(run, "step_retrying", "step_1", data={"error": b"1", "retryAfter": later})
    error = quick.refused("TooEarlyError", 425, run, "step_started", "step_1")
    assert error.retry_after == 30.0
    assert quick.refused(
        "EntityConflictError", 409, run, "run_created", data={"deploymentId": "d", "workflowName": "w"}
    )


def test_19_without_data_names_and_times_stay(quick: World) -> None:
    run = quick.run(started=True)
    later = datetime.fromtimestamp(quick.clock.now() + 30, UTC)
    quick.step(run, started=True)
    quick.create(run, "step_retrying", "step_1", data={"error": b"1", "retryAfter": later})
    details = [event.get("eventData") for event in quick.events(run, resolve_data="none")]
    assert details[2] == {"stepName": "charge"}
    assert details[4] == {"retryAfter": later}


def test_20_pagers_of_steps_and_hooks_end(quick: World) -> None:
    run = quick.run(started=True)
    for number in range(3):
        quick.step(run, f"step_{number}")
        quick.hook(run, f"hook_{number}", f"t{number}")
    for method in ("steps_list", "hooks_list"):
        first = quick.call(method, run_id=run, pagination={"limit": 2})
        second = quick.call(method, run_id=run, pagination={"limit": 2, "cursor": first["cursor"]})
        assert (len(first["data"]), len(second["data"])) == (2, 1)
        assert second["data"][0] not in first["data"]
        assert second["hasMore"] is False


def test_21_and_25_a_reader_in_another_server_gets_every_chunk_before_the_close(world: World) -> None:
    run, other = world.run(started=True), world.other()

    async def both() -> list[bytes]:
        reader = asyncio.create_task(take(other, run))
        await asyncio.gather(
            *[
                server.storage.streams_write(run_id=run, name="s", chunks=[f"{name}{number}"])
                for number in range(5)
                for name, server in (("a", world), ("b", other))
            ]
        )
        await other.storage.streams_close(run_id=run, name="s")
        return await reader

    found = world.do(both())
    assert sorted(found) == sorted(f"{name}{number}".encode() for name in "ab" for number in range(5))


def test_22_a_reader_that_leaves_takes_no_other_with_it(world: World) -> None:
    run = world.run(started=True)

    async def three() -> list[bytes]:
        leaving = asyncio.create_task(take(world, run))
        staying = asyncio.create_task(take(world, run))
        await world.storage.streams_write(run_id=run, name="s", chunks=["a"])
        await asyncio.sleep(0)
        leaving.cancel()
        await world.storage.streams_write(run_id=run, name="s", chunks=["b"])
        await world.storage.streams_close(run_id=run, name="s")
        return await staying

    assert world.do(three()) == [b"a", b"b"]


def test_23_an_index_may_be_below_zero_or_beyond_the_end(world: World) -> None:
    run = world.run(started=True)
    world.call("streams_write", run_id=run, name="s", chunks=["a", "b", "c"])

    async def beyond() -> list[bytes]:
        reader = asyncio.create_task(take(world, run, start=4))
        await asyncio.sleep(0)
        await world.storage.streams_write(run_id=run, name="s", chunks=["d", "e", "f"])
        await world.storage.streams_close(run_id=run, name="s")
        return await reader

    assert world.do(beyond()) == [b"e", b"f"]
    assert world.do(take(world, run, start=-2)) == [b"e", b"f"]
    assert world.do(take(world, run, start=-99))[0] == b"a"


def test_24_a_slow_reader_does_not_hold_the_stream_in_memory(quick: World) -> None:
    run = quick.run(started=True)
    for number in range(40):
        quick.call("streams_write", run_id=run, name="s", chunks=[bytes([number]) * 60_000 for _ in range(5)])
    store, read = quick.engine.store, list[int]()
    read_log = store.read_log

    async def counted(*args: Any, **where: Any) -> Any:
        pages = await read_log(*args, **where)
        read.append(sum(len(page.events) for page in pages))
        return pages

    store.read_log = counted  # type: ignore[method-assign]
    assert quick.do(take(quick, run, count=3)) == [bytes([0]) * 60_000] * 3
    assert sum(read) < 2_000_000


@pytest.mark.parametrize("url", ["mongodb"], indirect=True)
def test_30_ended_runs_are_kept_for_a_time_and_payloads_may_be_large(world: World) -> None:
    assert isinstance(world.clock, SystemClock)
    large = bytes(17_000_000)
    run = world.run(input=large, started=True)
    world.create(run, "run_completed", data={"output": large})
    assert world.other().get(run)["output"] == large
    id = invocation_of(run)
    assert id is not None
    (record,) = world.do(world.engine.store.get("app", [id]))
    assert record is not None
    assert record.status in FINAL
    assert record.retain_until == pytest.approx(record.changed_at + 7 * 86_400)
    assert world.do(world.engine.store.remove_expired("app", world.clock.now() + 8 * 86_400, 100)) == 1
    for server in (world, world.other()):
        with pytest.raises(WorldError) as caught:
            server.get(run)
        assert caught.value.name == "WorkflowRunNotFoundError"
