"""``make bench-against COMMIT=…``: this tree and an earlier commit, measured in turns in one run, as ratios.

Other work on the machine hits both alike, so a ratio says more than two figures of two days. Each round measures one
tree and then the other, in processes of their own; the table has the median of each and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import table

HERE = Path(__file__).parent.parent
MEASURED = ("submit_one_by_one", "submit_by_map", "drain_functions", "drain_two_processes")
_PROGRAM = """
import json, sys
from benchmarks import measure
from benchmarks.targets import TARGETS
figures = {}
with TARGETS[sys.argv[1]].served() as fresh:
    for name in sys.argv[2].split(","):
        with fresh() as url:
            figures.update(getattr(measure, name)(url, measure.FULL))
print(json.dumps(figures))
"""


def main() -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=about)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--stores", default="sqlite,mongo", help="separated by commas (sqlite,mongo)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args()
    with exported(options.commit) as before:
        found = {store: compared(before, store, options.rounds) for store in options.stores.split(",")}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for store, rounds in found.items():
        rows = [[name, *summary(rounds, name)] for name in rounds[0][0]]
        print(f"\n{table([store, options.commit[:12], 'now', 'ratio'], rows)}")
    print(f"\nmedians of {options.rounds} rounds")


@contextlib.contextmanager
def exported(commit: str) -> Iterator[Path]:
    """The tree of a commit, in a folder of its own."""
    packed = subprocess.run(["git", "archive", commit], cwd=HERE, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="hf-before-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def compared(before: Path, store: str, rounds: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Each round: the figures of the earlier tree, and of this one. Which goes first alternates."""
    found = []
    for number in range(rounds):
        pair = [before, HERE][:: 1 if number % 2 == 0 else -1]
        figures = {tree: measured(tree, store) for tree in pair}
        found.append((figures[before], figures[HERE]))
    return found


def measured(tree: Path, store: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    command = [sys.executable, "-c", _PROGRAM, store, ",".join(MEASURED)]
    said = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(said.splitlines()[-1])
    return figures


def summary(rounds: list[tuple[dict[str, float], dict[str, float]]], name: str) -> list[str]:
    before, now = ([pair[which][name] for pair in rounds] for which in (0, 1))
    ratio = statistics.median(pair[1][name] / pair[0][name] for pair in rounds)
    return [f"{statistics.median(before):,.0f}", f"{statistics.median(now):,.0f}", f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
