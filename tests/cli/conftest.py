"""A folder with a shop in it, and two ways to give commands there: in this process, and in processes of their own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.cli import main

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
PATIENCE_SECONDS = 15.0


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


def eventually(holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until it holds, or fail."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from outside, and neither modules nor log handlers left behind."""
    for variable in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(variable)
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
def holdfast(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Give a command in this process."""

    def command(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Answer(int(ended.value.code or 0), said.out, said.err)

    return command


def hear_interrupts() -> None:
    """A background job inherits that interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Process:
    """`holdfast …` as a process of its own; what it writes is gathered as it comes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in ((self.out, self._process.stdout), (self.err, self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def says(self, text: str) -> None:
        """Wait until it has said so, on either stream."""
        eventually(lambda: any(text in line for line in self.out + self.err), f"{text!r} in {self.out} {self.err}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ends(self) -> Answer:
        code = self._process.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        return Answer(code, "".join(self.out), "".join(self.err))

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.ends()


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
