"""A life of a body: from its first line to its end, or to its eviction.

A body asks by calls (`Command`) and gets answers by events. Its owner (`holdfast.workflows.run`) takes the commands
after each drain, and delivers one event per drain. It does not matter whether an event was recorded long ago or just
now. `AsyncLife` runs a coroutine function on a `BodyLoop`. `PlainLife` runs a plain function on its own thread, which
waits in each call, so its steps run one after another.

Values are copies: a step gets decoded arguments, and the body a decoded result, also when nothing was replayed. So a
body cannot see a change that a replay would not repeat.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import hashlib
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from queue import SimpleQueue
from random import Random
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec

from holdfast.codec import Codec, Payload
from holdfast.errors import NotDeterministic, UsageError, WorkflowError
from holdfast.executors.call import Call
from holdfast.executors.chunks import NothingToAwait, Outgoing
from holdfast.executors.context import Context
from holdfast.model.decoding import ahead
from holdfast.model.notes import check_attributes
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import guard, running_body
from holdfast.telemetry.tasks import here
from holdfast.workflows.events import ATTRIBUTES_SET, DATA_SET, HOOK_CONFLICT, PATCHED, Event
from holdfast.workflows.hooks_records import WantedHook
from holdfast.workflows.loop import BodyFuture, BodyLoop, BodyTimer, Evicted, raised_at, stack_of, where
from holdfast.workflows.rules import OpenCall, Replay
from holdfast.workflows.steps import StepDefinition, StepOptions


class Command(msgspec.Struct, kw_only=True, eq=False):
    """A call of the body, for its owner: a step to run, an invocation to submit, a timer to set, a chunk to write."""

    call: OpenCall
    step: StepDefinition | None = None
    options: StepOptions = StepOptions()
    child: InvocationRecord | None = None  # to be submitted; it may be awaited too
    is_awaited: bool = True
    cancels_on_end: bool = False  # the child ends when its parent does
    timer: BodyTimer | None = None  # of an async body
    written: Outgoing | None = None  # to a stream
    may_be_there: bool = False  # an earlier owner may have written it
    payloads: tuple[Payload, ...] = ()
    is_cancelled: bool = False  # the body waits for its recorded end all the same
    hook: WantedHook | None = None  # to be stored; with `is_cancelled`, to be removed
    at: float = 0.0  # when the body made it, by its own time
    is_submitting: bool = False  # its insert is under way

    @property
    def has_handle(self) -> bool:
        """Return whether the body has a handle of it, which it may await at any time."""
        return self.child is not None and self.step is None and not self.is_awaited


class CallAnswer(NamedTuple):
    """The end of a call: a value, an error, or neither for a cancelled call."""

    value: object = None
    error: BaseException | None = None
    is_cancelled: bool = False


class RestartRequest(BaseException):
    """Raised by ``context().restart(…)``: the run goes on with a new log."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("restart")
        self.given, self.named = args, kwargs


def restart_in(error: BaseException | None) -> RestartRequest | None:
    """Return the request to restart among the errors that a body raised. A task group wraps its tasks' errors in a
    group.
    """
    if isinstance(error, RestartRequest):
        return error
    if not isinstance(error, BaseExceptionGroup) or len(error.exceptions) != 1:
        return None  # other errors come first
    return restart_in(error.exceptions[0])


class BodyEnd(NamedTuple):
    """How a body ended."""

    value: object = None
    error: BaseException | None = None


Then = Callable[[], None]


class HookEnd(Protocol):
    """The body's end of a hook."""

    @property
    def is_awaited(self) -> bool:
        """Return whether the body waits for a payload, or for the hook to be stored."""
        ...

    @property
    def unread(self) -> Sequence[Event]:
        """Return the payloads that the body has not read."""
        ...

    def take(self, event: Event, answer: CallAnswer) -> None:
        """Take an event of the hook, inside of a drain."""
        ...


class Life(ABC):
    """The common part of both kinds of lives: numbers of calls, time, random values, and commands of the body."""

    def __init__(
        self, replay: Replay, codec: Codec, call: Call, *, generation: int, now: float, seed: str = ""
    ) -> None:
        self.replay = replay
        self.codec = codec
        self._call = call
        self.about: Context = call.about  # type: ignore[assignment]
        self.limits = call.limits
        self.generation = generation
        self.engine: Any = None  # for records of children
        self.children: dict[str, Command] = {}  # by their invocation's id
        self.answers: dict[str, CallAnswer] = {}  # of submitted children: a body may await a handle late, or again
        self._seed = seed or f"{self.about.invocation_id}/{generation}"
        self.commands: list[Command] = []
        self.said: list[Event] = []  # events that the body causes by itself
        self.said_payloads: dict[bytes, tuple[Payload, ...]] = {}  # large values of those, by their data
        self.by_id: dict[str, Command] = {}
        self.hooks: dict[str, HookEnd] = {}  # by call
        self.attributes: dict[str, str] = {}
        self.data: dict[str, object] = {}
        self.ended: BodyEnd | None = None
        self.is_evicting = False
        # Calls that the body has made and that have not begun, with file and line: they begin when they are awaited.
        self.unawaited: dict[int, tuple[Coroutine[Any, Any, Any], str]] = {}
        self._keys: set[str] = set()  # of keyed calls
        self._old_paths: set[str] = set()  # patches that this run does without
        self._random: Random | None = None
        self._now = now

    def _enter(self) -> None:
        """Make the call, and its span, those of the body's thread or coroutines."""
        here.set(self._call)
        if self._call.span is not None:
            self._call.span.attach()

    # --- for the body

    @property
    def now(self) -> float:
        """Return the time of the last event that the body got."""
        return self._now

    @property
    def random(self) -> Random:
        """Return a random generator that is seeded by the run's id."""
        if self._random is None:
            self._random = Random(self._seed)
        return self._random

    def uuid4(self) -> UUID:
        generator = self.random
        return UUID(int=generator.getrandbits(128), version=4)

    def patched(self, name: str) -> bool:
        """Return whether the body takes the new path: yes, unless the log shows the old path here."""
        self._alive()
        if name in self.replay.patches:
            return True
        if not self.replay.is_over or name in self._old_paths:
            self._old_paths.add(name)  # for the rest of the run: the next life would not know where it changed its mind
            return False
        self.replay.patches.add(name)
        self.say(Event(type=PATCHED, at=self._now, name=name))
        return True

    def set_attributes(self, changes: Mapping[str, str]) -> None:
        self._alive()
        check_attributes(self.attributes, changes)
        encoded = self.codec.encode(dict(changes), at="attributes")
        self.attributes |= changes
        self.say(Event(type=ATTRIBUTES_SET, at=self._now, data=encoded))

    def set_data(self, name: str, value: object) -> None:
        self._alive()
        packed = self.codec.pack({name: value}, self.limits, at=f"data[{name!r}]")
        self.data |= self.codec.decode(packed.data, {payload.digest: payload.data for payload in packed.payloads})
        self.say(Event(type=DATA_SET, at=self._now, data=packed.data), packed.payloads)

    def say(self, event: Event, payloads: tuple[Payload, ...] = ()) -> None:
        """Record a command that needs no answer from another part, unless the log has it."""
        if not self.replay.has_said(event) and self.replay.is_over:
            self.said.append(event)
            if payloads:
                self.said_payloads[event.data] = payloads

    def open(self, command: Command) -> None:
        """Make a call."""
        command.at = self._now
        self.replay.opened(command.call)
        self.by_id[command.call.id] = command
        self.commands.append(command)

    def opened_step(self, step: StepDefinition, packed: Any, options: StepOptions, at: str = "") -> Command:
        self._alive()
        name = step.name
        id = f"{name}@{options.key}" if options.key is not None else self.replay.number(name)
        if options.key is not None:
            if id in self._keys:
                raise UsageError(
                    f"the step {name} was called with key={options.key!r} before ({at or where()}); a key names one "
                    "call of a run, so give each call its own"
                )
            self._keys.add(id)
        call = OpenCall(id=id, name=name, where=at or where(), data=packed.data, is_keyed=options.key is not None)
        command = Command(call=call, step=step, options=options, payloads=packed.payloads)
        self.open(command)
        return command

    def opened_child(
        self,
        record: InvocationRecord,
        payloads: tuple[Payload, ...],
        id: str,
        at: str = "",
        older_names: tuple[str, ...] = (),
        **more: Any,
    ) -> Command:
        call = OpenCall(id=id, name=record.task, where=at or where(), data=record.arguments, older_names=older_names)
        command = Command(call=call, child=record, payloads=payloads, **more)
        self.children[record.id] = command
        self.open(command)
        return command

    def write_stream(self, item: Outgoing) -> Awaitable[None]:
        """Write to a stream. A replay does not write it again."""
        self._alive()
        data = self.codec.encode(hashlib.sha256(bytes([item.kind]) + item.data).hexdigest())
        call = OpenCall(id=self.replay.number("stream"), name=item.stream, where=where(), data=data)
        command = Command(call=call, written=item)
        self.open(command)
        return self.awaited(command)

    def flush_stream(self) -> Awaitable[None]:
        """Do nothing: chunks of a body are durable already."""
        self._alive()
        return NothingToAwait()

    @abstractmethod
    def awaited(self, command: Command) -> Awaitable[Any]:
        """Return the awaitable for the end of a call; a plain body waits here."""

    def child_id(self, names: Sequence[str]) -> str:
        """Return the id of the next call that submits the task of these names."""
        self._alive()
        return self.replay.number_of(names)

    # --- hooks

    @property
    def first_run(self) -> str:
        """Return the id of the run that secrets are derived from: a fork has those of the run that it has forked."""
        return self._seed.partition("/")[0]

    def hook_id(self) -> str:
        """Return the id of the next call that makes a hook."""
        self._alive()
        return self.replay.number("hook")

    def opened_hook(self, command: Command, end: HookEnd) -> None:
        self.hooks[command.call.id] = end
        self.open(command)

    def dispose_hook(self, command: Command) -> None:
        self._alive()
        self.replay.gave_up(command.call.id)
        self.by_id.pop(command.call.id, None)
        self._ask_to_cancel(command)

    @property
    def awaits_hook(self) -> bool:
        return any(end.is_awaited for end in self.hooks.values())

    def _answer_hook(self, event: Event, answer: CallAnswer) -> None:
        if event.type == HOOK_CONFLICT:
            self.by_id.pop(event.call, None)
        if (end := self.hooks.get(event.call)) is not None:
            end.take(event, answer)

    @abstractmethod
    def answer_hook(self, event: Event, answer: CallAnswer, then: Then) -> None:
        """Give an event of a hook to the body."""

    @abstractmethod
    def _alive(self) -> None:
        """Raise `Evicted` if the body is being evicted."""

    def _ask_to_cancel(self, command: Command) -> None:
        """Report to the owner, once, that the body gave up this call."""
        if command.is_cancelled:
            return
        command.is_cancelled = True
        if not any(each is command for each in self.commands):
            self.commands.append(command)

    # --- for the owner

    def clock_to(self, at: float) -> None:
        self._now = max(self._now, at)

    @abstractmethod
    def start(self, then: Then) -> None:
        """Begin the body. `then` is called, on this thread, when it is quiet."""

    @abstractmethod
    def deliver(self, call: str, answer: CallAnswer, then: Then) -> None:
        """Answer a call."""

    @abstractmethod
    def cancel(self, then: Then) -> None:
        """Raise CancelledError in the body."""

    @abstractmethod
    def evict(self) -> bool:
        """End the body without recording anything. Return False if it cannot be ended."""

    @abstractmethod
    def why_stuck(self) -> str:
        """Return where the body waits for something that no event will complete."""

    def never_awaited(self) -> str:
        """Return, once, a warning about calls that the body made and never awaited; empty if there are none."""
        named = self._close_unawaited()
        return f"its body has called without await, so that nothing was done: {', '.join(named[:5])}" if named else ""

    def _close_unawaited(self) -> list[str]:
        """Close the calls that were never awaited, and return them. Calls whose task was cancelled before do not
        count.
        """
        left, self.unawaited = list(self.unawaited.values()), {}
        named = [said for coroutine, said in left if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED]
        for coroutine, _ in left:
            coroutine.close()
        return named

    def how_ended(self) -> str:
        """Return how the body has ended, for the message of a mismatch: the log has more events. Empty if it has not
        ended.
        """
        if self.ended is None:
            return ""
        if (error := self.ended.error) is None:
            return "; the body has returned"
        place = raised_at(error)
        said = self.codec.encode_error(error).message[:500]
        return f"; the body has raised {type(error).__name__}: {said}{f' at {place}' if place else ''}"

    def _finish(self, value: object = None, error: BaseException | None = None) -> None:
        if self.ended is None and not self.is_evicting:
            self.ended = BodyEnd(value, error)


class AsyncLife(Life):
    """A coroutine function on its own loop."""

    def __init__(
        self, replay: Replay, codec: Codec, call: Call, *, generation: int, now: float, seed: str = ""
    ) -> None:
        super().__init__(replay, codec, call, generation=generation, now=now, seed=seed)
        make: Any = BodyLoop  # its other methods are set below its class, which mypy does not see
        self.loop: BodyLoop = make(self._seed, now, self._timer_set, self._timer_cancelled)
        self.loop.life = self
        _lives[self.loop] = self
        self._main: asyncio.Task[Any] | None = None
        self._futures: dict[str, BodyFuture] = {}
        self._args: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._made = 0

    def deferred(self, name: str, at: str, make: Callable[[int], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        """Return a call that begins when it is awaited. It is given its number in `unawaited`."""
        self._made += 1
        coroutine = make(self._made)
        self.unawaited[self._made] = coroutine, f"{name} ({at})"
        return coroutine

    def _alive(self) -> None:
        if self.is_evicting:
            self.loop.raise_evicted()

    def clock_to(self, at: float) -> None:
        super().clock_to(at)
        self.loop.now = self._now

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = (args, kwargs)

    def start(self, then: Then) -> None:
        def begin() -> None:
            self._enter()
            self._main = self.loop.create_task(self._body(), name="body")

        contextvars.copy_context().run(self._drain, begin)
        then()

    async def _body(self) -> Any:
        args, kwargs = self._args
        try:
            return await self._call.function(*args, **kwargs)
        finally:
            if not self.loop.is_evicting:
                await self.loop.close_generators()

    def _drain(self, deliver: Callable[[], None]) -> None:
        self.loop.drain(deliver)
        main = self._main
        if self.loop.escaped is not None:
            escaped = self.loop.escaped
            self._finish(error=WorkflowError(f"the body called {type(escaped).__name__}, which ends no run"))
        elif main is not None and main.done():
            self._end_of(main)

    def _end_of(self, main: asyncio.Task[Any]) -> None:
        if main.cancelled():
            return self._finish(error=asyncio.CancelledError())
        error = main.exception()
        if error is None:
            return self._finish(main.result())
        error = restart_in(error) or error
        if (foreign := _foreign_in(error)) is not None:
            wrong = NotDeterministic(
                f"a workflow's body awaits a future of another event loop ({raised_at(foreign)}): do that in a step. "
                f"{foreign}"
            )
            wrong.__cause__ = error
            error = wrong
        self._finish(error=error)

    # --- calls

    def awaited(self, command: Command) -> Awaitable[Any]:
        return self.future_of(command)

    def future_of(self, command: Command) -> BodyFuture:
        """Return the future that the answer of a call goes to."""
        future = self.loop.create_future()
        if (there := self.answers.get(command.call.id)) is not None:
            _resolve(future, there)
            return future
        if (known := self._futures.get(command.call.id)) is not None:
            return known
        future.on_cancel = lambda _: self._asked_to_cancel(command)
        self._futures[command.call.id] = future
        return future

    def _asked_to_cancel(self, command: Command) -> bool:
        """Return True if the future goes on until the recorded end of its call."""
        if self.is_evicting:
            return False
        self._ask_to_cancel(command)
        if command.child is not None and command.step is None:
            self.replay.gave_up(command.call.id)
            self._futures.pop(command.call.id, None)
            self.answers[command.call.id] = CallAnswer(is_cancelled=True)  # for who awaits it again
            return False
        return True

    def _timer_set(self, timer: BodyTimer) -> None:
        timer.call = self.replay.number("wait")
        call = OpenCall(
            id=timer.call, name=timer.kind, where=where(), due=timer.when(), seconds=timer.when() - self._now
        )
        self.open(Command(call=call, timer=timer))

    def _timer_cancelled(self, timer: BodyTimer) -> None:
        self.replay.gave_up(timer.call)
        if (command := self.by_id.pop(timer.call, None)) is not None:
            self._ask_to_cancel(command)

    # --- answers

    def deliver(self, call: str, answer: CallAnswer, then: Then) -> None:
        command = self.by_id.pop(call, None)
        self._drain(lambda: self._answer(call, command, answer))
        then()

    def answer_hook(self, event: Event, answer: CallAnswer, then: Then) -> None:
        self._drain(lambda: self._answer_hook(event, answer))
        then()

    def _answer(self, call: str, command: Command | None, answer: CallAnswer) -> None:
        if command is not None and command.timer is not None:
            return self.loop.fire(command.timer)
        future = self._futures.pop(call, None)
        if command is not None and command.has_handle:
            self.answers.setdefault(call, answer)
        if future is None or future.done():
            return
        if command is not None and command.is_cancelled:  # it could not be stopped in time: the body gave it up
            return future.end_cancelled()
        _resolve(future, answer)

    def cancel(self, then: Then) -> None:
        def ask() -> None:
            if self._main is not None:
                self._main.cancel()

        self._drain(ask)
        then()

    def evict(self) -> bool:
        self.is_evicting = True
        done = self.loop.evict()
        self._close_unawaited()
        for future in self._futures.values():
            future.on_cancel = None
        self._futures.clear()
        _lives.pop(self.loop, None)
        self.by_id.clear()
        self.commands.clear()
        return done

    def why_stuck(self) -> str:
        return "\n\n".join(f"{task.get_name()}:\n{stack_of(task)}" for task in list(self.loop.tasks)[:_STACKS])


def _resolve(future: BodyFuture, answer: CallAnswer) -> None:
    if answer.is_cancelled:
        future.end_cancelled()
    elif isinstance(answer.error, StopIteration):  # a future refuses it
        wrong = RuntimeError(f"the step raised StopIteration: {answer.error}")
        wrong.__cause__ = answer.error
        future.set_exception(wrong)
    elif answer.error is not None:
        future.set_exception(answer.error)
    else:
        future.set_result(answer.value)


def _foreign_in(error: BaseException) -> BaseException | None:
    """Return the error by which a task refuses a future of another loop, if it is this one or in its group."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _foreign_in(each)) is not None), None)
    is_foreign = isinstance(error, RuntimeError) and "attached to a different loop" in str(error)
    return error if is_foreign else None


_STACKS = 10
_lives: dict[BodyLoop, AsyncLife] = {}


def evict_all() -> None:
    """Evict every body that is still here. At the end of a process the interpreter would close their coroutines, and
    what they await in a `finally` would be called for real.
    """
    for life in list(_lives.values()):
        if not life.loop.is_draining:
            life.evict()


atexit.register(evict_all)


class PlainLife(Life):
    """A plain function, on its own thread that waits in each call."""

    def __init__(
        self, replay: Replay, codec: Codec, call: Call, *, generation: int, now: float, seed: str = ""
    ) -> None:
        super().__init__(replay, codec, call, generation=generation, now=now, seed=seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: SimpleQueue[CallAnswer | Evicted] = SimpleQueue()
        self._waits_for = self._timer = ""
        self._then: Then | None = None
        self._args: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._thread: threading.Thread | None = None
        self._is_to_cancel = False
        self._raised = 0

    def _alive(self) -> None:
        if not self.is_evicting:
            return
        self._raised += 1
        if self._raised > _MAX_RAISES:
            threading.Event().wait()  # it catches everything: better a thread that waits for ever than one that spins
        raise Evicted

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = (args, kwargs)

    def start(self, then: Then) -> None:
        self._then = then
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="holdfast-body", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        running_body.life = self
        self._enter()
        args, kwargs = self._args
        try:
            self._finish(self._call.function(*args, **kwargs))
        except Evicted:
            return
        except BaseException as error:
            self._finish(error=error)
        finally:
            running_body.life = None
        self._quiet()

    def _quiet(self) -> None:
        then, self._then = self._then, None
        if then is not None and self._loop is not None and not self.is_evicting:
            try:
                self._loop.call_soon_threadsafe(then)
            except RuntimeError:
                return  # the worker is gone

    def wait_for(self, command: Command) -> Any:
        """Wait for the answer of a call, on the body's thread."""
        return self._wait(command.call.id)

    def awaited(self, command: Command) -> Awaitable[Any]:
        self.wait_for(command)
        return NothingToAwait()

    def sleep(self, seconds: float) -> None:
        self._wait(self._opened_timer("sleep", seconds))

    def _opened_timer(self, kind: str, seconds: float) -> str:
        self._alive()
        id, due = self.replay.number("wait"), ahead(self._now, seconds)
        self.open(Command(call=OpenCall(id=id, name=kind, where=where(), due=due, seconds=seconds)))
        return id

    def wait_for_hook(self, id: str, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until an event of a hook makes the condition true, up to a timeout. Return the condition."""
        self._alive()
        if holds():
            return True
        timer = "" if seconds is None else self._opened_timer("timeout", seconds)
        while not holds() and timer not in self.answers:
            if self._is_to_cancel:
                self._is_to_cancel = False
                self._give_up(timer)
                raise asyncio.CancelledError
            self._waits_for, self._timer = id, timer
            self._quiet()
            answer = self._answers.get()
            if isinstance(answer, Evicted) or self.is_evicting:
                raise Evicted
            if answer.is_cancelled:
                self._give_up(timer)
                raise asyncio.CancelledError
        self._waits_for = self._timer = ""
        if self.answers.pop(timer, None) is None:
            self._give_up(timer)
        return holds()

    def _wait(self, id: str) -> Any:
        if id in self.answers:
            return self._given(self.answers[id])
        if self._is_to_cancel:
            self._is_to_cancel = False
            self._give_up(id)
            raise asyncio.CancelledError
        self._waits_for = id
        self._quiet()
        answer = self._answers.get()
        if isinstance(answer, Evicted) or self.is_evicting:
            raise Evicted
        return self._given(answer)

    def _given(self, answer: CallAnswer) -> Any:
        if answer.is_cancelled:
            raise asyncio.CancelledError
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _give_up(self, id: str) -> None:
        self.replay.gave_up(id)
        if (command := self.by_id.pop(id, None)) is not None:
            self._ask_to_cancel(command)
            if command.child is not None:
                self.answers[id] = CallAnswer(is_cancelled=True)  # for who waits for it again

    def deliver(self, call: str, answer: CallAnswer, then: Then) -> None:
        command = self.by_id.pop(call, None)
        if command is not None and command.is_cancelled:  # it could not be stopped in time: the body gave it up
            answer = CallAnswer(is_cancelled=True)
        if command is not None and command.has_handle:
            self.answers.setdefault(call, answer)
        if call == self._timer:
            self.answers[call] = answer
        elif call != self._waits_for:
            return then()
        self._then = then
        self._answers.put(answer)

    def answer_hook(self, event: Event, answer: CallAnswer, then: Then) -> None:
        self._answer_hook(event, answer)
        if event.call != self._waits_for:
            return then()
        self._then = then
        self._answers.put(CallAnswer())

    def cancel(self, then: Then) -> None:
        """Raise CancelledError in the call that the body waits in, or in its next one."""
        command = self.by_id.get(self._waits_for)
        if command is None:
            self._is_to_cancel = True
            return then()
        if command.hook is not None:  # it stays: others may still resume it
            self._then = then
            return self._answers.put(CallAnswer(is_cancelled=True))
        self._ask_to_cancel(command)
        if command.step is not None or command.written is not None:
            return then()  # the recorded end of the step is delivered
        self._give_up(self._waits_for)
        self._then = then
        self._answers.put(CallAnswer(is_cancelled=True))

    def evict(self) -> bool:
        self.is_evicting = True
        self._answers.put(Evicted())
        self.by_id.clear()
        self.commands.clear()
        return True

    def why_stuck(self) -> str:
        return f"{self._call.task} waits for {self._waits_for}"


class ForegroundLife(PlainLife):
    """A plain function on the thread of its caller, for a replay without effects. `pull` delivers the next recorded
    event, and returns False if there is none; then the body is evicted.
    """

    pull: Callable[[], bool]

    def start(self, then: Then) -> None:
        contextvars.copy_context().run(self._run)
        then()

    def _quiet(self) -> None:
        while self.ended is None and self._answers.empty() and not self.is_evicting:
            if not self.pull():
                self.evict()


_MAX_RAISES = 1000


def _refuse_engine() -> None:
    if current_life() is not None:
        raise NotDeterministic(
            f"a call of Holdfast in the body of a workflow would not be recorded ({where()}): make it in a step. "
            "What a body may do: call steps and workflows, submit, sleep"
        )


guard(_refuse_engine)


def current_life() -> Life | None:
    """Return the life of the body that runs here; None outside of bodies, in steps too."""
    life: Life | None = running_body.life
    return life
