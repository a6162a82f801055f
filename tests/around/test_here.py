"""First attempts in the caller's process: nothing is stored but what must be retried, and that at once and whole."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Context, Fatal, Retries, RetryLater, Status, UsageError, context
from holdfast.around import Injected, LifecycleEvent
from holdfast.errors import ArgumentsDoNotBind, BlockingCall, NotEncodable, StoreUnavailable
from holdfast.retries import Fixed, MoveTo


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    if request.param == "mongodb":
        url = request.getfixturevalue("mongo_url")
    else:
        url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}[request.param]
    with App(url, poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture
def memory() -> Iterator[App]:
    with App("memory://", poll_interval_seconds=0.2) as app:
        yield app


SOON = Fixed(3, 0.01)


def flaky(app: App, times: int, retries: Any = SOON, is_async: bool = False, **options: Any) -> Any:
    left, keys = [ConnectionError("no line")] * times, list[str]()

    def work(n: int, to: list[int]) -> dict[str, Any]:
        about = context()
        keys.append(about.idempotency_key)
        to.append(n)
        if left:
            raise left.pop()
        return {"to": to, "attempt": about.attempt, "keys": list(keys)}

    async def work_async(n: int, to: list[int]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return work(n, to)

    return app.task(name="work", retries=retries, **options)(work_async if is_async else work)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_success_here_stores_nothing(app: App, is_async: bool) -> None:
    work = flaky(app, 0, is_async=is_async)
    first = work.try_here(1, [])
    assert first.is_done
    assert first.invocation is None
    assert first.result()["to"] == [1]
    assert first.result()["attempt"] == 1
    assert app.invocations() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_that_is_retried_is_stored_as_a_worker_would_have_left_it(app: App, is_async: bool) -> None:
    work = flaky(app, 2, is_async=is_async, retries=MoveTo("slow", Fixed(3, 0.01)))
    first = work.try_here(7, to=[])
    handle = first.invocation
    (record,) = app.invocations()
    assert not first.is_done
    assert (record.id, record.status, record.queue) == (handle.id, Status.RETRY, "slow")
    assert (record.attempt, record.epoch, record.owner, record.slot) == (1, 1, None, None)
    assert [each.status.value for each in record.history] == ["registered", "pending", "running", "retry"]
    assert record.history[-1].why == "ConnectionError: no line; attempt 1 of 4 failed; next in 10ms, on queue 'slow'"
    assert [(each.number, each.attempt, each.error.message) for each in record.errors] == [(1, 1, "no line")]
    with app.runner(queues=["slow"]):
        result = first.result(timeout=patient(20))
    # The code had changed its argument: the next attempt gets what the caller gave. And one key is for all attempts.
    assert result == {"to": [7], "attempt": 3, "keys": [handle.id] * 3}


def test_what_the_attempt_has_noted_is_stored_with_it(app: App) -> None:
    @app.task(name="load", retries=SOON)
    def load() -> tuple[object, int]:
        about = context()
        found = about.last_checkpoint
        if about.attempt == 1:
            about.set(customer="c-17")
            about.progress(40, total=100)
            about.checkpoint({"row": 40})
            assert about.last_checkpoint == {"row": 40}
            raise ConnectionError("no line")
        return found, about.attempt

    first = load.options(attributes={"shop": "rome"}).try_here()
    (record,) = app.invocations(attributes={"customer": "c-17"})
    assert record.attributes == {"shop": "rome", "customer": "c-17"}
    assert str(first.invocation.progress()) == "40 of 100 (40%)"
    with app.runner():
        assert first.result(timeout=patient(20)) == ({"row": 40}, 2)


def test_a_final_failure_is_raised_and_not_stored(app: App) -> None:
    for error in (ValueError("wrong"), Fatal("never")):

        @app.task(name=f"fails {type(error).__name__}".replace(" ", "-"), retries=Retries(3, only=OSError))
        def fails(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)) as raised:
            fails.try_here()
        assert raised.value is error
    assert app.invocations() == []


def test_a_call_may_ask_to_be_tried_later(memory: App) -> None:
    @memory.task(name="later")
    def later() -> None:
        raise RetryLater("1h", "busy")

    handle = later.try_here().invocation
    assert handle is not None
    record = handle.record()
    assert record.due_at - record.changed_at == pytest.approx(3600, abs=1)


def test_in_async_code_both_kinds_of_functions_leave_the_loop_alone(memory: App) -> None:
    plain, coroutine = flaky(memory, 1), memory.task(name="other")(asyncio.sleep)

    async def main() -> None:
        first = await plain.atry_here(1, [])
        assert first.invocation is not None
        assert (await coroutine.atry_here(0, "slept")).result() == "slept"
        with pytest.raises(BlockingCall, match=r"await other\.atry_here"):
            coroutine.try_here(0)
        async with memory.runner():
            assert (await first)["attempt"] == 2

    asyncio.run(asyncio.wait_for(main(), patient(30)))


def test_large_arguments_and_large_errors_are_stored_with_it(app: App) -> None:
    app.register(LargeError)

    @app.task(name="large", retries=Fixed(1, 0.01))
    def large(text: str) -> int:
        if context().attempt == 1:
            raise LargeError("e" * 300_000)
        return len(text)

    first = large.try_here("x" * 300_000)
    assert first.invocation is not None
    with app.runner():
        assert first.result(patient(20)) == 300_000
    assert len(first.invocation.record().errors) == 1


class LargeError(Exception):
    pass


@pytest.mark.parametrize(
    ("declared", "given", "what"),
    [
        ({"limit": 1}, {}, "limit="),
        ({"rate": "5/s"}, {}, "rate="),
        ({"unique": True}, {}, "unique="),
        ({"debounce": "1s"}, {}, "debounce or throttle="),
        ({"at_most_once": True}, {}, "at_most_once="),
        ({}, {"key": "k"}, "key="),
        ({}, {"delay": "1s"}, "delay="),
        ({}, {"throttle": "1s"}, "debounce or throttle="),
    ],
)
def test_what_needs_the_store_first_is_refused(
    memory: App, declared: dict[str, Any], given: dict[str, Any], what: str
) -> None:
    @memory.task(name="work", **declared)
    def work() -> None:
        raise AssertionError("it has run")

    with pytest.raises(UsageError, match=f"work cannot be tried here: .*{what}.*Use submit"):
        work.options(**given).try_here()


def test_what_cannot_be_stored_is_refused_before_its_code_runs(memory: App) -> None:
    @memory.task(name="work")
    def work(n: object) -> None:
        raise AssertionError("it has run")

    for arguments in ((), (object(),), (1, 2)):
        with pytest.raises((ArgumentsDoNotBind, NotEncodable)):
            work.try_here(*arguments)


def test_resources_of_workers_are_not_here_but_provided_ones_are(memory: App) -> None:
    @memory.task(name="work")
    def work(numbers: Injected[list[int]]) -> list[int]:
        return numbers

    with pytest.raises(
        UsageError, match=r"work cannot be tried here: a resource is missing.*opened by workers only.*provide"
    ):
        work.try_here()
    memory.provide([1, 2])
    assert work.try_here().result() == [1, 2]


def test_middleware_surrounds_it_and_listeners_know_what_is_stored(memory: App) -> None:
    told: list[Any] = []

    @memory.middleware
    @contextmanager
    def around(call: Context) -> Iterator[None]:
        told.append(call.attempt)
        yield

    @memory.listen()
    def listener(event: LifecycleEvent) -> None:
        told.append((event.stage, event.is_stored))

    work = flaky(memory, 1)
    assert work.try_here(1, []).invocation is not None
    assert work.try_here(1, []).is_done
    memory.runtime.listeners.finish(patient(20))
    stages = [each for each in told if each != 1]
    failed = [("started", False), ("submitted", True), ("failed", True), ("retried", True)]
    assert stages == [*failed, ("started", False), ("succeeded", False), ("finalised", False)]
    assert told.count(1) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_in_it_gives_back_the_slot_of_the_task_that_tries_it(memory: App, is_async: bool) -> None:
    child = memory.task(name="child")(lambda: 1)

    def ask() -> int:
        return child.submit().result(patient(20)) + 1

    async def ask_async() -> int:
        return await (await child.asubmit()) + 1

    asked: Any = memory.task(name="asked")(ask_async if is_async else ask)

    async def parent_async() -> int:
        return int((await asked.atry_here()).result()) + 1

    parent: Any = memory.task(name="parent")(parent_async if is_async else lambda: asked.try_here().result() + 1)
    with memory.runner(concurrency=1):
        handle = parent.submit()
        assert handle.result(patient(20)) == 3
    assert "paused" in [each.status.value for each in handle.history()]


def test_an_interrupt_of_the_caller_is_no_failed_attempt(memory: App) -> None:
    @memory.task(name="work", retries=3)
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.try_here()
    assert memory.invocations() == []


def test_a_store_that_is_away_is_told_with_the_error_of_the_attempt(memory: App, monkeypatch: Any) -> None:
    work = flaky(memory, 1)
    engine = memory.runtime.ready()

    async def away(records: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(engine.store, "insert", away)
    with pytest.raises(StoreUnavailable) as raised:
        work.try_here(1, [])
    assert isinstance(raised.value.__cause__, ConnectionError)


PROGRAM = """
import sys
from pathlib import Path
from holdfast import App
from holdfast.retries import Fixed
app = App(sys.argv[1], name="here")

@app.task(name="work", retries=Fixed(3, 0.01))
def work(n: int) -> int:
    with open(sys.argv[2], "a") as ledger:
        ledger.write("ran\\n")
    if len(Path(sys.argv[2]).read_text().split()) == 1:
        raise ConnectionError("no line")
    return n

if __name__ == "__main__":
    if sys.argv[3] == "try":
        print(work.try_here(3).invocation.id)
    else:
        with app.runner():
            print([app.invocation(each.id).result(30) for each in app.invocations()])
"""


USUAL = ("sqlite", "submit.after")
KILLS = [
    pytest.param(store, point, point == "submit.after", marks=() if (store, point) == USUAL else pytest.mark.faults)
    for store in ("sqlite", "mongodb")
    for point in ("here.failed", "submit.kept", "submit.after")
]


@pytest.mark.slow
@pytest.mark.parametrize(("store", "point", "is_stored"), KILLS)
def test_a_kill_leaves_the_whole_retry_or_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, point: str, is_stored: bool
) -> None:
    url = request.getfixturevalue("mongo_url") if store == "mongodb" else f"sqlite:///{tmp_path}/here.db"
    (tmp_path / "here.py").write_text(PROGRAM)
    ledger = tmp_path / "ledger"

    def run(what: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "here.py"), url, str(ledger), what]
        return subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, timeout=patient(60), check=False
        )

    assert run("try", HOLDFAST_CRASH_AT=point).returncode == -9
    after = run("run")
    assert after.returncode == 0, after.stderr
    assert after.stdout.strip() == ("[3]" if is_stored else "[]")
    assert len(ledger.read_text().split()) == (2 if is_stored else 1)
