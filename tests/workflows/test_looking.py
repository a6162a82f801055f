"""Steps, events, explanations and wakes of a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from tests.support.patience import patient
from tests.workflows.shop import Shop

from holdfast import Status, UsageError, context
from holdfast.errors import InvocationStatusTransitionError, LogEventNotFound, StepNotFound
from holdfast.workflows.looking import nearest

Until = Callable[[Callable[[], object]], None]


def test_steps_tell_what_was_called_with_what_and_what_came_of_it(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    assert run.result(patient(20)) == "receipt 42, receipt 42 invoice"
    steps = run.steps()
    assert [(step.id, step.kind, step.status, step.attempt) for step in steps] == [
        ("charge#1", "step", "completed", 1),
        ("pack#1", "step", "completed", 1),
        ("pack#2", "step", "completed", 1),
        ("ship#1", "step", "completed", 1),
        ("invoice#1", "child", "completed", 1),
    ]
    assert [(step.arguments[0], step.result) for step in steps[:2]] == [(("42",), "receipt 42"), (("42",), "box 42")]
    assert all(step.started_at is not None and step.started_at <= (step.ended_at or 0) for step in steps)
    assert all("shop.py:" in step.where for step in steps)  # also of those that gather has called
    child = shop.app.invocation(steps[-1].child)
    assert child.record().parent_id == run.id
    assert (steps[-1].queue, run.step("charge#1").name) == ("default", "charge")


def test_a_missing_step_is_an_error_that_names_the_nearest(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    with pytest.raises(StepNotFound, match=r"no step 'chrge#1'. Did you mean 'charge#1'"):
        run.step("chrge#1")
    with pytest.raises(StepNotFound, match=r"Did you mean 'pack#2'"):
        run.step("pack#7")
    with pytest.raises(StepNotFound, match="charge#1"):
        run.events(correlation="charge")
    with pytest.raises(LogEventNotFound, match="no 3"):
        run.events(generation=3)


def test_a_task_has_no_steps(shop: Shop) -> None:
    call = shop.plain.submit()
    for ask in (call.steps, call.events, lambda: call.step("a#1"), lambda: call.fork("a#1")):
        with pytest.raises(UsageError, match="is a task"):
            ask()


def test_events_come_in_order_and_in_pages(shop: Shop) -> None:
    run = shop.checkout.submit("42")
    run.result(patient(20))
    events = run.events()
    types = [event.type for event in events]
    assert types[:5] == ["run_created", "run_started", "step_created", "step_started", "step_completed"]
    assert types[-1] == "run_completed"
    assert [event.position for event in events[2:-1]] == list(range(1, len(events) - 2))
    assert events[0].value == {"args": ["42"], "kwargs": {}}
    assert events[-1].value == "receipt 42, receipt 42 invoice"
    paged, after = [], None
    while page := run.events(limit=3, after=after):
        paged += page
        after = page[-1].cursor
    assert paged == events
    only = run.events(correlation="pack#2")
    assert [event.type for event in only] == ["step_created", "step_started", "attr_set", "step_completed"]
    assert only == [event for event in events if event.correlation == "pack#2"]
    with pytest.raises(UsageError, match="no cursor"):
        run.events(after="x")
    assert asyncio.run(run.aevents()) == events


def test_a_failed_and_a_cancelled_run_end_with_their_event(shop: Shop, until: Until) -> None:
    run = shop.broken.submit()
    with pytest.raises(ValueError, match="no"):
        run.result(patient(20))
    last = run.events()[-1]
    assert (last.type, last.error and last.error.message) == ("run_failed", "no")
    later = shop.checkout.options(delay="1h").submit("42")
    later.cancel()
    assert [event.type for event in later.events()] == ["run_created", "run_cancelled"]


def test_large_values_are_placeholders_unless_fetched(shop: Shop) -> None:
    run = shop.large.submit()
    assert run.result(patient(20)) == 3_000_000
    assert len(str(run.step("huge#1").result)) < 200
    assert run.step("huge#1", fetch=True).result == b"x" * 3_000_000
    assert run.events(correlation="huge#1", fetch=True)[-1].value == b"x" * 3_000_000


def test_a_sleeping_run_is_explained_and_woken(shop: Shop, until: Until) -> None:
    run = shop.checkout.submit("42", 3600.0)
    until(lambda: run.status is Status.SUSPENDED)
    said = run.explain()
    assert "suspended for" in said
    assert "It waits for wait#1: a sleep until" in said
    assert "shop.py:" in said
    run.wake()
    assert run.result(patient(20)) == "receipt 42, receipt 42 invoice"
    woken = run.events(correlation="wait#1")[-1]
    assert (woken.type, woken.why) == ("wait_completed", "woken")
    with pytest.raises(InvocationStatusTransitionError, match="only a parked invocation, or a workflow that sleeps"):
        run.wake()


def test_a_wake_begins_the_next_attempt_of_a_step(shop: Shop, until: Until) -> None:
    shop.fails = 1
    run = shop.checkout.submit("42")
    until(lambda: run.status is Status.SUSPENDED)
    step = run.step("ship#1")
    assert (step.status, step.attempt, step.error and step.error.message) == ("retrying", 1, "no truck")
    said = run.explain()
    assert "ship#1: attempt 2 at 20" in said
    assert ", in 1h, after OSError: no truck (" in said
    assert "; the first was 0s ago" in said
    run.wake()
    assert run.result(patient(20)) == "receipt 42, receipt 42 invoice"
    assert run.step("ship#1").attempt == 2


def test_a_run_that_waits_for_a_child_says_so_and_cannot_be_woken(shop: Shop, until: Until) -> None:
    run = shop.waiting.submit("42")
    until(lambda: run.status is Status.SUSPENDED)
    (step,) = run.steps()
    assert (step.id, step.status, step.kind) == ("invoice#1", "waiting", "child")
    said = run.explain()
    assert f"It waits for invoice#1: the child {step.child}, waiting, for 1s (" in said
    assert re.search(f" {step.child}: not due for another (59m5|1h,)", said)
    before = run.record()
    with pytest.raises(InvocationStatusTransitionError, match="does not sleep"):
        run.wake()
    assert run.record() == before


def test_a_step_that_runs_is_seen(shop: Shop, until: Until) -> None:
    run = shop.lengthy.submit()
    until(lambda: run.steps())
    assert [(step.id, step.status) for step in run.steps()] == [("slow#1", "running")]
    assert "It waits for slow#1: the step is running, attempt 1" in run.explain()
    run.cancel()


def test_runs_are_found_by_their_attributes(shop: Shop, until: Until) -> None:
    run, asleep = shop.checkout.submit("42"), shop.checkout.submit("43", pause=3600.0)
    run.result(patient(20))
    until(lambda: asleep.status is Status.SUSPENDED)
    app = shop.app
    found = [record.id for record in app.invocations(attributes={"stage": "packed"})]
    assert found == sorted([run.id, asleep.id], reverse=True)
    assert [record.id for record in app.invocations(attributes={"stage": "packed"}, status="success")] == [run.id]
    assert app.invocations(attributes={"stage": "charged"}) == []  # that was before
    assert app.invocations(attributes={"stage": "packed", "color": "red"}) == []
    assert run.record().attributes == {"stage": "packed"}
    with pytest.raises(UsageError, match="a name and a text"):
        app.invocations(attributes={"stage": 1})  # type: ignore[dict-item]


def test_attributes_of_a_running_step_are_stored_at_once(shop: Shop, until: Until) -> None:
    @shop.app.step(name="slow2")
    async def slow() -> None:
        await asyncio.sleep(30)

    @shop.app.workflow(name="shop:told")
    async def told() -> None:
        context().set(stage="waits")
        await slow()

    with shop.app.runner():
        run = told.submit()
        until(lambda: shop.app.invocations(attributes={"stage": "waits"}))
        run.cancel()
        until(lambda: run.status is Status.CANCELLED)
    assert run.record().attributes == {"stage": "waits"}


def test_the_name_of_an_attribute_has_no_equals_sign(shop: Shop) -> None:
    @shop.app.workflow(name="shop:odd")
    async def odd() -> None:
        context().set(**{"a=b": "c"})

    with shop.app.runner(), pytest.raises(UsageError, match="no '='"):
        odd.submit().result(patient(20))


@pytest.mark.parametrize(
    ("asked", "there", "near"),
    [
        ("charge#9", ["charge#1", "charge#3", "pack#9"], "charge#3"),
        ("charge@a#1", ["charge@a#b", "charge#1"], "charge@a#b"),  # a key may have a '#', too
        ("charge#²", ["charge#1", "pack#1"], "charge#1"),
        ("charge", ["pack#1", "charge#1"], "charge#1"),
    ],
)
def test_the_nearest_step_is_that_of_the_name(asked: str, there: list[str], near: str) -> None:
    assert nearest(asked, there) == near
