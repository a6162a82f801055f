"""For the tests of large values: a store of each kind, and how to break what lies in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.store.mongo.tools import database_of
from tests.support.mongod import fresh_database

MONGO = pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))


@pytest.fixture(scope="session")
def mongo_database(replica_set: str) -> Iterator[str]:
    """One for all: making the indexes takes a while. Each test is an app of its own, or empties it."""
    with fresh_database(replica_set) as url:
        yield url


@pytest.fixture
def mongo_url(mongo_database: str) -> str:
    """The URL of a database without documents."""
    with MongoClient[dict[str, Any]](mongo_database) as client:
        database = client[database_of(mongo_database)]
        for name in database.list_collection_names():
            if name != "holdfast_meta":
                database[name].delete_many({})
    return mongo_database


@pytest.fixture(params=["sqlite", MONGO])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The durable stores."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    found: str = request.getfixturevalue("mongo_url")
    return found
