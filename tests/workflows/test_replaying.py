"""Replays of stored runs against the code at hand, without effects."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Status, context
from holdfast.errors import ReplayMismatch, UsageError
from holdfast.workflows.api import patched, sleep
from holdfast.workflows.replaying import ReplayReport, Verdict, read_run, replayed

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://", name="shop", poll_interval_seconds=0.05) as app, ExitStack() as runners:
        started[app.name] = lambda: runners.enter_context(app.runner())
        yield app


started: dict[str, Callable[[], object]] = {}


def submit(workflow: Any, *args: Any) -> Any:
    """Submit a run; the first one starts the runner, which knows only what is declared by then."""
    started.pop("shop", lambda: None)()
    return workflow.submit(*args)


def is_suspended(run: Any) -> bool:
    return run.status is Status.SUSPENDED


def replay(app: App, run: Any, changed: Any = None, **more: Any) -> ReplayReport:
    """Replay a run against its own code, or against another body."""

    record = run.record()

    async def load() -> Any:
        engine = await app.runtime.engine()
        return engine, await read_run(engine, record)

    engine, stored = app.runtime.run(load())
    definition = app.get_task(stored.record.task if changed is None else changed.name).definition
    return replayed(stored, definition, engine, **more)


def declare(app: App, seen: list[str]) -> dict[str, Any]:
    @app.step(name="charge")
    async def charge(order: str) -> str:
        seen.append(f"charge {order}")
        context().data["paid"] = order
        return f"receipt {order}"

    @app.step(name="pack")
    def pack(order: str) -> str:
        seen.append(f"pack {order}")
        return f"box {order}"

    @app.task(name="shop:mail")
    def mail(to: str) -> str:
        seen.append(f"mail {to}")
        return f"sent {to}"

    return {"charge": charge, "pack": pack, "mail": mail}


def test_a_finished_run_fits_its_own_code_and_nothing_runs_again(app: App) -> None:
    seen: list[str] = []
    steps = declare(app, seen)

    @app.workflow
    async def checkout(order: str) -> str:
        receipt = await steps["charge"](order)
        assert context().data["paid"] == order
        context().set(stage="charged")
        boxes = await asyncio.gather(steps["pack"](order), steps["pack"](f"{order}b"))
        await sleep(0.01)
        sent = await steps["mail"].submit(order)
        return f"{receipt} {boxes} {sent} {context().random.random()} {context().uuid4()}"

    run = submit(checkout, "42")
    run.result(patient(20))
    count = len(seen)
    report = replay(app, run)
    assert (report.verdict, report.why, report.waits_for) == (Verdict.FITS, "", ())
    assert report.has_ended
    assert report.events == len(run.events()) - 3  # those of the run itself are made from its record
    assert len(seen) == count
    report.raise_mismatch()


def test_a_plain_body_is_replayed_on_the_thread_of_its_caller(app: App) -> None:
    seen: list[str] = []
    steps = declare(app, seen)
    threads: list[int] = []

    @app.workflow
    def checkout(order: str) -> str:
        threads.append(threading.get_ident())
        receipt = steps["charge"](order)
        sleep(0.01)
        return f"{receipt} {steps['pack'](order)}"

    run = submit(checkout, "42")
    assert run.result(patient(20)) == "receipt 42 box 42"
    threads.clear()
    report = replay(app, run)
    assert report.verdict is Verdict.FITS
    assert report.has_ended
    assert threads == [threading.get_ident()]


def test_an_open_run_stops_at_the_end_of_its_log(app: App, until: Until) -> None:
    steps = declare(app, [])
    left: list[str] = []

    def make(name: str, plain: bool) -> Any:
        @app.workflow(name=f"shop:plain-{name}")
        def in_order(order: str) -> str:
            receipt = steps["charge"](order)
            try:
                sleep("3 days")
            finally:
                left.append("plain")
            return str(receipt)

        @app.workflow(name=f"shop:{name}")
        async def body(order: str) -> str:
            receipt = await steps["charge"](order)
            await sleep("3 days")
            return str(receipt)

        return in_order if plain else body

    for each in [make("first", False), make("second", True)]:
        run = submit(each, "42")
        until(functools.partial(is_suspended, run))
        report = replay(app, run)
        assert report.verdict is Verdict.FITS
        assert not report.has_ended
        (wait,) = report.waits_for
        assert wait.startswith("wait#1 (sleep of 3d until ")
        assert __file__ in wait


def test_a_changed_body_of_an_open_run_needs_a_patch_and_names_both_calls(app: App, until: Until) -> None:
    steps = declare(app, [])

    @app.workflow(name="shop:old")
    async def old(order: str) -> None:
        await steps["charge"](order)
        await sleep("3 days")

    @app.workflow(name="shop:new")
    async def new(order: str) -> None:
        await steps["pack"](order)
        await steps["charge"](order)
        await sleep("3 days")

    @app.workflow(name="shop:careful")
    async def careful(order: str) -> None:
        if patched("pack-first"):
            await steps["pack"](order)
        await steps["charge"](order)
        await sleep("3 days")

    @app.workflow(name="shop:wrong")
    async def wrong(order: str) -> None:
        raise KeyError("x")

    line = wrong.definition.function.__code__.co_firstlineno + 2
    run = submit(old, "42")
    until(lambda: run.status is Status.SUSPENDED)
    report = replay(app, run, new)
    assert report.verdict is Verdict.NEEDS_PATCH
    assert report.why.startswith(f"the log has charge#1 at {__file__}:")
    assert f"the code waits for pack#1 at {__file__}:" in report.why
    with pytest.raises(ReplayMismatch, match=r"shop:old .* the code does not fit the recorded log: the log has charge"):
        report.raise_mismatch()
    assert replay(app, run, careful).fits
    assert replay(app, run, wrong).why.endswith(f"; the body has raised KeyError: 'x' at {__file__}:{line}")
    run.wake()
    run.result(patient(20))
    assert replay(app, run, new).verdict is Verdict.DIVERGES  # it has ended: no patch could help it


def test_the_end_of_a_finished_run_is_compared_too(app: App) -> None:
    steps = declare(app, [])
    more: list[str] = []

    def odd() -> int:
        more.append("")
        return len(more)

    @app.workflow(name="shop:result")
    async def result() -> int:
        return odd()

    @app.workflow(name="shop:longer")
    async def longer() -> None:
        if odd() > 2:
            await steps["charge"]("late")

    @app.workflow(name="shop:raises")
    async def raises() -> None:
        if odd() < 5:
            raise ValueError("early")
        raise KeyError("late")

    @app.workflow(name="shop:sets")
    async def sets() -> None:
        context().set(number=str(odd()))

    run = submit(result)
    assert run.result(patient(20)) == 1
    assert replay(app, run).why == "the run returned 1, and the code returns another value: 2"
    more.clear()
    run = submit(longer)
    run.result(patient(20))
    assert replay(app, run).fits
    why = replay(app, run).why
    assert why.startswith("the log ends there, and the run was success; the code waits for charge#1 at ")
    run = submit(raises)
    with pytest.raises(ValueError, match="early"):
        run.result(patient(20))
    assert "the run failed with ValueError, and the code raises KeyError: 'late' at " in replay(app, run).why
    run = submit(sets)
    run.result(patient(20))
    assert replay(app, run).why == "the log has attr_set of the body, and the code sets attr_set"


def test_other_arguments_are_a_warning_if_the_code_has_changed(app: App) -> None:
    steps = declare(app, [])
    prices = iter([1, 2, 3])

    @app.workflow(name="shop:old")
    async def old() -> str:
        return str(await steps["charge"](f"order {next(prices)}"))

    @app.workflow(name="shop:new")
    async def new() -> str:
        return str(await steps["charge"]("42"))

    run = submit(old)
    run.result(patient(20))
    report = replay(app, run)
    assert report.verdict is Verdict.DIVERGES
    assert "by the same body" in report.why
    report = replay(app, run, new)
    assert report.verdict is Verdict.FITS
    (warning,) = report.warnings
    assert "other arguments" in warning


def test_a_new_keyed_call_ends_the_replay_and_is_told(app: App) -> None:
    steps = declare(app, [])

    @app.workflow(name="shop:old")
    async def old() -> None:
        await steps["charge"]("42")

    @app.workflow(name="shop:new")
    async def new() -> None:
        await steps["pack"].options(key="new")("42")
        await steps["charge"]("42")

    run = submit(old)
    run.result(patient(20))
    report = replay(app, run, new)
    assert report.verdict is Verdict.FITS
    assert "pack@new" in report.warnings[0]
    assert "the replay ends here" in report.warnings[0]


def test_another_function_may_stand_in_for_the_body(app: App) -> None:
    steps = declare(app, [])
    at: list[str] = []

    @app.workflow
    async def checkout() -> Any:
        return await steps["charge"]("42")

    async def stopped() -> Any:
        at.append("the first line")
        return await checkout.definition.function()

    run = submit(checkout)
    run.result(patient(20))
    assert replay(app, run, function=stopped).fits
    assert at == ["the first line"]


def test_a_task_has_no_log_to_replay(app: App) -> None:
    mail = declare(app, [])["mail"]
    run = submit(mail, "x")
    run.result(patient(20))
    with pytest.raises(UsageError, match="is a task, and has no log"):
        replay(app, run)


def test_a_step_that_ended_before_the_body_cancelled_it_has_one_end(app: App) -> None:
    @app.step(name="work")
    async def work(name: str) -> str:
        return name

    @app.workflow
    async def race() -> str:
        tasks = [asyncio.create_task(work(name)) for name in "abcd"]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return str(next(iter(done)).result())

    for _ in range(5):
        run = submit(race)
        run.result(patient(20))
        ends = [event.correlation for event in run.events() if event.type in ("step_completed", "step_failed")]
        assert sorted(ends) == ["work#1", "work#2", "work#3", "work#4"]
        replay(app, run).raise_mismatch()
