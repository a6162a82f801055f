"""The app of the processes in the fault tests: an ordinary one, with witnesses.

What these write down is what the store has accepted: joins, heartbeats, executions of services. The variable
``HOLDFAST_CRASH_AT`` arms every process that it reaches; here it is kept in the first process of the role that
``HOLDFAST_TEST_ROLE`` names, and taken back in all others. With ``HOLDFAST_TEST_FREEZE`` the process freezes at the
point instead of dying.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults import tasks
from tests.faults.clock import HostClock
from tests.faults.settings import DEAD_AFTER_SECONDS

from holdfast import App, crashpoints
from holdfast.clock import SystemClock
from holdfast.engine.core import Engine
from holdfast.engine.worker import Worker
from holdfast.ids import Ids
from holdfast.lifecycle.records import RunnerRecord
from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.testing.witness import What, Witness

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
    app._clock = HostClock(path)
    app._ids = Ids(app._clock, app._rng)


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
    enrol, heartbeat, leave = store.enrol, store.heartbeat, store.leave
    put_execution, end_execution, make_worker = store.put_execution, store.end_execution, engine.worker
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

    async def watched_leave(app: str, runner_id: str) -> None:
        await leave(app, runner_id)
        witness.write(What.RUNNER_END, **spans[runner_id])

    async def watched_put_execution(app: str, execution: Execution) -> Execution | None:
        blocker: Execution | None = await put_execution(app, execution)
        if blocker is None and execution.status is ExecutionStatus.RUNNING:
            spans[execution.id] = {"owner": execution.runner_id, "service": execution.service, "span": execution.id}
            witness.write(What.SERVICE_START, **spans[execution.id])
        return blocker

    async def watched_end_execution(app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
        if id in spans:
            witness.write(What.SERVICE_END, **spans.pop(id))
        return bool(await end_execution(app, id, status, at, reason))

    def watched_worker(*given: Any, owner: str, **named: Any) -> Worker:
        witness.write(What.RUNNER_START, owner=owner, span=secrets.token_hex(6))
        return make_worker(*given, owner=owner, **named)

    store.enrol, store.heartbeat, store.leave = watched_enrol, watched_heartbeat, watched_leave
    store.put_execution, store.end_execution = watched_put_execution, watched_end_execution
    engine.worker = watched_worker  # type: ignore[method-assign]
    return engine


_maker = app._engine_maker


def _watched_maker() -> Callable[[], Engine]:
    make = _maker()
    return lambda: _watched(make())


app._engine_maker = _watched_maker  # type: ignore[method-assign]
threading.Thread(target=_pulse, name="pulse", daemon=True).start()


def main(tokens: Sequence[str]) -> None:
    """The submitter: ``python -m tests.faults.shop token…``. Each of its calls has an argument that lies apart.

    Or whoever emits: ``python -m tests.faults.shop packed order``.
    """
    if tokens[0] == tasks.PACKED:
        witness.write(What.EMIT_OK, id=app.emit(tasks.PACKED, tasks.packed(tokens[1])).id)
        return
    work = app.get_task("work").options(delay=os.environ.get("HOLDFAST_TEST_DELAY", "0s"))
    for token in tokens:
        with witness.submission(token) as accepted:
            accepted(work.submit(token, padding=tasks.PADDING).id)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
