"""Minutes of faults, one after the other in an order given by a seed, under load. `make torture` runs it.

``HOLDFAST_TEST_TORTURE_SECONDS`` says for how long, ``HOLDFAST_TEST_TORTURE_SEED`` repeats an order of faults. Real
processes do not repeat themselves, so run a seed that failed several times.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
from tests.failover.load import LOADS, Load
from tests.failover.server_errors import COMMANDS, REFUSALS, WRITES, failing
from tests.support.mongod import Mongod, ReplicaSet
from tests.support.proxy import Fate

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow, pytest.mark.torture]

SECONDS = float(os.environ.get("HOLDFAST_TEST_TORTURE_SECONDS", "120"))
SEED = int(os.environ.get("HOLDFAST_TEST_TORTURE_SEED") or random.randrange(10**6))

COLLECTIONS = ("holdfast_invocations", "holdfast_runners", "holdfast_signals", "holdfast_payloads")


class Storm:
    """What can happen to a replica set. Each fault ends before the next one begins."""

    def __init__(self, cluster: ReplicaSet, load: Load, seed: int) -> None:
        self._cluster = cluster
        self._load = load
        self._random = random.Random(seed)
        self.faults: dict[str, Callable[[], object]] = {
            "the primary steps down": cluster.step_down,
            "the primary is killed": lambda: self._kill(cluster.primary()),
            "a secondary is killed": lambda: self._kill(self._random.choice(cluster.secondaries())),
            "the primary freezes": lambda: self._freeze(cluster.primary()),
            "a secondary freezes": lambda: self._freeze(self._random.choice(cluster.secondaries())),
            "the primary is cut off from the others": self._isolate,
            "all connections are cut": self._cut,
            "single messages go wrong": self._meddle,
            "nothing passes": self._freeze_network,
            "the servers make errors": self._fail,
            "all servers are killed": self._outage,
        }

    def blow(self, seconds: float) -> None:
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            name = self._random.choice(list(self.faults))
            print(f"{now:6.1f} s  {name}", flush=True)
            self.faults[name]()
            self._load.progress(5)

    def _last(self, least: float, most: float) -> None:
        time.sleep(self._random.uniform(least, most))

    def _kill(self, node: Mongod) -> None:
        node.kill()
        self._last(0, 5)
        self._cluster.heal()

    def _freeze(self, node: Mongod) -> None:
        node.freeze()
        self._last(0.5, 12)
        node.resume()
        self._cluster.heal()

    def _isolate(self) -> None:
        self._cluster.isolate(self._cluster.primary())
        self._last(0.5, 8)
        self._cluster.heal()

    def _cut(self) -> None:
        for _ in range(self._random.randrange(1, 20)):
            for proxy in self._cluster.proxies.values():
                proxy.cut()
            self._last(0, 0.3)

    def _meddle(self) -> None:
        fates = [Fate.REPLY_LOST, Fate.REPLY_CUT, Fate.REQUEST_CUT, Fate.REPLY_NOT_AWAITED]
        for command in (*WRITES, "find", "getMore"):
            for collection in COLLECTIONS:
                self._cluster.meddle(
                    self._random.choice(fates), command, f"{LOADS}.{collection}", self._random.randrange(1, 6)
                )
        self._last(1, 3)
        self._cluster.forget()

    def _freeze_network(self) -> None:
        for proxy in self._cluster.proxies.values():
            proxy.freeze()
        self._last(0.5, 12)
        self._cluster.heal()

    def _fail(self) -> None:
        with failing(self._cluster, COMMANDS, errorCode=self._random.choice(sorted(REFUSALS))):
            self._last(1, 3)

    def _outage(self) -> None:
        for node in self._cluster.nodes:
            node.kill()
        self._last(0, 20)
        self._cluster.heal()


def test_a_storm(cluster: ReplicaSet, hasty_load: Load) -> None:
    print(f"\nHOLDFAST_TEST_TORTURE_SEED={SEED}")
    Storm(cluster, hasty_load, SEED).blow(SECONDS)
    cluster.heal()
    hasty_load.progress()
    assert hasty_load.verdict() == []
