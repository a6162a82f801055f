"""Faults of a moment, under load: connections break in the middle of a message, servers answer with errors."""

from __future__ import annotations

from typing import Any

import pytest
from tests.failover.load import LOADS, Load
from tests.failover.server_errors import COMMANDS, DOUBTS, FEW, REFUSALS, WRITES, failing
from tests.store.mongo.tools import until
from tests.support.mongod import ReplicaSet
from tests.support.proxy import Fate

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]


@pytest.mark.faults
def test_connections_that_break_in_the_middle(cluster: ReplicaSet, hasty_load: Load) -> None:
    for fate in (Fate.REQUEST_CUT, Fate.REPLY_CUT, Fate.REPLY_NOT_AWAITED):
        rules = [
            cluster.meddle(fate, command, f"{LOADS}.holdfast_invocations", 3)
            for command in ("insert", "findAndModify", "update", "find")
        ]
        until(lambda: all(rule.met == 3 for rule in rules), 30, f"{fate} of every command")  # noqa: B023
    for proxy in cluster.proxies.values():
        proxy.cut()
    hasty_load.progress()
    assert hasty_load.verdict() == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("refusals", "doubts"),
    [(FEW, {64}), pytest.param(set(REFUSALS), DOUBTS, marks=pytest.mark.torture)],
    ids=["a few", "all"],
)
def test_server_errors(cluster: ReplicaSet, hasty_load: Load, refusals: set[int], doubts: set[int]) -> None:
    for code in sorted(refusals):
        with failing(cluster, COMMANDS, errorCode=code):
            hasty_load.progress(5, 30)
    for code in sorted(doubts):
        with failing(cluster, WRITES, writeConcernError={"code": code, "errmsg": "who knows"}):
            hasty_load.progress(5, 30)
    with failing(cluster, COMMANDS, closeConnection=True):
        hasty_load.progress(5, 30)
    hasty_load.progress(5)
    assert hasty_load.verdict() == []


def test_a_fail_point_does_not_outlive_its_test(cluster: ReplicaSet) -> None:
    with pytest.raises(ZeroDivisionError), failing(cluster, COMMANDS, errorCode=91):
        raise ZeroDivisionError
    for node in cluster.nodes:
        with node.client() as client:
            found: Any = client.admin.command({"getParameter": 1, "failpoint.failCommand": 1})
        assert found["failpoint.failCommand"]["mode"] == 0
