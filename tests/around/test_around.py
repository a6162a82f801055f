"""Middleware, resources and listeners, around threads, loops and processes, on a store in memory."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from tests.around import yard
from tests.support.patience import eventually, patient

from holdfast import App, Context, Retries, Status, UsageError, context
from holdfast.around import INJECTED, Inject, Injected, LifecycleEvent
from holdfast.around.listeners import MAX_WAITING, Listeners
from holdfast.executors.injection import wanted_by
from holdfast.telemetry import Telemetry
from holdfast.telemetry import events as e
from holdfast.testing import Harness
from holdfast.testing.samples import invocation


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://", poll_interval_seconds=0.2) as app:
        yield app


class Pool:
    def __init__(self, name: str = "main") -> None:
        self.name = name


class Replica(Pool):
    pass


# --- middleware


def test_middleware_surrounds_plain_functions_and_coroutines_from_the_first_declared(app: App) -> None:
    told: list[str] = []

    def surround(name: str, is_async: bool) -> Callable[[Context], Any]:
        @contextmanager
        def plain(call: Context) -> Iterator[None]:
            told.append(f"{name} {call.attempt}")
            yield
            told.append(f"/{name}")

        @asynccontextmanager
        async def coroutine(call: Context) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            with plain(call):
                yield

        return coroutine if is_async else plain

    app.middleware(surround("outer", False))
    app.middleware(surround("async", True))

    @app.task
    def work() -> str:
        told.append("work")
        return threading.current_thread().name

    @app.task
    async def await_() -> None:
        told.append("await")

    work.middleware(surround("own", True))
    with app.runner():
        assert work.submit().result(patient(20)).startswith("holdfast-executor")
        await_.submit().result(patient(20))
    assert told[:7] == ["outer 1", "async 1", "own 1", "work", "/own", "/async", "/outer"]
    assert told[7:] == ["outer 1", "async 1", "await", "/async", "/outer"]


@pytest.mark.parametrize("is_async", [False, True])
def test_middleware_notes_what_code_can(app: App, is_async: bool) -> None:
    @app.middleware
    @contextmanager
    def found(call: Context) -> Iterator[None]:
        assert (call.attributes, call.last_checkpoint) == ({"customer": "c-17"}, None)
        call.set(stage="begun")
        yield
        call.progress(2, total=2)

    def plain() -> dict[str, str]:
        return dict(context().attributes)

    async def coroutine() -> dict[str, str]:
        return plain()

    work = app.task(name="work")(coroutine if is_async else plain)
    with app.runner():
        invocation = work.options(attributes={"customer": "c-17"}).submit()
        both = {"customer": "c-17", "stage": "begun"}
        assert invocation.result(patient(20)) == both
    assert invocation.record().attributes == both
    assert str(invocation.progress()) == "2 of 2 (100%)"


@pytest.mark.parametrize("is_async", [False, True])
def test_middleware_may_refuse_a_start_and_that_attempt_has_failed(app: App, is_async: bool) -> None:
    refusals = [PermissionError("not yet")]

    @app.middleware
    @contextmanager
    def check(call: Context) -> Iterator[None]:
        if refusals:
            raise refusals.pop()
        yield

    async def work_async() -> int:
        return context().attempt

    def work() -> int:
        return context().attempt

    task: Any = app.task(name="work", retries=Retries(1, wait="1ms"))(work_async if is_async else work)
    with app.runner():
        handle = task.submit()
        assert handle.result(patient(20)) == 2
    assert "PermissionError: not yet" in handle.history()[3].why


def test_a_middleware_that_lacks_its_decorator_is_named(app: App) -> None:
    @app.middleware
    def forgotten(call: Context) -> Iterator[None]:
        yield

    @app.task(name="work")
    def work() -> None: ...

    with app.runner(), pytest.raises(UsageError, match=r"forgotten returned .*decorate it with @contextmanager"):
        work.submit().result(patient(20))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_parent_inside_of_middleware_gives_its_slot_back(app: App, is_async: bool) -> None:
    @app.middleware
    @asynccontextmanager
    async def around(call: Context) -> AsyncIterator[None]:
        yield

    child = app.task(name="child")(lambda: 1)

    async def parent_async() -> int:
        return await (await child.asubmit()) + 1

    parent: Any = app.task(name="parent")(parent_async if is_async else lambda: child.submit().result() + 1)
    with app.runner(concurrency=1):
        assert parent.submit().result(patient(20)) == 2


@pytest.mark.parametrize(("is_async", "raised"), [(False, RuntimeError), (True, RuntimeError), (False, SystemExit)])
def test_middleware_cannot_change_an_outcome(
    app: App, caplog: pytest.LogCaptureFixture, is_async: bool, raised: type[BaseException]
) -> None:
    """Else a broken tracer would repeat effects that have happened, or hide failures."""

    class Broken:
        def __init__(self, call: Context) -> None:
            self._swallows = call.task == "fails"

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> bool:
            if not self._swallows:
                raise raised("no connection to the tracer")
            return True

    class AsyncBroken(Broken):
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *error: object) -> bool:
            return self.__exit__(*error)

    app.middleware(AsyncBroken if is_async else Broken)

    @app.task(name="works")
    def works() -> int:
        return 1

    @app.task(name="fails")
    async def fails() -> int:
        raise ValueError("a real one")

    with app.runner():
        assert works.submit().result(patient(20)) == 1
        with pytest.raises(ValueError, match="a real one"):
            fails.submit().result(patient(20))
    assert "it failed after works, whose outcome stands: no connection to the tracer" in caplog.text
    assert "it swallowed the error of fails, whose outcome stands: a real one" in caplog.text


def test_a_soft_timeout_reaches_the_code_inside_of_middleware(app: App) -> None:
    from holdfast import SoftTimeout

    @app.middleware
    @asynccontextmanager
    async def around(call: Context) -> AsyncIterator[None]:
        yield

    @app.task(soft_timeout="100ms")
    def plain() -> str:
        try:
            while True:
                time.sleep(0.005)
        except SoftTimeout:
            return "in time"

    @app.task(soft_timeout="100ms")
    async def coroutine() -> str:
        try:
            await asyncio.sleep(60)
        except SoftTimeout:
            return "in time"
        return "late"

    with app.runner():
        handles = [plain.submit(), coroutine.submit()]
        assert [each.result(patient(20)) for each in handles] == ["in time"] * 2


# --- resources


def test_lifespans_yield_what_parameters_ask_for(app: App) -> None:
    closed: list[str] = []

    @app.lifespan
    @asynccontextmanager
    async def main() -> AsyncIterator[Pool]:
        yield Pool("main")
        closed.append("main")

    @app.lifespan
    @contextmanager
    def numbers() -> Iterator[list[int]]:
        yield [1, 2]

    @app.task
    def first(pool: Annotated[Pool, Inject()], order: str, *, more: Injected[list[int]]) -> str:
        return f"{pool.name} {order} {more}"

    @app.task
    async def last(order: str, suffix: str = "!", pool: Injected[Pool | None] = INJECTED) -> str:
        return f"{pool.name} {order}{suffix}"

    with app.runner():
        assert first.submit("a").result(patient(20)) == "main a [1, 2]"
        assert last.submit("b").result(patient(20)) == "main b!"
        assert last.submit(order="b", suffix="?").result(patient(20)) == "main b?"
    assert closed == ["main"]
    assert str(first.definition.signature) == "(order: 'str') -> 'str'"
    assert first(Pool("own"), "x", more=[]) == "own x []"
    with pytest.raises(UsageError, match=r"\.name was asked for.*pass the value"):
        asyncio.run(last("b"))
    with pytest.raises(UsageError, match="cannot be called so"):
        first.submit("a", pool=Pool())


def test_a_lifespan_that_lacks_its_decorator_is_named(app: App) -> None:
    @app.lifespan
    async def pools() -> AsyncIterator[Pool]:
        yield Pool("alone")

    with pytest.raises(UsageError, match=r"pools returned .*, which is no context manager: decorate it"):
        app.runner().start()


def test_a_lifespan_can_be_named_where_several_yield_a_type(app: App) -> None:
    @app.lifespan
    @contextmanager
    def main() -> Iterator[Pool]:
        yield Pool()

    @app.lifespan
    @contextmanager
    def replica() -> Iterator[Replica]:
        yield Replica("replica")

    def read(pool: Any) -> str:
        return str(pool.name)

    read.__annotations__["pool"] = Annotated[Pool, Inject(replica)]
    named = app.task(name="named")(read)

    def pick(pool: Any) -> str:
        return str(pool.name)

    pick.__annotations__["pool"] = Injected[Pool]
    ambiguous = app.task(name="ambiguous")(pick)
    with app.runner():
        assert named.submit().result(patient(20)) == "replica"
        handle = ambiguous.submit()
        eventually(lambda: handle.status == "parked", "it is parked")
    assert "2 lifespans yield what the parameter 'pool: Pool' gets" in handle.explain()


def test_without_its_resource_a_call_waits_for_a_worker_that_has_it(app: App) -> None:
    """Nothing is lost by a deploy that forgets a lifespan, and the next one goes on by itself."""

    @app.task
    def work(pool: Injected[Pool]) -> str:
        return pool.name

    handle = work.submit()
    with app.runner():
        eventually(lambda: handle.status == "parked", "it is parked")
    why = handle.explain()
    assert "a resource is missing: no lifespan of the app yields what the parameter 'pool: Pool' gets" in why
    assert "Each worker that starts tries again" in why
    app.provide(Pool("provided"))
    with app.runner():
        assert handle.result(patient(20)) == "provided"
    assert handle.record().attempt == 2


def test_annotations_in_quotes_are_read(app: App) -> None:
    app.provide(yard.YardPool("one"))
    work = app.task(name="work")(yard.takes_one_in_quotes)
    with app.runner():
        assert work.submit().result(patient(20)) == "one, one"


@pytest.mark.parametrize(
    "declare",
    [
        lambda app: app.task(name="x")(yard.takes_any_number),
        lambda app: app.task(name="x")(yard.takes_an_unknown_one),
        lambda app: app.task(name="x")(yard.takes_one_perhaps),
        lambda app: app.task(name="x")(yard.takes_one_without_its_mark),
        lambda app: app.workflow(name="x")(yard.body),
        lambda app: Inject("pool"),
    ],
)
def test_what_could_not_be_injected_is_refused_at_the_declaration(app: App, declare: Any) -> None:
    with pytest.raises(UsageError):
        declare(app)
    assert wanted_by(print) == ()


@pytest.mark.slow
def test_processes_for_tasks_open_resources_and_have_middleware(tmp_path: Path) -> None:
    """A process opens the resources of its app if a task of it wants some, once."""
    with yard.app_at(f"sqlite:///{tmp_path}/yard.db") as app, app.runner(concurrency=1):
        handles = [yard.crunch.submit(n) for n in (1, 2)] + [yard.crunch_async.submit(3)]
        results = [each.result(patient(60)) for each in handles]
    assert {each["surrounded"] for each in results} == {True}
    assert all(each["pool"].startswith("pool of ") for each in results)
    assert all(str(each["pid"]) in each["pool"] for each in results)


def test_steps_have_both_and_bodies_have_neither(app: App) -> None:
    told: list[str] = []
    app.provide(Pool("for steps"))

    @app.middleware
    @contextmanager
    def around(call: Context) -> Iterator[None]:
        told.append(call.task)
        yield

    @app.step
    async def look(order: str, pool: Injected[Pool] = INJECTED) -> str:
        return f"{order} by {pool.name}"

    @app.workflow(name="body")
    async def body(order: str) -> str:
        return await look(order)

    with app.runner():
        assert body.submit("42").result(patient(20)) == "42 by for steps"
    assert [each.rpartition(".")[2] for each in told] == ["look"]


def test_the_harness_gives_fakes_and_surrounds_calls() -> None:
    app, told = App("memory://"), list[str]()

    @app.middleware
    @contextmanager
    def around(call: Context) -> Iterator[None]:
        told.append(call.task)
        yield

    @app.lifespan
    @contextmanager
    def real() -> Iterator[Pool]:
        told.append("opened")
        yield Pool("real")
        told.append("closed")

    @app.task(name="work")
    def work(pool: Injected[Pool]) -> str:
        return pool.name

    ends: list[LifecycleEvent] = []
    app.listen("finalised")(ends.append)
    with Harness(app) as t:
        assert work.submit().result() == "real"
        assert len(ends) == 1  # a test need not wait for listeners
        t.provide(Pool("fake"))
        handle = work.submit()
        (ran,) = t.drain().ran
        assert (handle.result(), ran.args, ran.kwargs) == ("fake", (), {})
    assert told[:6] == ["opened", "work", "closed"] * 2


# --- listeners


def listening(app: App, *stages: str) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []

    @app.listen(*stages)
    def listener(event: LifecycleEvent) -> None:
        told.append((event.stage, event.task))

    return told


def test_every_stage_is_told_in_order_with_its_facts(app: App) -> None:
    events: list[LifecycleEvent] = []
    app.listen()(events.append)
    left = [ValueError("once")]

    @app.task(name="flaky", retries=Retries(1, wait="1ms"))
    def flaky() -> int:
        if left:
            raise left.pop()
        return 1

    with app.runner():
        handle = flaky.submit()
        handle.result(patient(20))
        eventually(lambda: events and events[-1].stage == "finalised", "the end is told")
    assert {each.invocation_id for each in events} == {handle.id}
    assert [(each.stage, each.attempt, each.status) for each in events] == [
        ("submitted", 0, "registered"),
        ("started", 1, "running"),
        ("failed", 1, "retry"),
        ("retried", 1, "retry"),
        ("started", 2, "running"),
        ("succeeded", 2, "success"),
        ("finalised", 2, "success"),
    ]
    failed = events[2]
    assert (failed.error_type, failed.error, failed.app) == ("builtins:ValueError", "once", "default")
    assert failed.due_at is not None
    assert failed.due_at > failed.at


def test_the_end_is_told_however_it_came(app: App) -> None:
    told = listening(app, "last_failure", "finalised")

    @app.task(name="fails")
    def fails() -> None:
        raise ValueError

    @app.task(name="late", expires="1ms")
    def late() -> None: ...

    @app.task(name="full", limit=1, when_full="refuse")
    def full() -> None:
        time.sleep(0.2)

    waiting = fails.options(delay="1h").submit()
    waiting.cancel()
    expired = late.options(queue="unserved").submit()
    with app.runner(queues=["default"]):
        fails.submit()
        refused = [full.submit() for _ in range(2)]
        eventually(lambda: len(told) == 7, f"all ends are told: {told}")
    ends = [("finalised", name) for name in ("fails", "fails", "full", "full", "late")]
    assert sorted(told) == [*ends, ("last_failure", "fails"), ("last_failure", "late")]
    assert expired.status is Status.FAILED
    assert Status.CONCURRENCY_CONTROLLED_FINAL in {each.status for each in refused}


def test_a_listener_may_be_async_and_of_one_task_and_goes_by_all_of_its_names(app: App) -> None:
    told: list[str] = []

    @app.task(name="new", aliases=["old"])
    def one() -> None: ...

    @app.task(name="other")
    def other() -> None: ...

    @one.listen("succeeded")
    async def listener(event: LifecycleEvent) -> None:
        await asyncio.sleep(0)
        told.append(event.task)

    with app.runner():
        other.submit().result(patient(20))
        one.submit().result(patient(20))
        eventually(lambda: told, "it is told")
    assert told == ["new"]


def test_a_listener_that_fails_or_hangs_hurts_nothing(app: App, caplog: pytest.LogCaptureFixture) -> None:
    gate, told = threading.Event(), listening(app, "succeeded")

    @app.listen("submitted")
    def exit_(event: LifecycleEvent) -> None:
        raise SystemExit("no more")

    @app.listen("succeeded")
    async def hang(event: LifecycleEvent) -> None:
        gate.wait(patient(60))

    @app.task(name="work")
    def work(n: int) -> int:
        return n

    with app.runner():
        assert [each.result(patient(20)) for each in work.map(range(20))] == list(range(20))
        gate.set()
        eventually(lambda: len(told) == 20, "all are told once it goes on")
    assert "exit_ failed at 'submitted': SystemExit: no more" in caplog.text


def test_what_does_not_fit_the_queue_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    gate, told, telemetry = threading.Event(), list[str](), Telemetry()
    from holdfast.telemetry.logs import LogLines

    telemetry.subscribe(LogLines())
    listeners = Listeners("app", telemetry, {})

    def listen(event: LifecycleEvent) -> None:
        gate.wait(patient(60))
        told.append(event.stage)

    listeners.add(listen, ["submitted"])
    record = invocation("a", app="app")
    for _ in range(MAX_WAITING // 1000 + 1):
        telemetry.emit(e.Submitted((record,) * 1000))
    gate.set()
    listeners.finish(patient(20))
    assert MAX_WAITING <= len(told) <= MAX_WAITING + 1000
    assert len([line for line in caplog.messages if "dropped" in line]) == 2


def test_a_wrong_stage_is_refused_with_the_right_one(app: App) -> None:
    with pytest.raises(UsageError, match="Did you mean 'finalised'"):
        app.listen("finalized")
    with pytest.raises(UsageError, match=r"or @app\.listen\(\) for all of them"):
        app.listen(print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a listener is a function"):
        app.listen("failed")(3)  # type: ignore[type-var]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_tells_its_own_listeners_even_if_a_lock_was_held(app: App, tmp_path: Path) -> None:
    listeners = Listeners("app", Telemetry(), {})
    listeners.add(lambda event: (tmp_path / "told").touch(), ["submitted"])
    record = invocation("a", app="app")
    with listeners._lock:
        held = threading.Thread(target=listeners.take, args=(e.Submitted((record,)),), daemon=True)
        held.start()
        if not (child := os.fork()):
            holder = threading.Thread(target=listeners.take, args=(e.Submitted((record,)),))
            holder.start()
            holder.join(patient(20))
            listeners.settle(patient(20))
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0
    assert (tmp_path / "told").exists()


def test_what_cannot_surround_a_body_is_refused(app: App) -> None:
    @app.workflow(name="body")
    async def body() -> None: ...

    with pytest.raises(UsageError, match="no middleware surrounds it"):
        body.middleware(contextmanager(yard.around))
    with pytest.raises(UsageError, match="is a workflow"):
        body.try_here()


def test_nothing_is_made_for_listeners_where_there_are_none(app: App) -> None:
    wants = app.runtime.telemetry.wants
    assert not any(wants(kind) for kind in (e.Submitted, e.Started, e.Settled, e.Refused, e.RanHere))
    listening(app, "failed")
    assert wants(e.Failed)
    assert not wants(e.Started)
