"""A runner in a process of its own, and the handle by which a measurement leads it.

They talk by lines: ``start`` → ``ready``, ``cpu`` → the CPU seconds used so far. The worker ends when its input does,
so it cannot outlive the process that started it, however that one ends.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks import workload

ROOT = Path(__file__).resolve().parent.parent
_ANSWER_SECONDS = 30.0


class Worker:
    """A worker process. It has opened its store when this is made, and runs nothing before `start`."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", url]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def loaded(self) -> None:
        """Wait until it could begin at once: imports and the opening of the store are not what is measured."""
        self._answer()

    def start(self) -> None:
        """Let it begin, without waiting for it."""
        self._say("start")

    def ready(self) -> None:
        self._answer()

    def cpu_seconds(self) -> float:
        self._say("cpu")
        return float(self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_ANSWER_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)
        answer = self._process.stdout.readline() if heard else ""
        if not answer:
            what = "ended" if heard else f"did not answer within {_ANSWER_SECONDS:g} s"
            raise RuntimeError(f"the worker process {self._process.pid} {what}; its errors are above")
        return answer.strip()


def main(url: str) -> None:
    with workload.make(url).app as app:
        app.runners()  # opens the store
        print("loaded", flush=True)
        runner = app.runner(concurrency=workload.PLACES)
        for line in sys.stdin:
            match line.strip():
                case "start":
                    runner.start()
                    print("ready", flush=True)
                case "cpu":
                    print(time.process_time(), flush=True)
        runner.stop()


if __name__ == "__main__":
    main(sys.argv[1])
