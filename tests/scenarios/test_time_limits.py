"""Limits of time on every store: timeouts, soft ones, and what is not started in time."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.scenarios import workshop
from tests.support.patience import patient

from holdfast import App, Invocation, ResultTimeout, SoftTimeout, Status, TimedOut, UsageError
from holdfast.errors import Expired
from holdfast.model.records import PLAIN, Terms
from holdfast.retries import Fixed, Only
from holdfast.runtime import settle

There = Callable[..., Path]


@pytest.fixture
def app(workshop_app: App) -> App:
    return workshop_app


def story(invocation: Invocation[Any]) -> list[str]:
    return [entry.status.value for entry in invocation.history()]


def _double(x: int) -> int:
    return 2 * x


async def _double_later(x: int) -> int:
    return 2 * x


# --- the hard one


@pytest.mark.parametrize(
    ("executor", "name"), [("thread", "deaf"), ("loop", "asleep"), ("process", "deaf"), ("process", "asleep")]
)
def test_an_attempt_that_takes_too_long_is_ended(
    app: App, tmp_path: Path, there: There, executor: Any, name: str
) -> None:
    task = app.task(executor=executor, timeout="700ms")(getattr(workshop, name))
    with app.runner(concurrency=1):
        invocation = task.submit(str(tmp_path))
        with pytest.raises(TimedOut, match="timed out after 700ms") as raised:
            invocation.result(timeout=patient(30))
        assert isinstance(raised.value, TimeoutError)
        assert app.task(name="double")(_double).submit(2).id  # the place is free again
    record = invocation.record()
    assert (record.status, record.reason) == (Status.FAILED, "TimedOut: timed out after 700ms")
    if executor == "thread":
        there("over")


def test_retries_apply_to_a_timeout_as_to_any_error(app: App) -> None:
    attempts: list[float] = []

    @app.task(name="slow", retries=Only(Fixed(2, 0.01), TimedOut), timeout="200ms")
    def slow() -> str:
        attempts.append(time.monotonic())
        while len(attempts) < 3:
            time.sleep(0.01)
        return "third time lucky"

    with app.runner():
        invocation = slow.submit()
        assert invocation.result(timeout=patient(30)) == "third time lucky"
    record = invocation.record()
    assert record.attempt == 3
    assert {failed.error.type_name for failed in record.errors} == {"holdfast.errors:TimedOut"}
    assert "TimedOut: timed out after 200ms; attempt 1 of 3 failed" in next(e.why for e in record.history if e.why)


@pytest.mark.parametrize(("executor", "name"), [("thread", "deaf_at_first"), ("loop", "stubborn")])
def test_what_cannot_be_stopped_has_failed_all_the_same_and_the_record_says_so(
    app: App, tmp_path: Path, there: There, executor: Any, name: str
) -> None:
    task = app.task(executor=executor, timeout="400ms")(getattr(workshop, name))
    double = app.task(name="double")(_double)
    warm_up = app.task(name="warm_up", executor=executor)(_double if executor == "thread" else _double_later)
    with app.runner(concurrency=1):
        # The time counts from the moment in which the call is handed over: the thread or the loop has to be there, or
        # on a busy machine the time is over before the first step, and what never began is stopped easily.
        assert warm_up.submit(1).result(timeout=patient(30)) == 2
        invocation = task.submit(str(tmp_path))
        with pytest.raises(TimedOut):
            invocation.result(timeout=patient(30))
        expected = "TimedOut: timed out after 400ms; its code could not be stopped and still runs"
        assert invocation.record().reason == expected
        there("survived")
        waiting = double.submit(4)
        with pytest.raises(ResultTimeout, match=r"waiting for .* (for a free slot|to be claimed)"):
            waiting.result(timeout=0.5)
        (tmp_path / "open").touch()
        there("over")
        assert waiting.result(timeout=patient(30)) == 8
    assert invocation.record().reason == expected  # what it returned at last is of no use to anybody


def test_a_coroutine_whose_time_is_over_before_its_first_step_gives_back_its_place(app: App, tmp_path: Path) -> None:
    """Another coroutine blocks the loop for longer than what cannot be stopped is waited for."""
    blocking, go_on = threading.Event(), threading.Event()
    both = asyncio.Barrier(2)

    @app.task(name="blocks")
    async def blocks() -> None:
        blocking.set()
        go_on.wait(30)

    @app.task(name="late", timeout="200ms")
    async def late() -> None:
        (tmp_path / "begun").touch()

    @app.task(name="meets")
    async def meets() -> str:
        await both.wait()
        return "met"

    with app.runner(concurrency=2):
        blocker = blocks.submit()
        assert blocking.wait(30)
        invocation = late.submit()
        with pytest.raises(TimedOut):
            invocation.result(timeout=patient(30))
        go_on.set()
        blocker.result(timeout=patient(30))
        assert meets.map([(), ()]).results(timeout=patient(30)) == ["met", "met"]  # both places are free again
    assert not (tmp_path / "begun").exists()


def test_an_abandoned_attempt_is_not_taken_for_the_next(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(timeout="600ms", retries=Fixed(1, 0.01))(workshop.deaf_at_first)
    with app.runner(concurrency=2):
        invocation = task.submit(str(tmp_path))
        assert invocation.result(timeout=patient(30)) == "second attempt"
        (tmp_path / "open").touch()
        there("over")
    record = invocation.record()
    assert record.attempt == 2
    assert [failed.error.type_name for failed in record.errors] == ["holdfast.errors:TimedOut"]


def test_what_was_agreed_at_submit_holds(app: App) -> None:
    task = app.task(name="double", timeout=60, cancel_grace=3)(_double)
    assert task.submit(1).record().terms == Terms(timeout=60, cancel_grace=3)
    changed = task.options(timeout="2h", soft_timeout="1h", cancel_children=False)
    assert changed.submit(1).record().terms == Terms(
        timeout=7200, soft_timeout=3600, cancel_grace=3, cancel_children=False
    )
    assert changed.options(priority=1).submit(1).record().terms.timeout == 7200
    assert app.task(name="plain")(_double).submit(1).record().terms == PLAIN


def test_what_makes_no_sense_is_refused(app: App) -> None:
    with pytest.raises(UsageError, match="soft_timeout=2s is not before timeout=1s"):
        app.task(name="a", timeout=1, soft_timeout=2)(_double)
    with pytest.raises(UsageError, match="timeout=0 leaves no time"):
        app.task(name="b", timeout=0)(_double)
    with pytest.raises(UsageError, match=r"^cancel_grace=-1 is not"):
        app.task(name="b", cancel_grace=-1)(_double)
    flags: list[dict[str, Any]] = [{"cancel_children": "no"}, {"at_most_once": 1}]
    for flag in flags:
        with pytest.raises(UsageError, match=": expected True or False"):
            app.task(name="b", **flag)(_double)
    task = app.task(name="c")(_double)
    with pytest.raises(UsageError, match="ends before the call is due"):
        task.options(delay="1h", expires="1m").submit(1)
    with pytest.raises(UsageError, match="no time zone"):
        task.options(expires=dt.datetime(2030, 1, 1))


# --- the soft one


@pytest.mark.parametrize(
    ("executor", "name"),
    [("thread", "partial"), ("process", "partial"), ("loop", "partial_later"), ("process", "partial_later")],
)
def test_a_soft_timeout_is_raised_inside(app: App, tmp_path: Path, executor: Any, name: str) -> None:
    task = app.task(executor=executor, soft_timeout="500ms", timeout=60)(getattr(workshop, name))
    warm = app.task(executor="process")(workshop.facts)  # the start of a process takes its time
    with app.runner(concurrency=1):
        assert executor != "process" or warm.submit().result(timeout=patient(30))
        assert task.submit(str(tmp_path)).result(timeout=patient(30)).startswith("partial")
        assert (
            task.submit(str(tmp_path)).result(timeout=patient(30)).startswith("partial")
        )  # in the same thread or process


def test_a_soft_timeout_that_is_over_before_a_process_has_started_is_raised_inside_too(
    app: App, tmp_path: Path
) -> None:
    task = app.task(executor="process", soft_timeout="1ms", timeout=60)(workshop.partial)
    with app.runner(concurrency=1):
        assert task.submit(str(tmp_path)).result(timeout=patient(30)).startswith("partial")


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_who_does_not_handle_a_soft_timeout_fails_with_it(app: App, tmp_path: Path, executor: Any) -> None:
    task = app.task(executor=executor, soft_timeout="300ms")(workshop.deaf)
    with app.runner():
        invocation = task.submit(str(tmp_path))
        with pytest.raises(SoftTimeout, match="the soft timeout is over"):
            invocation.result(timeout=patient(30))


def test_a_soft_timeout_strikes_nobody_who_has_ended(app: App) -> None:
    task = app.task(name="double", soft_timeout="1ms")(_double)
    other = app.task(name="other")(_double)
    with app.runner(concurrency=1):
        ends = [one.submit(n) for n in range(100) for one in (task, other)]
        for number, invocation in enumerate(ends):
            try:
                assert invocation.result(timeout=patient(30)) == number // 2 * 2
            except SoftTimeout:
                assert number % 2 == 0  # only those that have one


# --- not started in time


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that were not there at the last look are seen sooner than after the usual five seconds."""
    monkeypatch.setattr(settle, "IDLE_SECONDS", 0.5)


@pytest.mark.usefixtures("watchful")
def test_what_nobody_starts_in_time_expires_though_nobody_claims_it(app: App) -> None:
    foreign = app.task(name="double", expires="300ms", tags=["gpu"])(_double)
    with app.runner():
        invocation = foreign.submit(1)
        assert "It expires in" in invocation.explain()
        with pytest.raises(Expired, match="expired: it was to be started"):
            invocation.result(timeout=patient(30))
    record = invocation.record()
    assert (record.attempt, story(invocation)) == (0, ["registered", "failed"])


@pytest.mark.usefixtures("watchful")
def test_what_waits_for_a_slot_expires_too(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(limit=1)(workshop.obliging)
    with app.runner(concurrency=4):
        first = task.submit(str(tmp_path))
        there("begun")
        second = task.options(expires="500ms").submit(str(tmp_path))
        with pytest.raises(Expired):
            second.result(timeout=patient(30))
        assert "running" not in story(second)
        first.cancel()
        assert first.result(timeout=patient(30))


def test_a_worker_starts_nothing_that_has_expired(app: App) -> None:
    calls: list[int] = []

    @app.task(name="late")
    def late(n: int) -> None:
        calls.append(n)

    app.invocations()  # the store is open
    in_a_moment = dt.datetime.now(dt.UTC) + dt.timedelta(milliseconds=500)
    invocation = late.options(expires=in_a_moment).submit(1)
    while dt.datetime.now(dt.UTC) < in_a_moment:
        time.sleep(0.01)
    with app.runner():
        with pytest.raises(Expired):
            invocation.result(timeout=patient(30))
        assert late.submit(2).result(timeout=patient(30)) is None
    assert calls == [2]
    assert invocation.record().attempt == 0


def test_what_is_started_in_time_and_its_retries_do_not_expire(app: App) -> None:
    failed = threading.Event()

    @app.task(name="again", retries=Fixed(1, 1.0), expires="800ms")
    def again() -> str:
        if failed.is_set():
            return "second"
        failed.set()
        raise ValueError

    with app.runner():
        invocation = again.submit()
        assert invocation.result(timeout=patient(30)) == "second"
    assert invocation.record().start_by is None


def test_a_wait_that_is_over_tells_what_is_going_on(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(timeout=60)(workshop.obliging)
    with app.runner():
        invocation = task.submit(str(tmp_path))
        there("begun")
        with pytest.raises(ResultTimeout, match=r"its code is running on .* of the 1m that it may take"):
            invocation.result(timeout=0.01)
        invocation.cancel()
        invocation.result(timeout=patient(30))


def test_an_abandoned_attempt_may_end_before_the_next_one_does(app: App) -> None:
    first, over, go = threading.Event(), threading.Event(), threading.Event()

    @app.task(name="twice", timeout="600ms", retries=Fixed(1, 0.01))
    def twice() -> str:
        if first.is_set():
            over.set()
            go.wait(0.1)
            return "second attempt"
        first.set()
        while not over.is_set():
            with contextlib.suppress(BaseException):  # that it is to stop
                time.sleep(0.01)
        return "first attempt"

    with app.runner(concurrency=2):
        assert twice.submit().result(timeout=patient(30)) == "second attempt"
