"""Hints between real processes: with fallback looks switched off, they are all there is."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast.runtime import hints as fallback

if TYPE_CHECKING:
    from conftest import Process

PROMPT_SECONDS = patient(10.0)  # a hint takes milliseconds; without it, nothing happens for days


@pytest.fixture(params=["sqlite", pytest.param("mongodb", marks=pytest.mark.xdist_group("mongo"))])
def module(request: pytest.FixtureRequest, shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "mongodb":
        url = request.getfixturevalue("mongo_url")
        text = (shop / "shop.py").read_text()
        (shop / "shop.py").write_text(text.replace("sqlite:///shop.db", url))
    monkeypatch.setenv(fallback.VARIABLE, "off")
    monkeypatch.syspath_prepend(str(shop))
    found = importlib.import_module("shop")
    yield found
    found.app.close()
    del sys.modules["shop"]
    fallback.switch(None)


def promptly(holds: Callable[[], object], what: str) -> None:
    eventually(holds, what, seconds=PROMPT_SECONDS)


def test_hints_alone_are_enough(module: Any, start: Callable[..., Process]) -> None:
    runner = start("run", "--workers", "1", "--concurrency", "4")
    runner.says("started worker")
    app, add, linger = module.app, module.add, module.linger
    app.invocations()  # to open the store takes as long as it takes

    began = time.monotonic()
    assert add.submit(1, 2).result(timeout=3 * PROMPT_SECONDS) == 3
    assert time.monotonic() - began < PROMPT_SECONDS

    running = linger.submit(600)
    promptly(lambda: running.status == "running", "it runs")
    running.cancel()
    promptly(lambda: running.status == "cancelled", "the worker is told that it is to end")

    app.queues.pause("default")
    waiting = add.submit(2, 3)
    eventually(lambda: runner.said("paused queue"), "the runner hears of the pause", seconds=PROMPT_SECONDS)
    resumed = time.time()
    app.queues.resume("default")
    promptly(lambda: waiting.status == "success", "the runner hears that the queue is resumed")
    assert all(line.at >= resumed - 1.0 for line in waiting.history() if line.status == "running")

    app.schedules.create("soon", add, [3, 4], every="1s")
    promptly(lambda: app.schedules.get("soon").progress.fired, "a new schedule fires")
