"""Triggers as people declare them, on every store, with a real runner."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import eventually, patient

from holdfast import (
    App,
    InvocationGroup,
    all_of,
    any_of,
    context,
    every,
    on_event,
    on_exception,
    on_result,
    on_status,
    trigger,
)
from holdfast.invocation import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.triggers import Cause, from_arguments, from_cause, from_event, from_exception, from_result


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture
def here() -> Iterator[App]:
    with App("memory://", poll_interval_seconds=0.2) as app:
        yield app


def of(app: App, task: str) -> list[InvocationRecord]:
    return sorted(app.invocations(task=task), key=lambda record: record.id)


def results(app: App, task: str) -> list[Any]:
    """What the calls of this task returned, once all of them have ended."""
    found = of(app, task)
    return sorted([app.invocation(record.id).result(patient(20)) for record in found], key=repr)


def ended(group: InvocationGroup[Any]) -> None:
    eventually(lambda: all(each.status in FINAL for each in group))


def recorder(app: App, *triggers: Any, name: str = "told", **options: Any) -> Any:
    @app.task(name=name, triggers=triggers, **options)
    def told(a: Any = None, b: Any = None) -> list[Any]:
        return [a, b]

    return told


def pay(app: App) -> Any:
    @app.task(name="pay")
    def pay(order: int, region: str = "eu") -> dict[str, Any]:
        if order < 0:
            raise KeyError(f"no order {order}")
        return {"order": order, "lines": [{"price": order * 2}]}

    return pay


def test_an_event_calls_a_task_once_with_what_it_carries(app: App) -> None:
    recorder(app, on_event("order.created", arguments={"a": from_event("order.id"), "b": 7}))
    with app.runner():
        event = app.emit("order.created", {"order": {"id": 42}})
        app.emit("order.deleted", {"order": {"id": 43}})
        eventually(lambda: of(app, "told"))
        assert results(app, "told") == [[42, 7]]
    (record,) = of(app, "told")
    assert record.origin is not None
    assert [(source.kind, source.id, source.name) for source in record.origin.sources] == [
        ("event", event.id, "order.created")
    ]
    assert record.history[0].why == f"triggered by the event 'order.created' {event.id}"
    deleted, created = app.events()
    assert (created.id, [each.invocation for each in created.caused]) == (event.id, [record.id])
    assert (deleted.name, deleted.caused) == ("order.deleted", ())


def test_a_payload_goes_by_its_own_names(app: App) -> None:
    recorder(app, on_event("made", arguments=from_event()))
    with app.runner():
        app.emit("made", {"a": 1, "b": 2, "c": 3})
        eventually(lambda: of(app, "told"))
        assert results(app, "told") == [[1, 2]]


def test_ends_of_a_task_call_another(app: App) -> None:
    task = pay(app)
    recorder(
        app, on_status(task, arguments={"a": from_arguments("order"), "b": from_result("lines.0.price")}), name="paid"
    )
    recorder(app, on_status(task, ["failed", "cancelled"], arguments={"a": from_arguments("order")}), name="unpaid")
    recorder(app, on_result(task, where={"order": 3}, called_with={"region": "us"}), name="third")
    recorder(app, on_result(task, equals={"order": 1, "lines": [{"price": 2}]}), name="first")
    recorder(
        app,
        on_exception(task, LookupError, message="order -", arguments={"a": from_exception("message")}),
        on_exception(task, ValueError),
        name="lookup",
    )
    with app.runner():
        ended(task.map([(1,), (2,), (3, "us"), (3,), (-4,)]))
        task.options(delay="1h").submit(9).cancel()
        eventually(lambda: len(of(app, "paid")) == 4 and len(of(app, "unpaid")) == 2 and of(app, "lookup"))
        assert results(app, "paid") == [[1, 2], [2, 4], [3, 6], [3, 6]]
        assert results(app, "unpaid") == [[-4, None], [9, None]]
        assert results(app, "lookup") == [["'no order -4'", None]]
        assert (len(of(app, "third")), len(of(app, "first"))) == (1, 1)


def test_five_failures_are_five_calls(app: App) -> None:
    task = pay(app)
    recorder(app, on_exception(task, arguments={"a": from_arguments("order")}))
    with app.runner():
        task.map([(-number,) for number in range(1, 6)])
        eventually(lambda: len(of(app, "told")) == 5)
        assert results(app, "told") == [[-number, None] for number in range(1, 6)]


def test_all_of_them_have_to_happen_for_the_same_thing(app: App) -> None:
    task = pay(app)
    recorder(
        app,
        all_of(
            on_event("packed", correlate="id", arguments={"a": from_event("id")}),
            on_status(task, correlate="order", arguments={"b": from_result("lines.0.price")}),
        ),
    )
    with app.runner():
        ended(task.map([(1,), (2,), (3,)]))
        for id in (2, 3, 3, 4):
            app.emit("packed", {"id": id})
        eventually(lambda: len(of(app, "told")) == 2)
        assert results(app, "told") == [[2, 4], [3, 6]]
        task.submit(4)
        eventually(lambda: len(of(app, "told")) == 3)
        assert results(app, "told") == [[2, 4], [3, 6], [4, 8]]


def test_one_of_several_is_enough_and_counts_once(app: App) -> None:
    task = pay(app)
    recorder(app, any_of(on_status(task), on_result(task), on_event("paid"), arguments={"a": from_cause("kind")}))
    with app.runner():
        task.submit(1)
        app.emit("paid")
        eventually(lambda: len(of(app, "told")) == 2)
        assert results(app, "told") == [["end", None], ["event", None]]


def test_a_tick_can_be_one_of_what_has_to_happen(app: App) -> None:
    recorder(app, all_of(every("1s"), on_event("ready", arguments={"a": from_event("n")})))
    with app.runner():
        app.emit("ready", {"n": 5})
        eventually(lambda: of(app, "told"))
        assert results(app, "told") == [[5, None]]


def test_the_builder_says_the_same(here: App) -> None:
    task = pay(here)
    recorder(
        here,
        trigger().on_event("a", where={"kind": "x"}).on_status(task).with_args_from_event("a").with_arguments(b=5),
        trigger().on_event("b").on_event("c").with_logic("or").with_arguments({"b": 6}),
    )
    with here.runner():
        task.submit(1)
        here.emit("a", {"kind": "y", "a": 1})
        here.emit("a", {"kind": "x", "a": 2})
        here.emit("c")
        eventually(lambda: len(of(here, "told")) == 2)
        assert results(here, "told") == [[2, 5], [None, 6]]


@dataclasses.dataclass
class Order:
    id: int
    state: str


def is_large(order: Order) -> bool:
    return order.id > 10


def is_euro(arguments: dict[str, Any]) -> bool:
    return bool(arguments["region"] == "eu")


def both(*causes: Cause) -> dict[str, Any]:
    return {"a": [cause.kind for cause in causes], "b": causes[-1].result}


def make(app: App) -> Any:
    @app.task(name="make")
    def make(id: int, region: str = "eu") -> Order:
        return Order(id, "new")

    return make


def test_code_is_asked_where_it_is_known(app: App) -> None:
    task = make(app)
    recorder(app, on_result(task, where=is_large, called_with=is_euro, arguments={"a": from_result()}))
    recorder(app, all_of(on_event("go"), on_status(task), arguments=both), name="both")
    with app.runner():
        ended(task.map([(1,), (11,), (12, "us")]))
        app.emit("go")
        eventually(lambda: of(app, "told") and of(app, "both"))
        assert results(app, "told") == [[Order(11, "new"), None]]
        ((kinds, order),) = results(app, "both")
        assert kinds == ["event", "end"]
        assert isinstance(order, Order)


def test_an_object_is_passed_on_by_those_who_do_not_know_it(app: App) -> None:
    task = make(app)
    recorder(app, on_result(task, where={"state": "new", "id": 5}, arguments={"a": from_result()}))
    with app.runner():
        task.map([(4,), (5,)])
        eventually(lambda: of(app, "told"))
        assert results(app, "told") == [[Order(5, "new"), None]]


def test_the_fields_of_an_object_go_by_their_own_names(here: App) -> None:
    task = make(here)

    @here.task(name="told", triggers=[on_result(task, arguments=from_result())])
    def told(id: int, state: str = "") -> list[Any]:
        return [id, state]

    with here.runner():
        task.submit(5)
        eventually(lambda: of(here, "told"))
        assert results(here, "told") == [[5, "new"]]


def test_what_a_trigger_calls_keeps_to_the_limits_of_its_task(app: App) -> None:
    recorder(
        app,
        on_event("made", arguments=from_event()),
        unique_by="a",
        queue="slow",
    )
    with app.runner(queues=["default"]), app.runner(queues=["slow"]):
        app.queues.pause("slow")
        for a in (1, 1, 2):
            app.emit("made", {"a": a})
        app.queues.resume("slow")
        eventually(lambda: sum(each.task.startswith("trigger:") for each in app.invocations(status="success")) == 3)
        assert {tuple(each) for each in results(app, "told")} == {(1, None), (2, None)}


def test_a_chain_that_goes_in_a_circle_ends(here: App, caplog: pytest.LogCaptureFixture) -> None:
    with App("memory://", trigger_max_depth=4, poll_interval_seconds=0.2) as app:

        @app.task(name="ping", triggers=[on_status("pong")])
        def ping() -> int:
            return 0 if (origin := context().origin) is None else origin.depth

        @app.task(name="pong", triggers=[on_status("ping")])
        def pong() -> int:
            return 0 if (origin := context().origin) is None else origin.depth

        with app.runner():
            ping.submit()
            eventually(lambda: app.invocations(status="failed"))
        (failed,) = app.invocations(status="failed")
        assert failed.error is not None
        assert "trigger_max_depth" in failed.error.message
        assert "ping → pong → ping → pong → ping" in failed.error.message
        assert len(app.invocations()) == 6
    assert "found triggers in a circle, each round is one more invocation: ping → pong → ping" in caplog.text


def test_an_argument_that_is_not_there_is_said_and_not_lost(app: App) -> None:
    recorder(app, on_event("made", arguments={"a": from_event("id"), "b": 1}))
    with app.runner():
        app.emit("made", {"ID": 4})
        eventually(lambda: app.invocations(status="failed"))
    (failed,) = of(app, "told")
    assert failed.error is not None
    assert "nothing was found for a" in failed.error.message


def test_a_key_makes_an_event_one(app: App) -> None:
    recorder(app, on_event("made", arguments={"a": from_event("n")}))
    with app.runner():
        first, second = (app.emit("made", {"n": n}, key="order 7") for n in (1, 2))
        assert first.id == second.id
        app.emit("other", key="order 7")
        app.emit("made", {"n": 3})
        eventually(lambda: len(of(app, "told")) == 2)
        assert results(app, "told") == [[1, None], [3, None]]
    assert len(app.events()) == 3


def test_events_from_inside_a_task_and_from_async_code(app: App) -> None:
    recorder(app, on_event("inner", arguments={"a": from_event()}))

    @app.task(name="emits")
    async def emits() -> str:
        return (await app.aemit("inner", 5)).emitted_by

    with app.runner():
        task = emits.submit()
        assert task.result(patient(20)) == task.id
        eventually(lambda: of(app, "told"))
        assert results(app, "told") == [[5, None]]
        asyncio.run(_emit(app))


async def _emit(app: App) -> None:
    event = await app.aemit("nobody.cares", {"x": 1})
    assert (await app.aevents(name="nobody.cares"))[0] == event


# --- how soon


@pytest.mark.parametrize("kind", ["sqlite", "mongodb"])
def test_what_is_triggered_is_submitted_within_a_tenth_of_a_second(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else request.getfixturevalue("mongo_url")
    with App(url) as app:
        task = pay(app)
        recorder(app, on_event("made"), on_status(task))
        with app.runner():
            events = {(event := app.emit("made")).id: event.at for _ in range(21)}
            ends = [task.submit(number) for number in range(21)]
            eventually(lambda: len(app.invocations(task="told", limit=100)) == 42)
        found = app.invocations(task="told", limit=100)
        ended = {each.id: each.record().changed_at for each in ends}
        caused = {record.origin.sources[0].id: record.created_at for record in found if record.origin}
        for happened in (events, ended):
            late = sorted(caused[id] - at for id, at in happened.items())
            assert late[len(late) // 2] <= patient(0.1), late


def test_a_process_that_only_emits_hears_of_a_trigger_within_three_seconds(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app, App(f"sqlite:///{tmp_path}/shop.db") as shop:
        assert shop.emit("made").caused == ()
        recorder(app, on_event("made"))
        with app.runner():
            began = time.monotonic()
            eventually(lambda: shop.emit("made").caused, "it was told")
            assert time.monotonic() - began < 3


def test_a_hundred_that_wait_for_each_other_at_once_are_all_told_at_once(app: App) -> None:
    first = on_event("packed", arguments={"a": from_event("n")})
    second = on_event("labelled", arguments={"b": from_event("n")})
    recorder(app, all_of(first, second), executor="thread")

    async def emit(name: str) -> list[str]:
        events = await asyncio.gather(*[app.aemit(name, {"n": number}) for number in range(100)])
        return [caused.invocation for event in events for caused in event.caused]

    with app.runner(concurrency=4):
        assert not any(asyncio.run(emit("packed")))
        made = asyncio.run(emit("labelled"))
        assert len(set(made)) == 100
        assert all(made), "each knows what it has completed"


def test_a_call_that_could_not_be_made_is_a_failure_that_is_told_of(app: App) -> None:
    told = recorder(app, on_event("paid", arguments={"a": from_event("id")}))
    recorder(app, on_exception(told, "TriggerFailed", arguments={"a": from_exception("message")}), name="alarm")
    with app.runner():
        app.emit("paid", {"no": "id"})
        eventually(lambda: of(app, "alarm"), "the services have told it")
        ((text, _),) = results(app, "alarm")
        assert "nothing was found for a" in text
        eventually(lambda: not any(record.outbox for record in of(app, "told")))


def test_calls_that_cannot_be_made_do_not_go_in_a_circle_for_ever() -> None:
    with App("memory://", poll_interval_seconds=0.2, trigger_max_depth=3) as app:
        recorder(
            app,
            on_event("paid", arguments={"a": from_event("id")}),
            on_exception("told", arguments={"a": from_exception("message"), "b": from_arguments("nothing")}),
        )
        with app.runner():
            app.emit("paid", {})
            eventually(lambda: len(of(app, "told")) == 4)
            eventually(lambda: not any(record.outbox for record in of(app, "told")))
            assert sorted(record.origin.depth for record in of(app, "told") if record.origin) == [1, 2, 3, 4]


def test_a_refusal_by_a_limit_calls_like_any_other_end(app: App) -> None:
    @app.task(name="alone", limit=1, when_full="refuse")
    def alone(number: int) -> None:
        eventually(lambda: of(app, "heard") or number == 0)

    took = {"a": from_arguments("number"), "b": from_cause("status")}
    recorder(app, on_status(alone, "concurrency_controlled_final", arguments=took), name="heard")
    with app.runner(concurrency=4):
        group = alone.map([1, 2, 3])
        ended(group)
        refused = {each.id for each in group if each.status == "concurrency_controlled_final"}
        assert len(refused) == 2
        eventually(lambda: len(of(app, "heard")) == 2)
        assert [b for _, b in results(app, "heard")] == ["concurrency_controlled_final"] * 2
    caused = of(app, "heard")
    assert {each.origin.sources[0].id for each in caused if each.origin is not None} == refused


def test_all_of_the_same_event_twice_needs_two_events(app: App) -> None:
    recorder(app, all_of(on_event("go"), on_event("go")), name="twice")
    with app.runner():
        app.emit("go")
        second = app.emit("go")
        eventually(lambda: len(of(app, "twice")) == 1)
        app.emit("go")
        app.emit("go")
        eventually(lambda: len(of(app, "twice")) == 2)
    first = of(app, "twice")[0]
    assert first.origin is not None
    assert second.id in [each.id for each in first.origin.sources]
    assert [len(each.origin.sources) for each in of(app, "twice") if each.origin is not None] == [2, 2]
