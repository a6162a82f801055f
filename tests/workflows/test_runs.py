"""The life of a run in a real runner: its time limit, slots, messages, and what others see of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.settings import SETTINGS
from tests.support.patience import patient
from tests.workflows import branches
from tests.workflows.test_replaying import replay

from holdfast import App, InvocationCancelled, Status, TimedOut, context, on_event, on_result
from holdfast.errors import CorruptRecord, NotEncodable, StoreError
from holdfast.model import parking
from holdfast.model.changes import NoteUpdate
from holdfast.model.records import InvocationRecord
from holdfast.retries import Fixed
from holdfast.runtime.worker import Worker
from holdfast.store.sqlite.store import SqliteStore
from holdfast.triggers import from_event, from_result
from holdfast.triggers.outbox import TriggerOutbox
from holdfast.workflows import executor as executor_module
from holdfast.workflows.api import sleep
from holdfast.workflows.attempts import Attempts
from holdfast.workflows.executor import WorkflowExecutor
from holdfast.workflows.host import Host, Mailbox
from holdfast.workflows.life import current_life
from holdfast.workflows.run import Run

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store: SQLite unless a test is parametrized with another one."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield f"sqlite:///{tmp_path / 'runs.db'}"
    else:
        yield request.getfixturevalue("mongo_url")


on_both_stores = pytest.mark.parametrize("url", ["sqlite", "mongodb"], indirect=True)


def make_app(url: str, **settings: Any) -> App:
    return App(url, name="runs", **{"poll_interval_seconds": 0.1, **settings})


def pages_of(app: App, run: Any, generation: int = 0) -> list[Any]:
    async def read() -> list[Any]:
        engine = await app.runtime.engine()
        return list(await engine.store.read_log(app.name, run.id, generation=generation, limit=1000))

    return app.runtime.run(read())


class Crowd:
    """Count how many pieces of user code run at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.now -= 1


# --- time limits


@on_both_stores
def test_a_timeout_ends_a_run_that_sleeps(url: str) -> None:
    app = make_app(url, workflow_linger_seconds=0.1)

    @app.workflow(timeout=1.5)
    async def nap() -> None:
        await sleep(60)

    with app, app.runner():
        run = nap.submit()
        with pytest.raises(TimedOut, match="timed out after"):
            run.result(patient(20))
        record = run.record()
        assert record.status is Status.FAILED
        assert [entry.status for entry in record.history].count(Status.SUSPENDED) == 1
        assert [event.type for event in run.events()].count("cancel_requested") == 1


def test_the_grace_after_a_timeout_counts_from_its_record(url: str, until: Until) -> None:
    app = make_app(url)

    @app.workflow(timeout=0.5, cancel_grace=3.0)
    async def stubborn() -> None:
        try:
            await sleep(60)
        finally:
            await sleep(60)

    def asked_at() -> float | None:
        return next((event.at for event in run.events() if event.type == "cancel_requested"), None)

    with app:
        with app.runner():
            run = stubborn.submit()
            until(asked_at)
        asked = asked_at()
        assert asked is not None
        until(lambda: time.time() > asked + 2)  # the next owner does not begin to count anew
        with app.runner():
            with pytest.raises(TimedOut):
                run.result(patient(20))
        assert 2.9 <= run.record().changed_at - asked < 4.5


# --- lives of a run in one worker


def test_the_end_of_a_life_does_not_reach_the_next_one(url: str, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker claims the run again before it has heard that its last life there was suspended."""
    app = make_app(url, workflow_linger_seconds=0.1)
    late: list[Callable[[], object]] = []
    begun: list[str] = []
    to_run, begin = WorkflowExecutor.to_run, Host.begin

    def delayed(self: WorkflowExecutor, key: str, do: Callable[[Run], object]) -> None:
        if do is Run.let_go and not late:
            late.append(lambda: to_run(self, key, do))
        else:
            to_run(self, key, do)

    def noted(self: Host, call: Any, task: Any, loaded: Any) -> None:
        begin(self, call, task, loaded)
        begun.append(call.key)
        if len(begun) == 2:
            late[0]()

    monkeypatch.setattr(WorkflowExecutor, "to_run", delayed)
    monkeypatch.setattr(Host, "begin", noted)

    @app.step
    async def charge() -> str:
        await asyncio.sleep(0.3)
        return "done"

    @app.workflow
    async def order() -> str:
        await sleep(3600)
        return await charge()

    with app, app.runner(concurrency=4):
        run = order.submit()
        until(lambda: late)
        run.wake()
        assert run.result(patient(10)) == "done"
        assert len(begun) == 2
        assert Status.RUNNING_RECOVERY not in [entry.status for entry in run.record().history]


def test_a_look_at_a_run_that_is_being_suspended_does_not_suspend_it_twice(
    url: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(url, workflow_linger_seconds=0.1)
    monkeypatch.setattr(executor_module, "_LOOK_SECONDS", 0.02)
    writes: list[str] = []
    looks: list[str] = []
    apply, take_record = TriggerOutbox.apply, Run.take_record

    async def slow(self: TriggerOutbox, wanted: Any) -> Any:
        if any(change.name == "suspended" for _, change in wanted):
            writes.append("suspended")
            await asyncio.to_thread(until, lambda: len(looks) >= 3)
        return await apply(self, wanted)

    def looked(self: Run, record: InvocationRecord, **named: Any) -> None:
        looks.append(record.id)
        take_record(self, record, **named)

    monkeypatch.setattr(TriggerOutbox, "apply", slow)
    monkeypatch.setattr(Run, "take_record", looked)

    @app.workflow
    async def nap() -> None:
        await sleep(3600)

    with app, app.runner():
        run = nap.submit()
        until(lambda: run.status is Status.SUSPENDED)
        assert writes == ["suspended"]


# --- restart


def test_restart_in_a_cancelled_body_ends_the_run(url: str, until: Until) -> None:
    app = make_app(url, workflow_linger_seconds=30)

    @app.workflow
    async def forever() -> None:
        try:
            await sleep(20)
        finally:
            context().restart()

    with app, app.runner():
        run = forever.submit()
        until(lambda: run.status is Status.RUNNING)
        run.cancel()
        with pytest.raises(InvocationCancelled):
            run.result(patient(10))
        assert run.status is Status.CANCELLED


@on_both_stores
def test_a_run_that_restarts_keeps_two_generations_of_its_log(url: str) -> None:
    app = make_app(url)

    @app.step
    async def work(n: int) -> int:
        return n

    @app.workflow
    async def counting(n: int) -> int:
        await work(n)
        if n < 4:
            context().restart(n + 1)
        return n

    with app, app.runner():
        run = counting.submit(0)
        assert run.result(patient(20)) == 4
        assert [bool(pages_of(app, run, generation)) for generation in range(5)] == [False, False, False, True, True]
        assert {event.generation for event in run.events() if event.type == "step_completed"} == {3, 4}


# --- many events


def test_repeatable_steps_cost_the_same_however_many_there_were(tmp_path: Path) -> None:
    app = make_app(f"sqlite:///{tmp_path / 'many.db'}")

    @app.step(repeatable=True)
    async def look(n: int) -> int:
        return n

    @app.workflow
    async def looking(count: int) -> int:
        for n in range(count):
            await look(n)
        return count

    def seconds(count: int) -> float:
        began = time.perf_counter()
        run = looking.submit(count)
        assert run.result(patient(60)) == count
        assert all(page.last - page.first < 1000 for page in pages_of(app, run))
        return time.perf_counter() - began

    with app, app.runner():
        few = min(seconds(1000) for _ in range(3))
        assert min(seconds(8000) for _ in range(2)) < 8 * few * 3  # it was 30 times as much and more


# --- children


@on_both_stores
def test_more_children_than_an_inbox_has_room_for(url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(url)

    @app.workflow
    async def leaf(n: int) -> int:
        return n

    @app.workflow
    async def tree(count: int) -> int:
        return sum(await asyncio.gather(*[leaf(n) for n in range(count)]))

    with caplog.at_level(logging.WARNING), app, app.runner(concurrency=50):
        run = tree.submit(1200)
        assert run.result(patient(60)) == sum(range(1200))
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == []


def test_the_end_of_a_large_child_is_not_lost_while_it_is_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not suspend between reading a message and writing it into its log."""
    app = make_app(url, workflow_linger_seconds=0.05)
    fetch = WorkflowExecutor.fetch

    def slow(self: WorkflowExecutor, *given: Any) -> None:
        asyncio.get_running_loop().call_later(0.5, lambda: fetch(self, *given))

    monkeypatch.setattr(WorkflowExecutor, "fetch", slow)

    @app.task
    async def large() -> bytes:
        await asyncio.sleep(0.3)
        return b"x" * 3_000_000

    @app.workflow
    async def parent() -> int:
        return len(await large.submit())

    with app, app.runner():
        assert parent.submit().result(patient(20)) == 3_000_000


# --- what others see


@on_both_stores
def test_attributes_are_in_the_invocation_while_a_run_runs_and_when_it_has_ended(url: str, until: Until) -> None:
    app = make_app(url)
    go_on = threading.Event()

    @app.step
    def hold() -> None:
        go_on.wait(20)

    @app.workflow
    async def order() -> None:
        context().set(stage="packed")
        await hold()
        context().set(stage="sent")

    def attributes(run: Any) -> dict[str, str]:
        return dict(run.record().attributes)

    with app, app.runner():
        run = order.submit()
        until(lambda: attributes(run) == {"stage": "packed"})
        assert run.status is Status.RUNNING
        go_on.set()
        run.result(patient(20))
        assert attributes(run) == {"stage": "sent"}


# --- work that may not begin


def test_a_run_looks_once_a_second_whether_its_worker_may_start_work(
    url: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(url)
    hosts: list[Host] = []
    timers: list[float] = []
    is_cut_off = [True]
    monkeypatch.setattr(Worker, "is_cut_off", property(lambda self: is_cut_off[0]))
    begin, call_later = Host.begin, Host.call_later

    def noted(self: Host, *given: Any) -> None:
        hosts.append(self)
        begin(self, *given)

    def counted(self: Host, seconds: float, function: Any) -> Any:
        if seconds == 1.0:
            timers.append(seconds)
        return call_later(self, seconds, function)

    monkeypatch.setattr(Host, "begin", noted)
    monkeypatch.setattr(Host, "call_later", counted)

    @app.step
    async def charge() -> str:
        return "done"

    @app.workflow
    async def order() -> str:
        return await charge()

    with app, app.runner():
        run = order.submit()
        until(lambda: timers)
        done = threading.Event()

        def pump_often() -> None:
            for each in list(hosts[0]._runs.values()):
                for _ in range(50):
                    each.pump()
            done.set()

        hosts[0].inbox.post(pump_often)
        assert done.wait(5)
        assert len(timers) <= 2
        is_cut_off[0] = False
        assert run.result(patient(20)) == "done"


def test_a_run_whose_step_is_not_declared_here_is_parked(url: str, tmp_path: Path, until: Until) -> None:
    app, other = make_app(url), make_app(f"sqlite:///{tmp_path / 'other.db'}")

    @other.step(queue="gpu")
    async def render() -> None: ...

    @app.workflow
    async def film() -> None:
        await render()

    with app, app.runner():
        run = film.submit()
        until(lambda: run.status is Status.PARKED)
        assert "render is not declared in this worker" in run.record().reason


# --- slots


def test_bodies_that_go_on_wait_for_a_slot(url: str) -> None:
    """They wait in memory without a slot, all wake at once, and run their steps two at a time."""
    app = make_app(url, workflow_linger_seconds=30)
    crowd, waiting = Crowd(), Crowd()

    @app.step
    async def work() -> None:
        with crowd:
            await asyncio.sleep(0.05)

    @app.workflow
    async def nap() -> None:
        with waiting:
            await sleep(0.7)
        await work()

    with app, app.runner(concurrency=2):
        runs = [nap.submit() for _ in range(8)]
        for run in runs:
            run.result(patient(20))
    assert waiting.most > 2  # one that only waits holds no slot
    assert crowd.most == 2


def test_steps_side_by_side_share_the_slots_with_other_work(url: str) -> None:
    app = make_app(url)
    crowd = Crowd()

    @app.step
    async def work() -> None:
        with crowd:
            await asyncio.sleep(0.02)

    @app.step(at_most_once=True)
    def once() -> None:
        with crowd:
            time.sleep(0.02)

    @app.step(repeatable=True)
    async def look() -> None:
        with crowd:
            await asyncio.sleep(0.02)

    @app.task
    async def task() -> None:
        with crowd:
            await asyncio.sleep(0.02)

    @app.workflow
    async def wide() -> None:
        await asyncio.gather(*[work() for _ in range(10)], *[once() for _ in range(5)], *[look() for _ in range(10)])

    with app, app.runner(concurrency=4):
        runs = [wide.submit() for _ in range(3)]
        tasks = [task.submit() for _ in range(20)]
        for each in (*runs, *tasks):
            each.result(patient(20))
    assert 2 <= crowd.most <= 4


def test_a_plain_body_that_goes_on_waits_for_a_slot(url: str) -> None:
    app = make_app(url, workflow_linger_seconds=30)
    crowd = Crowd()

    @app.workflow(check=False)
    def nap() -> None:
        sleep(0.5)
        with crowd:
            time.sleep(0.05)

    with app, app.runner(concurrency=2):
        runs = [nap.submit() for _ in range(6)]
        for run in runs:
            run.result(patient(20))
    assert crowd.most == 2


def test_a_worker_has_no_more_bodies_in_memory_than_its_cache(
    url: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(url, workflow_linger_seconds=3, workflow_cache=3)
    most: list[int] = []
    begin = Host.begin

    def counted(self: Host, *given: Any) -> None:
        begin(self, *given)
        most.append(len(self._runs))

    monkeypatch.setattr(Host, "begin", counted)

    @app.workflow
    async def nap() -> None:
        await sleep(2)

    with app, app.runner(concurrency=10):
        runs = [nap.submit() for _ in range(9)]
        for run in runs:
            run.result(patient(30))
    assert max(most) <= 3
    assert len(most) > 9  # some of them were suspended


def test_a_worker_that_stops_lets_go_of_runs_that_wait_for_a_slot(url: str, until: Until) -> None:
    app = make_app(url, workflow_linger_seconds=30)
    go_on = threading.Event()

    @app.step
    async def work() -> str:
        return "done"

    @app.task
    def hold() -> None:
        go_on.wait(20)

    @app.workflow
    async def nap() -> str:
        await sleep(0.5)
        return await work()

    with app:
        with app.runner(concurrency=1):
            run = nap.submit()
            until(lambda: run.status is Status.RUNNING)
            blocked = hold.submit()
            until(lambda: blocked.status is Status.RUNNING)
            until(lambda: [event for event in run.events() if event.type == "wait_completed"])
            go_on.set()
        with app.runner(concurrency=1):
            assert run.result(patient(20)) == "done"
            blocked.result(patient(20))


# --- Python versions


def test_a_run_that_does_not_fit_another_python_is_woken_by_a_runner_of_its_own(
    url: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = parking.PYTHON, "3.99"
    called: list[str] = []

    def versioned(python: str, **options: Any) -> App:
        """The same code on a Python version that orders its calls in another way."""
        monkeypatch.setattr(parking, "PYTHON", python)
        app = make_app(url, workflow_linger_seconds=0.1)

        @app.step(name="first")
        async def first() -> None:
            called.append("first")

        @app.step(name="second")
        async def second() -> None:
            called.append("second")

        is_here = python == here

        @app.workflow(name="flow", **options)
        async def flow() -> str:
            await (first() if is_here else second())
            await sleep(3600)
            return "done"

        @app.task(name="ping")
        async def ping() -> None: ...

        return app

    def ping(app: App) -> None:
        """Wait until a runner has looked at parked work and does other work."""
        app.get_task("ping").submit().result(patient(20))

    with versioned(here) as app, app.runner():
        run = app.get_task("flow").submit()
        until(lambda: run.status is Status.SUSPENDED)
        id = run.id
    with versioned(there) as app, app.runner():
        run = app.invocation(id)
        run.wake()
        until(lambda: run.status is Status.PARKED)
        assert f"written on Python {here}, and this is {there}" in run.record().reason
    for options in ({}, {"priority": 3}):
        with versioned(there, **options) as app, app.runner():
            ping(app)
            assert app.invocation(id).status is Status.PARKED
    assert f"Python {here}" in parking.what_helps(app_record := _record_of(versioned(there), id))
    assert app_record.status is Status.PARKED
    with versioned(here) as app, app.runner():
        assert app.invocation(id).result(patient(20)) == "done"
    assert called == ["first"]


def _record_of(app: App, id: str) -> InvocationRecord:
    with app:
        return app.invocation(id).record()


@pytest.mark.parametrize("other", ["python 3.11 ", "python 3.11 a", "a"])
def test_a_run_that_is_parked_by_its_log_waits_for_its_own_python(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PYTHON", "3.12")
    assert parking.may_fit(other, "b") is (other == "a")
    assert parking.unfit_code("b", "3.11") == "python 3.11 "
    monkeypatch.setattr(parking, "PYTHON", "3.11")
    assert parking.may_fit(other, "b")
    assert parking.may_fit(other, "a") is (other == "python 3.11 ")
    assert parking.unfit_code("b", "3.11") == "python 3.11 b"


# --- crashes


@on_both_stores
def test_a_child_that_ends_before_its_parent_has_written_it_down(url: str, tmp_path: Path, until: Until) -> None:
    """The owner dies between the insert of the child and its page. The child ends before the parent is recovered."""
    name = f"branches-{tmp_path.name}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    settings = {f"HOLDFAST_{key.upper()}": value for key, value in SETTINGS.items()}
    crash = {"HOLDFAST_URL": url, "HOLDFAST_NAME": name, "HOLDFAST_CRASH_AT": "child.inserted"}
    app = App(url, name=name, **SETTINGS)
    parent, _ = branches.declare(app)
    with app:
        run = parent.submit(7)
        command = ["-m", "holdfast", "run", "tests.workflows.branches:app", "--workers", "0", "--queues", "default"]
        with (tmp_path / "runner.log").open("wb") as log:
            victim = subprocess.run(
                [sys.executable, *command],
                env=variables | settings | crash,
                stdout=log,
                stderr=log,
                timeout=patient(60),
            )
        assert victim.returncode == -signal.SIGKILL, (tmp_path / "runner.log").read_text()
        (stored,) = app.invocations(task="branch")
        child = app.invocation(stored.id)
        with app.runner(queues=["branches"]):
            assert child.result(patient(20)) == 14
        with app.runner():
            until(lambda: run.status is Status.SUSPENDED)
            run.wake()
            assert run.result(patient(20)) == 14
        calls = [event.type for event in run.events(correlation="branch#1")]
        assert calls == ["step_created", "step_completed"]
        assert run.step("branch#1").child == child.id


# --- values that cannot be stored


@on_both_stores
def test_a_body_may_set_large_data(url: str) -> None:
    app = make_app(url, workflow_linger_seconds=0.1)

    @app.step
    async def look() -> int:
        return len(context().data["large"])

    @app.workflow
    async def keeper() -> tuple[int, int]:
        context().data["large"] = b"x" * 17_000_000
        seen = await look()
        await sleep(0.5)
        return seen, len(context().data["large"])

    with app, app.runner():
        run = keeper.submit()
        assert run.result(patient(20)) == (17_000_000, 17_000_000)
        assert [entry.status for entry in run.record().history].count(Status.SUSPENDED) == 1
        assert [event.type for event in run.events()].count("data_set") == 1


@pytest.mark.parametrize("url", ["mongodb"], indirect=True)
def test_a_page_that_the_store_refuses_stops_no_other_run(url: str, until: Until) -> None:
    app = make_app(url, max_crash_recoveries=1)

    @app.step
    async def work() -> None:
        await asyncio.sleep(0.1)

    @app.workflow
    async def greedy() -> None:
        await work()
        life = current_life()
        assert life is not None
        life.patched("x" * 17_000_000)  # more than a document may have
        await work()

    @app.workflow
    async def modest() -> str:
        await work()
        await work()
        return "done"

    with app, app.runner():
        runs = [modest.submit(), greedy.submit(), modest.submit()]
        late = modest.submit()
        assert [run.result(patient(20)) for run in (runs[0], runs[2], late)] == ["done"] * 3
        until(lambda: runs[1].status is Status.FAILED)
        assert "(append)" in runs[1].record().reason[:2000]


@pytest.mark.parametrize("error", [StoreError, RuntimeError])
def test_a_refused_page_or_change_is_that_of_one_run(
    error: type[Exception], url: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """Pages of several runs are one write, and so are suspensions."""
    app = make_app(url, workflow_linger_seconds=0.1, max_crash_recoveries=0)
    bad: list[str] = []
    sizes: list[int] = []
    append, apply = SqliteStore.append, TriggerOutbox.apply

    async def appended(self: SqliteStore, pages: Any) -> Any:
        sizes.append(len(pages))
        if any(page.run == bad[0] for page in pages):
            raise error("too large")
        return await append(self, pages)

    async def applied(self: TriggerOutbox, wanted: Any) -> Any:
        if any(record.id == bad[1] and change.target is Status.SUSPENDED for record, change in wanted):
            raise error("too large")
        return await apply(self, wanted)

    @app.workflow
    async def nap() -> str:
        await sleep(1)
        return "rested"

    with app:
        runs = [nap.submit() for _ in range(6)]
        bad += [runs[1].id, runs[4].id]
        monkeypatch.setattr(SqliteStore, "append", appended)
        monkeypatch.setattr(TriggerOutbox, "apply", applied)
        with app.runner():
            for number in (0, 2, 3, 5):
                assert runs[number].result(patient(20)) == "rested"
            until(lambda: all(runs[number].status is Status.FAILED for number in (1, 4)))
    assert max(sizes) > 1


class Uneasy:
    """As an array: it cannot be compared, nor encoded."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_a_step_that_cancels_itself_has_failed(url: str) -> None:
    app = make_app(url)
    tried: list[str] = []

    @app.step(name="hasty")
    async def hasty() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(5)

    @app.step(retries=Fixed(1, 0.1))
    async def second_thought() -> str:
        tried.append("once")
        if len(tried) == 1:
            await hasty.function()
        return "done"

    @app.workflow
    async def careful() -> tuple[str, str]:
        try:
            await hasty()
        except BaseException as error:
            return str(error), await second_thought()
        return "", ""

    with app, app.runner():
        run = careful.submit()
        said, then = run.result(patient(20))
        assert "hasty#1 has cancelled itself" in said
        assert then == "done"
        assert run.step("hasty#1").status == "failed"


def test_data_that_cannot_be_compared_is_reported_and_its_step_counts(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(url)

    @app.step(name="put")
    async def put(value: int) -> int:
        context().data["x"] = value or Uneasy()
        return value

    @app.workflow
    async def body() -> tuple[int, int]:
        return await put(1), await put(0)

    with app, app.runner(), caplog.at_level(logging.WARNING):
        assert body.submit().result(patient(20)) == (1, 0)
    assert "what put#2 has set cannot be stored" in caplog.text


def test_a_defect_at_the_end_of_a_step_does_not_strand_the_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(url)
    ended = Attempts.ended
    failures: list[str] = []

    def fails_once(self: Attempts, key: str, outcome: Any) -> None:
        if not failures:
            failures.append(key)
            raise RuntimeError("a defect")
        ended(self, key, outcome)

    monkeypatch.setattr(Attempts, "ended", fails_once)

    @app.step
    async def work() -> str:
        return "done"

    @app.workflow
    async def body() -> str:
        return await work()

    with app, app.runner():
        assert body.submit().result(patient(20)) == "done"
    assert failures


def test_a_defect_while_a_message_is_taken_strands_neither_the_run_nor_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(url)
    take, failures = Run.take_inbox, list[str]()

    def fails_once(self: Run, inbox: Any) -> None:
        if inbox and not failures:
            failures.append(self.id)
            raise RuntimeError("a defect")
        take(self, inbox)

    monkeypatch.setattr(Run, "take_inbox", fails_once)

    @app.workflow(name="child")
    async def child() -> str:
        return "grown"

    @app.workflow(name="parent")
    async def parent() -> str:
        return await child()

    with app, app.runner():
        runs = [parent.submit() for _ in range(4)]
        assert [run.result(patient(20)) for run in runs] == ["grown"] * 4
        assert len(failures) == 1
        assert sorted(run.record().epoch for run in runs)[0] == 1


def test_a_defect_in_a_message_between_threads_leaves_the_others() -> None:
    loop, told = asyncio.new_event_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    mail = Mailbox(loop, is_here=False)
    for say in (lambda: told.append("one"), lambda: [][0], lambda: told.append("two"), loop.stop):
        mail.post(say)
    loop.run_forever()
    loop.close()
    assert told == ["one", "list index out of range", "two"]


def test_an_attribute_that_cannot_be_encoded_is_refused_whole(url: str) -> None:
    app = make_app(url)

    @app.step
    async def look() -> dict[str, str]:
        return {}

    @app.workflow
    async def body() -> str:
        context().set(stage="begun")
        try:
            context().set(stage="\ud800")
        except Exception as error:
            await look()
            return type(error).__name__
        return ""

    with app, app.runner():
        run = body.submit()
        assert run.result(patient(20)) == "NotEncodable"
        assert run.record().attributes == {"stage": "begun"}


def test_attributes_that_could_not_be_written_are_written_when_the_run_is_suspended(
    url: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    app = make_app(url, workflow_linger_seconds=0.3)
    apply = SqliteStore.apply
    failures: list[int] = []

    async def fails(self: SqliteStore, changes: Any) -> Any:
        if any(isinstance(change, NoteUpdate) for change in changes):
            failures.append(len(changes))
            raise RuntimeError("a defect")
        return await apply(self, changes)

    monkeypatch.setattr(SqliteStore, "apply", fails)

    @app.step
    async def work() -> None:
        await asyncio.sleep(0.3)

    @app.workflow
    async def body() -> None:
        context().set(stage="packed")
        await work()
        await sleep(60)

    with app, app.runner():
        run = body.submit()
        until(lambda: run.status is Status.SUSPENDED)
        assert failures
        assert run.record().attributes == {"stage": "packed"}


def test_refused_attributes_of_one_run_do_not_keep_the_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes of several runs are one write."""
    app = make_app(url)
    apply, refused, is_refused = SqliteStore.apply, list[int](), threading.Event()

    async def refuses(self: SqliteStore, changes: Any) -> Any:
        if any(isinstance(change, NoteUpdate) and change.attributes["stage"] == "bad" for change in changes):
            refused.append(len(changes))
            if len(changes) == 1:
                is_refused.set()
            raise StoreError("too large")
        return await apply(self, changes)

    monkeypatch.setattr(SqliteStore, "apply", refuses)

    @app.step
    def wait() -> None:
        is_refused.wait(patient(20))

    @app.workflow
    async def order(stage: str) -> str:
        context().set(stage=stage)
        await wait()
        return stage

    with app:
        runs = [order.submit(stage) for stage in ("one", "bad", "two", "three")]
        with app.runner():
            assert [run.result(patient(20)) for run in runs] == ["one", "bad", "two", "three"]
        assert [run.record().attributes.get("stage") for run in runs] == ["one", None, "two", "three"]
    assert max(refused) > 1


def test_a_child_that_the_store_refuses_fails_its_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(url)
    insert = SqliteStore.insert

    async def refuses(self: SqliteStore, records: Any, *given: Any) -> Any:
        if any(record.task == "child" for record in records):
            raise StoreError("too large")
        return await insert(self, records, *given)

    monkeypatch.setattr(SqliteStore, "insert", refuses)

    @app.workflow(name="child")
    async def child() -> None: ...

    @app.workflow(name="parent")
    async def parent() -> str:
        try:
            await child()
        except StoreError as error:
            return str(error)
        return ""

    with app, app.runner():
        assert parent.submit().result(patient(20)) == "too large"


def test_a_run_goes_on_after_a_value_could_not_be_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(url)
    fetch = WorkflowExecutor.fetch
    failures: list[str] = []

    def fails_once(self: WorkflowExecutor, key: str, *given: Any) -> None:
        if failures:
            return fetch(self, key, *given)
        failures.append(key)
        payloads = self.engine.payloads

        async def fail(wanted: Any) -> Any:
            monkeypatch.setattr(payloads, "fetch", there)
            raise RuntimeError("a defect")

        there = payloads.fetch
        monkeypatch.setattr(payloads, "fetch", fail)
        fetch(self, key, *given)

    monkeypatch.setattr(WorkflowExecutor, "fetch", fails_once)

    @app.task
    async def large() -> bytes:
        return b"x" * 3_000_000

    @app.workflow
    async def parent() -> int:
        return len(await large.submit())

    with app, app.runner():
        assert parent.submit().result(patient(20)) == 3_000_000
    assert failures


def test_a_wake_stays_in_the_inbox_until_its_event_is_durable(
    url: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    app = make_app(url, workflow_linger_seconds=60)
    begin, append = Host.begin, SqliteStore.append
    runs: list[Run] = []
    is_held, go_on = threading.Event(), threading.Event()

    def noted(self: Host, call: Any, task: Any, loaded: Any) -> None:
        begin(self, call, task, loaded)
        runs.extend(self.runs)

    async def held(self: SqliteStore, pages: Any) -> Any:
        is_held.set()
        await asyncio.to_thread(go_on.wait, 20)
        return await append(self, pages)

    monkeypatch.setattr(Host, "begin", noted)
    attempts: list[int] = []

    @app.step(retries=Fixed(1, 60))
    async def flaky() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("not yet")
        return "woken"

    @app.workflow
    async def body() -> str:
        return await flaky()

    with app, app.runner():
        run = body.submit()
        until(lambda: run.steps() and run.steps()[0].status == "retrying")
        monkeypatch.setattr(SqliteStore, "append", held)
        run.wake()
        try:
            until(is_held.is_set)
            state = run.record().run
            assert state is not None
            (entry,) = state.inbox
            assert entry.id in runs[0].handled
            assert entry.id not in runs[0].durably_handled
        finally:
            go_on.set()
        assert run.result(patient(20)) == "woken"
        assert entry.id in runs[0].durably_handled


def test_what_a_body_changes_in_its_data_so_that_it_cannot_be_stored_fails_the_next_step(url: str) -> None:
    """It is no crash: the same would happen again with each owner."""
    app = make_app(url)

    @app.step(name="pack")
    async def pack() -> list[str]:
        return list(context().data["cart"])

    @app.workflow(name="order")
    async def order() -> list[object]:
        context().data["cart"] = ["chair"]
        context().data["cart"].append(object())
        try:
            await pack()
        except NotEncodable as error:
            context().data["cart"] = ["table"]
            return [str(error), await pack()]
        return []

    with app, app.runner():
        run = order.submit()
        said, packed = run.result(patient(20))
        assert said.startswith("context().data['cart'][1] is of the type object")
        assert packed == ["table"]
        assert run.record().epoch == 1


def test_a_task_of_a_body_may_restart_the_run(url: str) -> None:
    app = make_app(url)

    @app.step(name="pack")
    async def pack() -> None: ...

    @app.workflow(name="order")
    async def order(number: int) -> int:
        async def again() -> None:
            await pack()
            context().restart(number + 1)

        if number == 2:
            return number
        async with asyncio.TaskGroup() as group:
            group.create_task(again())
            if number == 1:
                group.create_task(asyncio.sleep(60))
        return -1

    with app, app.runner():
        run = order.submit(0)
        assert run.result(patient(20)) == 2
        assert run.record().run.generation == 2


def test_triggers_call_workflows(url: str, until: Until) -> None:
    app = make_app(url)

    @app.step(name="pack")
    async def pack(order: str) -> str:
        return f"box {order}"

    @app.workflow(name="checkout", triggers=[on_event("ordered", arguments={"order": from_event("id")})])
    async def checkout(order: str) -> str:
        return await pack(order)

    @app.workflow(name="invoice", triggers=[on_result("checkout", arguments={"box": from_result()})])
    async def invoice(box: str) -> str:
        return await pack(box)

    with app, app.runner():
        app.emit("ordered", {"id": "42"})
        until(lambda: [each.status for each in app.invocations(task="invoice")] == [Status.SUCCESS])
        (run,) = app.invocations(task="invoice")
        assert app.invocation(run.id).result() == "box box 42"


def test_a_run_whose_last_pages_are_lost_is_parked_and_runs_no_step_again(url: str, until: Until) -> None:
    """As after a backup that was put together from two times: a shorter log is a log, too."""
    app = make_app(url, workflow_linger_seconds=0.1)
    charged: list[int] = []

    @app.step(name="charge")
    async def charge() -> None:
        charged.append(1)

    @app.workflow(name="order")
    async def order() -> None:
        await charge()
        await sleep(3600)

    with app, app.runner():
        run = order.submit()
        until(lambda: run.status is Status.SUSPENDED)
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            connection.execute("DELETE FROM holdfast_log")
        connection.close()
        run.cancel()
        until(lambda: run.status in (Status.PARKED, Status.FAILED))
        assert "has 0 of its 4 events" in run.record().reason
        with pytest.raises(CorruptRecord, match="has 0 of its 4 events"):
            replay(app, run)
    assert charged == [1]
