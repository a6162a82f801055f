"""``holdfast services``: which runner has its turn, why others wait, and the last executions."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.fleet import slots
from holdfast.fleet.services import SERVICE, Executions, members_of
from holdfast.model.explain import living
from holdfast.model.names import counted
from holdfast.settings import SlotSettings
from holdfast.showing import fields, length, moment


@command()
def services(
    out: Output, app: App, limit: Annotated[int, Option(min=1, help="At most so many executions.")] = 10
) -> None:
    """Show which runner performs the services.

    It says why the others do not, and lists the last executions. The slots follow from the
    roster, the store's time and the settings that this command sees.
    """
    view = _View(app, limit)
    out.document(view.facts())
    view.print(out)


class _View:
    """The services at one moment."""

    def __init__(self, app: App, limit: int) -> None:
        self._settings: SlotSettings = app.settings.slots
        self._roster = reach.roster(app)
        trail = reach.with_store(app, lambda store: Executions(store, app.name, SERVICE, 0).trail(max(limit, 100)))
        self.now = reach.time_of(app)
        self._trail = trail[:limit]
        self._at_it = next((one for one in trail if one.status is slots.ExecutionStatus.RUNNING), None)
        self._members = members_of(self._roster)
        alive = living(self._roster, self.now, app.settings.dead_after_seconds)
        self._silent = {runner.id for runner in self._roster} - {runner.id for runner in alive}
        self._windows = slots.windows(self._members, self.now, self._settings)
        self._claims = {
            member.runner_id: slots.decide_atomic_service_claim(
                member.runner_id, self._members, self.now, self._settings
            )
            for member in self._members
        }

    def print(self, out: Output) -> None:
        if not self._roster:
            out.line("no runners; start one with: holdfast run")
        else:
            start, end = self._cycle
            turns = f"{len(self._windows)} of {counted(len(self._roster), 'runner')} in turn"
            cycle = f"{moment(start)} to {moment(end)}"
            out.facts([("time", moment(self.now)), ("cycle", cycle), ("slots", turns)])
            out.line()
            rows = [
                (window.slot, member.runner_id, _span(window), self._when(window)) for member, window in self._windows
            ]
            out.table(("slot", "runner", "from", "when"), rows, empty="no runner has a slot")
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
                fields(window, "slot", "starts_at", "ends_at")
                | {"runner": member.runner_id, "is_now": window.starts_at <= self.now < window.ends_at}
                for member, window in self._windows
            ],
            "running": None if self._at_it is None else self._execution(self._at_it),
            "runners": [
                {"id": id, "decision": self._decision(id), "until": _end(claim.window), "why": self._why(id)}
                for id, claim in self._claims.items()
            ],
            "executions": [self._execution(one) for one in self._trail],
        }

    @property
    def _cycle(self) -> tuple[float, float]:
        interval = self._settings.interval_seconds
        start = self.now // interval * interval
        return start, start + interval

    def _when(self, window: slots.Window) -> str:
        if self.now < window.starts_at:
            return f"in {length(window.starts_at - self.now)}"
        return "over" if self.now >= window.ends_at else "now"

    # --- why

    def _decision(self, id: str) -> str:
        """Return what a runner does now. A runner that has begun goes on to the end of its slot."""
        if id in self._silent:
            return "silent"
        busy = self._at_it is not None and self._at_it.runner_id == id
        return "run" if busy else self._claims[id].reason or "run"

    def _why(self, id: str) -> str:
        """Explain the decision about a runner."""
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

    def _skipped(self, member: slots.Member, claim: slots.AtomicServiceClaim) -> str:
        match claim.reason:
            case slots.AtomicServiceSkip.NO_STABLE_RUNNERS:
                return f"no runner is able to; {self._unable(member)}"
            case slots.AtomicServiceSkip.SLOT_WINDOW_INVALID:
                return "the margin between slots takes the whole slot: a longer interval or a shorter margin is needed"
            case slots.AtomicServiceSkip.SCHEDULED_RUNNER_IN_GRACE:
                return "the runner with this turn has joined too recently"
            case slots.AtomicServiceSkip.LATE_START:
                return "its turn, but too late to start in it"
        own = next((window for each, window in self._windows if each.runner_id == member.runner_id), None)
        if own is None:
            return self._unable(member)
        ahead = own.starts_at if own.starts_at > self.now else own.starts_at + self._settings.interval_seconds
        others = [each.runner_id for each, window in self._windows if window.starts_at <= self.now < window.ends_at]
        whose = f"the turn of {others[0]}" if others else "the gap between two slots"
        return f"{whose}; its own begins in {length(ahead - self.now)}"

    def _unable(self, member: slots.Member) -> str:
        """Explain why a runner has no slot."""
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
        count = len(slots.sharing(self._members, self.now, self._settings))
        return f"the {count} oldest take turns, and it is younger"

    # --- executions

    def _line(self, one: slots.Execution) -> tuple[object, ...]:
        return moment(one.started_at), one.runner_id, one.status.value, length(self._seconds(one)), one.reason

    def _execution(self, one: slots.Execution) -> dict[str, Any]:
        facts = fields(one, "id", "status", "started_at", "ended_at", "window_ends_at", "reason")
        return facts | {"runner": one.runner_id, "seconds": round(self._seconds(one), 3)}

    def _seconds(self, one: slots.Execution) -> float:
        return max(0.0, (self.now if one.ended_at is None else one.ended_at) - one.started_at)


def _span(window: slots.Window) -> str:
    """Return the times of a window without their date, so that a line fits a terminal."""
    return f"{moment(window.starts_at)[11:23]} to {moment(window.ends_at)[11:]}"


def _end(window: slots.Window | None) -> str | None:
    return None if window is None else moment(window.ends_at)
