"""Schedules and triggers in a test: as with a runner, at the test's own time."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from holdfast import App, all_of, cron, every, on_event, on_status, trigger
from holdfast.testing import testing_app
from holdfast.triggers import from_event, from_result

MIDNIGHT = dt.datetime(2026, 11, 15, tzinfo=dt.UTC)


def is_even(payload: dict[str, Any]) -> bool:
    return bool(payload["n"] % 2 == 0)


def test_a_drain_runs_what_events_and_ends_call() -> None:
    with testing_app() as t:
        done: list[Any] = []

        @t.app.task(name="ship", triggers=[on_event("paid", arguments={"order": from_event("id")})])
        def ship(order: int) -> str:
            done.append(("ship", order))
            return f"parcel {order}"

        @t.app.task(name="tell", triggers=[on_status(ship, arguments={"what": from_result()})])
        def tell(what: str) -> None:
            done.append(("tell", what))

        t.app.emit("paid", {"id": 7})
        t.assert_submitted(ship, 7)
        t.drain(check=True)
        assert done == [("ship", 7), ("tell", "parcel 7")]

        @t.app.task(name="late", triggers=[on_event("paid")])
        def late() -> None:
            done.append("late")

        t.app.emit("paid", {"id": 8})
        t.drain(check=True)
        assert set(done[2:]) == {("ship", 8), ("tell", "parcel 8"), "late"}


def test_code_decides_and_what_has_to_happen_together_does() -> None:
    with testing_app() as t:
        done: list[Any] = []

        @t.app.task(name="even", triggers=[on_event("n", where=is_even, arguments=from_event())])
        def even(n: int) -> None:
            done.append(n)

        @t.app.task(name="both", triggers=[all_of(on_event("n"), on_event("go"))])
        def both() -> None:
            done.append("both")

        for n in range(4):
            t.app.emit("n", {"n": n})
        t.app.emit("go")
        t.drain(check=True)
        assert sorted(done, key=str) == [0, 2, "both"]


def test_time_that_passes_brings_ticks() -> None:
    with testing_app(start=MIDNIGHT) as t:
        hours: list[int] = []

        @t.app.task(name="report", triggers=[cron("0 9,17 * * *"), every("1d")])
        def report() -> None:
            hours.append(dt.datetime.fromtimestamp(t.clock.now(), dt.UTC).hour)

        t.drain()
        assert hours == []
        t.advance("24h", check=True)
        assert sorted(hours) == [0, 9, 17]
        t.app.schedules.create("mine", report, every="30m")
        t.advance("2h")
        assert len(hours) == 7


def test_who_waits_for_a_result_needs_no_tick() -> None:
    with testing_app(start=MIDNIGHT) as t:

        @t.app.task(name="often", triggers=[every("1s")])
        def often() -> None: ...

        @t.app.task(name="soon")
        def soon() -> int:
            return 5

        assert soon.options(delay="1h").submit().result() == 5


@pytest.mark.parametrize("builder", [trigger().on_event("x").with_arguments(a=1)])
def test_a_builder_is_a_trigger(builder: Any) -> None:
    with testing_app() as t:

        @t.app.task(name="built", triggers=[builder])
        def built(a: int) -> None: ...

        t.app.emit("x")
        t.drain(check=True)
        t.assert_submitted(built, 1)


def test_a_key_whose_time_is_over_counts_no_more_although_nobody_has_tidied_up() -> None:
    with testing_app(App("memory://", name="testing", event_retention_seconds=3600)) as t:
        first = t.app.emit("paid", {"id": 1}, key="one")
        t.clock.advance(3599)
        assert t.app.emit("paid", {"id": 2}, key="one").id == first.id
        t.clock.advance(1)
        later = t.app.emit("paid", {"id": 3}, key="one")
        assert (later.id != first.id, later.facts.payload) == (True, {"id": 3})
        assert t.app.emit("paid", {"id": 4}, key="one").id == later.id
