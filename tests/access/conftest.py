"""Apps on each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import App


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url, name="shop") as app:
        yield app
