"""A process for tasks: its messages, and its main loop, which takes a question, runs the call and sends its answer.

Calls run on the main thread, one at a time, so that a task may do there what only the main thread may. The child has
no store and decides nothing; it ends when its parent is gone or closes the connection.

No value of a user is pickled on the way: arguments, results and payloads are encoded bytes already, and travel as the
parts of a message; the child decodes them with its own codec. Each question has one answer. At any time before it, the
parent may send a control for the call that runs, and the child log records: user code never waits for a parent that is
slow, and beyond the channel's limit records are counted and dropped. So what a task logs right before it crashes has
usually left its process. Chunks of streams are sent at any time, too; they are never dropped: a call that writes faster
than its parent takes them waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import faulthandler
import functools
import inspect
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import msgspec

from holdfast.codec import ErrorRecord, Payload, SizeLimits
from holdfast.errors import CircularWait, SoftTimeout, StreamClosed
from holdfast.executors.around import CallAround, CallsAround, Resources
from holdfast.executors.call import Call, Outcome, Raised, Returned, Unfit, raised, run, run_coroutine
from holdfast.executors.child_process import LOST_DESCRIPTORS, WAKE, Channel, end_with_parent
from holdfast.executors.chunks import ENDED, ChunkBuffer
from holdfast.executors.context import Context, cancelled, context_of
from holdfast.executors.declared import Address, Found, Program, Unreachable, find, this_program
from holdfast.executors.injection import wanted_by, without
from holdfast.executors.interrupts import BEGIN_SECONDS, SoftTimeoutInjector
from holdfast.executors.lifespan import ExitCallbacks, Hooks
from holdfast.executors.notes import CallNotes, Noted, NoteSender, NotesSeen, seen_of
from holdfast.executors.sharing import SharedValues, StepPort
from holdfast.executors.terminal import outlive_the_terminal
from holdfast.executors.waiting import Wait
from holdfast.model.records import InvocationRecord
from holdfast.telemetry.logs import logging_telemetry
from holdfast.telemetry.tasks import ATTRIBUTE, call_fields, message_of
from holdfast.tracing import CallSpan, PassedSpan

CANCEL, SOFT_TIMEOUT = "cancel", "soft timeout"

_LINGER_SECONDS = 0.01  # a shorter wait is not reported
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LEFT_TO_THE_PARENT = (signal.SIGINT, *_ENDING)
_MAX_LETTERS = 32_000  # of one text of a record
_MAX_FACTS = 100
_UNSENDABLE = ("msg", "args", "exc_info", ATTRIBUTE)


class Hello(msgspec.Struct, array_like=True, tag=True):
    """The first message: the parent's program. File names are bytes, since they need not be text."""

    pid: int
    argv: list[bytes]
    name: str
    path: bytes
    levels: dict[str, int]  # of the parent's loggers

    @property
    def program(self) -> Program | None:
        return Program(self.name, os.fsdecode(self.path)) if self.name or self.path else None


class Question(msgspec.Struct, array_like=True, tag=True):
    """A call. Its parts are the arguments, then the payloads."""

    key: str
    address: Address
    limits: SizeLimits
    digests: list[str]
    with_hooks: bool = False
    about: Context | None = None
    shared: SharedValues | None = None  # of a step's run
    notes: NotesSeen | None = None
    trace: dict[str, str] | None = None  # the span that the parent ends
    only_finds: bool = False  # the code is found, and not called


class Control(msgspec.Struct, array_like=True, tag=True):
    """A control for a running call, which is named by the number of its question."""

    what: str
    number: int


class Logged(msgspec.Struct, array_like=True, tag=True):
    """A log record: its plain attributes, and the call that it was made in."""

    facts: dict[str, str | int | float | bool | None]
    call: tuple[str, str, int] | None


class Answer(msgspec.Struct, array_like=True, tag=True):
    """An outcome: `why` alone means unfit. Its parts are the result, if there is no error, then the payloads."""

    why: str | None
    error: ErrorRecord | None
    digests: list[str]
    kinds: tuple[str, ...] = ()
    retry_after: float | None = None
    fatal: bool = False
    lost: int = 0  # log records that were dropped
    shared: SharedValues | None = None  # what a step has set for its run
    reported: tuple[str, ...] = ()  # streams whose errors were raised in the call


class Written(msgspec.Struct, array_like=True, tag=True):
    """An item that a call writes to a stream. Its parts are the data, then the payloads."""

    stream: str
    kind: int
    digests: list[str]


class FlushAsked(msgspec.Struct, array_like=True, tag=True):
    """A call waits until what it has written is durable."""

    flush: int


class WaitBegan(msgspec.Struct, array_like=True, tag=True):
    """All code of a call waits for these invocations."""

    ids: list[str]


class WaitOver(msgspec.Struct, array_like=True, tag=True):
    """The wait is over; the call continues when the parent answers."""


class WaitNews(msgspec.Struct, array_like=True, tag=True):
    """For the call with this number: its code may continue, or its wait is refused (`circle`)."""

    number: int
    circle: str = ""


class StreamNews(msgspec.Struct, array_like=True, tag=True):
    """For the call with this number: a flush is done, or chunks of a stream were refused."""

    number: int
    flush: int = 0
    stream: str = ""
    why: str = ""


FromParent = Hello | Question | Control | StreamNews | WaitNews
FromChild = Answer | Logged | Written | FlushAsked | WaitBegan | WaitOver | Noted


def hello(levels: dict[str, int]) -> Hello:
    program = this_program() or Program("", "")
    argv = [os.fsencode(each) for each in sys.argv]
    return Hello(os.getpid(), argv, program.name, os.fsencode(program.path), levels)


def question_of(call: Call, address: Address, *, with_hooks: bool = False) -> tuple[Question, list[bytes]]:
    about = context_of(call.about, call.deadline)
    shared: SharedValues | None = None
    if about is not None and about.run is not None:
        shared, about = about.run.shared(call.codec), msgspec.structs.replace(about, run=None)
    seen = seen_of(call.about) if call.notes is not None and isinstance(call.about, InvocationRecord) else None
    trace = call.span.carrier if isinstance(call.span, CallSpan) else None
    question = Question(call.key, address, call.limits, list(call.payloads), with_hooks, about, shared, seen, trace)
    return question, [call.arguments, *call.payloads.values()]


def answer_of(outcome: Outcome) -> tuple[Answer, list[bytes]]:
    match outcome:
        case Returned(result, payloads):
            return Answer(None, None, _digests(payloads)), [result, *(payload.data for payload in payloads)]
        case Raised(error, why, payloads, kinds, retry_after, fatal):
            head = Answer(sendable(why), error, _digests(payloads), tuple(map(sendable, kinds)), retry_after, fatal)
            return head, [payload.data for payload in payloads]
        case Unfit(why):
            return Answer(sendable(why), None, []), []
        case _:
            raise TypeError(f"a child has no such outcome: {outcome!r}")


def outcome_of(answer: Answer, parts: list[bytes]) -> Outcome:
    if answer.error is not None:
        payloads = _payloads(answer.digests, parts)
        return Raised(answer.error, answer.why or "", payloads, answer.kinds, answer.retry_after, answer.fatal)
    if answer.why is not None:
        return Unfit(answer.why)
    return Returned(parts[0], _payloads(answer.digests, parts[1:]))


def _payloads(digests: list[str], parts: list[bytes]) -> tuple[Payload, ...]:
    return tuple(Payload(digest, data) for digest, data in zip(digests, parts, strict=True))


def _digests(payloads: tuple[Payload, ...]) -> list[str]:
    return [payload.digest for payload in payloads]


def sendable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def main(descriptor: int) -> None:
    """Serve the parent that started this process, until it closes the connection."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel: Channel[FromParent] = Channel(connection, FromParent)
    with _until_the_parent_closes():
        hello, _ = channel.receive()
        assert isinstance(hello, Hello)
        end_with_parent(hello.pid)
        outlive_the_terminal()
        logs = ParentHandler(channel, hello.levels)
        chunks = ChunkSender(channel)
        waits = ChildWaits(channel)
        controls = CallControls(channel, logs, chunks, waits)
        _handle_signals(connection, controls)
        sys.argv[:] = [os.fsdecode(each) for each in hello.argv]
        with contextlib.closing(_Worker(hello.program, controls, logs, chunks, NoteSender(channel.send))) as worker:
            while True:
                question, parts = channel.receive()
                if isinstance(question, Question):  # else a control that came too late for its call
                    answer, parts = worker.answer(question, parts)
                    answer.lost = logs.take_dropped()
                    channel.send(answer, parts)


@contextlib.contextmanager
def _until_the_parent_closes() -> Iterator[None]:
    """End in silence when the parent is gone or closes; with its own code if the connection was closed here."""
    try:
        yield
    except EOFError:
        pass
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ENOTSOCK):
            sys.exit(LOST_DESCRIPTORS)


class CallControls:
    """Apply the parent's controls to the running call.

    A signal handler runs on the main thread, as calls do, and also while that thread waits in a system call. A control
    has the number of its call: a control that comes after the call's end is ignored.
    """

    def __init__(
        self, channel: Channel[FromParent], logs: ParentHandler, chunks: ChunkSender, waits: ChildWaits
    ) -> None:
        self._channel = channel
        self.waits = waits
        self._logs = logs
        self._chunks = chunks
        logs.on_free = self.look
        self._number = 0
        self._call: Call | None = None
        self._deferred: list[str] = []  # what the call cannot take yet
        self._task: asyncio.Task[Any] | None = None
        self._injector: SoftTimeoutInjector | None = None
        self._begun = self._is_looking = self._look_again = False

    def next_call(self) -> None:
        self._number += 1

    @contextlib.contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Apply messages that arrive from now on to this call."""
        self._call = call
        try:
            self.look()
            self._begun = True
            yield
        finally:
            self._call = self._task = self._injector = None
            self.waits.forget()
            self._begun, self._deferred = False, []
            cancelled.discard(_id_of(call))

    async def run_coroutine(self, call: Call) -> Outcome:
        self.waits.main = asyncio.current_task()
        self._task, self._injector = asyncio.current_task(), SoftTimeoutInjector()
        self.look()
        return await run_coroutine(call, self._injector)

    def look(self, _number: int = 0, interrupted: types.FrameType | None = None) -> None:
        """Apply the messages that have arrived; also called by the signal's handler. Between calls the main loop reads
        the channel.
        """
        self._look_again, call = True, self._call
        if call is None:
            return
        asked, self._deferred = self._deferred, []
        while self._look_again and not self._is_looking:  # the signal may come in the middle of a look
            self._is_looking, self._look_again = True, False
            try:
                arrived = self._channel.received()
            finally:
                self._is_looking = False
            asked += [each.what for each in arrived if isinstance(each, Control) and each.number == self._number]
            for each in arrived:
                if isinstance(each, StreamNews) and each.number == self._number:
                    self._chunks.take(each)
                elif isinstance(each, WaitNews) and each.number == self._number:
                    self.waits.take(each)
        for what in asked:
            self._apply(call, what, interrupted)

    def _apply(self, call: Call, what: str, interrupted: types.FrameType | None) -> None:
        task = self._task
        if what == CANCEL:
            cancelled.add(_id_of(call))
        if task is not None and self._injector is not None:
            strike = task.cancel if what == CANCEL else functools.partial(self._injector.strike, task)
            task.get_loop().call_soon_threadsafe(strike)
        elif inspect.iscoroutinefunction(call.function):
            self._deferred.append(what)  # it is about to begin
        elif what == SOFT_TIMEOUT and self._logs.is_busy:  # its code could not catch it
            self._deferred.append(what)
            self._logs.is_awaited = True
        elif what == SOFT_TIMEOUT and _makes_record(interrupted):  # `logging` swallows exceptions there
            self._logs.is_awaited = True
            self._defer(what)  # a filter may drop the record
        elif what == SOFT_TIMEOUT and not self._begun:  # the process took longer to start: as before
            self._defer(what)
        elif what == SOFT_TIMEOUT:
            raise SoftTimeout

    def _defer(self, what: str) -> None:
        """Apply it a little later."""
        self._deferred.append(what)
        again = threading.Timer(BEGIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, WAKE))
        again.daemon = True
        again.start()


def _makes_record(frame: types.FrameType | None) -> bool:
    """Return whether a log record is being made in this frame."""
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if frame.f_code is logging.LogRecord.__init__.__code__:
            return True
        frame = frame.f_back
    return False


_DEEPEST = 8  # frames below the frame that makes a log record


def _id_of(call: Call) -> str:
    return call.about.invocation_id if isinstance(call.about, Context) else call.key


def _handle_signals(connection: socket.socket, controls: CallControls) -> None:
    """Leave Ctrl-C, and a service manager that stops every process, to the parent.

    Handlers, not SIG_IGN: programs that a task starts react as usual.
    """
    for number in _LEFT_TO_THE_PARENT:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _nothing)
    signal.signal(WAKE, controls.look)
    forks = _Forks(connection)
    os.register_at_fork(before=forks.before, after_in_parent=forks.after, after_in_child=forks.inside)
    with contextlib.suppress(Exception):  # no stderr
        faulthandler.enable()


def _nothing(number: int, frame: object) -> None:
    pass


class _Forks:
    """Prepare forks of this process. A fork closes the connection, or the parent could not notice the end of this
    process. SIGTERM, SIGHUP and SIGQUIT end it, as `multiprocessing` expects. A signal that comes in between is
    delayed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._before = threading.local()

    def before(self) -> None:
        self._before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def after(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)

    def inside(self) -> None:
        self._connection.close()
        for number in _ENDING:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        self.after()


class _Worker:
    """Run calls, and keep between them the functions that were found and the event loop."""

    def __init__(
        self,
        program: Program | None,
        controls: CallControls,
        logs: ParentHandler,
        chunks: ChunkSender,
        notes: NoteSender,
    ) -> None:
        self._program = program
        self._notes = notes
        self._chunks = chunks
        self._logs = logs
        self._controls = controls
        self._found: dict[Address, tuple[Found, inspect.Signature]] = {}
        self._runner: asyncio.Runner | None = None
        self._hooked: dict[Hooks, ExitCallbacks] = {}
        self._opened: dict[Hooks, Resources] = {}
        self._made_around: dict[Hooks, CallsAround] = {}
        self._shared: SharedValues | None = None

    def close(self) -> None:
        for exits in self._hooked.values():
            with contextlib.suppress(Exception):  # their task has its outcome
                self._loop().run(exits.leave())
        if self._runner is not None:
            self._runner.close()

    def answer(self, question: Question, parts: list[bytes]) -> tuple[Answer, list[bytes]]:
        self._controls.next_call()
        payloads = dict(zip(question.digests, parts[1:], strict=True))
        self._shared = None
        answer, sent = answer_of(self._outcome(question, parts[0], payloads))
        answer.shared = self._shared
        answer.reported = self._chunks.end()
        self._notes.end()
        return answer, sent

    def _outcome(self, question: Question, arguments: bytes, payloads: dict[str, bytes]) -> Outcome:
        try:
            (function, codec, hooks), signature = self._find(question.address)
            if question.with_hooks:
                self._enter(hooks)
        except Unreachable as error:
            return Unfit(str(error))
        if question.only_finds:
            return Returned(b"")
        task, about = question.address.task, question.about
        port = None if question.shared is None else StepPort.of(question.shared, codec)
        if port is not None and about is not None:
            about = msgspec.structs.replace(about, run=port)
        if question.notes is not None and about is not None:
            notes = CallNotes.of(question.notes, codec, question.limits, self._notes.notify)
            self._notes.begin(notes)
            about = msgspec.structs.replace(about, noting=lambda: notes)
        facts = (question.key, task, function, signature, arguments, codec, question.limits, payloads, about)
        around = self._around(hooks, task, function)
        span = None if question.trace is None else PassedSpan(question.trace)
        call = Call(*facts, chunks=self._chunks.buffer_of, waits=self._controls.waits, around=around, span=span)
        self._chunks.begin(call)
        outcome: Outcome | None = None
        try:
            with self._controls.during(call):
                outcome = self._run_coroutine(call) if inspect.iscoroutinefunction(function) else run(call)
            self._shared = None if port is None else port.changed(codec)
            return outcome
        except SoftTimeout as error:  # user code had not begun, or was through
            return outcome or raised(call, error)

    def _find(self, address: Address) -> tuple[Found, inspect.Signature]:
        if address not in self._found:
            found = find(address, self._program)
            self._logs.take_over()
            self._found[address] = found, without(inspect.signature(found.function), wanted_by(found.function))
        return self._found[address]

    def _around(self, hooks: Hooks, task: str, function: Callable[..., Any]) -> CallAround | None:
        if hooks not in self._made_around:
            self._made_around[hooks] = CallsAround(hooks, logging_telemetry())
            self._made_around[hooks].open(self._opened.get(hooks))
        return self._made_around[hooks].of(task, wanted_by(function))

    def _enter(self, hooks: Hooks) -> None:
        """Enter the app's hooks for the rest of this life, on the loop on which its coroutines run."""
        if not hooks or hooks in self._hooked:
            return
        exits = ExitCallbacks(logging_telemetry())
        try:
            self._opened[hooks] = self._loop().run(hooks.enter(exits))
            self._made_around.pop(hooks, None)
            self._logs.take_over()
        except BaseException as error:
            with contextlib.suppress(BaseException):
                self._loop().run(exits.leave())
            why = f"the hooks of its app failed in a process for tasks: {type(error).__name__}: {error}"
            raise Unreachable(why) from error
        self._hooked[hooks] = exits

    def _loop(self) -> asyncio.Runner:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner

    def _run_coroutine(self, call: Call) -> Outcome:
        """Run it on a loop that stays: a client that a module keeps between calls belongs to the
        loop it was made on.
        """
        runner = self._loop()
        try:
            return runner.run(self._controls.run_coroutine(call), context=contextvars.copy_context())
        except BaseException as error:  # something beside the coroutine ended the loop: sys.exit() in another task
            broken, self._runner = runner, None
            with contextlib.suppress(BaseException):
                broken.close()
            record, payloads = call.codec.pack_error(error, call.limits)
            return Raised(record, f"the event loop was ended: {type(error).__name__}: {record.message}", payloads)


# --- chunks


class SentChunks(ChunkBuffer):
    """The chunks of a call in this process. Chunks leave it when they are sent; the parent reports when they are
    durable.
    """

    def __init__(self, notify: Callable[[], object]) -> None:
        super().__init__(notify)
        self.asked: deque[int] = deque()  # flushes that the parent does not know of
        self.flushes: dict[int, Future[None]] = {}
        self._numbers = itertools.count(1)

    def flushed(self) -> Future[None]:
        flushed: Future[None] = Future()
        number = next(self._numbers)
        self.flushes[number] = flushed
        self.asked.append(number)
        self._notify()
        return flushed


class ChunkSender:
    """Send the chunks of the call that runs to the parent, on its own thread: nothing may be raised in the middle of a
    message, as it may on the main thread.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel
        self._call: Call | None = None
        self._buffer: SentChunks | None = None
        self._news: SimpleQueue[SentChunks] = SimpleQueue()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, call: Call) -> None:
        self._call = call

    def buffer_of(self, call: Call) -> ChunkBuffer:
        if call is not self._call:  # a thread that it has left behind
            raise StreamClosed(ENDED)
        if self._buffer is None:
            self._buffer = SentChunks(self._notify)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="holdfast-chunks", daemon=True)
            self._thread.start()
        return self._buffer

    def _notify(self) -> None:
        if (buffer := self._buffer) is not None:
            self._news.put(buffer)

    def _main(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, as the main thread will see
            while True:
                self._send(self._news.get())

    def _send(self, buffer: SentChunks) -> None:
        with self._sending:
            asked = [buffer.asked.popleft() for _ in range(len(buffer.asked))]
            for item in buffer.take():
                digests = [payload.digest for payload in item.payloads]
                parts = [item.data, *[payload.data for payload in item.payloads]]
                self._channel.send(Written(item.stream, item.kind, digests), parts)
                buffer.written([item])
            for number in asked:
                self._channel.send(FlushAsked(number))

    def take(self, news: StreamNews) -> None:
        """Take the parent's messages for the running call; in the handler of a signal."""
        if (buffer := self._buffer) is None:
            return
        if news.stream:
            buffer.refuse(news.stream, StreamClosed(news.why))
        if (flushed := buffer.flushes.pop(news.flush, None)) is not None and not flushed.done():
            flushed.set_result(None)

    def end(self) -> tuple[str, ...]:
        """Send the remaining chunks of the call, and forget it. Return the streams whose errors were raised in it."""
        self._call, buffer, self._buffer = None, self._buffer, None
        if buffer is None:
            return ()
        self._send(buffer)
        buffer.cut(StreamClosed(ENDED))
        return buffer.reported


# --- waits for other invocations


class CallPause:
    """A period in which all code of the call waits, as reported to the parent."""

    def __init__(self, waits: frozenset[Wait]) -> None:
        self.waits = waits
        self.is_over = False
        self.may_go_on: Future[None] = Future()


class ChildWaits:
    """The waits of the call that runs here. Its parent's worker gives the slot back and takes it again.

    A function waits on the main thread, and a coroutine on the loop there. So that thread takes the parent's messages.
    The rest happens on the engine's loop.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel
        self._open: set[Wait] = set()
        self._pause: CallPause | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.main: asyncio.Task[Any] | None = None  # of a coroutine

    def runs_on(self, call: Call) -> bool:
        return self.main is None and threading.current_thread() is threading.main_thread()

    def main_task_of(self, call: Call) -> asyncio.Task[Any] | None:
        return self.main

    def begin(self, wait: Wait) -> None:
        self._open.add(wait)
        self._consider()

    def only_waits(self, waits: frozenset[Wait]) -> None:
        for wait in waits:
            wait.beside = waits
        self._consider()

    def keeps_slot(self, wait: Wait, why: str) -> None:
        wait.beside = frozenset()

    @property
    def _is_idle(self) -> bool:
        return bool(self._open) and next(iter(self._open)).beside == self._open

    def _consider(self) -> None:
        if self._timer is None and self._is_idle:
            self._timer = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._report_pause)

    def _report_pause(self) -> None:
        """Report to the parent that the call waits, if it still does."""
        self._timer = None
        if self._is_idle and (self._pause is None or self._pause.is_over):
            self._pause = CallPause(frozenset(self._open))
            self._channel.send(WaitBegan(list(dict.fromkeys(id for wait in self._open for id in wait.ids))))

    def take(self, news: WaitNews) -> None:
        """Take a message of the parent; in the handler of a signal."""
        if (pause := self._pause) is None:
            return
        if not news.circle:
            if not pause.may_go_on.done():
                pause.may_go_on.set_result(None)
            return
        for wait in pause.waits:
            if wait.refused is not None:
                wait.refused.get_loop().call_soon_threadsafe(wait.refuse, CircularWait(news.circle))

    async def end(self, wait: Wait) -> None:
        if (pause := self._pause) is not None and wait in pause.waits:
            if not pause.is_over:
                pause.is_over = True
                self._channel.send(WaitOver())
            await asyncio.wrap_future(pause.may_go_on)
        self._open.discard(wait)

    def forget(self) -> None:
        """Forget the call, which has ended: waits that it left behind do not count."""
        self._open, self._pause, self.main = set(), None, None


# --- log records

_formatter = logging.Formatter()


class ParentHandler(logging.Handler):
    """Send records to the parent. `is_busy` while the main thread is here. It must not be interrupted then: half a
    record would be sent, and `logging` would swallow the exception. `on_free` is called afterwards, if `is_awaited`.
    """

    def __init__(self, channel: Channel[Any], levels: Mapping[str, int]) -> None:
        super().__init__()
        self.is_busy = self.is_awaited = False
        self.on_free: Callable[[], object] = lambda: None
        self.dropped = 0
        self._channel = channel
        self._pid = os.getpid()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        self.take_over()

    def createLock(self) -> None:
        self.lock = None  # the channel has its own, for which no thread waits

    def take_over(self) -> None:
        """Be the only handler. The handlers that modules add when they are imported run in the parent."""
        logging.root.handlers[:] = [self]
        for logger in list(logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and logger.handlers:
                logger.handlers[:] = [each for each in logger.handlers if isinstance(each, logging.NullHandler)]
                logger.propagate = True

    def handle(self, record: logging.LogRecord) -> bool:
        if self.is_busy or threading.get_ident() != threading.main_thread().ident:
            return super().handle(record)
        self.is_busy = True
        try:
            return super().handle(record)
        finally:
            self.is_busy = False
            if self.is_awaited:
                self.is_awaited = False
                self.on_free()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # a fork of this process has no parent to send it to
            if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)
            return
        try:
            self.dropped += not self._channel.post(Logged(_facts(record), call_fields(record)))
        except Exception:
            self.handleError(record)

    def take_dropped(self) -> int:
        """Return how many records were dropped since the last call of this."""
        dropped, self.dropped = self.dropped, 0
        return dropped


def _facts(record: logging.LogRecord) -> dict[str, str | int | float | bool | None]:
    """Return the parts of a log record that can be sent: its message, and every attribute that is a plain value."""
    facts: dict[str, str | int | float | bool | None] = {"msg": _text(message_of(record))}
    if record.exc_info:
        facts["exc_text"] = _text(_formatter.formatException(record.exc_info))
    for name, value in list(record.__dict__.items())[:_MAX_FACTS]:
        if name not in _UNSENDABLE and name not in facts and isinstance(value, str | int | float | None):
            is_long = isinstance(value, str) or (isinstance(value, int) and abs(value) >= 2**63)
            facts[name] = _text(str(value)) if is_long else value
    return facts


def _text(text: str) -> str:
    return sendable(text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}… (cut)")
