"""``make bench-neighbour``: pynenc and Holdfast on the same MongoDB, in the same run, as a ratio.

pynenc lives in a virtualenv of its own (`.venv-neighbour`, made by the first run), since it needs Python 3.12 and an
older driver. Both do the same: so many tasks that do nothing are submitted, then one worker process with ten places
begins, and the rate is counted from the moment when 5 % are done, by what the store kept; then the tasks are submitted
one by one and waited for, from another process than the worker's. The two take turns, each time on a new database.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import workload
from benchmarks.measure import Sizes, drain_one_process, latency_elsewhere, percentile, rate
from benchmarks.quiet import Quiet
from benchmarks.table import table
from benchmarks.targets import CannotServe, end_orderly, mongo
from benchmarks.worker import ROOT

VENV = ROOT / ".venv-neighbour"
REQUIREMENTS = ("pynenc==0.3.1", "pynenc-mongo==0.3.0")  # these two versions fit together
TASKS, WAITS, ROUNDS = 200, 30, 3
_LIMIT_SECONDS = 120.0
_INSTALL_SECONDS = 600.0
_STOP_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0

DRAIN, LATENCY = "drain 1×10, tasks/s", "submit → result, other process, p50 ms"
Figures = Mapping[str, float]

# pynenc imports its tasks by the name of their module, which must not be the program itself.
_APP = """
import os
from pynenc.builder import PynencBuilder

app = (
    PynencBuilder()
    .app_id("neighbour")
    .mongo(url=os.environ["NEIGHBOUR_URL"])
    .thread_runner(min_threads=1, max_threads={places})
    .logging(level="error")
    .build()
)


@app.task
def nothing(number: int) -> int:
    return number
"""
_DRIVER = """
import json, sys, time
from neighbour_app import app, nothing
from pynenc.invocation.status import InvocationStatus

DONE = frozenset([InvocationStatus.SUCCESS])


def fill(count):
    return [str(each.invocation_id) for each in nothing.parallelize([(n,) for n in range(count)]).invocations]


def ends(count):
    ids = json.load(sys.stdin)
    while len(app.orchestrator.filter_by_status(ids, DONE)) < count:
        time.sleep(0.25)
    return sorted(app.orchestrator.get_invocation_status_record(id).timestamp.timestamp() for id in ids)


def wait(count):
    for number in range(max(1, count // 10)):
        nothing(number).result
    taken = []
    for number in range(count):
        began = time.perf_counter()
        nothing(number).result
        taken.append(time.perf_counter() - began)
    return taken


if sys.argv[1] == "work":
    app.runner.run()
else:
    print(json.dumps(globals()[sys.argv[1]](int(sys.argv[2]))))
"""


class CannotMeasure(Exception):
    """The neighbour cannot be set up, or did not finish."""


# --- the neighbour


def python_312() -> str | None:
    """A Python 3.12 that can make virtualenvs: on PATH, or of pyenv."""
    installed = sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python"), reverse=True)
    candidates = [*filter(None, [shutil.which("python3.12")]), *map(str, installed)]
    return next((python for python in candidates if _is_312(python)), None)


def _is_312(python: str) -> bool:
    try:  # a shim may stand for nothing
        asked = subprocess.run(
            [python, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.split() == ["3", "12"]


def install(python: str) -> str:
    """The Python of a virtualenv that has the neighbour."""
    ready, inside = VENV / ".ready", VENV / "bin" / "python"
    if not ready.exists() or ready.read_text("utf-8").split() != list(REQUIREMENTS):
        print(f"installing {' and '.join(REQUIREMENTS)} into {VENV} ...", file=sys.stderr)
        for command in (
            [python, "-m", "venv", "--clear", str(VENV)],
            [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
            if done.returncode:
                raise CannotMeasure(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        ready.write_text("\n".join(REQUIREMENTS), "utf-8")
    return str(inside)


class Neighbour:
    """pynenc in processes of its own, with one database."""

    def __init__(self, python: str, folder: Path, url: str) -> None:
        self._command = [python, str(folder / "neighbour_driver.py")]
        self._folder = folder
        # It also reads settings from the environment and from a pyproject.toml where it is started.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYNENC")}
        self._environment |= {"NEIGHBOUR_URL": url, "PYTHONPATH": str(folder)}
        (folder / "neighbour_app.py").write_text(_APP.format(places=workload.PLACES), "utf-8")
        (folder / "neighbour_driver.py").write_text(_DRIVER, "utf-8")

    def measure(self, tasks: int, waits: int) -> Figures:
        ids = self._ask("fill", tasks)
        with self._worker():
            ends = self._ask("ends", tasks, json.dumps(ids))
            taken = self._ask("wait", waits)
        return {DRAIN: rate(ends), LATENCY: percentile(taken, 50) * 1000}

    def _ask(self, what: str, count: int, given: str = "") -> list[float]:
        command = [*self._command, what, str(count)]
        try:  # `run` kills the child, by its pid, when its time is up
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                timeout=_LIMIT_SECONDS,
                cwd=self._folder,
                env=self._environment,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotMeasure(f"pynenc: '{what}' of {count} was not done after {_LIMIT_SECONDS:g} s") from error
        if done.returncode:
            raise CannotMeasure(f"pynenc: '{what}' failed:\n{done.stderr[-2000:]}")
        answer: list[float] = json.loads(done.stdout)
        return answer

    @contextmanager
    def _worker(self) -> Iterator[None]:
        with (self._folder / "worker.log").open("w") as log:
            worker = subprocess.Popen(
                [*self._command, "work"], cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )
            try:
                yield
            finally:
                worker.send_signal(signal.SIGTERM)
                try:
                    worker.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()


# --- Holdfast


def holdfast(url: str, tasks: int, waits: int) -> Figures:
    sizes = Sizes(submits=0, mapped=0, drained=tasks, waits=waits, idle_seconds=0, rounds=1)
    (drained,) = drain_one_process(url, sizes).values()
    return {DRAIN: drained, LATENCY: latency_elsewhere(url, sizes)["submit → result, other process, p50"]}


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    python = python_312()
    if python is None:
        print("not measured: pynenc 0.3.1 needs Python 3.12, and there is none on PATH or in ~/.pyenv/versions")
        return 0
    try:
        inside = install(python)
        quiet = Quiet(_PATIENCE_SECONDS)
        found: dict[str, list[Figures]] = {"pynenc": [], "Holdfast": []}
        with mongo() as fresh, tempfile.TemporaryDirectory(prefix="hf-neighbour-") as folder:
            for number in range(options.rounds):
                with fresh() as url:
                    quiet.wait()
                    place = Path(folder) / str(number)
                    place.mkdir()
                    found["pynenc"].append(Neighbour(inside, place, url).measure(options.tasks, options.waits))
                with fresh() as url:
                    quiet.wait()
                    found["Holdfast"].append(holdfast(url, options.tasks, options.waits))
    except CannotServe as error:
        print(f"not measured: {error}")
        return 0
    except CannotMeasure as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    print(report(found))
    about = f"median of {options.rounds} (all), {options.tasks} tasks drained, {options.waits} waited for"
    foreign = f"; {statistics.median(quiet.foreign_cores):.2f} cores used by others" if quiet.foreign_cores else ""
    print(f"\n{about}{foreign}\npynenc: {', '.join(REQUIREMENTS)}, ThreadRunner, its own defaults otherwise")
    return 0


def report(found: Mapping[str, Sequence[Figures]]) -> str:
    """Each figure of both, and how many times better Holdfast is."""
    better: dict[str, Callable[[float, float], float]] = {
        DRAIN: lambda theirs, ours: ours / theirs,
        LATENCY: lambda theirs, ours: theirs / ours,
    }
    rows = []
    for name, ratio in better.items():
        values = {who: [figures[name] for figures in rounds] for who, rounds in found.items()}
        cells = [
            f"{statistics.median(each):,.1f} ({', '.join(f'{value:,.1f}' for value in each)})"
            for each in values.values()
        ]
        times = ratio(*(statistics.median(values[who]) for who in ("pynenc", "Holdfast")))
        rows.append([name, *cells, f"{times:.1f}×"])
    return table(["", *found, "better by"], rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbour", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"how many are drained ({TASKS})")
    parser.add_argument("--waits", type=int, default=WAITS, help=f"how many are waited for, one by one ({WAITS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often ({ROUNDS})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_orderly()
    sys.exit(main())
