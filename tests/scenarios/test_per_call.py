"""What one call says differently from its task, and whether its arguments fit: on every store."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar

import msgspec
import pytest
from tests.support.patience import patient

from holdfast import App, RetryLater, TaskFailed, UsageError, chain, context, group
from holdfast.errors import ArgumentsDoNotBind, ArgumentsDoNotFit
from holdfast.model.records import FOREVER
from holdfast.retries import FirstMatch, Fixed, MoveTo, Never, Only

HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


class Flaky(Exception):
    pass


def declare(app: App, **options: Any) -> Any:
    @app.task(name="work", **options)
    def work() -> None:
        raise Flaky("no")

    return work


def kept_seconds(invocation: Any) -> float:
    record = invocation.record()
    assert record.retain_until is not None
    return float(record.retain_until - record.changed_at)


def test_a_call_has_retries_of_its_own(app: App) -> None:
    work = declare(app, retries=Fixed(1, 0.01))
    usual, more, none = work.submit(), work.options(retries=Fixed(3, 0.01)).submit(), work.options(retries=0).submit()
    with app.runner():
        for invocation in (usual, more, none):
            with pytest.raises(TaskFailed, match="Flaky"):
                invocation.result(timeout=patient(20))
    assert [each.record().attempt for each in (usual, more, none)] == [2, 4, 1]
    assert "attempt 4 of 4 failed" in more.explain()


def test_a_call_is_kept_as_it_says(app: App) -> None:
    work = declare(app, retention={"success": "2d", "failed": "3d"})
    calls = [
        work.submit(),
        work.options(retention="5d").submit(),
        work.options(retention={"success": "1h"}).submit(),
        work.options(retention="2d").options(retention={"failed": None}).submit(),
        work.options(retention="forever").submit(),
    ]
    with app.runner():
        for invocation in calls:
            with pytest.raises(TaskFailed):
                invocation.result(timeout=patient(20))
    assert [kept_seconds(each) for each in calls[:3]] == [pytest.approx(days * DAY) for days in (3, 5, 3)]
    assert [each.record().retain_until for each in calls[3:]] == [FOREVER, FOREVER]


def test_what_a_call_cannot_have_is_refused(app: App) -> None:
    once = declare(app, at_most_once=True)
    with pytest.raises(UsageError, match="at_most_once=True and retries= contradict each other"):
        once.options(retries=2)
    assert once.options(retries=0).terms.retries is None
    with pytest.raises(UsageError, match="retention='5m' is too short"):
        once.options(retention="5m")
    with pytest.raises(UsageError, match="retries=True is not a retry policy"):
        once.options(retries=True)

    @app.workflow(name="flow")
    async def flow() -> None: ...

    with pytest.raises(UsageError, match="a workflow has no option retries: a replay would raise the same error"):
        flow.options(retries=2)
    assert flow.options(retention="2h").terms.retention is not None


def test_a_schedule_submits_calls_with_these_options(app: App) -> None:
    work = declare(app).options(retries=2, retention="2h")
    call = app.schedules.create("often", work, every="1h").call
    assert (call.terms.retries, call.terms.retention) == (work.terms.retries, work.terms.retention)
    assert call.terms.retries is not None


# --- retries that are asked for


class Busy(RetryLater):
    pass


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        (Only(Fixed(2, 3600), OSError), 3),
        (MoveTo("default", Only(Fixed(1, 3600), OSError)), 2),
        (FirstMatch([(OSError, Fixed(2, 3600)), (ValueError, Fixed(1, 3600))]), 3),
        (FirstMatch([(Busy, Fixed(1, 3600)), (OSError, Fixed(2, 3600))]), 2),
        (FirstMatch([(OSError, Fixed(2, 3600)), (Exception, Never())]), 3),
        (FirstMatch([(Busy, Never()), (OSError, Fixed(2, 3600))]), 1),
    ],
)
def test_who_asks_for_another_attempt_gets_it_up_to_the_number(app: App, policy: Any, attempts: int) -> None:
    @app.task(name="ask", retries=policy)
    def ask() -> None:
        raise Busy(0.01)

    app.register(Busy)
    with app.runner():
        invocation = ask.submit()
        with pytest.raises(Busy):
            invocation.result(timeout=patient(20))
    assert invocation.record().attempt == attempts


# --- the key of effects


def test_a_rerun_has_the_key_of_the_effects_of_the_first_run(app: App) -> None:
    @app.task(name="charge", retention="1d")
    def charge(order: int) -> str:
        return context().idempotency_key

    with app.runner():
        named, plain = charge.options(key="order 7").submit(7), charge.submit(8)
        assert named.result(timeout=patient(20)) == "order 7"
        assert plain.result(timeout=patient(20)) == plain.id
        again = plain.rerun()
        assert again.result(timeout=patient(20)) == plain.id
        assert again.rerun().result(timeout=patient(20)) == plain.id
        assert named.rerun().result(timeout=patient(20)) == "order 7"
        other = plain.rerun(new_key=True)
        assert other.result(timeout=patient(20)) == other.id
        (bulk,) = app.rerun([again.id]).invocations
        assert bulk.result(timeout=patient(20)) == plain.id
    assert kept_seconds(again) == pytest.approx(DAY)


# --- arguments and annotations


class Line(NamedTuple):
    price: float
    tags: tuple[str, ...] = ()


@dataclasses.dataclass
class Order:
    lines: list[Line]
    by: str | None = None


class Box(msgspec.Struct):
    orders: dict[str, Order]


class Address(TypedDict, total=False):
    number: NotRequired[int]
    street: str


Cents = NewType("Cents", int)
T = TypeVar("T")
Small = Annotated[int, msgspec.Meta(le=10)]


def declare_checked(app: App, **options: Any) -> Any:
    @app.task(name="take", **options)
    def take(
        box: Box | None = None,
        count: int = 0,
        *rest: str,
        rate: float = 0.0,
        mode: Literal["a", "b"] = "a",
        to: Address | None = None,
        cents: Cents = Cents(0),
        at: dt.datetime | None = None,
        names: Sequence[str] = (),
        small: Small = 0,
        anything: Any = None,
        unknown: "Nowhere" = None,  # type: ignore[name-defined]  # noqa: F821, UP037
        **more: int,
    ) -> None: ...

    return take


@pytest.mark.parametrize(
    "call",
    [
        ((), {}),
        ((Box({"x": Order([Line(1, ("t",)), Line(2.5)], by=None)}), 3, "a", "b"), {"rate": 2, "mode": "b", "extra": 1}),
        ((None,), {"to": {"street": "Hill"}, "cents": 4, "at": dt.datetime.now(dt.UTC), "names": ["a"], "small": 3}),
        ((), {"anything": object, "unknown": 3, "names": ("a", "b"), "count": True}),
    ],
)
def test_what_a_type_checker_accepts_fits(call: Any) -> None:
    args, kwargs = call
    with App("memory://") as app:
        take = declare_checked(app, validate="submit")
        take._fitting.check(args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "says"),
    [
        ((Box({"x": Order([Line(1), Line("two")])}),), {}, "box.orders['x'].lines[1].price", "expected float"),  # type: ignore[arg-type]
        ((Box({"x": Order([Line(1, ("t", 7))])}),), {}, "box.orders['x'].lines[0].tags[1]", "is 7 (int); expected str"),  # type: ignore[arg-type]
        ((Box({3: Order([])}),), {}, "a key of box.orders", "is 3 (int); expected str"),  # type: ignore[dict-item]
        (("no box",), {}, "box", "expected tests.scenarios.test_per_call.Box | None"),
        ((None, "3"), {}, "count", "is '3' (str); expected int"),
        ((None, 1, "a", 2), {}, "rest[1]", "expected str"),
        ((), {"mode": "c"}, "mode", "expected 'a' or 'b'"),
        ((), {"rate": "fast"}, "rate", "expected float"),
        ((), {"to": {"street": 1}}, "to['street']", "expected str"),
        ((), {"to": {"number": "x"}}, "to['number']", "expected int"),
        ((), {"to": {"town": "x"}}, "to", "expected tests.scenarios.test_per_call.Address | None"),
        ((), {"cents": 1.5}, "cents", "expected int"),
        ((), {"at": "now"}, "at", "expected datetime.datetime | None"),
        ((), {"names": ["a", 2]}, "names[1]", "expected str"),
        ((), {"small": 11}, "small", "is 11 (int); expected int <= 10"),
        ((), {"extra": "x"}, "extra", "expected int"),
        ((), {"count": None}, "count", "is None; expected int"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(args: Any, kwargs: Any, path: str, says: str) -> None:
    with App("memory://") as app:
        take = declare_checked(app, validate="submit")
        with pytest.raises(ArgumentsDoNotFit) as caught:
            take.submit(*args, **kwargs)
        assert caught.value.path == path
        assert f"the arguments of take do not fit its annotations: {path} is" in str(caught.value)
        assert says in str(caught.value)
        assert isinstance(caught.value, TypeError)
        assert app.invocations() == []


def test_a_list_of_calls_is_stored_as_a_whole_or_not_at_all(app: App) -> None:
    @app.task(name="count", validate="submit")
    def count(number: int) -> int:
        return number

    with pytest.raises(ArgumentsDoNotFit, match="number is 'x'"):
        count.map([1, "x", 3])
    with pytest.raises(ArgumentsDoNotBind):
        count.submit()
    with pytest.raises(ArgumentsDoNotFit):
        app.schedules.create("often", count, ["x"], every="1h")
    assert app.invocations() == []
    with app.runner():
        assert count.map([1, 2]).results(timeout=patient(20)) == [1, 2]


def test_the_app_says_so_for_all_tasks_and_a_task_for_itself() -> None:
    with App("memory://", validate="submit") as app:

        @app.task(name="checked")
        def checked(number: int) -> None: ...

        @app.task(name="free", validate="off")
        def free(number: int) -> None: ...

        with pytest.raises(ArgumentsDoNotFit):
            checked.submit("x")  # type: ignore[arg-type]
        free.submit("x")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="validate='always': expected 'submit', 'off', or None"):
            app.task(name="wrong", validate="always")(len)  # type: ignore[call-overload]


def test_what_a_link_takes_from_the_call_before_is_not_judged(app: App) -> None:
    @app.task(name="double", validate="submit")
    def double(number: int, digits: int = 0) -> int:
        return number * 2

    @app.task(name="total", validate="submit")
    def total(*numbers: list[int], extra: int = 0) -> int:
        return sum(numbers[0]) + extra

    with pytest.raises(ArgumentsDoNotFit, match="number is 'x'"):
        chain(double.s("x"), double).submit()
    with pytest.raises(ArgumentsDoNotFit, match="digits is 'x'"):
        chain(double.s(1), double.s("x")).submit()
    with pytest.raises(ArgumentsDoNotFit, match="numbers\\[1\\] is 'x'"):
        group([double.s(1)]).then(total.s("x")).submit()
    assert app.invocations() == []
    doubled = chain(double.s(1), double, double.s(digits=1)).submit()
    added = group([double.s(1), double.s(2)]).then(total.s(extra=1)).submit()
    with app.runner():
        assert doubled.result(timeout=patient(20)) == 8
        assert added.callback is not None
        assert added.callback.result(timeout=patient(20)) == 7


@pytest.mark.parametrize("by", ["customer", "*"])
def test_a_link_is_not_under_a_rate_by_what_it_takes(by: str) -> None:
    with App("memory://") as app:

        @app.task(name="tell", rate="5/s", rate_by=by)
        def tell(customer: str, text: str = "") -> str:
            return customer

        with pytest.raises(UsageError, match="tell has rate_by='customer', which it takes from the call before"):
            tell.s("ann").then(tell).submit()
