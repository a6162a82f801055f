"""A primary that is cut off from the others takes writes which nobody else will ever have.

When it comes back, it rolls them back. What was acknowledged by us must not be among them. Two loads go through the
same events: one as it is, and one with a planted bug, which writes with ``w: 1``. The second one has to lose something,
or this test would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.failover.load import LOADS, Load
from tests.support.mongod import Mongod, ReplicaSet

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]


@pytest.fixture
def planted(cluster: ReplicaSet, tmp_path: Path) -> Iterator[Load]:
    """A load that takes a write for done when one server has it."""
    planted = Load(cluster.url(LOADS), tmp_path, runners=1, write_concern=1)
    try:
        planted.go()
        yield planted
    finally:
        planted.abort()


@pytest.mark.faults
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.torture)])
def test_nothing_acknowledged_is_rolled_back(cluster: ReplicaSet, load: Load, planted: Load, rounds: int) -> None:
    for _ in range(rounds):
        isolated = cluster.primary()
        before = rollbacks(isolated)
        cluster.isolate(isolated)
        planted.accepts(3)  # by a primary that does not know yet that it is none any more
        cluster.primary(other_than=isolated)
        load.progress(5)
        cluster.heal()
        assert rollbacks(isolated) > before, "nothing was rolled back, so nothing was tested"
    load.progress(5)
    assert load.verdict() == []
    planted.abort()  # it would wait for ever for what is lost
    assert [found for found in planted.judge() if " was accepted as " in found], "with w: 1 something must be lost"


def rollbacks(node: Mongod) -> int:
    """How often this server has rolled back since it was set up."""
    with node.client() as client:
        answer = client.admin.command("replSetGetRBID")
    return int(answer["rbid"])
