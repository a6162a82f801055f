"""Apps on each kind of store, and files of counters of earlier times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stats.files import Files

from holdfast import App


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url, name="shop", poll_interval_seconds=0.1) as app:
        yield app


@pytest.fixture
def files(app: App) -> Files:
    return Files(app)


def hours_ago(now: float, hours: float) -> float:
    return math.floor((now - hours * 3600) / 3600) * 3600.0
