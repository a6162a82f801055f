"""Errors that servers make on demand, by their fail points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo.errors import PyMongoError
from tests.failover.load import CLIENT
from tests.support.mongod import ReplicaSet

COMMANDS = ["insert", "update", "findAndModify", "delete", "find", "aggregate", "distinct", "getMore"]
WRITES = ["insert", "update", "findAndModify", "delete"]

# The command is refused.
REFUSALS = {
    6: "host unreachable",
    24: "lock timeout",
    50: "too slow",
    89: "network timeout",
    91: "shutting down",
    112: "write conflict",
    175: "query plan killed",
    189: "stepped down",
    262: "out of time",
    365: "temporarily unavailable",
    10107: "no primary",
    11600: "interrupted by shutdown",
    11601: "interrupted by an operator",
    11602: "interrupted by an election",
    13436: "no primary or secondary",
    16500: "too many requests",
}
FEW = {50, 91, 11601}
DOUBTS = {64, 91, 189, 11602}  # the command is carried out, and then it is said that the majority may not have it


@contextmanager
def failing(cluster: ReplicaSet, commands: list[str], **how: Any) -> Iterator[None]:
    """Let each server fail one in seven of these commands of the load."""
    mode = {"activationProbability": 0.15}
    data = {"failCommands": commands, "appName": CLIENT, **how}
    try:
        for node in cluster.nodes:
            with node.client() as client:
                client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
        yield
    finally:
        for node in cluster.nodes:
            with contextlib.suppress(PyMongoError), node.client() as client:  # one that is down has no fail point
                client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
