"""One story of real processes on one store, and the verdict over it.

Every process is the leader of a session of its own. A stopped process whose group has lost its parent is resumed by
the kernel, and so is never the zombie that a test wants; and what a process leaves behind can be found and ended.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.faults import tasks
from tests.faults.settings import DEAD_AFTER_SECONDS, INTERVAL_SECONDS, SETTINGS
from tests.support import checker
from tests.support.patience import patient
from tests.support.witness import Event, Ledgers, Reader, What, Witness

from holdfast import App
from holdfast.clock import SystemClock
from holdfast.model.claims import Claim
from holdfast.model.names import core_app
from holdfast.model.records import InvocationRecord, RunnerRecord, runner_of
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import EntryOrder, Filter, Order, Store
from holdfast.triggers import events, joins
from holdfast.triggers.subscriptions import VERSION_KIND

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = patient(60.0)
BOUNDS = checker.Bounds(
    final_seconds=30.0,
    subscribed_seconds=0.0,  # nothing happens before the triggers are there
    slot_seconds=None,  # it takes seconds until a worker is there to fill one
    recovery_seconds=10.0,
    worker_recovery_seconds=5.0,
    dead_after_seconds=DEAD_AFTER_SECONDS,
    service_seconds={"core": INTERVAL_SECONDS},
)
_OF_ONE_HISTORY = frozenset({"I2", "I3", "I4", "I6", "I14", "I18"})


class Process:
    """One process of the story, and what it has started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._mark = f"{tasks.LEDGERS}={environment[tasks.LEDGERS]}".encode()
        self.log = log
        self.started_at = SystemClock().monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def family(self) -> list[int]:
        """The living processes of its session.

        Numbers are used again, and soon on a busy host: what does not have the variables of this story is a stranger.
        """
        return [pid for pid, session in _sessions() if session == self.pid and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def signal_family(self, number: int) -> None:
        for pid in self.family:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def has_begun(self) -> bool:
        return self.log.stat().st_size > 0

    def says(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def end(self) -> None:
        """Now, with all it has started."""
        self.signal_family(signal.SIGKILL)
        self._process.wait()


def _sessions() -> Iterable[tuple[int, int]]:
    """The processes of this host, each with its session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(entry.name), int(fields[3])


class Session:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.ledgers_folder = folder / "ledgers"
        self.ledgers_folder.mkdir(parents=True)
        self.url = url
        self.name = f"faults-{secrets.token_hex(4)}"
        self.app = App(url, name=self.name, **SETTINGS)
        tasks.declare(self.app, with_triggers=True)
        self.witness = Witness.in_folder(self.ledgers_folder, "test")
        self._reader = Reader(self.ledgers_folder)
        self._reading = threading.Lock()
        self.processes: list[Process] = []
        self.variables: dict[str, str] = {}  # of all processes

    # --- processes

    def start(self, *command: str, **more: str) -> Process:
        """A process with the settings of this story; `more` are variables of its environment."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {f"HOLDFAST_{name.upper()}": value for name, value in SETTINGS.items()}
        own = {"HOLDFAST_URL": self.url, "HOLDFAST_NAME": self.name, tasks.LEDGERS: str(self.ledgers_folder)}
        log = self.folder / f"{len(self.processes)}.log"
        process = Process(["-m", *command], plain | settings | own | self.variables | more, log)
        self.processes.append(process)
        return process

    def start_runner(self, *options: str, **more: str) -> Process:
        return self.start("holdfast", "run", "tests.faults.shop:app", *options, **more)

    def start_healthy(self) -> Process:
        """A runner that nothing happens to. Until it is there, no time passes for what waits to be healed."""
        before = len(self.runners())
        with self.witness.fault("outage"):
            process = self.start_runner("--workers", "0", "--concurrency", "4")
            self.until(lambda: len(self.runners()) > before, "a healthy runner joins", 3 * PATIENCE_SECONDS)
        return process

    def strike_another(self) -> None:
        """The next process that is armed will be struck too."""
        (self.ledgers_folder / "chosen").unlink()

    def stop(self, *processes: Process) -> None:
        """Ask them to end, and wait for it."""
        for process in processes or [process for process in self.processes if process.code is None]:
            process.signal(signal.SIGTERM)
            self.until(lambda: process.code is not None, f"{process.log.name} ends")  # noqa: B023
            assert process.code == 0, f"{process.log.name} ended with {process.code}"

    def end(self) -> None:
        for process in self.processes:
            process.end()
        self.app.close()

    # --- what happens

    def submit(self, *tokens: str, task: str = "work", delay: float = 0.0, **arguments: Any) -> list[str]:
        ids = []
        for token in tokens:
            with self.witness.submission(token) as accepted:
                ids.append(self.app.get_task(task).options(delay=delay).submit(token, **arguments).id)
                accepted(ids[-1])
        return ids

    def resume(self, token: str, payload: object, name: str = "test", taken_by: str | None = None) -> None:
        """Give a payload to a hook, as soon as it is there. Where a sender died whose payload the run `taken_by` may
        have by now, that will do: the run may have disposed of the hook, and then a repetition is refused.
        """

        def is_sent() -> bool:
            sent = self.witness.resume(token, name, lambda: self.app.resume_hook(token, payload, name))
            return sent or (taken_by is not None and "hook_received" in self.event_types(taken_by))

        self.until(is_sent, f"the hook '{token}' takes a payload")

    def event_types(self, run: str) -> list[str]:
        return [event.type for event in self.app.invocation(run).events()]

    def emit(self, order: str) -> None:
        """That this order is packed."""
        self.witness.write(What.EMIT_OK, id=self.app.emit(tasks.PACKED, tasks.packed(order)).id)

    def has_triggers(self) -> bool:
        """Whether everybody can know the triggers of the runners."""
        return bool(self.ask(lambda store: store.entries(self.name, VERSION_KIND)))

    def release(self, pid: int | None = None) -> None:
        """What waits in user code goes on; that of one process, or all of it."""
        (self.ledgers_folder / ("release" if pid is None else f"release {pid}")).touch()

    @property
    def ledgers(self) -> Ledgers:
        with self._reading:
            return self._reader.ledgers()

    def events(self, what: What, **facts: object) -> list[Event]:
        return [
            event
            for event in self.ledgers.of(what)
            if all(getattr(event, name) == value for name, value in facts.items())
        ]

    def runners(self) -> list[Event]:
        """Each life of a runner that has begun."""
        return [event for event in self.events(What.RUNNER_START) if "/" not in (event.owner or "")]

    def struck(self, point: str) -> Event:
        """Wait until a process has come to that point; what it wrote down there."""
        self.until(lambda: self.events(What.FAULT_START, why=point), f"a process comes to {point}")
        return self.events(What.FAULT_START, why=point)[0]

    def began(self, *tokens: str) -> None:
        """Wait until these calls have begun."""
        self.until(lambda: {event.token for event in self.events(What.EXEC_START)} >= set(tokens), f"{tokens} begin")

    def ended(self, *tokens: str) -> None:
        """Wait until these calls have ended."""
        ids = {event.token: event.id or "" for event in self.events(What.SUBMIT_OK)}
        self.until(lambda: all(self.record(ids[token]).status in FINAL for token in tokens), f"{tokens} end")

    def until(self, holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.told()}"
            time.sleep(0.05)

    def told(self) -> str:
        """The last lines of every log, and what has not ended."""
        lines = []
        for process in self.processes:
            text = process.log.read_text(errors="replace").splitlines()
            lines += [f"--- {process.log} ({process.pid}, {process.code})", *text[-25:]]
        return "\n".join(lines)

    # --- the store

    def ask(self, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        async def job() -> T:
            return await question((await self.app.runtime.engine()).store)

        return self.app.runtime.run(job())

    def can_write(self) -> bool:
        """Whether the store takes a write within a second."""

        async def write(store: Store) -> bool:
            try:
                async with asyncio.timeout(1.0):
                    await store.remove_runner(self.name, "nobody")
            except TimeoutError:
                return False
            return True

        return self.ask(write)

    def record(self, id: str) -> InvocationRecord:
        (found,) = self.ask(lambda store: store.get(self.name, [id]))
        assert found is not None
        return found

    def records(self) -> list[InvocationRecord]:
        return list(self.ask(lambda store: store.find(self.name, Filter(), 1000)))

    def roster(self) -> list[RunnerRecord]:
        return list(self.ask(lambda store: store.roster(self.name)))

    def leave_a_corpse(self, first: str, second: str) -> None:
        """A runner with two workers that died when the one had begun a call, and the other had reserved one."""
        self.submit(first, second)

        async def die(store: Store) -> None:
            engine, now = await self.app.runtime.engine(), store.now()
            record = RunnerRecord(
                id=engine.ids.new(),
                app=self.name,
                host="elsewhere",
                pid=0,
                version="0",
                started_at=now,
                heartbeat_at=now,
                concurrency=1,
                tasks=("work",),
            )
            await store.enrol(record)
            for number in range(2):
                claim = Claim(
                    app=self.name,
                    lanes=("default|work",),
                    limit=1,
                    owner=f"{record.id}/{number}",
                    operation=engine.ids.operation(),
                    at=store.now(),
                    start=number == 0,
                )
                await store.claim(claim)
            with self.witness.fault("kill", owner=record.id):
                pass

        self.ask(die)

    # --- the end

    def rest(self) -> None:
        """Wait until everything has ended and whoever died is off the roster and buried."""
        self.until(self._is_at_rest, "everything ends")

    def _is_at_rest(self) -> bool:
        counts = self.ask(lambda store: store.counts(self.name))
        if any(count for status, count in counts.items() if status not in FINAL):
            return False
        if any(record.status not in FINAL for record in self.records()):  # a count misses what moves while it counts
            return False
        if self.ask(self._untold):
            return False
        living, roster = {process.pid for process in self.processes if process.code is None}, self.roster()
        owners = self.ask(lambda store: store.owners(core_app(self.name)))
        there = {runner.id for runner in roster}
        return all(runner.pid in living for runner in roster) and all(runner_of(owner) in there for owner in owners)

    async def _untold(self, store: Store) -> bool:
        """Whether a trigger is still to hear of something, or to fire."""
        entries = await store.entries(self.name, joins.KIND)
        return bool(
            await store.find(self.name, Filter(), 1, order=Order.OUTBOX)
            or await store.entries(self.name, events.KIND, order=EntryOrder.DUE, limit=1)
            or any(joins.from_entry(entry).firings for entry in entries)
        )

    def violations(self, bounds: checker.Bounds = BOUNDS) -> list[checker.Violation]:
        """What is wrong with how it went."""
        ledgers = self.ledgers
        faults = checker.Faults.of(ledgers)
        own = self.ask(lambda store: checker.dump(store, self.name))
        core = self.ask(lambda store: checker.dump(store, core_app(self.name)))
        bounds = self._on_this_machine(bounds)
        found = checker.check(own, ledgers, faults, bounds, tasks.bodies(self.app))
        of_core = checker.check(core, Ledgers(), faults, bounds)
        return found + [each for each in of_core if each.invariant in _OF_ONE_HISTORY]

    def _on_this_machine(self, bounds: checker.Bounds) -> checker.Bounds:
        """The bounds are for a machine that starts a runner within a second; one with more to do is given more."""
        began = {process.pid: process.started_at for process in self.processes}
        starts = [event.at - began[event.pid] for event in reversed(self.runners()) if event.pid in began]
        factor = max([1.0, *starts])
        return msgspec.structs.replace(
            bounds,
            final_seconds=None if bounds.final_seconds is None else bounds.final_seconds * factor,
            recovery_seconds=bounds.recovery_seconds * factor,
            worker_recovery_seconds=bounds.worker_recovery_seconds * factor,
            service_seconds={name: period * factor for name, period in bounds.service_seconds.items()},
        )

    def verdict(self, bounds: checker.Bounds = BOUNDS) -> None:
        """Let everything end, stop whoever is there, and judge."""
        self.release()
        self.rest()
        self.stop()
        self.ask(lambda store: store.collect_payloads(self.name, store.now(), 1000))
        found = self.violations(msgspec.structs.replace(bounds, unwanted_seconds=0.0))
        assert not found, "\n".join([*map(str, found), self.told()])
        assert self.roster() == []
        assert all(record.status in (Status.SUCCESS, Status.FAILED) for record in self.records())
