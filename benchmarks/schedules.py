"""How soon ticks and triggers call: `make bench-schedules`.

Real runner processes with default settings, on SQLite or (``--url``) anything else. A schedule ticks each second; how
late is each tick submitted, with 1, 3 and 20 runners, all of whose places are taken, and how late is the worst one
after the runner that had the turn at the services was killed? Then triggers: how long after an event, and after the
end of a task, is the triggered call in the store?
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.recovery import until
from holdfast import App
from holdfast.fleet.services import Executions
from holdfast.model.records import RunnerRecord

ROOT = Path(__file__).resolve().parent.parent
_TASKS = """
import os, time
from holdfast import App, on_event, on_status

app = App(name="schedules")


@app.task
def hold(release: str) -> None:
    while not os.path.exists(release):
        time.sleep(0.2)


@app.task(queue="nobody")
def tick() -> None: ...


@app.task(queue="quick")
def quick(number: int) -> int:
    return number


@app.task(queue="nobody", triggers=[on_event("made"), on_status(quick)])
def triggered() -> None: ...
"""
_PLACES = 2
_AIM_SECONDS, _AFTER_DEATH_SECONDS, _TRIGGER_SECONDS = 2.0, 25.0, 0.1


class Fleet:
    """Runners of one app on one store, in a folder of their own; each serves the queues default and quick."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._environment = os.environ | {"HOLDFAST_URL": url, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
        (folder / "schedules_app.py").write_text(_TASKS)
        os.environ["HOLDFAST_URL"] = url
        sys.path.insert(0, str(folder))
        import schedules_app  # type: ignore[import-not-found]

        self.app: App = schedules_app.app
        self.tasks = schedules_app

    @contextlib.contextmanager
    def runners(self, count: int, queue: str = "default") -> Iterator[list[subprocess.Popen[bytes]]]:
        command = [sys.executable, "-m", "holdfast", "run", "schedules_app:app", "--log-level", "error"]
        command += ["--concurrency", str(_PLACES), "--queues", queue]
        with contextlib.ExitStack() as stack:
            started = []
            for _ in range(count):
                process = subprocess.Popen(
                    command, cwd=self._folder, env=self._environment, stdout=subprocess.DEVNULL, start_new_session=True
                )
                stack.callback(_end, process)
                started.append(process)
            until(lambda: len(self.app.runners()) >= count)
            yield started

    def whose_turn(self) -> list[RunnerRecord]:
        """The runner that performs the services now."""
        trail = self.app.runtime.run(Executions(self.app.runtime.ready().store, "schedules", "core", 0).trail(20))
        performing = {each.runner_id for each in trail if each.ended_at is None}
        return [runner for runner in self.app.runners() if runner.id in performing]

    def late(self, since: float, until_: float) -> list[float]:
        """By how much each tick of that time was late. All of them are there, once."""
        found = {r.due_at: r.created_at for r in self.app.invocations(task="schedules_app:tick", limit=10_000)}
        ticks = range(math.ceil(since), math.floor(until_) + 1)
        if missing := [tick for tick in ticks if float(tick) not in found]:
            raise RuntimeError(f"{len(missing)} ticks are missing, such as {missing[:3]}")
        return sorted(found[float(tick)] - tick for tick in ticks)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    process.wait(60)


def precision(fleet: Fleet, runners: int, seconds: float) -> bool:
    release = fleet._folder / f"release-{runners}"
    with fleet.runners(runners):
        for _ in range(runners * _PLACES + 1):
            fleet.tasks.hold.submit(str(release))
        until(lambda: len(fleet.app.invocations(status="running", task="schedules_app:hold")) == runners * _PLACES)
        fleet.app.schedules.create("often", fleet.tasks.tick, every="1s")
        began = time.time() + 2
        time.sleep(seconds)
        good = tell(f"{runners} runners, all places taken", fleet.late(began, time.time() - 3), _AIM_SECONDS)
        fleet.app.schedules.delete("often")
        release.touch()
    return good


def after_a_death(fleet: Fleet) -> bool:
    with fleet.runners(3):
        time.sleep(65)  # a cycle, so that each has had its turn
        fleet.app.schedules.create("often", fleet.tasks.tick, every="1s")
        time.sleep(5)
        began = time.time()
        until(lambda: bool(fleet.whose_turn()))  # between two turns it is nobody's
        (victim,) = fleet.whose_turn()
        for pid in (victim.pid, *[worker.pid for worker in victim.workers]):
            os.kill(pid, signal.SIGKILL)
        time.sleep(40)
        late = fleet.late(began, time.time() - 3)
        fleet.app.schedules.delete("often")
    print(f"after the death of the one whose turn it was: the worst tick {late[-1]:.2f} s late (aim: ≤ 25 s)")
    return late[-1] <= _AFTER_DEATH_SECONDS


def triggers(fleet: Fleet, count: int) -> bool:
    with fleet.runners(1, "quick"):
        time.sleep(3)
        happened = {}
        for number in range(count):
            event = fleet.app.emit("made")
            happened[event.id] = event.at
            fleet.tasks.quick.submit(number).result(30)
        name = "schedules_app:triggered"
        until(lambda: len(fleet.app.invocations(task=name, limit=10_000)) == 2 * count)
        found = fleet.app.invocations(task=name, limit=10_000)
        ended = {r.id: r.changed_at for r in fleet.app.invocations(task="schedules_app:quick", limit=10_000)}
    caused = {record.origin.sources[0].id: record.created_at for record in found if record.origin is not None}
    good = True
    for what, when in (("event", happened), ("end of a task", ended)):
        late = sorted(caused[id] - at for id, at in when.items())
        half, most = late[len(late) // 2], late[math.ceil(0.99 * len(late)) - 1]
        aim = "(aim: p50 ≤ 100 ms)"
        print(f"from the {what} to the call: {len(late)}, p50 {half * 1000:.1f} ms, p99 {most * 1000:.1f} ms {aim}")
        good &= half <= _TRIGGER_SECONDS
    return good


def tell(what: str, late: Sequence[float], aim: float) -> bool:
    half, most = (late[math.ceil(part * len(late)) - 1] for part in (0.5, 0.99))
    figures = f"p50 {half:.2f} s, p99 {most:.2f} s, max {late[-1]:.2f} s late"
    print(f"{what}: {len(late)} ticks, {figures} (aim: p99 ≤ {aim:g} s)")
    return most <= aim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="the store; a SQLite file in a temporary folder by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of ticks, for each number of runners")
    parser.add_argument("--runners", type=int, nargs="*", default=[1, 3, 20])
    parser.add_argument("--events", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-schedules-") as name:
        folder = Path(name)
        fleet = Fleet(folder, given.url or f"sqlite:///{folder / 'schedules.db'}")
        good = triggers(fleet, given.events)
        for runners in given.runners:
            good &= precision(fleet, runners, given.seconds)
        good &= after_a_death(fleet)
        fleet.app.close()
    sys.exit(not good)


if __name__ == "__main__":
    main()
