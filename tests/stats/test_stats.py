"""What `app.stats()` answers, on every store, with a runner of its own and several processes' files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.stats.files import TASK, Files
from tests.support.patience import patient

from holdfast import App, Fatal, Invocation, Retries, UsageError, sleep
from holdfast.runtime.engine import Engine
from holdfast.stats import Stats
from holdfast.stats.records import DEPLOYS, deploys_entry, read_deploys
from holdfast.stats.rules import DeployMark

MEMORY = pytest.mark.parametrize("url", ["memory"], indirect=True)
HOUR, DAY = 3600.0, 86_400.0


def declare(app: App) -> dict[str, Any]:
    @app.task(name="shop:add")
    def add(a: int) -> int:
        return a

    @app.task(name="shop:charge", retries=Retries(2, backoff="fixed", wait="1ms"), queue="money")
    def charge(order: int) -> None:
        if order < 0:
            raise Fatal(f"order {order} is no order")
        raise ValueError(f"order {order} has no card")

    return {"add": add, "charge": charge}


def end(call: Invocation[Any]) -> None:
    with contextlib.suppress(ValueError, Fatal):
        call.result(patient(30))


def totals(found: Stats) -> tuple[int, int, int, int]:
    each = found.total
    return each.succeeded, each.failed, each.cancelled, each.retried


def test_what_ended_is_in_the_statistics_at_once_in_its_own_process(app: App) -> None:
    tasks = declare(app)
    began = time.time()
    with app.runner(concurrency=4):
        calls = [*tasks["add"].map(range(20)), *(tasks["charge"].submit(order) for order in (1, 2, -7))]
        for call in calls:
            end(call)
        gone = tasks["add"].options(delay="1h").submit(1)
        gone.cancel("not wanted")
        found = app.stats()
    assert totals(found) == (20, 3, 1, 4)
    assert list(found.tasks) == ["shop:add", "shop:charge"]
    assert found.tasks["shop:charge"].run.count == 7
    assert list(found.queues) == ["default", "money"]
    assert found.queues["money"].failed == 3
    first, second = found.failures
    assert (first.error, first.count, first.retried) == ("ValueError: order <n> has no card", 2, 4)
    assert (second.error, second.message) == ("holdfast.errors:Fatal: order -<n> is no order", "order -7 is no order")
    assert first.where.endswith("in charge")
    assert (len(first.series), sum(first.series)) == (len(found.points), 6)
    assert {*first.ids} <= {call.id for call in calls}
    assert began - 61 <= first.first_at <= first.last_at <= time.time() + 1
    assert {each.id for each in found.retried} == {calls[20].id, calls[21].id}
    assert [each.value for each in found.retried] == [3.0, 3.0]
    assert sum(point.ended for point in found.points) == 24
    assert len(found.points) in (60, 61)
    assert found.total.per_second == pytest.approx(24 / (found.until - found.since))


@MEMORY
def test_a_wait_for_a_start_is_a_wait(app: App) -> None:
    @app.task(name="shop:call", rate="10/s", burst=1)
    def call() -> None: ...

    with app.runner(concurrency=4):
        call.map([()] * 3).results(timeout=patient(30))
        wait = app.stats(task=call).total.wait
    assert wait.count == 3
    assert wait.most > 0.15


def test_only_what_is_asked_for_is_told(app: App) -> None:
    tasks = declare(app)
    with app.runner(concurrency=4):
        for call in (tasks["add"].submit(1), tasks["charge"].submit(1)):
            end(call)
        assert totals(app.stats(task="shop:add")) == (1, 0, 0, 0)
        assert totals(app.stats(queue=["money"])) == (0, 1, 0, 2)
        assert totals(app.stats(queue="money", task="shop:add")) == (0, 0, 0, 0)
        assert list(app.stats(task=["shop:charge"]).tasks) == ["shop:charge"]
        assert app.stats(task="shop:add").failures == []


@MEMORY
def test_a_workflow_counts_once_with_its_sleeps(url: str) -> None:
    with App(url, name="shop", poll_interval_seconds=0.05, workflow_linger_seconds=0.0) as app:

        @app.step(name="shop:pack")
        def pack() -> str:
            return "packed"

        @app.workflow(name="shop:checkout")
        async def checkout() -> str:
            packed = await pack()
            await sleep("200ms")
            return packed

        with app.runner():
            assert checkout.submit().result(patient(30)) == "packed"
            found = app.stats()
    assert list(found.tasks) == ["shop:checkout"]
    assert (found.total.ended, found.total.run.count, found.total.wait.count) == (1, 1, 0)
    assert found.total.run.most >= 0.2
    assert found.retried == []


def test_other_processes_are_seen_when_they_have_stored(url: str, files: Files) -> None:
    files.put(120, "a", ended=3)
    files.put(120, "b", ended=4)
    files.put(3 * HOUR, "a", ended=5)
    assert files.stats(1).total.succeeded == 7
    found = files.stats(4)
    assert (found.total.succeeded, found.step) == (12, 300)
    by_point = [point.ended for point in found.points if point.ended]
    assert by_point == [5, 7]
    assert found.tasks[TASK].run.mean == 0.5
    assert found.tasks[TASK].run.percentile(95) == pytest.approx(0.5, rel=0.033)
    assert found.tasks[TASK].wait.percentile(50) == pytest.approx(0.05, rel=0.033)


def test_many_files_are_read_by_pages_and_only_those_of_the_time(files: Files) -> None:
    for number in range(260):
        files.put(90 * 60, f"w{number:03d}")
    files.put(10 * HOUR, "old", ended=1000)
    files.put(60, "new", ended=10)
    assert files.stats(2).total.succeeded == 270

    assert files.app.stats("2h", "1h").total.succeeded == 260
    assert files.app.stats("1h").total.succeeded == 10


@MEMORY
def test_a_series_has_a_point_for_each_step_also_empty_ones(files: Files) -> None:
    files.put(30 * 60, ended=2)
    found = files.app.stats("2h", step="10m")
    assert found.step == 600
    assert [b.at - a.at for a, b in zip(found.points, found.points[1:], strict=False)] == [600.0] * (
        len(found.points) - 1
    )
    assert found.points[0].at == found.since <= found.until - 2 * HOUR
    assert sorted(point.ended for point in found.points)[-2:] == [0, 2]
    assert found.points[-1].seconds <= 600
    files.put(9 * DAY, ended=1)
    files.fold()
    assert files.app.stats("10d", step="1h").step == 3600
    assert files.app.stats("10d", step="90m").step == 7200
    assert files.app.stats("10d", step="90m").total.succeeded == 3


@MEMORY
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"since": "soon"}, "since='soon' is no time"),
        ({"since": dt.datetime(2026, 1, 1)}, "has no time zone"),
        ({"since": -1}, "since=-1 is not"),
        ({"since": "1h", "until": "2h"}, "before until"),
        ({"since": None}, "since=None is not"),
        ({"since": "90000w"}, "1970"),
        ({"step": "90s"}, "whole minutes"),
        ({"step": "0s"}, "whole minutes"),
        ({"since": "30d", "step": "1m"}, "makes over 2,000 points"),
        ({"task": 7}, "task=7: expected a name"),
        ({"queue": [None]}, "expected a name"),
        ({"since": dt.datetime(2126, 1, 1, tzinfo=dt.UTC)}, "before until"),
    ],
)
def test_a_wrong_question_is_refused(app: App, given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        app.stats(**given)


@MEMORY
def test_it_can_be_awaited(app: App) -> None:
    assert asyncio.run(app.astats(dt.timedelta(hours=2), until=dt.datetime.now(dt.UTC))).total.ended == 0


# --- deploys


@pytest.fixture
def start(url: str) -> Callable[..., list[str]]:
    """Start a runner of a release, and return all marks."""

    def started(app: App) -> list[str]:
        with app.runner():
            pass
        return [each.release for each in app.stats("1h").deploys]

    return started


@pytest.mark.parametrize("url", ["sqlite", "mongodb"], indirect=True)
def test_a_runner_with_another_release_marks_a_deploy(url: str, app: App, start: Callable[..., list[str]]) -> None:
    marks = [start(App(url, name="shop", release=release)) for release in ("v1", "v1", "v2")]
    assert marks == [["v1"], ["v1"], ["v1", "v2"]]
    (last,) = app.stats("1h").deploys[-1:]
    assert last.host
    assert last.at <= time.time() + 1


@MEMORY
def test_without_a_release_the_code_of_the_tasks_counts(app: App, start: Callable[..., list[str]]) -> None:
    @app.task(name="t")
    def first() -> int:
        return 1

    assert len(start(app)) == 1

    @app.task(name="u")
    def other() -> int:
        return 2

    marks = start(app)
    assert len(marks) == 2
    assert start(app) == marks
    assert all(len(each) == 12 for each in marks)


class Echo:
    def __call__(self, a: int) -> int:
        return a


@MEMORY
@pytest.mark.parametrize("function", [print, functools.partial(declare), Echo(), Echo().__call__, lambda: 1])
def test_a_task_without_source_has_a_release_too(app: App, start: Callable[..., list[str]], function: Any) -> None:
    app.task(name="t")(function)
    (release,) = start(app)
    assert len(release) == 12


@MEMORY
def test_a_corrupt_list_of_deploys_is_set_aside(app: App, start: Callable[..., list[str]]) -> None:
    async def put(engine: Engine) -> None:
        entry = deploys_entry("shop", [DeployMark(at=1.0, release="v0")], None)
        await engine.store.put_entry(replace(entry, body=b'{"marks": 7}'))

    Files(app).run(put)
    assert app.stats().deploys == []
    assert len(start(app)) == 1
    (entry,) = Files(app).run(lambda engine: engine.store.entries("shop", DEPLOYS))
    assert len(read_deploys(entry).marks) == 1
