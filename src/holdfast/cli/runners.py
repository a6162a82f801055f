"""The commands about runners: ``runners`` with ``drain`` and ``stop``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import NOT_FOUND, Output
from holdfast.errors import UsageError
from holdfast.model.explain import seconds_in_words
from holdfast.model.records import DRAIN, STOP, RunnerRecord, WorkerRecord
from holdfast.showing import length
from holdfast.web.reading.model import ReadModel
from holdfast.web.reading.runners import DEAD, Roster, running_of

_TITLES = ("id", "state", "host", "pid", "version", "running", "queues", "tags", "services", "heartbeat", "workers")
RunnerId = Annotated[str, Argument(metavar="ID", help="The runner, or the beginning or end of its id.")]


@command()
def runners(out: Output, app: App) -> None:
    """List the runners with their workers; or drain or stop one."""
    roster = _roster(app)
    out.document(roster.document())
    rows = [
        (
            runner.id,
            roster.state_of(runner) + (f", asked to {runner.wish}" if runner.wish else ""),
            runner.host,
            runner.pid,
            runner.version,
            f"{running_of(runner)} of {runner.capacity}",
            _queues(runner),
            ", ".join(runner.tags),
            roster.serves(runner),
            _age(roster.now - runner.heartbeat_at),
            "; ".join(_worker(each, roster.now) for each in runner.workers),
        )
        for runner in roster.runners
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
    roster = _roster(app)
    runner = _found(out, roster, id)
    if not reach.with_store(app, lambda store: store.ask_runner(app.name, runner.id, wish=wish)):
        out.fail("RunnerNotFound", f"runner {runner.id} has just left", code=NOT_FOUND)
    if roster.state_of(runner) == DEAD:
        silence = length(roster.now - runner.heartbeat_at)
        out.note(f"runner {runner.id} has not written a heartbeat for {silence} and may be dead")
    out.document({"id": runner.id, "asked": wish})
    out.line(f"runner {runner.id} is asked to {wish}; it obeys with its next heartbeat")


def _roster(app: App) -> Roster:
    return app.runtime.run(ReadModel(app.runtime).runners.roster())


def _found(out: Output, roster: Roster, id: str) -> RunnerRecord:
    found = roster.found(id)
    if not found:
        there = ", ".join(runner.id for runner in roster.runners) or "none"
        out.fail("RunnerNotFound", f"there is no runner '{id}' on the roster; there are: {there}", code=NOT_FOUND)
    if len(found) > 1:
        raise UsageError(f"'{id}' may be {' or '.join(runner.id for runner in found)}; write more of it")
    return found[0]


def _age(seconds: float) -> str:
    """Return how old a heartbeat is, or by how much the runner's clock is ahead."""
    return f"{length(seconds)} ago" if seconds > -1 else f"{length(-seconds)} ahead of this clock"


def _worker(worker: WorkerRecord, now: float) -> str:
    since = worker.unresponsive_since
    silence = "" if since is None else f", has not answered for {seconds_in_words(now - since)}"
    return f"{worker.id}: pid {worker.pid}, {worker.running} running{silence}"


def _queues(runner: RunnerRecord) -> str:
    if runner.queues is None:
        return "any"
    return ", ".join(f"{name}={runner.weights[name]}" if name in runner.weights else name for name in runner.queues)
