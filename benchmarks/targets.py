"""The stores that are measured. To measure another one, add it to `TARGETS`."""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.store.contract import Ability

Fresh = Callable[[], AbstractContextManager[str]]  # the URL of an empty store, which is removed afterwards


class CannotServe(Exception):
    """What a store needs is not on this machine."""


@dataclass(frozen=True)
class Target:
    """A store: what to call it, and what gives empty ones while it is entered. Entering may raise `CannotServe`."""

    name: str
    served: Callable[[], AbstractContextManager[Fresh]]


def end_orderly() -> None:
    """When this process is told to end, let it stop the servers that it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def abilities(url: str) -> Ability:
    """What the store says of itself. Nothing is connected for it."""
    return open_store(url, clock=SystemClock()).abilities


@contextmanager
def memory() -> Iterator[Fresh]:
    @contextmanager
    def fresh() -> Iterator[str]:
        yield "memory://"

    yield fresh


@contextmanager
def sqlite() -> Iterator[Fresh]:
    @contextmanager
    def fresh() -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder:
            yield f"sqlite:///{folder}/benchmark.db"

    yield fresh


@contextmanager
def mongo() -> Iterator[Fresh]:
    """A replica set of one node, started for this (or the one of `HOLDFAST_TEST_MONGODB_URL`); a database for each."""
    try:
        # In the tests, which lie beside the benchmarks and are neither installed nor checked for their types.
        mongod: Any = importlib.import_module("tests.support.mongod")
        given: str | None = mongod.given_url()
        if given is None and not Path(mongod.binary()).exists():
            raise CannotServe(f"no mongod: {mongod.binary()} does not exist")
    except (ImportError, RuntimeError) as error:
        raise CannotServe(f"no mongod, or no driver for it: {error}") from error
    if given is not None:
        yield lambda: mongod.fresh_database(given)
        return
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder:
        server = mongod.Mongod(Path(folder) / "rs", replica_set="rs0")
        try:
            server.start()
            server.initiate()
            yield lambda: mongod.fresh_database(server.url())
        finally:
            server.stop()


TARGETS = {
    target.name: target for target in [Target("memory", memory), Target("sqlite", sqlite), Target("mongo", mongo)]
}
