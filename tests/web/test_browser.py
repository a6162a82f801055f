"""The example in a real browser: words appear, and neither a crash of the runner nor one of the server loses any."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support import chromium
from tests.support.patience import patient
from tests.web import shop

ROOT = Path(__file__).parent.parent.parent
ANSWER = "You asked 'why?' and here is a long answer that comes word by word so that one can watch it grow."
WORDS = ANSWER.split()
Start = Callable[..., subprocess.Popen[bytes]]
eventually = partial(shop.eventually, seconds=60)  # four processes and a browser, beside other tests


@pytest.fixture
def port() -> int:
    """A port that is free now, so that a server can come back to it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    """Start a program of the example."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "HOLDFAST_URL": f"sqlite:///{tmp_path}/chat.db",
        "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": "0.02",
        "HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.2",
        "PAUSE_SECONDS": "0.1",
        "PORT": f"{port}",
    }
    started: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path, env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(30)


def is_there(address: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        urllib.request.urlopen(address, timeout=patient(5)).close()
        return True
    return False


@pytest.mark.slow
def test_words_appear_and_survive_the_end_of_runner_and_server(start: Start, port: int) -> None:
    runner_command = ("holdfast", "run", "examples.chat:app", "--workers", "0", "--log-level", "error")
    address = f"http://127.0.0.1:{port}/"
    chromium.browser()
    server = start("examples.chat")
    eventually(lambda: is_there(address))
    runner = start(*runner_command)
    with chromium.page(ignored=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY")) as page:
        page.goto(address)
        page.fill("[name=question]", "why?")
        page.click("button")
        shown = page.locator("#answer")
        seen = eventually(lambda: len(words := shown.inner_text().split()) >= 3 and words)
        assert seen == WORDS[: len(seen)]
        runner.send_signal(signal.SIGKILL)
        runner.wait(30)
        before = page.url
        runner = start(*runner_command)
        eventually(lambda: page.locator("#state").inner_text() in ("once more", "done"))
        eventually(lambda: len(shown.inner_text().split()) >= 3)
        server.send_signal(signal.SIGKILL)
        server.wait(30)
        start("examples.chat")
        eventually(lambda: page.locator("#state").inner_text() == "done")
        assert shown.inner_text().split() == WORDS  # each once, in order
        assert page.url == before
        page.reload()
        eventually(lambda: page.locator("#state").inner_text() == "done")
        assert shown.inner_text().split() == WORDS
