"""Queues in Python: ``app.queues`` lists, pauses and resumes them."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.model.explain import living
from holdfast.model.names import valid_name
from holdfast.model.queues import QueueDepth, QueuePause, rates
from holdfast.model.records import PAUSES, Hint, RunnerRecord, kept_text
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.engine import Engine
from holdfast.runtime.pauses import pause_queue, pauses_of, resume_queue


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at a moment: how many invocations are `waiting` for a runner, `scheduled` for later, `blocked` by a limit
    and `running`. Further fields are the age of the oldest waiting call, the ends `per_minute` of late, the number of
    live runners that serve the queue, and its pause.
    """

    name: str
    waiting: int
    scheduled: int
    blocked: int
    running: int
    oldest_seconds: float | None
    per_minute: float
    runners: int
    pause: QueuePause | None


class Queues:
    """The queues of an app. Every blocking method has an async one with an `a` in front."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    @blocking
    async def list(self, engine: Engine, *, most: int | None = None) -> Sequence[Queue]:
        """Return the queues that have work, are declared by a task of this app, are served by name, or are paused. With
        `most`, a number from there on is a lower bound, and the cost does not grow with what waits.
        """
        runtime, store = self._runtime, engine.store
        now = store.now()
        depths = {depth.name: depth for depth in await store.queue_depths(runtime.name, now, most)}
        pauses = {pause.name: pause for pause in await pauses_of(store, runtime.name)}
        alive = living(await store.roster(runtime.name), now, runtime.settings.dead_after_seconds)
        declared = {queue for task in runtime.tasks.values() for queue in task.definition.queues}
        served = {queue for runner in alive for queue in runner.queues or ()}
        names = sorted(depths.keys() | pauses.keys() | declared | served)
        per_minute = rates(alive, now)
        return [_queue(name, depths, pauses, alive, per_minute, now) for name in names]

    alist = awaited(list)

    @blocking
    async def pause(self, engine: Engine, name: str, *, reason: str = "", by: str | None = None) -> QueuePause:
        """Let no runner take work from this queue until it is resumed. Running work goes on, and new work waits.

        Return the pause that is in force: this one, or an earlier one. `by` is the user and the host, if nothing is
        given. The queue need not be in use yet.
        """
        wanted = QueuePause(
            app=self._runtime.name,
            name=valid_name("queue", name),
            at=engine.store.now(),
            by=user_and_host() if by is None else kept_text("by", by),
            reason=kept_text("reason", reason),
            operation=engine.ids.operation(),
        )
        in_force = await pause_queue(engine.store, wanted)
        engine.hub.send(Hint(PAUSES, (name,)))
        return wanted if in_force is None else in_force

    apause = awaited(pause)

    @blocking
    async def resume(self, engine: Engine, name: str) -> bool:
        """End the pause of a queue. Return False if it was not paused."""
        queue, operation = valid_name("queue", name), engine.ids.operation()
        ended = await resume_queue(engine.store, self._runtime.name, queue, operation)
        engine.hub.send(Hint(PAUSES, (name,)))
        return ended

    aresume = awaited(resume)


def _queue(
    name: str,
    depths: Mapping[str, QueueDepth],
    pauses: Mapping[str, QueuePause],
    alive: Sequence[RunnerRecord],
    per_minute: Mapping[str, float],
    now: float,
) -> Queue:
    depth = depths.get(name, QueueDepth(name=name))
    oldest = None if depth.oldest_due_at is None else max(0.0, now - depth.oldest_due_at)
    serving = [runner for runner in alive if not runner.draining and (runner.queues is None or name in runner.queues)]
    return Queue(
        name=name,
        waiting=depth.waiting,
        scheduled=depth.scheduled,
        blocked=depth.blocked,
        running=depth.running,
        oldest_seconds=oldest,
        per_minute=round(per_minute.get(name, 0.0), 1),
        runners=len(serving),
        pause=pauses.get(name),
    )


def user_and_host() -> str:
    """Return the user of this process, as far as the system knows."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):  # a user without a name, as in many containers
        return f"unknown@{socket.gethostname()}"
