"""Apps that encrypt, on each kind of store, and what lies in those stores."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pymongo import MongoClient

from holdfast import App


def key(id: str) -> str:
    return f"{id}:{base64.b64encode(id.encode().ljust(32, b'.')).decode()}"


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"


Dump = Callable[[App], bytes]


@pytest.fixture
def dump(url: str) -> Dump:
    """Return everything that lies in a store, as the store has it."""

    def read(app: App) -> bytes:
        if url.startswith("sqlite"):
            return _sqlite(url.removeprefix("sqlite:///"))
        if url.startswith("mongodb"):
            return _mongo(url)
        store: Any = app.runtime.ready().store
        below = getattr(store, "below", store)
        return repr(list(vars(below).values())).encode()

    return read


def _sqlite(path: str) -> bytes:
    connection = sqlite3.connect(path)
    try:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return repr({table: connection.execute(f'SELECT * FROM "{table}"').fetchall() for table in tables}).encode()
    finally:
        connection.close()


def _mongo(url: str) -> bytes:
    with MongoClient[dict[str, Any]](url) as client:
        database = client[urlsplit(url).path[1:]]
        return repr({name: list(database[name].find()) for name in database.list_collection_names()}).encode()
