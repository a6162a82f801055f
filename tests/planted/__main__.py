"""Plant each bug of `tests.planted.bugs` in a copy of the source, and see whether its tests catch it.

``python -m tests.planted [--jobs N] [WORD …]``: only bugs whose name, kind or file has one of these words. The tests of
each bug are run once without it, which says that they pass and how long they take. A run with the bug that takes longer
than 120 s counts as caught, by a hang, if the clean one took less than 30 s.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS, FAR_QUICKER_SECONDS = 120.0, 30.0
ENOUGH = 0.9
CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"


class Verdict(NamedTuple):
    """What came of one bug. `by` is the first test that failed, or what is wrong with the bug itself."""

    bug: Bug
    status: str
    seconds: float
    by: str


class Copy:
    """A copy of src and tests, in which one bug at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        skipped = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def run(self, tests: Sequence[str]) -> tuple[int | None, float, str]:
        """Run tests; return the exit code (None: it took too long), the seconds, and the first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
        command += ["-m", "not torture and not faults", "-k", "not mongo", *[f"tests/{test}" for test in tests]]
        environment = os.environ | {"PYTHONPATH": str(self._folder / "src"), "HYPOTHESIS_PROFILE": "ci"}
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None, time.monotonic() - began, "a hang"
        lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        first = lines[0].partition(" ")[2].partition(" - ")[0].removeprefix("tests/") if lines else said[-300:].strip()
        return process.returncode, time.monotonic() - began, first

    def plant(self, bug: Bug) -> str:
        """Put a bug into the copy. Return the text that was there before."""
        path = self._folder / "src" / "holdfast" / bug.file
        text = path.read_text()
        assert text.count(bug.old) == 1, f"{bug.name}: its text occurs {text.count(bug.old)} times in {bug.file}"
        self.write(bug, text.replace(bug.old, bug.new))
        return text

    def write(self, bug: Bug, text: str) -> None:
        path = self._folder / "src" / "holdfast" / bug.file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # it may be of the same second and size
            compiled.unlink()


def judged(copy: Copy, bug: Bug, clean: tuple[int | None, float, str]) -> Verdict:
    """Plant a bug and run its tests; `clean` is what they said without it."""
    code, took, first = clean
    if code != 0:
        return Verdict(bug, BROKEN, took, f"its tests fail without it: {first}")
    before = copy.plant(bug)
    try:
        code, seconds, first = copy.run(bug.tests)
    finally:
        copy.write(bug, before)
    if code is None:
        return Verdict(bug, CAUGHT if took < FAR_QUICKER_SECONDS else SURVIVED, seconds, first)
    if code == 0:
        return Verdict(bug, SURVIVED, seconds, bug.breaks)
    return Verdict(bug, CAUGHT if code == 1 else BROKEN, seconds, first)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="copies that are worked on at once")
    parser.add_argument("words", nargs="*", help="only bugs whose name, kind or file has one of these")
    given = parser.parse_args()
    bugs = [bug for bug in BUGS if not given.words or any(word in f"{bug[:3]}" for word in given.words)]
    with tempfile.TemporaryDirectory(prefix="holdfast-planted-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(given.jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def clean(tests: tuple[str, ...]) -> tuple[int | None, float, str]:
            copy = copies.get()
            try:
                return copy.run(tests)
            finally:
                copies.put(copy)

        def plant(bug: Bug) -> Verdict:
            copy = copies.get()
            try:
                verdict = judged(copy, bug, clean_runs[bug.tests])
            finally:
                copies.put(copy)
            print(f"{verdict.status:<9}{verdict.seconds:5.1f} s  {bug.kind:<23} {bug.name}: {verdict.by}", flush=True)
            return verdict

        with ThreadPoolExecutor(given.jobs) as pool:
            sets = sorted({bug.tests for bug in bugs})
            clean_runs = dict(zip(sets, pool.map(clean, sets), strict=True))
            verdicts = list(pool.map(plant, bugs))
    caught = sum(verdict.status == CAUGHT for verdict in verdicts)
    for verdict in verdicts:
        if verdict.status != CAUGHT:
            print(f"{verdict.status}: {verdict.bug.name} ({verdict.bug.file}): {verdict.by}")
    print(f"{caught} of {len(verdicts)} caught")
    return 0 if caught >= ENOUGH * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
