"""One replica set of three nodes for all failure tests. Each of them finds it healthy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mongod import ReplicaSet


@pytest.fixture(scope="session")
def servers() -> Iterator[ReplicaSet]:
    with tempfile.TemporaryDirectory(prefix="hf-failover-") as folder:
        servers = ReplicaSet(Path(folder))
        try:
            servers.start()
            yield servers
        finally:
            servers.stop()


@pytest.fixture
def cluster(servers: ReplicaSet) -> Iterator[ReplicaSet]:
    """The replica set, healthy before and after."""
    servers.heal()
    yield servers
    servers.heal()


@pytest.fixture
def url(cluster: ReplicaSet) -> str:
    """A database for all loads, through the proxies. Its indexes are made once; each load is an app of its own."""
    return cluster.url("loads")


@pytest.fixture
def hasty_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the driver looks for the server twice a second; here more often.

    Needs ``serverMonitoringMode=poll`` in the URL.
    """
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.02)
