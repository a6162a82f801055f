"""What a person does first: submit, run, get the result. On every store, with real threads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, ResultTimeout, Status, TaskFailed, UsageError
from holdfast.errors import (
    ArgumentsDoNotBind,
    BlockingCall,
    DuplicateTask,
    InvocationNotFound,
    NotEncodable,
    UnknownTask,
)


@pytest.fixture(params=["memory", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/shop.db"
    with App(url, poll_interval_seconds=0.2) as app:
        yield app


@dataclasses.dataclass
class Order:
    id: int
    lines: list[str]


class OutOfStock(Exception):
    pass


def declare(app: App) -> Any:
    class Tasks:
        @staticmethod
        @app.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        @staticmethod
        @app.task(name="aadd")
        async def aadd(x: int, y: int) -> int:
            await asyncio.sleep(0)
            return x + y

        @staticmethod
        @app.task(name="ship")
        def ship(order: Order) -> Order:
            return dataclasses.replace(order, lines=[*order.lines, "shipped"])

        @staticmethod
        @app.task(name="fail")
        def fail(kind: str) -> None:
            raise {"value": ValueError("bad value"), "stock": OutOfStock("none left")}[kind]

    return Tasks


def test_the_first_example(app: App) -> None:
    tasks = declare(app)
    with app.runner(concurrency=8):
        inv = tasks.add.submit(1, 2)
        assert inv.result(timeout=patient(10)) == 3
        assert [h.status for h in inv.history()] == ["registered", "pending", "running", "success"]
        assert inv.status is Status.SUCCESS
        assert app.invocation(inv.id).result(timeout=1) == 3
    assert tasks.add(1, 2) == 3


def test_coroutine_tasks_share_a_loop_with_high_concurrency(app: App) -> None:
    meeting: list[int] = []
    all_are_there = asyncio.Event()

    @app.task(name="meet")
    async def meet(number: int) -> int:
        """Ends only when a hundred of them are there at once."""
        meeting.append(number)
        if len(meeting) == 100:
            all_are_there.set()
        await all_are_there.wait()
        return threading.get_ident()

    with app.runner(concurrency=100):
        loops = meet.map(range(100)).results(timeout=patient(30))
    assert len(set(loops)) == 1


def test_blocking_functions_get_a_thread_each(app: App) -> None:
    barrier = threading.Barrier(8)

    @app.task(name="meet")
    def meet() -> None:
        barrier.wait(timeout=patient(20))

    with app.runner(concurrency=8):
        meet.map([()] * 8).results(timeout=patient(30))


def test_async_code_awaits(app: App) -> None:
    tasks = declare(app)

    async def main() -> None:
        async with app.runner():
            invocation = await tasks.add.asubmit(1, 2)
            assert await invocation == 3
            assert await (await tasks.aadd.amap([(1, 1), {"x": 2, "y": 2}])) == [2, 4]
            assert await invocation.astatus() == "success"
            with pytest.raises(BlockingCall, match="await invocation"):
                invocation.result()
            with pytest.raises(ValueError, match="bad value"):
                await (await tasks.fail.asubmit("value"))

    asyncio.run(main())


def test_values_come_back_as_what_they_were(app: App) -> None:
    tasks = declare(app)
    with app.runner():
        assert tasks.ship.submit(Order(7, ["a"])).result(timeout=patient(10)) == Order(7, ["a", "shipped"])


def test_errors_come_back_as_registered_classes_or_as_text(app: App) -> None:
    tasks = declare(app)
    with app.runner():
        with pytest.raises(ValueError, match="bad value") as caught:
            tasks.fail.submit("value").result(timeout=patient(10))
        assert "raise {" in "".join(caught.value.__notes__)
        with pytest.raises(TaskFailed, match="none left") as failed:
            tasks.fail.submit("stock").result(timeout=patient(10))
        assert failed.value.type_name.endswith(":OutOfStock")
        assert "Traceback" in failed.value.remote_traceback
        app.register(OutOfStock)
        with pytest.raises(OutOfStock, match="none left"):
            tasks.fail.submit("stock").result(timeout=patient(10))


def test_map_keeps_the_order_of_its_arguments(app: App) -> None:
    tasks = declare(app)
    with app.runner(concurrency=4):
        group = tasks.add.map([(n, n) for n in range(500)])
        assert len(group) == 500
        assert group.results(timeout=patient(60)) == [2 * n for n in range(500)]
        assert tasks.add.map([]).results(timeout=1) == []


def test_a_delay_is_kept(app: App) -> None:
    tasks = declare(app)
    soon = tasks.add.options(delay="30m", priority=7, queue="slow").submit(1, 2).record()
    assert soon.due_at - soon.created_at == pytest.approx(1800)
    assert (soon.priority, soon.queue) == (7, "slow")
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert tasks.add.options(at=moment).submit(1, 2).record().due_at == moment.timestamp()


def test_a_moved_queue_is_served_by_the_same_runner(app: App) -> None:
    tasks = declare(app)
    with app.runner():
        assert tasks.add.options(queue="elsewhere").submit(1, 2).result(timeout=patient(10)) == 3


def test_listing_finds_what_was_submitted(app: App) -> None:
    tasks = declare(app)
    with app.runner():
        good = tasks.add.submit(1, 2)
        bad = tasks.fail.submit("value")
        good.result(timeout=patient(10))
        with pytest.raises(ValueError):
            bad.result(timeout=patient(10))
    assert [r.id for r in app.invocations()] == [bad.id, good.id]
    assert [r.id for r in app.invocations(status="failed", task="fail")] == [bad.id]
    assert [r.id for r in app.invocations(before=bad.id)] == [good.id]
    with pytest.raises(UsageError, match="no status 'broken'"):
        app.invocations(status="broken")


# --- impatience


def test_a_timeout_says_that_no_runner_is_alive(app: App) -> None:
    invocation = declare(app).add.submit(1, 2)
    with pytest.raises(ResultTimeout, match="no runner is alive on this store"):
        invocation.result(timeout=0.05)
    assert isinstance(ResultTimeout("x"), TimeoutError)


def test_a_timeout_says_that_no_runner_knows_the_task(app: App) -> None:
    tasks = declare(app)
    invocation = tasks.add.submit(1, 2)
    app.runtime.tasks.pop("add")
    with app.runner():
        with pytest.raises(ResultTimeout, match="no runner knows the task 'add'"):
            invocation.result(timeout=0.05)
        assert "no runner knows the task" in invocation.explain()


def test_an_unknown_id_is_not_found(app: App) -> None:
    with pytest.raises(InvocationNotFound, match="nothing-like-this"):
        app.invocation("nothing-like-this").result(timeout=1)


# --- bad input: a clear error, and nothing stored


def test_arguments_are_checked_at_submit(app: App) -> None:
    tasks = declare(app)
    with pytest.raises(ArgumentsDoNotBind, match=r"add\(x: int, y: int\) -> int|missing a required argument: 'y'"):
        tasks.add.submit(1)
    with pytest.raises(NotEncodable, match="x") as caught:
        tasks.add.submit({"deep": [1, object()]}, 2)
    assert "x['deep'][1]" in str(caught.value)
    with pytest.raises(NotEncodable):
        tasks.add.map([(1, 2), (3, object())])
    assert app.invocations() == []


def test_two_tasks_of_one_name_are_refused(app: App) -> None:
    declare(app)
    with pytest.raises(DuplicateTask, match=r"two tasks are named 'add'.*test_submit_to_result.py:\d+"):
        declare(app)


def test_names_and_options_are_checked(app: App) -> None:
    with pytest.raises(UsageError, match="lambda"):
        app.task(lambda: 1)
    with pytest.raises(UsageError, match="no name for a queue"):
        app.task(name="x", queue="a|b")(print)
    with pytest.raises(UsageError, match="from -100 to 100"):
        app.task(name="x", priority=101)(print)
    tasks = declare(app)
    with pytest.raises(UsageError, match="not both"):
        tasks.add.options(delay=1, at=2.0)
    with pytest.raises(UsageError, match="time zone"):
        tasks.add.options(at=dt.datetime(2030, 1, 1))
    with pytest.raises(UnknownTask, match="Did you mean 'add'"):
        app.get_task("ad")


def test_an_alias_finds_work_that_was_stored_under_the_old_name(app: App) -> None:
    tasks = declare(app)
    invocation = tasks.add.submit(1, 2)
    app.runtime.tasks.pop("add")

    @app.task(name="sum_up", aliases=["add"])
    def sum_up(x: int, y: int) -> int:
        return x + y

    with app.runner():
        assert invocation.result(timeout=patient(10)) == 3


def test_two_apps_share_a_store_without_seeing_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    with App(url, name="one") as one, App(url, name="two") as two:
        first, second = declare(one), declare(two)
        mine = first.add.submit(1, 2)
        assert two.invocations() == []
        with pytest.raises(InvocationNotFound):
            two.invocation(mine.id).record()
        with two.runner():
            assert second.add.submit(5, 5).result(timeout=patient(10)) == 10
        assert mine.status == "registered"


def test_a_coroutine_that_blocks_hurts_neither_the_engine_nor_plain_functions(app: App) -> None:
    tasks = declare(app)
    blocked, release = threading.Event(), threading.Event()

    @app.task(name="block")
    async def block() -> None:
        blocked.set()
        release.wait(20)

    with app.runner():
        stuck = block.submit()
        assert blocked.wait(10)
        assert tasks.add.submit(1, 2).result(timeout=patient(10)) == 3
        assert stuck.status == "running"
        release.set()
        stuck.result(timeout=patient(10))


@pytest.mark.parametrize("how", ["exit in a child task", "exit", "stop the loop"])
def test_no_coroutine_can_end_the_loop_of_the_others(app: App, how: str) -> None:
    tasks = declare(app)

    @app.task(name="vandal")
    async def vandal() -> str:
        if how == "exit":
            sys.exit(3)
        elif how == "stop the loop":
            asyncio.get_running_loop().stop()
        else:

            async def leave() -> None:
                sys.exit(3)

            await asyncio.gather(leave(), return_exceptions=True)
        return "done"

    with app.runner():
        with contextlib.suppress(TaskFailed):
            vandal.submit().result(timeout=patient(10))
        assert tasks.aadd.submit(1, 2).result(timeout=patient(10)) == 3


class Undescribable(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


def test_odd_callables_and_odd_errors_do_not_cost_a_place(app: App) -> None:
    odd = app.task(name="odd")(functools.partial(power, exponent=2))

    @app.task(name="worse")
    def worse() -> None:
        raise Undescribable

    with app.runner(concurrency=1):
        assert odd.submit(5).result(timeout=patient(10)) == 25
        with pytest.raises(TaskFailed, match="Undescribable"):
            worse.submit().result(timeout=patient(10))
        assert odd.submit(3).result(timeout=patient(10)) == 9
    with pytest.raises(UsageError, match="shows no parameters"):
        app.task(name="opaque")(functools.partial(int, base=2))
    with pytest.raises(UsageError, match="no name"):
        app.task(functools.partial(power, exponent=2))


def power(base: int, exponent: int) -> int:
    return base**exponent


def test_closing_an_app_frees_those_who_wait_on_it(app: App) -> None:
    invocation = declare(app).add.submit(1, 2)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            invocation.result()
        except BaseException as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not app.runtime.ready().hub._final:
        pass
    app.close()
    waiter.join(timeout=patient(10))
    assert not waiter.is_alive()
    assert "the app was closed" in str(outcome[0])


def test_closing_an_app_leaves_the_others_of_the_process_alone() -> None:
    with App("memory://", name="shop", poll_interval_seconds=0.05) as shop, App("memory://", name="bank") as bank:
        waiting = declare(shop).add.submit(1, 2)
        answers: list[int] = []
        waiter = threading.Thread(target=lambda: answers.append(waiting.result(timeout=patient(20))))
        waiter.start()
        assert bank.invocations() == []
        while not shop.runtime.ready().hub._final:
            pass
        bank.close()
        with shop.runner():
            waiter.join(timeout=patient(20))
        assert answers == [3]
        assert bank.invocations() == []  # it opens again


def test_options_add_up_when_they_are_chained(app: App) -> None:
    add = declare(app).add
    later = add.options(delay="1h").options(priority=7)
    due = [record.due_at - record.created_at for record in [later.submit(1, 2).record()]]
    assert due == [pytest.approx(3600, abs=1)]
    at = later.options(at=4_000_000_000.0).options(queue="slow")
    record = at.submit(1, 2).record()
    assert (record.due_at, record.priority, record.queue) == (4_000_000_000.0, 7, "slow")
    again = at.options(delay=60).submit(1, 2).record()
    assert again.due_at - again.created_at == pytest.approx(60, abs=1)


def test_a_relative_path_means_the_folder_in_which_the_app_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with App("sqlite:///here.db") as app:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        declare(app).add.submit(1, 2)
    assert (tmp_path / "here.db").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


FORGETFUL = """
import gc, sys, threading, time
from holdfast import App

def engines():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-engine")]

app = App(f"sqlite:///{sys.argv[1]}/shop.db")
app.task(name="add")(lambda a: a).submit(1)
assert len(engines()) == 1
del app
deadline = time.monotonic() + 30
while engines() and time.monotonic() < deadline:
    gc.collect()
assert not engines()
"""


def test_an_app_that_was_forgotten_lets_go_of_its_threads(tmp_path: Path) -> None:
    """In a process of its own: all apps of a process share the thread."""
    program = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, done.stderr


def test_a_task_of_a_task_is_refused(app: App) -> None:
    tasks = declare(app)
    with pytest.raises(UsageError, match="made of a function"):
        app.task(name="again")(tasks.add)
    with pytest.raises(UsageError, match="list of names"):
        app.runner(queues="mail")
    with pytest.raises(UsageError, match="slots"):
        app.runner(concurrency=1.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="limit"):
        app.invocations(limit=-1)
    with pytest.raises(UsageError, match="seconds since the epoch"):
        tasks.add.options(at=float("inf"))


def test_a_closed_app_can_be_used_again(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/shop.db")
    tasks = declare(app)
    id = tasks.add.submit(1, 2).id
    app.close()
    app.close()
    with app.runner():
        assert app.invocation(id).result(timeout=patient(10)) == 3
    app.close()
    assert not (tmp_path / "shop.db-wal").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_its_own_engine(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        tasks = declare(app)
        tasks.add.submit(1, 2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                tasks.add.submit(3, 4)
                app.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert len(app.invocations()) == 2
        with app.runner():
            results = sorted(app.invocation(r.id).result(timeout=patient(10)) for r in app.invocations())
        assert results == [3, 7]


@pytest.mark.parametrize("timeout", [float("nan"), "5s"])
def test_a_wait_that_would_never_be_over_is_refused(app: App, timeout: Any) -> None:
    invocation = declare(app).add.submit(1, 2)
    with pytest.raises(UsageError, match="timeout="):
        invocation.result(timeout=timeout)
