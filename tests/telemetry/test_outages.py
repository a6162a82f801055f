"""What a runner says while its store is away: soon, seldom, and truly."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.fleet.test_runner import add, virtually
from tests.support.fleet import Fleet

from holdfast.errors import StoreUnavailable
from holdfast.telemetry.events import store_observer
from holdfast.telemetry.logs import RETRIES, LogThrottle, logging_telemetry
from holdfast.testing.clock import FakeClock

MINUTES = 60.0


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_ten_minutes_without_a_store_are_told_in_some_tens_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(5)
        caplog.clear()
        member.line.cut = True
        await asyncio.sleep(5)
        assert any("has not written a heartbeat for" in line for line in lines(caplog))
        await asyncio.sleep(10 * MINUTES - 5)
        assert 10 < len(lines(caplog)) < 40
        assert lines(caplog, logging.ERROR) == []
        reminders = [line for line in lines(caplog) if "has still not written a heartbeat for 3m" in line]
        assert len(reminders) == 1, lines(caplog)
        assert any("nothing is claimed until the store answers a heartbeat" in each for each in lines(caplog))
        assert all("the line is cut" in line for line in lines(caplog) if "looking for work" in line)
        caplog.clear()
        member.line.cut = False
        await asyncio.sleep(10)
        assert [line for line in lines(caplog) if "reaped services" not in line] == []
        assert [line for line in lines(caplog, logging.INFO) if "wrote a heartbeat again, after 10m" in line]
        id = await fleet.submit("add", 1, 2)
        assert (await fleet.end(id)).status == "success"

    virtually(scenario)


def test_heartbeats_that_hang_are_told_of_before_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    """The store's own retries may take half a minute: by then somebody should know for long."""

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(5)
        caplog.clear()
        member.line.freeze()
        await asyncio.sleep(7)
        assert [line for line in lines(caplog) if "has not written a heartbeat for" in line]
        member.line.thaw()

    virtually(scenario)


def test_a_store_that_answers_late_but_steadily_is_not_complained_of_at_each_beat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        heartbeat = fleet.store.heartbeat

        async def slow(*args: object, **named: object) -> object:
            await asyncio.sleep(8)
            return await heartbeat(*args, **named)  # type: ignore[arg-type]

        fleet.store.heartbeat = slow  # type: ignore[method-assign, assignment]
        await asyncio.sleep(120)
        assert len([line for line in lines(caplog) if "not written a heartbeat" in line]) == 1
        fleet.store.heartbeat = heartbeat  # type: ignore[method-assign]

    virtually(scenario)


def test_a_store_that_comes_and_goes_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(5)
        for _ in range(30):
            member.line.errors["heartbeat"] = StoreUnavailable("away")
            await asyncio.sleep(2)
            del member.line.errors["heartbeat"]
            await asyncio.sleep(2)
        told = [line for line in lines(caplog, logging.INFO) if "wrote a heartbeat" in line]
        assert 4 <= len(told) <= 10

    virtually(scenario)


def test_a_beat_that_fails_after_a_later_one_was_heard_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(fleet: Fleet) -> None:
        member = await fleet.started(add)
        await asyncio.sleep(5)
        caplog.clear()
        member.line.swallowed["heartbeat"] = 1
        await asyncio.sleep(60)
        assert lines(caplog) == []

    virtually(scenario)


def test_the_same_line_comes_ever_more_seldom_and_is_news_again_after_a_while() -> None:
    now = [0.0]
    throttle = LogThrottle(lambda: now[0])
    said = []
    for second in range(1000):
        now[0] = float(second)
        if throttle.is_due("claim"):
            said.append(second)
    assert said == [0, 10, 40, 130, 400, 700]
    assert throttle.is_due("heartbeat")
    assert throttle.is_over("claim")
    assert not throttle.is_over("claim")
    assert throttle.is_due("claim")
    assert not throttle.is_due("claim")
    now[0] += 130
    assert throttle.is_due("claim")


FACTS = {"where": "MongoDB at db1", "what": "claim", "tries": 6, "seconds": 34.2, "why": "refused"}


def test_a_store_that_is_tried_again_and_given_up_is_logged_once_and_then_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever asked gets the error, and says what follows from it."""
    caplog.set_level(logging.INFO)
    tell = store_observer(logging_telemetry(FakeClock().monotonic))
    for _ in range(20):
        tell("retry", FACTS | {"try": 1, "delay": 0.1})
        tell("gave_up", FACTS)
        tell("change_stream_broken", FACTS)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert lines(caplog)[0] == "could not reach MongoDB at db1: claim, try 1 failed, next in 0.10 s: refused"
    caplog.clear()
    for _ in range(3):
        tell("recovered", FACTS)
        tell("change_stream_open", {})
    assert lines(caplog, logging.INFO) == [
        "reached MongoDB at db1 again: claim",
        "opened the change stream again: hints arrive",
    ]


def test_a_command_logs_no_tries_of_its_store(caplog: pytest.LogCaptureFixture) -> None:
    """Its own error says what came of them."""
    caplog.set_level(logging.DEBUG)
    tell = store_observer(logging_telemetry(FakeClock().monotonic, RETRIES))
    for kind in ("retry", "gave_up", "recovered"):
        tell(kind, FACTS | {"try": 1, "delay": 0.1})
    assert caplog.records == []
    tell("risk", FACTS)
    assert len(caplog.records) == 1
