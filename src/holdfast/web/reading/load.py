"""What goes on now: runners with what they run, queues with what waits, and what ended and failed of late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.model.explain import living
from holdfast.model.records import InvocationRecord, RunnerRecord, runner_of
from holdfast.model.status import OWNED
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.queues import Queue, Queues
from holdfast.showing import brief, fields, moment
from holdfast.stats import Stats
from holdfast.stats.api import question, read_stats
from holdfast.store.contract import Filter
from holdfast.web.documents import Document, invocation_document
from holdfast.web.reading.queues import MOST_COUNTED

SINCE = "5m"
_MOST_CALLS = 200  # that run, of all runners
_MOST_FAILURES = 5


class RunnerLoad(NamedTuple):
    """A runner, whether it is alive, draining or dead, and the newest of the calls that it runs."""

    runner: RunnerRecord
    state: str
    calls: Sequence[InvocationRecord]

    @property
    def running(self) -> int:
        return sum(worker.running for worker in self.runner.workers)

    def document(self, now: float) -> Document:
        return fields(self.runner, "id", "host", "pid", "version", "draining") | {
            "state": self.state,
            "running": self.running,
            "capacity": self.runner.capacity,
            "heartbeat_age_seconds": round(now - self.runner.heartbeat_at, 3),
            "workers": [fields(each, "id", "pid", "running") for each in self.runner.workers],
            "calls": [invocation_document(call) for call in self.calls],
        }


class Load(NamedTuple):
    """The load of an app at a moment."""

    at: float
    runners: Sequence[RunnerLoad]
    queues: Sequence[Queue]
    stats: Stats

    @property
    def alive(self) -> list[RunnerLoad]:
        return [each for each in self.runners if each.state != "dead"]

    def document(self) -> Document:
        total = self.stats.total
        counts = fields(total, "succeeded", "failed", "cancelled", "retried", "lost")
        return {
            "at": moment(self.at),
            "runners": [each.document(self.at) for each in self.runners],
            "queues": [
                fields(each) | {"pause": each.pause and fields(each.pause, "at", "by", "reason")}
                for each in self.queues
            ],
            "since": moment(self.stats.since),
            "ended": {**counts, "per_second": round(total.per_second, 3)},
            "wait_p95_seconds": total.wait.percentile(95),
            "run_p95_seconds": total.run.percentile(95),
            "failures": [
                fields(each, "task", "count", "retried", "last_at") | {"error": brief(each.error)}
                for each in self.stats.failures[:_MOST_FAILURES]
            ],
        }


class LoadReading:
    """Ask for the load. Its cost grows with runners and queues, not with what waits or has ended: a number of a queue
    over `MOST_COUNTED` is a lower bound.
    """

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._queues = Queues(runtime)

    def load(self) -> Load:
        """Return the load, for commands."""
        return self._runtime.run(self._load(self._queues.list(most=MOST_COUNTED + 1)))

    async def _load(self, queues: Sequence[Queue]) -> Load:
        engine = await self._runtime.engine()
        store, now = engine.store, engine.store.now()
        roster = await store.roster(engine.app)
        alive = {each.id for each in living(roster, now, engine.settings.dead_after_seconds)}
        calls = await store.find(engine.app, Filter(statuses=OWNED), _MOST_CALLS)
        runners = [
            RunnerLoad(each, _state(each, alive), [call for call in calls if runner_of(call.owner) == each.id])
            for each in roster
        ]
        return Load(now, runners, queues, await read_stats(engine, question(now, SINCE)))


def _state(runner: RunnerRecord, alive: set[str]) -> str:
    if runner.id not in alive:
        return "dead"
    return "draining" if runner.draining else "alive"
