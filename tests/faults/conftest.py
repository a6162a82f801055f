"""Stories of crashes are mostly waiting, so several are told at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.faults.cases import Case
from tests.faults.session import Session
from tests.mongod import fresh_database

AT_ONCE = 4


class Stories:
    """Plays the cases that were selected, a few at a time."""

    def __init__(self, items: list[pytest.Item], folder: Path, request: pytest.FixtureRequest) -> None:
        self._items = items
        self._folder = folder
        self._request = request
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._playing: dict[Case, Future[None]] = {}

    def begin(self, store: str) -> None:
        """Play those on that store, beside whatever else is tested."""
        for case in self._selected():
            if case.store == store and case not in self._playing:
                self._playing[case] = self._pool.submit(self._play, case, self._url(case))

    def outcome(self, case: Case) -> None:
        self.begin(case.store)
        self._playing[case].result()

    def _selected(self) -> list[Case]:
        parameters = [getattr(item, "callspec", None) for item in self._items]
        return [found.params["case"] for found in parameters if found and isinstance(found.params.get("case"), Case)]

    def _url(self, case: Case) -> str:
        if case.store == "mongodb":
            return str(self._request.getfixturevalue("faults_database"))
        return f"sqlite:///{self._folder / str(case) / 'store.db'}"

    def _play(self, case: Case, url: str) -> None:
        case.play(self._folder / str(case), url)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def faults_database(replica_set: str) -> Iterator[str]:
    """One database for all stories: each is an app of its own, and to make the indexes takes a while."""
    with fresh_database(replica_set) as url:
        yield url


@pytest.fixture(scope="session")
def stories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    stories = Stories(request.session.items, tmp_path_factory.mktemp("faults"), request)
    yield stories
    stories.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, stories: Stories, tmp_path: Path) -> str:
    """A store for one story; see `tests.faults.stores.on`."""
    stories.begin(request.param)
    if request.param == "mongodb":
        return str(request.getfixturevalue("faults_database"))
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def session(url: str, tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path / "story", url)
    yield session
    session.end()
