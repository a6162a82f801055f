"""Limits of time in a test: what they end has failed with them."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import TimedOut
from holdfast.retries import Fixed
from holdfast.testing import testing_app


def test_what_a_timeout_ends_has_failed_with_it() -> None:
    with testing_app() as t:

        @t.app.task(timeout="20ms", retries=Fixed(1, 60))
        async def hang() -> None:
            await asyncio.Event().wait()

        hang.submit()
        report = t.drain()
        assert [type(ran.error) for ran in report.retried] == [TimedOut]
        assert "timed out after 20ms" in str(report)
        with pytest.raises(TimedOut, match="timed out after 20ms"):
            t.advance("1m", check=True)


def test_the_error_of_a_class_within_is_the_error_itself() -> None:
    with testing_app() as t:

        class Declined(Exception):
            pass

        error = Declined("no card")

        @t.app.task
        def charge() -> None:
            raise error

        charge.submit()
        assert [ran.error for ran in t.drain().failed] == [error]


def test_what_debounced_calls_became_is_what_was_submitted() -> None:
    with testing_app() as t:

        @t.app.task(debounce="5s")
        def publish(price: int) -> int:
            return price

        for price in (1, 2, 3):
            publish.submit(price)
        t.assert_submitted(publish, 3)
        t.assert_not_submitted(publish, 1)
        assert [ran.call for ran in t.advance("5s").succeeded] == ["publish(3)"]
