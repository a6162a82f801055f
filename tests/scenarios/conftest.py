"""What several scenarios share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.scenarios import workshop
from tests.support.patience import eventually, patient

from holdfast import App


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that need a MongoDB share one, and are a group of their own beside the tests of the store itself, so that
    two processes can share the work; the others go to whoever has time. Process tasks on MongoDB meet no joint that
    threads on MongoDB and processes on SQLite do not meet: `make faults` runs them.
    """
    for item in items:
        if _HERE not in item.path.parents or item.get_closest_marker("xdist_group"):
            continue
        params = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if {"mongodb", "process"} <= {each for each in params if isinstance(each, str)}:
            item.add_marker(pytest.mark.faults)
        if "mongodb" in params or "mongo_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("scenarios"))


_HERE = Path(__file__).parent


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def workshop_app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    """An app on each store, for the tasks of the workshop."""
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    where = url or request.getfixturevalue("mongo_url")
    with App(where, name=workshop.NAME, poll_interval_seconds=0.2, runner_heartbeat_seconds=0.5) as app:
        yield app


@pytest.fixture
def there(tmp_path: Path) -> Callable[..., Path]:
    """Wait until a task has left this file behind."""

    def wait(name: str, seconds: float = patient(30.0)) -> Path:
        eventually((tmp_path / name).exists, name, seconds)
        return tmp_path / name

    return wait


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until something is so."""

    def wait(is_so: Callable[[], object], seconds: float = patient(30.0)) -> None:
        eventually(is_so, seconds=seconds)

    return wait
