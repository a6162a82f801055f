"""For the tests of the MongoDB store: a look at the database from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure
from tests.store.mongo.tools import database_of
from tests.support.mongod import fresh_database

Client = MongoClient[dict[str, Any]]


@pytest.fixture(scope="session")
def client(replica_set: str) -> Iterator[Client]:
    """An ordinary client of the replica set."""
    with MongoClient(replica_set, tz_aware=True) as client:
        yield client


@pytest.fixture(scope="module")
def module_url(replica_set: str) -> Iterator[str]:
    with fresh_database(replica_set) as url:
        yield url


@pytest.fixture
def mongo_url(module_url: str, client: Client) -> str:
    """The URL of a database without documents. The tests of a module share it: making the indexes takes a while."""
    database = client[database_of(module_url)]
    for name in database.list_collection_names():
        if name != "holdfast_meta":
            database[name].delete_many({})
    return module_url


@pytest.fixture
def new_url(replica_set: str) -> Iterator[str]:
    """The URL of a database that does not exist yet."""
    with fresh_database(replica_set) as url:
        yield url


@pytest.fixture
def raw(client: Client, mongo_url: str) -> Database[dict[str, Any]]:
    """The test's database behind the store's back."""
    return client[database_of(mongo_url)]


@pytest.fixture
def alone_url(standalone: str) -> Iterator[str]:
    """The URL of a new database on the standalone."""
    with fresh_database(standalone) as url:
        yield url


@pytest.fixture
def failpoints(client: Client) -> None:
    """Skip where the server was not started for tests."""
    try:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
    except OperationFailure:
        pytest.skip("this server has no fail points (enableTestCommands)")


@pytest.fixture
def hasty_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the driver looks for the server twice a second; here more often.

    Needs ``serverMonitoringMode=poll`` in the URL.
    """
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.02)
