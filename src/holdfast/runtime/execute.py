"""Execute: the calls that run in a worker, since when, and in which executors.

Work is handed over as records that are RUNNING in the store; large arguments are fetched first. Outcomes come back with
their records, on the engine's loop. Nothing is written here: the worker decides what an outcome means, and whether work
may begin at all.

**Stopping** (`CallStopper`). A cancelled call is asked first: coroutines by a CancelledError, all others by their
context. When the grace is over, or the timeout of an attempt, the call is ended by force: a process is killed, a
coroutine is cancelled (once more), an exception is raised in a thread. A call that still runs a moment later cannot be
stopped: it is given up, its record says so, and its slot stays taken until it ends.

**Suspects.** Work that was running when its process died, and again when the next one did, runs in its own process. All
calls of a worker share its process, so a crash is charged to each of them, and one is guilty. Isolated, the next crash
strikes its cause alone: a poison pill ends after its own crashes, and its neighbours succeed. One crash alone makes no
suspects: most come from the system or a person, and dozens of new processes at once would delay all work. Work that ran
in two workers that had to be killed, since they did not answer while another call was past its time, is suspected
likewise: it may hold the interpreter. A worker isolates only a few at a time; the others wait in the queue.

Some tasks cannot run in another process: those declared at a prompt, and those without a name to find them by. They
stay where they always run. So do tasks of a program that cannot be imported: an attempt to isolate them shows that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.clock import format_duration
from holdfast.codec import MARK, Codec, references
from holdfast.errors import PayloadLost, StoreError, StoreReadOnly, StoreUnavailable, StreamClosed, TimedOut
from holdfast.executors import context
from holdfast.executors.around import CallAround, CallsAround
from holdfast.executors.begun import BegunCalls
from holdfast.executors.call import (
    INTERRUPTED,
    NOT_BEGUN,
    STOPPED,
    TOO_LATE,
    Call,
    Interrupted,
    LetGo,
    Outcome,
    Raised,
    Unfit,
)
from holdfast.executors.chunks import ENDED, ChunkBuffer
from holdfast.executors.context import cancelled, deadline_in
from holdfast.executors.declared import Unreachable, address_of
from holdfast.executors.lifespan import Hooks
from holdfast.executors.local import Deliver, Executor, LoopExecutor, ThreadExecutor
from holdfast.executors.loop import LoopThread
from holdfast.executors.processes import ProcessExecutor
from holdfast.model.crashes import crashes_in_a_row, has_begun_before, kills_in_a_row
from holdfast.model.parking import GONE
from holdfast.model.records import PLAIN, InvocationRecord
from holdfast.model.retries import exception_names
from holdfast.model.status import Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.notes import NoteWriter
from holdfast.runtime.outage import Outage, cancel_tasks
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import DutyFailed, Started, Unstoppable
from holdfast.tracing import CallSpan

if TYPE_CHECKING:
    from holdfast.runtime.waits import WorkerWaits
    from holdfast.runtime.worker import Worker

MakeExecutor = Callable[[ExecutorKind, Deliver], Executor]

STUBBORN_SECONDS = 1.0  # for what is ended by force
_GAVE_WAY = frozenset(
    {
        "asyncio.exceptions:CancelledError",
        "concurrent.futures._base:CancelledError",
        "holdfast.errors:InvocationCancelled",
        "holdfast.executors.interrupts:Stopped",
    }
)
_STILL_RUNS = "its code could not be stopped and still runs"
_NEVER_BEGAN = "its event loop was blocked, and its code had not begun"
_BLOCKED = "it could not begin: other code held the interpreter lock, or blocked the event loop"
_FORCED = "its code did not end by itself and was stopped"
_NO_WORKFLOW = (  # a call of its function would run recorded steps again
    "it was submitted as a workflow, and is a task in this code: declare it with @app.workflow again, or end it"
)
_CRASHES = 2  # make a suspect, or fewer if fewer are forgiven
_KILLS = 2  # beside others that were past their time
ISOLATED_SLOTS = max(10, 4 * (os.cpu_count() or 1))  # of a worker: each is an interpreter
CROWDED_SECONDS = 3.0  # after which one looks again for room


def new_executor(
    telemetry: Telemetry,
    begun: BegunCalls,
    concurrency: int,
    coroutines: LoopThread | None,
    kind: ExecutorKind,
    deliver: Deliver,
) -> Executor:
    """Return an executor for one kind of task; `coroutines` is the loop of the app's hooks."""
    match kind:
        case ExecutorKind.THREAD:
            return ThreadExecutor(concurrency, deliver, begun)
        case ExecutorKind.LOOP:
            return LoopExecutor(deliver, telemetry, coroutines, begun)
        case ExecutorKind.PROCESS:
            return ProcessExecutor(concurrency, deliver, telemetry, begun=begun)
        case ExecutorKind.ISOLATED:
            return ProcessExecutor(
                ISOLATED_SLOTS, deliver, telemetry, calls_per_process=1, with_hooks=True, begun=begun
            )
        case ExecutorKind.WORKFLOW:
            raise AssertionError("runs have an executor that knows their worker: `Worker._make`")


class Ended(NamedTuple):
    """An invocation whose user code is done, and its duration in seconds."""

    record: InvocationRecord
    outcome: Outcome
    seconds: float


class RunningCalls:
    """The calls of one worker, from the start to the outcome, which the worker gets."""

    def __init__(
        self, worker: Worker, engine: Engine, search: Outage, make_executor: MakeExecutor, hooks: Hooks | None
    ) -> None:
        self._worker = worker
        self.around = CallsAround(hooks, engine.telemetry)
        has_middleware = hooks is not None and bool(hooks.middleware or hooks.of_tasks)
        self._is_surrounded = has_middleware or any(task.wanted for task in worker.tasks.values())
        self._codec = engine.codec
        self._chunks = engine.chunks
        if self._chunks is not None:
            self._chunks.open()
        self._limits = engine.limits
        self._payloads = engine.payloads
        self._search = search
        self._telemetry = engine.telemetry
        self._make_executor = make_executor
        self._suspects = Suspects(engine.codec, max_crashes=engine.settings.max_crash_recoveries)
        self._executors: dict[ExecutorKind, Executor] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self._began: dict[str, float] = {}
        self.records: dict[str, InvocationRecord] = {}
        self._stopper = CallStopper(self._request, self._give_up)
        self.abandoned: set[str] = set()  # calls that cannot be stopped, and have their slots
        self._slots: dict[str, int] = {}  # of runs that hold another number of slots than one
        self._more = 0  # slots that they hold beyond one each; less than zero while many only wait
        self.runs = 0
        self.waits: WorkerWaits | None = None  # of the worker, which sets it
        self.notes = NoteWriter(engine, worker.tasks, self.records.get)
        self._tracer = engine.tracer if not engine.is_core else None
        self._spans: dict[str, CallSpan] = {}  # of the calls that run, by key
        self._keys: dict[str, str] = {}  # of calls that are not called by their id, since an abandoned one is

    def __len__(self) -> int:
        return len(self.records)

    def open(self) -> None:
        """Get ready, on the engine's loop."""
        self.notes.open()
        if self.waits is not None:
            self.waits.loop = asyncio.get_running_loop()

    def forget_all(self) -> None:
        """Forget the calls that run: they end elsewhere."""
        self.records.clear()
        self.notes.forget_all()
        if self.waits is not None:
            self.waits.forget_all()

    @property
    def taken(self) -> int:
        """Return how many slots are taken. A run holds none while it only waits, and one for each of its steps."""
        return len(self.records) + self._more + len(self.abandoned)

    def slots_of(self, id: str) -> int:
        return self._slots.get(id, 1) if id in self.records else 0

    def set_slots(self, id: str, count: int) -> None:
        if id in self.records:
            self._more += count - self._slots.get(id, 1)
            self._slots[id] = count

    def _forget(self, id: str) -> InvocationRecord | None:
        """Give back the slots of an invocation, and return its record."""
        self._more -= self._slots.pop(id, 1) - 1
        if self.waits is not None and self.waits.calls:
            self.waits.forget(id)
        record = self.records.pop(id, None)
        self.runs -= record is not None and record.run is not None
        return record

    @property
    def fetching(self) -> int:
        """Return how many invocations wait for their arguments."""
        return len(self._fetching)

    @property
    def isolated(self) -> tuple[str, ...]:
        """Return the invocations that were moved into processes of their own."""
        return self._suspects.isolated

    # --- beginning

    def begin(self, records: Sequence[InvocationRecord]) -> None:
        """Take a slot for each of these, and call them; those with large arguments once these are fetched."""
        here: list[InvocationRecord] = []
        unfit: list[InvocationRecord] = []
        for record in records:
            if (earlier := self._forget(record.id)) is not None:  # a life of a run, which is about to leave
                self.notes.forget(earlier)
            self.records[record.id] = record
            self.runs += record.run is not None
            if record.run is not None and self._worker.tasks[record.task].executor is not ExecutorKind.WORKFLOW:
                unfit.append(record)
            elif record.arguments[:1] == MARK:
                task = asyncio.create_task(self._fetch_and_call(record))
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
            else:
                here.append(record)
        self._call([(record, {}) for record in here])
        if unfit:
            self._deliver([(record.id, Unfit(_NO_WORKFLOW)) for record in unfit])

    async def _fetch_and_call(self, record: InvocationRecord) -> None:
        found: dict[str, bytes] | Unfit | None = None

        async def fetch(again: bool) -> dict[str, bytes] | Unfit:
            try:
                return await self._payloads.fetch(references(record.arguments))
            except (StoreUnavailable, StoreReadOnly):
                raise  # it may pass
            except Exception as error:
                why = error if isinstance(error, PayloadLost) else f"{type(error).__name__}: {error}"
                return Unfit(f"{GONE}: {why}")

        try:
            found = await self._search.until_answered(f"fetching the arguments of {record.id}", fetch)
        except (StoreError, asyncio.CancelledError) as error:
            if isinstance(error, StoreError):  # a stop
                self._telemetry.emit(DutyFailed("worker", f"fetch the arguments of {record.id}", error))
        why_not = self._worker.why_not()
        mine = self.records.get(record.id)
        if mine is None or mine.epoch != record.epoch:
            pass  # it was cancelled meanwhile; a run may have come back since
        elif isinstance(found, Unfit):
            self._deliver([(record.id, found)])
        elif found is not None and not why_not:
            self._call([(record, found)])
        elif self._forget(record.id) is not None:
            self._worker.hand_back([record], why_not, 0.0)

    def _call(self, records: Sequence[tuple[InvocationRecord, dict[str, bytes]]]) -> None:
        batches: dict[ExecutorKind, list[Call]] = {}
        crowded: list[InvocationRecord] = []
        now, ticket = _loop_time(), self._worker.begun.ticket
        for record, payloads in records:
            task = self._worker.tasks[record.task]
            is_plain = record.attempt < 2 or task.executor is ExecutorKind.WORKFLOW
            kind = task.executor if is_plain else self._suspects.executor_for(record, task)
            if kind is None:
                crowded.append(record)
                self._forget(record.id)
                continue
            self._began[record.id] = now
            span = None if self._tracer is None else self._tracer.attempt(record)
            call = Call(
                record.id,
                task.name,
                task.function,
                task.signature,
                record.arguments,
                self._codec,
                self._limits,
                payloads,
                record,
                mark=f"{record.id}~{record.epoch}",
                ticket=ticket,
                chunks=None if self._chunks is None else self._buffer_of,
                waits=self.waits if record.run is None else None,
                notes=self.notes.of if record.run is None else None,
                around=self.around_of(task) if self._is_surrounded and record.run is None else None,
                span=span,
            )
            if self.abandoned or record.terms is not PLAIN:
                call = self._limited(call, record)
            if span is not None:
                if call.key in self._spans:
                    self._end_span(call.key, LetGo())  # of a life of a run, which is about to leave
                self._spans[call.key] = span
            if record.has_streams and record.run is None and self._chunks is not None:
                self._chunks.begin_again(call)
            batches.setdefault(kind, []).append(call)
        if crowded:
            why = "all processes for isolated calls are busy"
            self._worker.hand_back(crowded, why, CROWDED_SECONDS)
        self._worker.count_started(len(records) - len(crowded))
        if self._telemetry.wants(Started):
            self._telemetry.emit(Started(tuple(record for record, _ in records if record.id in self.records)))
        if ExecutorKind.ISOLATED in batches:
            self._worker.on_isolated()  # before they can do any harm
        for kind, calls in batches.items():
            self._at(kind).start(calls)

    def _limited(self, call: Call, record: InvocationRecord) -> Call:
        """Return the call with the time limits of its terms; it is watched, if there are any."""
        terms, rate = record.terms, self._worker.tasks[record.task].rate
        if rate is not None and terms.rate_key is not None:
            call = call._replace(begin_within=rate.guard + rate.interval)
        if record.id in self.abandoned:
            self._keys[record.id] = key = f"{record.id}~{record.epoch}"
            call = call._replace(key=key)
        if (terms.timeout is None and terms.soft_timeout is None) or record.run is not None:
            return call
        self._stopper.watch(record)
        deadline = None if terms.timeout is None else deadline_in(terms.timeout)
        return call._replace(deadline=deadline, has_soft_timeout=terms.soft_timeout is not None)

    def around_of(self, task: TaskDefinition) -> CallAround | None:
        """Return the middleware around calls of a task or step. Holdfast's own tasks have none."""
        if task.is_hidden and not task.name.startswith(context.STEP):
            return None
        return self.around.of(task.name, task.wanted)

    def kind_of(self, record: InvocationRecord) -> ExecutorKind:
        """Return where a call runs."""
        return ExecutorKind.ISOLATED if record.id in self.isolated else self._worker.tasks[record.task].executor

    def executor_of(self, record: InvocationRecord) -> Executor:
        return self._at(self.kind_of(record))

    def _at(self, kind: ExecutorKind) -> Executor:
        if kind not in self._executors:
            self._executors[kind] = self._make_executor(kind, self._deliver)
        return self._executors[kind]

    # --- ending

    def _deliver(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """Take the outcomes of user code, on the engine's loop. Those of calls that have written to streams are taken
        when their chunks are durable.
        """
        if self._chunks is not None and self._chunks.calls:
            outcomes = self._chunks.hold(outcomes, self._chunks_written)
        self._take(outcomes)

    def _chunks_written(self, key: str, outcome: Outcome, is_marked: bool) -> None:
        if is_marked:
            self._mark(key.partition("~")[0])
        self._take([(key, outcome)])

    def _buffer_of(self, call: Call) -> ChunkBuffer:
        """Return where a call puts its chunks, as long as it runs. From any thread."""
        assert self._chunks is not None
        about = call.about
        record = self.records.get(about.id) if isinstance(about, InvocationRecord) else None
        if record is None or not isinstance(about, InvocationRecord) or record.epoch != about.epoch:
            raise StreamClosed(ENDED)
        return self._chunks.buffer_of(call)

    def _mark(self, id: str) -> None:
        """Note that an invocation has streams: the write of its end says so."""
        if (record := self.records.get(id)) is not None:
            self.records[id] = msgspec.structs.replace(record, has_streams=True)

    def _take(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        ended, not_begun, now = [], dict[str, list[InvocationRecord]](), _loop_time()
        for key, outcome in outcomes:
            id = key
            if self._spans:
                outcome = self._end_span(key, outcome)
            if self.abandoned or self._keys:
                if key in self.abandoned:
                    self.abandoned.discard(key)
                    cancelled.discard(key.partition("~")[0])
                    continue
                id = key.partition("~")[0]
                self._keys.pop(id, None)
            record = self._forget(id)
            began = self._began.pop(id, now)
            if isinstance(outcome, LetGo):
                if record is not None:
                    self.notes.forget(record)
                self._stopper.forget(id)
                cancelled.discard(id)
                self._worker.on_let_go()
                continue
            if record is None:
                self._stopper.forget(id)
                cancelled.discard(id)
                continue  # it was marked as killed already when the drain timeout was over
            if record.attempt > 1 and self._suspects.on_isolated_outcome(id, outcome):
                self._worker.count_started(-1)
                self._worker.begin([record])
                continue
            if self._stopper.watched and id in self._stopper.watched:
                outcome = self._stopper.ended(record, outcome)
            if (outcome is NOT_BEGUN or outcome is TOO_LATE) and record.status is Status.RUNNING:
                not_begun.setdefault(_BLOCKED if outcome is NOT_BEGUN else TOO_LATE.how, []).append(record)
                continue
            ended.append(Ended(record, outcome, now - began))
        for why, records in not_begun.items():
            self._worker.count_started(-len(records))
            self._worker.hand_back(records, why)
        self._worker.end(ended)

    def _end_span(self, key: str, outcome: Outcome) -> Outcome:
        """End the span of a call, and return its outcome, which names the span if another attempt may link to it."""
        if (span := self._spans.pop(key, None)) is None:
            return outcome
        span.end(outcome, "its time was over" if self._stopper.is_late(key.partition("~")[0]) else "")
        return outcome._replace(trace=span.carrier.get("traceparent", "")) if isinstance(outcome, Raised) else outcome

    def cancel(self, record: InvocationRecord, grace_seconds: float) -> None:
        """End an invocation that its owner runs; called once or more."""
        mine = self.records.get(record.id)
        if mine is None or mine.epoch != record.epoch or mine.status is record.status:
            return
        self.records[record.id] = record
        if record.id in self._began:
            self._stopper.cancel(record, grace_seconds)
        else:  # it waits for its arguments
            self._forget(record.id)
            has_begun = record.run is None or has_begun_before(mine)
            self._worker.end([Ended(record, INTERRUPTED if has_begun else NOT_BEGUN, 0.0)])

    def _request(self, what: str, id: str) -> None:
        if what == "force" and self.waits is not None:
            self.waits.end_by_force(id)
        keys = [self._keys.get(id, id)]
        for executor in self._executors.values():
            getattr(executor, what)(keys)

    def _give_up(self, id: str, in_the_end: InTheEnd) -> None:
        """Go on without a call that cannot be stopped. Its slot is taken until it ends."""
        key = self._keys.pop(id, id)
        if (span := self._spans.pop(key, None)) is not None:
            span.end(INTERRUPTED, _STILL_RUNS)
        if self._chunks is not None and self._chunks.cut(key, "the call did not end in time"):
            self._mark(id)
        record = self._forget(id)
        if record is None:
            return
        self._telemetry.emit(Unstoppable(record))
        self._stopper.forget(id)
        self.abandoned.add(key)
        is_blocked = any(executor.is_blocked(key) for executor in self._executors.values())
        has_begun = not is_blocked or record.run is not None or self._worker.begun.has(f"{record.id}~{record.epoch}")
        outcome = in_the_end(_STILL_RUNS if has_begun else _NEVER_BEGAN)
        self._suspects.on_isolated_outcome(id, outcome)
        self._worker.end([Ended(record, outcome, _loop_time() - self._began.pop(id, 0.0))])
        self._worker.on_given_up(is_blocked)

    def interrupt(self) -> None:
        """End user code, where that is possible."""
        for executor in self._executors.values():
            executor.interrupt(list(self.records))

    def let_go(self, why: str) -> None:
        """Have calls handed over where that is possible before they end: runs, between two steps."""
        for executor in self._executors.values():
            executor.let_go(why)

    def stop_fetching(self) -> None:
        for task in self._fetching:
            task.cancel()

    async def close(self) -> None:
        self._stopper.close()
        for key in tuple(self._spans):
            self._end_span(key, INTERRUPTED)
        await cancel_tasks(*self._fetching)
        await self.notes.close()
        for executor in self._executors.values():
            executor.close()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


Request = Callable[[str, str], None]
InTheEnd = Callable[[str], Outcome]  # the outcome of a call that could not be stopped, with these words
GiveUp = Callable[[str, InTheEnd], None]


class CallStopper:
    """Ends calls by force after a cancellation or a timeout. `request` calls the executor of an invocation by one of
    "cancel", "raise_soft_timeout", "force"; `give_up` goes on without the call.
    """

    def __init__(self, request: Request, give_up: GiveUp) -> None:
        self._request = request
        self._give_up = give_up
        self._codec = Codec()
        self._late: set[str] = set()
        self._forced: set[str] = set()
        self._asked: set[str] = set()
        self.watched: dict[str, list[asyncio.TimerHandle]] = {}

    def watch(self, record: InvocationRecord) -> None:
        """Set the timers of a call that begins."""
        terms, id = record.terms, record.id
        if terms.soft_timeout is not None:
            self._later(id, terms.soft_timeout, lambda: self._request("raise_soft_timeout", id))
        if terms.timeout is not None:
            self._later(id, terms.timeout, lambda: self._time_out(record))

    def cancel(self, record: InvocationRecord, grace_seconds: float) -> None:
        """Ask a running call to end within that time."""
        id = record.id
        self._silence(id)
        self._asked.add(id)
        context.cancelled.add(id)
        self._request("cancel", id)
        self._later(id, grace_seconds, lambda: self._force(id, Interrupted))

    def _time_out(self, record: InvocationRecord) -> None:
        self._late.add(record.id)
        self._force(record.id, lambda how: timed_out(record, self._codec, f"; {how}"))

    def _force(self, id: str, in_the_end: InTheEnd) -> None:
        self._forced.add(id)
        self._request("force", id)
        self._later(id, STUBBORN_SECONDS, lambda: self._give_up(id, in_the_end))

    def _later(self, id: str, seconds: float, what: Callable[[], None]) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, what)
        self.watched.setdefault(id, []).append(timer)

    def _silence(self, id: str) -> None:
        for timer in self.watched.pop(id, ()):
            timer.cancel()

    def ended(self, record: InvocationRecord, outcome: Outcome) -> Outcome:
        """Return the outcome of a watched call: its own, or that of a timeout or a cancellation."""
        id = record.id
        is_late, is_forced, is_asked = id in self._late, id in self._forced, id in self._asked
        self.forget(id)
        context.cancelled.discard(id)
        stopped = is_forced or (isinstance(outcome, Raised) and not _GAVE_WAY.isdisjoint(outcome.kinds))
        if is_asked and isinstance(outcome, Raised) and stopped:
            return Interrupted(_FORCED if is_forced else "")
        if is_asked and isinstance(outcome, Interrupted) and not outcome.how:
            return Interrupted(_FORCED) if is_forced else STOPPED
        began = outcome is not NOT_BEGUN and outcome is not TOO_LATE
        if is_late and not is_asked and isinstance(outcome, Interrupted | Raised) and began:
            return timed_out(record, self._codec)
        return outcome

    def is_late(self, id: str) -> bool:
        """Return whether its time is over."""
        return id in self._late

    def forget(self, id: str) -> None:
        self._silence(id)
        self._late.discard(id)
        self._forced.discard(id)
        self._asked.discard(id)

    def close(self) -> None:
        for id in tuple(self.watched):
            self.forget(id)


def timed_out(record: InvocationRecord, codec: Codec, more: str = "") -> Raised:
    """Return the outcome of an attempt whose time is over."""
    why = f"timed out after {format_duration(record.terms.timeout or 0.0)}{more}"
    error = codec.encode_error(TimedOut(f"{record.task} {record.id} {why}", invocation_id=record.id))
    return Raised(error, f"TimedOut: {why}", kinds=exception_names(TimedOut))


class Suspects:
    def __init__(self, codec: Codec, *, max_crashes: int) -> None:
        self._codec = codec
        self._crashes = max(1, min(_CRASHES, max_crashes))
        self._elsewhere: set[str] = set()
        self._at_home: set[str] = set()

    @property
    def isolated(self) -> tuple[str, ...]:
        """Return the invocations that run in processes of their own now."""
        return tuple(sorted(self._elsewhere))

    def executor_for(self, record: InvocationRecord, task: TaskDefinition) -> ExecutorKind | None:
        """Return the executor for this attempt; None if it has to be isolated, and no isolated process is free."""
        if task.executor is ExecutorKind.PROCESS or not self._is_suspect(record):
            return task.executor
        if record.id in self._at_home or not self._can_be_found(task):
            return task.executor
        if len(self._elsewhere) >= ISOLATED_SLOTS:
            return None
        self._elsewhere.add(record.id)
        return ExecutorKind.ISOLATED

    def _is_suspect(self, record: InvocationRecord) -> bool:
        return crashes_in_a_row(record.history) >= self._crashes or kills_in_a_row(record.history) >= _KILLS

    def _can_be_found(self, task: TaskDefinition) -> bool:
        try:
            address_of(task.name, task.function, self._codec)
        except Unreachable:
            return False
        return True

    def on_isolated_outcome(self, id: str, outcome: Outcome) -> bool:
        """Note an outcome. Return True if it could not begin in its own process, and is yet to be tried where its task
        usually runs.
        """
        went = id in self._elsewhere
        self._elsewhere.discard(id)
        self._at_home.discard(id)
        if went and isinstance(outcome, Unfit):
            self._at_home.add(id)
            return True
        return False
