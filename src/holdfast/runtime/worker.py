"""A worker: it fills its slots with claimed invocations and settles their outcomes.

The loop is short. It looks for work if a slot is free and there is a reason: a hint, a full batch last time, a due
time, or the polling interval. It hands claimed calls to executors, and sleeps until something happens. Outcomes go to
the settler, and the slot is free at once: the next claim and the previous settle are written together. It needs its
runner's permit.

A worker that dies at any point leaves its invocations RUNNING with its name and epoch on them. Nothing it held is lost,
and nothing it writes later can be mistaken for the work of the next owner.

What a worker does beside the loop is in `worker_duties`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from holdfast.codec import MARK
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError
from holdfast.executors.begun import BegunCalls
from holdfast.executors.call import INTERRUPTED, NOT_BEGUN, Raised, Returned, Unfit
from holdfast.executors.declared import refuse_while_importing
from holdfast.executors.lifespan import Hooks
from holdfast.executors.local import Deliver, Executor
from holdfast.executors.loop import LoopThread
from holdfast.model import changes
from holdfast.model.cancellation import is_too_late
from holdfast.model.changes import Change
from holdfast.model.crashes import has_begun_before
from holdfast.model.limits import is_bounded
from holdfast.model.names import counted
from holdfast.model.parking import lacks_key, lock_seconds, unfit_code
from holdfast.model.records import PLAIN, READY, Hint, InvocationRecord, RunState, Serves
from holdfast.model.sealing import sealed_in
from holdfast.model.status import FINAL, Status
from holdfast.runtime.cancel import CancellationListener
from holdfast.runtime.claim import MANY, Claimer, Demand, Lanes, Permit, Reserve
from holdfast.runtime.definition import ExecutorKind, TaskDefinition, limits_of, rates_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.execute import Ended, MakeExecutor, RunningCalls, new_executor
from holdfast.runtime.hints import Wakeup
from holdfast.runtime.limits import Limits as RunningLimits
from holdfast.runtime.outage import Outage, cancel_tasks
from holdfast.runtime.release import Releaser
from holdfast.runtime.settle import Settler, Throughput
from holdfast.runtime.wait import get_readable
from holdfast.runtime.waits import WorkerWaits
from holdfast.runtime.worker_duties import Audit, wake_parked
from holdfast.store.contract import Ability
from holdfast.telemetry import events as e

DISCOVERY_SECONDS = 5.0  # how long work in a lane unknown to a runner may wait if its hint was lost
_WITH_HINTS = 6  # times as seldom where hints are reliable
_WITHOUT_PERMIT_SECONDS = 1.0
_PAUSED = "its queue is paused"
_STOPS = "the runner stops"
_CUT_OFF = "its runner cannot reach the store"
_REVOKED = "its worker did not answer, and had not begun it"
_GRACE_SECONDS = 1.0  # for user code that was interrupted
_LAST_WORDS_SECONDS = 10.0  # for ends that wait for the store


class Account(msgspec.Struct):
    """Count what a runner did, for the last line that it prints."""

    started: int = 0
    ended: int = 0
    interrupted: int = 0
    deaths: int = 0  # of worker processes

    def add(self, other: Account) -> None:
        self.started += other.started
        self.ended += other.ended
        self.interrupted += other.interrupted
        self.deaths += other.deaths


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker differs from others.

    After `max_tasks` it retires by itself. With `leaves_unfinished` it relies on its runner for calls that still run
    after the drain timeout: the runner ends its process and gives the work back. A worker `for_core` tasks ignores
    pauses, and does not look again after a full claim: the next run of a core task finds the rest. It waits `patience`
    polling intervals before an unasked look, and looks every `look_seconds` for cancelled invocations.
    """

    owner: str
    serves: Serves
    concurrency: int
    drain_timeout_seconds: float = 0.0
    max_tasks: int | None = None
    leaves_unfinished: bool = False
    patience: int = 1
    look_seconds: float = 2.0
    for_core: bool = False


class Worker:
    """Run invocations as one owner. `make_executor` is for tests, `hooks` are those of the app."""

    why_ended = ""  # if it ends by itself, and leaves something behind

    def __init__(
        self,
        engine: Engine,
        definitions: Iterable[TaskDefinition],
        options: WorkerOptions,
        permit: Permit,
        releaser: Releaser,
        *,
        make_executor: MakeExecutor | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        refuse_while_importing()
        self._engine = engine
        self.owner = options.owner
        self._app = engine.app
        self.concurrency = self._concurrency = options.concurrency
        self._permit = permit
        self._max_tasks = options.max_tasks
        self._leaves_unfinished = options.leaves_unfinished
        self._for_core = options.for_core
        self.account = Account()
        self._throughput = Throughput()
        self.on_isolated: Callable[[], None] = lambda: None
        self._store = engine.store
        self._hub = engine.hub
        self.tasks: Mapping[str, TaskDefinition] = {name: d for d in definitions for name in d.names}
        self._lanes = Lanes(options.serves)
        self._lanes.note_work([lane for d in self.tasks.values() for lane in d.lanes])
        self._next_discovery = 0.0
        poll = engine.settings.poll_interval_seconds * options.patience
        self._demand = Demand(poll, doubts=not options.for_core)
        self._drain = options.drain_timeout_seconds
        self._telemetry = engine.telemetry
        self._wakeup = Wakeup()
        self._search = Outage(engine.rng, engine.telemetry)
        slots = RunningLimits(engine, limits_of(self.tasks.values()), rates_of(self.tasks.values()))
        self._claimer = Claimer(engine, self._search, permit, owner=self.owner, limits=slots)
        self._outage = Outage(engine.rng, engine.telemetry)
        self.begun = permit.begun or BegunCalls(slots=self._concurrency)
        settled = (self._started, self._wakeup.notify)
        self._settler = Settler(engine, self._outage, releaser, slots, self.begun, *settled)
        coroutines = LoopThread("holdfast-coroutines", engine.telemetry) if hooks else None
        self._around = hooks.around(coroutines) if hooks and coroutines else None
        given = make_executor or functools.partial(
            new_executor, engine.telemetry, self.begun, self._concurrency, coroutines
        )
        made = functools.partial(self._make, given, coroutines)
        self._running = RunningCalls(self, engine, self._search, made, hooks)
        self.calls_around = self._running.around
        self._is_inline = make_executor is not None
        self.notes = self._running.notes
        self.waits = self._running.waits = WorkerWaits(engine, self, self._outage)
        self._reserve = Reserve(self._concurrency, is_small=Ability.BATCHED_CLAIMS in engine.store.abilities)
        abilities = engine.store.abilities
        self._ahead = bool(abilities & (Ability.COSTLY_CLAIMS | Ability.BATCHED_CLAIMS))
        # A crash ends at-most-once calls that are RUNNING, so none is marked as that before its code begins.
        self._begins_ahead = not any(task.at_most_once for task in self.tasks.values())
        self._prefetching: asyncio.Task[None] | None = None
        self._starting = 0  # slots of reserved work whose start is being written
        self._has_runs = any(task.is_workflow for task in self.tasks.values())
        self._promised = 0  # slots that are to be filled by the claim that is under way
        self._wanted: dict[str, tuple[int, Callable[[int], None]]] = {}  # slots that runs wait for
        self._stopping = False
        self._fenced = self._has_drained = False
        self._claiming = 0
        self._audit = Audit(engine, releaser, self.owner, self._known)
        self._cancellations = CancellationListener(
            engine, self.owner, options.look_seconds, self._holds, self._awaits, self._is_to_end
        )
        self._drains_until = float("inf")  # by the loop's time; endless for a worker that retires

    # --- life

    async def run(self, ready: Callable[[], None] = lambda: None, over: Callable[[], None] = lambda: None) -> Account:
        """Work until `stop`. Return what was done.

        `ready` is called once it looks for work, `over` when that has ended; then hooks may still take their time.
        """
        self._running.open()
        unsubscribe = self._hub.on(READY, self._hinted)
        self._permit.on_grant(self._wakeup.notify)
        if not self._for_core:
            self._permit.on_pause(self._on_pauses)
            self._on_pauses(self._permit.paused)
        try:
            async with self._around or contextlib.nullcontext() as resources:
                self.calls_around.open(resources)
                await self._work(ready)
                over()
        finally:
            unsubscribe()
            await self.waits.close()
            await self._running.close()
        return self.account

    async def _work(self, ready: Callable[[], None]) -> None:
        audit, listener = (asyncio.create_task(work) for work in (self._audit.run(), self._cancellations.run()))
        try:
            await self._engine.outbox.get_ready()
            await self._look_for_work(ready)
            await cancel_tasks(audit)
            if not self._fenced:
                await self._finish()
        finally:
            await cancel_tasks(audit, listener)

    async def _look_for_work(self, ready: Callable[[], None]) -> None:
        known = (self._engine, self.owner, self.tasks)
        try:
            await self._search.until_reached("waking parked work", lambda again: wake_parked(*known))
            await self._discover()
            why = f"it serves {counted(len(self.tasks), 'task')} in {counted(self._concurrency, 'slot')}"
            self._telemetry.emit(e.WorkerStarted(self.owner, why))
            ready()
            while not self._stopping:
                if not self._permit.holds():
                    self.hand_back(self._reserve.take(len(self._reserve)), self._why_cut_off())
                    if not self._accepts_revocation():
                        await self._wakeup.wait(_WITHOUT_PERMIT_SECONDS)  # a permit wakes it
                    continue
                await self._fill()
                if not await self._wakeup.wait(self._patience_for_news()) or self._is_overdue():
                    await self._look_unasked()
        except StoreError:
            if not self._stopping:
                raise

    @property
    def running(self) -> int:
        """Return how many invocations it has begun and not ended."""
        return len(self._running)

    @property
    def busy(self) -> int:
        """Return how many running invocations occupy a slot: all except those that wait for others."""
        return self.running - self.waits.paused

    def ended_lately(self) -> dict[str, int]:
        """Return how many calls have ended over the last minutes, by queue."""
        return self._throughput.lately(self._loop_time())

    @property
    def is_stopping(self) -> bool:
        """Return whether it takes no more work."""
        return self._stopping

    def retire(self) -> None:
        """Take no more work, and end when all calls are done, however long that takes: another worker carries on."""
        self._stopping = True
        self._search.give_up_in(0)
        self._wakeup.notify()

    async def has_lost(self) -> bool:
        """Return whether an invocation that it runs has another owner by now, or none."""
        held = [record.id for record in self._running.records.values()]
        found = await get_readable(self._store, self._app, held)
        taken = {record.id for record in found if record is not None and record.owner != self.owner}
        return not taken.isdisjoint(self._running.records)

    def give_up(self, why: str) -> None:
        """End now, and leave its invocations to its runner, which starts another worker: only a new
        process can go on.
        """
        if not self._stopping:
            self.why_ended = why
            self._telemetry.emit(e.WorkerEnds(self.owner, why))
            self.stop(hurry=True)

    def needs_restart(self) -> str:
        """Return why only a new process can use the store; empty if this one can."""
        return self._store.needs_restart(by_children=True)

    def fence(self) -> None:
        """End user code where that is possible, and write no end any more: all that it owned was taken from it. Only
        what a claim still brings is handed back, since no runner knows of it yet.
        """
        self._fenced = self._stopping = True
        self._search.give_up_in(0)
        self._outage.give_up_in(0)
        self._running.interrupt()
        self._running.forget_all()
        self._reserve.take(len(self._reserve))
        self._wakeup.notify()

    def stop(self, *, hurry: bool = False, why: str = "") -> None:
        """Take no more work and end when all calls are done; `hurry` ends them now. `why` is for the history of calls
        that are interrupted, if it is not that the runner stops.

        If the store is away, looking for work ends at once, and ends that cannot be written are given up some time
        after the drain timeout: the invocations stay RUNNING in this owner's name, and recovery takes them up.
        """
        self._stopping = True
        self._settler.why_interrupted = why or self._settler.why_interrupted
        self._search.give_up_in(0)
        self._outage.give_up_in(_GRACE_SECONDS + (0 if hurry else self._drain + _LAST_WORDS_SECONDS))
        self._drains_until = min(self._drains_until, self._loop_time() + (0.0 if hurry else self._drain))
        self._wakeup.notify()

    # --- claiming

    def _on_pauses(self, paused: frozenset[str]) -> None:
        """Take nothing from these queues. Reserved work of theirs that has not begun goes back."""
        self._lanes.pause(paused)
        self.hand_back(self._reserve.of_queues(paused), _PAUSED)
        self._demand.anything()
        self._wakeup.notify()

    def _hinted(self, hint: Hint) -> None:
        accepted = self._lanes.note_work(hint.subjects)
        if accepted or not hint.subjects:
            self._demand.announce(hint.count if accepted else MANY)
            self._wakeup.notify()

    async def _look_unasked(self) -> None:
        """Look for work without a hint, and now and then for lanes that no hint has named."""
        self._demand.anything()
        if self._loop_time() >= self._next_discovery:
            await self._discover()

    async def _discover(self) -> None:
        found = await self._search.until_answered("looking for lanes", lambda again: self._store.lanes(self._app))
        self._lanes.know(found, self._loop_time())
        self._next_discovery = self._loop_time() + DISCOVERY_SECONDS * (_WITH_HINTS if self._hub.trust else 1)

    async def _fill(self) -> None:
        """Fill the free slots: with reserved work first, then with the answer of a claim."""
        self.hand_back(self._reserve.stale(self._loop_time()))
        self._grant_slots()
        demand = self._demand
        if demand.slot_next and demand.look and self._prefetching is None:
            await self._claim_now()  # before the reserve, which was claimed past these
        self._start(self._reserve.take(self._free()))
        if not demand.look or self._prefetching is not None:
            return
        ahead = self._ahead and demand.expected > self._concurrency and not demand.slot_next
        if ahead and self._reserve.room(self._loop_time(), self._bounded()):
            self._prefetching = asyncio.create_task(self._prefetch())
        else:
            await self._claim_now()

    async def _claim_now(self) -> None:
        if (free := self._free()) <= 0:
            return
        self._promised = free
        try:
            records = await self._claim(free, start=True)
        finally:
            self._promised = 0
        self._demand.slot_next = len(records) == free and all(map(is_bounded, records))  # more of them may be next
        self.begin(records)
        self._grant_slots()
        if self._demand.look and self._lanes.turns.are_on:
            self._wakeup.notify()  # the next queue has its turn at once

    def _make(
        self, make: MakeExecutor, coroutines: LoopThread | None, kind: ExecutorKind, deliver: Deliver
    ) -> Executor:
        if kind is not ExecutorKind.WORKFLOW:
            return make(kind, deliver)
        if coroutines is None and not self._is_inline:
            coroutines = LoopThread("holdfast-coroutines", self._telemetry)
        assert self._engine.make_run_executor is not None
        made: Executor = self._engine.make_run_executor(self._engine, self, deliver, coroutines)
        return made

    # --- runs

    @property
    def is_cut_off(self) -> bool:
        """Return whether no step may begin here now."""
        return self._fenced or not self._permit.holds()

    def record_of(self, id: str) -> InvocationRecord | None:
        return self._running.records.get(id)

    def want_slots(self, id: str, count: int, grant: Callable[[int], None]) -> None:
        """Give a run more slots, as soon as they are free: to continue, or to run steps side by side."""
        before = self._wanted.get(id, (0, grant))[0]
        self._wanted[id] = (before + count, grant)
        self._grant_slots()

    def give_slots(self, id: str, count: int) -> None:
        """Take back slots of a run: it only waits, or runs fewer steps."""
        self._running.set_slots(id, self._running.slots_of(id) - count)
        self._grant_slots()
        self._wakeup.notify()

    def _grant_slots(self) -> None:
        """Give free slots to runs that wait for them, in turn. They come before new work."""
        if not self._wanted:
            return
        free = self._concurrency - self._taken() - self._promised
        while self._wanted and free > 0:
            id = next(iter(self._wanted))
            wanted, grant = self._wanted.pop(id)
            if id not in self._running.records:
                continue
            if wanted > 1:
                self._wanted[id] = (wanted - 1, grant)
            self._running.set_slots(id, self._running.slots_of(id) + 1)
            free -= 1
            grant(1)

    def on_step_given_up(self, key: str, record: InvocationRecord | None) -> None:
        """Count the thread of a step that cannot be stopped as a taken slot, as for a task."""
        if record is not None:
            self._telemetry.emit(e.Unstoppable(record))
        self._running.abandoned.add(key)
        self.on_given_up(is_loop_blocked=False)

    def on_given_up_step_ended(self, key: str) -> None:
        self._running.abandoned.discard(key)
        self.on_let_go()

    def on_runs_blocked(self) -> None:
        """Leave the work to another worker, also if this one retires and would wait for its runs without end."""
        if self._leaves_unfinished and not self._fenced and self._drains_until == float("inf"):
            self.why_ended = f"code of a run past its time blocked the event loop of its worker {self.owner}"
            self._telemetry.emit(e.WorkerEnds(self.owner, self.why_ended))
            self.stop(hurry=True)

    # --- waits: see `WorkerWaits`

    @property
    def has_room(self) -> bool:
        """Return whether a slot is free, so that a call that waits is in no hurry to give its own back."""
        return self._free() > 0

    def set_record(self, record: InvocationRecord) -> None:
        """Keep the record of a call as its owner has written it."""
        self._running.records[record.id] = record

    def kind_of(self, record: InvocationRecord) -> ExecutorKind:
        return self._running.kind_of(record)

    def executor_of(self, record: InvocationRecord) -> Executor:
        return self._running.executor_of(record)

    def is_waiting(self, id: str) -> bool:
        return self._running.slots_of(id) == 0

    def set_run(self, id: str, run: RunState) -> None:
        """Note the state of a run that ends: the write of its end has it."""
        self._running.records[id] = msgspec.structs.replace(self._running.records[id], run=run)

    def on_cancelling(self, record: InvocationRecord) -> None:
        """Ask a run to end that was found CANCELLING."""
        self._is_to_end(record)

    def on_let_go(self) -> None:
        self._grant_slots()
        self._wakeup.notify()

    def _taken(self) -> int:
        # A large end keeps its slot until its payloads are stored: else memory could fill faster than the store takes.
        return self._running.taken + self._starting + self._settler.storing

    def _free(self) -> int:
        """Return how many slots are there for new work."""
        free = self._concurrency - self._taken()
        if self._wanted:
            free -= sum(wanted for wanted, _ in self._wanted.values())
        if self._has_runs:
            free = min(free, self._engine.settings.workflow_cache - self._running.runs)
        if self._max_tasks is None:
            return free
        return min(free, self._max_tasks - self.account.started - self._starting - self._running.fetching)

    async def _claim(self, max_count: int, *, start: bool, limited: bool = True) -> tuple[InvocationRecord, ...]:
        expected = self._demand.taken()
        wanted = min(max_count, expected)
        self._claiming += 1
        try:
            if self._lanes.turns.wants_to_know(self._loop_time()):
                await self._discover()
            ask = self._lanes.next(wanted)
            claimed = await self._claimer.claim(ask.lanes, ask.max_count, start=start, limited=limited)
        finally:
            self._claiming -= 1
        self._demand.learn(self._lanes.turns, ask, claimed, expected, self._loop_time())
        return claimed.records

    def _bounded(self) -> int:
        """Return how many slots calls under limits and rates have, which may keep them for long."""
        return sum(map(is_bounded, self._running.records.values())) if self._claimer.is_bounded else 0

    async def _prefetch(self) -> None:
        try:
            now = self._loop_time()
            bounded = self._bounded()
            room = self._reserve.room(now, bounded)
            start = self._begins_ahead and self._reserve.begins_at_once(room, now, bounded)
            claimed = await self._claim(room, start=start, limited=False)
            if self._fenced:
                self.hand_back(list(claimed), self._why_cut_off())
                return
            self._reserve.add(claimed, self._loop_time())
            if self._cancellations.is_early:
                self._cancellations.arrived()
            if self._lanes.paused:  # perhaps since the claim was sent
                self.hand_back(self._reserve.of_queues(self._lanes.paused), _PAUSED)
        except StoreError as error:
            # A stop; the next claim finds the work that this claim got.
            self._telemetry.emit(e.DutyFailed("worker", "claim ahead", error))
        finally:
            self._prefetching = None
            self._wakeup.notify()

    def _start(self, reserved: list[InvocationRecord]) -> None:
        """Begin reserved work that is RUNNING already; write the start of the rest, which begins
        when that is durable.
        """
        self.begin([record for record in reserved if record.status is Status.RUNNING])
        pending = [record for record in reserved if record.status is Status.PENDING]
        self._starting += len(pending)
        self._settler.settle([(record, self._settler.start_of(record)) for record in pending])

    def _started(self, record: InvocationRecord, change: Change, ours: bool) -> None:
        """Begin reserved work whose start is written, if it is still ours."""
        self._starting -= 1
        if ours:
            self.begin([changes.apply_to(change, record)])
        self._wakeup.notify()

    def hand_back(
        self, reserved: list[InvocationRecord], why: str = "it lay claimed for too long", wait: float = 0.0
    ) -> None:
        if reserved:
            self._telemetry.emit(e.HandedBack(len(reserved), why, self.owner))
            self._settler.settle([(record, self._settler.return_of(record, why, wait)) for record in reserved])

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    def _patience_for_news(self) -> float | None:
        """Return the seconds to sleep before an unasked look; None when no slot is free, since then only an outcome
        matters.
        """
        if self._free() <= 0 or self._prefetching is not None:
            return self._reserve.patience(self._loop_time())
        now = self._store.now() - self._store.clock_error()  # the time by which the claimer claims
        return self._demand.pause(now, self._loop_time(), self._hub.trust)

    def _is_overdue(self) -> bool:
        """Return whether an unasked look is due, however often the worker is woken."""
        return not self._demand.look and self._free() > 0 and self._patience_for_news() == 0.0

    # --- running

    def begin(self, records: Sequence[InvocationRecord]) -> None:
        """Start these calls. Their claim, or the write of their start, may have taken so long that they may not begin
        any more.
        """
        if self._fenced or self._has_drained or not self._permit.holds():
            self.hand_back(list(records), _STOPS if self._has_drained else self._why_cut_off())
            return
        odd = [r for r in records if r.arguments[:1] == MARK or r.terms is not PLAIN or r.run or r.notes]
        if locked := [each for each in odd if sealed_in(each)]:
            for record in locked:
                self.hand_back([record], lacks_key(sealed_in(record), self.owner), lock_seconds(record.epoch))
            records = [record for record in records if record not in locked]
        for record in records:
            if record.terms is not PLAIN and record.terms.start_by is not None:
                records = self._in_time(records)
                break
        for record in records:
            self._wanted.pop(record.id, None)  # of an earlier life of a run
        self._running.begin(records)
        if self._cancellations.is_early:
            self._cancellations.arrived()

    def _in_time(self, records: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        """Return the records that may be started. The others have just expired, and end."""
        now = self._store.now()
        late = [record for record in records if is_too_late(record, now)]
        ends = [(record, self._settler.expiry_of(record)) for record in late]
        self._settler.settle([(record, change) for record, change in ends if change is not None])
        return [record for record in records if record not in late]

    # --- being asked to end

    def _holds(self, id: str | None) -> bool:
        if id is None:
            return bool(self._running.records) or len(self._reserve) > 0
        return id in self._running.records or id in self._reserve.ids()

    def _awaits(self) -> bool:
        return bool(self._claiming or self._starting)

    def _is_to_end(self, record: InvocationRecord) -> None:
        if (reserved := self._reserve.remove(record.id)) is not None:
            outcome = INTERRUPTED if record.run is None or has_begun_before(reserved) else NOT_BEGUN
            self._settler.settle([(record, self._settler.change_for(record, outcome, None))])
        elif record.cancellation is not None:
            self._running.cancel(record, max(0.0, record.cancellation.until - self._store.now()))

    def why_not(self) -> str:
        """Return why no call may begin now; empty if it may."""
        if self._stopping:
            return _STOPS
        return "" if self._permit.holds() else self._why_cut_off()

    def _why_cut_off(self) -> str:
        return _REVOKED if self.begun.is_revoked else _CUT_OFF

    def _accepts_revocation(self) -> bool:
        """Accept that the runner took back what had not begun, once none of that can come to `begin` any more: what a
        claim, a start or a fetch of arguments still brings is handed back first.
        """
        if not self.begun.is_revoked or self._prefetching or self._starting or self._running.fetching:
            return False
        self.begun.accept()
        return True

    def on_given_up(self, is_loop_blocked: bool) -> None:
        """Leave the work to another worker, if that helps: the end of this process ends a call that
        cannot be stopped.
        """
        if not self._leaves_unfinished or self._stopping:
            return
        if is_loop_blocked:
            self.give_up(f"code that cannot be stopped blocked the event loop of its worker {self.owner}")
        elif len(self._running.abandoned) >= self._concurrency:
            why = f"code that cannot be stopped has all of its {self._concurrency} slots"
            self._telemetry.emit(e.WorkerEnds(self.owner, why))
            self.retire()

    @property
    def is_unfinished(self) -> bool:
        """Return whether user code runs, also a call that was given up."""
        return bool(self._running.records or self._running.abandoned)

    @property
    def isolated(self) -> tuple[str, ...]:
        """Return the invocations that were moved into processes of their own."""
        return self._running.isolated

    def count_started(self, count: int) -> None:
        """Count calls that have begun; -1: one starts over."""
        self.account.started += count
        if self._max_tasks is not None and self.account.started >= self._max_tasks and not self._stopping:
            self._telemetry.emit(e.WorkerRetires(self.owner, f"it has started its {self._max_tasks} tasks"))
            self.retire()

    def end(self, ended: Sequence[Ended]) -> None:
        """Settle calls whose user code is done; called on the engine's loop."""
        if self.waits.writing:
            ended = self.waits.withhold(ended)
        settled, large, interrupted = [], {}, 0
        now = self._loop_time()
        counted = self._throughput.current(now)
        for record, outcome, seconds in ended:
            if self._ahead and not (self._claimer.is_bounded and is_bounded(record)):  # no claim ahead takes such calls
                self._reserve.learn(record.task, seconds, now)
            fingerprint = None if isinstance(outcome, Returned) else self.tasks[record.task].fingerprint
            if isinstance(outcome, Unfit) and fingerprint is not None:
                fingerprint = unfit_code(fingerprint, outcome.python, outcome.why)
            change = self._settler.change_for(record, outcome, fingerprint)
            if self.notes.calls:
                change = self.notes.added_to(change, record)
            # With hooks, its inbox stays as it is: a payload may have come that this owner has not seen.
            if record.run is not None and change.target in FINAL and not record.run.has_hooks:
                change = msgspec.structs.replace(change, run=record.run)
            settled.append((record, change))
            interrupted += outcome is INTERRUPTED
            counted[record.queue] += outcome is not INTERRUPTED
            if isinstance(outcome, Returned | Raised) and outcome.payloads:
                large[change.operation] = outcome.payloads
        self.account.interrupted += interrupted
        self.account.ended += len(settled) - interrupted
        self._settler.settle(settled, large)
        self._grant_slots()
        if not self._stopping and self._permit.holds():
            self._start(self._reserve.take(self._free() - self._promised))  # in the same write
        self._wakeup.notify()

    # --- ending

    async def _finish(self) -> None:
        """Let running work end within the drain timeout, then end it; nothing waits for a recovery
        after a clean stop.
        """
        crashpoint("handback.before")
        if self._running:
            self._telemetry.emit(e.WorkerDrains(self.owner, self._how_it_drains()))
        if self._prefetching is not None:
            await self._prefetching
        self.hand_back(self._reserve.take(len(self._reserve)), _STOPS)
        self._running.stop_fetching()
        self._running.let_go(_STOPS)
        await self._drained(lambda: self._drains_until)
        self._has_drained = True
        if self._running:
            self._running.interrupt()
            graced = self._loop_time() + _GRACE_SECONDS
            await self._drained(lambda: graced)
        if not self._leaves_unfinished:
            left = [
                (record, self.notes.added_to(self._settler.change_for(record, INTERRUPTED, None), record))
                for record in self._running.records.values()
            ]
            if left:
                why = "a thread cannot be ended, only its process can: it may go on here while it is run elsewhere"
                self._telemetry.emit(e.HandedBack(len(left), why, self.owner, has_begun=True))
            self._running.forget_all()
            self.account.interrupted += len(left)
            self._settler.settle(left)
        await self._settler.finish()
        crashpoint("handback.after")

    def _how_it_drains(self) -> str:
        what = counted(len(self._running), "invocation")
        if self._drains_until <= self._loop_time():
            return f"it ends {what} now"
        limit = "" if self._drains_until == float("inf") else f" up to {self._drain:g} s"
        return f"it waits{limit} for {what}"

    async def _drained(self, until: Callable[[], float]) -> None:
        """Wait until no call runs any more, or until that time, which a stop in a hurry brings forward."""
        while (self._running or self._starting) and (left := until() - self._loop_time()) > 0:
            self._grant_slots()
            await self._wakeup.wait(None if left == float("inf") else left)

    # --- duties

    def _known(self) -> set[str] | None:
        return None if self._claiming else self._running.records.keys() | self._reserve.ids() | self._settler.busy
