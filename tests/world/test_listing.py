"""Lists and their cursors, both ways, while things change."""

from __future__ import annotations

from typing import Any

import pytest
from tests.world.worlds import World

from holdfast.testing.clock import FakeClock
from holdfast.world.errors import WorldError


def walk(world: World, method: str, limit: int, order: str, **fields: Any) -> list[Any]:
    """Return all items, page by page."""
    found: list[Any] = []
    pagination: dict[str, Any] = {"limit": limit, "sortOrder": order}
    for _ in range(100):
        page = world.call(method, pagination=pagination, **fields)
        assert len(page["data"]) <= limit
        assert page["hasMore"] in (True, False)
        found += page["data"]
        if not page["hasMore"]:
            return found
        assert page["cursor"]
        pagination = {**pagination, "cursor": page["cursor"]}
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_pages_of_a_run_have_everything_once(quick: World, order: str, limit: int) -> None:
    run = quick.run(started=True)
    for number in range(7):
        quick.step(run, f"step_{number}")
        quick.hook(run, f"hook_{number}", f"token-{number}")
    turned = (lambda found: found[::-1]) if order == "desc" else (lambda found: found)
    steps = walk(quick, "steps_list", limit, order, run_id=run)
    assert [step["stepId"] for step in steps] == turned([f"step_{number}" for number in range(7)])
    for fields in ({"run_id": run}, {}):
        hooks = walk(quick, "hooks_list", limit, order, **fields)
        assert [hook["hookId"] for hook in hooks] == turned([f"hook_{number}" for number in range(7)])
    events = walk(quick, "events_list", limit, order, run_id=run)
    assert [event["eventId"] for event in events] == turned([f"evnt_{number:026d}" for number in range(1, 17)])


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_runs_by_name_and_status(world: World, order: str) -> None:
    runs = [world.run("a" if number % 2 else "shop//b", started=number % 3 == 0) for number in range(9)]
    world.create(runs[4], "run_completed", data={"output": 1})
    world.create(runs[5], "run_cancelled")
    expected = sorted(runs, reverse=order == "desc")

    def listed(limit: int = 2, **fields: Any) -> list[str]:
        return [run["runId"] for run in walk(world, "runs_list", limit, order, **fields)]

    assert listed() == expected
    assert listed(workflow_name="a") == [run for run in expected if runs.index(run) % 2]
    assert listed(workflow_name="shop//b", status="pending") == [run for run in expected if runs.index(run) in (2, 8)]
    assert listed(status=["running", "completed"]) == [run for run in expected if runs.index(run) in (0, 3, 4, 6)]
    assert listed(status="cancelled") == [runs[5]]
    assert listed(workflow_name="b") == listed(status=[]) == []
    for status in ("paused", ["paused"], [["running"]], [{}], {"status": 1}):
        with pytest.raises(WorldError):
            world.call("runs_list", status=status)
    for cursor in ("x", "wrun_x"):
        with pytest.raises(WorldError):
            world.call("runs_list", pagination={"cursor": cursor})


def test_the_default_orders_and_limits(quick: World) -> None:
    runs = [quick.run() for _ in range(3)]
    for number in range(120):
        quick.step(runs[0], f"step_{number}")
    assert [run["runId"] for run in quick.call("runs_list")["data"]] == sorted(runs, reverse=True)
    page = quick.call("steps_list", run_id=runs[0])
    assert (len(page["data"]), page["data"][0]["stepId"], page["hasMore"]) == (100, "step_119", True)
    assert len(quick.events(runs[0])) == 121


def test_runs_that_come_and_end_while_pages_are_read(quick: World) -> None:
    assert isinstance(quick.clock, FakeClock)
    runs = []
    for _ in range(4):
        quick.clock.advance(1)
        runs.append(quick.run())
    first = quick.call("runs_list", pagination={"limit": 2})
    assert [run["runId"] for run in first["data"]] == [runs[3], runs[2]]
    quick.clock.advance(1)
    new = quick.run()
    quick.create(runs[2], "run_cancelled")
    rest = quick.call("runs_list", pagination={"limit": 2, "cursor": first["cursor"]})
    assert [run["runId"] for run in rest["data"]] == [runs[1], runs[0]]
    upwards = quick.call("runs_list", pagination={"limit": 9, "cursor": runs[3], "sortOrder": "asc"})
    assert [run["runId"] for run in upwards["data"]] == [new]


def test_events_that_come_while_pages_are_read(world: World) -> None:
    run = world.run(started=True)
    other = world.other()
    first = world.call("events_list", run_id=run, pagination={"limit": 1})
    assert (first["hasMore"], len(first["data"])) == (True, 1)
    other.step(run)
    rest = world.call("events_list", run_id=run, pagination={"cursor": first["cursor"]})
    assert [event["eventType"] for event in rest["data"]] == ["run_started", "step_created"]
    assert rest["hasMore"] is False
    end = world.call("events_list", run_id=run, pagination={"cursor": rest["cursor"]})
    assert end == {"data": [], "cursor": None, "hasMore": False}
    other.step(run, "step_2")
    more = world.call("events_list", run_id=run, pagination={"cursor": rest["cursor"]})
    assert [event["correlationId"] for event in more["data"]] == ["step_2"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_events_of_a_call_with_and_without_a_run(quick: World, order: str) -> None:
    runs = sorted(quick.run(started=True) for _ in range(3))
    for run in runs:
        quick.step(run, "step_1", started=True)
        quick.step(run, "step_2")
    of_run = walk(quick, "events_list_by_correlation_id", 1, order, correlation_id="step_1", run_id=runs[0])
    kinds = ["step_created", "step_started"] if order == "asc" else ["step_started", "step_created"]
    assert [event["eventType"] for event in of_run] == kinds
    for limit in (1, 2, 3, 100):
        of_all = walk(quick, "events_list_by_correlation_id", limit, order, correlation_id="step_1")
        wanted = runs if order == "asc" else runs[::-1]
        assert [(event["runId"], event["eventType"]) for event in of_all] == [
            (run, kind) for run in wanted for kind in kinds
        ]
    assert quick.call("steps_get", run_id=None, step_id="step_2")["runId"] == runs[-1]


def test_chunks_are_paged_with_done(world: World) -> None:
    run = world.run()
    assert world.call("streams_get_info", run_id=run, name="s") == {"tailIndex": -1, "done": False}
    empty = {"data": [], "cursor": None, "hasMore": False, "done": False}
    assert world.call("streams_get_chunks", run_id=run, name="s") == empty
    world.call("streams_write", run_id=run, name="s", chunks=[bytes([number]) for number in range(5)])
    world.call("streams_write", run_id=run, name="s", chunks=[b"\5"])
    found: list[Any] = []
    cursor = None
    while True:
        page = world.call("streams_get_chunks", run_id=run, name="s", limit=2, cursor=cursor)
        found += page["data"]
        assert page["done"] is False
        if not page["hasMore"]:
            break
        cursor = page["cursor"]
    assert found == [{"index": number, "data": bytes([number])} for number in range(6)]
    world.call("streams_close", run_id=run, name="s")
    assert world.call("streams_get_chunks", run_id=run, name="s", limit=1000)["done"] is True
    assert world.call("streams_get_info", run_id=run, name="s") == {"tailIndex": 5, "done": True}


def test_what_a_writer_did_not_know_is_reported(quick: World) -> None:
    run = quick.run(started=True)
    quick.step(run, "step_1")
    answer = quick.create(run, "step_created", "step_2", data={"stepName": "s"}, params={"eventCount": 2})
    assert [event["correlationId"] for event in answer["events"]] == ["step_1"]
    assert (answer["cursor"], answer["hasMore"]) == ("3", False)
    answer = quick.create(run, "step_created", "step_3", data={"stepName": "s"}, params={"eventCount": 4})
    assert "events" not in answer
    answer = quick.create(run, "step_started", "step_1", params={"sinceCursor": "3"})
    assert [event["eventType"] for event in answer["events"]] == ["step_created", "step_created", "step_started"]
    assert answer["cursor"] == "6"
    assert "events" not in quick.create(run, "run_started", params={"skipPreload": True})
