from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.patience import eventually, patient
from tests.workflows.fleet import Fleet
from tests.workflows.shop import Shop, open_shop


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with open_shop(tmp_path) as shop:
        yield shop


@pytest.fixture(params=["sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        return str(request.getfixturevalue("mongo_url"))
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def fleet(url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Runner processes on a store: see `tests.workflows.yard`."""
    fleet = Fleet(tmp_path, url)
    yield fleet
    fleet.end()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until something holds."""

    def wait(holds: Callable[[], object]) -> None:
        eventually(holds, seconds=patient(20))

    return wait
