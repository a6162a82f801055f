"""The example of the guide, as its reader meets it: one order, one approval, its words, its end, and Python beside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests.support.mongod import free_port
from tests.support.patience import patient

from holdfast import App

T = TypeVar("T")


def run_example(folder: Path, holdfast: Path, environment: Mapping[str, str]) -> None:
    """Follow one order with the oldest spec version, and one with our own. Raises AssertionError for a surprise."""
    for spec_version in ("2", "5"):
        run_order(folder, holdfast, {**environment, "WORKFLOW_SPEC_VERSION": spec_version})


def run_order(folder: Path, holdfast: Path, environment: Mapping[str, str]) -> None:
    """Start the application on a new SQLite store, with a runner beside it, and follow one order."""
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/orders.db"
        store = {**environment, "HOLDFAST_URL": url, "HOLDFAST_APP": "shop:app"}
        node = {"WORKFLOW_HOLDFAST_COMMAND": str(holdfast), "WORKFLOW_TARGET_WORLD": "@holdfast/workflow-world"}
        with (
            runner(folder, holdfast, store),
            application(folder, {**store, **node, "PORT": str(free_port())}) as address,
        ):
            follow_an_order(address)
            follow_python(url)


@contextlib.contextmanager
def runner(folder: Path, holdfast: Path, environment: Mapping[str, str]) -> Iterator[None]:
    with subprocess.Popen([holdfast, "run", "--log-level", "warning"], cwd=folder, env=environment) as process:
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(timeout=patient(60)) == 0


@contextlib.contextmanager
def application(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run the application, and return its address. It has to end by SIGTERM, with its server."""
    with subprocess.Popen(["node", "server.mjs"], cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("listening on "), line
        try:
            yield line.removeprefix("listening on ").strip()
        finally:
            process.terminate()
            assert process.wait(timeout=patient(60)) == 0


def follow_an_order(address: str) -> None:
    run = str(asked(f"{address}/orders", {"id": "a1", "cents": 500})["runId"])
    with urllib.request.urlopen(f"{address}/runs/{run}/words", timeout=patient(60)) as words:
        assert words.readline() == b"charged: receipt-a1-500\n"
        approved = eventually(lambda: asked(f"{address}/orders/a1/approve", {"by": "Mei"}))
        assert approved["runId"] == run
        assert words.readline() == b"approved by Mei\n"
    ended = eventually(lambda: state if (state := asked(f"{address}/runs/{run}"))["status"] == "completed" else None)
    assert ended["result"] == {"receipt": "receipt-a1-500", "by": "Mei"}, ended


def follow_python(url: str) -> None:
    """Wait for the task that a step has submitted, and for the one that follows the end of the workflow."""
    with App(url) as app:
        for task, result in (("shop:pack", "a1 is packed"), ("shop:report", "an order went through")):
            (call,) = eventually(lambda task=task: app.invocations(task=task) or None)  # type: ignore[misc]
            assert app.invocation(call.id).result(timeout=patient(30)) == result


def asked(url: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    body = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=patient(60)) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def eventually(attempt: Callable[[], T | None]) -> T:
    """Return the first answer. An approval fails until the order has created its hook."""
    deadline = time.monotonic() + patient(30)
    while True:
        with contextlib.suppress(OSError):
            if (answer := attempt()) is not None:
                return answer
        assert time.monotonic() < deadline, "nothing came within 30 s"
        time.sleep(0.05)
