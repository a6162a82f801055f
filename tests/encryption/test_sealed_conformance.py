"""A store whose values are encrypted keeps every promise of a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.support.mongod import fresh_database

from holdfast.codec.sealing import CipherKeys
from holdfast.store import open_store as open_by_url
from holdfast.store.sealed import sealed_store
from holdfast.testing.conformance import StoreConformance
from holdfast.testing.samples import OpenStore

RING = CipherKeys([("k2", b"2" * 32), ("k1", b"1" * 32)])


@pytest.fixture(scope="module")
def shared_url(replica_set: str) -> Iterator[str]:
    """Make one database for all tests: the indexes take a while, and a server with 400 of them ends."""
    with fresh_database(replica_set) as url:
        yield url


class TestSealedMemory(StoreConformance):
    @pytest.fixture
    def store_url(self) -> str:
        return "memory://"

    @pytest.fixture
    def open_store(self, store_url: str) -> OpenStore:
        return lambda clock, observe: sealed_store(open_by_url(store_url, clock=clock, observe=observe), RING)

    # A payload that was opened says so, and is not equal to what was put.
    test_a_payload_comes_back_as_it_was_put = None
    test_payloads_outlive_the_process_and_are_seen_by_others = None


class TestSealedSqlite(TestSealedMemory):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.faults  # it takes most of a minute
@pytest.mark.xdist_group("stores")
class TestSealedMongo(TestSealedMemory):
    @pytest.fixture
    def store_url(self, shared_url: str) -> str:
        with MongoClient[dict[str, Any]](shared_url) as client:
            database = client.get_default_database()
            for name in database.list_collection_names():
                if name != "holdfast_meta":
                    database[name].delete_many({})
        return shared_url
