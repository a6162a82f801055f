"""The runs of one worker, on the thread of the user's loop: their steps, timers and ways to the engine.

`Host` is used on that thread only. The engine's side (`holdfast.workflows.executor.WorkflowExecutor`) lives on the
engine's loop. Each hands functions to the other (`Mailbox`): all that gather in one turn are handed over together.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from holdfast.codec import Reference
from holdfast.errors import UsageError
from holdfast.executors.call import Call, Outcome, bind, raised
from holdfast.executors.context import Context
from holdfast.executors.declared import Unreachable, address_of
from holdfast.executors.local import Executor, InlineExecutor, ThreadExecutor
from holdfast.executors.processes import ProcessExecutor
from holdfast.executors.sharing import StepPort
from holdfast.ids import InvocationId, derived_id
from holdfast.model.records import InvocationRecord, ReplyTo, Terms, first_history
from holdfast.model.retries import Never, dump_policy
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.execute import ISOLATED_SLOTS, STUBBORN_SECONDS
from holdfast.telemetry.events import DutyFailed, WorkflowWarning
from holdfast.tracing import CallSpan
from holdfast.workflows.attempts import Item
from holdfast.workflows.context import body_context
from holdfast.workflows.declaring import GRACE_SECONDS
from holdfast.workflows.events import Event
from holdfast.workflows.life import Command
from holdfast.workflows.loaded import Loaded
from holdfast.workflows.run import Run
from holdfast.workflows.steps import StepDefinition, StepOptions
from holdfast.workflows.transactional import TransactionalStep
from holdfast.workflows.values import references_of

if TYPE_CHECKING:
    from holdfast.workflows.executor import WorkflowExecutor

T = TypeVar("T")


class Mailbox:
    """Functions on their way to a loop of another thread, or of this one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_here: bool) -> None:
        self._loop = loop
        self._call = loop.call_soon if is_here else loop.call_soon_threadsafe
        self._waiting: deque[Callable[[], object]] = deque()
        self._announced = False

    def post(self, function: Callable[[], object]) -> None:
        self._waiting.append(function)
        self._announce()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            try:
                self._call(self._empty)
            except RuntimeError:
                return  # that loop is closed: the worker is gone

    def _empty(self) -> None:
        # Cleared first: what comes too late for this visit announces itself again.
        self._announced = False
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()()
        finally:
            if self._waiting:  # after a defect in one of them
                self._announce()


class Host:
    def __init__(self, engine_side: WorkflowExecutor, loop: asyncio.AbstractEventLoop, *, is_here: bool) -> None:
        self._there = engine_side
        self.engine = engine_side.engine
        self.loop = loop
        self.inbox = Mailbox(loop, is_here=is_here)  # of this thread
        self.streams = engine_side.streams
        settings = self.engine.settings
        self.linger_seconds = settings.workflow_linger_seconds
        self.max_events = settings.workflow_max_events
        self.grace_seconds = GRACE_SECONDS
        self.is_closing = False
        self._runs: dict[str, Run] = {}
        self._step_runs: dict[str, Run] = {}
        self._transactional: dict[str, TransactionalStep] = {}
        self._executors: dict[ExecutorKind, Executor] = {}
        self._slots: dict[str, int] = {}  # that runs hold
        self._asked: dict[str, int] = {}  # and that they wait for
        self._most_runs = settings.workflow_cache
        self._forced: dict[str, asyncio.TimerHandle] = {}
        self._on_threads: set[str] = set()  # steps
        self._abandoned: set[str] = set()  # of these, that cannot be stopped
        self._limits: dict[str, float] = {}  # by when running steps have to end
        self.steps_end_by = float("inf")  # the first of them; the engine's side reads it

    # --- from the engine

    def begin(self, call: Call, task: TaskDefinition, loaded: Loaded) -> None:
        run = Run(self, call, task, loaded)
        self._runs[run.key] = run
        self._slots[run.key] = 1
        if self._there.why_leaving:
            run.leave(self._there.why_leaving)
        self._guarded(run, Run.begin)

    def run_of(self, key: str) -> Run | None:
        return self._runs.get(key)

    @property
    def runs(self) -> Sequence[Run]:
        return list(self._runs.values())

    def with_run(self, key: str, do: Callable[[Run], object]) -> None:
        if (run := self._runs.get(key)) is not None:
            self._guarded(run, do)

    def _guarded(self, run: Run, do: Callable[[Run], object]) -> None:
        """Run a method of a run. A defect of Holdfast must not strand it."""
        try:
            do(run)
        except Exception as error:
            self.report(f"serve the run {run.id}", error)
            run.lost(f"{type(error).__name__}: {error}")

    def leave_all(self, why: str) -> None:
        for run in list(self._runs.values()):
            run.leave(why)

    def close(self) -> None:
        self.is_closing = True
        for run in list(self._runs.values()):
            run.interrupt()
        for executor in self._executors.values():
            executor.close()

    # --- for runs: the surroundings

    def now(self) -> float:
        return self.engine.store.now()

    def random(self) -> float:
        return self.engine.rng.random()

    def call_soon(self, function: Callable[[], None]) -> None:
        self.loop.call_soon(function)

    def call_later(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, function)

    def after(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function after `seconds` of user code, which takes real time in tests too."""
        return self.loop.call_later(seconds, function)

    def may_start(self) -> bool:
        return self._there.may_start()

    def warn(self, record: InvocationRecord, text: str) -> None:
        self._there.post(lambda: self.engine.telemetry.emit(WorkflowWarning(record, text)))

    def report(self, what: str, error: Exception) -> None:
        self._there.post(lambda: self.engine.telemetry.emit(DutyFailed("workflows", what, error)))

    # --- for runs: steps

    def start_step(self, run: Run, step: StepDefinition, call: Call, *, apart: bool) -> None:
        kind, call = step.executor, call._replace(around=self._there.calls_around.of(step.task, step.wanted))
        if step.transactional:  # never apart: a child process has no store
            self._step_runs[call.key] = run
            self._note(call, kind)
            return self._start_transactional(run, call, self._executor(kind), is_async=kind is ExecutorKind.LOOP)
        if apart and kind is not ExecutorKind.PROCESS and _can_be_found(call):
            kind = ExecutorKind.ISOLATED
        self._step_runs[call.key] = run
        self._note(call, kind)
        self._executor(kind).start([call])

    def _note(self, call: Call, kind: ExecutorKind) -> None:
        """Note where a step runs, and its time limit: if this loop is blocked, the engine's loop has to enforce it."""
        if call.deadline is not None:
            self._limits[call.key] = call.deadline
            self._publish_limits()
        if isinstance(self._executor(kind), ThreadExecutor):
            self._on_threads.add(call.key)

    def _start_transactional(self, run: Run, call: Call, executor: Executor, *, is_async: bool) -> None:
        try:
            transaction = self.engine.store.transaction(is_async=is_async, owner=run.record.owner or "")
        except UsageError as error:
            refused = raised(call, error)._replace(fatal=True)
            return self.call_soon(lambda: self._on_outcomes([(call.key, refused)]))
        step = TransactionalStep(self, self._there, run, call.key, transaction, is_async=is_async)
        self._transactional[call.key] = step
        step.start(call, executor)

    def give_up(self, key: str) -> bool:
        """Return whether a step can be given up that still runs. Its transaction, if it has one, is rolled back then;
        False if that is being committed.
        """
        step = self._transactional.get(key)
        if step is not None and not step.give_up():
            return False
        self._lift_limit(key)
        self._abandon(key)
        self.streams.chunks.cut(key, "the step did not end in time")
        return True

    def _abandon(self, key: str) -> None:
        """Count the thread of a step that cannot be stopped as a slot of the worker, until the step ends. Runs keep
        their own slots, so there has to be another thread for their next steps.
        """
        if key in self._on_threads and key not in self._abandoned:
            self._abandoned.add(key)
            run = self._step_runs.get(key)
            record = None if run is None else run.record
            self._there.post(functools.partial(self._there.step_given_up, key, record))
            self._set_threads()

    def _lift_limit(self, key: str) -> None:
        if self._limits.pop(key, None) is not None:
            self._publish_limits()

    def _publish_limits(self) -> None:
        first = min(self._limits.values(), default=float("inf"))
        if first != self.steps_end_by:
            self.steps_end_by = first
            self._there.begun.set_steps_end_by(first)

    def _set_threads(self) -> None:
        threads, slots = self._executors[ExecutorKind.THREAD], self._there.concurrency
        assert isinstance(threads, ThreadExecutor)
        threads.set_size(slots + min(slots, len(self._abandoned)))

    def _thread_is_free(self, key: str) -> None:
        self._on_threads.discard(key)
        if key in self._abandoned:
            self._abandoned.discard(key)
            self._there.post(functools.partial(self._there.given_up_step_ended, key))
            self._set_threads()

    def _executor(self, kind: ExecutorKind) -> Executor:
        if kind not in self._executors:
            concurrency, telemetry = self._there.concurrency, self.engine.telemetry
            if kind is ExecutorKind.LOOP:
                made: Executor = InlineExecutor(self._on_outcomes, takes_functions=False)
            elif kind is ExecutorKind.THREAD:
                made = self._there.thread_executor(concurrency, self._on_outcomes)
            elif kind is ExecutorKind.PROCESS:
                made = ProcessExecutor(concurrency, self._on_outcomes, telemetry)
            else:
                made = ProcessExecutor(
                    ISOLATED_SLOTS, self._on_outcomes, telemetry, calls_per_process=1, with_hooks=True
                )
            self._executors[kind] = made
        return self._executors[kind]

    def _on_outcomes(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """Take the outcomes of steps; of those that have written to streams, when their chunks are durable."""
        self._take_outcomes(self.streams.chunks.hold(outcomes, self._chunks_written))

    def _chunks_written(self, key: str, outcome: Outcome, is_marked: bool) -> None:
        self.inbox.post(lambda: self._take_outcomes([(key, outcome)]))

    def _take_outcomes(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        for key, outcome in outcomes:
            run = self._step_runs.pop(key, None)
            self._thread_is_free(key)
            self._lift_limit(key)
            if (timer := self._forced.pop(key, None)) is not None:
                timer.cancel()
            try:
                if (step := self._transactional.pop(key, None)) is not None:
                    step.finish(outcome)
                elif run is not None:
                    run.attempts.ended(key, outcome)
            except Exception as error:  # a defect of ours must not strand the run, nor the other steps
                self.report(f"record the end of {key}", error)
                if run is not None:
                    run.lost(f"{type(error).__name__}: {error}")

    def cancel_step(self, key: str, step: StepDefinition | None, abandon: Callable[[], None]) -> None:
        """Ask a step to end; when its grace is over, end it by force, and in the end go on without it."""
        for executor in list(self._executors.values()):
            executor.cancel([key])
        if key in self._step_runs:
            grace = 10.0 if step is None else step.cancel_grace
            self._forced[key] = self.after(grace, lambda: self.force_step(key, abandon))

    def force_step(self, key: str, give_up: Callable[[], None]) -> None:
        for executor in list(self._executors.values()):
            executor.force([key])
        if key in self._step_runs:

            def gave_up() -> None:
                if self._step_runs.get(key) is not None:
                    give_up()

            self._forced[key] = self.after(STUBBORN_SECONDS, gave_up)

    # --- for runs: the engine

    def append(self, run: Run, items: Sequence[Item]) -> None:
        self._there.append(run.key, run.record, run.pages.tail, run.generation, list(items))

    def suspend(self, run: Run, wake_at: float | None, why: str) -> None:
        self._there.post(functools.partial(self._there.suspend, run.key, run.record, self._left_by(run), wake_at, why))

    def set_attributes(self, run: Run, attributes: Mapping[str, str]) -> None:
        self._there.post(functools.partial(self._there.set_attributes, run.key, attributes))

    def hand_over(self, run: Run, why: str) -> None:
        self._there.post(functools.partial(self._there.hand_over, run.key, run.record, self._left_by(run), why))

    def _left_by(self, run: Run) -> dict[str, Any]:
        assert run.life is not None
        # In the middle of a replay, a body has attributes of an earlier time.
        is_new = run.life.attributes != run.stored_attributes and not run.is_replaying
        return {
            "tail": run.pages.tail,
            "started_at": run.started_at,
            "first_started_at": run.first_started_at,
            "attributes": dict(run.life.attributes) if is_new else UNSET,
            "handled": run.durably_handled,
            "has_hooks": run.hooks.has_any,
        }

    def update(self, run: Run) -> None:
        """Write the state of a run that goes on into its invocation."""
        self._there.post(functools.partial(self._there.update, run.key, run.record, self._left_by(run)))

    def restart(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = run.call
        try:
            bind(call.signature, args, kwargs, call.task)
            packed = run.codec.pack_call(args, kwargs, tuple(call.signature.parameters), call.limits)
        except Exception as error:
            return run.end(raised(run.call, error))
        left = self._left_by(run) | {"unread": run.hooks.unread()}
        work = functools.partial(self._there.restart, run.key, run.record, left, packed)
        self._there.post(work)

    def submit_child(self, run: Run, command: Command) -> None:
        if command.child is not None and isinstance(run.call.span, CallSpan):
            command.child = run.call.span.passed_to(command.child)
        self._there.post(functools.partial(self._there.submit_child, run.key, command))

    def watch_child(self, run: Run, command: Command) -> None:
        self._there.post(functools.partial(self._there.look_at_child, run.key, command))

    def cancel_children(self, run: Run, ids: Sequence[str], why: str, then: Callable[[], None]) -> None:
        """Ask invocations to end, then go on."""
        self._there.post(functools.partial(self._there.cancel_children, run.key, list(ids), why, then))

    def fetch_ahead(self, run: Run, wanted: Sequence[Reference], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Have large values fetched that the log of a run refers to."""
        self._there.post(functools.partial(self._there.fetch, run.key, wanted, then, is_recorded=True))

    def perform(self, run: Run, what: str, work: Callable[[], Awaitable[T]], then: Callable[[Run, T], object]) -> None:
        """Have the engine do an operation for a run, then continue with its outcome."""
        self._there.post(functools.partial(self._there.perform, run.key, what, work, then))

    def fetch_then(self, run: Run, event: Event, then: Callable[[Event, Mapping[str, bytes]], None]) -> None:
        """Have the large values of an event fetched, if it has any."""
        if wanted := references_of([event]):
            self._there.post(functools.partial(self._there.fetch, run.key, wanted, functools.partial(then, event)))
        else:
            then(event, {})

    # --- for runs: slots of the worker

    @property
    def is_crowded(self) -> bool:
        """Return whether too many bodies are in memory: then waiting bodies are evicted."""
        return len(self._runs) >= self._most_runs

    def slots(self, run: Run, wanted: int) -> int:
        """Return how many slots a run holds. If it wants more, it is pumped when it has got one."""
        held = self._slots.get(run.key, 0)
        more = min(wanted, self._there.concurrency) - held - self._asked.get(run.key, 0)
        if more > 0:
            self._asked[run.key] = self._asked.get(run.key, 0) + more
            self._there.post(functools.partial(self._there.want_slots, run.key, more))
        return held

    def granted(self, key: str, count: int) -> None:
        if (run := self._runs.get(key)) is not None:
            self._slots[key] += count
            self._asked[key] -= count
            run.pump()

    def keep_slots(self, run: Run, max_slots: int) -> None:
        """Give back the slots that a run does not need now."""
        spare = self._slots.get(run.key, 0) - max_slots
        if spare > 0:
            self._slots[run.key] = max_slots
            self._there.post(functools.partial(self._there.give_slots, run.key, spare))

    def ended(self, run: Run, outcome: Outcome, step_keys: Sequence[str]) -> None:
        self._runs.pop(run.key, None)
        self._slots.pop(run.key, None)
        self._asked.pop(run.key, None)
        for key in step_keys:
            self.streams.chunks.cut(key, "its run goes on without it")
            self._step_runs.pop(key, None)
            self._lift_limit(key)
            if (step := self._transactional.get(key)) is not None:
                step.give_up()
            if key in self._on_threads:  # it may be about to end
                self.after(STUBBORN_SECONDS, functools.partial(self._abandon, key))
        if step_keys:
            for executor in list(self._executors.values()):
                executor.interrupt(step_keys)
        left = None if run.life is None else self._left_by(run)
        self._there.post(functools.partial(self._there.run_ended, run.key, outcome, left))

    # --- what user code sees

    def body_context(self, run: Run) -> Context:
        return body_context(run.record, run)

    def step_context(
        self, run: Run, command: Command, attempt: int, first_at: float, data: dict[str, object]
    ) -> Context:
        record, step = run.record, command.step
        assert step is not None
        assert run.life is not None
        port = StepPort(data, dict(run.life.attributes))
        port.is_cancelled = False
        return Context(
            invocation_id=record.id,
            app=record.app,
            task=step.name,
            attempt=attempt,
            epoch=record.epoch,
            idempotency_key=_effects_key(run, command),
            is_last_attempt=None,
            origin=record.origin,
            started_at=first_at,
            run=port,
        )

    def step_record(self, run: Run, command: Command) -> InvocationRecord:
        """Return the invocation of a step that is sent elsewhere. Its id follows from the run and the call."""
        step, options, parent = command.step, command.options, run.record
        assert step is not None
        task = self._there.tasks.get(step.task)
        if task is None:
            raise UsageError(f"the step {step.name} is not declared in this worker")
        now, past = self.now(), run.replay.past.get(command.call.id)
        derived = derived_id("step", parent.id, str(run.generation), command.call.id, at=command.at)
        reply_to = ReplyTo(
            run=parent.id,
            call=command.call.id,
            generation=run.generation,
            root=parent.root_id,
            ends_with_run=True,
            effects_key=_effects_key(run, command),
        )
        return InvocationRecord(
            id=InvocationId(past.child) if past is not None and past.child else derived,
            app=parent.app,
            task=step.task,
            arguments=command.call.data,
            queue=options.queue or step.queue or task.queue,
            tags=tuple(sorted(options.tags if options.tags is not None else step.tags)),
            at_most_once=step.at_most_once,
            created_at=now,
            due_at=now - self.engine.store.clock_error(),
            changed_at=now,
            terms=_terms(task, options, self.engine.settings.archive_retention_seconds),
            parent_id=parent.id,
            reply_to=reply_to,
            history=first_history(self.engine.ids.operation(), now),
        )


def _effects_key(run: Run, command: Command) -> str:
    """Return the idempotency key of a step: the same in every life of its run, wherever it runs."""
    within = f"{run.generation}/{command.call.id}" if run.generation else command.call.id
    return f"{run.record.key_of_effects}/{within}"


def _terms(task: TaskDefinition, options: StepOptions, retention_seconds: float) -> Terms:
    """Return the terms of a step that is sent elsewhere: those of its declaration, unless the call says otherwise."""
    terms = task.terms(retention_seconds)
    if options.timeout is not None:
        terms = msgspec.structs.replace(terms, timeout=options.timeout)
    if options.retries is not None:
        policy = None if isinstance(options.retries, Never) else dump_policy(options.retries)
        terms = msgspec.structs.replace(terms, retries=policy)
    return terms


def _can_be_found(call: Call) -> bool:
    """Return whether another process can find the function of a step."""
    try:
        address_of(call.task, call.function, call.codec)
    except Unreachable:
        return False
    return True
