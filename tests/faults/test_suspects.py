"""Which work runs apart after a crash, and what becomes of it if it cannot be run there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.faults import tasks
from tests.support.engines import make_runner
from tests.support.fleet import Fleet, Line, Member, definition, virtually
from tests.support.patience import patient

from holdfast import App
from holdfast.codec import Codec
from holdfast.executors.call import Call, Returned, Unfit
from holdfast.executors.declared import Program
from holdfast.executors.local import Deliver, Executor, InlineExecutor
from holdfast.model import changes
from holdfast.model.changes import apply_to
from holdfast.model.crashes import collateral, crashes_in_a_row, kills_in_a_row, last_crash
from holdfast.model.records import HistoryEntry, InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.execute import CROWDED_SECONDS, ISOLATED_SLOTS, Suspects

CRASH = (Status.RUNNING, Status.RUNNING_RECOVERY, Status.REROUTED, Status.PENDING)
CRASHED = (*CRASH, *CRASH, Status.RUNNING)
GIVEN_BACK = (Status.RUNNING, Status.KILLED, Status.REROUTED, Status.PENDING, Status.RUNNING)


def record(path: tuple[Status, ...] = CRASHED) -> InvocationRecord:
    history = [HistoryEntry(version=n, status=status, at=0.0, operation=str(n)) for n, status in enumerate(path, 1)]
    return InvocationRecord(
        id="one", app="a", task="t", arguments=b"", created_at=0, due_at=0, attempt=2, history=tuple(history)
    )


def declared(function: object, **options: object) -> tuple[TaskDefinition, Codec]:
    app = App("memory://", name="suspects")
    return app.task(**options)(function).definition, app.runtime.codec  # type: ignore[call-overload]


def test_what_has_crashed_twice_runs_apart_and_what_was_given_back_does_not() -> None:
    task, codec = declared(tasks.work, name="t")
    suspects = Suspects(codec, max_crashes=3)
    assert suspects.executor_for(record(), task) is ExecutorKind.ISOLATED
    assert suspects.executor_for(record((*CRASH, Status.RUNNING)), task) is ExecutorKind.THREAD
    assert suspects.executor_for(record(GIVEN_BACK), task) is ExecutorKind.THREAD


def killed(record: InvocationRecord, why: str) -> InvocationRecord:
    """It runs in a worker that is ended for this reason."""
    runs = replace(record, status=Status.RUNNING, owner="r/1", attempt=record.attempt + 1)
    return apply_to(changes.killed(runs, by="r", operation="k", at=1.0, why=why), runs)


def test_what_ran_beside_two_calls_past_their_time_runs_apart_and_is_not_charged() -> None:
    task, codec = declared(tasks.work, name="t")
    suspects = Suspects(codec, max_crashes=0)
    once = killed(record((Status.REGISTERED,)), collateral("its worker was killed"))
    assert once.reason == "its worker was killed; it ran beside that, and is not charged"
    assert suspects.executor_for(once, task) is ExecutorKind.THREAD
    drained = killed(killed(once, "its runner stopped before it was done"), "its runner stopped before it was done")
    assert suspects.executor_for(drained, task) is ExecutorKind.THREAD
    twice = killed(drained, collateral("its worker was killed"))
    assert (kills_in_a_row(twice.history), crashes_in_a_row(twice.history)) == (2, 0)
    assert suspects.executor_for(twice, task) is ExecutorKind.ISOLATED
    runs = replace(twice, status=Status.RUNNING, owner="r/1")
    assert last_crash(runs, 1, "its worker died") is None, "one crash is forgiven, and it had none"
    failed = HistoryEntry(version=99, status=Status.RETRY, at=2.0, operation="f")
    assert kills_in_a_row((*twice.history, failed)) == 0, "it has come to an end of its own"


def test_who_is_forgiven_less_is_suspected_sooner() -> None:
    task, codec = declared(tasks.work, name="t")
    once = record((*CRASH, Status.RUNNING))
    for max_crashes, place in ((0, ExecutorKind.ISOLATED), (1, ExecutorKind.ISOLATED), (2, ExecutorKind.THREAD)):
        assert Suspects(codec, max_crashes=max_crashes).executor_for(once, task) is place


def test_only_so_many_run_apart() -> None:
    task, codec = declared(tasks.work, name="t")
    suspects = Suspects(codec, max_crashes=3)
    for number in range(ISOLATED_SLOTS):
        assert suspects.executor_for(replace(record(), id=f"{number}"), task) is ExecutorKind.ISOLATED
    assert suspects.executor_for(record(), task) is None
    suspects.on_isolated_outcome("3", Returned(b""))
    assert suspects.executor_for(record(), task) is ExecutorKind.ISOLATED


def test_what_needs_its_worker_stays_there() -> None:
    def inner() -> None: ...

    task, codec = declared(tasks.work, name="t")
    nameless, codec = declared(inner, name="t")
    assert Suspects(codec, max_crashes=3).executor_for(record(), nameless) is ExecutorKind.THREAD
    stranger = replace(task, name="another")
    assert Suspects(codec, max_crashes=3).executor_for(record(), stranger) is ExecutorKind.THREAD
    own, codec = declared(tasks.await_release, name="t", executor="process")
    assert Suspects(codec, max_crashes=3).executor_for(record(), own) is ExecutorKind.PROCESS


@pytest.mark.parametrize(("program", "kind"), [(None, ExecutorKind.THREAD), ("shop.py", ExecutorKind.ISOLATED)])
def test_a_task_of_the_program_itself_stays_there_only_if_that_is_a_prompt(
    monkeypatch: pytest.MonkeyPatch, program: str | None, kind: ExecutorKind
) -> None:
    task, codec = declared(tasks.work, name="t")
    monkeypatch.setattr(tasks.work, "__module__", "__main__")
    found = None if program is None else Program("", program)
    monkeypatch.setattr("holdfast.executors.declared.this_program", lambda: found)
    assert Suspects(codec, max_crashes=3).executor_for(record(), task) is kind


PROGRAM = """
import os, sys
from holdfast import App
from holdfast.errors import WorkerLost

app = App("sqlite:///shop.db", runner_heartbeat_seconds=0.05, runner_considered_dead_after_minutes=0.01)

@app.task
def poison() -> None:
    os._exit(3)

if __name__ == "__main__":
    with app.runner(concurrency=1):
        try:
            poison.options(key="one").submit().result(timeout=60)
        except WorkerLost as error:
            print("the program goes on:", error)
"""


@pytest.mark.slow
def test_a_poison_pill_of_the_program_itself_does_not_end_it_for_ever(tmp_path: Path) -> None:
    """It crashes the program twice, and then the process in which it is isolated."""
    (tmp_path / "shop.py").write_text(PROGRAM)

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "shop.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60), check=False)

    assert [run().returncode, run().returncode] == [3, 3]
    third = run()
    assert third.returncode == 0, third.stderr
    assert "the program goes on:" in third.stdout


def test_what_cannot_begin_elsewhere_comes_home_once() -> None:
    task, codec = declared(tasks.work, name="t")
    suspects = Suspects(codec, max_crashes=3)
    assert suspects.executor_for(record(), task) is ExecutorKind.ISOLATED
    assert suspects.on_isolated_outcome("one", Unfit("it cannot be imported here"))
    assert suspects.executor_for(record(), task) is ExecutorKind.THREAD
    assert not suspects.on_isolated_outcome("one", Unfit("its arguments do not fit"))
    assert suspects.executor_for(record(), task) is ExecutorKind.ISOLATED
    assert not suspects.on_isolated_outcome("one", Returned(b""))


class Nowhere(InlineExecutor):
    """A place whose processes cannot find the task."""

    asked: list[str] = []

    def __init__(self, deliver: Deliver) -> None:
        super().__init__(deliver)
        self._say = deliver

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self.asked.append(call.key)
            asyncio.get_running_loop().call_soon(self._say, [(call.key, Unfit("it cannot be imported here"))])


def test_a_suspect_that_no_other_process_can_find_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspects, "_can_be_found", lambda self, task: True)
    monkeypatch.setattr(Nowhere, "asked", [])

    def places(place: ExecutorKind, deliver: Deliver) -> Executor:
        return Nowhere(deliver) if place is ExecutorKind.ISOLATED else InlineExecutor(deliver)

    def add(x: int, y: int) -> int:
        return x + y

    async def scenario(fleet: Fleet) -> None:
        engine = fleet.engine(fleet.store)
        member = Member(
            engine,
            Line(fleet.store),
            lambda: make_runner(
                engine,
                [definition(add)],
                concurrency=1,
                drain_timeout_seconds=1.0,
                make_executor=places,
            ),
        )
        crashed = replace(fleet.new("add", 1, 2), attempt=2)
        await fleet.store.insert([replace(crashed, history=(*crashed.history, *_past()), status=Status.REROUTED)])
        await member.start()
        ended = await fleet.end(crashed.id)
        assert (ended.status, ended.attempt) == (Status.SUCCESS, 3)
        assert Nowhere.asked == [crashed.id]
        assert (await member.stop()).started == 1

    virtually(scenario)


def test_for_whom_there_is_no_room_waits_in_the_queue_and_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    room: list[ExecutorKind | None] = [None, ExecutorKind.LOOP]
    monkeypatch.setattr(Suspects, "executor_for", lambda self, record, task: room.pop(0))

    async def add(x: int, y: int) -> int:
        return x + y

    async def scenario(fleet: Fleet) -> None:
        member = fleet.member(add)
        crashed = replace(fleet.new("add", 1, 2), attempt=2)
        await fleet.store.insert([replace(crashed, history=(*crashed.history, *_past()), status=Status.REROUTED)])
        began = fleet.clock.now()
        await member.start()
        ended = await fleet.end(crashed.id)
        assert (ended.status, ended.attempt, room) == (Status.SUCCESS, 3, [])
        assert CROWDED_SECONDS <= fleet.clock.now() - began < CROWDED_SECONDS + 2
        assert [entry.why for entry in ended.history if entry.status is Status.REROUTED][-1].startswith(
            "all processes for isolated calls"
        )
        assert (await member.stop()).started == 1

    virtually(scenario)


def _past() -> list[HistoryEntry]:
    path = (Status.PENDING, Status.RUNNING, Status.RUNNING_RECOVERY, Status.REROUTED) * 2
    return [HistoryEntry(version=n, status=status, at=0.0, operation=f"{n}") for n, status in enumerate(path, 2)]
