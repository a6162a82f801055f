"""What the code of a task says of itself while it runs, on every store and wherever it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.scenarios import workshop
from tests.support.patience import patient

from holdfast import App, UsageError, context
from holdfast.errors import NotEncodable
from holdfast.retries import Fixed

WAIT = patient(30)
KINDS = [("thread", "telling"), ("loop", "telling_later"), ("process", "telling"), ("process", "telling_later")]


@pytest.fixture
def app(workshop_app: App) -> App:
    return workshop_app


@pytest.mark.parametrize(("executor", "name"), KINDS)
def test_a_running_call_is_seen(
    app: App, executor: Any, name: str, tmp_path: Path, there: Callable[..., Path], until: Callable[..., Any]
) -> None:
    task = app.task(executor=executor, log_lines=5)(getattr(workshop, name))
    with app.runner():
        call = task.submit(str(tmp_path))
        there("told")
        until(lambda: call.log())
        until(lambda: call.progress())
        progress, record = call.progress(), call.record()
        assert progress is not None
        assert str(progress) == "40 of 100 rows (40%)"
        assert (progress.current, progress.total, progress.message, progress.attempt) == (40, 100, "rows", 1)
        assert abs(progress.at - record.created_at) < WAIT
        assert "It was at 40 of 100 rows (40%)" in call.explain()
        until(lambda: app.invocations(attributes={"customer": "c-17", "stage": "loading"}))
        workshop.note(str(tmp_path), "open")
        assert call.result(timeout=WAIT) == "{'customer': 'c-17', 'stage': 'loaded'}"
    ended = call.record()
    assert dict(ended.attributes) == {"customer": "c-17", "stage": "loaded"}
    assert app.invocations(attributes={"stage": "loading"}) == []
    assert [found.id for found in app.invocations(attributes={"stage": "loaded"})] == [call.id]
    assert str(call.progress()) == "100 of 100 rows (100%)"
    assert [(line.level, line.logger, line.text, line.attempt) for line in call.log()] == [
        ("WARNING", "shop.rows", "at row 40", 1),
        ("WARNING", "shop.rows", "at row 100", 1),
    ]
    assert [line.status.value for line in ended.history] == ["registered", "pending", "running", "success"]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_the_next_attempt_gets_the_checkpoint(app: App, executor: Any) -> None:
    task = app.task(executor=executor, retries=Fixed(1, 0.01))(workshop.counting)
    with app.runner():
        assert task.submit(100, 61).result(timeout=WAIT) == [60, 100]
        assert task.submit(3, 1).result(timeout=WAIT) == [None, 3]


def test_a_checkpoint_outlives_its_process(
    app: App, tmp_path: Path, there: Callable[..., Path], until: Callable[..., Any]
) -> None:
    task = app.task(executor="process", retries=0)(workshop.crashing_beside)
    with app.runner():
        call = task.submit(str(tmp_path))
        there("told")
        until(lambda: call.record().notes)
        workshop.note(str(tmp_path), "open")
        assert call.result(timeout=WAIT) == "half"
    assert call.record().attempt == 2


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_saying_much_costs_little(app: App, executor: Any) -> None:
    task = app.task(executor=executor)(workshop.chatty)
    with app.runner():
        call = task.submit(20_000)
        call.result(timeout=WAIT)
        progress = call.progress()
    assert progress is not None
    assert (progress.current, progress.total) == (19_999, 20_000)


def test_attributes_are_given_at_submit(app: App) -> None:
    task = app.task(name="bill")(lambda: dict(context().attributes))
    customer = task.options(attributes={"customer": "c-17"})
    with app.runner():
        call = customer.options(attributes={"kind": "monthly"}).submit()
        both = {"customer": "c-17", "kind": "monthly"}
        assert call.result(timeout=WAIT) == both
        other = customer.submit()
        assert other.result(timeout=WAIT) == {"customer": "c-17"}
        assert {found.id for found in app.invocations(attributes={"customer": "c-17"})} == {call.id, other.id}
        assert [found.id for found in app.invocations(attributes={"kind": "monthly"})] == [call.id]
        group = customer.map([(), ()])
        group.results(timeout=WAIT)
        assert len(app.invocations(attributes={"customer": "c-17"})) == 4


def test_a_rerun_begins_with_the_attributes_of_the_submit(app: App) -> None:
    def bill() -> dict[str, str]:
        before = dict(context().attributes)
        context().set(stage="billed")
        context().checkpoint("billed")
        return before

    task = app.task(name="bill")(bill)
    with app.runner():
        call = task.options(attributes={"customer": "c-17", "stage": "new"}).submit()
        call.result(timeout=WAIT)
        assert dict(call.record().attributes) == {"customer": "c-17", "stage": "billed"}
        again = call.rerun()
        assert again.result(timeout=WAIT) == {"customer": "c-17", "stage": "new"}


def test_lines_are_few_and_short_and_without_secrets(app: App) -> None:
    def talk() -> None:
        for number in range(50):
            workshop.log.warning("line %s", number)
        workshop.log.warning("mongodb://user:secret@host/db " + "x" * 2000)
        try:
            raise ValueError("it is broken")
        except ValueError:
            workshop.log.exception("row 7")
        logging.getLogger("holdfast.x").warning("a line of the engine")

    task = app.task(name="talk", log_lines=4)(talk)
    silent = app.task(name="silent")(lambda: workshop.log.warning("not kept"))
    with app.runner():
        call, other = task.submit(), silent.submit()
        call.result(timeout=WAIT)
        other.result(timeout=WAIT)
    lines = [line.text for line in call.log()]
    assert lines[:2] == ["line 48", "line 49"]
    assert "secret" not in lines[2]
    assert len(lines[2]) < 510
    assert lines[3] == "row 7 (ValueError: it is broken)"
    assert other.log() == ()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"current": "forty"}, UsageError),
        ({"current": True}, UsageError),
        ({"current": float("nan")}, UsageError),
        ({"current": 2**60}, UsageError),
        ({"current": 10**400}, UsageError),
        ({"current": -float("inf")}, UsageError),
        ({"current": 1, "total": -1}, UsageError),
        ({"current": 1, "total": float("inf")}, UsageError),
        ({"current": 1, "message": 7}, UsageError),
    ],
)
def test_progress_is_a_number(given: dict[str, Any], error: type[Exception]) -> None:
    app = App("memory://")

    def wrong() -> None:
        context().progress(**given)

    task = app.task(name="wrong")(wrong)
    with app, app.runner(), pytest.raises(error, match=r"progress\("):
        task.submit().result(timeout=WAIT)


def test_odd_notes_are_kept_or_refused(app: App) -> None:
    refused: list[str] = []

    def odd() -> list[Any]:
        here = context()
        here.progress(1.5, message="\ud800\0" + "x" * 1000)
        for wrong in (lambda: here.checkpoint("x" * 70_000), lambda: here.checkpoint(object())):
            try:
                wrong()
            except (UsageError, NotEncodable) as error:
                refused.append(str(error))
        for attributes in ({"a=b": "c"}, {"a": 7}, {"a": ""}, {"a": "x" * 300}, {str(n): "x" for n in range(70)}):
            with pytest.raises(UsageError):
                here.set(**attributes)
        for unknown in ({"a": "\ud800"}, {"a": "\0"}, {"\0": "a"}):
            with pytest.raises(NotEncodable):
                here.set(**unknown)
        here.set(b="x=y", **{"self": "me", "$where": "1", "a.b": "line\nline", "ü": "é"})
        here.checkpoint(None)
        return [here.last_checkpoint, dict(here.attributes)]

    task = app.task(name="odd")(odd)
    with app, app.runner():
        call = task.submit()
        kept = {"b": "x=y", "self": "me", "$where": "1", "a.b": "line\nline", "ü": "é"}
        assert call.result(timeout=WAIT) == [None, kept]
        for name, value in kept.items():
            assert [found.id for found in app.invocations(attributes={name: value})] == [call.id]
        for wrong in ("b", {"b": 7}):
            with pytest.raises(UsageError, match="attributes="):
                app.invocations(attributes=wrong)  # type: ignore[arg-type]
        progress = call.progress()
    assert progress is not None
    assert (progress.current, progress.fraction) == (1.5, None)
    assert len(progress.message) <= 210
    assert "at most 65,536" in refused[0]
    assert "checkpoint" in refused[1]


def test_wrong_declarations_are_refused(tmp_path: Path) -> None:
    app = App("memory://")
    task = app.task(name="work")(lambda: None)
    for wrong in (-1, 1000, True, "many"):
        with pytest.raises(UsageError, match="log_lines="):
            app.task(name="other", log_lines=wrong)(lambda: None)  # type: ignore[call-overload]
    for attributes in ("customer", {"a": 1}, {"": "x"}):
        with pytest.raises(UsageError):
            task.options(attributes=attributes)  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match="no option log_lines"):
        app.workflow(name="flow", log_lines=5)(lambda: None)


def test_a_workflow_has_no_checkpoint(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/shop.db")

    @app.step
    def step() -> str:
        try:
            context().checkpoint(1)
        except UsageError as error:
            return str(error)
        return ""

    @app.workflow
    def flow() -> list[str]:
        told = [step()]
        try:
            context().progress(1)
        except UsageError as error:
            told.append(str(error))
        return [*told, context().attributes["customer"]]

    with app, app.runner():
        run = flow.options(attributes={"customer": "c-17"}).submit()
        first, second, customer = run.result(timeout=WAIT)
    assert "its log is its checkpoint" in first
    assert "its steps show" in second
    assert customer == "c-17"
