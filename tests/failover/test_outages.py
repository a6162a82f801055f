"""Servers and connections fail for a while, under load: work waits, and then it goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.failover.ledger import UNKNOWN
from tests.failover.load import Load
from tests.mongo.tools import until
from tests.mongod import ReplicaSet
from tests.proxy import Fate

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]

COMMANDS = ("insert", "findAndModify", "update", "find")
torture = pytest.mark.torture


def lasting(short: float, *long: float) -> pytest.MarkDecorator:
    """A short form for every day, and long ones for `make torture`. Seconds."""
    return pytest.mark.parametrize("seconds", [short, *(pytest.param(one, marks=torture) for one in long)])


def last(began: float, seconds: float) -> None:
    """Let a fault last so long."""
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def test_connections_that_break_in_the_middle(cluster: ReplicaSet, url: str, tmp_path: Path) -> None:
    with Load(url, tmp_path / "load", hasty=True) as load:
        for fate in (Fate.REQUEST_CUT, Fate.REPLY_CUT, Fate.REPLY_NOT_AWAITED):
            rules = [cluster.meddle(fate, command, "holdfast_invocations", 3) for command in COMMANDS]
            until(lambda: all(rule.met == 3 for rule in rules), 30, f"{fate} of every command")  # noqa: B023
        for proxy in cluster.proxies.values():
            proxy.cut()
        load.progress()
        load.finish()
        assert load.verdict() == []
        print(load.summary())


@lasting(4, 10, 25)
def test_a_primary_that_freezes(cluster: ReplicaSet, url: str, tmp_path: Path, seconds: float) -> None:
    """Its connections stay open and nothing comes; what was sent to it is read when it wakes up as a former primary.

    After 20 s a client gives up a connection by itself.
    """
    with Load(url, tmp_path / "load") as load:
        frozen, began = cluster.primary(), time.monotonic()
        frozen.freeze()
        assert cluster.primary() is not frozen
        last(began, seconds)
        frozen.resume()
        load.progress()
        load.finish()
        assert load.verdict() == []
        assert load.count(UNKNOWN) == 0
        print(load.summary())


@torture
@lasting(10, 25)
def test_a_network_that_freezes(cluster: ReplicaSet, url: str, tmp_path: Path, seconds: float) -> None:
    """Nobody reaches anybody, and nobody is told. Then everything arrives."""
    with Load(url, tmp_path / "load") as load:
        began = time.monotonic()
        for proxy in cluster.proxies.values():
            proxy.freeze()
        last(began, seconds)
        for proxy in cluster.proxies.values():
            proxy.thaw()
        load.progress()
        load.finish()
        assert load.verdict() == []
        print(load.summary())


@lasting(5, 20)
def test_an_outage_of_the_whole_set(cluster: ReplicaSet, url: str, tmp_path: Path, seconds: float) -> None:
    """All three servers are killed, and come back on what is on their disks."""
    with Load(url, tmp_path / "load") as load:
        began = time.monotonic()
        for node in cluster.nodes:
            node.kill()
        last(began, seconds)
        cluster.heal()
        load.progress()
        load.finish()
        assert load.verdict() == []
        assert load.count(UNKNOWN) == 0
        print(load.summary())


@torture
def test_a_network_outage(cluster: ReplicaSet, url: str, tmp_path: Path) -> None:
    """The servers live, and nobody gets through to them for 20 s."""
    with Load(url, tmp_path / "load") as load:
        began = time.monotonic()
        for proxy in cluster.proxies.values():
            proxy.refuse()
        last(began, 20)
        cluster.heal()
        load.progress()
        load.finish()
        assert load.verdict() == []
        print(load.summary())
