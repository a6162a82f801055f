"""Run a runner: an entry on the roster, workers that run tasks, and duties towards the fleet.

It joins the roster before its workers claim anything, sends heartbeats and watches the other runners. It takes its turn
at the services and runs core tasks in this process. Its workers run user code. When it stops, the workers hand back or
finish their invocations before the runner leaves the roster, so nothing waits for a recovery after a clean stop.

A runner that was declared dead while it was silent (frozen, or cut off) finds out with its next heartbeat. Other
runners own its work by then: the workers end without a write, and the runner starts a new life under a new name.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError
from holdfast.executors.lifespan import Hooks
from holdfast.executors.local import InlineExecutor
from holdfast.fleet.core_tasks import CoreTaskRegistry, CoreWorker
from holdfast.fleet.failure_detector import FailureDetector
from holdfast.fleet.heartbeat import Heartbeat
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.services import Duty, Feature, Services
from holdfast.fleet.supervisor import LocalWorkers, Workers
from holdfast.model.records import DRAIN, ROSTER, STOP, Hint, RunnerRecord, Serves, runner_of
from holdfast.runtime.claim import Permit
from holdfast.runtime.definition import TaskDefinition, limits_of, names_of, rates_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.execute import MakeExecutor
from holdfast.runtime.hints import first_of, wait_for
from holdfast.runtime.limits import Limits
from holdfast.runtime.outage import Outage, cancel_tasks
from holdfast.runtime.pauses import PauseWatch
from holdfast.runtime.settle import Expiry
from holdfast.runtime.worker import Account, Worker, WorkerOptions
from holdfast.schedules.timing import cron
from holdfast.store.contract import Ability
from holdfast.telemetry.events import RunnerAsked, RunnerFenced, RunnerJoined, RunnerLeft

RECOVER_RUNNING = "holdfast:recover_running_invocations"
RECOVER_PENDING = "holdfast:recover_pending_invocations"


_CORE_SLOTS = 2
_CORE_PATIENCE = 4  # there is next to nothing to find, and their cron fires again
_LEAVING_SECONDS = 5.0  # for a store that does not answer
_FIRST_PAUSE_SECONDS = 0.1  # before another life; twice as long after each that was shorter than a dead-after time


class RunnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one runner differs from others. `queues` None: all of them."""

    version: str
    concurrency: int
    queues: tuple[str, ...] | None = None
    weights: Mapping[str, int] = {}
    tags: tuple[str, ...] = ()
    drain_timeout_seconds: float = 0.0


MakeWorkers = Callable[[RunnerRecord, Recovery], Workers]
MakeFeatures = Callable[[CoreTaskRegistry], Sequence[Feature]]


class Runner:
    """Run one worker in this process, unless `make_workers` supervises processes."""

    def __init__(
        self,
        engine: Engine,
        definitions: Sequence[TaskDefinition],
        options: RunnerOptions,
        make_features: MakeFeatures,
        *,
        make_workers: MakeWorkers | None = None,
        make_executor: MakeExecutor | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._engine = engine
        self._store = engine.store
        self._clock = engine.clock
        self._telemetry = engine.telemetry
        self._hub = engine.hub
        self._definitions = definitions
        self._options = options
        self._make_executor = make_executor
        self._hooks = hooks
        self._recovery, self._core_recovery = Recovery(engine), Recovery(engine.core)
        self._core = CoreTaskRegistry(engine.core)
        settings = engine.settings
        self._core.add(RECOVER_RUNNING, self.recover_running, cron(settings.recover_running_invocations_cron))
        self._core.add(RECOVER_PENDING, self.recover_pending, cron(settings.recover_pending_invocations_cron))
        self._features = make_features(self._core)
        self._supervises = make_workers is not None
        self._template = self._entry()
        self._make_workers = make_workers or (lambda record, recovery: LocalWorkers(self._worker, self._store.now))
        self._outage = Outage(engine.rng, engine.telemetry)
        self._steady: Callable[[], float] = lambda: 0.0
        self._stopping = False
        self._hurry = False
        self._stop = asyncio.Event()
        self._workers: Workers | None = None
        self._permit: Permit | None = None
        self._heartbeat: Heartbeat | None = None
        self.record: RunnerRecord | None = None
        self.account = Account()

    def _entry(self) -> RunnerRecord:
        """Return what it has on the roster, but for the name and the times of its lives."""
        options = self._options
        return RunnerRecord(
            id="",
            app=self._engine.app,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=options.version,
            schema=self._store.schema_version,
            dead_after_seconds=self._engine.settings.dead_after_seconds,
            started_at=0.0,
            heartbeat_at=0.0,
            concurrency=options.concurrency,
            queues=None if options.queues is None else tuple(sorted(options.queues)),
            weights=options.weights,
            tags=tuple(sorted(options.tags)),
            tasks=names_of(self._definitions),
            declares=tuple(sorted(name for each in self._features for name in each.declares)),
            supervises=self._supervises,
        )

    def _worker(self, owner: str, permit: Permit) -> Worker:
        options = WorkerOptions(
            owner=owner,
            serves=self._template.serves,
            concurrency=self._options.concurrency,
            drain_timeout_seconds=self._options.drain_timeout_seconds,
            look_seconds=self._engine.settings.runner_heartbeat_seconds,
        )
        made = (self._engine, self._definitions, options, permit, self._recovery)
        return Worker(*made, make_executor=self._make_executor, hooks=self._hooks)

    def _core_worker(self, owner: str, permit: Permit) -> Worker:
        """Make a worker that runs core tasks, in this process, whatever the other workers do."""
        definitions = self._core.definitions
        options = WorkerOptions(
            owner=owner,
            serves=Serves(tasks=frozenset(task.name for task in definitions)),
            concurrency=_CORE_SLOTS,
            patience=_CORE_PATIENCE,
            for_core=True,
        )
        made = (self._core.engine, definitions, options, permit, self._core_recovery)
        return Worker(*made, make_executor=lambda kind, deliver: InlineExecutor(deliver))

    async def run(self, ready: Callable[[], None] = lambda: None) -> Account:
        """Work until `stop`. Return what was done; `ready` is called when its workers first look for work."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping:
            began = self._clock.monotonic()
            try:
                await self._live(ready)
            except StoreError as error:
                if not self._stop.is_set():
                    raise
                self._telemetry.emit(RunnerLeft(self._id, f", while the store is away: {error}"))
            longest = self._engine.settings.dead_after_seconds
            if self._clock.monotonic() - began > longest:
                pause = _FIRST_PAUSE_SECONDS
            await wait_for(self._stop, pause)
            pause = min(pause * 2, longest)
        return self.account

    def stop(self, *, hurry: bool = False) -> None:
        """Take no more work and end when all calls are done; `hurry` ends them now."""
        self._stopping = True
        self._hurry = self._hurry or hurry
        self._outage.give_up_in(0)
        self._stop.set()
        if self._workers is not None:
            self._workers.stop(hurry=hurry)

    def kill_workers(self) -> None:
        """Kill the workers, before this process is killed. From any thread."""
        if (workers := self._workers) is not None:
            workers.kill()

    @property
    def is_connected(self) -> bool:
        """Return whether its permit to start work holds: the store has answered it lately."""
        return self._permit is not None and self._permit.holds()

    @property
    def heartbeat_age(self) -> float | None:
        """Return the seconds since it sent a heartbeat that was answered; None before it has joined."""
        return None if self._heartbeat is None else self._heartbeat.age()

    @property
    def why_disconnected(self) -> str:
        """Return the store's last error; empty if there was none, or all is well."""
        return "" if self._heartbeat is None else self._heartbeat.why_disconnected

    @property
    def needs_restart(self) -> str:
        """Return why only a new process can use the store; empty if this one can."""
        return self._store.needs_restart()

    # --- one life: from joining the roster to leaving it, or to being found dead

    async def _live(self, ready: Callable[[], None]) -> None:
        record = self._new_record()
        joined = self._clock.monotonic()

        async def join(again: bool) -> None:
            nonlocal joined
            joined = self._clock.monotonic()
            await self._store.enrol(replace(record, heartbeat_at=self._store.now()))

        crashpoint("roster.before")
        await self._outage.until_reached("joining the roster", join)
        crashpoint("roster.joined")
        self._telemetry.emit(RunnerJoined(record.id))
        is_ready = False

        def begun() -> None:
            nonlocal is_ready
            is_ready = True
            ready()

        try:
            await self._serve(record, joined, begun)
        except Exception:
            if not is_ready:  # no work was claimed, so there is nothing to recover
                await self._leave(record)
            raise

    async def _serve(self, record: RunnerRecord, joined: float, ready: Callable[[], None]) -> None:
        """Work from having joined, by that time, to having left. Raises the error that keeps it from starting."""
        await self._outage.until_answered("storing the schedules", lambda again: self._declare())
        permit = Permit(self._clock)
        workers = self._make_workers(self._template, self._recovery)
        self._permit = permit
        services = self._services(record, permit)
        unsubscribe = self._hub.on(ROSTER, lambda hint: services.look_soon())
        known = (self._engine, permit, record, joined, workers)
        heartbeat = Heartbeat(*known, ticks=services.is_ticking, on_entry=self._on_entry)
        self._heartbeat, dead = heartbeat, heartbeat.dead
        detector = FailureDetector(self._engine, heartbeat, lambda dead: self._on_death(dead, services))
        core_worker = CoreWorker(lambda: self._core_worker(f"{record.id}/core", permit), self._clock, self._telemetry)
        self._steady = heartbeat.steady_seconds
        beating = asyncio.create_task(heartbeat.run())
        pauses = PauseWatch(self._engine, permit)
        duties = [asyncio.create_task(work) for work in (detector.run(), services.run())]
        core = asyncio.create_task(core_worker.run())
        try:
            self._workers = workers
            workers.on_change(heartbeat.beat_soon)
            await self._outage.until_reached("looking which queues are paused", pauses.look)
            duties.append(asyncio.create_task(pauses.run()))
            await workers.start(record.id, permit)
            ready()
            if self._stopping:
                workers.stop(hurry=self._hurry)
            await self._until_the_end(workers, heartbeat, dead)
            await cancel_tasks(*duties)
            if dead.is_set():
                core_worker.fence()
            else:
                core_worker.stop(hurry=True)
            await asyncio.wait({core})
        finally:
            self._workers = None
            unsubscribe()
            pauses.close()
            await cancel_tasks(*duties, core, beating)
        if not dead.is_set():
            await self._leave(record)
            if services.takes_turns(record.id):
                self._hub.send(Hint(ROSTER, (record.id,)))

    def _new_record(self) -> RunnerRecord:
        """Take a new name. What this life recovers is recovered under it."""
        now = self._store.now()
        record = replace(self._template, id=self._engine.ids.new(), started_at=now, heartbeat_at=now)
        self.record = record
        self._recovery.by = self._core_recovery.by = record.id
        return record

    async def _declare(self) -> None:
        """Store the declarations: first those of Holdfast itself, then those of the user's code."""
        for feature in self._features:
            await feature.register()

    async def _until_the_end(self, workers: Workers, heartbeat: Heartbeat, dead: asyncio.Event) -> None:
        """Wait for the end of the workers: after a stop, by an error, or since the runner was declared dead."""
        working = asyncio.create_task(workers.wait())
        await first_of(working, dead, self._stop)
        if not working.done() and not dead.is_set():
            heartbeat.draining = True
            heartbeat.beat_soon()
            await first_of(working, dead)
        if dead.is_set():
            self._telemetry.emit(RunnerFenced("runner", f"runner {self._id}"))
            workers.fence()
        self.account.add(await working)

    async def _leave(self, record: RunnerRecord) -> None:
        crashpoint("roster.leaving")
        leaving = asyncio.create_task(
            self._outage.until_answered(
                "leaving the roster", lambda again: self._store.remove_runner(record.app, record.id)
            )
        )
        await asyncio.wait({leaving}, timeout=_LEAVING_SECONDS)
        if not leaving.done():
            self._telemetry.emit(RunnerLeft(record.id, ", without an answer from the store: others will find out"))
            leaving.cancel()
        elif not isinstance(error := leaving.exception(), StoreError | None):
            raise error
        else:
            self._telemetry.emit(RunnerLeft(record.id, f": others will find out: {error}" if error else ""))
        crashpoint("roster.left")

    @property
    def _id(self) -> str:
        return "?" if self.record is None else self.record.id

    def _on_entry(self, entry: RunnerRecord) -> None:
        """Do what a user wrote into our roster entry."""
        if entry.wish in (DRAIN, STOP) and (not self._stopping or (entry.wish == STOP and not self._hurry)):
            self._telemetry.emit(RunnerAsked(self._id, entry.wish))
            self.stop(hurry=entry.wish == STOP)

    # --- duties towards the fleet

    def _services(self, record: RunnerRecord, permit: Permit) -> Services:
        services: Services | None = None

        async def forget_old() -> None:
            if services is not None:
                await services.forget_old()
            await self._core.forget_old()

        duties = (
            Duty(name="rescue", every_seconds=15.0, perform=self._recovery.passed_through),
            Duty(name="rescue of core tasks", every_seconds=30.0, perform=self._core_recovery.running),
            Duty(name="limits of core tasks", every_seconds=10.0, perform=self._core.sweep),
            Duty(name="audit trail", every_seconds=60.0, perform=forget_old),
            *path_duties(self._engine, self._definitions),
            *(duty for feature in self._features for duty in feature.duties()),
        )
        services = Services(self._engine, permit, record.id, duties)
        return services

    async def _on_death(self, dead: RunnerRecord, services: Services) -> None:
        """See to the work of a runner that was declared dead. Its core tasks come first: recovery cannot wait for
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
        """Run the core task of that name."""
        return await self._recovery.running()

    async def recover_pending(self) -> int:
        """Run the core task of that name. The time for which the store was away does not count."""
        if self._steady() < self._recovery.max_pending:
            return 0
        stuck = await self._recovery.stuck()
        if stuck and Ability.SHARED_CLOCK not in self._store.abilities:
            await asyncio.sleep(self._recovery.max_pending)  # their stamps prove nothing: their clock may differ
            if self._steady() < self._recovery.max_pending:
                return 0
            stuck = await self._recovery.still_as_they_were(stuck)
        return await self._recovery.recover_stuck(stuck)


def path_duties(engine: Engine, definitions: Sequence[TaskDefinition]) -> Sequence[Duty]:
    """Return the duties of the services for the path of an invocation."""

    limits = Limits(engine, limits_of(definitions), rates_of(definitions))

    async def collect() -> bool:
        return (await engine.payloads.collect()).more

    return (
        Duty(name="expiry", every_seconds=0.0, perform=Expiry(engine).sweep),  # it knows when it has to look
        Duty(name="limits", every_seconds=1.0, perform=limits.sweep),
        Duty(name="payloads", every_seconds=3600.0, perform=collect),
    )
