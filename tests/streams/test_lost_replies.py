"""Streams on MongoDB while replies of their writes are lost: each chunk is there once, in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.store.mongo.tools import database_of
from tests.support.patience import patient
from tests.support.proxy import Proxy

from holdfast import App, context, stream
from holdfast.retries import Fixed

LARGE = "x" * 100_000
WRITTEN = [*range(40), LARGE, *range(40)]


@pytest.fixture
def proxy(replica_set: str) -> Iterator[Proxy]:
    hosts = replica_set.partition("://")[2].partition("/")[0].rpartition("@")[2]
    with Proxy(hosts.partition(",")[0]) as proxy:
        yield proxy


LOST = {
    "the entry": ("insert", "holdfast_entries"),
    "the mark": ("update", "holdfast_invocations"),
    "a page": ("insert", "holdfast_log"),
    "a large value": ("update", "holdfast_payloads"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_lost_reply_changes_nothing(mongo_url: str, proxy: Proxy, what: str) -> None:
    options = "directConnection=true&retryWrites=false&retryReads=false&serverMonitoringMode=poll"
    url = f"mongodb://{proxy.address}/{database_of(mongo_url)}?{options}"
    quick = {"retry_base_delay": 0.01, "use_change_streams": False, "poll_interval_seconds": 0.1}
    app, reader = App(url, name="studio", **quick), App(mongo_url, name="studio", **quick)

    @app.task(name="speak", retries=Fixed(1, 0.01))
    def speak() -> None:
        out = stream("words")
        if context().attempt == 1:
            proxy.lose_replies(*LOST[what], 2)
        for value in WRITTEN:
            out.write(value)
        out.flush()
        if context().attempt == 1:
            raise OSError("once")

    with app, reader, app.runner():
        call = speak.submit()
        call.result(patient(30))
        items = list(reader.invocation(call.id).stream("words"))
        assert proxy.lost == 2
        assert [item.index for item in items] == list(range(len(items)))
        assert [item.value for item in items if not item.is_restart] == WRITTEN * 2
        assert [item.attempt for item in items] == [1] * len(WRITTEN) + [2] * (len(WRITTEN) + 1)
