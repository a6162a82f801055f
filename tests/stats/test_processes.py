"""Counters of real processes: stopped, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App

pytestmark = pytest.mark.faults
Start = Callable[[], subprocess.Popen[bytes]]
SHOP = """
import os
from holdfast import App
app = App(os.environ["SHOP_URL"], name="shop")

@app.task(name="shop:add")
def add(a):
    return a
"""


@pytest.fixture(params=["sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    mongo = request.param == "mongodb"
    return str(request.getfixturevalue("mongo_url")) if mongo else f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "shop.py").write_text(SHOP)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        command = [sys.executable, "-m", "holdfast", "run", "shop:app", "--workers", "2"]
        with (tmp_path / f"{len(started)}.log").open("wb") as log:
            environment = plain | {"SHOP_URL": url}
            started.append(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_stop_loses_nothing_and_a_kill_the_last_seconds(
    url: str, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    with App(url, name="shop") as app:

        @app.task(name="shop:add")
        def add(a: int) -> int:
            return a

        def end(number: int) -> None:
            for call in add.map(range(number)):
                call.result(patient(60))

        def ended() -> int:
            return app.stats().total.succeeded

        first = start()
        end(300)
        eventually(lambda: ended() == 300, lambda: f"workers store what they count: {ended()}")
        end(50)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        second = start()
        end(40)
        second.send_signal(signal.SIGTERM)
        assert second.wait(patient(60)) == 0
        assert 340 <= ended() <= 390
        assert len(app.stats().deploys) == 1
