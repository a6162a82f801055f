from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.world.worlds import World


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def world(url: str) -> Iterator[World]:
    """A World on each kind of store."""
    world = World(url)
    yield world
    world.close()


@pytest.fixture
def quick() -> Iterator[World]:
    """A World in memory, whose time the test moves."""
    world = World("memory://")
    yield world
    world.close()
