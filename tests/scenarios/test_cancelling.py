"""Cancelling whatever has not ended, on every store: what waits, threads, coroutines, processes, children."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.scenarios import workshop
from tests.support.patience import patient

from holdfast import App, Invocation, InvocationCancelled, Status, UsageError, context
from holdfast.errors import InvocationNotFound
from holdfast.model.records import CANCEL
from holdfast.model.status import FINAL
from holdfast.retries import Fixed
from holdfast.runtime.cancel import CancellationListener

There = Callable[..., Path]


@pytest.fixture
def app(workshop_app: App) -> App:
    return workshop_app


def story(invocation: Invocation[Any]) -> list[str]:
    return [entry.status.value for entry in invocation.history()]


def ended(invocation: Invocation[Any], seconds: float = patient(30.0)) -> Status:
    """Where it stands when it has ended."""
    deadline = time.monotonic() + seconds
    while (status := invocation.status) not in FINAL:
        assert time.monotonic() < deadline, invocation.explain()
        time.sleep(0.01)
    return status


def _double(x: int) -> int:
    return 2 * x


# --- what waits


def test_what_waits_is_cancelled_at_once_and_says_who_and_why(app: App) -> None:
    invocation = app.task(name="double")(_double).options(delay="1h", key="k").submit(2)
    assert invocation.cancel("not wanted", by="ann") is Status.CANCELLED
    assert story(invocation) == ["registered", "cancelled"]
    assert invocation.history()[-1].why == "cancelled by ann: not wanted"
    with pytest.raises(InvocationCancelled, match="was cancelled by ann: not wanted") as raised:
        invocation.result(timeout=patient(5))
    assert (raised.value.by, raised.value.reason, raised.value.invocation_id) == ("ann", "not wanted", invocation.id)
    assert invocation.explain().startswith("cancelled by ann: not wanted, ")


def test_a_group_is_cancelled_whole(app: App) -> None:
    task = app.task(name="double", unique_by="*")(_double)
    with app.runner():
        before = task.submit(9)
        before.result(timeout=patient(30))
    group = task.options(delay="1h").map([*range(700), 5])
    assert group.cancel("not wanted", by="ann") == [Status.CANCELLED] * 701
    assert group[600].history()[-1].why == "cancelled by ann: not wanted"
    assert asyncio.run(group.acancel()) == [Status.CANCELLED] * 701
    (ended,) = app.archive(status="success")
    assert app.purge([group[3].id]).removed == 1
    with pytest.raises(InvocationNotFound, match=group[3].id):
        group.cancel()
    assert ended.id == before.id


def test_a_reason_is_kept_whatever_it_is(app: App) -> None:
    task = app.task(name="double")(_double).options(delay="1h")
    odd, long, wrong = task.submit(1), task.submit(2), task.submit(3)
    odd.cancel("a\udc80b\0", by="\ud800")
    assert odd.record().cancellation.reason == "a\\udc80b\0"  # type: ignore[union-attr]
    long.cancel("x" * 20_000_000)
    assert len(long.history()[-1].why) < 3000
    for given in ({"reason": 3}, {"by": b"ann"}):
        with pytest.raises(UsageError, match="expected a text"):
            wrong.cancel(**given)  # type: ignore[arg-type]
    assert wrong.status is Status.REGISTERED


def test_cancelling_again_or_what_has_ended_changes_nothing(app: App) -> None:
    task = app.task(name="double")(_double)
    first, second = task.submit(1), task.options(delay="1h").submit(2)
    with app.runner():
        assert first.result(timeout=patient(30)) == 2
    assert first.cancel() is Status.SUCCESS
    assert first.result(timeout=patient(5)) == 2
    second.cancel("first", by="ann")
    before = second.record()
    assert second.cancel("second", by="bob") is Status.CANCELLED
    assert second.record() == before
    with pytest.raises(InvocationNotFound):
        app.invocation("0" * 26).cancel()


def test_who_waits_is_told_at_once(app: App) -> None:
    invocation = app.task(name="double")(_double).options(delay="1h").submit(1)

    async def both() -> None:
        waiting = asyncio.create_task(invocation.aresult(timeout=patient(30)))
        await asyncio.sleep(0)
        assert await invocation.acancel("async", by="ann") is Status.CANCELLED
        with pytest.raises(InvocationCancelled, match="async"):
            await waiting

    asyncio.run(both())


def test_one_that_waits_for_another_attempt_is_cancelled(app: App) -> None:
    @app.task(name="fails", retries=Fixed(9, 3600))
    def fails() -> None:
        raise ValueError

    invocation = fails.submit()
    with app.runner():
        deadline = time.monotonic() + 30
        while invocation.status is not Status.RETRY:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert invocation.cancel() is Status.CANCELLED
    assert story(invocation)[-2:] == ["retry", "cancelled"]


def test_who_asks_is_told_by_default(app: App) -> None:
    invocation = app.task(name="double")(_double).submit(1)
    invocation.cancel()
    assert "@" in (invocation.record().cancellation or pytest.fail("nobody")).by


# --- what runs


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_plain_function_learns_it_from_its_context(app: App, tmp_path: Path, there: There, executor: Any) -> None:
    task = app.task(executor=executor)(workshop.attentive)
    with app.runner(concurrency=2):
        invocation = task.submit(str(tmp_path))
        there("begun")
        assert invocation.cancel("enough", by="ann") is Status.CANCELLING
        assert ended(invocation) is Status.CANCELLED
        there("told")
    assert story(invocation) == ["registered", "pending", "running", "cancelling", "cancelled"]
    record = invocation.record()
    assert record.reason == "cancelled by ann: enough"
    assert (record.attempt, record.owner) == (1, None)


@pytest.mark.parametrize("executor", ["loop", "process"])
def test_a_coroutine_is_cancelled_and_cleans_up(app: App, tmp_path: Path, there: There, executor: Any) -> None:
    task = app.task(executor=executor)(workshop.asleep)
    with app.runner(concurrency=2):
        invocation = task.submit(str(tmp_path))
        there("begun")
        began = time.monotonic()
        invocation.cancel()
        assert ended(invocation) is Status.CANCELLED
        assert time.monotonic() - began < 8  # and not the grace
        assert there("told").read_text() == "True"
        assert there("cleaned")
    with pytest.raises(InvocationCancelled):
        invocation.result(timeout=1)


@pytest.mark.parametrize(("executor", "name"), [("thread", "obliging"), ("loop", "content"), ("process", "content")])
def test_a_result_in_the_time_of_grace_counts(app: App, tmp_path: Path, there: There, executor: Any, name: str) -> None:
    task = app.task(executor=executor)(getattr(workshop, name))
    with app.runner(concurrency=2):
        invocation = task.submit(str(tmp_path))
        there("begun")
        assert invocation.cancel() is Status.CANCELLING
        assert invocation.result(timeout=patient(30)) in ("done nevertheless", "kept")
    assert story(invocation)[-2:] == ["cancelling", "success"]


def test_an_error_while_cleaning_up_is_a_failure_and_no_other_attempt_follows(
    app: App, tmp_path: Path, there: There
) -> None:
    task = app.task(retries=5)(workshop.clumsy)
    with app.runner():
        invocation = task.submit(str(tmp_path))
        there("begun")
        invocation.cancel()
        with pytest.raises(KeyError, match="broom"):
            invocation.result(timeout=patient(30))
    assert story(invocation)[-2:] == ["cancelling", "failed"]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_who_does_not_listen_is_ended_when_the_grace_is_over(
    app: App, tmp_path: Path, there: There, executor: Any
) -> None:
    task = app.task(executor=executor, cancel_grace="300ms")(workshop.deaf)
    with app.runner(concurrency=1):
        invocation = task.submit(str(tmp_path))
        there("begun")
        invocation.cancel("now", by="ann")
        assert ended(invocation) is Status.CANCELLED
        assert invocation.record().reason == "cancelled by ann: now; its code did not end by itself and was stopped"
        if executor == "thread":
            there("over")
        assert app.task(name="double")(_double).name == "double"


def test_what_cannot_be_stopped_is_given_up_and_has_its_place(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(cancel_grace="100ms")(workshop.stubborn)
    double = app.task(name="double")(_double)
    with app.runner(concurrency=1):
        invocation = task.submit(str(tmp_path))
        there("begun")
        invocation.cancel("now", by="ann")
        assert ended(invocation) is Status.CANCELLED
        assert invocation.record().reason == "cancelled by ann: now; its code could not be stopped and still runs"
        waiting = double.submit(4)
        assert waiting.status is Status.REGISTERED  # there is one place, and that is taken
        (tmp_path / "open").touch()
        assert waiting.result(timeout=patient(30)) == 8
    assert story(invocation)[-1] == "cancelled"


def test_a_cancelled_one_gives_back_its_slot(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(limit=1)(workshop.attentive)
    with app.runner(concurrency=4):
        first, second = task.submit(str(tmp_path)), task.submit(str(tmp_path))
        there("begun")
        holder = next(one for one in (first, second) if one.record().slot is not None)
        waiter = second if holder is first else first
        (tmp_path / "begun").unlink()
        holder.cancel()
        there("begun")
        assert holder.status is Status.CANCELLED
        waiter.cancel()
        assert ended(waiter) is Status.CANCELLED


def test_an_owner_that_hears_no_hint_looks_by_itself(
    app: App, tmp_path: Path, there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(workshop.asleep)
    with app.runner():
        invocation = task.submit(str(tmp_path))
        there("begun")
        hub = app.runtime.ready().hub
        send = hub.send
        monkeypatch.setattr(hub, "send", lambda *hints: send(*[hint for hint in hints if hint.kind != CANCEL]))
        began = time.monotonic()
        invocation.cancel()
        assert ended(invocation) is Status.CANCELLED
        assert time.monotonic() - began < 5


def test_what_is_being_cancelled_tells_so(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(workshop.stubborn)
    with app.runner():
        invocation = task.options(cancel_grace="1h").submit(str(tmp_path))
        there("begun")
        assert invocation.cancel("enough", by="ann") is Status.CANCELLING
        assert invocation.cancel("again", by="bob") is Status.CANCELLING
        assert "cancelled by ann: enough; asked to end on" in invocation.explain()
        assert "left to clean up" in invocation.explain()
        (tmp_path / "open").touch()
        assert invocation.result(timeout=patient(30)) == "too late"


def test_a_runner_that_stops_ends_what_is_being_cancelled(app: App, tmp_path: Path, there: There) -> None:
    task = app.task(cancel_grace="1h", executor="process")(workshop.deaf)
    with app.runner(drain_timeout=0):
        invocation = task.submit(str(tmp_path))
        there("begun")
        assert invocation.cancel() is Status.CANCELLING
    assert ended(invocation) is Status.CANCELLED


def test_a_retry_that_loses_to_a_cancellation_is_no_retry(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner does not know of the cancellation when its code raises."""

    async def hears_nothing(self: CancellationListener) -> None: ...

    monkeypatch.setattr(CancellationListener, "_look", hears_nothing)
    inside, go = threading.Event(), threading.Event()

    @app.task(name="fails", retries=Fixed(5, 0.01))
    def fails() -> None:
        inside.set()
        go.wait(30)
        raise ValueError

    with app.runner():
        invocation = fails.submit()
        assert inside.wait(30)
        assert invocation.cancel("enough", by="ann") is Status.CANCELLING
        go.set()
        assert ended(invocation) is Status.CANCELLED
    assert story(invocation)[-2:] == ["cancelling", "cancelled"]
    assert invocation.record().reason == "cancelled by ann: enough"


# --- children


def test_children_are_cancelled_with_their_parent_unless_they_are_not_to_be(app: App) -> None:
    @app.task(name="leaf")
    def leaf(n: int) -> int:
        return n

    begun = threading.Event()

    @app.task(name="branch")
    def branch() -> None:
        leaf.options(delay="1h").submit(2)
        begun.set()
        while not context().cancelled:
            time.sleep(0.01)
        leaf.options(delay="1h").submit(3)  # too late, and cancelled all the same
        context().raise_if_cancelled()

    @app.task(name="root")
    def root() -> None:
        leaf.options(delay="1h").submit(1)
        branch.submit()
        while not context().cancelled:
            time.sleep(0.01)
        context().raise_if_cancelled()

    with app.runner(concurrency=4):
        for children, end in ((None, "cancelled"), (False, "registered")):
            begun.clear()
            top = root.submit()
            assert begun.wait(30)
            (below,) = [r for r in app.invocations(task="branch") if r.parent_id == top.id]
            top.cancel("all", by="ann", children=children)
            assert ended(top) is Status.CANCELLED
            if children is False:
                app.invocation(below.id).cancel("this", children=False)
            assert ended(app.invocation(below.id)) is Status.CANCELLED
            deadline = time.monotonic() + 30
            while True:
                leaves = [r for r in app.invocations(task="leaf") if r.parent_id in (top.id, below.id)]
                if [r.status.value for r in leaves] == [end] * 3:
                    break
                assert time.monotonic() < deadline, leaves
                time.sleep(0.01)
            if children is None:
                assert {r.reason for r in leaves if r.parent_id == top.id} == {
                    f"cancelled by ann: its parent {top.id} was cancelled: all"
                }


def test_what_a_child_submitted_that_has_ended_lives_on(app: App) -> None:
    @app.task(name="leaf")
    def leaf() -> None: ...

    @app.task(name="branch")
    def branch() -> str:
        return leaf.options(delay="1h").submit().id

    below: list[str] = []

    @app.task(name="root")
    def root() -> None:
        below.append(branch.submit().result(timeout=patient(30)))
        while not context().cancelled:
            time.sleep(0.01)
        context().raise_if_cancelled()

    with app.runner(concurrency=4):
        top = root.submit()
        deadline = time.monotonic() + 30
        while not below:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        top.cancel()
        assert ended(top) is Status.CANCELLED
    assert app.invocation(below[0]).status is Status.REGISTERED


def test_a_task_may_declare_that_its_children_live_on(app: App) -> None:
    @app.task(name="leaf")
    def leaf() -> None: ...

    @app.task(name="root", cancel_children=False)
    def root() -> str:
        child = leaf.options(delay="1h").submit()
        while not context().cancelled:
            time.sleep(0.01)
        context().raise_if_cancelled()
        return child.id

    with app.runner():
        top = root.submit()
        deadline = time.monotonic() + 30
        while not app.invocations(task="leaf"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        top.cancel()
        assert ended(top) is Status.CANCELLED
    assert [record.status for record in app.invocations(task="leaf")] == [Status.REGISTERED]


def test_a_task_that_cancels_another_is_named(app: App) -> None:
    task = app.task(name="double")(_double)
    victim = task.options(delay="1h").submit(1)

    @app.task(name="hunter")
    def hunter(id: str) -> str:
        app.invocation(id).cancel()
        return context().invocation_id

    with app.runner():
        mine = hunter.submit(victim.id).result(timeout=patient(30))
    cancellation = victim.record().cancellation
    assert cancellation is not None
    assert cancellation.by == f"invocation {mine}"


def test_what_is_submitted_while_cleaning_up_has_the_grace_that_the_settings_say() -> None:
    with App("memory://", poll_interval_seconds=0.2, cancel_grace_seconds=123) as app:
        begun = threading.Event()
        child = app.task(name="double")(_double)

        @app.task
        async def above() -> None:
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                await child.options(delay="1h").asubmit(1)

        parent = above.submit()
        with app.runner():
            assert begun.wait(30)
            parent.cancel("not wanted")
            assert ended(parent) is Status.CANCELLED
            (below,) = app.invocations(parent=parent.id)
            assert ended(app.invocation(below.id)) is Status.CANCELLED
        cancellation = app.invocation(below.id).record().cancellation
        assert cancellation is not None
        assert cancellation.until - cancellation.at == pytest.approx(123)


def test_children_are_yes_or_no(app: App) -> None:
    with pytest.raises(UsageError, match="children='no': expected True, False or None"):
        app.task(name="plain")(lambda: None).submit().cancel(children="no")  # type: ignore[arg-type]
