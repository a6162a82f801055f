"""The engine of one app in one process: a store, the hints, and the services over them.

Its parts get what they need as arguments; nobody here knows the app. It is built and used on one event loop.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from holdfast.clock import Clock, reached
from holdfast.codec import Codec, Limits
from holdfast.engine.archive import Archive
from holdfast.engine.cancel import GRACE_SECONDS, Canceller
from holdfast.engine.core_tasks import CoreTaskRegistry
from holdfast.engine.crew import Crew, LocalCrew
from holdfast.engine.declarations import Declaration, Declarations
from holdfast.engine.definition import Place, TaskDefinition, limits_of, names_of
from holdfast.engine.depot import Depot
from holdfast.engine.ends import Ends
from holdfast.engine.events import Events
from holdfast.engine.expiry import Expiry
from holdfast.engine.limits import Limits as RunningLimits
from holdfast.engine.permit import Permit
from holdfast.engine.recovery import Recovery, core_app
from holdfast.engine.retention import upkeep
from holdfast.engine.runner import RECOVER_PENDING, RECOVER_RUNNING, Runner, RunnerSettings
from holdfast.engine.running import MakePlaces
from holdfast.engine.schedule_book import ScheduleBook
from holdfast.engine.schedules import Scheduler
from holdfast.engine.services import Duty
from holdfast.engine.submit import Submitter
from holdfast.engine.subscriptions import Subscriptions
from holdfast.engine.suspects import PLACES_APART
from holdfast.engine.telling import MAX_DEPTH, Teller
from holdfast.engine.triggers import Sweep, TriggerBook
from holdfast.engine.watch import Watcher
from holdfast.engine.worker import Worker
from holdfast.execution.declared import refuse_while_importing
from holdfast.execution.hooks import Hooks
from holdfast.execution.loop import LoopThread
from holdfast.execution.places import Deliver, Execution, InlinePlaces, LoopPlaces, ThreadPlaces
from holdfast.execution.processes import ProcessPlaces
from holdfast.ids import Ids
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord, Serves
from holdfast.lifecycle.triggers import TriggerRecord
from holdfast.schedules import Cron
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

LIMITS = Limits(inline=64 * 2**10, most=512 * 2**20)
CHUNK_THRESHOLD = 15 * 2**20


class Engine:
    def __init__(
        self,
        *,
        app: str,
        store: Store,
        clock: Clock,
        ids: Ids,
        rng: random.Random,
        poll_interval_seconds: float,
        limits: Limits = LIMITS,
        chunk_threshold: int = CHUNK_THRESHOLD,
        cancel_grace_seconds: float = GRACE_SECONDS,
        trigger_max_depth: int = MAX_DEPTH,
    ) -> None:
        self.app = app
        self.store = store
        self.ids = ids
        self._clock = clock
        self._rng = rng
        self._poll = poll_interval_seconds
        self.hub = Hub()
        self.limits = limits
        self.depot = Depot(store, app=app, chunk_threshold=chunk_threshold)
        self.submitter = Submitter(store, self.depot, self.hub)
        self.archive = Archive(store, self.submitter, self.depot, app=app)
        self._grace = cancel_grace_seconds
        self.subscriptions = Subscriptions(store, app=app, monotonic=clock.monotonic)
        self.teller = Teller(
            store,
            self.submitter,
            self.depot,
            ids,
            self.subscriptions,
            app=app,
            limits=limits,
            max_depth=trigger_max_depth,
        )
        self.ends = Ends(store, self.subscriptions, self.teller, app=app)
        self.events = Events(store, self.subscriptions, self.teller, app=app)
        self.canceller = Canceller(store, self.ends, self.hub, ids, app=app, grace_seconds=cancel_grace_seconds)
        self.schedule_book = ScheduleBook(store, self.submitter, self.hub, ids, app=app)
        self.watcher = Watcher(store, self.hub, app, poll_interval_seconds)

    async def open(self, beside: object = None) -> None:
        """`beside`: see `holdfast.store.contract.Store.open`."""
        await (self.store.open() if beside is None else self.store.open(beside))
        self.hub.connect(self.store.hints())

    async def close(self) -> None:
        await self.ends.finish()
        await self.events.close()
        await self.subscriptions.close()
        await self.submitter.close()
        self.hub.connect(None)
        await self.store.close()

    def due_after(self, delay_seconds: float, now: float | None = None) -> float:
        """Return when a call is due that is to wait so long from now: not before, however far the store's clock is off.
        One that is not to wait is due by every clock.
        """
        now, error = self.store.now() if now is None else now, self.store.clock_error()
        return reached("delay", now + error, delay_seconds) if delay_seconds else now - error

    def worker(
        self,
        definitions: Iterable[TaskDefinition],
        codec: Codec,
        *,
        owner: str,
        serves: Serves,
        concurrency: int,
        permit: Permit,
        recovery: Recovery,
        drain_timeout_seconds: float,
        make_places: MakePlaces | None = None,
        hooks: Hooks | None = None,
        max_tasks: int | None = None,
        leaves_unfinished: bool = False,
        patience: int = 1,
        look_seconds: float = 2.0,
        for_core: bool = False,
    ) -> Worker:
        """A worker of these tasks, not started yet. Core tasks lie in an app of their own, and nobody pauses them.

        `patience`: how many polling intervals it waits before it looks by itself; `look_seconds`: how often it looks
        whether something that it runs was cancelled, if nobody tells.
        """
        refuse_while_importing()
        coroutines = LoopThread("holdfast-coroutines") if hooks else None

        def places(place: Place, deliver: Deliver) -> Execution:
            match place:
                case Place.THREAD:
                    return ThreadPlaces(concurrency, deliver)
                case Place.LOOP:
                    return LoopPlaces(deliver, coroutines)
                case Place.PROCESS:
                    return ProcessPlaces(concurrency, deliver)
                case Place.APART:
                    return ProcessPlaces(PLACES_APART, deliver, calls_per_process=1, with_hooks=True)

        return Worker(
            app=recovery.app,
            owner=owner,
            concurrency=concurrency,
            serves=serves,
            store=self.store,
            depot=self.depot,
            hub=self.hub,
            ids=self.ids,
            rng=self._rng,
            codec=codec,
            limits=self.limits,
            definitions=definitions,
            make_places=make_places or places,
            permit=permit,
            recovery=recovery,
            poll_interval_seconds=self._poll * patience,
            drain_timeout_seconds=drain_timeout_seconds,
            around=hooks.around(coroutines) if hooks and coroutines else None,
            max_tasks=max_tasks,
            leaves_unfinished=leaves_unfinished,
            look_seconds=look_seconds,
            for_core=for_core,
            cancel_grace_seconds=self._grace,
        )

    def recovery(self, app: str, duties: Duties) -> Recovery:
        return Recovery(
            self.store,
            self.ends,
            self.hub,
            self.ids,
            self._rng,
            app=app,
            max_crashes=duties.max_crash_recoveries,
            max_pending=duties.max_pending_seconds,
        )

    def runner(
        self,
        definitions: Iterable[TaskDefinition],
        codec: Codec,
        *,
        version: str,
        concurrency: int,
        queues: Iterable[str] | None = None,
        weights: Mapping[str, int] | None = None,
        tags: Iterable[str] = (),
        duties: Duties,
        drain_timeout_seconds: float,
        make_places: MakePlaces | None = None,
        make_crew: Callable[[RunnerRecord, Recovery], Crew] | None = None,
        hooks: Hooks | None = None,
        declared: Sequence[Declaration] = (),
        triggers: Sequence[TriggerRecord] = (),
    ) -> Runner:
        """A runner of these tasks, not started yet. Without a crew of its own it works in this process."""
        known, core, declarations = list(definitions), self._core_tasks(), self._declarations(declared, triggers)
        recovery, core_recovery = self.recovery(self.app, duties), self.recovery(core_app(self.app), duties)
        template = msgspec.structs.replace(
            self._entry(version, duties),
            concurrency=concurrency,
            queues=None if queues is None else tuple(sorted(queues)),
            weights=weights or {},
            tags=tuple(sorted(tags)),
            tasks=names_of(known),
            declares=declarations.names,
        )

        def record() -> RunnerRecord:
            now = self.store.now()
            return msgspec.structs.replace(template, id=self.ids.new(), started_at=now, heartbeat_at=now)

        def worker(owner: str, permit: Permit) -> Worker:
            return self.worker(
                known,
                codec,
                owner=owner,
                serves=template.serves,
                concurrency=concurrency,
                permit=permit,
                recovery=recovery,
                drain_timeout_seconds=drain_timeout_seconds,
                make_places=make_places,
                hooks=hooks,
                look_seconds=duties.runner.heartbeat_seconds,
            )

        runner = Runner(
            store=self.store,
            clock=self._clock,
            ids=self.ids,
            rng=self._rng,
            settings=duties.runner,
            make_record=record,
            crew=lambda: LocalCrew(worker, self.store.now) if make_crew is None else make_crew(template, recovery),
            core=core,
            make_core_worker=lambda owner, permit: self._core_worker(core, codec, core_recovery, owner, permit),
            recovery=recovery,
            core_recovery=core_recovery,
            hub=self.hub,
            declarations=declarations,
            duties=self._duties(known),
        )
        core.add(RECOVER_RUNNING, runner.recover_running, duties.recover_running_cron)
        core.add(RECOVER_PENDING, runner.recover_pending, duties.recover_pending_cron)
        return runner

    def _declarations(self, declared: Sequence[Declaration], triggers: Sequence[TriggerRecord]) -> Declarations:
        book = TriggerBook(self.store, self.subscriptions, triggers, app=self.app)
        return Declarations(self.store, self.schedule_book, declared, app=self.app, triggers=book)

    def _core_tasks(self) -> CoreTaskRegistry:
        monotonic = self._clock.monotonic
        return CoreTaskRegistry(
            self.store, self.submitter, self.hub, self.ids, app=core_app(self.app), monotonic=monotonic
        )

    def _entry(self, version: str, duties: Duties) -> RunnerRecord:
        """What a runner of this process has on the roster, whatever it serves."""
        return RunnerRecord(
            id="",
            app=self.app,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version,
            schema=self.store.schema_version,
            dead_after_seconds=duties.runner.dead_after_seconds,
            started_at=0.0,
            heartbeat_at=0.0,
            concurrency=0,
            tasks=(),
        )

    def _duties(self, definitions: Iterable[TaskDefinition]) -> tuple[Duty, ...]:
        """What services do for the tasks and the store."""
        expiry = Expiry(self.store, self.ends, self.hub, self.ids, app=self.app)
        slots = RunningLimits(self.store, self.hub, self.ids, app=self.app, limits=limits_of(definitions))
        scheduler = Scheduler(
            self.store,
            self.submitter,
            self.ids,
            app=self.app,
            cancel=self._take_its_place,
            emit=self.events.emit,
            monotonic=self._clock.monotonic,
            trust=lambda: self.hub.trust,
        )
        self.hub.on_schedules(scheduler.look_soon)
        sweep = Sweep(
            self.store,
            self.subscriptions,
            self.ends,
            self.events,
            self.teller,
            app=self.app,
            monotonic=self._clock.monotonic,
        )
        return (
            Duty(name="expiry", every_seconds=0.0, perform=expiry.sweep),  # it knows when it has to look
            Duty(name="schedules", every_seconds=0.0, perform=scheduler.fire_due),
            Duty(name="triggers", every_seconds=1.0, perform=sweep.sweep),
            Duty(name="limits", every_seconds=1.0, perform=slots.sweep),
            Duty(name="payloads", every_seconds=3600.0, perform=self._collect),
            *upkeep(self.store, self.app),
        )

    async def _take_its_place(self, record: InvocationRecord, why: str) -> None:
        await self.canceller.cancel([record.id], by="its schedule", reason=why)

    async def _collect(self) -> bool:
        return (await self.depot.collect()).more

    def _core_worker(
        self, core: CoreTaskRegistry, codec: Codec, recovery: Recovery, owner: str, permit: Permit
    ) -> Worker:
        """What runs core tasks, in this process, whatever the other workers do."""
        definitions = core.definitions
        return self.worker(
            definitions,
            codec,
            owner=owner,
            serves=Serves(tasks=frozenset(task.name for task in definitions)),
            concurrency=_CORE_PLACES,
            permit=permit,
            recovery=recovery,
            drain_timeout_seconds=0.0,
            make_places=lambda place, deliver: InlinePlaces(deliver),
            patience=_CORE_PATIENCE,
            for_core=True,
        )


_CORE_PLACES = 2
_CORE_PATIENCE = 4  # there is next to nothing to find, and their cron fires again


class Duties(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of what runners do beside user code."""

    runner: RunnerSettings
    max_crash_recoveries: int = 3
    max_pending_seconds: float = 5.0
    recover_running_cron: Cron
    recover_pending_cron: Cron
