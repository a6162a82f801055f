"""How long the work of the dead waits: `make bench-recovery`.

Three questions, each with real processes and kill -9: how long after the death of a runner its work runs again, with
default settings; how long after the death of a worker process; and how many living runners are taken for dead while
every core is busy. The answer comes from outside the system: each call of the task writes the time at which it began
into a file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast import App

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
    def runner(self, *, workers: int = 1, concurrency: int = 4) -> Iterator[subprocess.Popen[bytes]]:
        before = {runner.id for runner in self.app.runners()}
        command = [sys.executable, "-m", "holdfast", "run", "recovery_app:app", "--log-level", "error"]
        command += ["--workers", str(workers), "--concurrency", str(concurrency)]
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

    def begun(self) -> dict[int, list[float]]:
        """When each call began, as often as it did."""
        found: dict[int, list[float]] = {}
        if self.ledger.exists():
            for line in self.ledger.read_text().splitlines():
                number, at = line.split()
                found.setdefault(int(number), []).append(float(at))
        return found


def until(holds: object, seconds: float = _PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to pass")
        time.sleep(0.02)


def after_a_runner(fleet: Fleet, trials: int) -> list[float]:
    """Seconds from the death of a runner, workers and all, to the next beginning of what it held."""
    waited: list[float] = []
    for trial in range(trials):
        numbers = [trial * 100 + place for place in range(4)]
        release = fleet.folder / f"release-{trial}"
        with fleet.runner() as victim:
            calls = [fleet.hold.submit(str(fleet.ledger), number, str(release)) for number in numbers]
            until(lambda numbers=numbers: set(numbers) <= set(fleet.begun()))  # type: ignore[misc]
            with fleet.runner(concurrency=8):
                os.killpg(victim.pid, signal.SIGKILL)
                died = time.monotonic()
                until(lambda numbers=numbers: all(len(fleet.begun()[number]) > 1 for number in numbers))  # type: ignore[misc]
                waited += [fleet.begun()[number][1] - died for number in numbers]
                release.touch()
                for call in calls:
                    call.result(_PATIENCE_SECONDS)
    return waited


def after_a_worker(fleet: Fleet, trials: int) -> list[float]:
    """Seconds from the death of a worker process to the next beginning of what it held."""
    waited: list[float] = []
    with fleet.runner(workers=2, concurrency=2):
        for trial in range(trials):
            number = 10_000 + trial
            release = fleet.folder / f"release-{number}"
            call = fleet.hold.submit(str(fleet.ledger), number, str(release))
            until(lambda number=number: number in fleet.begun())  # type: ignore[misc]
            owner = call.record().owner or ""
            (pid,) = [
                worker.pid
                for runner in fleet.app.runners()
                for worker in runner.workers
                if f"{runner.id}/{worker.id}" == owner
            ]
            os.kill(pid, signal.SIGKILL)
            died = time.monotonic()
            until(lambda number=number: len(fleet.begun()[number]) > 1)  # type: ignore[misc]
            waited.append(fleet.begun()[number][1] - died)
            release.touch()
            call.result(_PATIENCE_SECONDS)
    return waited


def false_alarms(fleet: Fleet, seconds: float) -> int:
    """How many living runners were declared dead while every core was busy twice over."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 2))]
    try:
        with fleet.runner(), fleet.runner(), fleet.runner():
            before = {runner.id for runner in fleet.app.runners()}
            time.sleep(seconds)
            return len(before - {runner.id for runner in fleet.app.runners()})
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
        workers = sorted(after_a_worker(fleet, given.workers))
        tell("worker, kill -9 to running again", workers, limit=2.0)
        alarms = false_alarms(fleet, given.load_seconds)
        print(f"living runners declared dead in {given.load_seconds:g} s of full load: {alarms} (aim: 0)")
        runners = sorted(after_a_runner(fleet, given.trials))
        tell("runner, kill -9 to running again", runners, limit=20.0)
        fleet.app.close()
    sys.exit(alarms > 0 or workers[-1] > 2.0 or runners[-1] > 20.0)


def tell(what: str, seconds: list[float], limit: float) -> None:
    half, worst = seconds[len(seconds) // 2], seconds[-1]
    print(f"{what}: {len(seconds)} cases, p50 {half:.2f} s, worst {worst:.2f} s (aim: p99 ≤ {limit:g} s)")


if __name__ == "__main__":
    main()
