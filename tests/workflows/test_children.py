"""Children of runs: which of them end with their parent, what their ends tell it, and who their ancestors are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.patience import patient
from tests.workflows.fleet import Fleet
from tests.workflows.test_recovery import SQLITE

from holdfast import App, Status
from holdfast.errors import InvocationCancelled, InvocationRefused, KeyTaken, UsageError
from holdfast.runtime.cancel import Canceller
from holdfast.triggers.service import Sweep
from holdfast.workflows.api import sleep

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def app(url: str) -> Iterator[App]:
    app = App(url, name="family", poll_interval_seconds=0.1, workflow_linger_seconds=0.2)
    with app:
        yield app


def declare(app: App) -> dict[str, Any]:
    @app.workflow(name="family:child")
    async def child(name: str) -> str:
        await sleep(3600)
        return name

    @app.workflow(name="family:parent")
    async def parent(how: str) -> str:
        child.submit("submitted")
        child.options(on_parent_end="cancel").submit("bound")
        tasks = [asyncio.create_task(child("awaited")), asyncio.create_task(_call(child, "free"))]
        await asyncio.sleep(0.05)
        if how == "returns":
            await asyncio.sleep(0.3)
            return "done"
        await asyncio.gather(*tasks)
        return "never"

    async def _call(child: Any, name: str) -> Any:
        return await child.options(on_parent_end="continue")(name)

    return {"child": child, "parent": parent}


def children_of(app: App, id: str) -> dict[str, Status]:
    found = app.invocations(parent=id)
    return {app.runtime.codec.decode_call(record.arguments)[0][0]: record.status for record in found}


@pytest.mark.parametrize("how", ["returns", "is cancelled"])
def test_children_end_with_their_parent_as_agreed(app: App, until: Until, how: str) -> None:
    parent = declare(app)["parent"]
    with app.runner():
        run = parent.submit(how)
        until(lambda: len(children_of(app, run.id)) == 4)
        if how == "returns":
            assert run.result(patient(20)) == "done"
        else:
            until(lambda: {run.status, *children_of(app, run.id).values()} == {Status.SUSPENDED})
            run.cancel()
            with pytest.raises(InvocationCancelled):
                run.result(patient(20))
        until(lambda: children_of(app, run.id)["bound"] is Status.CANCELLED)
        until(lambda: children_of(app, run.id)["awaited"] is Status.CANCELLED)
        if how == "is cancelled":
            until(lambda: children_of(app, run.id)["free"] is Status.CANCELLED)
        found = children_of(app, run.id)
        assert found["submitted"] is not Status.CANCELLED
        # A cancel of the parent cancels what it awaits; `on_parent_end` is about what outlives the body.
        assert (found["free"] is Status.CANCELLED) == (how == "is cancelled")


@SQLITE
def test_children_of_a_run_that_the_crash_cap_ends_are_cancelled(fleet: Fleet) -> None:
    run = fleet.workflow("doomed").submit()
    fleet.start("--workers", "1", HOLDFAST_MAX_CRASH_RECOVERIES="0")
    fleet.until(lambda: run.status is Status.FAILED, "the cap ends it")

    def ends() -> list[Status]:
        return sorted(child.status for child in fleet.app.invocations(parent=run.id))

    fleet.until(lambda: Status.CANCELLED in ends(), "the awaited child is cancelled")
    assert len(ends()) == 2
    assert ends().count(Status.CANCELLED) == 1
    assert run.record().outbox == ()


@SQLITE
def test_a_child_that_was_given_up_is_asked_to_end_by_the_next_owner_if_the_first_could_not(
    app: App, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = declare(app)["child"]
    asked, lost = list[str](), list[bool]()
    cancel = Canceller.cancel

    async def unreliable(self: Canceller, ids: Any, **more: Any) -> Any:
        asked.extend(ids)
        if not lost:
            lost.append(True)
            await asyncio.sleep(3600)  # the owner dies before the write
        return await cancel(self, ids, **more)

    monkeypatch.setattr(Canceller, "cancel", unreliable)

    @app.workflow(name="family:impatient")
    async def impatient() -> str:
        try:
            async with asyncio.timeout(0.1):
                await child("given up")
        except TimeoutError:
            await sleep(1.5)
        return "went on"

    with app.runner():
        run = impatient.submit()
        assert run.result(patient(20)) == "went on"
        (given_up,) = app.invocations(parent=run.id)
        until(lambda: app.invocation(given_up.id).status is Status.CANCELLED)
        assert asked == [given_up.id] * 2
        last = run.events(correlation="child#1")[-1]
        assert (last.type, last.error) == ("step_failed", None)
        assert "gave it up" in last.why


@SQLITE
def test_a_child_that_was_given_up_raises_the_same_to_whoever_awaits_it_again(app: App) -> None:
    child = declare(app)["child"]

    @app.workflow(name="family:again")
    async def again() -> str:
        handle = child.submit("given up")
        try:
            async with asyncio.timeout(0.1):
                await handle
        except TimeoutError:
            pass
        await sleep(0.6)
        try:
            await handle
        except asyncio.CancelledError:
            return "was cancelled"
        return "never"

    with app.runner():
        assert again.submit().result(patient(20)) == "was cancelled"


def test_a_child_that_a_limit_refuses_tells_its_parent(app: App, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: the store ends the child in a claim, and the claimer delivers its outbox. The services rest."""

    async def rests(self: Sweep) -> bool:
        return False

    monkeypatch.setattr(Sweep, "sweep", rests)

    @app.step(name="holds")
    async def holds() -> None:
        await asyncio.sleep(30)

    @app.workflow(name="family:only", limit=1, when_full="refuse")
    async def only() -> str:
        await holds()  # a suspended run would hold no slot
        return "ran"

    @app.workflow(name="family:asks")
    async def asks() -> str:
        try:
            return await only()
        except InvocationRefused as error:
            return f"refused: {error}"

    with app.runner():
        first = only.submit()
        until(lambda: first.status is Status.RUNNING)
        assert asks.submit().result(patient(20)).startswith("refused: family:only")
        first.cancel()


@SQLITE
def test_a_taken_key_is_a_typed_error_in_the_body(app: App, until: Until) -> None:
    child = declare(app)["child"]

    @app.workflow(name="family:keyed")
    async def keyed() -> str:
        handle = child.options(key="42").submit("second")
        try:
            await handle
        except KeyTaken as error:
            return str(error)
        return "never"

    with app.runner():
        first = child.options(key="42").submit("first")
        said = keyed.submit().result(patient(20))
        assert f"its key '42' belongs to {first.id}" in said


@SQLITE
def test_a_child_knows_its_parent_and_its_root(app: App) -> None:
    @app.workflow(name="family:leaf")
    async def leaf() -> str:
        return "leaf"

    @app.workflow(name="family:branch")
    async def branch() -> str:
        return await leaf()

    @app.workflow(name="family:tree")
    async def tree() -> str:
        return await branch()

    with app.runner():
        run = tree.submit()
        assert run.result(patient(20)) == "leaf"
        (middle,) = app.invocations(parent=run.id)
        (last,) = app.invocations(parent=middle.id)
        records = [run.record(), middle, last]
        assert [record.parent_id for record in records] == [None, run.id, middle.id]
        assert [record.root_id for record in records] == [None, run.id, run.id]
        command = [sys.executable, "-m", "holdfast", "show", last.id]
        own = {"HOLDFAST_URL": str(app.settings.url), "HOLDFAST_NAME": app.name}
        shown = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True).stdout
        lines = {line.split()[0]: line.split()[1] for line in shown.splitlines() if len(line.split()) > 1}
        assert (lines["parent"], lines["root"]) == (middle.id, run.id)


@SQLITE
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_handle_may_be_awaited_again(app: App, is_plain: bool) -> None:
    @app.workflow(name="family:quick")
    async def quick(how: str) -> list[str]:
        await sleep(0.1)
        if how == "fails":
            raise ValueError("no")
        return [how]

    @app.workflow(name="family:asks")
    async def asks() -> list[object]:
        good, bad = quick.submit("works"), quick.submit("fails")
        first = await good
        await sleep(0.5)  # so that it is suspended, and replayed
        failed = []
        for _ in range(2):
            try:
                await bad
            except ValueError as error:
                failed.append(str(error))
        return [first, await good, failed, await asyncio.gather(good, good)]

    @app.workflow(name="family:asks_plainly")
    def asks_plainly() -> list[object]:
        good, bad = quick.submit("works"), quick.submit("fails")
        first = good.result()
        sleep(0.5)
        failed = []
        for _ in range(2):
            try:
                bad.result()
            except ValueError as error:
                failed.append(str(error))
        return [first, good.result(), failed, [good.result(), good.result()]]

    with app.runner():
        run = (asks_plainly if is_plain else asks).submit()
        assert run.result(patient(20)) == [["works"], ["works"], ["no", "no"], [["works"], ["works"]]]


@SQLITE
def test_a_child_is_found_again_by_code_that_has_a_step_more_before_it(url: str, until: Until) -> None:
    """The id of a child follows from the body's time, which the added step has moved. The recorded id counts."""

    def declared(has_check: bool) -> tuple[App, Any]:
        app = App(url, name="family", poll_interval_seconds=0.1, workflow_linger_seconds=0.2)
        child = declare(app)["child"]

        @app.step(name="check")
        async def check() -> None:
            await asyncio.sleep(0.05)

        @app.step(name="begin")
        async def begin() -> None: ...

        @app.workflow(name="family:careful")
        async def careful() -> str:
            await begin()
            if has_check:
                await check.options(key="added")()
            handle = child.submit("it")
            try:
                return await handle
            except asyncio.CancelledError:
                return handle.id

        return app, careful

    before, careful = declared(False)
    with before, before.runner():
        run = careful.submit()
        until(lambda: run.status is Status.SUSPENDED)
        (child,) = before.invocations(parent=run.id)
    after, _ = declared(True)
    with after, after.runner():
        again = after.invocation(run.id)
        again.cancel()
        assert again.result(patient(20)) == child.id
        until(lambda: children_of(after, run.id) == {"it": Status.CANCELLED})


@SQLITE
def test_a_group_is_awaited_in_a_body(app: App) -> None:
    @app.task(name="family:square")
    def square(number: int) -> int:
        return number * number

    @app.workflow(name="family:sums")
    async def sums() -> int:
        return sum(await square.map([1, 2])) + sum(await (await square.amap([3])).aresults())

    @app.workflow(name="family:sums_plainly")
    def sums_plainly() -> int:
        return sum(square.map([1, 2, 3]).results())

    with app.runner():
        runs = [sums.submit(), sums_plainly.submit()]
        assert [run.result(patient(20)) for run in runs] == [14, 14]
        assert [len(run.steps()) for run in runs] == [3, 3]


@SQLITE
def test_a_time_limit_that_would_not_be_recorded_is_refused(app: App) -> None:
    @app.task(name="family:late")
    def late() -> None: ...

    @app.workflow(name="family:waiting")
    async def waiting() -> None:
        await late.options(delay="1h").submit().aresult(timeout=1)

    @app.workflow(name="family:waiting_plainly")
    def waiting_plainly() -> None:
        late.options(delay="1h").map([()]).results(timeout=1)

    with app.runner():
        for run in (waiting.submit(), waiting_plainly.submit()):
            with pytest.raises(UsageError, match=r"use asyncio\.timeout"):
                run.result(patient(20))


@SQLITE
def test_what_belongs_to_another_app_is_refused_in_a_body(app: App) -> None:
    """Its end could not reach the run, which would wait for ever."""
    other = App("memory://", name="neighbours")

    @other.task(name="neighbours:help")
    def lend() -> None: ...

    @other.workflow(name="neighbours:move")
    async def move() -> None: ...

    @app.workflow(name="family:asking")
    async def asking(how: str) -> None:
        await (lend.submit() if how == "task" else move())

    with app.runner():
        for how in ("task", "workflow"):
            with pytest.raises(UsageError, match="belongs to the app 'neighbours', and this run to 'family'"):
                asking.submit(how).result(patient(20))
