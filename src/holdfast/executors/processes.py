"""Calls in processes of their own: a crash takes one call with it, and nothing else.

A slot is a thread and a child process. The thread sends a call, waits, and delivers the outcome; so the engine's loop
never waits for a socket, however large a value is. Children start when they are first needed, run one call at a time
and are used again. How they are started, talked to and ended is in `child_process.py`; what they do, in `child.py`. Log
records of a child are written by the handlers of this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from holdfast.codec import Payload
from holdfast.executors.begun import BegunCalls
from holdfast.executors.call import INTERRUPTED, NOT_BEGUN, TOO_LATE, Call, Crashed, Outcome, Unfit
from holdfast.executors.child import (
    CANCEL,
    SOFT_TIMEOUT,
    Answer,
    Control,
    FlushAsked,
    FromChild,
    Logged,
    Question,
    StreamNews,
    WaitBegan,
    WaitNews,
    WaitOver,
    Written,
    hello,
    outcome_of,
    question_of,
)
from holdfast.executors.child_process import (
    LOOK_SECONDS,
    LOST_DESCRIPTORS,
    Channel,
    exit_in_words,
    kill_group,
    start,
    wake,
)
from holdfast.executors.chunks import Outgoing, is_over
from holdfast.executors.context import Context
from holdfast.executors.declared import Address, Unreachable, address_of
from holdfast.executors.local import Deliver, Executor, OutcomeBatch
from holdfast.executors.notes import Noted
from holdfast.executors.waiting import Wait, WorkerPort
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import TaskLogsLost
from holdfast.telemetry.tasks import ATTRIBUTE, CallFields

_GRACE_SECONDS = 2.0  # for a child to end by itself
_NO_WAY = "the call cannot write to a stream here: it runs without a worker"
Said = Written | FlushAsked | WaitBegan | WaitOver | Noted
Heard = Callable[[Said, list[bytes]], None]

# It sets where to look for modules before it imports anything: the parent's path may not be the usual one.
_BOOT = """\
import sys
sys.path[:] = {path!r}
from holdfast.executors.child import main
main({descriptor})
"""


class ProcessExecutor(Executor):
    """Functions of any kind, in up to `size` child processes.

    `calls_per_process` replaces a child after this many calls, for code that leaks memory. With `with_hooks`, children
    have the app's hooks around their lives, as a worker does.
    """

    def __init__(
        self,
        size: int,
        deliver: Deliver,
        telemetry: Telemetry,
        *,
        calls_per_process: int | None = None,
        with_hooks: bool = False,
        begun: BegunCalls | None = None,
    ) -> None:
        self._size = size
        self._telemetry = telemetry
        self._deliver = deliver
        self._calls_per_process = calls_per_process
        self._with_hooks = with_hooks
        self._begun = begun
        self._outcomes = OutcomeBatch(self._finished)
        self._busy = 0  # used on the engine's loop only
        self._threads = 0
        self._news = threading.Condition()  # guards what follows; not held while waiting for a child
        self._waiting: dict[str, Call] = {}
        self._running: dict[str, _Slot] = {}
        self._late: set[str] = set()  # calls that wait, and whose soft timeout is over
        self._closed = False

    def start(self, calls: Iterable[Call]) -> None:
        with self._news:
            for call in calls:
                self._busy += 1
                self._waiting[call.key] = call
                self._news.notify()
            self._add_threads()

    def _add_threads(self) -> None:
        """Start missing threads. Called with the guard held."""
        while self._threads < min(self._busy, self._size):
            self._threads += 1
            threading.Thread(target=self._main, name=f"holdfast-process-{self._threads}", daemon=True).start()

    def make_room(self, more: int) -> None:
        with self._news:
            self._size += more
            self._add_threads()
            self._news.notify_all()

    def _finished(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        self._busy -= len(outcomes)
        self._deliver(outcomes)

    def interrupt(self, keys: Iterable[str]) -> None:
        self._end(keys, INTERRUPTED, _Slot.interrupt)

    force = interrupt

    def cancel(self, keys: Iterable[str]) -> None:
        self._end(keys, NOT_BEGUN, lambda slot: slot.control(CANCEL))

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        with self._news:
            for key in keys:
                if slot := self._running.get(key):
                    slot.control(SOFT_TIMEOUT)
                elif key in self._waiting:
                    self._late.add(key)

    def _end(self, keys: Iterable[str], if_not_begun: Outcome, end: Callable[[_Slot], None]) -> None:
        with self._news:
            for key in keys:
                if self._waiting.pop(key, None) is not None:
                    self._late.discard(key)
                    self._outcomes.add(key, if_not_begun)
                elif slot := self._running.get(key):
                    end(slot)
        self._outcomes.announce()

    def close(self) -> None:
        """End all children. Calls that still run are interrupted: no caller would get their outcome."""
        with self._news:
            self._closed = True
            keys = [*self._waiting, *self._running]
            self._news.notify_all()
        self.interrupt(keys)

    # --- on the threads

    def _main(self) -> None:
        slot = _Slot(self._news, self._telemetry, self._calls_per_process, self._with_hooks)
        while (call := self._next(slot)) is not None:
            is_in_time = slot.is_in_time(call)
            may_begin = is_in_time and (self._begun is None or self._begun.begin(call.mark, call.ticket))
            outcome = slot.run(call) if may_begin else NOT_BEGUN if is_in_time else TOO_LATE
            if self._begun is not None:
                self._begun.over(call.mark)
            with self._news:
                del self._running[call.key]
            self._outcomes.add(call.key, outcome)
            self._outcomes.announce()
            del call, outcome  # an idle thread must not keep the last call's values alive
            slot.recycle()
        slot.close()

    def _next(self, slot: _Slot) -> Call | None:
        with self._news:
            while not self._waiting and not self._closed and self._threads <= self._size:
                self._news.wait()
            if self._closed or (not self._waiting and self._threads > self._size):
                self._threads -= 1
                return None
            call = self._waiting.pop(next(iter(self._waiting)))
            self._running[call.key] = slot
            slot.begin()
            if call.key in self._late:
                self._late.remove(call.key)
                slot.control(SOFT_TIMEOUT)
            return call


class _Slot:
    """A thread's child process: started when there is a call, replaced when it has died or has run enough.

    `guard` is held by a thread that interrupts. It guards `interrupted` and the child, so that only a child that has
    not been waited for is killed: after that, its process id may belong to another program.
    """

    def __init__(
        self, guard: threading.Condition, telemetry: Telemetry, calls_per_process: int | None, with_hooks: bool
    ) -> None:
        self.interrupted = False
        self._telemetry = telemetry
        self._guard = guard
        self._calls_per_process = calls_per_process
        self._with_hooks = with_hooks
        self._child: _Child | None = None
        self._pending: list[str] = []  # for a child that does not have the call yet
        self._has_question = False
        self._wait: Wait | None = None  # in which the call waits for others

    def begin(self) -> None:
        """Begin a new call. Called with the guard held."""
        self.interrupted = self._has_question = False
        self._wait = None
        self._pending.clear()

    def control(self, what: str) -> None:
        """Ask something of the call, or keep it for its start. Called with the guard held."""
        if self._child is not None and self._has_question:
            self._child.control(what)
        else:
            self._pending.append(what)

    def interrupt(self) -> None:
        """Kill the child, and the call with it. Called with the guard held."""
        self.interrupted = True
        if self._child is not None:
            self._child.kill()

    def is_in_time(self, call: Call) -> bool:
        """Let a new child find the code of a call under a rate. Return False if that has taken longer than the call may
        wait: it would begin together with calls whose starts come later.
        """
        if call.begin_within is None or self._child is not None or self._calls_per_process is not None:
            return True
        since = time.monotonic()
        with contextlib.suppress(Exception):  # `run` meets it again, and reports it
            address, with_hooks = self._found_by(call)
            question = Question(call.key, address, call.limits, [], with_hooks, only_finds=True)
            self._asked(question, [b""]).receive_answer(lambda said, parts: None)
        return self.interrupted or time.monotonic() - since <= call.begin_within

    def _found_by(self, call: Call) -> tuple[Address, bool]:
        """Return where a child finds the code of a call, and whether it needs the app's hooks."""
        address = address_of(call.task, call.function, call.codec)
        return address, self._with_hooks or (call.around is not None and call.around.injects)

    def run(self, call: Call) -> Outcome:
        """Run a call in the child. Whatever happens is an outcome."""
        try:
            address, with_hooks = self._found_by(call)
            question, parts = question_of(call, address, with_hooks=with_hooks)
            call.payloads.clear()  # they are in `parts`, and go when they are sent
            child = self._asked(question, parts)
            parts.clear()
            with self._guard:
                self._has_question = True
                for what in self._pending:
                    child.control(what)
            answer, parts = child.receive_answer(functools.partial(self._said, call, child))
            if answer.reported and call.chunks is not None:
                call.chunks(call).mark_reported(answer.reported)
            if answer.lost:
                self._telemetry.emit(TaskLogsLost(call.task, answer.lost))
            if answer.shared is not None and isinstance(call.about, Context):
                call.about.run.take(answer.shared, call.codec)
            outcome = outcome_of(answer, parts)
        except Unreachable as error:
            return Unfit(str(error))
        except (OSError, EOFError) as error:
            why = self._discard() or f"no process could be started: {error}"
            return INTERRUPTED if self.interrupted else Crashed(why)
        except Exception as error:  # a defect of ours, or no memory; the caller must not wait for ever
            self._discard(kill=True)
            return Crashed(f"it cannot be talked to: {type(error).__name__}: {error}")
        if self.interrupted:  # too late: it has its outcome, and its child was killed for nothing
            self._discard()
        return outcome

    def _said(self, call: Call, child: _Child, said: Said, parts: list[bytes]) -> None:
        """Take what the call says of its waits, or in a stream. The child waits meanwhile, if it has more to say."""
        if isinstance(said, WaitBegan | WaitOver):
            return self._waits(call, child, said)
        if isinstance(said, Noted):
            return None if call.notes is None else call.notes(call).take(said)
        if call.chunks is None:
            news = StreamNews(child.calls, getattr(said, "flush", 0), getattr(said, "stream", ""), _NO_WAY)
            return self._send_news(child, news)
        buffer = call.chunks(call)
        if isinstance(said, FlushAsked):
            news = StreamNews(child.calls, said.flush)
            return buffer.flushed().add_done_callback(lambda _: self._send_news(child, news))
        payloads = tuple(Payload(*each) for each in zip(said.digests, parts[1:], strict=True))
        room, error = buffer.forward(Outgoing(said.stream, said.kind, parts[0], payloads))
        if error is not None:
            self._send_news(child, StreamNews(child.calls, 0, said.stream, str(error)))
        while room is not None and not self.interrupted and not is_over(room):
            pass

    def _waits(self, call: Call, child: _Child, said: WaitBegan | WaitOver) -> None:
        """Pass on that the call waits for others, or that it may go on again."""
        number, port = child.calls, call.waits
        if isinstance(said, WaitBegan) and isinstance(port, WorkerPort):
            self._wait = Wait(port, call, said.ids)
            port.begin_elsewhere(self._wait, lambda circle: self._send_news(child, WaitNews(number, circle)))
        elif isinstance(said, WaitOver) and isinstance(port, WorkerPort) and self._wait is not None:
            port.end_elsewhere(self._wait, lambda: self._send_news(child, WaitNews(number)))
        elif isinstance(said, WaitOver):
            self._send_news(child, WaitNews(number))

    def _send_news(self, child: _Child, news: StreamNews | WaitNews) -> None:
        """Send news to the call that runs in a child. From any thread."""
        with self._guard:
            if self._child is child:
                child.send(news)

    def _asked(self, question: Question, parts: list[bytes]) -> _Child:
        """Return the child that has the question now.

        A child that has died idle is replaced: it cannot have begun, since it has never had the whole question.
        """
        if self._child is not None:
            try:
                self._child.ask(question, parts)
                return self._child
            except OSError:
                if self.interrupted:
                    raise
                self._discard()
        fresh = _Child()
        with self._guard:
            self._child = fresh
            if self.interrupted:
                fresh.kill()
        fresh.ask(question, parts)
        return fresh

    def _discard(self, *, kill: bool = False) -> str:
        """Let go of a child that has died, and say how it ended."""
        with self._guard:
            child, self._child = self._child, None
            if kill and child is not None:
                child.kill()
        return "" if child is None else child.ended()

    def recycle(self) -> None:
        """Replace the child between two calls, if it has run enough."""
        if self._child is not None and self._child.calls == self._calls_per_process:
            self.close()

    def close(self) -> None:
        with self._guard:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process that runs calls, and the connection to it. It ends with the thread that has made it (Linux)."""

    def __init__(self) -> None:
        path = [part for part in sys.path if isinstance(part, str)]
        interpreter = [_executable(), *_interpreter_flags(), "-c"]
        self._process, self._connection = start(lambda fd: [*interpreter, _BOOT.format(path=path, descriptor=fd)])
        self._channel: Channel[FromChild] = Channel(self._connection, FromChild)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        self.calls = 0

    def ask(self, question: Question, parts: Sequence[bytes]) -> None:
        if not self.calls:
            self._channel.send(hello(levels()))
        self.calls += 1
        self._channel.send(question, parts)

    def receive_answer(self, heard: Heard) -> tuple[Answer, list[bytes]]:
        """Write what the child logs, and return its answer. `heard` takes the messages that the child sends during its
        call, such as chunks of streams. Raises `EOFError` or `OSError` when there will be none.
        """
        while True:
            while not self._poll.poll(LOOK_SECONDS * 1000):
                if self._process.poll() is not None:  # a fork of the child may hold the connection open
                    raise EOFError
                self._channel.flush()
            said, parts = self._channel.receive()
            if isinstance(said, Answer):
                return said, parts
            if isinstance(said, Logged):
                replay(said)
            else:
                heard(said, parts)

    def control(self, what: str) -> None:
        """Ask something of the call that it runs: see `child.CallControls`."""
        self.send(Control(what, self.calls))

    def send(self, message: Control | StreamNews | WaitNews) -> None:
        """Send a message to the call that it runs, in the middle of it."""
        self._channel.post(message)
        wake(self._process.pid)

    def kill(self) -> None:
        kill_group(self._process.pid)

    def ended(self) -> str:
        """Wait for its end, which has begun, and say how it came."""
        self._connection.close()
        try:
            status = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            status = LOST_DESCRIPTORS
        self.kill()  # or at least what it has left behind
        self._process.wait()
        return exit_in_words(status)

    def end(self) -> None:
        """Let it end by itself, and write what it logs meanwhile; shortly afterwards, end it."""
        deadline = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(OSError, EOFError):
            self._connection.shutdown(socket.SHUT_WR)  # a close is not enough if this process has forked meanwhile
            while (left := deadline - time.monotonic()) > 0 and self._poll.poll(left * 1000):
                said, _ = self._channel.receive()
                if isinstance(said, Logged):
                    replay(said)
        self._connection.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def _executable() -> str:
    """Return the interpreter: where Python is embedded in another program, `multiprocessing` was given its path."""
    from multiprocessing.spawn import get_executable

    return os.fsdecode(get_executable())


def _interpreter_flags() -> list[str]:
    """Return the flags that this process was started with, such as ``-O`` or ``-X utf8``."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


# --- log records of children


def levels() -> dict[str, int]:
    """Return the levels that were set in this process, by logger; that of the root is under "root"."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {each.name: each.level for each in loggers if isinstance(each, logging.Logger) and each.level}


def replay(logged: Logged) -> None:
    """Handle a child's record as if it had been made here."""
    record = logging.makeLogRecord(logged.facts)
    if logged.call is not None:
        setattr(record, ATTRIBUTE, CallFields(*logged.call))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        with contextlib.suppress(Exception):  # of a user's handler or filter; the call is not to pay for it
            logger.handle(record)
