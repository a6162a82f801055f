"""Core tasks: Holdfast's own duties, run as ordinary tasks.

They are stored, claimed, recovered and explained like a user's tasks. They have their own app beside the user's, so no
list or count of the user contains them. They run in the runner itself, where user code cannot starve them. Their
schedules are stored and fired as usual, and their crons come from the settings. If a run is waiting already, another
would find nothing to do, and the tick passes. Of each core task one run is active at a time (running concurrency
"task"), for at most a minute: a run that hangs must not keep the others from doing its work. A run that the store
leaves without an answer is tried again 0.1 s later, then with growing pauses, six times in 6 s: the next tick would be
a whole period later.

`CoreWorker` keeps the worker that runs them. If it breaks (a defect, or an unexpected error), the heartbeats of the
runner would go on, and the services would go on firing tasks that no worker runs. So a successor takes its place, under
the same name, after a pause that grows; the audit of that name finds what was left behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreUnavailable
from holdfast.ids import derived_id
from holdfast.model.limits import Limit, limit_key
from holdfast.model.records import OUTCOMES, InvocationRecord, Terms, registered
from holdfast.model.retries import Exponential, Only, dump_policy
from holdfast.model.status import AVAILABLE, Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition, limits_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import wait_for
from holdfast.runtime.limits import Limits
from holdfast.runtime.worker import Worker
from holdfast.schedules.timing import Cron
from holdfast.store.contract import Ability, Filter
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import DutyFailed

QUEUE = "holdfast"
_WAITING = AVAILABLE | {Status.CONCURRENCY_CONTROLLED}


KEPT_SECONDS = 3600.0
_SOON_SECONDS = 1.0
_AGAIN = Only(Exponential(6, 0.1, jitter=False), StoreUnavailable)
TERMS = Terms(retries=dump_policy(_AGAIN), retention=dict.fromkeys(OUTCOMES, KEPT_SECONDS))
LONGEST_SECONDS = 60.0
_FEW = 20
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
_WELL_SECONDS = 60.0  # a worker that lived as long was well; the next pause is short again


class CoreTask(msgspec.Struct, frozen=True, kw_only=True):
    """A core task. `function` takes nothing and returns what it did, for the record."""

    name: str
    function: Callable[[], Awaitable[object]]
    cron: Cron


class CoreTaskRegistry:
    """Hold the core tasks of one runner. `engine` is that for core tasks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.app = engine.app
        self._store = engine.store
        self._ids = engine.ids
        self.tasks: dict[str, CoreTask] = {}
        self._limits: Limits | None = None
        self.no_arguments = engine.codec.encode_call((), {})

    def add(self, name: str, function: Callable[[], Awaitable[object]], cron: Cron) -> None:
        async def bounded() -> object:
            async with asyncio.timeout(LONGEST_SECONDS):
                return await function()

        self.tasks[name] = CoreTask(name=name, function=bounded, cron=cron)

    @property
    def definitions(self) -> list[TaskDefinition]:
        return [
            TaskDefinition(
                name=task.name,
                function=task.function,
                signature=inspect.signature(task.function),
                executor=ExecutorKind.LOOP,
                queue=QUEUE,
                limit=Limit(1),
            )
            for task in self.tasks.values()
        ]

    async def fire(self, name: str, cause: str) -> None:
        """Submit one run for this cause, unless a run is waiting already."""
        now = self._store.now()
        where = Filter(statuses=_WAITING, tasks=frozenset({name}))
        waiting = await self._store.find(self.app, where, _FEW, set_aside=True)
        if any(record.due_at <= now + _SOON_SECONDS for record in waiting):  # later: put off by a wrong clock
            return
        record = InvocationRecord(
            id=derived_id("core", self.app, name, cause),
            app=self.app,
            task=name,
            arguments=self.no_arguments,
            queue=QUEUE,
            limit_key=limit_key(name),
            terms=TERMS,
            created_at=now,
            due_at=now,
        )
        crashpoint("core.before")
        await self.engine.submitter.submit([registered(record, operation=self._ids.operation(), at=now, why=cause)])
        crashpoint("core.after")

    async def sweep(self) -> int:
        """Release waiters of core tasks whose slot is free."""
        if self._limits is None:
            self._limits = Limits(self.engine, limits_of(self.definitions))
        return await self._limits.sweep()

    async def forget_old(self) -> None:
        """Remove the runs of more than an hour ago, unless the store does so by itself."""
        if Ability.TTL not in self._store.abilities:
            await self._store.remove_expired(self.app, self._store.now(), 1000)


class CoreWorker:
    """Keep a worker for core tasks; `make` makes one."""

    def __init__(self, make: Callable[[], Worker], clock: Clock, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._make = make
        self._clock = clock
        self._worker = make()
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop` or `fence`."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            began = self._clock.monotonic()
            try:
                await self._worker.run()
                return
            except Exception as error:
                self._telemetry.emit(DutyFailed("runner", "run core tasks; another worker will", error))
                if self._ending.is_set():
                    return
                if self._clock.monotonic() - began > _WELL_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
            if await wait_for(self._ending, pause):
                return
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            self._worker = self._make()

    def stop(self, *, hurry: bool = False) -> None:
        self._ending.set()
        self._worker.stop(hurry=hurry)

    def fence(self) -> None:
        self._ending.set()
        self._worker.fence()
