"""A look at the payloads of a store from outside, and a hand in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from tests.store.mongo.tools import database_of


@contextmanager
def raw_sqlite(url: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
        yield connection


@contextmanager
def raw_mongo(url: str) -> Iterator[Database[dict[str, Any]]]:
    with MongoClient[dict[str, Any]](url) as client:
        yield client[database_of(url)]


def payload_sizes(url: str) -> list[int]:
    """Of all payloads in the store."""
    if url.startswith("sqlite"):
        with raw_sqlite(url) as connection:
            return sorted(size for (size,) in connection.execute("SELECT size FROM holdfast_payloads"))
    with raw_mongo(url) as database:
        return sorted(found["size"] for found in database.holdfast_payloads.find({}, {"size": True}))


def lose_payloads(url: str) -> None:
    """Somebody deletes them all."""
    if url.startswith("sqlite"):
        with raw_sqlite(url) as connection:
            connection.execute("DELETE FROM holdfast_payloads")
            connection.execute("DELETE FROM holdfast_payload_pieces")
    else:
        with raw_mongo(url) as database:
            database.holdfast_payloads.delete_many({})
            database.holdfast_payload_pieces.delete_many({})
