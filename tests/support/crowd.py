"""Processes that do the same at the same moment. One program loads the code, then forks: each would take a second."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.support.patience import patient

from holdfast.clock import SystemClock
from holdfast.store import open_store

Work = Callable[[str, int, Callable[[], object]], Any]
"""What each does: with the URL of a store and its own number. It calls the third argument when it is ready, and goes on
when all are.
"""


def together(work: Work, url: str, count: int = 8) -> list[Any]:
    """Run a function of a module in so many processes. Return what each has returned, as JSON has it."""
    command = [sys.executable, "-m", "tests.support.crowd", work.__module__, work.__name__, url, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == count, done.stderr
    return answers


def main(module: str, name: str, url: str, given: str) -> None:
    work: Work = getattr(importlib.import_module(module), name)
    open_store(url, clock=SystemClock())  # loads its driver, and does nothing else
    count, context = int(given), multiprocessing.get_context("fork")
    ready, answers = context.Barrier(count), context.Queue()

    def one(number: int) -> None:
        answers.put(json.dumps(work(url, number, lambda: ready.wait(60))))

    processes = [context.Process(target=one, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for _ in processes:
        print(answers.get(timeout=patient(100)))
    for process in processes:
        process.join(60)
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main(*sys.argv[1:])
