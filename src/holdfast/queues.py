"""Queues in Python: ``app.queues`` lists, pauses and resumes them."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.lifecycle.explain import living
from holdfast.lifecycle.names import valid_name
from holdfast.lifecycle.queues import QueueDepth, QueuePause, rates
from holdfast.lifecycle.records import PAUSES, Hint, RunnerRecord, kept_text

if TYPE_CHECKING:
    from holdfast.app import App


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at a moment: how many are `waiting` for a runner, `scheduled` for later, `blocked` by a limit and
    `running`; for how long the oldest of those that wait has been due; how many calls have ended `per_minute` of late;
    how many live runners serve it; and the pause, if it is paused.
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
    """The queues of an app. Every method has an async sister with an `a` in front."""

    def __init__(self, app: App) -> None:
        self._app = app

    def list(self) -> Sequence[Queue]:
        """The queues that have work, are declared by a task of this app, are served by name, or are paused."""
        return self._app._run(self._list())

    async def alist(self) -> Sequence[Queue]:
        return await self._app._arun(self._list())

    def pause(self, name: str, *, reason: str = "", by: str | None = None) -> QueuePause:
        """Let no runner take work from this queue until it is resumed. What runs goes on, and what is submitted waits.

        The pause that is in force: this one, or that of somebody who was first. `by` is the user and the host, if
        nothing is said. It need not be in use yet.
        """
        return self._app._run(self._pause(name, reason, by))

    async def apause(self, name: str, *, reason: str = "", by: str | None = None) -> QueuePause:
        return await self._app._arun(self._pause(name, reason, by))

    def resume(self, name: str) -> bool:
        """End the pause of a queue. False: it was not paused."""
        return self._app._run(self._resume(name))

    async def aresume(self, name: str) -> bool:
        return await self._app._arun(self._resume(name))

    # --- inside

    async def _pause(self, name: str, reason: str, by: str | None) -> QueuePause:
        engine = await self._app._engine()
        wanted = QueuePause(
            app=self._app.name,
            name=valid_name("queue", name),
            at=engine.store.now(),
            by=_somebody() if by is None else kept_text("by", by),
            reason=kept_text("reason", reason),
            operation=engine.ids.operation(),
        )
        in_force = await engine.store.pause_queue(wanted)
        engine.hub.send(Hint(PAUSES, (name,)))
        return wanted if in_force is None else in_force

    async def _resume(self, name: str) -> bool:
        engine = await self._app._engine()
        ended = await engine.store.resume_queue(self._app.name, valid_name("queue", name), engine.ids.operation())
        engine.hub.send(Hint(PAUSES, (name,)))
        return ended

    async def _list(self) -> Sequence[Queue]:
        app, store = self._app, (await self._app._engine()).store
        now = store.now()
        depths = {depth.name: depth for depth in await store.queue_depths(app.name, now)}
        pauses = {pause.name: pause for pause in await store.pauses(app.name)}
        alive = living(await store.roster(app.name), now, app._dead_after)
        declared = {queue for task in app.tasks.values() for queue in task.definition.queues}
        served = {queue for runner in alive for queue in runner.queues or ()}
        names = sorted(depths.keys() | pauses.keys() | declared | served)
        per_minute = rates(alive, now)
        return [_queue(name, depths, pauses, alive, per_minute, now) for name in names]


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


def _somebody() -> str:
    """Who this is, as far as the system knows."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):  # a user without a name, as in many containers
        return f"somebody@{socket.gethostname()}"
