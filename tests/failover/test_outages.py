"""Servers are away for a while, under load: work waits, and then it goes on."""

from __future__ import annotations

import time

import pytest
from tests.failover.ledger import ACCEPTED
from tests.failover.load import Load
from tests.support.mongod import ReplicaSet

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]

torture = pytest.mark.torture


def lasting(short: float, *long: float) -> pytest.MarkDecorator:
    """A short form for every day, and long ones for `make torture`. Seconds."""
    return pytest.mark.parametrize("seconds", [short, *(pytest.param(one, marks=torture) for one in long)])


def last(began: float, seconds: float) -> None:
    """Let a fault last so long."""
    time.sleep(max(0.0, began + seconds - time.monotonic()))


@pytest.mark.faults
@lasting(4, 10, 25)
def test_a_primary_that_freezes(cluster: ReplicaSet, load: Load, seconds: float) -> None:
    """Its connections stay open and nothing comes; what was sent to it is read when it wakes up as a former primary.

    After 20 s a client gives up a connection by itself.
    """
    frozen, began = cluster.primary(), time.monotonic()
    frozen.freeze()
    assert cluster.primary() is not frozen
    last(began, seconds)
    frozen.resume()
    load.progress()
    assert load.verdict() == []


@pytest.mark.faults
@torture
@lasting(10, 25)
def test_a_network_that_freezes(cluster: ReplicaSet, load: Load, seconds: float) -> None:
    """Nobody reaches anybody, and nobody is told. Then everything arrives."""
    began = time.monotonic()
    for proxy in cluster.proxies.values():
        proxy.freeze()
    last(began, 1)
    accepted = load.count(ACCEPTED)
    last(began, seconds)
    assert load.count(ACCEPTED) == accepted, "something got through"
    for proxy in cluster.proxies.values():
        proxy.thaw()
    load.progress()
    assert load.verdict() == []


@lasting(5, 20)
def test_an_outage_of_the_whole_set(cluster: ReplicaSet, load: Load, seconds: float) -> None:
    """All three servers are killed, and come back on what is on their disks."""
    began = time.monotonic()
    for node in cluster.nodes:
        node.kill()
    last(began, seconds)
    cluster.heal()
    load.progress()
    assert load.verdict() == []


@pytest.mark.faults
@torture
def test_a_network_outage(cluster: ReplicaSet, load: Load) -> None:
    """The servers live, and nobody gets through to them for 20 s."""
    began = time.monotonic()
    for proxy in cluster.proxies.values():
        proxy.refuse()
    last(began, 1)
    accepted = load.count(ACCEPTED)
    last(began, 20)
    assert load.count(ACCEPTED) == accepted, "something got through"
    cluster.heal()
    load.progress()
    assert load.verdict() == []
