"""Attempts that fail and are tried again, on every store, with real threads, loops and processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Fatal, Retries, RetryLater, TaskFailed, UsageError
from holdfast.model.records import Terms
from holdfast.retries import FirstMatch, Fixed, MoveTo, Never, Only

SOON = Fixed(3, 0.01)


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


class Flaky(Exception):
    pass


class VeryFlaky(Flaky):
    pass


def failing(app: App, times: int, error: Exception, **options: Any) -> Any:
    """A task that fails so often before it succeeds."""
    left = [error] * times

    @app.task(name="work", **options)
    def work() -> str:
        if left:
            raise left.pop()
        return "done"

    return work


def statuses(invocation: Any) -> list[str]:
    return [entry.status.value for entry in invocation.history()]


def test_a_failure_is_tried_again_and_every_error_is_kept(app: App) -> None:
    work = failing(app, 2, Flaky("not yet"), retries=SOON)
    with app.runner():
        invocation = work.submit()
        assert invocation.result(timeout=patient(20)) == "done"
    record = invocation.record()
    again = ["retry", "pending", "running"]
    assert statuses(invocation) == ["registered", "pending", "running", *again, *again, "success"]
    assert (record.attempt, record.error) == (3, None)
    assert [(failed.number, failed.attempt, failed.error.message) for failed in record.errors] == [
        (1, 1, "not yet"),
        (2, 2, "not yet"),
    ]
    assert all("raise left.pop()" in failed.error.traceback for failed in record.errors)
    why = record.history[3].why
    assert "Flaky: not yet; attempt 1 of 4 failed; next in 10ms" in why


def test_when_none_is_left_it_has_failed(app: App) -> None:
    work = failing(app, 9, Flaky("never"), retries=2)
    assert work.definition.retries == Retries(2)
    quick = app.task(name="quick", retries=SOON)(_raise_flaky)
    with app.runner():
        invocation = quick.submit()
        with pytest.raises(TaskFailed, match="Flaky: never"):
            invocation.result(timeout=patient(20))
    record = invocation.record()
    assert (record.attempt, len(record.errors)) == (4, 3)
    assert record.error is not None
    assert record.reason.endswith("attempt 4 of 4 failed; none is left")


def _raise_flaky() -> None:
    raise Flaky("never")


def test_without_a_policy_a_failure_is_the_end(app: App) -> None:
    work = failing(app, 1, Flaky("once"))
    with app.runner():
        invocation = work.submit()
        with pytest.raises(TaskFailed, match="once"):
            invocation.result(timeout=patient(20))
    assert (invocation.record().terms, invocation.record().errors) == (Terms(), ())


def test_a_policy_may_name_exceptions_and_their_bases(app: App) -> None:
    caught = app.task(name="caught", retries=Only(SOON, Flaky))(_raise_very_flaky)
    other = app.task(name="other", retries=Only(SOON, [OSError, "tests.scenarios.test_retries:Unknown"]))(_raise_flaky)
    chosen = app.task(name="chosen", retries=FirstMatch([(VeryFlaky, Never()), (Exception, SOON)]))(_raise_very_flaky)
    with app.runner():
        ids = [task.submit() for task in (caught, other, chosen)]
        for invocation in ids:
            with pytest.raises(TaskFailed):
                invocation.result(timeout=patient(20))
    assert [invocation.record().attempt for invocation in ids] == [4, 1, 1]
    assert "only builtins:OSError or tests.scenarios.test_retries:Unknown is retried" in ids[1].record().reason


def _raise_very_flaky() -> None:
    raise VeryFlaky("very")


def test_a_policy_may_move_the_work_to_another_queue(app: App) -> None:
    work = failing(app, 1, Flaky("here"), retries=MoveTo("slow", SOON))
    invocation = work.submit()
    with app.runner(queues=["default"]):
        while invocation.status != "retry":
            pass
        assert invocation.record().queue == "slow"
    with app.runner(queues=["slow"]):
        assert invocation.result(timeout=patient(20)) == "done"


def test_a_task_says_when_and_a_policy_whether(app: App) -> None:
    asking = failing(app, 2, RetryLater("20ms", "the bank is closed"))
    bounded = app.task(name="bounded", retries=Fixed(1, 3600))(_ask_for_more)
    with app.runner():
        free, limited = asking.submit(), bounded.submit()
        assert free.result(timeout=patient(20)) == "done"
        with pytest.raises(RetryLater, match=r"again in 0\.01"):
            limited.result(timeout=patient(20))
    assert "it asks to be tried again in 20ms" in free.record().history[3].why
    assert limited.record().attempt == 2


def _ask_for_more() -> None:
    raise RetryLater(0.01)


def test_a_wish_that_makes_no_sense_is_an_ordinary_failure(app: App) -> None:
    work = failing(app, 1, RetryLater("in a while"))
    with app.runner():
        invocation = work.submit()
        with pytest.raises(RetryLater):
            invocation.result(timeout=patient(20))
    assert "in a while" in invocation.record().reason


def test_a_fatal_failure_is_the_end(app: App) -> None:
    work = failing(app, 1, Fatal("the account is closed"), retries=SOON)
    with app.runner():
        invocation = work.submit()
        with pytest.raises(Fatal, match="account is closed"):
            invocation.result(timeout=patient(20))
    assert invocation.record().attempt == 1


def test_it_is_explained_while_it_waits(app: App) -> None:
    work = failing(app, 9, Flaky("not yet"), retries=Fixed(3, 600))
    invocation = work.submit()
    with app.runner():
        while invocation.status != "retry":
            pass
    assert "failed 1 time, last with tests.scenarios.test_retries:Flaky: not yet; the next attempt is due in" in (
        invocation.explain()
    )


def test_a_policy_that_is_not_known_parks_the_work(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    work = failing(app, 1, Flaky("here"), retries=SOON)
    monkeypatch.setattr(work, "terms", Terms(retries={"kind": "from-the-future", "moon": "full"}))
    with app.runner():
        invocation = work.submit()
        while invocation.status != "parked":
            pass
        record = invocation.record()
        assert "whether it is to be tried again is not known" in record.reason
        assert [(each.number, each.attempt, each.error.message) for each in record.errors] == [(1, 1, "here")]
        assert record.failures == 1  # a runner that knows the policy counts it
        other = app.task(name="other")(abs).submit(-3)
        with app.runner():
            assert other.result(timeout=patient(20)) == 3


def test_what_contradicts_itself_is_refused(app: App) -> None:
    with pytest.raises(UsageError, match="contradict each other"):
        app.task(name="a", at_most_once=True, retries=3)(abs)
    with pytest.raises(UsageError, match="not a retry policy"):
        app.task(name="b", retries="3")(abs)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"no option retry\. Did you mean retries"):
        app.task(name="c", retry=3)(abs)  # type: ignore[call-overload]
