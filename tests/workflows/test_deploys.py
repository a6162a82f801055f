"""Runs that are under way when other code is deployed: what is recorded never runs again, and a parked run says why."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Status
from holdfast.errors import InvocationCancelled, UsageError
from holdfast.workflows.api import sleep

Until = Callable[[Callable[[], object]], None]
Declare = Callable[[App, Any], Any]


@pytest.fixture
def charged() -> list[str]:
    """What the step `charge` has done, whatever code called it."""
    return []


@pytest.fixture
def deploy(tmp_path: Path, charged: list[str]) -> Callable[[Declare], App]:
    """Return an app with other code on the same store. `declare` gets the app and the step `charge`."""

    def make(declare: Declare) -> App:
        app = App(
            f"sqlite:///{tmp_path / 'shop.db'}", name="shop", poll_interval_seconds=0.1, workflow_linger_seconds=0.1
        )

        @app.step(name="charge")
        async def charge(order: str) -> str:
            charged.append(order)
            return f"receipt {order}"

        declare(app, charge)
        return app

    return make


def declare_workflow(app: App, charge: Any) -> None:
    @app.workflow(name="shop:checkout")
    async def checkout(order: str) -> str:
        receipt: str = await charge(order)
        await sleep(1.0)
        return receipt


def declare_task(app: App, charge: Any) -> None:
    @app.task(name="shop:checkout")
    async def checkout(order: str) -> str:
        receipt: str = await charge(order)
        return receipt


def declare_broken(app: App, charge: Any) -> None:
    @app.workflow(name="shop:checkout")
    async def checkout(order: str) -> None:
        raise KeyError("stage")


def asleep(app: App, until: Until) -> str:
    """Submit a run, and return it when it sleeps."""
    with app, app.runner():
        run = app.get_task("shop:checkout").submit("42")
        until(lambda: run.status is Status.SUSPENDED)
        return str(run.id)


def parked(app: App, id: str, until: Until) -> str:
    """Return what is said of a run that this code parks."""
    with app, app.runner():
        run = app.invocation(id)
        until(lambda: run.status is Status.PARKED)
        return run.explain()


def test_a_run_whose_workflow_has_become_a_task_is_parked(
    deploy: Callable[[Declare], App], charged: list[str], until: Until
) -> None:
    """As a task it would charge once more."""
    id = asleep(deploy(declare_workflow), until)
    assert "is a task in this code" in parked(deploy(declare_task), id, until)
    with deploy(declare_workflow) as app, app.runner():
        assert app.invocation(id).result(patient(20)) == "receipt 42"
    assert charged == ["42"]


def test_a_cancelled_run_whose_workflow_has_become_a_task_waits_for_code_that_compensates(
    deploy: Callable[[Declare], App], charged: list[str], until: Until
) -> None:
    id = asleep(deploy(declare_workflow), until)
    with deploy(declare_task) as app:
        app.invocation(id).cancel("ordered twice")
    assert "is a task in this code" in parked(deploy(declare_task), id, until)
    with deploy(declare_workflow) as app, app.runner(), pytest.raises(InvocationCancelled):
        app.invocation(id).result(patient(20))
    assert charged == ["42"]


def test_a_parked_run_says_how_its_body_has_ended(deploy: Callable[[Declare], App], until: Until) -> None:
    id = asleep(deploy(declare_workflow), until)
    said = parked(deploy(declare_broken), id, until)
    assert f"the log has charge#1 at {__file__}:" in said
    assert f"; the body has raised KeyError: 'stage' at {__file__}:" in said


@pytest.mark.parametrize("step", [None, 1, ["charge#1"]])
def test_a_fork_before_what_is_no_step_is_refused(deploy: Callable[[Declare], App], step: Any) -> None:
    with deploy(declare_workflow) as app:
        run = app.get_task("shop:checkout").submit("42")
        with pytest.raises(UsageError, match="expected the id of a step"):
            run.fork(step)


def test_a_run_with_a_damaged_log_is_explained(deploy: Callable[[Declare], App], tmp_path: Path, until: Until) -> None:
    id = asleep(deploy(declare_workflow), until)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("UPDATE holdfast_log SET events = x'00' WHERE run = ? AND first = 1", (id,))
    connection.close()
    assert "its log cannot be read: the log of" in parked(deploy(declare_workflow), id, until)


def test_a_parent_goes_on_when_its_child_gets_a_version(deploy: Callable[[Declare], App], until: Until) -> None:
    """A child that has ended counts; the next one is of the new version. A child that the body drops is a mismatch."""

    def family(version: str | None, calls: int = 2) -> Declare:
        def declare(app: App, charge: Any) -> None:
            @app.workflow(name="shop:refund", version=version)
            async def refund(order: str) -> str:
                return f"{order} by {version}"

            @app.workflow(name="shop:checkout")
            async def checkout(order: str) -> list[str]:
                found = [await refund(order)] if calls == 2 else []
                await sleep(1.0)
                return [*found, await refund(order)]

        return declare

    first = asleep(deploy(family(None)), until)
    with deploy(family("2")) as app, app.runner():
        run = app.invocation(first)
        assert run.result(patient(20)) == ["42 by None", "42 by 2"]
        assert [step.id for step in run.steps()] == ["refund#1", "refund#2"]
    second = asleep(deploy(family("2")), until)
    assert "the log has refund#1 at" in parked(deploy(family("2", calls=1)), second, until)


def test_a_parent_goes_on_when_its_child_is_renamed(deploy: Callable[[Declare], App], until: Until) -> None:
    """A recorded call keeps the id that it has under the older name."""

    def family(name: str, *older: str) -> Declare:
        def declare(app: App, charge: Any) -> None:
            @app.workflow(name=name, aliases=older)
            async def refund(order: str) -> str:
                return f"{order} by {name}"

            @app.workflow(name="shop:checkout")
            async def checkout(order: str) -> list[str]:
                found = [await refund(order), await refund(order)]
                await sleep(1.0)
                found.append(await refund(order))
                await sleep(1.0)
                return found

        return declare

    id = asleep(deploy(family("shop:refund")), until)
    with deploy(family("bank:repay", "shop:refund")) as app, app.runner():
        run = app.invocation(id)
        assert run.result(patient(20)) == ["42 by shop:refund"] * 2 + ["42 by bank:repay"]
        assert [step.id for step in run.steps()] == ["refund#1", "refund#2", "repay#1"]
        assert [entry.status for entry in run.history()].count(Status.SUSPENDED) == 2
