"""Schedules and triggers in a test: what they call is run like everything else."""

from __future__ import annotations

import datetime as dt

import pytest

from holdfast import ResultTimeout, cron, from_event, from_exception, from_result, on_event, on_exception, on_status
from holdfast.testing import testing_app

NOON = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)


def is_large(payload: dict[str, int]) -> bool:
    return payload["total"] > 10


def test_what_an_event_calls_is_drained_with_all_that_follows() -> None:
    with testing_app() as t:

        @t.app.task(triggers=[on_event("paid", arguments={"total": from_event("total")})])
        def book(total: int) -> int:
            if total < 0:
                raise ValueError("negative")
            return total * 2

        @t.app.task(triggers=[on_status(book, arguments={"doubled": from_result()})])
        def thank(doubled: int) -> None: ...

        @t.app.task(triggers=[on_exception(book, ValueError, arguments={"why": from_exception("message")})])
        def complain(why: str) -> None: ...

        @t.app.task(triggers=[on_event("paid", where=is_large, arguments={"total": from_event("total")})])
        def inspect(total: int) -> None: ...

        t.app.emit("paid", {"total": 20})
        assert t.drain(check=True).left == []
        t.assert_submitted(book, 20)
        t.assert_submitted(thank, 40)
        t.assert_submitted(inspect, 20)
        t.app.emit("paid", {"total": -1})
        t.drain()
        t.assert_submitted(complain, "negative")
        t.assert_submitted(inspect, times=1)


def test_schedules_fire_while_the_clock_moves() -> None:
    with testing_app(start=NOON) as t:

        @t.app.task(triggers=[cron("0 13 * * *")])
        def lunch() -> None: ...

        @t.app.task
        def clean(days: int) -> None: ...

        t.app.schedules.create("clean", clean, [3], every="6h")
        assert len(t.drain()) == 0, "declaring and creating fires nothing"
        assert [ran.call for ran in t.advance("1h").ran] == ["lunch()"]
        calls = [ran.call for ran in t.advance("1d").ran]
        assert sorted(calls) == ["clean(3)"] * 4 + ["lunch()"]
        assert t.clock.now() == (NOON + dt.timedelta(hours=25)).timestamp()


def test_ticks_do_not_keep_somebody_waiting_for_ever() -> None:
    with testing_app(start=NOON) as t:

        @t.app.task(triggers=[cron("* * * * *")])
        def often() -> None: ...

        @t.app.task
        def work() -> None: ...

        lost = work.submit()
        del t.app._tasks[work.name]
        with pytest.raises(ResultTimeout, match="will not end in this test"):
            lost.result()
