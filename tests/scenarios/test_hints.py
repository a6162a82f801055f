"""What another program does to the work of a runner reaches it by hints alone: fallback looks are switched off.

Each hint of the engine: tests/runtime/test_hints.py. Between processes: tests/cli/test_hints.py.
"""

from __future__ import annotations

import functools
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App
from holdfast.model.status import Status
from holdfast.runtime import claim as demand
from holdfast.runtime import hints as fallback
from holdfast.schedules.service import Scheduler

SCHEDULERS: list[Scheduler] = []  # those that look, newest last
PAUSED: list[frozenset[str]] = []  # what runners have heard of, newest last
PROMPT_SECONDS = patient(10.0)  # a hint takes milliseconds; without it, nothing happens for days


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor does the look that follows a claim, a second later, find anything: it follows at once."""
    monkeypatch.setattr(demand, "DOUBT_SECONDS", 0.05)
    monkeypatch.setattr(demand, "MAX_DOUBT_SECONDS", 0.05)
    fire_due = Scheduler.fire_due

    async def noted(self: Scheduler) -> bool:
        if self not in SCHEDULERS:
            SCHEDULERS.append(self)
        return await fire_due(self)

    pause = demand.Permit.pause

    def heard(self: demand.Permit, queues: frozenset[str]) -> None:
        pause(self, queues)
        PAUSED.append(queues)

    monkeypatch.setattr(Scheduler, "fire_due", noted)
    monkeypatch.setattr(demand.Permit, "pause", heard)
    monkeypatch.setenv(fallback.VARIABLE, "off")  # which each app reads
    yield
    SCHEDULERS.clear()
    PAUSED.clear()
    fallback.switch(None)


class Two:
    """A program with a runner, and another one that only gives orders."""

    def __init__(self, url: str, path: Path) -> None:
        self.path = path
        self.working, self.other = App(url, name="shop"), App(url, name="shop")
        self.add = [app.task(name="add")(_add) for app in (self.working, self.other)][1]

    def hired(self) -> AbstractContextManager[object]:
        self.working.task(name="narrow")(lambda: None)
        return self.working.runner()

    def are_quiet(self) -> None:
        """Nobody looks any more."""
        time.sleep(0.3)
        eventually(lambda: any(_rests(each) for each in SCHEDULERS), "the services have looked", seconds=PROMPT_SECONDS)

    def is_done(self, id: str) -> bool:
        return self.other.invocation(id).status is Status.SUCCESS

    def ended(self) -> int:
        return len(self.other.archive(status="success", limit=100))


def _rests(scheduler: Scheduler) -> bool:
    return scheduler._app == "shop" and scheduler._look_at > scheduler._monotonic() + 60.0


def _add(a: int, b: int = 0) -> int:
    return a + b


Case = Callable[[Two], Callable[[], object]]


def _woken(two: Two) -> Callable[[], object]:
    """The runner's code cannot take it, nor can it when it is woken."""
    made = two.other.task(name="narrow")(_add).submit(1, 2)

    def parked() -> int:
        return [line.status for line in made.history()].count(Status.PARKED)

    eventually(lambda: parked() == 1, "it is parked", seconds=PROMPT_SECONDS)
    two.are_quiet()
    made.wake()
    return lambda: parked() == 2


def _rerun(two: Two) -> Callable[[], object]:
    first = two.add.submit(1, 2)
    assert first.result(PROMPT_SECONDS) == 3
    two.are_quiet()
    again = first.rerun()
    return lambda: two.is_done(again.id)


def _resumed_queue(two: Two) -> Callable[[], object]:
    two.other.queues.pause("default")
    eventually(lambda: PAUSED and "default" in PAUSED[-1], "the runner has heard", seconds=PROMPT_SECONDS)
    two.are_quiet()  # with claims that had begun before
    made = two.add.submit(1, 2)
    two.are_quiet()
    assert not two.is_done(made.id)
    two.other.queues.resume("default")
    return lambda: two.is_done(made.id)


def _resumed_schedule(two: Two) -> Callable[[], object]:
    two.other.schedules.create("s", two.add, [1, 2], every="1s", paused=True)
    two.are_quiet()
    two.other.schedules.resume("s")
    return lambda: two.other.schedules.get("s").progress.fired


def _changed_schedule(two: Two) -> Callable[[], object]:
    two.other.schedules.create("s", two.add, [1, 2], at=time.time() + 3600)  # every="1h" may be due in a moment
    two.are_quiet()
    two.other.schedules.update("s", every="1s")
    return lambda: two.other.schedules.get("s").progress.fired


def _run_now(two: Two) -> Callable[[], object]:
    two.other.schedules.create("s", two.add, [1, 2], every="1h")
    made = two.other.schedules.run_now("s")
    return lambda: two.is_done(made.id)


def _transaction(two: Two) -> Callable[[], object]:
    with sqlite3.connect(two.path) as connection:
        made = two.add.options(session=connection).submit(1, 2)
        connection.commit()
    connection.close()
    return lambda: two.is_done(made.id)


CASES: dict[str, Case] = {
    "one that is woken": _woken,
    "one of a transaction": _transaction,
    "a rerun": _rerun,
    "a queue that is resumed": _resumed_queue,
    "a schedule that is resumed": _resumed_schedule,
    "a schedule that is changed": _changed_schedule,
    "a schedule that is run now": _run_now,
}


@pytest.mark.parametrize("what", CASES)
def test_a_runner_hears_at_once_of(what: str, tmp_path: Path) -> None:
    two = Two(f"sqlite:///{tmp_path}/shop.db", tmp_path / "shop.db")
    with two.working, two.other, two.hired():
        assert two.add.submit(0).result(PROMPT_SECONDS) == 0
        two.are_quiet()
        eventually(CASES[what](two), what, seconds=PROMPT_SECONDS)


SUBMITS_AND_ENDS = """
import os, sys
from holdfast import App
app = App(sys.argv[1], name="shop")
add = app.task(name="add")(lambda a, b: a + b)
for _ in sys.stdin:
    if (worker := os.fork()) == 0:
        print(add.submit(1, 2).id, flush=True)
        os._exit(0)
    os.waitpid(worker, 0)
"""


def test_a_process_may_end_right_after_its_submit(tmp_path: Path) -> None:
    """As a forked web worker does: nothing of it is left that could send a hint later."""
    url = f"sqlite:///{tmp_path}/shop.db"
    two = Two(url, tmp_path)
    with two.working, two.other, two.hired():
        two.add.submit(0, 0).result(PROMPT_SECONDS)
        program = subprocess.Popen(
            [sys.executable, "-c", SUBMITS_AND_ENDS, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with program as master:
            assert master.stdin is not None
            assert master.stdout is not None
            for _ in range(6):
                two.are_quiet()
                master.stdin.write("\n")
                master.stdin.flush()
                id = master.stdout.readline().strip()
                eventually(functools.partial(two.is_done, id), "it is done", seconds=PROMPT_SECONDS)
            master.stdin.close()
