"""The services at a moment: whose turn it is on the cycle, why others are skipped, and the last executions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.fleet import slots
from holdfast.fleet.services import SERVICE, members_of
from holdfast.model.explain import living
from holdfast.model.records import RunnerRecord
from holdfast.settings import Settings
from holdfast.showing import fields, length, moment
from holdfast.web.documents import Document


class ServiceView:
    """The services at one moment; `trail` has the latest executions first, of which `limit` are shown."""

    def __init__(
        self,
        roster: Sequence[RunnerRecord],
        trail: Sequence[slots.Execution],
        limit: int,
        now: float,
        settings: Settings,
    ) -> None:
        self._settings = settings.slots
        self.roster, self.now, self.trail = roster, now, trail[:limit]
        self._at_it = next((one for one in trail if one.status is slots.ExecutionStatus.RUNNING), None)
        self._members = members_of(roster)
        alive = living(roster, now, settings.dead_after_seconds)
        self._silent = {runner.id for runner in roster} - {runner.id for runner in alive}
        self.windows = slots.windows(self._members, now, self._settings)
        self.claims = {
            member.runner_id: slots.decide_atomic_service_claim(member.runner_id, self._members, now, self._settings)
            for member in self._members
        }

    def document(self) -> Document:
        start, end = self.cycle
        return {
            "service": SERVICE,
            "now": moment(self.now),
            "cycle": {"starts_at": moment(start), "ends_at": moment(end)},
            "slots": [
                fields(window, "slot", "starts_at", "ends_at")
                | {"runner": member.runner_id, "is_now": window.starts_at <= self.now < window.ends_at}
                for member, window in self.windows
            ],
            "running": None if self._at_it is None else self._execution(self._at_it),
            "runners": [
                {"id": id, "decision": self.decision(id), "until": _end(claim.window), "why": self.why(id)}
                for id, claim in self.claims.items()
            ],
            "executions": [self._execution(one) for one in self.trail],
        }

    @property
    def cycle(self) -> tuple[float, float]:
        interval = self._settings.interval_seconds
        start = self.now // interval * interval
        return start, start + interval

    # --- why

    def decision(self, id: str) -> str:
        """Return what a runner does now. A runner that has begun goes on to the end of its slot."""
        if id in self._silent:
            return "silent"
        busy = self._at_it is not None and self._at_it.runner_id == id
        return "run" if busy else self.claims[id].reason or "run"

    def why(self, id: str) -> str:
        """Explain the decision about a runner."""
        claim = self.claims[id]
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
        own = next((window for each, window in self.windows if each.runner_id == member.runner_id), None)
        if own is None:
            return self._unable(member)
        ahead = own.starts_at if own.starts_at > self.now else own.starts_at + self._settings.interval_seconds
        others = [each.runner_id for each, window in self.windows if window.starts_at <= self.now < window.ends_at]
        whose = f"the turn of {others[0]}" if others else "the gap between two slots"
        return f"{whose}; its own begins in {length(ahead - self.now)}"

    def _unable(self, member: slots.Member) -> str:
        """Explain why a runner has no slot."""
        runner = next(runner for runner in self.roster if runner.id == member.runner_id)
        if runner.draining:
            return "it is about to stop"
        if not runner.can_run_atomic_service:
            return "its service loop does not move"
        if runner.schema < max(each.schema for each in self.roster):
            return "its code is older than the store's schema, which a newer runner has brought"
        if member.sits_out_until is not None and self.now < member.sits_out_until:
            left = length(member.sits_out_until - self.now)
            return f"it left its slot unused, and sits out for another {left}"
        count = len(slots.sharing(self._members, self.now, self._settings))
        return f"the {count} oldest take turns, and it is younger"

    # --- executions

    def _execution(self, one: slots.Execution) -> Document:
        facts = fields(one, "id", "status", "started_at", "ended_at", "window_ends_at", "reason")
        return facts | {"runner": one.runner_id, "seconds": round(self.seconds(one), 3)}

    def seconds(self, one: slots.Execution) -> float:
        return max(0.0, (self.now if one.ended_at is None else one.ended_at) - one.started_at)


def _end(window: slots.Window | None) -> str | None:
    return None if window is None else moment(window.ends_at)
