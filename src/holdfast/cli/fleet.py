"""The commands about runners: ``runners`` with ``drain`` and ``stop``, and ``services``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import App
from holdfast.cli.choosing import looked_at, subcommand
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption
from holdfast.cli.output import NOT_FOUND, Output
from holdfast.cli.reach import time_of, with_store
from holdfast.cli.shown import length, moment
from holdfast.engine.services import SERVICE, members_of
from holdfast.errors import UsageError
from holdfast.lifecycle.explain import living, seconds_in_words
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import DRAIN, STOP, RunnerRecord, WorkerRecord
from holdfast.lifecycle.slots import (
    AtomicServiceClaim,
    AtomicServiceSkip,
    Execution,
    ExecutionStatus,
    Member,
    SlotSettings,
    Window,
    decide_atomic_service_claim,
    sharing,
    windows,
)

_TITLES = ("id", "state", "host", "pid", "version", "running", "queues", "tags", "services", "heartbeat", "workers")
RunnerId = Annotated[str, typer.Argument(metavar="ID", help="The runner, or the beginning of its id.")]


def runners(
    context: typer.Context,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List the runners on the roster: who is alive, what each serves and does; or ask one to drain or stop."""
    if context.invoked_subcommand is not None:
        return
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        roster = with_store(chosen, lambda store: store.roster(chosen.name))
        now = time_of(chosen)
        if json:
            return out.document({"runners": [_facts(chosen, runner, now) for runner in roster]})
        rows = [
            (
                runner.id,
                _state(chosen, runner, now) + (f", asked to {runner.wish}" if runner.wish else ""),
                runner.host,
                runner.pid,
                runner.version,
                f"{_running(runner)} of {runner.capacity}",
                _queues(runner),
                ", ".join(runner.tags),
                _serves(chosen, runner, now),
                _age(now - runner.heartbeat_at),
                "; ".join(_worker(each, now) for each in runner.workers),
            )
            for runner in roster
        ]
        out.table(_TITLES, rows, empty="no runners; start one with: holdfast run")


def _age(seconds: float) -> str:
    """Return how old a heartbeat is; or that whoever stamped it has another clock than we have."""
    return f"{length(seconds)} ago" if seconds > -1 else f"{length(-seconds)} ahead of this clock"


def drain(
    context: typer.Context,
    id: RunnerId,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Ask a runner to end: it takes no more work, and what runs may end within its drain timeout."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        _ask(out, chosen, id, DRAIN)


def stop(
    context: typer.Context,
    id: RunnerId,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Ask a runner to end now: what runs is ended, and goes back to the queue."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        _ask(out, chosen, id, STOP)


def _ask(out: Output, app: App, id: str, wish: str) -> None:
    roster = with_store(app, lambda store: store.roster(app.name))
    runner = _found(out, roster, id)
    if not with_store(app, lambda store: store.ask_runner(app.name, runner.id, wish=wish)):
        out.fail("RunnerNotFound", f"runner {runner.id} has just left", code=NOT_FOUND)
    now = time_of(app)
    if _state(app, runner, now) == "dead":
        out.note(f"runner {runner.id} has been silent for {length(now - runner.heartbeat_at)} and may not hear it")
    if out.json:
        out.document({"id": runner.id, "asked": wish})
    else:
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
    if not living([runner], now, app.settings.runner_considered_dead_after_minutes * 60):
        return "dead"
    return "draining" if runner.draining else "alive"


def _worker(worker: WorkerRecord, now: float) -> str:
    since = worker.unresponsive_since
    silence = "" if since is None else f", has not answered for {seconds_in_words(now - since)}"
    return f"{worker.id}: pid {worker.pid}, {worker.running} running{silence}"


def _worker_facts(worker: WorkerRecord) -> dict[str, Any]:
    return msgspec.structs.asdict(worker) | {
        "started_at": moment(worker.started_at),
        "unresponsive_since": _moment(worker.unresponsive_since),
    }


def _running(runner: RunnerRecord) -> int:
    return sum(worker.running for worker in runner.workers)


def _queues(runner: RunnerRecord) -> str:
    if runner.queues is None:
        return "any"
    return ", ".join(f"{name}={runner.weights[name]}" if name in runner.weights else name for name in runner.queues)


def _serves(app: App, runner: RunnerRecord, now: float) -> str:
    """Whether it takes turns at the services."""
    if not runner.can_run_atomic_service or _state(app, runner, now) != "alive":
        return "no"
    if runner.sits_out_until is not None and now < runner.sits_out_until:
        return f"sits out for {length(runner.sits_out_until - now)}"
    return "yes"


def _facts(app: App, runner: RunnerRecord, now: float) -> dict[str, Any]:
    state = _state(app, runner, now)
    return msgspec.structs.asdict(runner) | {
        "state": state,
        "alive": state != "dead",
        "running": _running(runner),
        "capacity": runner.capacity,
        "workers": [_worker_facts(each) for each in runner.workers],
        "heartbeat_age_seconds": round(now - runner.heartbeat_at, 3),
        "heartbeat_at": moment(runner.heartbeat_at),
        "started_at": moment(runner.started_at),
        "sits_out_until": _moment(runner.sits_out_until),
    }


def _moment(at: float | None) -> str | None:
    return None if at is None else moment(at)


# --- services


def services(
    limit: Annotated[int, typer.Option(min=1, help="At most so many executions.")] = 10,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Tell whose turn it is to perform the services, why the others do not, and what was performed.

    The slots follow from the roster, the store's time and the settings that this command sees.
    """
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        view = _View(chosen, limit)
        if json:
            return out.document(view.facts())
        view.print(out)


class _View:
    """The services at one moment."""

    def __init__(self, app: App, limit: int) -> None:
        self._app = app
        self._settings: SlotSettings = app.settings.slots
        self._roster = with_store(app, lambda store: store.roster(app.name))
        trail = with_store(app, lambda store: store.executions(app.name, SERVICE, max(limit, 100)))
        self.now = time_of(app)
        self._trail = trail[:limit]
        self._at_it = next((one for one in trail if one.status is ExecutionStatus.RUNNING), None)
        self._members = members_of(self._roster)
        alive = living(self._roster, self.now, app.settings.runner_considered_dead_after_minutes * 60)
        self._silent = {runner.id for runner in self._roster} - {runner.id for runner in alive}
        self._windows = windows(self._members, self.now, self._settings)
        self._claims = {
            member.runner_id: decide_atomic_service_claim(member.runner_id, self._members, self.now, self._settings)
            for member in self._members
        }

    def print(self, out: Output) -> None:
        if not self._roster:
            out.line("no runners; start one with: holdfast run")
        else:
            start, end = self._cycle
            turns = f"{len(self._windows)} of {counted(len(self._roster), 'runner')} in turn"
            out.line(f"it is {moment(self.now)}, in the cycle from {moment(start)} to {moment(end)}: {turns}")
            out.line()
            rows = [
                (window.slot, member.runner_id, moment(window.starts_at), moment(window.ends_at), self._when(window))
                for member, window in self._windows
            ]
            out.table(("slot", "runner", "from", "to", ""), rows, empty="no runner has a slot")
            out.line()
            decisions = [(id, self._decision(id), self._why(id)) for id in self._claims]
            out.table(("runner", "decision", "why"), decisions)
        out.line()
        titles = ("started", "runner", "status", "for", "reason")
        out.table(titles, [self._line(one) for one in self._trail], empty="the services have not been performed yet")

    def facts(self) -> dict[str, Any]:
        start, end = self._cycle
        return {
            "service": SERVICE,
            "now": moment(self.now),
            "cycle": {"starts_at": moment(start), "ends_at": moment(end)},
            "slots": [
                {
                    "slot": window.slot,
                    "runner": member.runner_id,
                    "starts_at": moment(window.starts_at),
                    "ends_at": moment(window.ends_at),
                    "is_now": window.starts_at <= self.now < window.ends_at,
                }
                for member, window in self._windows
            ],
            "running": None if self._at_it is None else self._execution(self._at_it),
            "runners": [
                {
                    "id": id,
                    "decision": self._decision(id),
                    "until": None if claim.window is None else moment(claim.window.ends_at),
                    "why": self._why(id),
                }
                for id, claim in self._claims.items()
            ],
            "executions": [self._execution(one) for one in self._trail],
        }

    @property
    def _cycle(self) -> tuple[float, float]:
        interval = self._settings.interval_seconds
        start = self.now // interval * interval
        return start, start + interval

    def _when(self, window: Window) -> str:
        if self.now < window.starts_at:
            return f"in {length(window.starts_at - self.now)}"
        return "over" if self.now >= window.ends_at else "now"

    # --- why

    def _decision(self, id: str) -> str:
        """What it does now: one that is at it goes on to the end of its slot, whatever would be decided now."""
        if id in self._silent:
            return "silent"
        busy = self._at_it is not None and self._at_it.runner_id == id
        return "run" if busy else self._claims[id].reason or "run"

    def _why(self, id: str) -> str:
        """What the decision means, in words."""
        claim = self._claims[id]
        busy = self._at_it
        if id in self._silent:
            return "its heartbeat is overdue: it counts as dead, and its turn goes to others once that is declared"
        if busy is not None and busy.runner_id == id:
            return f"it has been at it for {length(self.now - busy.started_at)}, until {moment(busy.window_ends_at)}"
        if claim.window is not None:
            held = "" if busy is None else f", but {busy.runner_id} has been at it since {moment(busy.started_at)}"
            return f"its turn until {moment(claim.window.ends_at)}{held}"
        return self._skipped(next(member for member in self._members if member.runner_id == id), claim)

    def _skipped(self, member: Member, claim: AtomicServiceClaim) -> str:
        match claim.reason:
            case AtomicServiceSkip.NO_STABLE_RUNNERS:
                return f"no runner is able to; {self._unable(member)}"
            case AtomicServiceSkip.SLOT_WINDOW_INVALID:
                return "the margin between slots takes the whole slot: a longer interval or a shorter margin is needed"
            case AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE:
                return "whose turn it is has joined too recently"
            case AtomicServiceSkip.LATE_START:
                return "its turn, but too late to start in it"
        own = next((window for each, window in self._windows if each.runner_id == member.runner_id), None)
        if own is None:
            return self._unable(member)
        ahead = own.starts_at if own.starts_at > self.now else own.starts_at + self._settings.interval_seconds
        others = [each.runner_id for each, window in self._windows if window.starts_at <= self.now < window.ends_at]
        whose = f"the turn of {others[0]}" if others else "the gap between two slots"
        return f"{whose}; its own begins in {length(ahead - self.now)}"

    def _unable(self, member: Member) -> str:
        """Why it shares no cycle."""
        runner = next(runner for runner in self._roster if runner.id == member.runner_id)
        if runner.draining:
            return "it is about to stop"
        if not runner.can_run_atomic_service:
            return "its service loop does not move"
        if runner.schema < max(each.schema for each in self._roster):
            return "its code is older than the store's schema, which a newer runner has brought"
        if member.sits_out_until is not None and self.now < member.sits_out_until:
            left = length(member.sits_out_until - self.now)
            return f"it left its slot unused, and sits out for another {left}"
        count = len(sharing(self._members, self.now, self._settings))
        return f"the {count} oldest take turns, and it is younger"

    # --- executions

    def _line(self, one: Execution) -> tuple[object, ...]:
        return moment(one.started_at), one.runner_id, one.status.value, length(self._seconds(one)), one.reason

    def _execution(self, one: Execution) -> dict[str, Any]:
        return {
            "id": one.id,
            "runner": one.runner_id,
            "status": one.status.value,
            "started_at": moment(one.started_at),
            "ended_at": _moment(one.ended_at),
            "window_ends_at": moment(one.window_ends_at),
            "seconds": round(self._seconds(one), 3),
            "reason": one.reason,
        }

    def _seconds(self, one: Execution) -> float:
        return max(0.0, (self.now if one.ended_at is None else one.ended_at) - one.started_at)
