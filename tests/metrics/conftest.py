"""A real runner with metrics, and scrapes of it."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cli.processes import Process, eventually
from tests.metrics.promql import Scrape, scraped
from tests.support.patience import patient

from holdfast import App

TOKEN = "a-token-for-the-scrapes"
SHOP = """
import threading
from holdfast import App, context

app = App("sqlite:///shop.db")

@app.task(name="add", retries=1)
def add(a, b=0):
    if a < 0 and context().attempt == 1:
        raise ValueError("once")
    return a + b

@app.task(name="boom")
def boom():
    raise ValueError("no")

@app.task(name="hang")
def hang():
    if context().attempt == 1:
        threading.Event().wait()
"""
FAST = {  # services take turns every 1.2 s
    "ATOMIC_SERVICE_INTERVAL_MINUTES": "0.02",
    "ATOMIC_SERVICE_SPREAD_MARGIN_MINUTES": "0.0005",
    "ATOMIC_SERVICE_CHECK_INTERVAL_MINUTES": "0.0005",
}


class RunnerProcess(NamedTuple):
    """``holdfast run`` with metrics, and an app on its store that submits to it."""

    process: Process
    app: App
    address: str

    def asked(self, path: str, token: str | None = TOKEN, method: str = "GET") -> tuple[int, str]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.address}{path}", headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=patient(20)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def scrape(self) -> Scrape:
        status, text = self.asked("/metrics")
        assert status == 200, text
        return scraped(text, time.monotonic())


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerProcess]:
    for variable in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    given = {"METRICS": "true", "METRICS_TOKEN": TOKEN, "RUNNER_HTTP": "127.0.0.1:0"}
    for name, value in (FAST | given).items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    process = Process(tmp_path, "run", "shop:app", "--workers", "2", "--queues", "default")
    try:
        address = re.findall(r"(http://[^ ]+)/health", process.says("/health"))[0]
        with App(f"sqlite:///{tmp_path / 'shop.db'}", metrics=False) as app:
            for name, retries in (("add", 1), ("boom", 0), ("hang", 0)):
                app.task(name=name, retries=retries)(_never)
            eventually(lambda: app.runners(), "the runner has joined")
            yield RunnerProcess(process, app, address)
        process.signal(signal.SIGINT)
        process.ends()
    finally:
        process.end()


def _never(*args: object, **options: object) -> None:
    """Run nowhere: the runner has the code."""
