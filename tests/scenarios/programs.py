"""Programs of their own that share a SQLite file, and execute what a test sends them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPL = """
import json, logging, os, shutil, sqlite3, sys, threading, time
from pathlib import Path
from holdfast import App

logging.basicConfig(level="WARNING", stream=sys.stderr)
def double(x): return 2 * x
def opened(path, **settings):
    app = App(f"sqlite:///{path}", name="shop", runner_heartbeat_seconds=0.1, **settings)
    return app, app.task(name="double")(double)
for line in sys.stdin:
    answer = None
    try:
        exec(json.loads(line), globals())
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
    else:
        print(json.dumps({"answer": answer}), flush=True)
"""

LOOK = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=10)
print(json.dumps(connection.execute("SELECT id, status FROM holdfast_invocations").fetchall()))
connection.close()  # the last one writes the log back and deletes it
"""


class Failed(Exception):
    """The program's code raised."""


class Program:
    """A program of its own that executes what it is sent."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", REPL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, code: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the program ended: {self.log.read_text()}"
        said = json.loads(line)
        if "error" in said:
            raise Failed(f"{said['error']}: {said['text']}")
        return said["answer"]

    def submit(self, count: int = 5, task: str = "task") -> list[str]:
        return list(self.do(f"answer = [{task}.submit(n).id for n in range({count})]"))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def a_program(folder: Path, name: str) -> Iterator[Program]:
    program = Program(folder / f"{name}.log")
    try:
        yield program
    finally:
        program.end()


def look(path: Path) -> dict[str, str]:
    """What a process of its own finds, which closes the file behind itself."""
    command = [sys.executable, "-c", LOOK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def assert_found(path: Path, ids: list[str]) -> None:
    found = look(path)
    missing = [id for id in ids if id not in found]
    assert not missing, f"{len(missing)} of {len(ids)} acknowledged ids are not in the store"
