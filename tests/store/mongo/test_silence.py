"""A change stream that is cut, or swallowed: polling takes over at once, or as soon as anybody can know."""

from __future__ import annotations

import time

import pytest
from tests.store.mongo.parties import SOON, Party, settle_down
from tests.store.mongo.tools import address_of, database_of, until, with_options
from tests.support.proxy import Fate, Proxy, Rule

from holdfast.store.mongo import hints as hints_module

pytestmark = [pytest.mark.xdist_group("mongo"), pytest.mark.usefixtures("hasty_driver")]


def behind(proxy: Proxy, url: str) -> str:
    """The same database, reached through the proxy alone."""
    return f"mongodb://{proxy.address}/{database_of(url)}?directConnection=true&serverMonitoringMode=poll"


def test_polling_takes_over_at_once_while_no_server_is_to_be_found(mongo_url: str) -> None:
    """The driver would look for one for seconds before it said anything."""
    with Proxy(address_of(mongo_url)) as proxy:
        runner = Party(behind(proxy, mongo_url), retry_base_delay=0.05, retry_max_delay=0.05, max_retries=1000)
        other = Party(mongo_url)
        with runner.app, other.app, runner.app.runner():
            settle_down(runner)
            proxy.refuse()
            until(lambda: not runner.listens(), SOON, "nobody relies on hints")
            other.task.submit()
            proxy.heal()
            until(lambda: runner.started, 8, "it looks")
            until(runner.listens, 12)


def test_a_connection_that_swallows_everything_is_found_out(mongo_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed and nothing arrives: only the time tells."""
    assert hints_module._AWAIT_SECONDS + hints_module._GRACE_SECONDS <= 10
    monkeypatch.setattr(hints_module, "_AWAIT_SECONDS", 0.4)
    monkeypatch.setattr(hints_module, "_GRACE_SECONDS", 0.4)
    with Proxy(address_of(mongo_url)) as proxy:
        runner, other = Party(behind(proxy, mongo_url)), Party(mongo_url)
        with runner.app, other.app, runner.app.runner():
            settle_down(runner)
            swallowed = Rule(Fate.REPLY_SWALLOWED, "getMore", "holdfast_signals", times=1)
            proxy.add(swallowed)
            until(lambda: swallowed.answered)
            other.task.submit()  # its hint is not heard
            until(lambda: runner.started, 0.8 + SOON, "it looks")
            assert [facts["why"] for facts in runner.events.named("change_stream_broken")] == [
                "NetworkTimeout: no answer within 0.8 s"
            ]
            until(runner.listens, 3, "the stream is taken up again")


def test_a_short_socket_timeout_does_not_break_the_stream(mongo_url: str) -> None:
    runner = Party(with_options(mongo_url, socketTimeoutMS=400))
    with runner.app, runner.app.runner():
        until(runner.listens)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 3 * 0.4, what="the measurement itself")
        assert runner.events.named("change_stream_broken") == []
