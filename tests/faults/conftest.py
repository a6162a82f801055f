"""A store and a story on it for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.session import Session
from tests.support.mongod import fresh_database


@pytest.fixture(scope="session")
def faults_database(replica_set: str) -> Iterator[str]:
    """One database for all stories: each is an app of its own, and to make the indexes takes a while."""
    with fresh_database(replica_set) as url:
        yield url


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """See `tests.faults.stores.on`."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("faults_database"))
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def session(url: str, tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path / "story", url)
    yield session
    session.end()
