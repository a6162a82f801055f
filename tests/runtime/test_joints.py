"""Every fake in the tests of the engine, and where the same joint is tested with the real part.

A part that is tested against a fake of its neighbour is not tested where it breaks: ``overlap="cancel"`` never
cancelled anything, and the scheduler's own tests were content, since the canceller in them was a fake. Whoever adds a
fake adds a line here, and a test with the real part if there is none.

| fake | in | stands for | with the real part |
|---|---|---|---|
| `Asked` | schedules/test_service | `Canceller`, by the scheduler | scenarios/test_overlaps |
| `Scheduler` without `emit` | schedules/test_service | `Events.emit`, for ticks among other conditions |
  scenarios/test_triggers: test_a_tick_can_be_one_of_what_has_to_happen |
| `look_soon()`, `Hub.trust` set by hand | schedules/test_service | `Hub.on_schedules`, a channel of hints | here: J1 |
| `Shaky`, `Flaky`, `FlakyApply`, `Picky`, `Full`, `Counting`, `WithNewcomer`, `_Yielding` | engine | a store that
  loses replies or is changed meanwhile | failover/*, store/mongo/test_lost_replies, faults/* (real servers, proxies) |
| `Costly` | runtime/test_claiming_ahead | a store whose claims are dear: MongoDB | here: J2 |
| `Removing` | archive/test_retention | a store that removes by itself: MongoDB | store/mongo/test_archive |
| `Line` | support/fleet | the network between a runner and its store | cli/test_outages, failover/*, faults/* |
| `VirtualClock`, `StillClock`, `FakeClock` | engine, testing | time | test_clock, faults/test_clocks, every scenario |
| `InlineExecutor` as the place of user code | support/fleet, runtime/test_worker | threads, loops and processes |
  scenarios/test_submit_to_result, scenarios/test_time_limits, scenarios/test_processes_and_threads |
| `Unlimited` | runtime/test_worker, testing/harness | `Permit` | fleet/test_runner, faults/test_zombies |
| duties made of a counter | fleet/test_services | `path_duties` and the features' duties | here: J3;
  runtime/test_expiry, archive/test_retention, runtime/test_limits, scenarios/test_triggers |
| `DEAF`, `OVER` and the other scripts | fleet/test_supervisor | ``holdfast worker`` |
  cli/test_supervisor: test_who_keeps_the_interpreter_is_not_dead_and_a_runner_obeys_the_roster; cli/test_worker_lives |
| `Hub()` without a channel | schedules/test_service, runtime/test_worker | hints between processes |
  store/mongo/test_wakeups, store/sqlite/test_processes, here: J1 |
| `Rig._deliver` | executors/test_processes | the worker that outcomes are delivered to |
  scenarios/test_cancelling, scenarios/test_time_limits and scenarios/test_retries, with ``executor="process"`` |
| `Starting` | cli/test_run | `EmbeddedRunner.request_stop` | cli/test_run: test_the_first_signal_lets_work_end,
  test_the_second_signal_ends_it_and_the_work_goes_back; cli/test_supervisor: test_a_stop_while_the_workers_start_… |
| `_until_stopped` replaced | cli/test_run | a runner's whole life | cli/test_run: the tests that `start("run")` |
| `wait_for_result` replaced | cli/test_submit | a runner that ends the call |
  cli/test_run: test_submitted_work_is_done_by_another_process, cli/test_queues |
| `time_of` replaced | cli/roster, cli/test_schedules | the store's clock | cli/test_supervisor: shop.roster() |
| `_Terminal`, `sys.stdin` replaced | cli/test_archive, cli/test_schedules | a person at a terminal | none: a pipe and
  a terminal differ in `isatty` alone, which is what the fake answers |
| `StageStore`, `StageTransaction` | testing | a user's database | scenarios/test_transactions, scenarios/test_emitting:
  the same calls on SQLite and MongoDB |
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.engines import More
from tests.support.fleet import APP, Fleet, add, virtually

from holdfast import App
from holdfast.fleet.runner import path_duties
from holdfast.fleet.services import Duty
from holdfast.model.records import Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.runtime.payloads import UNWANTED_SECONDS
from holdfast.schedules.service import Scheduler

mongo = pytest.mark.xdist_group("mongo")


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_the_tests_of_the_table_are_there() -> None:
    tests, named = Path(__file__).parents[1], __doc__ or ""
    files = {tests / f"{name}.py" for name in re.findall(r"(?:\w+/)+test_\w+", named)}
    assert len(files) > 20
    assert [str(file) for file in sorted(files) if not file.exists()] == []
    there = "".join(file.read_text() for file in tests.rglob("test_*.py"))
    assert [name for name in re.findall(r"\btest_\w{25,}", named) if f"def {name}" not in there] == []


# --- J1: the scheduler and the hints of other processes


@pytest.mark.parametrize("where", ["sqlite", pytest.param("mongodb", marks=[mongo, pytest.mark.faults])])
def test_a_schedule_that_another_process_makes_is_seen_by_its_hint(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler looks every five minutes by itself, so only the hint can tell it so soon."""
    defaults: Any = Scheduler.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "look_seconds", 300.0)
    looks, fire_due = list[bool](), Scheduler.fire_due

    async def noted(self: Scheduler) -> bool:
        answer = await fire_due(self)
        if self._app == "shop":  # there is one more, for core tasks
            looks.append(answer)
        return answer

    monkeypatch.setattr(Scheduler, "fire_due", noted)
    url = f"sqlite:///{tmp_path}/shop.db" if where == "sqlite" else request.getfixturevalue("mongo_url")
    with App(url, name="shop") as working, App(url, name="shop") as other:
        tasks = [app.task(name="tick")(lambda: None) for app in (working, other)]
        other.invocations()
        with working.runner():
            until(lambda: looks, "the services have looked once")
            other.schedules.create("often", tasks[1], every="1s")
            until(lambda: other.schedules.get("often").progress.fired, "a tick", 10.0)


# --- J2: work that is claimed ahead, and the store that makes it worth while


@mongo
def test_on_mongodb_work_is_claimed_ahead_and_started_later(mongo_url: str) -> None:
    with App(mongo_url, name="shop") as app:

        @app.task(name="quick")
        async def quick(number: int) -> int:
            await asyncio.sleep(0.03)  # shorter ones are marked as running ahead
            return number

        with app.runner(concurrency=4):
            group = quick.map(range(100))
            assert group.results(60) == list(range(100))
        records = app.invocations(task="quick", limit=1000)
        ahead = [record for record in records if record.history[1].operation != record.history[2].operation]
        assert ahead, "none was reserved first"
        for record in ahead:
            assert [line.status for line in record.history] == [
                Status.REGISTERED,
                Status.PENDING,
                Status.RUNNING,
                Status.SUCCESS,
            ]
            assert record.attempt == record.epoch == 1


# --- J3: the duties that an engine puts together, performed by a runner


def test_a_runner_performs_every_duty_of_its_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duty that fails is logged and left for the next time, so whether one works is seen by what it has done."""

    async def scenario(fleet: Fleet) -> None:
        payload, now = StoredPayload(digest="d", size=1, pieces=1, first=Piece(b"x")), fleet.clock.now()
        await fleet.store.put_payloads(APP, [payload])
        fleet.store._payloads[APP, "d"] = (now - UNWANTED_SECONDS - 1, payload)
        member, performed = fleet.member(add), set[str]()

        def watched(duty: Duty) -> Duty:
            async def perform() -> bool | None:
                answer = await duty.perform()
                performed.add(duty.name)
                return bool(answer)

            return replace(duty, perform=perform)

        runner = member.runner
        own = path_duties(runner._engine, runner._definitions)
        monkeypatch.setattr("holdfast.fleet.runner.path_duties", lambda *known: [watched(duty) for duty in own])
        core, *features = runner._features
        duties = [duty for feature in features for duty in feature.duties()]
        names = [duty.name for duty in (*duties, *own)]
        runner._features = (core, More(*[watched(duty) for duty in duties]))
        await member.start()
        await asyncio.sleep(130)  # two cycles of the services
        schedules = ["schedules", "declared schedules", "triggers", "declared triggers", "retention"]
        assert names == [*schedules, "expiry", "limits", "payloads"]
        assert performed == set(names)
        assert await fleet.store.get_payload(APP, "d") is None

    virtually(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
