"""The owner of a run: it replays the log, starts the steps and children that the body asks for, records events, and
lets go.

A `Run` lives on the thread of the user's loop, as its body and its coroutine steps do. The engine's executor writes,
and answers by callbacks on this thread. So nothing is locked, and a method runs to its end before the next begins.

The order of things is what makes a replay the same:

1. An event is made (a step ended, a timer is due, a message came), and gathered for the next page.
2. The page is written. One page is under way at a time; what ends meanwhile shares the next one.
3. Only then is the event delivered, one per drain, in the order of the log.
4. Commands that the body gave meanwhile are carried out. An effect (a step, a child) begins only if all that the body
   has seen or said is durable. A `repeatable` step's result may be delivered before; it is then owed to the log before
   the next effect, wait or end.

A run holds a slot while its body is drained, its steps run or its page is written, and none while it only waits. After
its linger it is suspended: docs/decisions/0011-workflows.md has every write and crash.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.codec import Payload
from holdfast.errors import NotDecodable, UsageError, WorkerLost, WorkflowError
from holdfast.executors.call import (
    INTERRUPTED,
    Call,
    Crashed,
    LetGo,
    Outcome,
    Unfit,
    arguments_of,
    raised,
    returned,
)
from holdfast.model import parking
from holdfast.model.records import InboxEntry, InvocationRecord
from holdfast.runtime.definition import TaskDefinition
from holdfast.workflows import events as e
from holdfast.workflows.answers import carry, deliver, same_values
from holdfast.workflows.attempts import Attempts, Item
from holdfast.workflows.children import CHILD_CANCELLED, CHILD_COMPLETED, CHILD_FAILED, WAKE
from holdfast.workflows.elsewhere import Elsewhere
from holdfast.workflows.events import Event
from holdfast.workflows.hooks_owner import RunHooks
from holdfast.workflows.hooks_records import PAYLOAD
from holdfast.workflows.life import AsyncLife, Command, Life, PlainLife, RestartRequest
from holdfast.workflows.loaded import Loaded, code_of, life_of
from holdfast.workflows.pages import Pages
from holdfast.workflows.rules import Deliver, Finished, Mismatch, Past, Perform, Replay
from holdfast.workflows.streaming import BodyStreams
from holdfast.workflows.time_limit import TimeLimit
from holdfast.workflows.timers import BodyTimers
from holdfast.workflows.updates import RunUpdates
from holdfast.workflows.values import LargeValues

if TYPE_CHECKING:
    from holdfast.workflows.host import Host

SLICE_SECONDS = 0.005  # of replay, then other bodies have their turn
_LINGER_EVENTS = 2000  # a log of so many events doubles the time that a body lingers: each wake replays all of it


class Run:
    def __init__(self, host: Host, call: Call, task: TaskDefinition, loaded: Loaded) -> None:
        self.host = host
        self.call = call
        self.key = life_of(loaded.record)
        self.id = loaded.record.id
        self.record = loaded.record
        self._task = task
        self.codec = call.codec
        self._loaded: Loaded | None = loaded
        self.values = LargeValues(self)
        self._held: Deliver | None = None  # what a replay delivers when its large values are here
        self.started_at = loaded.started_at
        self.first_started_at = loaded.first_started_at
        self.stored_attributes = self._sent_attributes = dict(loaded.record.attributes)
        self.events = len(loaded.events)
        self.code = code_of(task)
        self.replay = Replay(loaded.events, code=self.code, same=same_values)
        self.is_suspect = loaded.is_suspect
        self._progress_epoch = loaded.progress_epoch
        self.life: Life | None = None
        self.is_over = False
        self._is_quiet = self._is_pumping = self.is_replaying = False
        self._deliverable: deque[Event] = deque()
        self.pages = Pages(self, loaded.tail, self.code, self._deliverable.append)
        self.gather, self.flush = self.pages.gather, self.pages.flush
        self.updates = RunUpdates(self)
        self._time_limit = TimeLimit(self)
        self._effects: deque[Command] = deque()
        self._repeatable: deque[Command] = deque()  # steps that need not wait until all is durable
        self._performing: set[str] = set()  # keyed calls that the log did not have when it was replayed
        self._arming = 0  # at-most-once steps whose start is being written
        self.timers = BodyTimers(self)
        self.elsewhere = Elsewhere(self)
        self.hooks = RunHooks(self)
        self.streams = BodyStreams(self)
        self.ended_calls: set[str] = set()  # calls whose ends were gathered, and are perhaps not delivered yet
        self.attempts = Attempts(self)
        self.handled: set[str] = set()  # inbox entries
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None  # to look whether the worker may start work
        self.cancel_why = ""
        self.is_cancelling = False
        self.is_letting_go = False  # the write that suspends it is under way
        self.is_to_leave = ""  # why it is to be handed over at the next step boundary
        self._last_at = max([loaded.started_at, *[event.at for event in loaded.events[-1:]]])
        self._warned = False

    # --- beginning

    def begin(self) -> None:
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        found = arguments_of(self.call)
        if isinstance(found, Unfit):
            return self.end(found)
        about = self.host.body_context(self)
        call = self.call._replace(about=about)
        kind = AsyncLife if self._task.is_coroutine else PlainLife
        life = kind(
            self.replay, self.codec, call, generation=self.generation, now=self.started_at, seed=self.record.seed
        )
        life.attributes = dict(self.record.attributes)
        life.give(*found)
        life.engine = self.host.engine
        self.life = life
        self.is_replaying = True
        self._time_limit.set()
        life.start(self._on_quiet)

    @property
    def durably_handled(self) -> frozenset[str]:
        """Return the inbox entries that are not needed any more: the log has them, or no call waits for them."""
        return frozenset(self.handled - self.updates.unwritten)

    @property
    def generation(self) -> int:
        return 0 if self.record.run is None else self.record.run.generation

    # --- the pump

    def _on_quiet(self) -> None:
        self._is_quiet = True
        self.pump()

    def pump(self) -> None:
        """Continue as far as possible."""
        if self._is_pumping:
            return
        self._is_pumping = True
        began = self.host.loop.time()
        try:
            while self._is_quiet and not self.is_over and self._step():
                if self.host.loop.time() - began > SLICE_SECONDS:
                    self.host.call_soon(self.pump)
                    return
        except Exception as error:  # a defect of ours must not strand the run
            self.host.report(f"run {self.id}", error)
            self.end(Crashed(f"{type(error).__name__}: {error}"))
        finally:
            self._is_pumping = False

    def _step(self) -> bool:
        """Do the next action. Return False if there is none until an event comes."""
        life = self.life
        assert life is not None
        if self.is_replaying:
            return self._replay_next(life)
        for command in life.commands:
            self._take(command)
        life.commands.clear()
        if self._deliverable:
            if self.host.slots(self, 1):
                event = self._deliverable.popleft()
                if not event.call or event.call in self.replay.open:  # else the body has given it up: so will a replay
                    self._deliver(event)
                return True
            if not self.is_to_leave or self.is_cancelling:
                return False  # it goes on when it has a slot
        self._settle(life)
        return False

    def _replay_next(self, life: Life) -> bool:
        following = self._held or self.replay.next()
        if isinstance(following, Deliver):
            self._held = following
            if not self.values.are_here(following.event):
                return False
            self._held = None
            self._deliver(following.event, keeps_clock=following.keeps_clock)
            return True
        if isinstance(following, Mismatch):
            self._park(following.why + life.how_ended())
            return False
        if isinstance(following, Perform):
            return self._perform(life, following)
        assert isinstance(following, Finished)
        self.is_replaying = False
        self.values.clear()
        for warning in self.replay.warnings:
            self.host.warn(self.record, warning)
        commands, life.commands = life.commands, []
        self.handled |= self.replay.entries
        for id in list(self.replay.open):
            if (waiting := life.by_id.get(id)) is not None:
                waiting.may_be_there = True
                self._take(waiting)
        for command in commands:
            if command.is_cancelled and command.step is None and command.call.id not in self.replay.settled:
                self._cancel_call(command)
        if self.record.run is not None:
            self.take_inbox(self.record.run.inbox)
        return True

    def _perform(self, life: Life, following: Perform) -> bool:
        """Run a keyed call that the log does not have, and deliver its end. Other events are delivered after the
        recorded ones, as a later replay will do.
        """
        id = following.call
        if id not in self._performing:
            self._performing.add(id)
            self._take(life.by_id[id])
        if id in self.elsewhere.open and self.record.run is not None:
            self.handled |= self.replay.entries
            self.take_inbox([entry for entry in self.record.run.inbox if entry.call == id])
        end = next((event for event in self._deliverable if event.call == id), None)
        if end is not None and self.host.slots(self, 1):
            self._deliverable.remove(end)
            self._deliver(end, keeps_clock=following.keeps_clock)
            return True
        self._begin_effects()
        if self.is_over:
            return False
        self.flush(force=True)
        is_moving = self._busy or self._is_busy() or self._effects or self._repeatable or end is not None
        self.host.keep_slots(self, max(1, self._busy + len(self._effects) + len(self._repeatable)) if is_moving else 0)
        self._set_timer(self._due())
        if self.is_to_leave and not (self.is_cancelling or self.is_letting_go or self._is_busy()):
            self._leave()
        return False

    def _deliver(self, event: Event, *, keeps_clock: bool = False) -> None:
        life = self.life
        assert life is not None
        self._is_quiet = False
        if self._linger is not None:
            self._linger.cancel()  # it counts for the next wait: from the last event on
        payloads = self.values.take(event.entry if event.type in e.HOOKS else event.call)
        try:
            for carried in self.replay.carried.pop(event.call, ()):
                carry(life, carried, payloads)
        except NotDecodable as error:
            return self.end(Unfit(f"the data that {event.call} has set cannot be read: {error}"))
        if not keeps_clock:
            life.clock_to(event.at)
        if event.type == e.CANCEL_REQUESTED:
            self.cancel_why = self.cancel_why or event.why
            self._time_limit.said(event)
            life.cancel(self._on_quiet)
            return
        self.replay.answered(event)
        self.streams.note(event)
        for waiting in (self.timers.open, self.elsewhere.open):
            waiting.pop(event.call, None)
        deliver(life, event, payloads, self._on_quiet)

    # --- what the body asks for

    def _take(self, command: Command) -> None:
        id = command.call.id
        if command.is_cancelled:
            return self._cancel_call(command)
        if command.hook is not None:
            if self.hooks.take(command):
                self._effects.append(command)
        elif command.written is not None:
            self._effects.append(command)
        elif command.step is None and command.child is None:
            self.timers.open[id] = command
        elif self._is_repeatable(command) and not self.hooks.is_pending:
            self._repeatable.append(command)
        else:
            self._effects.append(command)

    def _cancel_call(self, command: Command) -> None:
        """End a call that the body gave up. Its chunks are written all the same."""
        if command.written is not None:
            return
        id = command.call.id
        if command.hook is not None:
            self.withdraw(command)
            if self.hooks.dispose(command):
                self._effects.append(command)
            return
        if command.step is None and command.child is None:
            return self.timers.give_up(command.call)
        self.withdraw(command)
        past = self.replay.past.get(id)
        if command.step is not None and past is not None and past.child and id not in self.elsewhere.open:
            command.child = self.host.step_record(self, command)  # an earlier owner has sent it elsewhere
            self.elsewhere.submit(command, past)
        if command.child is not None:
            if not command.is_submitting:
                self.elsewhere.ask_to_end(command)
            if command.step is None:
                self.elsewhere.open.pop(id, None)
                return
        step = self.attempts.running.get(id)
        if step is not None:
            step.context.is_cancelled = True
            self.host.cancel_step(step.key, command.step, self._abandon_step(id))
        elif id not in self.elsewhere.open:
            self.attempts.retries.pop(id, None)
            if id in self.replay.open:
                self.record_end(command, Event(type=e.STEP_FAILED, at=self.at(), call=id, why="cancelled"))

    def withdraw(self, command: Command) -> None:
        """Do not start a call that has not begun."""
        for waiting in (self._effects, self._repeatable):
            if command in waiting:
                waiting.remove(command)

    def _abandon_step(self, id: str) -> Callable[[], None]:
        def abandon() -> None:
            if id in self.attempts.running and self.host.give_up(self.attempts.running[id].key):
                step = self.attempts.running.pop(id)
                self.attempts.quiet(step)
                why = "it was cancelled, could not be stopped, and still runs"
                self.record_end(step.command, Event(type=e.STEP_FAILED, at=self.at(), call=id, why=why))
                self.pump()

        return abandon

    def _is_elsewhere(self, command: Command) -> bool:
        """Return whether a step is performed by its own invocation, or an earlier owner has sent it there."""
        step, options, past = command.step, command.options, self.replay.past.get(command.call.id)
        where = step and ((past and past.child) or step.queue or options.queue or options.tags or step.tags)
        return bool(where)

    def _is_repeatable(self, command: Command) -> bool:
        return command.step is not None and command.step.repeatable and not self._is_elsewhere(command)

    def _begin_effects(self) -> None:
        """Start what the body asked for, if all that it has seen is durable."""
        for waiting in (self._repeatable, self._effects):
            while waiting and not self.is_to_leave and not self.is_letting_go:
                if waiting is self._effects and (self.pages.seen > 0 or self.hooks.holds_up(waiting[0])):
                    return
                if not self.host.may_start():
                    if self._again is None:
                        self._again = self.host.call_later(1.0, self._look_again)
                    return
                is_here = waiting[0].step is not None and not self._is_elsewhere(waiting[0])
                if is_here and not self._has_slot():
                    return
                self._start(waiting.popleft())

    def _look_again(self) -> None:
        self._again = None
        self.pump()

    @property
    def _busy(self) -> int:
        """Return how many steps run here, or are about to."""
        return len(self.attempts.running) + self._arming

    def _has_slot(self) -> bool:
        """Return whether another step may run. If not, ask the worker for as many slots as there are steps to run."""
        return self._busy < self.host.slots(self, self._busy + len(self._repeatable) + len(self._effects))

    def _start(self, command: Command) -> None:
        id = command.call.id
        past = self.replay.past.get(id) or Past()
        if command.hook is not None:
            return self.hooks.start(command)
        if command.written is not None:
            return self.streams.write(command)
        if command.child is not None:
            return self.elsewhere.submit(command, past)
        assert command.step is not None
        if self._is_elsewhere(command):
            try:
                command.child = self.host.step_record(self, command)
            except UsageError as refused:
                return self.end(Unfit(str(refused)))
            return self.elsewhere.submit(command, past)
        if past.retry_at is not None and past.retry_at > self.host.now():
            self.attempts.retries[id] = (past.retry_at, command)
            return
        attempt = max(past.attempts, past.failures) + 1
        if command.step.at_most_once:
            if past.attempts:
                why = f"the worker that ran {id} died, and the step is to be run at most once"
                error = self.codec.encode_error(WorkerLost(why, invocation_id=self.id))
                self.record_end(command, Event(type=e.STEP_FAILED, at=self.at(), call=id, error=error, why=why))
                return
            past.created, past.attempts, past.started_at = True, 1, self.at()
            self.replay.past[id] = past
            created, started = self.created(command), self.started(id, attempt)
            self.gather(Item(created, True, command.payloads))
            self._arming += 1
            self.gather(Item(started, True, (), lambda: self._start_armed(command, attempt)))
            self.flush()
            return
        self.attempts.start(command, attempt)

    def _start_armed(self, command: Command, attempt: int) -> None:
        self._arming -= 1
        if not command.is_cancelled and command.call.id not in self.ended_calls:
            self.attempts.start(command, attempt)

    def created(self, command: Command) -> Event:
        call, child = command.call, command.child
        return Event(
            type=e.STEP_CREATED,
            at=self.at(),
            call=call.id,
            name=call.name,
            where=call.where,
            data=call.data,
            child="" if child is None else child.id,
        )

    def started(self, id: str, attempt: int, at: float | None = None) -> Event:
        return Event(type=e.STEP_STARTED, at=self.at() if at is None else at, call=id, attempt=attempt)

    # --- writing ends

    def record_end(self, command: Command, event: Event, payloads: tuple[Payload, ...] = ()) -> None:
        """Gather the end of a call. A repeatable one is delivered at once, if it is its turn."""
        if command.call.id in self.ended_calls:
            return  # the body has cancelled it while its end was being written
        self.ended_calls.add(command.call.id)
        self.gather_created(command)
        self.values.add(command.call.id, dict(payloads))
        step = command.step
        is_next = not self._deliverable and not self.pages.unseen
        if step is not None and step.repeatable and command.child is None and is_next:
            self.gather(Item(event, True, payloads))
            self._deliverable.append(event)
        else:
            self.gather(Item(event, False, payloads))
        self.flush()

    def gather_created(self, command: Command, child: str = "", then: Callable[[], None] | None = None) -> None:
        """Gather the event that a call was made, unless the log has it: it precedes all other events of the call."""
        past = self.replay.past.setdefault(command.call.id, Past())
        if past.created:
            return
        past.created = True
        event = self.created(command)
        if child and not event.child:
            event = msgspec.structs.replace(event, child=child)
        self.gather(Item(event, True, command.payloads, then))

    # --- messages

    def take_record(self, record: InvocationRecord, *, is_refused: bool = False) -> None:
        """Take the run's record as it is stored now. `is_refused`: the write that lets go of it was refused, since it
        has changed.
        """
        if is_refused:
            self.is_letting_go = False
        if self.is_over:
            return
        if record.run is not None and (self.record.run is None or record.run.pushed >= self.record.run.pushed):
            self.record = record
            if not self.is_replaying:
                self.take_inbox(record.run.inbox)
                self.updates.send()
        self.pump()

    def take_inbox(self, inbox: Sequence[InboxEntry]) -> None:
        """Make events of messages that the log does not have."""
        for entry in inbox:
            if entry.id in self.handled:
                continue
            if entry.kind == PAYLOAD:
                self.hooks.received(entry)
                continue
            self.handled.add(entry.id)
            if entry.generation != self.generation and entry.kind != WAKE:
                continue
            if entry.kind == WAKE:
                self._wake(entry)
            elif entry.kind in (CHILD_COMPLETED, CHILD_FAILED, CHILD_CANCELLED):
                self.elsewhere.ended(entry)

    def _wake(self, entry: InboxEntry) -> None:
        """End all sleeps of the body before their time, and begin the next attempts of its steps."""
        self.updates.unwritten.add(entry.id)
        self.timers.wake(entry)
        self.attempts.retry_now()

    # --- waiting

    def _due(self) -> float | None:
        return min([*self.timers.dues, *(due for due, _ in self.attempts.retries.values())], default=None)

    def _on_due(self) -> None:
        """Complete the waits, and begin the attempts, whose time has come."""
        self._timer = None
        if self.is_over:
            return
        now = self.host.now()
        self.timers.complete_due(now)
        self._effects.extend(self.attempts.due(now))
        self.pump()

    def _settle(self, life: Life) -> None:
        """Write, start, wait, or end: the body is quiet and has seen everything."""
        for event in life.said:
            payloads = life.said_payloads.pop(event.data, ())
            self.gather(Item(msgspec.structs.replace(event, at=self.at()), True, payloads))
        life.said.clear()
        if self.host.max_events < self.events and life.ended is None:
            return self._too_long()
        self._begin_effects()
        if self.is_over:
            return
        to_start = len(self._effects) + len(self._repeatable)
        self.host.keep_slots(self, max(1, self._busy + to_start))
        self.flush(force=bool(self._effects) or not self.attempts.running)
        if life.attributes != self._sent_attributes and not self.pages:
            self._sent_attributes = dict(life.attributes)
            self.host.set_attributes(self, self._sent_attributes)
        if self._is_busy():
            if life.ended is not None:
                self._warn_open()
            self._set_timer(self._due())
            return
        if to_start and not (self.is_to_leave or self.is_letting_go):
            return  # the worker may not start work now
        if life.ended is not None:
            if not self._retries_left() and not any(command.step for command in self.elsewhere.open.values()):
                return self._body_ended(life)
            self._warn_open()
        if self.is_letting_go:
            return
        if self.is_to_leave and not self.is_cancelling:
            return self._leave()
        self._wait(life)

    def _wait(self, life: Life) -> None:
        due, now = self._due(), self.host.now()
        has_senders = bool(self.elsewhere.open) or life.awaits_hook  # of something that others do
        if due is None and not has_senders:
            why = f"the body waits for something that no event can bring:\n{life.why_stuck()}"
            return self.end(raised(self.call, WorkflowError(why)))
        if due is not None and due <= now:
            return self._on_due()
        self.host.keep_slots(self, 0)
        linger = 0.0 if self.host.is_crowded else self.host.linger_seconds * (1 + self.events / _LINGER_EVENTS)
        if not self.is_cancelling and not self.cancel_why:
            if not has_senders and due is not None and due - now > linger:
                return self._suspend()
            if has_senders and (self._linger is None or self._linger.cancelled()):
                self._linger = self.host.call_later(linger, self._lingered)
        self._set_timer(due)

    def _set_timer(self, due: float | None) -> None:
        """Look at the waits when the first of them is due, also while steps run."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self.host.call_later(max(0.0, due - self.host.now()), self._on_due)
        self.timers.write_later()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing happens until a timer is due or a message comes."""
        is_moving = self._is_busy() or self._deliverable or self._effects or self._repeatable
        return self._is_quiet and not (is_moving or self.is_letting_go or self.is_replaying or self.is_over)

    @property
    def stays(self) -> bool:
        """Return whether its waits are spent in memory: a run that compensates is not suspended."""
        return self.is_cancelling or bool(self.cancel_why)

    def _lingered(self) -> None:
        self._linger = None
        if self.is_idle and not self.stays:
            self._suspend()

    def _is_busy(self) -> bool:
        """Return whether an operation is under way that will continue the run."""
        is_writing = self.pages or self.updates.unwritten or self.updates.is_writing
        is_outside = self.hooks.is_working or self.streams.writing or self.elsewhere.submitting
        return bool(is_writing or is_outside or self.attempts.running)

    def _suspend(self) -> None:
        """Record the waits, then let go."""
        self.timers.gather_sleeps()
        if self.pages.has_gathered:
            return self.flush(force=True)
        if self._time_limit.is_due:
            return self._time_limit.pass_over()
        self.is_letting_go = True
        times = [time for time in (self._due(), self._time_limit.at) if time is not None]
        self.host.suspend(self, min(times, default=None), self._why_waiting())

    def _why_waiting(self) -> str:
        retries = [f"the next attempt of {id}" for id in self.attempts.retries]
        timers = [f"{id} ({command.call.name})" for id, command in self.timers.open.items()]
        named = [*self.elsewhere.open, *self.hooks.waits(), *retries, *timers]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return f"waits for {', '.join(named[:3])}{more}"

    def _leave(self) -> None:
        self.is_letting_go = True
        self.host.hand_over(self, self.is_to_leave)

    def leave(self, why: str) -> None:
        """Let go at the next step boundary: this worker ends, and another worker continues."""
        if self.is_over or self.is_cancelling:
            return
        self.is_to_leave = why
        if not self.is_replaying or self._performing:
            self.pump()

    def let_go(self) -> None:
        """Forget the run: it is suspended, or back in the queue."""
        self.end(LetGo())

    # --- time and cancellation

    def cancel(self, why: str) -> None:
        """Ask the body to end: a recorded CancelledError."""
        if self.is_over or self.is_cancelling:
            return
        self.is_cancelling = True
        self.is_to_leave = ""  # it stays until it has compensated, or its worker hands it back
        if self.replay.has_cancel:
            return self.pump()
        self.cancel_why = why
        self.gather(Item(Event(type=e.CANCEL_REQUESTED, at=self.at(), why=why)))
        self.flush()
        self.pump()

    # --- writing

    def at(self) -> float:
        """Return the time for a new event: event times never go back."""
        self._last_at = max(self._last_at, self.host.now())
        return self._last_at

    def release(self, written: list[Item] | None = None) -> None:
        """Continue writing, behind the page that a transactional step has written."""
        if self.is_over:
            return
        if self.pages.release(written):
            self._last_at = max(self._last_at, written[-1].event.at if written else 0.0)
            self.appended()

    def appended(self) -> None:
        """Continue: the page is durable."""
        if self.is_over:
            return
        if e.is_progress(self.pages.written()):
            self._progress_epoch = self.record.epoch
        self.flush()
        self.updates.send()
        self.pump()

    # --- ending

    def _body_ended(self, life: Life) -> None:
        assert life.ended is not None
        self._stop_timers()
        if said := life.never_awaited():
            self.host.warn(self.record, said)
        if self.elsewhere.asking or self.elsewhere.end_with_run():
            return
        value, error = life.ended
        if isinstance(error, RestartRequest) and (self.is_cancelling or self._time_limit.is_over):
            error = asyncio.CancelledError()  # it is to end
        if isinstance(error, RestartRequest):
            self.is_letting_go = True
            return self.host.restart(self, error.given, error.named)
        if error is None:
            return self.end(returned(self.call, value))
        if isinstance(error, asyncio.CancelledError) and self._time_limit.is_over and not self.is_cancelling:
            return self.end(self._time_limit.outcome())
        self.end(raised(self.call, error))

    def _warn_open(self) -> None:
        """Report that a body has returned while steps of it still run, or are to be retried."""
        if (names := [*self.attempts.running, *self._retries_left()]) and not self._warned:
            self._warned = True
            named = ", ".join(names)
            self.host.warn(self.record, f"its body has ended while {named} still runs; the run ends when they do")

    def _retries_left(self) -> list[str]:
        """Return the steps that are tried again also after the body has ended: none if the run is to end."""
        return [] if self.is_cancelling or self._time_limit.is_over else list(self.attempts.retries)

    def _too_long(self) -> None:
        why = (
            f"the log has {self.events:,} events, more than workflow_max_events allows ({self.host.max_events:,}): "
            "end the run, or go on with a fresh log by context().restart(…)"
        )
        self.end(raised(self.call, WorkflowError(why)))

    def _park(self, why: str) -> None:
        self.end(Unfit(f"{parking.MISMATCH}: {why}", self.replay.recorded_python))

    def interrupt(self) -> None:
        """End at once: nothing more is recorded."""
        if not self.is_over:
            self.end(INTERRUPTED)

    def fenced(self, why: str) -> None:
        """End at once: another owner has the run."""
        if not self.is_over:
            self.end(LetGo(why))

    def lost(self, why: str) -> None:
        """End at once: the log cannot be written."""
        if not self.is_over:
            self.end(Crashed(why))

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._linger, self._again):
            if timer is not None:
                timer.cancel()
        self._timer = self._linger = self._again = None
        self.timers.stop()
        self._time_limit.stop()

    def end(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self.is_over = True
        if isinstance(outcome, Crashed):
            outcome = outcome._replace(progress_epoch=self._progress_epoch)
        self._stop_timers()
        for step in self.attempts.running.values():
            self.attempts.quiet(step)
        self.host.ended(self, outcome, [step.key for step in self.attempts.running.values()])
        if self.life is not None and not self.life.evict():
            self.host.warn(self.record, "its body catches every exception and cannot be ended; it stays in memory")
        self.attempts.running.clear()
