"""``make bench``: rates, latencies and the idle cost on this machine, for each store.

Every figure is the median of three runs, the best in parentheses, each on a fresh store that is removed afterwards.
MongoDB is a replica set of one node that the bench starts; without a mongod it is left out. A run waits for a moment
in which the machine does nothing else, though not for ever; differences of less than about 1.5 times are noise where
others use it too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import FULL, MEASUREMENTS, QUICK, UNITS, Sizes, better, percentile
from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe, Target, abilities, end_orderly

Values = dict[str, list[float]]  # by figure: one value per round
_SYNCS = 200
_PATIENCE_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    machine = describe_machine()
    say = _progress if sys.stderr.isatty() else _silence
    sizes, quiet = (QUICK, Quiet(0.0)) if options.quick else (FULL, Quiet(_PATIENCE_SECONDS))
    results: dict[str, Values] = {}
    skipped: dict[str, str] = {}
    for target in options.stores:
        try:
            results[target.name] = measure(target, sizes, quiet, say)
        except CannotServe as error:
            skipped[target.name] = str(error)
    say("")
    if quiet.foreign_cores:
        machine["foreign_cores"] = round(statistics.median(quiet.foreign_cores), 2)
    print(as_json(machine, results, skipped) if options.json else as_text(machine, results, skipped))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--stores", type=_targets, default=",".join(TARGETS), help="which ones, separated by commas (all)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it work at all?")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser.parse_args(arguments)


def _targets(names: str) -> list[Target]:
    unknown = set(names.split(",")) - set(TARGETS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no store '{min(unknown)}'; there are: {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names.split(",")]


def _silence(text: str) -> None:
    pass


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def measure(target: Target, sizes: Sizes, quiet: Quiet, say: Callable[[str], None] = _silence) -> Values:
    """Every figure of one store, as often as `sizes` says. What the store cannot do is left out."""
    values: Values = {}
    with target.served() as fresh:
        for measurement in MEASUREMENTS:
            for _ in range(sizes.rounds):
                with fresh() as url:
                    if measurement.needs not in abilities(url) or not url.startswith(measurement.only_for):
                        break
                    say(f"{target.name}: {', '.join(measurement.figures)}")
                    quiet.wait()
                    for name, value in measurement.run(url, sizes).items():
                        values.setdefault(name, []).append(value)
    return values


# --- what was found


def describe_machine() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder:
        fsync = percentile(fsync_seconds(Path(folder) / "probe"), 50)
    return {
        "cores": os.cpu_count(),
        "foreign_cores": None,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.machine()}",
        "fsync_p50_us": round(fsync * 1e6),
        "folder": tempfile.gettempdir(),
    }


def fsync_seconds(path: Path) -> list[float]:
    """How long this disk takes to keep 4 KiB more of a file, each time."""
    taken = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(b"\0" * 4096)
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return taken


def as_text(machine: dict[str, Any], results: dict[str, Values], skipped: Mapping[str, str]) -> str:
    foreign = machine["foreign_cores"]
    about = (
        f"{machine['cores']} cores{'' if foreign is None else f' ({foreign:g} used by others)'}, {machine['system']}, "
        f"Python {machine['python']}, SQLite {machine['sqlite']}, "
        f"fsync p50 {machine['fsync_p50_us']} µs in {machine['folder']}"
    )
    rows = [
        [name, unit, *(_cell(unit, values.get(name, [])) for values in results.values())]
        for name, unit in UNITS.items()
    ]
    rounds = max((len(each) for values in results.values() for each in values.values()), default=0)
    note = f"median of {rounds} (best)" if rounds > 1 else "one run each"
    missing = "".join(f"\n{store}: not measured: {why}" for store, why in skipped.items())
    return f"{about}\n\n{table(['', 'unit', *results], rows)}\n\n{note}{missing}"


def _cell(unit: str, values: list[float]) -> str:
    if not values:
        return "-"
    median, best = _number(statistics.median(values)), _number(better(unit)(values))
    return f"{median} ({best})" if len(values) > 1 else median


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def as_json(machine: dict[str, Any], results: dict[str, Values], skipped: Mapping[str, str]) -> str:
    stores = {
        store: {
            name: {
                "unit": UNITS[name],
                "median": statistics.median(each),
                "best": better(UNITS[name])(each),
                "values": each,
            }
            for name, each in values.items()
        }
        for store, values in results.items()
    }
    return json.dumps({"machine": machine, "stores": stores, "skipped": skipped}, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    end_orderly()
    main()
