"""What a task learns about its own call, wherever it runs, on every store."""

from __future__ import annotations

from typing import Any

import pytest
from tests.scenarios import workshop
from tests.support.patience import patient

from holdfast import App, UsageError, context
from holdfast.retries import Fixed, Forever, Timetable


@pytest.fixture
def app(workshop_app: App) -> App:
    return workshop_app


@pytest.mark.parametrize(
    ("executor", "name"),
    [("thread", "facts"), ("loop", "facts_later"), ("process", "facts"), ("process", "facts_later")],
)
def test_a_call_knows_itself(app: App, executor: Any, name: str) -> None:
    task = app.task(executor=executor, timeout=60)(getattr(workshop, name))
    with app.runner():
        first, second = task.submit(), task.options(key="order 7").submit()
        found, other = first.result(timeout=patient(30)), second.result(timeout=patient(30))
    remaining = found.pop("remaining")
    assert 0 < remaining <= 60
    assert found == {
        "id": first.id,
        "app": "workshop",
        "task": task.name,
        "attempt": 1,
        "epoch": 1,
        "key": first.id,
        "last": True,
        "previous": None,
        "cancelled": False,
    }
    assert (other["id"], other["key"]) == (second.id, "order 7")


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_an_attempt_knows_what_went_before(app: App, executor: Any) -> None:
    task = app.task(executor=executor, retries=Fixed(2, 0.01))(workshop.failing_facts)
    with app.runner():
        second, third = task.submit(1).result(timeout=patient(30)), task.submit(2).result(timeout=patient(30))
    assert (second["attempt"], second["last"], second["previous"], second["remaining"]) == (2, False, "attempt 1", None)
    assert (third["attempt"], third["last"], third["previous"]) == (3, True, "attempt 2")


@pytest.mark.parametrize(
    ("retries", "last"),
    [(None, True), (Fixed(1, 1), False), (Forever(Fixed(0, 1)), False), (Timetable({"1h": "1m"}), None)],
)
def test_whether_it_is_the_last_is_told_where_it_is_known(app: App, retries: Any, last: bool | None) -> None:
    task = app.task(retries=retries)(workshop.facts)
    with app.runner():
        assert task.submit().result(timeout=patient(30))["last"] is last


def test_there_is_none_outside_of_a_task(app: App) -> None:
    with pytest.raises(UsageError, match="call it inside a task"):
        context()
    with pytest.raises(UsageError, match="call it inside a task"):
        app.task(workshop.facts)()  # a plain call is no invocation


def test_a_child_knows_its_parent_and_only_in_its_own_app(app: App) -> None:
    with App("memory://", name="elsewhere") as elsewhere:
        other = elsewhere.task(name="other")(workshop.facts)
        leaf = app.task(name="leaf")(workshop.facts)

        @app.task(name="root")
        def root() -> tuple[str, str]:
            return leaf.submit().id, other.submit().id

        with app.runner():
            top = root.submit()
            child, stranger = top.result(timeout=patient(30))
        assert app.invocation(child).record().parent_id == top.id
        assert elsewhere.invocation(stranger).record().parent_id is None
        assert top.record().parent_id is None
