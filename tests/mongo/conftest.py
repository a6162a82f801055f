"""For the tests of the MongoDB store: a look at the database from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure
from tests.mongo.tools import database_of
from tests.mongod import fresh_database


@pytest.fixture(scope="session")
def client(replica_set: str) -> Iterator[MongoClient[dict[str, Any]]]:
    """An ordinary client of the replica set."""
    with MongoClient(replica_set, tz_aware=True) as client:
        yield client


@pytest.fixture
def raw(client: MongoClient[dict[str, Any]], mongo_url: str) -> Database[dict[str, Any]]:
    """The test's database behind the store's back."""
    return client[database_of(mongo_url)]


@pytest.fixture
def alone_url(standalone: str) -> Iterator[str]:
    """The URL of a new database on the standalone."""
    with fresh_database(standalone) as url:
        yield url


@pytest.fixture
def failpoints(client: MongoClient[dict[str, Any]]) -> None:
    """Skip where the server was not started for tests."""
    try:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
    except OperationFailure:
        pytest.skip("this server has no fail points (enableTestCommands)")
