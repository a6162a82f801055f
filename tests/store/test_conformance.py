"""Every store of ours passes the suite that it ships with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.mongod import fresh_database

from holdfast.testing.conformance import StoreConformance


class TestMemory(StoreConformance):
    @pytest.fixture
    def store_url(self) -> str:
        return "memory://"


class TestSqlite(StoreConformance):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.faults  # under a runner's role it is in every run
@pytest.mark.xdist_group("stores")
class TestMongo(StoreConformance):
    @pytest.fixture
    def store_url(self, mongo_url: str) -> str:
        return mongo_url


@pytest.mark.faults
@pytest.mark.xdist_group("stores")
class TestMongoStandalone(StoreConformance):
    @pytest.fixture
    def store_url(self, standalone: str) -> Iterator[str]:
        with fresh_database(standalone) as url:
            yield url
