from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.streams import studio
from tests.support.mongod import fresh_database

from holdfast import App


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of its own, of each kind."""
    if request.param == "mongodb":
        yield str(request.getfixturevalue("mongo_url"))
    elif request.param == "standalone":
        with fresh_database(request.getfixturevalue("standalone")) as url:
            yield url
    else:
        yield "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    """An app with the tasks of the studio."""
    with App(url, name="studio", poll_interval_seconds=0.1, workflow_linger_seconds=0.2) as app:
        studio.declare(app)
        yield app


class Processes:
    """Runners, and other programs, in processes of their own on one store."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._started: list[subprocess.Popen[bytes]] = []

    def log(self, process: subprocess.Popen[bytes]) -> Path:
        return self._folder / f"process{self._started.index(process)}.log"

    def start(self, *command: str, **more: str) -> subprocess.Popen[bytes]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        log = self._folder / f"process{len(self._started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=plain | {"HOLDFAST_URL": self._url} | more,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def runner(self, **more: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "holdfast", "run", "tests.streams.studio:app", "--workers", "0", **more)

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def processes(url: str, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(url, tmp_path)
    yield processes
    processes.end()
