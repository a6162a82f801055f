"""What a task costs in commands. Few round trips are the whole secret of a quick store, and they can be counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from benchmarks.commands import CommandCounter
from benchmarks.mongo import idle
from msgspec.structs import replace
from tests.store.mongo.tools import database_of, until
from tests.support.patience import patient

from holdfast import App
from holdfast.fleet.services import Duty, Services
from holdfast.runtime import limits, settle, worker, worker_duties
from holdfast.runtime.claim import Permit
from holdfast.runtime.engine import Engine
from holdfast.schedules import declared as core
from holdfast.schedules import service as schedules
from holdfast.schedules.service import Scheduler
from holdfast.settings import Settings
from holdfast.store.mongo.hints import StreamHints
from holdfast.triggers import service as triggers

pytestmark = [pytest.mark.xdist_group("mongo")]


def test_a_lone_task_takes_six_commands_from_submit_to_result(mongo_url: str) -> None:
    rounds = []
    # What is periodic depends on time and not on work: on a slow machine it would fall into each round.
    with App(mongo_url, atomic_service_check_interval_minutes="10m", poll_interval_seconds=60) as app:
        echo = app.task(name="echo")(echoed)
        with app.runner():
            echo.submit(0).result(timeout=patient(60))
            until(lambda: hints_of(app).trust, what="the change stream is open")
            for number in range(7):
                with CommandCounter(database_of(mongo_url)) as sent:
                    assert echo.submit(number).result(timeout=patient(10)) == number
                    until(lambda: all_hints_are_out(app), what="the last hint, which may come after the result")
                rounds.append(sent.for_tasks)
    cheapest = min(rounds, key=lambda sent: sent.total())
    assert cheapest.total() <= 6, cheapest
    # On a busy machine a caller reads once before there is a result; that is all that chance may add to most of them.
    assert sorted(sent.total() for sent in rounds)[len(rounds) // 2] <= 7, rounds


@pytest.mark.slow
def test_a_thousand_mapped_tasks_take_less_than_half_a_command_each(mongo_url: str) -> None:
    count, left, done = 1000, iter(range(999)), threading.Event()

    with App(mongo_url) as app:

        @app.task(name="count")
        def count_down(number: int) -> None:
            if next(left, None) is None:
                done.set()

        with CommandCounter(database_of(mongo_url)) as sent:
            count_down.map(range(count))
            with app.runner():
                assert done.wait(30)
        assert len(app.invocations(status="success", limit=count + 1)) == count
    assert sent.for_tasks.total() < 0.5 * count, sent.for_tasks


ENDS = 0.8  # commands: core tasks fall into a short measurement once more or once less; a minute is in `make faults`
FASTER = 4  # than by the default settings, so all that is periodic is


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(worker, "DISCOVERY_SECONDS", worker.DISCOVERY_SECONDS / FASTER)
    monkeypatch.setattr(worker_duties, "AUDIT_SECONDS", worker_duties.AUDIT_SECONDS / FASTER)
    monkeypatch.setattr(settle, "IDLE_SECONDS", settle.IDLE_SECONDS / FASTER)
    monkeypatch.setattr(limits, "FOREIGN_SECONDS", limits.FOREIGN_SECONDS / FASTER)
    monkeypatch.setattr(triggers, "_LOOK_SECONDS", triggers._LOOK_SECONDS / FASTER)
    monkeypatch.setattr(core, "_LOOK_SECONDS", core._LOOK_SECONDS / FASTER)
    monkeypatch.setitem(Scheduler.__init__.__kwdefaults__, "look_seconds", schedules.LOOK_SECONDS / FASTER)
    make = Services.__init__

    def services(self: Services, engine: Engine, permit: Permit, runner_id: str, duties: Sequence[Duty]) -> None:
        make(
            self,
            engine,
            permit,
            runner_id,
            [replace(duty, every_seconds=duty.every_seconds / FASTER) for duty in duties],
        )

    monkeypatch.setattr(Services, "__init__", services)
    names = ("poll_interval_seconds", "runner_heartbeat_seconds", "atomic_service_check_interval_minutes")
    return {name: getattr(Settings(), name) / FASTER for name in names}


def idle_commands(app: App, url: str, settings: dict[str, float]) -> float:
    """What is sent in a second of the default settings while nothing happens."""
    until(lambda: all_hints_are_out(app))
    until(lambda: hints_of(app).trust, what="the change stream is open")
    cycle_seconds = hints_of(app).trust * settings["poll_interval_seconds"]
    with CommandCounter(database_of(url)) as sent:
        time.sleep(2 * cycle_seconds)  # the measurement itself
    assert ("find", "holdfast_invocations") in sent.all, "it has looked by itself"
    return sent.all.total() / (2 * cycle_seconds * FASTER)


@pytest.mark.slow
def test_an_idle_runner_that_performs_the_services_sends_at_most_four_commands_per_second(
    mongo_url: str, quick: dict[str, float]
) -> None:
    """And one beside it, that does not, at most two more: it beats, looks for pauses, and looks for work."""
    crons = dict.fromkeys((f"recover_{what}_invocations_cron" for what in ("pending", "running")), "*/4 * * * * *")
    with App(mongo_url, **quick, **crons, atomic_service_max_members=1) as first:
        first.task(name="echo")(echoed)
        with first.runner():
            first.get_task("echo").submit(1).result(timeout=patient(10))
            alone = idle_commands(first, mongo_url, quick)
            assert alone <= 4 + ENDS, alone
            with App(mongo_url, **quick, **crons, atomic_service_max_members=1) as second:
                second.task(name="echo")(echoed)
                with second.runner():
                    both = idle_commands(second, mongo_url, quick)
    assert both <= 6 + ENDS, (alone, both)  # core tasks fall into the one measurement or the other


@pytest.mark.faults
def test_an_idle_runner_in_its_turn_sends_at_most_four_commands_per_second_over_a_minute(new_url: str) -> None:
    """By the intervals that users have, all that looks every few seconds included."""
    seconds = 60.0
    assert idle(new_url, seconds).total() / seconds <= 4


def hints_of(app: App) -> StreamHints:
    engine = app.runtime.run(app.runtime.engine())
    hints = engine.store.hints()
    assert isinstance(hints, StreamHints)
    return hints


def all_hints_are_out(app: App) -> bool:
    sender = hints_of(app)._sender
    return sender is None or sender.done()


def echoed(number: int) -> int:
    return number
