"""Schedules and triggers that stand in the code, from deploy to deploy."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import eventually

from holdfast import App, all_of, cron, on_event, on_status, scheduled
from holdfast.schedules.declared import Declaration, Declarations
from holdfast.schedules.records import ScheduleRecord
from holdfast.triggers.evaluation import declarations
from holdfast.triggers.rules import TriggerRecord
from holdfast.triggers.service import TriggerRegistry
from holdfast.triggers.subscriptions import Subscriptions

NEW_YEAR = cron("0 0 1 1 *")


class Deploys:
    """Programs of one app, one after the other, on one store."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/shop.db"

    @contextmanager
    def of(self, *tasks: tuple[str, dict[str, Any]], source: Callable[..., None] = lambda: None) -> Iterator[App]:
        """A runner of a program with these tasks."""
        with App(self.url, name="shop", poll_interval_seconds=0.2) as app:
            for name, options in tasks:
                app.task(name=name, **options)(source)
            with app.runner():
                yield app

    def spoil(self, kind: str) -> int:
        """Damage the entries of a kind, behind everybody's back."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10)) as connection, connection:
            query = "UPDATE holdfast_entries SET body = x'ff00' WHERE app = 'shop' AND kind = ?"
            return connection.execute(query, (kind,)).rowcount

    def look(self) -> list[ScheduleRecord]:
        with App(self.url, name="shop") as app:
            return app.schedules.list()


@pytest.fixture
def deploys(tmp_path: Path) -> Deploys:
    return Deploys(tmp_path)


def _retiring(
    app: App, declared: list[Declaration], triggers: list[TriggerRecord], *, register: bool = False
) -> Callable[[], Coroutine[Any, Any, None]]:
    """The duties by which a runner with that code retires what no code declares."""
    engine = app.runtime.ready()
    found = Declarations(engine, declared), TriggerRegistry(engine, triggers)
    for feature in found if register else ():
        app.runtime.run(feature.register())

    async def retire() -> None:
        for feature in reversed(found):
            await feature.retire()

    return retire


def retire(app: App) -> None:
    """The duty, now."""
    duties = _retiring(app, [], [])
    app.runtime.run(duties())


def tend(app: App) -> Callable[[], None]:
    """The duty of a runner with the code of this app, which has registered it."""
    engine = app.runtime.ready()
    retiring = _retiring(app, declarations(list(app.tasks.values()), engine), app.triggers.declared, register=True)
    return lambda: app.runtime.run(retiring())


def test_what_was_damaged_under_a_living_runner_is_stored_anew_and_what_was_deleted_is_not(deploys: Deploys) -> None:
    with deploys.of(("shop:clean", {"triggers": [NEW_YEAR, on_event("go")]})) as app:
        duty = tend(app)
        (before,) = app.schedules.list()
        duty()
        assert app.schedules.list() == [before], "what is whole stays as it is"
        assert (deploys.spoil("schedule"), deploys.spoil("trigger")) == (1, 1)
        duty()
        (after,) = app.schedules.list()
        assert (after.name, after.next_at, after.declared) == (before.name, before.next_at, True)
        assert after.uid != before.uid
        assert len(triggers(app)) == 1
        eventually(lambda: app.emit("go").caused)
        assert app.runtime.run(app.runtime.ready().store.quarantined("shop"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.schedules.declared._CLOCKS_DIFFER_SECONDS", 0.0)
            duty()
            app.schedules.delete(after.name)
            duty()
            duty()
        assert app.schedules.list() == []


def test_one_that_was_created_at_run_time_under_a_declared_name_stops_no_runner(
    deploys: Deploys, caplog: pytest.LogCaptureFixture
) -> None:
    """As somebody may do it when the declared one was damaged, and set aside, while no runner was there."""
    declared = ("shop:clean", {"triggers": [scheduled(NEW_YEAR, name="nightly"), on_event("go")]})
    with deploys.of(declared):
        pass
    deploys.spoil("schedule")
    with App(deploys.url, name="shop") as app:
        clean = app.task(name="shop:clean")(lambda: None)
        created = app.schedules.create("nightly", clean, every="1h")
    with deploys.of(declared) as app:
        assert app.schedules.list() == [created], "what a person has made stays"
        assert clean.name in app.tasks
        eventually(lambda: app.emit("go").caused)
    (said,) = [record for record in caplog.records if record.name == "holdfast.schedules"]
    assert said.levelname == "ERROR"
    assert "a schedule of that name was created at run time" in said.getMessage()
    assert "holdfast schedules delete nightly" in said.getMessage()
    with deploys.of(declared) as app:
        app.schedules.delete("nightly")
    with deploys.of(declared) as app:
        assert [each.declared for each in app.schedules.list()] == [True]


def triggers(app: App) -> list[TriggerRecord]:
    return app.runtime.run(app.runtime.ready().part(Subscriptions).all())


def test_three_deploys_fire_nothing_and_keep_the_schedule(deploys: Deploys) -> None:
    seen = []
    for turn in range(3):
        with deploys.of(("shop:clean", {"triggers": [NEW_YEAR], "priority": turn, "timeout": 60 + turn})) as app:
            assert app.invocations() == []
            (record,) = app.schedules.list()
            seen.append(record)
            assert record.call.priority == turn
    assert len({(record.name, record.uid, record.next_at) for record in seen}) == 1


def test_other_rules_and_arguments_are_of_the_same_schedule(deploys: Deploys) -> None:
    def clean(days: int = 0) -> None: ...

    seen = []
    for given in (NEW_YEAR, scheduled(NEW_YEAR, [30], overlap="skip"), scheduled(NEW_YEAR, [40], catch_up="none")):
        with deploys.of(("shop:clean", {"triggers": [given]}), source=clean) as app:
            (record,) = app.schedules.list()
            seen.append(record)
    assert len({record.uid for record in seen}) == 1
    assert len({record.call.arguments for record in seen}) == 3


def test_two_with_one_timing_are_two_and_the_same_twice_is_one(deploys: Deploys) -> None:
    def clean(days: int = 0) -> None: ...

    both = [scheduled(NEW_YEAR, [30]), scheduled(NEW_YEAR, [40]), scheduled(NEW_YEAR, [30])]
    with deploys.of(("shop:clean", {"triggers": both}), source=clean) as app:
        assert len({record.call.arguments for record in app.schedules.list()}) == len(app.schedules.list()) == 2


def test_what_is_no_longer_in_the_code_is_retired_and_comes_back(deploys: Deploys) -> None:
    scheduled_and_other = [("shop:clean", {"triggers": [NEW_YEAR, on_event("go")]}), ("shop:other", {})]
    with deploys.of(*scheduled_and_other) as app:
        (record,) = app.schedules.list()
        uid = record.uid
        retire(app)
        assert app.schedules.list() == [record], "it is declared"
    for left in ([("shop:clean", {}), ("shop:other", {})], [("shop:other", {})]):
        with deploys.of(*left) as app:
            retire(app)
            (record,) = app.schedules.list()
            assert (record.retired_at is not None, record.next_at) == (True, None)
            assert [each.retired_at is not None for each in triggers(app)] == [True]
            assert app.emit("go").outbox == ()
        with deploys.of(*scheduled_and_other) as app:
            (record,) = app.schedules.list()
            assert (record.retired_at, record.uid) == (None, uid)
            assert record.next_at is not None
            eventually(lambda app=app: app.emit("go").caused)


@pytest.mark.parametrize("other", ["mail:send", "shop:another", "another"])
def test_a_program_with_other_code_retires_nothing(deploys: Deploys, other: str) -> None:
    """Even if one of its modules has the same name: it has none of the tasks that were there."""
    with deploys.of(("shop:clean", {"triggers": [NEW_YEAR]}), ("shop:beside", {})):
        pass
    with deploys.of((other, {})) as app:
        retire(app)
        assert [record.retired_at for record in app.schedules.list()] == [None]


def test_another_signature_of_the_task_that_ends_makes_no_other_trigger(deploys: Deploys) -> None:
    """Else its end would call twice while the old runners and the new are both there."""
    seen = set()

    def before(order: int) -> None: ...
    def after(order: int, region: str = "eu") -> None: ...

    for pay in (before, after):
        with App(deploys.url, name="shop") as app:
            task = app.task(name="shop:pay")(pay)
            app.task(name="shop:thank", triggers=[on_status(task)])(lambda: None)
            with app.runner():
                (stored,) = triggers(app)
                seen.add(stored.name)
                assert [len(each.parameters) for each in stored.conditions] == [1 if pay is before else 2]  # type: ignore[union-attr]
    assert len(seen) == 1


def test_what_waited_for_other_conditions_of_that_name_completes_nothing(deploys: Deploys) -> None:
    def of(*names: str) -> tuple[str, dict[str, Any]]:
        return "shop:ship", {"triggers": [all_of(*map(on_event, names), name="ready")]}

    with deploys.of(of("packed", "labelled")) as app:
        app.emit("packed")
    with deploys.of(of("labelled", "paid", "packed")) as app:
        told = [app.emit(name).caused[0].invocation for name in ("packed", "labelled", "paid")]
        assert [bool(invocation) for invocation in told] == [False, False, True]
