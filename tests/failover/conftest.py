"""One replica set of three nodes for all failure tests, and loads that go on from one test to the next."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.failover.budget import Spent
from tests.failover.load import LOADS, Load
from tests.support.mongod import ReplicaSet

spent = Spent()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent.seconds += report.duration
    spent.tortured |= "torture" in report.keywords


@pytest.fixture(scope="package", autouse=True)
def budget() -> Iterator[None]:
    """Fails the last of the tests here if they were too slow together."""
    yield
    print(f"tests/failover took {spent.seconds:.0f} s")
    if os.environ.get("CI") and (complaint := spent.complaint()):
        pytest.fail(complaint)


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def resting(servers: ReplicaSet) -> Iterator[dict[bool, Load]]:
    """Loads between two tests, by whether they are hasty. In the end everybody leaves, and nothing may be left over."""
    loads: dict[bool, Load] = {}
    yield loads
    servers.heal()
    for load in loads.values():
        load.finish()
        assert load.judge() == []


@pytest.fixture
def load(cluster: ReplicaSet, resting: dict[bool, Load], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """A load that goes. The test has to ask for its verdict."""
    yield from going(cluster, resting, tmp_path_factory, hasty=False)


@pytest.fixture
def hasty_load(
    cluster: ReplicaSet, resting: dict[bool, Load], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Load]:
    """A load whose driver looks for a lost server at once, and not twice a second."""
    yield from going(cluster, resting, tmp_path_factory, hasty=True)


def going(
    cluster: ReplicaSet, resting: dict[bool, Load], folders: pytest.TempPathFactory, *, hasty: bool
) -> Iterator[Load]:
    load = resting.pop(hasty, None) or Load(cluster.url(LOADS), folders.mktemp("load"), hasty=hasty)
    try:
        load.go()
        yield load
    finally:
        if load.is_sound:
            print(load.summary())
            resting[hasty] = load
        else:
            load.abort()
            load.show_logs()


@pytest.fixture
def hasty_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the driver looks for the server twice a second; here more often.

    Needs ``serverMonitoringMode=poll`` in the URL.
    """
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.02)
