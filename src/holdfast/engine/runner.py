"""A runner: on the roster, with a crew that works and duties towards the fleet.

It joins the roster before its crew claims anything, beats its heart, watches the others, takes its turn at the services
and runs core tasks in this process; its crew runs user code. When it stops, the crew hands back or finishes what it
holds before the runner leaves the roster, so nothing waits for a recovery after a clean stop.

A runner that was declared dead while it could not be heard (it was frozen, or cut off) finds out with its next
heartbeat. Its work belongs to others by then: the crew ends without a write, and the runner starts a new life under a
new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.engine.account import Account
from holdfast.engine.core_tasks import CoreTaskRegistry
from holdfast.engine.core_worker import CoreWorker
from holdfast.engine.crew import Crew
from holdfast.engine.declarations import Declarations
from holdfast.engine.ending import end_all
from holdfast.engine.heart import Heart
from holdfast.engine.observer import Observer
from holdfast.engine.patience import Patience
from holdfast.engine.pauses import PauseWatch
from holdfast.engine.permit import Permit
from holdfast.engine.recovery import Recovery
from holdfast.engine.services import Duty, Services
from holdfast.engine.worker import Worker
from holdfast.errors import StoreError
from holdfast.ids import Ids
from holdfast.lifecycle.records import DRAIN, ROSTER, STOP, Hint, RunnerRecord, runner_of
from holdfast.lifecycle.slots import SlotSettings
from holdfast.store.contract import Ability, Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.runner")

RECOVER_RUNNING = "holdfast:recover_running_invocations"
RECOVER_PENDING = "holdfast:recover_pending_invocations"


_LEAVING_SECONDS = 5.0  # for a store that does not answer
_FIRST_PAUSE_SECONDS = 0.1  # before another life; twice as long after each that was shorter than a dead-after time


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner needs to know, in seconds."""

    heartbeat_seconds: float
    dead_after_seconds: float
    slots: SlotSettings


class Runner:
    """`make_record` gives each of its lives an entry for the roster, `make_core_worker` a worker for core tasks."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        ids: Ids,
        rng: random.Random,
        settings: RunnerSettings,
        make_record: Callable[[], RunnerRecord],
        crew: Callable[[], Crew],
        core: CoreTaskRegistry,
        make_core_worker: Callable[[str, Permit], Worker],
        recovery: Recovery,
        core_recovery: Recovery,
        hub: Hub,
        declarations: Declarations,
        duties: tuple[Duty, ...] = (),
    ) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._rng = rng
        self._settings = settings
        self._make_record = make_record
        self._make_crew = crew
        self._core = core
        self._make_core_worker = make_core_worker
        self._recovery = recovery
        self._core_recovery = core_recovery
        self._hub = hub
        self._declarations = declarations
        self._more_duties = duties
        self._patience = Patience(rng)
        self._steady: Callable[[], float] = lambda: 0.0
        self._stopping = False
        self._hurry = False
        self._stop = asyncio.Event()
        self._crew: Crew | None = None
        self._permit: Permit | None = None
        self.record: RunnerRecord | None = None
        self.account = Account()

    async def run(self, ready: Callable[[], None] = lambda: None) -> Account:
        """Work until `stop`. Returns what was done; `ready` is called when its crew first looks for work."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping:
            began = self._clock.monotonic()
            try:
                await self._live(ready)
            except StoreError as error:
                if not self._stop.is_set():
                    raise
                log.warning("runner %s ends while the store is away: %s", self._id, error)
            longest = self._settings.dead_after_seconds
            if self._clock.monotonic() - began > longest:
                pause = _FIRST_PAUSE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
            pause = min(pause * 2, longest)
        return self.account

    def stop(self, *, hurry: bool = False) -> None:
        """Take no more work and end when what runs is done; `hurry` ends it now."""
        self._stopping = True
        self._hurry = self._hurry or hurry
        self._patience.give_up_in(0)
        self._stop.set()
        if self._crew is not None:
            self._crew.stop(hurry=hurry)

    def kill_workers(self) -> None:
        """Before this process ends without ceremony. From any thread."""
        if (crew := self._crew) is not None:
            crew.kill()

    @property
    def is_heard(self) -> bool:
        """Whether its permit to start work holds: the store has heard it lately."""
        return self._permit is not None and self._permit.holds()

    # --- one life: from joining the roster to leaving it, or to being found dead

    async def _live(self, ready: Callable[[], None]) -> None:
        record = self._named_anew()
        joined = self._clock.monotonic()

        async def join(again: bool) -> None:
            nonlocal joined
            joined = self._clock.monotonic()
            await self._store.enrol(replace(record, heartbeat_at=self._store.now()))

        crashpoint("roster.before")
        await self._patience.until_reached("joining the roster", join)
        crashpoint("roster.joined")
        log.info("runner %s has joined the roster", record.id)
        await self._patience.until_answered("storing the schedules", lambda again: self._declare())
        permit, crew, dead = Permit(self._clock), self._make_crew(), asyncio.Event()
        self._permit = permit
        services = self._services(record, permit)
        unsubscribe = self._hub.on_roster(services.look_soon)
        heart = Heart(
            self._store,
            self._clock,
            permit,
            record=record,
            joined=joined,
            every_seconds=self._settings.heartbeat_seconds,
            dead_after_seconds=self._settings.dead_after_seconds,
            workers=crew.workers,
            ticks=services.is_ticking,
            on_entry=self._obey,
            on_death=dead.set,
        )
        observer = self._observer(record, heart, services)
        core_worker = CoreWorker(lambda: self._make_core_worker(f"{record.id}/core", permit), self._clock)
        self._steady = heart.steady_seconds
        beating = asyncio.create_task(heart.run())
        every = self._settings.heartbeat_seconds
        pauses = PauseWatch(self._store, self._hub, permit, app=record.app, every_seconds=every)
        duties = [asyncio.create_task(work) for work in (observer.run(), services.run())]
        core = asyncio.create_task(core_worker.run())
        try:
            self._crew = crew
            crew.on_change(heart.beat_soon)
            await self._patience.until_reached("looking which queues are paused", pauses.look)
            duties.append(asyncio.create_task(pauses.run()))
            await crew.start(record.id, permit)
            ready()
            if self._stopping:
                crew.stop(hurry=self._hurry)
            await self._until_the_end(crew, heart, dead)
            await end_all(*duties)
            if dead.is_set():
                core_worker.fence()
            else:
                core_worker.stop(hurry=True)
            await asyncio.wait({core})
        finally:
            self._crew = None
            unsubscribe()
            await end_all(*duties, core, beating)
        if not dead.is_set():
            await self._leave(record)
            if services.takes_turns(record.id):
                self._hub.send(Hint(ROSTER, (record.id,)))

    def _named_anew(self) -> RunnerRecord:
        """Take a new name. What this life recovers is recovered under it."""
        record = self.record = self._make_record()
        self._recovery.by = self._core_recovery.by = record.id
        return record

    async def _declare(self) -> None:
        """First what Holdfast itself needs, then what the user's code declares."""
        await self._core.register()
        await self._declarations.register()

    async def _until_the_end(self, crew: Crew, heart: Heart, dead: asyncio.Event) -> None:
        """Until the crew has ended: it was told to stop, or it broke, or the runner was declared dead."""
        working = asyncio.create_task(crew.wait())
        dying, stopping = asyncio.create_task(dead.wait()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not dead.is_set():
                heart.draining = True
                heart.beat_soon()
                await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dead.is_set():
                log.error("runner %s was declared dead; its work was given to others, and it begins anew", self._id)
                crew.fence()
            self.account.add(await working)
        finally:
            for task in (dying, stopping):
                task.cancel()

    async def _leave(self, record: RunnerRecord) -> None:
        crashpoint("roster.leaving")
        leaving = asyncio.create_task(
            self._patience.until_answered("leaving the roster", lambda again: self._store.leave(record.app, record.id))
        )
        await asyncio.wait({leaving}, timeout=_LEAVING_SECONDS)
        if not leaving.done():
            log.warning("runner %s could not say that it leaves; the others will find out", record.id)
            leaving.cancel()
        elif not isinstance(error := leaving.exception(), StoreError | None):
            raise error
        crashpoint("roster.left")

    @property
    def _id(self) -> str:
        return "?" if self.record is None else self.record.id

    def _obey(self, entry: RunnerRecord) -> None:
        """Somebody wrote into our entry what we shall do."""
        if entry.wish in (DRAIN, STOP) and (not self._stopping or (entry.wish == STOP and not self._hurry)):
            log.warning("runner %s is asked to %s", self._id, entry.wish)
            self.stop(hurry=entry.wish == STOP)

    # --- duties towards the fleet

    def _services(self, record: RunnerRecord, permit: Permit) -> Services:
        services: Services | None = None

        async def forget_old() -> None:
            if services is not None:
                await services.forget_old()
            await self._core.forget_old()

        duties = (
            Duty(name="core tasks", every_seconds=0.0, perform=self._core.fire_due),
            Duty(name="rescue", every_seconds=10.0, perform=self._recovery.passed_through),
            Duty(name="rescue of core tasks", every_seconds=30.0, perform=self._core_recovery.running),
            Duty(name="limits of core tasks", every_seconds=10.0, perform=self._core.sweep),
            Duty(name="declarations", every_seconds=30.0, perform=self._declarations.retire),
            Duty(name="audit trail", every_seconds=60.0, perform=forget_old),
            *self._more_duties,
        )
        services = Services(
            self._store,
            self._clock,
            self._ids,
            permit,
            app=record.app,
            runner_id=record.id,
            settings=self._settings.slots,
            duties=duties,
        )
        return services

    def _observer(self, record: RunnerRecord, heart: Heart, services: Services) -> Observer:
        return Observer(
            self._store,
            self._clock,
            self._rng,
            app=record.app,
            dead_after_seconds=self._settings.dead_after_seconds,
            steady_seconds=heart.steady_seconds,
            heard_seconds=heart.heard_seconds,
            on_death=lambda dead: self._bury(dead, services),
        )

    async def _bury(self, dead: RunnerRecord, services: Services) -> None:
        """Whoever declares a death sees to the work. The dead one's core tasks come first: recovery cannot wait for
        itself.
        """
        if services.takes_turns(dead.id):
            self._hub.send(Hint(ROSTER, (dead.id,)))
        why = f"its runner {dead.id} on {dead.host} is dead"
        for owner in await self._store.owners(self._core.app):
            if runner_of(owner) == dead.id:
                await self._core_recovery.of_owner(owner, why)
        crashpoint("death.buried")
        await self._core.fire(RECOVER_RUNNING, f"death of {dead.id} after {dead.heartbeat_at}")
        crashpoint("death.fired")

    async def recover_running(self) -> int:
        """The core task of that name."""
        return await self._recovery.running()

    async def recover_pending(self) -> int:
        """The core task of that name. The time for which the store was away does not count."""
        if self._steady() < self._recovery.max_pending:
            return 0
        stuck = await self._recovery.stuck()
        if stuck and Ability.SHARED_CLOCK not in self._store.abilities:
            await asyncio.sleep(self._recovery.max_pending)  # their stamps prove nothing: their clock may differ
            if self._steady() < self._recovery.max_pending:
                return 0
            stuck = await self._recovery.still_as_they_were(stuck)
        return await self._recovery.recover_stuck(stuck)
