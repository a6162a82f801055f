"""The servers answer with errors, under load: what passes by itself is asked again, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.failover.load import Load
from tests.mongo.tools import with_options
from tests.mongod import ReplicaSet

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]

APP = "errors"
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
FEW = {50, 91, 112, 11601, 11602}
DOUBTS = {64, 91, 189, 11602}  # the command is carried out, and then it is said that the majority may not have it


@contextmanager
def failing(cluster: ReplicaSet, commands: list[str], **how: Any) -> Iterator[None]:
    """Let each server fail every fifth of these commands of the load."""
    mode = {"activationProbability": 0.2}
    data = {"failCommands": commands, "appName": APP, **how}
    for node in cluster.nodes:
        with node.client() as client:
            client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    yield
    for node in cluster.nodes:
        with node.client() as client:
            client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


def test_server_errors(cluster: ReplicaSet, url: str, tmp_path: Path) -> None:
    survives(cluster, url, tmp_path, refusals=FEW, doubts={64, 189})


@pytest.mark.torture
def test_all_server_errors(cluster: ReplicaSet, url: str, tmp_path: Path) -> None:
    survives(cluster, url, tmp_path, refusals=set(REFUSALS), doubts=DOUBTS)


def survives(cluster: ReplicaSet, url: str, folder: Path, *, refusals: set[int], doubts: set[int]) -> None:
    with Load(with_options(url, appname=APP), folder / "load", hasty=True) as load:
        for code in sorted(refusals):
            with failing(cluster, COMMANDS, errorCode=code):
                load.progress(5, 30)
        for code in sorted(doubts):
            with failing(cluster, WRITES, writeConcernError={"code": code, "errmsg": "who knows"}):
                load.progress(5, 30)
        with failing(cluster, COMMANDS, closeConnection=True):
            load.progress(5, 30)
        load.progress(5)
        load.finish()
        assert load.verdict() == []
        print(load.summary())
