"""Questions about runners: which are there, what each runs, and which one has the services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.fleet.services import SERVICE, Executions
from holdfast.model.explain import living
from holdfast.model.records import InvocationRecord, RunnerRecord, runner_of
from holdfast.model.status import OWNED
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import fields, length
from holdfast.store.contract import Filter
from holdfast.web.documents import Document, invocation_document
from holdfast.web.reading.services import ServiceView

MOST_RUNNING = 200  # invocations that a list of runners names
_TRAIL = 100  # executions that are read to judge the present
DEAD, DRAINING, ALIVE = "dead", "draining", "alive"


class Roster(NamedTuple):
    """The runners at a moment."""

    runners: Sequence[RunnerRecord]
    now: float
    dead_after_seconds: float

    def state_of(self, runner: RunnerRecord) -> str:
        if not living([runner], self.now, self.dead_after_seconds):
            return DEAD
        return DRAINING if runner.draining else ALIVE

    def serves(self, runner: RunnerRecord) -> str:
        """Return whether a runner takes turns at the services."""
        if not runner.can_run_atomic_service or self.state_of(runner) != ALIVE:
            return "no"
        if runner.sits_out_until is not None and self.now < runner.sits_out_until:
            return f"sits out for {length(runner.sits_out_until - self.now)}"
        return "yes"

    def found(self, id: str) -> list[RunnerRecord]:
        """Return the runner of that id; else all whose ids begin with it, or else end with it."""
        whole = [runner for runner in self.runners if runner.id == id]
        begun = [runner for runner in self.runners if id and runner.id.startswith(id)]
        return whole or begun or [runner for runner in self.runners if id and runner.id.endswith(id)]

    def document(self) -> Document:
        return {"runners": [self.document_of(runner) for runner in self.runners]}

    def document_of(self, runner: RunnerRecord) -> Document:
        state = self.state_of(runner)
        return fields(runner) | {
            "state": state,
            "alive": state != DEAD,
            "running": running_of(runner),
            "capacity": runner.capacity,
            "workers": [fields(each) for each in runner.workers],
            "heartbeat_age_seconds": round(self.now - runner.heartbeat_at, 3),
        }


class WholeRunner(NamedTuple):
    """A runner, and the first of the calls that its workers own."""

    roster: Roster
    runner: RunnerRecord
    owned: Sequence[InvocationRecord]

    def document(self) -> Document:
        calls = [invocation_document(record) for record in self.owned]
        return self.roster.document_of(self.runner) | {"services": self.roster.serves(self.runner), "calls": calls}


def running_of(runner: RunnerRecord) -> int:
    """Return how many invocations ran at the last heartbeat."""
    return sum(worker.running for worker in runner.workers)


class RunnerReading:
    """Ask for runners. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def roster(self) -> Roster:
        engine = await self._runtime.engine()
        found = await engine.store.roster(engine.app)
        return Roster(found, engine.store.now(), engine.settings.dead_after_seconds)

    async def owned(self) -> dict[str, list[InvocationRecord]]:
        """Return calls that are owned, newest first, by the id of their runner; `MOST_RUNNING` at most."""
        engine = await self._runtime.engine()
        found: dict[str, list[InvocationRecord]] = {}
        for record in await engine.store.find(engine.app, Filter(statuses=OWNED), MOST_RUNNING):
            found.setdefault(runner_of(record.owner) or "", []).append(record)
        return found

    async def runner(self, id: str, *, limit: int = MOST_RUNNING) -> WholeRunner | None:
        """Return a runner by its whole id; None if it is not on the roster."""
        roster = await self.roster()
        runner = next((each for each in roster.runners if each.id == id), None)
        if runner is None:
            return None
        engine = await self._runtime.engine()
        owned = await engine.store.find(engine.app, Filter(runner=id, statuses=OWNED), limit)
        return WholeRunner(roster, runner, owned)

    async def services(self, limit: int = 10) -> ServiceView:
        """Return the slots of the services, why runners are skipped, and the last executions."""
        engine = await self._runtime.engine()
        trail = await Executions(engine.store, engine.app, SERVICE, 0).trail(max(limit, _TRAIL))
        roster = await engine.store.roster(engine.app)
        return ServiceView(roster, trail, limit, engine.store.now(), engine.settings)
