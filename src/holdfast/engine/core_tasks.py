"""Core tasks: Holdfast's own duties, run as ordinary tasks.

They are stored, claimed, recovered and explained like anybody's, in an app of their own beside the user's, so that they
are in nobody's lists and counts. They run in the runner itself, where a house full of user code cannot starve them.

Their schedules are stored and fired like anybody's, and their crons come from the settings. If one is waiting already,
another would find nothing to do, and the tick passes. Of each core task one runs at a time (running concurrency
"task"), and none for longer than a minute: what hangs must not keep the others from doing its work.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.codec import Codec
from holdfast.crashpoints import crashpoint
from holdfast.engine.concurrency import Concurrency, RunningConcurrency
from holdfast.engine.declarations import Declaration, Declarations
from holdfast.engine.definition import Place, TaskDefinition, limits_of
from holdfast.engine.limits import Limits
from holdfast.engine.schedule_book import ScheduleBook
from holdfast.engine.schedules import Scheduler
from holdfast.engine.submit import Submitter
from holdfast.ids import Ids, derived_id
from holdfast.lifecycle.limits import limit_key
from holdfast.lifecycle.records import InvocationRecord, registered
from holdfast.lifecycle.schedules import KIND, Call, CatchUp, Rules
from holdfast.lifecycle.status import AVAILABLE, Status
from holdfast.schedules import Cron
from holdfast.store.contract import Filter, Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.core")

QUEUE = "holdfast"
_WAITING = AVAILABLE | {Status.CONCURRENCY_CONTROLLED}


async def _never(record: InvocationRecord, why: str) -> None:
    """They do not take each other's place."""


KEPT_SECONDS = 3600.0
_LOOK_SECONDS = 10.0  # nobody makes new ones; when each is due is known
LONGEST_SECONDS = 60.0
_CHECK_SECONDS = 60.0  # between two looks whether a schedule is further than the clock
_SOON_SECONDS = 1.0
_FEW = 20


class CoreTask(msgspec.Struct, frozen=True, kw_only=True):
    """`function` takes nothing and answers what it did, for the record."""

    name: str
    function: Callable[[], Awaitable[object]]
    cron: Cron


class CoreTaskRegistry:
    """The core tasks of one runner, and when each is due."""

    def __init__(
        self, store: Store, submitter: Submitter, hub: Hub, ids: Ids, *, app: str, monotonic: Callable[[], float]
    ) -> None:
        self._store = store
        self._hub = hub
        self._submitter = submitter
        self._ids = ids
        self.app = app
        self._tasks: dict[str, CoreTask] = {}
        self._limits: Limits | None = None
        self._scheduler = Scheduler(
            store, submitter, ids, app=app, cancel=_never, monotonic=monotonic, look_seconds=_LOOK_SECONDS
        )
        self._book = ScheduleBook(store, submitter, hub, ids, app=app)
        self._no_arguments = Codec().encode_call((), {})
        self._monotonic = monotonic
        self._check_at = monotonic() + _CHECK_SECONDS

    def add(self, name: str, function: Callable[[], Awaitable[object]], cron: Cron) -> None:
        async def bounded() -> object:
            async with asyncio.timeout(LONGEST_SECONDS):
                return await function()

        self._tasks[name] = CoreTask(name=name, function=bounded, cron=cron)

    @property
    def definitions(self) -> list[TaskDefinition]:
        return [
            TaskDefinition(
                name=task.name,
                function=task.function,
                signature=inspect.signature(task.function),
                place=Place.LOOP,
                queue=QUEUE,
                concurrency=Concurrency(mode=RunningConcurrency.TASK),
            )
            for task in self._tasks.values()
        ]

    async def register(self) -> None:
        """Store their schedules. One that has changed takes effect from now on."""
        declared = [
            Declaration(
                name=task.name,
                timing=task.cron,
                call=Call(task=task.name, arguments=self._no_arguments, queue=QUEUE, limit_key=limit_key(task.name)),
                rules=Rules(unique=True, catch_up=CatchUp.NONE),
            )
            for task in self._tasks.values()
        ]
        await Declarations(self._store, self._book, declared, app=self.app).register()

    async def fire_due(self) -> bool:
        more = await self._scheduler.fire_due()
        if self._monotonic() >= self._check_at:
            self._check_at = self._monotonic() + _CHECK_SECONDS
            await self._fire_overdue()
        return more

    async def _fire_overdue(self) -> None:
        """Store schedules anew that were damaged, and set aside. Fire those whose schedule is further than the clock:
        it was set back, or a runner whose clock was ahead had the services. A user's schedule rests then, since its
        ticks are decided; a duty cannot.
        """
        now = self._store.now()
        entries = await self._store.entries(self.app, KIND, list(self._tasks))
        if len(entries) < len(self._tasks):
            log.warning("store the schedules of core tasks anew: %d are gone", len(self._tasks) - len(entries))
            await self.register()
        for entry in entries:
            next_two = list(self._tasks[entry.name].cron.ticks(now, limit=2))
            if (math.inf if entry.due_at is None else entry.due_at) > max(next_two, default=math.inf):
                await self.fire(entry.name, f"its schedule is ahead of the clock at {now:.0f}")

    async def fire(self, name: str, cause: str) -> None:
        """Let it run once for this cause, soon; unless a run is waiting, which will do."""
        now = self._store.now()
        where = Filter(statuses=_WAITING, tasks=frozenset({name}))
        waiting = await self._store.find(self.app, where, _FEW, set_aside=True)
        if any(record.due_at <= now + _SOON_SECONDS for record in waiting):  # later: put off by a wrong clock
            return
        record = InvocationRecord(
            id=derived_id("core", self.app, name, cause),
            app=self.app,
            task=name,
            arguments=self._no_arguments,
            queue=QUEUE,
            limit_key=limit_key(name),
            created_at=now,
            due_at=now,
        )
        crashpoint("core.before")
        await self._submitter.submit([registered(record, operation=self._ids.operation(), at=now, why=cause)])
        crashpoint("core.after")

    async def sweep(self) -> int:
        """Let go on who waits for one that has ended."""
        if self._limits is None:
            limits = limits_of(self.definitions)
            self._limits = Limits(self._store, self._hub, self._ids, app=self.app, limits=limits)
        return await self._limits.sweep()

    async def forget_old(self) -> None:
        """Remove the runs of more than an hour ago."""
        await self._store.remove_final(self.app, self._store.now() - KEPT_SECONDS, 1000)
