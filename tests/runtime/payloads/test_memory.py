"""How much memory one large value takes, in a submitter and in a runner that are processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SECONDS = 300.0
MOST_IN_SUBMITTER, MOST_IN_RUNNER = 2.5, 4.0
PROGRAM = str(Path(__file__).with_name("weigh.py"))

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to tell the peak of memory"),
]


class Taken(NamedTuple):
    """Times the size of the value, at most, above what was there before."""

    submitter: float
    runner: float


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says at its end."""
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found


def weighed(url: str, kind: str, size: int) -> Taken:
    with program("runner", url) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == "ready\n"
        with program("submitter", url, kind, str(size)) as submitter:
            submitted = told(submitter)
        return Taken(submitted["above"] / size, told(runner)["above"] / size)


@pytest.mark.slow
def test_a_value_of_40_megabytes(url: str) -> None:
    taken = weighed(url, "bytes", 40_000_000)
    assert taken.submitter <= MOST_IN_SUBMITTER, taken
    assert taken.runner <= MOST_IN_RUNNER, taken
    # Its argument and its result are two values, so less would mean that nothing was measured.
    assert min(taken) > 1.9


@pytest.mark.torture
def test_a_text_of_40_megabytes(tmp_path: Path) -> None:
    """It is encoded before it is stored, and decoded afterwards: for a moment there is one more of it on each side."""
    taken = weighed(f"sqlite:///{tmp_path}/store.db", "text", 40_000_000)
    assert taken.submitter <= MOST_IN_SUBMITTER + 1, taken
    assert taken.runner <= MOST_IN_RUNNER, taken


@pytest.mark.torture
def test_a_value_of_200_megabytes(url: str) -> None:
    taken = weighed(url, "bytes", 200_000_000)
    assert taken.submitter <= MOST_IN_SUBMITTER, taken
    assert taken.runner <= MOST_IN_RUNNER, taken
    print(f"{url.partition(':')[0]}: {taken.submitter:.2f} times in the submitter, {taken.runner:.2f} in the runner")
