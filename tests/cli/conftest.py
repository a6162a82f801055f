"""A folder with a shop in it, and two ways to give commands there: in this process, and in processes of their own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Answer, Command, Process

from holdfast import App, all_of, on_event, on_status
from holdfast.cli import main
from holdfast.triggers import from_event

SHOP = """
import asyncio
from holdfast import App

app = App("sqlite:///shop.db")

@app.task
def add(a, b=0):
    return a + b

@app.task
def boom(text):
    raise ValueError(text)

@app.task
async def linger(seconds):
    print("lingering", flush=True)
    await asyncio.sleep(seconds)
    return "done"

if __name__ == "__main__":
    raise SystemExit("not as a program")
"""


@pytest.fixture(autouse=True)
def _tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from outside, and neither modules nor log handlers left behind."""
    for variable in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("COLUMNS", "1000")  # so that a row is a line; test_output.py is about narrow ones
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file rewritten within a second would be read from there
    modules, root = set(sys.modules), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with a pyproject.toml so that none further up is found."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shop(folder: Path) -> Path:
    """A folder with an app on SQLite."""
    (folder / "shop.py").write_text(SHOP)
    return folder


@pytest.fixture
def holdfast(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Give a command in this process. A runner would end it at once if a thread is left behind, by another test say."""
    monkeypatch.setattr("holdfast.cli.run._end_process", lambda: None)

    def command(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Answer(int(ended.value.code or 0), said.out, said.err)

    return command


@pytest.fixture
def start(shop: Path) -> Iterator[Callable[..., Process]]:
    """Start a command in a process of its own in the shop's folder."""
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(shop, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def is_large(payload: Any) -> bool:
    return bool(payload["total"] > 10)


@pytest.fixture
def triggered(shop: Path) -> Iterator[App]:
    """The shop's store, with tasks that are triggered. Their triggers are stored when a runner starts."""
    with App("sqlite:///shop.db", poll_interval_seconds=0.2) as app:

        @app.task(name="shop:reserve", triggers=[on_event("order.created", arguments={"order": from_event("id")})])
        def reserve(order: int) -> int:
            app.emit("reserved", {"order": order})
            return order

        @app.task(name="shop:inspect", triggers=[on_event("order.created", where=is_large)])
        def inspect() -> None: ...

        @app.task(
            name="shop:thank",
            triggers=[all_of(on_status(reserve), on_event("paid", where={"by": "card"}), within="2h", name="thanks")],
        )
        def thank() -> None: ...

        yield app
