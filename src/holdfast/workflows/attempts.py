"""Attempts: the steps of a run that run here, from their start to the events that record their end.

A quick step is recorded once, after it ran: created, started and ended in one page. A step that takes longer than most
has its start written, so that others see it. A failed attempt is recorded with the time of the next one, or with the
error that the body gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.codec import Payload
from holdfast.errors import CodecError, TimedOut, WorkerLost, WorkflowError
from holdfast.executors.call import (
    INTERRUPTED,
    STOPPED,
    Call,
    Crashed,
    Interrupted,
    Outcome,
    Raised,
    Returned,
    Unfit,
    raised,
)
from holdfast.executors.context import Context
from holdfast.model.decoding import ahead
from holdfast.model.retries import Never, Retry, as_asked, decide
from holdfast.tracing import CallSpan
from holdfast.workflows import events as e
from holdfast.workflows.events import Event
from holdfast.workflows.life import Command
from holdfast.workflows.rules import Past

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

SLOW_STEP_SECONDS = 1.0  # after which the start of a step is written, so that others see it


class Item(msgspec.Struct):
    """An event on its way into the log. The body has `seen` it if it was delivered, or said, already."""

    event: Event
    seen: bool = False
    payloads: tuple[Payload, ...] = ()
    then: Callable[[], None] | None = None
    is_urgent: bool = False  # others want to see it now

    @property
    def may_wait(self) -> bool:
        return self.seen and self.then is None and not self.is_urgent


class RunningStep(msgspec.Struct):
    """An attempt of a step."""

    command: Command
    key: str
    attempt: int
    began_at: float
    slow: asyncio.TimerHandle | None = None
    limit: asyncio.TimerHandle | None = None
    is_late: bool = False
    context: Any = None
    span: CallSpan | None = None


class Attempts:
    """The steps of one run. `retries` are those that wait for their next attempt, with its time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.running: dict[str, RunningStep] = {}
        self._calls: dict[str, str] = {}  # of the running ones, by key
        self.retries: dict[str, tuple[float, Command]] = {}

    def start(self, command: Command, attempt: int) -> None:
        if self._run.is_over:
            return
        id, step = command.call.id, command.step
        assert step is not None
        past = self._run.replay.past.setdefault(id, Past())
        began_at = self._run.at()
        past.started_at = began_at if past.started_at is None else past.started_at
        running = RunningStep(command, f"{self._run.key}/{id}/{attempt}", attempt, began_at)
        try:
            context = self._step_context(command, attempt, past.started_at)
        except CodecError as error:  # the body has changed a value of the data in its place
            failed = self._run.codec.encode_error(error)
            end = Event(type=e.STEP_FAILED, at=self._run.at(), call=id, error=failed, why=str(error)[:500])
            return self._run.record_end(command, end)
        running.context = context.run
        call = Call(
            running.key,
            step.task,
            step.function,
            step.signature,
            command.call.data,
            self._run.codec,
            self._run.call.limits,
            dict(command.payloads),
            context,
            chunks=self._run.host.streams.of_step(self._run, command, attempt, frozenset(past.streams)),
        )
        if isinstance(above := self._run.call.span, CallSpan):
            running.span = above.step(command.call.name, id, attempt)
            call = call._replace(span=running.span)
        timeout = command.options.timeout or step.timeout
        if timeout is not None:
            call = call._replace(deadline=began_at + timeout)
            running.limit = self._run.host.after(timeout, lambda: self._step_late(id))
        self.running[id] = running
        self._calls[running.key] = id
        if not past.attempts:
            running.slow = self._run.host.call_later(SLOW_STEP_SECONDS, lambda: self._say_started(id))
        if past.streams:
            self._run.host.streams.step_begins_again(call)
        self._run.host.start_step(self._run, step, call, apart=self._run.is_suspect)

    def due(self, now: float) -> list[Command]:
        """Return the steps whose next attempt is due, and wait for them no more."""
        ripe = [(id, command) for id, (due, command) in self.retries.items() if due <= now]
        for id, _ in ripe:
            del self.retries[id]
            self._run.replay.past[id].retry_at = None
        return [command for _, command in ripe]

    def retry_now(self) -> None:
        """Make all next attempts due."""
        now = self._run.host.now()
        self.retries = {id: (now, command) for id, (_, command) in self.retries.items()}
        for past in self._run.replay.past.values():  # of those that this owner has not begun to wait for
            past.retry_at = None

    def _step_context(self, command: Command, attempt: int, first_at: float) -> Context:
        assert self._run.life is not None
        codec, shared = self._run.codec, self._run.life.data
        data = codec.decode(codec.encode(shared, at="context().data")) if shared else {}
        return self._run.host.step_context(self._run, command, attempt, first_at, data)

    def _step_late(self, id: str) -> None:
        if (step := self.running.get(id)) is not None:
            step.is_late = True
            self._run.host.force_step(step.key, lambda: self._on_late_step(id))

    def _on_late_step(self, id: str) -> None:
        """Go on without a step that does not end although its time is over."""
        if id in self.running and self._run.host.give_up(self.running[id].key):
            self.ended(self.running[id].key, INTERRUPTED)

    def _say_started(self, id: str) -> None:
        """Write down that a step runs: it takes longer than most."""
        if (step := self.running.get(id)) is None or self._run.is_over:
            return
        step.slow = None
        self.gather_start(step, is_urgent=True)
        self._run.flush()

    def gather_start(self, step: RunningStep, *, is_urgent: bool = False) -> None:
        id = step.command.call.id
        past = self._run.replay.past.setdefault(id, Past())
        if not past.created:
            past.created = True
            self._run.gather(Item(self._run.created(step.command), True, step.command.payloads))
        if past.attempts < step.attempt:
            past.attempts = step.attempt
            self._run.gather(Item(self._run.started(id, step.attempt, step.began_at), True, is_urgent=is_urgent))

    def is_running(self, key: str) -> bool:
        """Return whether a step has not ended. From any thread."""
        step = self.running.get(self._calls.get(key, ""))
        return step is not None and step.key == key

    def stream_opened(self, id: str, attempt: int, name: str, then: Callable[[bool], None]) -> None:
        """Write down that a step has begun and writes to a stream: its next attempt has to know both."""
        step = self.running.get(id)
        if step is None or step.attempt != attempt or self._run.is_over:
            return then(False)
        self.gather_start(step)
        self._run.replay.past[id].streams.add(name)
        event = Event(type=e.STREAM_OPENED, at=self._run.at(), call=id, name=name, attempt=attempt)
        self._run.gather(Item(event, True, (), lambda: then(True)))
        self._run.flush()

    # --- steps end

    def ended(self, key: str, outcome: Outcome) -> None:
        step = self.running.get(self._calls.pop(key, ""))
        if step is None or step.key != key or self._run.is_over:
            return
        id, command = step.command.call.id, step.command
        del self.running[id]
        self.quiet(step, outcome)
        if (isinstance(outcome, Interrupted) and step.is_late) or (isinstance(outcome, Raised) and step.is_late):
            outcome = self._timed_out(step)
        elif isinstance(outcome, Crashed):
            why = f"the process that ran {id} died: {outcome.why}"
            error = self._run.codec.encode_error(WorkerLost(why, invocation_id=self._run.id))
            outcome = Raised(error, why, kinds=("holdfast.errors:WorkerLost",))
        elif isinstance(outcome, Unfit):
            error = self._run.codec.encode_error(WorkflowError(outcome.why))
            outcome = Raised(error, outcome.why, fatal=True)
        elif isinstance(outcome, Interrupted) and not command.is_cancelled and not self._run.is_cancelling:
            if self._run.host.is_closing or outcome is STOPPED:
                return  # its worker ends it: the run is handed back
            outcome = raised(self._run.call, asyncio.CancelledError(f"{id} has cancelled itself"))
        at = self._run.at()
        if isinstance(outcome, Returned):
            end = Event(type=e.STEP_COMPLETED, at=at, call=id, data=outcome.result, attempt=step.attempt)
            self.gather_start(step)
            self._gather_carried(step)
            self._run.record_end(command, end, outcome.payloads)
        elif isinstance(outcome, Interrupted) or (command.is_cancelled and _is_cancelled(outcome)):
            self._run.record_end(command, Event(type=e.STEP_FAILED, at=at, call=id, why="cancelled"))
        else:
            assert isinstance(outcome, Raised)
            self._step_raised(step, outcome, at)
        self._run.pump()

    def recorded(self, key: str, items: list[Item]) -> None:
        """Go on after a step that was recorded in its own transaction, by these events."""
        step = next((each for each in self.running.values() if each.key == key), None)
        if step is None or self._run.is_over:
            return
        id, run = step.command.call.id, self._run
        del self.running[id]
        self.quiet(step, Returned(b""))
        past = run.replay.past.setdefault(id, Past())
        past.created, past.attempts = True, step.attempt
        run.values.add(id, dict(payload for item in items for payload in item.payloads))
        run.replay.carried.setdefault(id, []).extend(item.event for item in items if item.event.type in e.CARRIED)
        run.ended_calls.add(id)
        run.release(items)

    def _step_raised(self, step: RunningStep, outcome: Raised, at: float) -> None:
        command, id = step.command, step.command.call.id
        past = self._run.replay.past.setdefault(id, Past())
        self.gather_start(step)
        wait = None if command.is_cancelled else self._retry_wait(step, outcome, at, past)
        if wait is None:
            self._gather_carried(step)
            event = Event(
                type=e.STEP_FAILED, at=at, call=id, error=outcome.error, attempt=step.attempt, why=outcome.why[:500]
            )
            return self._run.record_end(command, event, outcome.payloads)
        past.failures += 1
        past.retry_at = due = ahead(at, wait)
        event = Event(
            type=e.STEP_RETRYING,
            at=at,
            call=id,
            error=outcome.error,
            due=due,
            attempt=step.attempt,
            why=outcome.why[:500],
        )
        self._run.gather(Item(event, True, outcome.payloads, is_urgent=True))
        self.retries[id] = (due, command)
        self._run.flush()

    def _retry_wait(self, step: RunningStep, outcome: Raised, at: float, past: Past) -> float | None:
        """Return the seconds until the next attempt; None: there is none."""
        definition = step.command.step
        assert definition is not None
        policy = step.command.options.retries or definition.retries
        if outcome.fatal or definition.at_most_once:
            return None
        if isinstance(policy, Never):
            return outcome.retry_after
        decision = decide(
            policy if outcome.retry_after is None else as_asked(policy, outcome.kinds),
            attempt=past.failures + 1,
            age_seconds=at - (past.started_at or at),
            error_types=outcome.kinds,
            random_unit=self._run.host.random(),
        )
        if not isinstance(decision, Retry):
            return None
        return decision.wait_seconds if outcome.retry_after is None else outcome.retry_after

    def _timed_out(self, step: RunningStep) -> Raised:
        assert step.command.step is not None
        why = f"{step.command.call.id} timed out after {step.command.options.timeout or step.command.step.timeout:g} s"
        return raised(self._run.call, TimedOut(why, invocation_id=self._run.id))

    def quiet(self, step: RunningStep, outcome: Outcome = INTERRUPTED) -> None:
        """Stop the timers of a step, and end its span."""
        if step.span is not None:
            step.span.end(outcome, "its time was over" if step.is_late else "")
            step.span = None
        for timer in (step.slow, step.limit):
            if timer is not None:
                timer.cancel()

    def _gather_carried(self, step: RunningStep) -> None:
        """Record what a step has set, together with its end."""
        assert self._run.life is not None
        id = step.command.call.id
        if step.context.complaint:
            self._run.host.warn(self._run.record, f"what {id} has set cannot be stored: {step.context.complaint}")
        for kind, changes in zip((e.DATA_SET, e.ATTRIBUTES_SET), step.context.changes(), strict=True):
            if not changes:
                continue
            try:
                packed = self._run.codec.pack(changes, self._run.call.limits, at="data")
            except Exception as error:
                self._run.host.warn(self._run.record, f"what {id} has set cannot be stored: {error}")
                continue
            event = Event(type=kind, at=self._run.at(), call=id, data=packed.data)
            self._run.gather(Item(event, True, packed.payloads))
            self._run.values.add(id, dict(packed.payloads))
            self._run.replay.carried.setdefault(id, []).append(event)


def _is_cancelled(outcome: Outcome) -> bool:
    return isinstance(outcome, Raised) and "asyncio.exceptions:CancelledError" in outcome.kinds
