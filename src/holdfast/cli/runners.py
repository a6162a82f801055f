"""The commands about runners: ``runners`` with ``drain`` and ``stop``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from typer import Argument

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import NOT_FOUND, Output
from holdfast.errors import UsageError
from holdfast.model.explain import living, seconds_in_words
from holdfast.model.records import DRAIN, STOP, RunnerRecord, WorkerRecord
from holdfast.showing import fields, length

_TITLES = ("id", "state", "host", "pid", "version", "running", "queues", "tags", "services", "heartbeat", "workers")
RunnerId = Annotated[str, Argument(metavar="ID", help="The runner, or the beginning of its id.")]


@command()
def runners(out: Output, app: App) -> None:
    """List the runners with their workers; or drain or stop one."""
    roster, now = reach.roster(app), reach.time_of(app)
    out.document({"runners": [_facts(app, runner, now) for runner in roster]})
    rows = [
        (
            runner.id,
            _state(app, runner, now) + (f", asked to {runner.wish}" if runner.wish else ""),
            runner.host,
            runner.pid,
            runner.version,
            f"{_running(runner)} of {runner.capacity}",
            _queues(runner),
            ", ".join(runner.tags),
            _serves(app, runner, now),
            _age(now - runner.heartbeat_at),
            "; ".join(_worker(each, now) for each in runner.workers),
        )
        for runner in roster
    ]
    out.table(_TITLES, rows, empty="no runners; start one with: holdfast run")


@command(action="runner.drain", target="id")
def drain(out: Output, app: App, id: RunnerId) -> None:
    """Ask a runner to finish its work and end.

    It takes no more work, and what runs may end within its drain timeout.
    """
    _ask(out, app, id, DRAIN)


@command(action="runner.stop", target="id")
def stop(out: Output, app: App, id: RunnerId) -> None:
    """Ask a runner to end now. What runs is ended, and goes back to the queue."""
    _ask(out, app, id, STOP)


def _ask(out: Output, app: App, id: str, wish: str) -> None:
    runner = _found(out, reach.roster(app), id)
    if not reach.with_store(app, lambda store: store.ask_runner(app.name, runner.id, wish=wish)):
        out.fail("RunnerNotFound", f"runner {runner.id} has just left", code=NOT_FOUND)
    now = reach.time_of(app)
    if _state(app, runner, now) == "dead":
        out.note(
            f"runner {runner.id} has not written a heartbeat for {length(now - runner.heartbeat_at)} and may be dead"
        )
    out.document({"id": runner.id, "asked": wish})
    out.line(f"runner {runner.id} is asked to {wish}; it obeys with its next heartbeat")


def _found(out: Output, roster: Sequence[RunnerRecord], id: str) -> RunnerRecord:
    found = [runner for runner in roster if runner.id == id] or [r for r in roster if id and r.id.startswith(id)]
    if not found:
        there = ", ".join(runner.id for runner in roster) or "none"
        out.fail("RunnerNotFound", f"there is no runner '{id}' on the roster; there are: {there}", code=NOT_FOUND)
    if len(found) > 1:
        raise UsageError(f"'{id}' may be {' or '.join(runner.id for runner in found)}; write more of it")
    return found[0]


def _state(app: App, runner: RunnerRecord, now: float) -> str:
    if not living([runner], now, app.settings.dead_after_seconds):
        return "dead"
    return "draining" if runner.draining else "alive"


def _age(seconds: float) -> str:
    """Return how old a heartbeat is, or by how much the runner's clock is ahead."""
    return f"{length(seconds)} ago" if seconds > -1 else f"{length(-seconds)} ahead of this clock"


def _worker(worker: WorkerRecord, now: float) -> str:
    since = worker.unresponsive_since
    silence = "" if since is None else f", has not answered for {seconds_in_words(now - since)}"
    return f"{worker.id}: pid {worker.pid}, {worker.running} running{silence}"


def _running(runner: RunnerRecord) -> int:
    return sum(worker.running for worker in runner.workers)


def _queues(runner: RunnerRecord) -> str:
    if runner.queues is None:
        return "any"
    return ", ".join(f"{name}={runner.weights[name]}" if name in runner.weights else name for name in runner.queues)


def _serves(app: App, runner: RunnerRecord, now: float) -> str:
    """Return whether a runner takes turns at the services."""
    if not runner.can_run_atomic_service or _state(app, runner, now) != "alive":
        return "no"
    if runner.sits_out_until is not None and now < runner.sits_out_until:
        return f"sits out for {length(runner.sits_out_until - now)}"
    return "yes"


def _facts(app: App, runner: RunnerRecord, now: float) -> dict[str, Any]:
    state = _state(app, runner, now)
    return fields(runner) | {
        "state": state,
        "alive": state != "dead",
        "running": _running(runner),
        "capacity": runner.capacity,
        "workers": [fields(each) for each in runner.workers],
        "heartbeat_age_seconds": round(now - runner.heartbeat_at, 3),
    }
