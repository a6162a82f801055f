"""The simulated world: nodes that run runners, clients that submit, faults that strike, and healing at the end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
from tests.support import checker
from tests.support.checker import Dump, Fault, FaultKind, Faults, Violation
from tests.support.engines import make_engine, make_runner
from tests.support.simulation import happenings
from tests.support.simulation.client import Client, record_of
from tests.support.simulation.plan import APP, TASK, Ending, Job, Plan, Strike, Weather, id_of
from tests.support.simulation.scheduler import PROCESS, Process
from tests.support.simulation.trips import Trips
from tests.support.simulation.wire import Hints, Ledger, Line, Server, Trace
from tests.support.witness import Ledgers, What, digest_of, digest_of_error

from holdfast.codec import Codec
from holdfast.executors.call import Call
from holdfast.executors.local import Deliver, InlineExecutor
from holdfast.executors.waiting import Wait
from holdfast.fleet.runner import Runner
from holdfast.model.limits import Limit, limit_key
from holdfast.model.names import core_app
from holdfast.model.rates import rate_of
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.waiting import held
from holdfast.store.contract import Ability, Store
from holdfast.streams import records as streams
from holdfast.telemetry.logs import REPEATS
from holdfast.telemetry.tasks import here
from holdfast.testing.virtual import VirtualClock
from holdfast.triggers import joins

HEARTBEAT_SECONDS, DEAD_AFTER_SECONDS = 1.0, 4.0
CYCLE_SECONDS = 6.0
MOST_CRASHES = 3
_POLL_SECONDS = 0.5
_DRAIN_SECONDS = 4.0
_HEALING_SECONDS = 120.0
_SETTINGS: dict[str, Any] = {
    "poll_interval_seconds": _POLL_SECONDS,
    "runner_heartbeat_seconds": HEARTBEAT_SECONDS,
    "runner_considered_dead_after_minutes": DEAD_AFTER_SECONDS / 60,
    "atomic_service_interval_minutes": CYCLE_SECONDS / 60,
    "atomic_service_spread_margin_minutes": 0.25 / 60,
    "atomic_service_check_interval_minutes": 0.5 / 60,
    "max_crash_recoveries": MOST_CRASHES,
    "workflow_linger_seconds": 0.3,
    "recover_running_invocations_cron": "*/5 * * * * *",
    "recover_pending_invocations_cron": "*/5 * * * * *",
}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left."""

    dump: Dump
    core: Dump
    ledgers: Ledgers
    faults: Faults
    refuted: tuple[Violation, ...]  # what was seen to be wrong on the spot
    came_late: frozenset[str]
    declared: tuple[tuple[float, str], ...]  # deaths: when, and of which runner
    healed: bool
    bodies: dict[str, Any]  # of workflows, by task
    seconds: float  # of virtual time
    trace: str  # the hash of every message
    lines: tuple[str, ...]  # and the messages, if they were kept


class World:
    def __init__(self, plan: Plan, clock: VirtualClock, *, keep_trace: bool = False) -> None:
        self.plan = plan
        self.clock = clock
        self.start_at = clock.now()
        self.ledger = Ledger(clock)
        self.server = Server(clock, self.ledger, Trace(keep=keep_trace))
        self.weather = plan.weather
        self.codec = Codec()
        self.jobs = {job.token: job for job in plan.jobs}
        self.ids: dict[str, str] = {}  # by token, of jobs in chains and groups
        self.trips = Trips(self)
        self.faults: list[Fault] = []
        self.refuted: list[Violation] = []
        self.engines: dict[int, Engine] = {}  # by pid
        self.code: dict[int, dict[str, int]] = {}  # by pid, the invocations whose code runs there, and their epochs
        self.hints: list[Hints] = []
        self.lines: dict[int, Line] = {}  # by pid
        self.came_late: set[str] = set()
        self.healing = False
        self._crashed: dict[str, int] = {}  # how often each job took its process with it
        self._failed: dict[str, int] = {}  # how often each job raised
        self._pids = 100
        self._nodes = [Node(self, number) for number in range(plan.nodes)]
        self._processes: list[Process] = []

    def rng(self, *what: object) -> random.Random:
        return random.Random(f"{self.plan.seed} {what}")

    async def run(self) -> Evidence:
        await happenings.deploy(self.plan, self._engine(self.rng("deploy"), self.server.store), self.start_at)
        for node in self._nodes:
            node.start()
        clients = [Client(self, number) for number in range(3)]
        submitting = [client.process.spawn(client.run()) for client in clients]
        strikes = [asyncio.create_task(self._strike(strike)) for strike in self.plan.strikes]
        await asyncio.sleep(self.plan.chaos_seconds)
        self._heal()
        await asyncio.gather(*strikes, *submitting)
        healed = await self._until(self._is_done, _HEALING_SECONDS)
        await asyncio.sleep(2 * HEARTBEAT_SECONDS)
        for node in self._nodes:
            node.retire()
        healed = await self._until(lambda: not any(node.is_up for node in self._nodes), 60.0) and healed
        await asyncio.sleep(0.5)  # for what is still under way
        return await self._evidence(healed)

    # --- processes

    def process(self, name: str, on_death: Any) -> tuple[Process, Engine, Line]:
        self._pids += 1
        process = Process(name, self._pids, on_death)
        self._processes.append(process)
        rng = self.rng("process", name)
        hints = Hints(self.server, process, self.rng("hints", name), lambda: self.weather, self.hints)
        line = Line(
            self.server,
            process,
            self.rng("line", name),
            lambda: self.weather,
            hints=hints,
            abilities=(Ability.COSTLY_CLAIMS if self.plan.costly_claims else Ability.NONE)
            | (Ability.NONE if self.plan.own_clocks else Ability.SHARED_CLOCK),
            skew=rng.uniform(-self.plan.skew, self.plan.skew),
            off=self.rng("clock", name).choice((-1, 0, 1)) * self.plan.own_clocks if self.plan.own_clocks else None,
        )
        self.lines[process.pid] = line
        engine = self.engines[process.pid] = self._engine(rng, cast(Store, line))
        engine.hub.connect(hints)
        return process, engine, line

    def _engine(self, rng: random.Random, store: Store) -> Engine:
        return make_engine(store, self.clock, rng, app=APP, **_SETTINGS)

    # --- user code

    def task(self) -> TaskDefinition:
        is_limited = any(job.limit_key for job in self.plan.jobs)
        return TaskDefinition(
            name=TASK,
            function=self.work,
            signature=inspect.signature(self.work),
            executor=ExecutorKind.LOOP,
            limit=Limit(self.plan.limit) if is_limited else None,
            limit_by=("token",) if is_limited else (),
            rate=rate_of(self.plan.rate, self.plan.burst) if any(job.rate_key for job in self.plan.jobs) else None,
        )

    async def work(self, token: str) -> str:
        """The task that all jobs are calls of."""
        job, process = self.jobs[token], PROCESS.get()
        id = self.id_of(job)
        span = self.ledger.span()
        facts = {"token": token, "id": id, "span": span, "epoch": self.lines[process.pid].epochs.get(id)}
        self.ledger.write(What.EXEC_START, process.pid, **facts)
        try:
            with self._lease(job, process.pid, facts), self._code(id, process):
                await asyncio.sleep(job.seconds)
                if job.child is not None:
                    await self._wait_for(self.jobs[job.child], id, process)
            if self._crashed.get(token, 0) < job.crashes:
                self._crashed[token] = self._crashed.get(token, 0) + 1
                process.kill()
                await asyncio.sleep(1e9)
            if job.ending is Ending.RAISE and self._failed.get(token, 0) < job.failures:
                self._failed[token] = self._failed.get(token, 0) + 1
                raise ValueError(f"{token} {span}")
        except BaseException as error:
            self.ledger.write(What.EXEC_END, process.pid, **facts, raised=True, digest=digest_of_error(error))
            raise
        result = f"{token} {span}"
        self.ledger.write(What.EXEC_END, process.pid, **facts, digest=digest_of(result, self.codec))
        return result

    @contextmanager
    def _code(self, id: str, process: Process) -> Iterator[None]:
        """Code that runs here, and takes a slot."""
        self._goes_on(id, process)
        try:
            yield
        finally:
            self.code[process.pid].pop(id, None)

    def _goes_on(self, id: str, process: Process) -> None:
        """Code begins, or goes on after a wait: there is a slot for it, and the store does not call it paused."""
        running, store = self.code.setdefault(process.pid, {}), self.server.store
        running[id] = self.lines[process.pid].epochs.get(id, 0)
        records = {each: store._records[APP, each] for each in running}
        held = [each for each, record in records.items() if record.status in OWNED and record.epoch == running[each]]
        is_ending = any(node.process is process and node.is_stopping for node in self._nodes)  # it only unwinds
        if len(held) > self.plan.concurrency and not is_ending:
            told = f"{process.name} runs the code of {len(held)} at once in {self.plan.concurrency} slots"
            self.refuted.append(Violation("slots", id, told))
        if id in held and records[id].status is Status.PAUSED and not is_ending:
            self.refuted.append(Violation("paused", id, f"its code goes on in {process.name}, and it is PAUSED"))

    async def _wait_for(self, child: Job, id: str, process: Process) -> None:
        """Submit the child, and wait for its end as `Invocation.result` does."""
        engine, call = self.engines[process.pid], cast(Any, here.get())
        await engine.submitter.submit([record_of(self, engine, child)])
        wait = Wait(call.waits, call, [id_of(child.token)])
        wait.beside = frozenset({wait})
        self.code[process.pid].pop(id, None)
        try:
            await held(wait, engine.watcher.ends([id_of(child.token)], None))
        finally:
            self._goes_on(id, process)

    def id_of(self, job: Job) -> str:
        """Which invocation a job became. With a key that is whichever came first."""
        name = (APP, "key", f"{TASK}|{job.token}")
        if job.token in self.ids:
            return self.ids[job.token]
        return self.server.store._named[name] if job.keyed else id_of(job.token)

    @contextmanager
    def _lease(self, job: Job, pid: int, facts: dict[str, Any]) -> Iterator[None]:
        """What a limited job does under its limit."""
        if job.limit_key is None:
            yield
            return
        lease = {**facts, "span": self.ledger.span(), "key": limit_key(TASK, job.limit_key), "limit": self.plan.limit}
        self.ledger.write(What.LEASE_ENTER, pid, **lease)
        try:
            yield
        finally:
            self.ledger.write(What.LEASE_EXIT, pid, **lease)

    def starts(self, process: Process, calls: list[Call]) -> None:
        """A worker is about to begin these: it may, if the store has heard its runner lately."""
        for call in calls:
            if call.task == TASK and (why := self.why_no_permit(process)):
                self.refuted.append(Violation("permit", call.key, why))

    def why_no_permit(self, process: Process) -> str:
        """Return why a process may begin no work now; empty if it may."""
        silence = self.clock.monotonic() - self.lines[process.pid].heard_at
        if silence <= DEAD_AFTER_SECONDS * 2 / 3:
            return ""
        return f"{process.name} began it {silence:.2f} s after its last heartbeat"

    # --- faults

    async def _strike(self, strike: Strike) -> None:
        await asyncio.sleep(strike.at)
        if strike.kind is FaultKind.OUTAGE:
            at = self.clock.monotonic()
            self.server.outages += 1
            await self._while_it_lasts(strike)
            self.server.outages -= 1
            self.fault(FaultKind.OUTAGE, at)
            return
        node = self._nodes[strike.node]
        process, at = node.process, self.clock.monotonic()
        if process is None or process.is_dead:
            return
        match strike.kind:
            case FaultKind.KILL if strike.step:
                process.dies_at = process.steps + strike.step
            case FaultKind.KILL:
                process.kill()
            case FaultKind.FREEZE:
                process.freeze()
                await self._while_it_lasts(strike)
                process.thaw()
                self.fault(FaultKind.FREEZE, at, process)
            case FaultKind.CUT:
                line = self.lines[process.pid]
                line.cuts += 1
                await self._while_it_lasts(strike)
                line.cuts -= 1
                self.fault(FaultKind.CUT, at, process)
            case FaultKind.CLOCK:
                line = self.lines[process.pid]
                line.shift += strike.shift
                await self._while_it_lasts(strike)
                line.shift -= strike.shift
                self.fault(FaultKind.CLOCK, at, process)
            case FaultKind.STOP:
                node.stop(hurry=strike.hurry)

    async def _while_it_lasts(self, strike: Strike) -> None:
        await self._until(lambda: self.healing, strike.seconds)

    def fault(self, kind: FaultKind, at: float, process: Process | None = None) -> None:
        pid = None if process is None else process.pid
        self.faults.append(Fault(kind=kind, at=at, until=self.clock.monotonic(), pid=pid))

    def _heal(self) -> None:
        self.healing = True
        self.weather = Weather(latency=self.plan.weather.latency)
        for node in self._nodes:
            if node.process is not None:
                node.process.dies_at = None

    # --- the end

    def _is_done(self) -> bool:
        """All work has come to its end, and who is on the roster is there."""
        there = {node.runner_id for node in self._nodes}
        runners = {id for _, id in self.server.store._runners}
        return runners <= there and self._is_at_rest()

    def _is_at_rest(self) -> bool:
        """All work has ended, everybody was told of it, and no tick is to come."""
        store = self.server.store
        waits = [
            entry
            for entry in store._entries.values()
            if entry.app == APP and entry.due_at is not None and entry.kind != streams.KIND
        ]
        told = not any(entry.kind != joins.KIND or joins.from_entry(entry).firings for entry in waits)
        return told and all(record.status in FINAL and not record.outbox for record in store._of(APP))

    async def _until(self, holds: Any, seconds: float) -> bool:
        deadline = self.clock.monotonic() + seconds
        while not holds():
            if self.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(min(0.25, max(0.0, deadline - self.clock.monotonic())))
        return True

    def end(self) -> None:
        """From now on nothing has an effect."""
        self.server.is_over = True
        for process in self._processes:
            process.revive()

    async def _evidence(self, healed: bool) -> Evidence:
        lines = self.server.trace.lines
        for line in self.lines.values():
            self.came_late |= line.came_late
        return Evidence(
            dump=await checker.dump(self.server.store, APP, clock=self.clock, codec=self.codec),
            core=await checker.dump(self.server.store, core_app(APP), clock=self.clock, codec=self.codec),
            ledgers=Ledgers(tuple(self.ledger.events)),
            faults=Faults(tuple(self.faults)),
            refuted=(*self.server.refuted, *self.refuted),
            came_late=frozenset(self.came_late),
            declared=tuple(self.server.declared),
            healed=healed,
            bodies=self.trips.bodies,
            seconds=self.clock.monotonic(),
            trace=self.server.trace.digest,
            lines=tuple(lines or ()),
        )


class Node:
    """A machine on which a runner is started again whenever it ends."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self.start_ats = 0
        self._rng = world.rng("node", number)
        self._retired = False
        self._stopped_at: float | None = None
        self._runner: Runner | None = None
        self.process: Process | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None

    @property
    def is_stopping(self) -> bool:
        return self._stopped_at is not None

    @property
    def runner_id(self) -> str | None:
        return None if self._runner is None or self._runner.record is None else self._runner.record.id

    def start(self) -> None:
        if self._retired or self.process is not None:
            return
        self.start_ats += 1
        name = f"n{self._number}.{self.start_ats}"
        self.process, engine, _ = self._world.process(name, self._died)
        self.process.spawn(self._live(self.process, engine))

    async def _live(self, process: Process, engine: Engine) -> None:
        world = self._world
        tasks = [world.task(), *happenings.tasks(world.plan), *world.trips.definitions]

        def places(place: ExecutorKind, deliver: Deliver) -> InlineExecutor:
            return _Watched(world, process, deliver)

        self._runner = make_runner(
            engine,
            tasks,
            concurrency=world.plan.concurrency,
            drain_timeout_seconds=_DRAIN_SECONDS,
            make_executor=places,
            declared=happenings.declarations(world.plan, world.start_at),
            triggers=happenings.triggers(world.plan),
        )
        await self._runner.run()
        if self._stopped_at is not None:
            world.fault(FaultKind.STOP, self._stopped_at, process)
        process.exit()
        self._ended()

    def stop(self, *, hurry: bool) -> None:
        runner = self._runner
        if runner is not None and self.process is not None and self._stopped_at is None:
            self._stopped_at = self._world.clock.monotonic()
            self.process.call(lambda: runner.stop(hurry=hurry))

    def retire(self) -> None:
        """Stop for good."""
        self._retired = True
        if self.process is not None and self._runner is None:
            self.process.kill()
        self.stop(hurry=False)

    def _died(self, process: Process) -> None:
        self._world.fault(FaultKind.KILL, self._world.clock.monotonic(), process)
        self._ended()

    def _ended(self) -> None:
        self.process = self._runner = self._stopped_at = None
        self._world.server.later(self._rng.uniform(0.2, 3.0), self.start)


class _Watched(InlineExecutor):
    def __init__(self, world: World, process: Process, deliver: Deliver) -> None:
        super().__init__(deliver)
        self._world = world
        self._process = process

    def start(self, calls: Any) -> None:
        calls = list(calls)
        self._world.starts(self._process, calls)
        super().start(calls)


@contextmanager
def defects() -> Iterator[list[str]]:
    """What the engine logs as a defect of its own, and silence about the rest: faults make it talk a lot."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    logger, listener = logging.getLogger("holdfast"), Listener(logging.ERROR)
    level, propagates = logger.level, logger.propagate
    REPEATS.forget()  # what an earlier run said is no reason to be silent in this one
    logger.addHandler(listener)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagates
