"""Forks and reruns of a run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.patience import patient
from tests.workflows.shop import Shop
from tests.workflows.test_replaying import replay
from tests.workflows.test_runs import pages_of

from holdfast import App, Status, UsageError, context
from holdfast.errors import ArgumentsDoNotBind, InvocationCancelled, NotEncodable, StepNotFound, StoreError
from holdfast.model.records import InvocationRecord
from holdfast.workflows.api import sleep
from holdfast.workflows.forking import _copied

Until = Callable[[Callable[[], object]], None]


def test_a_fork_goes_on_before_a_step_without_running_what_was_recorded(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    shop.calls.clear()
    fork = run.fork("ship#1")
    assert fork.result(patient(20)) == "receipt 42, receipt 42 invoice"
    assert shop.calls == ["charge 42 invoice"]  # of the child, which is a new one
    assert fork.record().rerun_of == run.id
    assert [step.id for step in fork.steps()] == [step.id for step in run.steps()]
    assert fork.step("invoice#1").child != run.step("invoice#1").child


def test_recorded_results_and_arguments_can_be_replaced(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    fork = run.fork("ship#1", results={"charge#1": "another receipt"})
    assert fork.result(patient(20)) == "another receipt, receipt 42 invoice"
    fork = run.fork("ship#1", arguments=("43",))
    assert fork.result(patient(20)) == "receipt 42, receipt 43 invoice"
    fork = run.fork("charge#1", arguments={"order": "44"})
    assert fork.result(patient(20)) == "receipt 44, receipt 44 invoice"


def test_what_was_open_is_left_out(shop: Shop, until: Until) -> None:
    run = shop.checkout.submit("42", 3600.0)
    until(lambda: run.status is Status.SUSPENDED)
    fork = run.fork("wait#1")
    until(lambda: fork.status is Status.SUSPENDED)
    assert fork.events(correlation="wait#1")[0].due == run.events(correlation="wait#1")[0].due
    fork.wake()
    assert fork.result(patient(20)) == "receipt 42, receipt 42 invoice"
    assert run.status is Status.SUSPENDED


@pytest.mark.parametrize(
    ("step", "more", "error", "says"),
    [
        ("charge#9", {}, StepNotFound, "Did you mean 'charge#1'"),
        ("shp#1", {}, StepNotFound, "Did you mean 'ship#1'"),
        ("pack#1", {"results": {"ship#1": 1}}, StepNotFound, "has not ended before 'pack#1'"),
        ("ship#1", {"results": {"charge#1": object()}}, NotEncodable, "charge#1"),
        ("ship#1", {"results": ["charge#1"]}, UsageError, "expected a dict"),
        ("ship#1", {"arguments": "43"}, UsageError, "expected a tuple"),
        ("ship#1", {"arguments": (1, 2, 3)}, ArgumentsDoNotBind, "checkout"),
        ("ship#1", {"new_key": "k"}, UsageError, "new_key"),
    ],
)
def test_a_wrong_fork_is_refused_and_nothing_is_written(
    shop: Shop, step: str, more: dict[str, object], error: type[Exception], says: str
) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    before = [record.id for record in shop.app.invocations()]
    with pytest.raises(error, match=says):
        run.fork(step, **more)
    assert [record.id for record in shop.app.invocations()] == before


def test_idempotency_keys_survive_reruns_and_forks(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    first = list(shop.keys)
    assert first == [f"{run.id}/charge#1", f"{run.id}/invoice#1/charge#1"]
    for again in (run.rerun, lambda: run.fork("charge#1")):
        shop.keys.clear()
        again().result(patient(20))
        assert shop.keys == first
    twice = run.rerun()
    twice.result(patient(20))
    shop.keys.clear()
    twice.rerun().result(patient(20))
    assert shop.keys == first
    shop.keys.clear()
    fresh = run.rerun(new_key=True)
    fresh.result(patient(20))
    assert shop.keys == [f"{fresh.id}/charge#1", f"{fresh.id}/invoice#1/charge#1"]
    shop.keys.clear()
    fresh = run.fork("charge#1", new_key=True)
    fresh.result(patient(20))
    assert shop.keys[0] == f"{fresh.id}/charge#1"


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_fork_has_the_chance_of_its_original(tmp_path: Path, is_plain: bool) -> None:
    app = App(f"sqlite:///{tmp_path / 'chance.db'}", name="chance", poll_interval_seconds=0.1)
    seen: list[str] = []

    @app.step(name="charge")
    def charge(token: str) -> str:
        seen.append(f"charge {token}")
        return token

    @app.step(name="ship")
    def ship(token: str, number: int) -> str:
        seen.append(f"ship {token}")
        return f"{token} {number}"

    @app.workflow(name="order")
    async def order(again: bool = False) -> str:
        token = str(context().uuid4())
        await charge(token)
        shipped = await ship(token, context().random.randrange(1_000_000))
        if again:
            context().restart(False)
        return shipped

    @app.workflow(name="plain")
    def plain(again: bool = False) -> str:
        token = str(context().uuid4())
        charge(token)
        shipped = ship(token, context().random.randrange(1_000_000))
        if again:
            context().restart(False)
        return shipped

    flow = plain if is_plain else order
    with app, app.runner():
        run = flow.submit()
        result = run.result(patient(20))
        seen.clear()
        fork = run.fork("ship#1")
        assert fork.result(patient(20)) == result
        assert fork.fork("ship#1", new_key=True).result(patient(20)) == result
        assert [line.split()[0] for line in seen] == ["ship", "ship"]
        replay(app, fork).raise_mismatch()
        # A restart begins another log, whose chance is that of the new run; a fork of that one has it too.
        restarted = run.fork("ship#1", arguments=(True,))
        fresh = restarted.result(patient(20))
        assert fresh != result
        assert restarted.fork("ship#1").result(patient(20)) == fresh


def test_a_step_by_which_a_run_compensates_is_no_place_for_a_fork(tmp_path: Path, until: Until) -> None:
    """The new run is not asked to end: its body would never call that step, and the run would be parked."""
    app = App(f"sqlite:///{tmp_path / 'undone.db'}", name="undone", poll_interval_seconds=0.1)

    @app.step(name="refund")
    async def refund(what: str) -> None: ...

    @app.workflow(name="order")
    async def order() -> None:
        await refund("nothing")
        try:
            await sleep(3600)
        except asyncio.CancelledError:
            await refund("order")
            await refund("postage")
            raise

    with app, app.runner():
        run = order.submit()
        until(lambda: run.status is Status.SUSPENDED)
        run.cancel()
        with pytest.raises(InvocationCancelled):
            run.result(patient(20))
        for step in ("refund#2", "refund#3"):
            with pytest.raises(UsageError, match=f"before '{step}': it was asked to end before that"):
                run.fork(step)
        assert len(app.invocations()) == 1
        fork = run.fork("wait#1")
        until(lambda: fork.status is Status.SUSPENDED)


def test_a_fork_knows_the_children_of_its_original(tmp_path: Path, until: Until) -> None:
    """The id of a child may be an argument of a recorded step."""
    app = App(f"sqlite:///{tmp_path / 'family.db'}", name="family", poll_interval_seconds=0.1)

    @app.step(name="note")
    async def note(what: str) -> str:
        return what

    @app.workflow(name="child")
    async def child(seconds: float) -> str:
        await sleep(seconds)
        return "grown"

    @app.workflow(name="parent")
    async def parent(seconds: float) -> list[str]:
        handle = child.submit(seconds)
        if not seconds:
            await handle
        return [await note(handle.id), await note("end")]

    with app, app.runner():
        for seconds in (0.0, 3600.0):  # the child has ended; or goes on, and the fork has one of its own
            run = parent.submit(seconds)
            told = run.result(patient(20))
            assert run.fork("note#2").result(patient(20)) == told


def test_a_fork_of_a_run_that_has_just_restarted_begins_at_the_same_time(tmp_path: Path, until: Until) -> None:
    app = App(f"sqlite:///{tmp_path / 'anew.db'}", name="anew", poll_interval_seconds=0.1)
    gate = threading.Event()

    @app.step(name="note")
    def note(what: object) -> object:
        return what

    @app.step(name="wait")
    def wait() -> None:
        gate.wait(20)

    @app.workflow(name="order")
    async def order(again: bool) -> object:
        began = await note(context().now())
        await note("begun")
        if again:
            await sleep(0.1)
            context().restart(False)
        await wait()
        return began

    with app, app.runner():
        run = order.submit(True)
        until(lambda: any(event.generation == 1 for event in run.events()))
        until(lambda: [step.id for step in run.steps()] == ["note#1", "note#2"])
        assert run.record().run.started_at is None, "it was not suspended since"
        fork = run.fork("note#2")
        gate.set()
        assert fork.result(patient(20)) == run.result(patient(20))


def test_a_fork_whose_log_cannot_be_copied_is_not_run(
    shop: Shop, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    shop.calls.clear()

    async def refuses(pages: object) -> None:
        raise StoreError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(shop.app.runtime.ready().store, "append", refuses)
        with pytest.raises(StoreError, match="no room"):
            run.fork("ship#1")
    (fork,) = [record for record in shop.app.invocations() if record.rerun_of == run.id]
    assert fork.status is Status.CANCELLED
    assert shop.calls == []


def test_a_fork_that_was_not_finished_is_parked_and_leaves_nothing_behind(
    shop: Shop, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died while it copied the log."""
    run = shop.checkout.submit("42")
    run.result(patient(20))
    shop.calls.clear()
    store = shop.app.runtime.ready().store
    append = store.append

    async def dies(pages: Any) -> Any:
        await append(pages)
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(store, "append", dies)
        patched.setattr("holdfast.workflows.forking.e.portion", lambda events: 2)
        with pytest.raises(ZeroDivisionError):
            run.fork("ship#1")
    (fork,) = [record for record in shop.app.invocations() if record.rerun_of == run.id]
    assert fork.status is Status.REGISTERED
    assert fork.due_at > time.time() + 3000
    shop.app.runtime.run(_make_due(shop.app, fork))
    until(lambda: shop.app.invocation(fork.id).status is Status.PARKED)
    assert "has 2 of its 12 events" in shop.app.invocation(fork.id).record().reason
    assert shop.calls == []
    shop.app.invocation(fork.id).cancel()
    until(lambda: not shop.app.invocation(fork.id).record().outbox)
    shop.app.runtime.run(_remove(shop.app, fork))
    assert pages_of(shop.app, fork) == []


async def _make_due(app: App, record: InvocationRecord) -> None:
    engine = await app.runtime.engine()
    await engine.store.apply([_copied(engine, msgspec.structs.replace(record, due_at=0.0))])


async def _remove(app: App, record: InvocationRecord) -> None:
    assert await (await app.runtime.engine()).store.remove_ended(app.name, [record.id]) == 1
