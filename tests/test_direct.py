"""Direct tasks: the call looks local, and the work runs on the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.patience import patient

from holdfast import App, Status, UsageError
from holdfast.direct import AsyncDirectTask, DirectTask
from holdfast.errors import BlockingCall
from holdfast.retries import Fixed
from holdfast.testing import testing_app

PATIENCE = patient(30.0)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App(f"sqlite:///{tmp_path}/shop.db", name="shop") as app:
        yield app


def in_twos(numbers: list[int]) -> list[tuple[list[int]]]:
    return [(numbers[start : start + 2],) for start in range(0, len(numbers), 2)]


def test_a_call_returns_the_value_of_an_invocation(app: App) -> None:
    @app.direct_task
    def add(x: int, y: int = 1) -> int:
        return x + y

    assert isinstance(add, DirectTask)
    assert add.local(1) == 2
    assert app.invocations() == []
    with app.runner(concurrency=1):
        assert add(2, y=3) == 5
        assert add.options(priority=9)(1) == 2
        assert add.submit(4).result(PATIENCE) == 5
    assert [each.priority for each in app.invocations()] == [0, 9, 0]


def test_a_call_raises_what_the_task_raised(app: App) -> None:
    @app.direct_task(retries=Fixed(1, 0.01))
    def fail() -> None:
        raise KeyError("no such thing")

    with app.runner(), pytest.raises(KeyError, match="no such thing"):
        fail()
    (record,) = app.invocations()
    assert record.attempt == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_is_spread_and_its_results_are_one(app: App, is_async: bool) -> None:
    options = {"fan_out": in_twos, "aggregate": sum}
    if is_async:

        @app.direct_task(**options)  # type: ignore[arg-type]
        async def total(numbers: list[int]) -> int:
            return sum(numbers)

        async def call() -> int:
            return await total.options(priority=1)([1, 2, 3, 4, 5])

        assert isinstance(total, AsyncDirectTask)
        with app.runner():
            assert asyncio.run(call()) == 15
    else:

        @app.direct_task(**options)  # type: ignore[arg-type]
        def plain_total(numbers: list[int]) -> int:
            return sum(numbers)

        with app.runner():
            assert plain_total([1, 2, 3, 4, 5]) == 15
            assert plain_total([]) == 0
    assert len(app.invocations()) == 3


def test_calls_in_tasks_need_one_slot_for_all(app: App) -> None:
    @app.direct_task
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    with app.runner(concurrency=1):
        assert fibonacci(5) == 5
    assert Status.PAUSED in {line.status for each in app.invocations() for line in each.history}


def test_a_call_in_the_body_of_a_workflow_is_a_recorded_child(app: App) -> None:
    @app.direct_task
    def double(n: int) -> int:
        return 2 * n

    @app.direct_task(fan_out=in_twos, aggregate=sum)
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.workflow
    async def flow(n: int) -> int:
        first = await double.submit(n)
        return first + await total([1, 2, 3])

    @app.workflow
    def plain_flow(n: int) -> int:
        return double(n) + double(n + 1)

    with app.runner():
        assert flow.submit(4).result(PATIENCE) == 14
        assert plain_flow.submit(4).result(PATIENCE) == 18


def test_a_call_on_an_event_loop_is_refused_before_it_is_stored(app: App) -> None:
    @app.direct_task
    def add(x: int) -> int:
        return x

    async def main() -> None:
        with pytest.raises(BlockingCall, match=r"add\(\)"):
            add(1)

    asyncio.run(main())
    assert app.invocations() == []


def test_fan_out_and_aggregate_belong_together(app: App) -> None:
    for options in ({"fan_out": in_twos}, {"aggregate": sum}, {"fan_out": 3, "aggregate": sum}):
        with pytest.raises(UsageError, match="belong together"):
            app.direct_task(**options)(in_twos)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no option fan_ou\. Did you mean fan_out\?"):
        app.direct_task(fan_ou=in_twos)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="no option fan_out"):
        app.task(fan_out=in_twos)  # type: ignore[call-overload]


def test_in_the_testing_kit_a_call_runs_its_task(app: App) -> None:
    @app.direct_task
    def double(n: int) -> int:
        return 2 * n

    @app.task
    def parent(n: int) -> int:
        return double(n) + 1

    with testing_app(app):
        assert double(2) == 4
        assert parent.submit(3).result() == 7
