"""The app of the processes in the fault tests: an ordinary one, with witnesses.

What these write down is what the store has accepted: joins, heartbeats, executions of services. The variable
``HOLDFAST_CRASH_AT`` arms every process that it reaches; here it is kept in the first process of the role that
``HOLDFAST_TEST_ROLE`` names, and taken back in all others; with ``HOLDFAST_TEST_EACH`` in every process of that role.
With ``HOLDFAST_TEST_FREEZE`` the process freezes at the point instead of dying.
"""

from __future__ import annotations

import os
import runpy
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults import tasks
from tests.faults.clock import HostClock
from tests.faults.settings import DEAD_AFTER_SECONDS
from tests.support.witness import What, Witness

from holdfast import App, crashpoints
from holdfast.clock import SystemClock
from holdfast.codec import references
from holdfast.fleet.services import GATE, execution_of
from holdfast.fleet.slots import ExecutionStatus
from holdfast.ids import Ids
from holdfast.model.records import Entry, RunnerRecord
from holdfast.runtime.engine import Engine
from holdfast.runtime.worker import Worker

_PULSE_SECONDS = 0.1

folder = Path(os.environ[tasks.LEDGERS])
witness = tasks.witness()
app = App()
tasks.declare(app, with_triggers=tasks.TRIGGERS in os.environ)


# --- crash points


def _is_chosen() -> bool:
    """Whether this is the process that shall be struck: of those with this role, the first."""
    if os.environ.get("HOLDFAST_TEST_ROLE") != tasks.role():
        return False
    if "HOLDFAST_TEST_EACH" in os.environ:
        return True
    try:
        (folder / "chosen").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _strike(point: str) -> None:
    freeze = "HOLDFAST_TEST_FREEZE" in os.environ
    facts: dict[str, Any] = {"victim": os.getpid(), "span": secrets.token_hex(6), "why": point}
    witness.write(What.FAULT_START, kind="freeze" if freeze else "kill", **facts)
    if freeze:
        os.kill(os.getpid(), signal.SIGSTOP)
        witness.write(What.FAULT_END, kind="freeze", **facts)
        return
    witness.write(What.FAULT_END, kind="kill", **facts)
    crashpoints.kill(point)


if _is_chosen():
    crashpoints.strike = _strike
else:
    crashpoints.arm(None)


# --- a clock that a test can set

if "FAKETIME" in os.environ:  # libfaketime 0.9.10 breaks the system call behind time.sleep
    time.sleep = lambda seconds: select.select((), (), (), seconds)

if path := os.environ.get("HOLDFAST_TEST_CLOCK"):
    app.runtime.clock = HostClock(path)
    app.runtime.ids = Ids(app.runtime.clock, app.runtime.rng)


# --- witnesses


class _Past(SystemClock):
    """For a ledger whose lines are about what was."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at


def _pulse() -> None:
    """Write down when this process got no time for so long that others may have taken it for dead: on a machine with
    too much to do that is no fault of Holdfast's.
    """
    clock, past = SystemClock(), _Past()
    ledger: Witness | None = None
    last = clock.monotonic()
    while True:
        time.sleep(_PULSE_SECONDS)
        now = clock.monotonic()
        if now - last > DEAD_AFTER_SECONDS / 2:
            ledger = ledger or Witness.in_folder(folder, "pulse", clock=past)
            past.at = last
            with ledger.fault("freeze", pid=os.getpid()):
                past.at = now
        last = now


def _watched(engine: Engine) -> Engine:
    store: Any = engine.store
    enrol, heartbeat, remove_runner = store.enrol, store.heartbeat, store.remove_runner
    put_entry = store.put_entry
    spans: dict[str, dict[str, Any]] = {}

    async def watched_enrol(runner: RunnerRecord) -> None:
        await enrol(runner)
        spans[runner.id] = {"owner": runner.id, "span": secrets.token_hex(6)}
        witness.write(What.RUNNER_START, **spans[runner.id])

    async def watched_heartbeat(app: str, runner_id: str, *rest: Any, **named: Any) -> RunnerRecord | None:
        found: RunnerRecord | None = await heartbeat(app, runner_id, *rest, **named)
        if found is not None:
            witness.write(What.RUNNER_BEAT, **spans[runner_id])
        return found

    async def watched_remove_runner(app: str, runner_id: str, *, heartbeat_at: float | None = None) -> bool:
        done = bool(await remove_runner(app, runner_id, heartbeat_at=heartbeat_at))
        if heartbeat_at is None:
            witness.write(What.RUNNER_END, **spans[runner_id])
        return done

    async def watched_put_entry(entry: Entry, over: Entry | None = None) -> bool:
        execution = execution_of(entry) if entry.kind == GATE else None
        is_running = execution is not None and execution.status is ExecutionStatus.RUNNING
        if execution is not None and not is_running and execution.id in spans:
            witness.write(What.SERVICE_END, **spans.pop(execution.id))
        done = bool(await put_entry(entry, over))
        if done and is_running and execution is not None:
            spans[execution.id] = {"owner": execution.runner_id, "service": execution.service, "span": execution.id}
            witness.write(What.SERVICE_START, **spans[execution.id])
        return done

    store.enrol, store.heartbeat, store.remove_runner = watched_enrol, watched_heartbeat, watched_remove_runner
    store.put_entry = watched_put_entry
    return engine


_maker, _make_worker = app.runtime.make_engine, Worker.__init__


def _watched_maker(given: Any = None) -> Callable[[], Engine]:
    make = _maker(given)
    return lambda: _watched(make())


def _watched_worker(worker: Worker, *given: Any, **named: Any) -> None:
    _make_worker(worker, *given, **named)
    witness.write(What.RUNNER_START, owner=worker.owner, span=secrets.token_hex(6))


app.runtime.make_engine = _watched_maker  # type: ignore[method-assign]
Worker.__init__ = _watched_worker  # type: ignore[method-assign]
threading.Thread(target=_pulse, name="pulse", daemon=True).start()


def main(tokens: Sequence[str]) -> None:
    """The submitter: ``python -m tests.faults.shop token…``. Each of its calls has an argument that lies apart.

    Or whoever tries a call itself: ``python -m tests.faults.shop faltering token``.
    Or whoever emits: ``python -m tests.faults.shop packed order``. Or makes a schedule: ``… schedule TOKEN``.
    Or whoever resumes a hook: ``… resume TOKEN VALUE``. Or whoever submits a group: ``… group``.
    Or whoever pauses a queue by the command line: ``… pause QUEUE``.
    """
    if tokens[0] == "pause":
        sys.argv = ["holdfast", "queues", "pause", tokens[1]]
        runpy.run_module("holdfast", run_name="__main__")
        return
    if tokens[0] == "resume":
        witness.resume(tokens[1], tokens[2], lambda: app.resume_hook(tokens[1], tokens[2], tokens[2]))
        return
    if tokens[0] == "group":
        tasks.submit_group(app)
        return
    if tokens[0] == "schedule":
        work = app.get_task("work")
        schedule = app.schedules.create("later", work, [tokens[1]], {"padding": tasks.PADDING}, every="10h")
        engine = app.runtime.ready()
        (large,) = references(schedule.call.arguments)
        assert app.runtime.run(engine.payloads.fetch([large], fresh=True))
        return
    if tokens[0] == tasks.PACKED:
        witness.write(What.EMIT_OK, id=app.emit(tasks.PACKED, tasks.packed(tokens[1])).id)
        return
    if tokens[0] == tasks.FALTERING:
        app.get_task(tasks.FALTERING).try_here(tokens[1])
        return
    work = app.get_task("work").options(delay=os.environ.get("HOLDFAST_TEST_DELAY", "0s"))
    for token in tokens:
        with witness.submission(token) as accepted:
            accepted(work.submit(token, padding=tasks.PADDING).id)


if __name__ == "__main__":
    main(sys.argv[1:])
