"""How long the work of the dead waits: `make bench-recovery`.

Three questions, each with real processes and kill -9: how long after the death of a runner, workers and all, everything
that it held runs again, with default settings; how long after the death of a worker process; and how many living
runners are taken for dead, and how much of their work is taken from them, while every core is busy. Each victim holds
as much as a worker has places by default, and counts once: with the time of the last of its calls. The answer comes
from outside the system: each call of the task writes the time at which it began into a file.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast import App, Invocation

ROOT = Path(__file__).resolve().parent.parent
_TASKS = """
import os, time
from holdfast import App

app = App(name="recovery")


@app.task
def hold(ledger: str, number: int, release: str) -> int:
    with open(ledger, "a") as file:
        file.write(f"{number} {time.monotonic()}\\n")
    while not os.path.exists(release):
        time.sleep(0.05)
    return number
"""
_PATIENCE_SECONDS = 90.0
_PLACES = 10  # of a worker, by default
_RUNNER_SECONDS, _WORKER_SECONDS = 20.0, 2.0  # the aims


class Fleet:
    """Runners of one app on one store, in a folder of their own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        self._environment = os.environ | {"HOLDFAST_URL": url, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
        (folder / "recovery_app.py").write_text(_TASKS)
        os.environ["HOLDFAST_URL"] = url
        sys.path.insert(0, str(folder))
        import recovery_app  # type: ignore[import-not-found]

        self.app: App = recovery_app.app
        self.hold = recovery_app.hold
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def runner(self, *, workers: int = 1) -> Iterator[subprocess.Popen[bytes]]:
        before = {runner.id for runner in self.app.runners()}
        command = [sys.executable, "-m", "holdfast", "run", "recovery_app:app", "--log-level", "error"]
        command += ["--workers", str(workers), "--concurrency", str(_PLACES)]
        with subprocess.Popen(
            command, cwd=self.folder, env=self._environment, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                until(lambda: any(r.id not in before and len(r.workers) == workers for r in self.app.runners()))
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.send_signal(signal.SIGINT)

    def submit(self, first: int, count: int, release: Path) -> list[Invocation[int]]:
        """So many calls, numbered from `first`, that last until there is a file of that name; all have begun."""
        numbers = range(first, first + count)
        calls = [self.hold.submit(str(self.ledger), number, str(release)) for number in numbers]
        until(lambda: self.begun().keys() >= set(numbers))
        return calls

    def begun(self) -> dict[int, list[float]]:
        """When each call began, as often as it did."""
        found: dict[int, list[float]] = {}
        if self.ledger.exists():
            for line in self.ledger.read_text().splitlines():
                number, at = line.split()
                found.setdefault(int(number), []).append(float(at))
        return found


def until(holds: Callable[[], object], seconds: float = _PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to pass")
        time.sleep(0.02)


def after_a_runner(fleet: Fleet, trials: int) -> list[float]:
    """Seconds from the death of a runner and its workers until the last call that they held has begun again."""
    waited: list[float] = []
    for trial in range(trials):
        first, release = trial * 100, fleet.folder / f"release-{trial}"
        with fleet.runner() as victim:
            calls = fleet.submit(first, _PLACES, release)
            (workers,) = [[worker.pid for worker in each.workers] for each in fleet.app.runners()]
            with fleet.runner():
                for pid in (victim.pid, *workers):
                    os.kill(pid, signal.SIGKILL)
                waited.append(until_all_run_again(fleet, range(first, first + _PLACES)))
                release.touch()
                for call in calls:
                    call.result(_PATIENCE_SECONDS)
    return waited


def after_a_worker(fleet: Fleet, trials: int) -> list[float]:
    """The same for one of two workers, both with all their places taken."""
    waited: list[float] = []
    with fleet.runner(workers=2):
        for trial in range(trials):
            first, release = 10_000 + trial * 100, fleet.folder / f"worker-{trial}"
            calls = fleet.submit(first, 2 * _PLACES, release)
            owners = [call.record().owner or "" for call in calls]
            (pid,) = [
                worker.pid
                for runner in fleet.app.runners()
                for worker in runner.workers
                if f"{runner.id}/{worker.id}" == owners[0]
            ]
            held = [first + place for place, owner in enumerate(owners) if owner == owners[0]]
            os.kill(pid, signal.SIGKILL)
            waited.append(until_all_run_again(fleet, held))
            release.touch()
            for call in calls:
                call.result(_PATIENCE_SECONDS)
    return waited


def until_all_run_again(fleet: Fleet, numbers: Sequence[int]) -> float:
    """Seconds from now to the second beginning of the last of them."""
    died = time.monotonic()
    until(lambda: all(len(fleet.begun()[number]) > 1 for number in numbers))
    return max(fleet.begun()[number][1] for number in numbers) - died


def false_alarms(fleet: Fleet, seconds: float) -> tuple[int, int]:
    """While every core is busy twice over: how many living runners are declared dead, how many calls begun again."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 2))]
    first, release = 20_000, fleet.folder / "release-load"
    try:
        with fleet.runner(), fleet.runner(), fleet.runner():
            before = {runner.id for runner in fleet.app.runners()}
            calls = fleet.submit(first, 3 * _PLACES, release)
            time.sleep(seconds)
            gone = before - {runner.id for runner in fleet.app.runners()}
            begun = fleet.begun()
            release.touch()
            for call in calls:
                call.result(_PATIENCE_SECONDS)
            return len(gone), sum(len(begun[first + place]) > 1 for place in range(len(calls)))
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="the store; a SQLite file in a temporary folder by default")
    parser.add_argument("--trials", type=int, default=3, help="deaths of a runner (20 s each)")
    parser.add_argument("--workers", type=int, default=20, help="deaths of a worker")
    parser.add_argument("--load-seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-recovery-") as name:
        folder = Path(name)
        fleet = Fleet(folder, given.url or f"sqlite:///{folder / 'recovery.db'}")
        workers = after_a_worker(fleet, given.workers)
        good = tell("worker", workers, _WORKER_SECONDS)
        gone, again = false_alarms(fleet, given.load_seconds)
        print(
            f"{given.load_seconds:g} s of full load: {gone} living runners declared dead, {again} calls taken (aim: 0)"
        )
        good &= tell("runner", after_a_runner(fleet, given.trials), _RUNNER_SECONDS)
        fleet.app.close()
    sys.exit(not good or gone + again > 0)


def tell(who: str, seconds: list[float], aim: float) -> bool:
    """Print how long it took; whether that meets the aim."""
    ordered = sorted(seconds)
    half, most = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    print(
        f"{who}, kill -9 until all of its {_PLACES} calls run again: {len(ordered)} deaths, "
        f"p50 {half:.2f} s, p99 {most:.2f} s, max {ordered[-1]:.2f} s (aim: p99 ≤ {aim:g} s)",
        flush=True,
    )
    return most <= aim


if __name__ == "__main__":
    main()
