"""SQLite and memory agree on everything that Hypothesis thinks of."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from holdfast.clock import Clock
from holdfast.store.contract import Store, ignore
from holdfast.store.memory.store import MemoryStore
from holdfast.store.mongo import schema
from holdfast.store.mongo.store import MongoOptions, MongoStore
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.stateful import oracle_test

_folders: list[tempfile.TemporaryDirectory[str]] = []


def _open_sqlite(clock: Clock) -> Store:
    _folders.append(tempfile.TemporaryDirectory(prefix="hf"))
    path = Path(_folders[-1].name, "store.db")
    return SqliteStore(path, clock=clock, observe=ignore, synchronous="normal", busy_timeout_seconds=5.0)


@pytest.fixture(autouse=True)
def _folders_are_removed() -> Iterator[None]:
    yield
    while _folders:
        _folders.pop().cleanup()


@pytest.mark.slow
class TestSqliteAgreesWithMemory(oracle_test(_open_sqlite)):  # type: ignore[misc]
    settings = settings(stateful_step_count=30)


class TestMemoryAgreesWithItself(oracle_test(MemoryStore)):  # type: ignore[misc]
    """Nothing may depend on chance or on the host, or the comparison would mean nothing."""

    settings = settings(stateful_step_count=20, max_examples=20)


_replica_set: list[str] = []


class EmptiedMongo(MongoStore):
    """One database for all examples, emptied for each: making indexes anew would take most of the time."""

    async def open(self) -> None:
        await super().open()
        for name in schema.COLLECTIONS:
            if name != schema.META:
                await self._collection(name).delete_many({})


def _open_mongo(clock: Clock) -> Store:
    return EmptiedMongo(
        _replica_set[0],
        MongoOptions(use_change_streams=False),
        clock=clock,
        rng=random.Random(1),
        observe=ignore,
    )


@pytest.fixture
def _one_database(mongo_url: str) -> Iterator[None]:
    _replica_set.append(mongo_url)
    yield
    _replica_set.clear()


@pytest.mark.slow
@pytest.mark.xdist_group("stores")
@pytest.mark.usefixtures("_one_database")
class TestMongoAgreesWithMemory(oracle_test(_open_mongo)):  # type: ignore[misc]
    settings = settings(stateful_step_count=25, max_examples=15)
