"""Triggers as they are declared: what is refused, in which words; and what is visible where code goes wrong."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.patience import eventually

from holdfast import App, all_of, any_of, cron, on_event, on_exception, on_result, on_status, trigger
from holdfast.errors import InvalidTrigger, NotEncodable, UsageError
from holdfast.invocation import InvocationRecord
from holdfast.model.records import Source
from holdfast.triggers import Cause, from_arguments, from_cause, from_event, from_exception, from_result, joins, service
from holdfast.triggers.dispatch import TriggerDispatcher
from holdfast.triggers.rules import Facts

A, B, C = on_event("a"), on_event("b"), on_event("c")


def yes(value: Any) -> bool:
    return True


def both(*causes: Cause) -> dict[str, Any]:
    return {"a": len(causes)}


async def later(value: Any) -> bool:
    return True


class Odd:
    def method(self, value: Any) -> bool:
        return True


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://", poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture
def pay(app: App) -> Any:
    @app.task(name="pay", aliases=["bill"])
    def pay(order: int, *, region: str = "eu") -> int:
        return order

    return pay


def takes(app: App, *triggers: Any, name: str = "told") -> Any:
    @app.task(name=name, triggers=triggers)
    def told(a: Any, b: Any = None) -> list[Any]:
        return [a, b]

    return told


# --- conditions


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: on_event(""), "'' is no name for an event"),
        (lambda: on_event("a b"), "without spaces and vertical bars"),
        (lambda: on_event("x" * 201), "1 to 200 characters"),
        (lambda: on_event("schedule:x@0"), "not beginning with 'schedule:'"),
        (lambda: on_event(5), "5 is no name for an event"),  # type: ignore[arg-type]
        (lambda: on_event("a", where={}), "expected values by name"),
        (lambda: on_event("a", where={1: 2}), "expected values by name"),  # type: ignore[dict-item]
        (lambda: on_event("a", where={"x..y": 2}), "'x..y': expected a path"),
        (lambda: on_event("a", where=[1]), "expected a dict, or a plain function"),  # type: ignore[arg-type]
        (lambda: on_event("a", where={"x": Odd()}), "where['x'] is of the type"),
        (lambda: on_event("a", where={"x": [float("nan")]}), "nothing equals NaN"),
        (lambda: on_event("a", where=lambda payload: True), "where= is a lambda"),
        (lambda: on_event("a", where=later), "expected a dict, or a plain function"),  # type: ignore[arg-type]
        (lambda: on_event("a", where=Odd().method), "expected a dict, or a plain function"),
        (lambda: on_event("a", where=functools.partial(yes)), "expected a dict, or a plain function"),
        (lambda: on_event("a", correlate=5), "correlate=5: expected a path"),  # type: ignore[arg-type]
        (lambda: on_event("a", correlate="x."), "correlate='x.': expected a path"),
        (lambda: on_status("pay", "running"), "expected one of cancelled, concurrency_controlled_final, failed"),
        (lambda: on_status("pay", ["success", "done"]), "on_status(…, 'done')"),
        (lambda: on_status("pay", "concurrency_controlled"), "expected one of"),
        (lambda: on_status("pay", []), "needs a status"),
        (lambda: on_status("pay", 5), "on_status(…, 5)"),  # type: ignore[arg-type]
        (lambda: on_status(""), "expected a task, or the name of one"),
        (lambda: on_status(print), "expected a task, or the name of one"),  # type: ignore[arg-type]
        (lambda: on_result("pay", equals=1, where={"a": 1}), "give where= or equals=, not both"),
        (lambda: on_result("pay", equals=Odd()), "equals is of the type"),
        (lambda: on_result("pay", equals=float("nan")), "nothing equals NaN"),
        (lambda: on_exception("pay", message="("), "message='(' is no regular expression"),
        (lambda: on_exception("pay", message=5), "is no regular expression"),  # type: ignore[arg-type]
        (lambda: on_exception("pay", int), "expected exception classes, or their names"),  # type: ignore[arg-type]
        (lambda: on_exception("pay", ValueError("x")), "expected exception classes"),  # type: ignore[arg-type]
        (lambda: from_event(5), "5: expected a path"),  # type: ignore[arg-type]
        (lambda: from_event("."), "'.': expected a path"),
        (lambda: from_result(of=5), "expected a task, or the name of one"),  # type: ignore[arg-type]
    ],
)
def test_a_condition_that_cannot_be_decided_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidTrigger) as refused:
        make()
    assert says in str(refused.value)


def test_a_filter_on_an_argument_that_the_task_does_not_have_is_refused(app: App, pay: Any) -> None:
    with pytest.raises(InvalidTrigger, match=r"called_with 'amount': pay has no such argument \(order"):
        on_status(pay, called_with={"amount": 1})
    with pytest.raises(InvalidTrigger, match=r"from_arguments 'amount.euro': pay has no such argument"):
        on_status(pay, arguments={"a": from_arguments("amount.euro")})
    on_status(pay, called_with={"order.id": 1, "region": "eu"})
    on_status("elsewhere:pay", called_with={"amount": 1})

    @app.task(name="any")
    def takes_any(**anything: Any) -> None: ...

    on_status(takes_any, called_with={"amount": 1})


# --- put together


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (all_of, "all_of() needs conditions"),
        (any_of, "any_of() needs conditions"),
        (trigger().build, "needs conditions"),
        (lambda: all_of(A, 5), "all_of(5): expected what on_event()"),
        (lambda: A & "b", "all_of('b'): expected"),
        (lambda: A | None, "any_of(None): expected"),
        (lambda: all_of(A, B, within=0), "within=0: expected a length of time"),
        (lambda: all_of(A, B, within="soon"), "within='soon': 'soon' is not a length of time"),
        (lambda: all_of(A, B, within=-1), "it is negative"),
        (lambda: all_of(A, B, correlate=5), "correlate=5: expected a path"),
        (lambda: all_of(any_of(A, all_of(B, C)), C), "put one in the other only so"),
        (lambda: any_of(all_of(A, B, within="1h"), all_of(A, C)), "different within="),
        (lambda: all_of(A, on_event("b", correlate="id")), "the event 'a' has none"),
        (lambda: all_of(A, cron("0 3 * * *"), correlate="id"), "by cron '0 3 * * *', on the clock of UTC has none"),
        (lambda: trigger().on_event("a").with_logic("xor"), "expected 'and' or 'or'"),
        (lambda: trigger().on_event("a").with_logic("or").within("1h").build(), "put together with AND"),
        (lambda: trigger().on_event("a").with_arguments(both).with_arguments(a=1), "alone"),
        (lambda: trigger().on_event("a").with_arguments(a=1).with_args_from_event(), "alone"),
        (lambda: all_of(on_event("a", arguments=both), on_event("b", arguments=both)), "give the whole one"),
        (lambda: all_of(on_event("a", arguments=both), on_event("b", arguments={"a": 1})), "give the whole one"),
        (lambda: any_of(on_event("a", arguments={"a": 1}), on_event("b", arguments={"a": 2})), "give 'a', and not"),
        (
            lambda: any_of(on_event("a", arguments={"a": 1}), on_event("b", arguments={"a": from_event("a")})),
            "several conditions give 'a', and not the same",
        ),
    ],
)
def test_what_cannot_be_put_together_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidTrigger) as refused:
        make()
    assert says in str(refused.value)


def test_what_can_be_put_together_keeps_what_its_parts_say() -> None:
    short = any_of(all_of(A, B, within="1h"), C)
    assert short.within_seconds == 3600, "a condition alone has nothing to wait for"
    built = trigger().on_event("a").with_arguments(a=1)
    assert [each.name for each in any_of(built, on_event("b", arguments={"b": 2})).arguments] == ["a", "b"]
    assert repr(any_of(A, B) & cron("0 3 * * *")) == (
        "<Trigger: the event 'a' or the event 'b' and by cron '0 3 * * *', on the clock of UTC>"
    )


# --- declared


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (A, "the task needs a: say where that comes from"),
        (on_event("a", arguments={"b": 1}), "the task needs a"),
        (on_event("a", arguments={"a": 1, "c": 1}), "arguments={'c': …}: the task has no such parameter (a"),
        (on_event("a", arguments={"a": from_result()}), "from_result(''): no condition of this trigger has a task"),
        (on_event("a", arguments=from_arguments()), "no condition of this trigger has a task that ends"),
        (on_event("a", arguments={"a": from_event("x", of="b")}), "no condition of this trigger is about 'b'"),
        (on_status("pay", arguments={"a": from_event("x")}), "from_event('x'): no condition of this trigger has an"),
        (on_status("pay", "failed", arguments={"a": from_result()}), "has a task that ends as success"),
        (on_status("pay", arguments={"a": from_exception()}), "has a task that ends as failed"),
        (on_exception("pay", arguments={"a": from_exception("text")}), "there is only type, message, traceback"),
        (on_event("a", arguments={"a": from_cause("data")}), "there is only kind, id, name, at, payload"),
        (cron("0 3 * * *"), "the task cannot be called by cron '0 3 * * *'"),
    ],
)
def test_arguments_that_do_not_fit_the_task_are_refused_when_it_is_declared(app: App, made: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        takes(app, made)
    assert says in str(refused.value)
    assert not app.tasks


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({5: 1}, "arguments={5: …}: expected the name of a parameter"),
        ({"a b": 1}, "expected the name of a parameter"),
        ({"a": Odd()}, "a trigger passes on plain data"),
        ([1], "arguments=[1]: expected a dict, or a plain function"),
        (lambda cause: {}, "arguments= is a lambda"),
    ],
)
def test_arguments_that_are_none_are_refused(arguments: Any, says: str) -> None:
    with pytest.raises(InvalidTrigger) as refused:
        on_event("a", arguments=arguments)
    assert says in str(refused.value)


@pytest.mark.parametrize("given", [5, A, "abc", [on_event], [A.clauses], trigger().on_event("a")])
def test_triggers_are_a_list_of_what_makes_them(app: App, given: Any) -> None:
    with pytest.raises(UsageError, match="triggers="):

        @app.task(triggers=given)
        def told() -> None: ...


def test_arguments_of_what_conditions_are_about_are_taken(app: App, pay: Any) -> None:
    takes(app, any_of(cron("0 3 * * *"), A, arguments={"a": from_event("tick")}), name="1")
    takes(app, any_of(on_status(pay), A, arguments={"a": from_result(of="bill"), "b": from_cause("at")}), name="2")


def test_a_name_is_one_trigger(app: App) -> None:
    with pytest.raises(UsageError, match="'x y' is no name for a trigger"):
        takes(app, any_of(A, arguments={"a": 1}, name="x y"))
    with pytest.raises(InvalidTrigger, match="two triggers are named 'same': of told and of told"):
        takes(app, *[any_of(each, arguments={"a": 1}, name="same") for each in (A, B)])
    with pytest.raises(InvalidTrigger, match="two triggers are named 'told#"):
        takes(app, *[on_event("a", where=yes, arguments={"a": 1}) for _ in range(2)])
    takes(app, any_of(A, arguments={"a": 1}, name="same"))
    with pytest.raises(InvalidTrigger, match="two triggers are named 'same': of told and of other"):
        takes(app, any_of(B, arguments={"a": 1}, name="same"), name="other")
    assert list(app.tasks) == ["told"]


def test_a_trigger_for_a_task_that_nobody_knows_is_told_of(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(name="shop:pay")
    def pay() -> None: ...

    takes(app, on_status("shop:pya", arguments={"a": 1}), on_status("bank:transfer", arguments={"a": 1}))
    with caplog.at_level(logging.INFO, "holdfast.triggers"), app.runner():
        pass
    told = {record.levelname: record.getMessage() for record in caplog.records if "not declared" in record.getMessage()}
    assert told["WARNING"].endswith("the unknown task shop:pya: not declared here, did you mean 'shop:pay'?")
    assert told["INFO"].endswith("the unknown task bank:transfer: not declared here, another program may declare it")


def test_tasks_that_decide_are_not_listed_among_those_that_people_declare(app: App) -> None:
    takes(app, on_event("a", where=yes, arguments={"a": 1}))
    assert list(app.tasks) == ["told"]
    with app.runner():
        (runner,) = app.runners()
    assert [name.partition("#")[0] for name in runner.tasks] == ["told", "trigger:told"]


# --- events


@pytest.mark.parametrize(
    ("emit", "error", "says"),
    [
        (lambda app: app.emit("a b"), InvalidTrigger, "is no name for an event"),
        (lambda app: app.emit(None), InvalidTrigger, "None is no name for an event"),
        (lambda app: app.emit("schedule:x"), InvalidTrigger, "not beginning with 'schedule:'"),
        (lambda app: app.emit("a", Odd()), NotEncodable, "payload is of the type"),
        (lambda app: app.emit("a", {"x": [1, Odd()]}), NotEncodable, "payload['x'][1] is of the type"),
        (lambda app: app.emit("a", {"x": yes}), NotEncodable, "an event carries plain data"),
        (lambda app: app.emit("a", key=""), UsageError, "key='': expected a text"),
        (lambda app: app.emit("a", key=5), UsageError, "key=5: expected a text"),
        (lambda app: app.events(limit=-1), UsageError, "limit=-1: expected a whole number"),
        (lambda app: app.events(limit="9"), UsageError, "limit='9': expected a whole number"),
        (lambda app: app.events(name=5), UsageError, "name=5"),
        (lambda app: app.events(before=5), UsageError, "before=5"),
    ],
)
def test_what_is_no_event_is_refused(
    app: App, emit: Callable[[App], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        emit(app)
    assert says in str(refused.value)
    assert app.events() == []


# --- code that goes wrong


def says_maybe(payload: Any) -> Any:
    return "maybe"


def raises(payload: Any) -> bool:
    raise LookupError("no such thing")


def makes_a_list(*causes: Cause) -> Any:
    return [1]


def makes_odd_names(*causes: Cause) -> Any:
    return {1: 2}


def makes_what_is_not_taken(*causes: Cause) -> Any:
    return {"a": 1, "z": 2}


def makes_what_cannot_be_stored(*causes: Cause) -> Any:
    return {"a": Odd()}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"where": says_maybe}, "holdfast.errors:TriggerFailed", "says_maybe is to answer True or False, not 'maybe'"),
        ({"where": raises}, "builtins:LookupError", "no such thing"),
        (
            {"arguments": makes_a_list},
            "holdfast.errors:TriggerFailed",
            "the arguments for told are [1], and not a dict",
        ),
        ({"arguments": makes_odd_names}, "holdfast.errors:TriggerFailed", "are {1: 2}, and not a dict by name"),
        ({"arguments": makes_what_is_not_taken}, "holdfast.errors:ArgumentsDoNotBind", "'z'"),
        ({"arguments": makes_what_cannot_be_stored}, "holdfast.errors:NotEncodable", "a is of the type"),
    ],
)
def test_code_that_goes_wrong_is_seen_and_holds_up_nobody_else(
    app: App, options: dict[str, Any], error: str, says: str
) -> None:
    takes(app, on_event("made", **({"arguments": {"a": 1}} | options)))
    takes(app, on_event("made", where=yes, arguments={"a": 2}), name="other")
    takes(app, on_event("made", arguments={"a": from_event()}), name="plain")
    with app.runner():
        event = app.emit("made", 3)
        eventually(lambda: app.invocations(status="failed"))
        eventually(lambda: len(app.invocations(task=["other", "plain"], status="success")) == 2)
        app.emit("made", 4)
        eventually(lambda: len(app.invocations(status="failed")) == 2)
    (*_, failed) = app.invocations(status="failed")
    assert failed.task.startswith("trigger:told#")
    assert failed.id in [each.invocation for each in event.caused]
    assert failed.error is not None
    assert (failed.error.type_name, says in failed.error.message) == (error, True), failed.error.message
    assert app.invocations(task="told") == []


def test_a_call_that_would_be_too_large_has_failed_and_says_so() -> None:
    with App("memory://", inline_limit=1024, payload_limit=10_000, poll_interval_seconds=0.2) as app:

        @app.task(name="make")
        def make(data: str) -> str:
            return data

        takes(app, on_result(make, arguments={"a": from_cause()}))
        takes(app, on_result(make, arguments={"a": from_result()}), name="other")
        with app.runner():
            make.submit("x" * 8_000)
            eventually(lambda: app.invocations(task="other", status="success") and app.invocations(status="failed"))
            (failed,) = app.invocations(status="failed")
            assert failed.error is not None
            assert "told was not called: argument 'a': a takes" in failed.error.message
            eventually(lambda: not app.invocations(task="make")[0].outbox)


def whole_result(*causes: Cause) -> dict[str, Any]:
    return {"a": causes[0].result}


def test_what_is_large_waits_for_others_all_the_same(app: App) -> None:
    @app.task(name="make")
    def make(size: int) -> str:
        return "x" * size

    waits = on_event("go")
    takes(app, all_of(on_result(make, arguments={"a": from_result()}), waits))
    takes(app, all_of(on_result(make), waits, arguments=whole_result), name="other")
    with app.runner():
        make.submit(2**20 + 9)
        eventually(
            lambda: not app.invocations(task="make")[0].outbox and app.invocations(task="make", status="success")
        )
        app.emit("go")
        eventually(lambda: app.invocations(task="told", status="success"))
        eventually(lambda: app.invocations(task="other", status="success"))


def test_of_too_much_that_waits_the_oldest_is_dropped() -> None:
    join = joins.Join(app="shop", name="j", trigger="t", clause=0, members=((), ()))
    for number in range(9):
        source = Source(kind="event", id=str(number), name="a")
        one = joins.Happened(source=source, at=float(number), picked=b"x" * 2**20)
        join = joins.added(join, one, [0], 3600.0, 10.0)
    assert [each.source.id for each in join.members[0]] == ["5", "6", "7", "8"]
    assert join.dropped == 5
    other = joins.Happened(source=Source(kind="event", id="b", name="b"), at=9.0, picked=b"")
    (firing,) = joins.added(join, other, [1], 3600.0, 10.0).firings
    assert [each.source.id for each in firing] == ["5", "b"]


def test_an_end_that_cannot_be_told_keeps_no_other_from_being_told(
    app: App, pay: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    takes(app, on_status(pay, arguments={"a": from_arguments("order")}))
    read, broken = TriggerDispatcher.facts_of, {"for all": True}

    async def facts_of(self: TriggerDispatcher, record: InvocationRecord) -> Facts:
        if broken["for all"] or record.id == bad.id:
            raise RuntimeError("odd")
        return await read(self, record)

    monkeypatch.setattr(TriggerDispatcher, "facts_of", facts_of)
    monkeypatch.setattr(service, "_SWEEP_SECONDS", 0.2)
    with app.runner():
        bad, good = pay.submit(1), pay.submit(2)
        eventually(lambda: all(each.record().outbox for each in (bad, good)))
        broken["for all"] = False
        eventually(lambda: not good.record().outbox)
        eventually(lambda: f"put off triggers of the end of pay {bad.id}: odd" in caplog.text)
    assert bad.record().outbox
    assert [record.task for record in app.invocations(task="told")] == ["told"]


def test_many_ends_that_cannot_be_told_do_not_stand_in_front_of_the_others(
    app: App, pay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(app, on_status(pay, arguments={"a": from_arguments("order")}))
    read, broken = TriggerDispatcher.facts_of, {"for all": True}
    bad: list[Any] = []

    async def facts_of(self: TriggerDispatcher, record: InvocationRecord) -> Facts:
        if broken["for all"] or record.id in {each.id for each in bad}:
            raise RuntimeError("odd")
        return await read(self, record)

    monkeypatch.setattr(TriggerDispatcher, "facts_of", facts_of)
    monkeypatch.setattr(service, "_SWEEP_SECONDS", 0.2)
    with app.runner():
        bad += [pay.submit(number) for number in range(110)]
        eventually(lambda: all(each.record().outbox for each in bad))
        good = pay.submit(1000)
        eventually(lambda: good.record().outbox)
        broken["for all"] = False
        eventually(lambda: not good.record().outbox)


def test_a_value_that_is_not_there_is_a_call_that_has_failed(app: App) -> None:
    takes(app, on_event("made", arguments={"a": from_event("order.id"), "b": from_event("x")}))
    with app.runner():
        (caused,) = app.emit("made", {"order": 5}).caused
        record: InvocationRecord = app.invocation(caused.invocation).record()
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.message == "told was not called: nothing was found for a, b in its happenings"
    assert record.attempt == 0


def test_and_goes_on_over_more_than_two() -> None:
    (clause,) = (A & B & C).clauses
    assert [str(asked.condition) for (asked,) in clause] == ["the event 'a'", "the event 'b'", "the event 'c'"]
    assert (all_of(A, B, within="1h") & C).within_seconds == 3600
    assert all_of(A & B, C, within="1h").within_seconds == 3600
    with pytest.raises(InvalidTrigger, match="different within="):
        all_of(A, all_of(B, C, within="2h"), within="1h")
