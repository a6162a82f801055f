"""Calls in processes of their own: a crash takes one call with it, and nothing else.

A place is a thread and a child process. The thread hands a call over, waits, and notes the outcome; so the engine's
loop never waits for a pipe, however large a value is. Children start when they are first needed, run one call at a
time and are used again.

They are new interpreters, never forks: a fork of a process with threads inherits locks that nobody will open. They are
not those of `multiprocessing` either. Such a child may not have children itself or else holds up the end of its parent,
runs the parent's main module even if no task lives there, and its exit status may be taken by another thread. What
remains to be done here is little, and is in `child.py`.

A child is the leader of a process group: Ctrl-C at the terminal does not reach it, and what a task has started ends
with it when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

from holdfast.execution.call import INTERRUPTED, NOT_BEGUN, Call, Crashed, Outcome, Unfit
from holdfast.execution.declared import Unreachable, address_of
from holdfast.execution.places import Deliver, _Pile
from holdfast.execution.wire import (
    CANCEL,
    DOORBELL,
    FLAGS,
    SOFT,
    Answer,
    Channel,
    Question,
    hello,
    outcome_of,
    question_of,
)

_GRACE_SECONDS = 2.0  # for a child to end by itself
_LOOK_MILLISECONDS = 1000  # how often to look whether a silent child is alive; its end usually announces itself

# It reads where to look for modules before it imports anything: the parent's path may not be the usual one.
_BOOT = """\
import os, sys
path = b""
while len(path) < {size}:
    path += os.read({descriptor}, {size} - len(path)) or sys.exit(1)
sys.path[:] = os.fsdecode(path).split("\\0")
from holdfast.execution.child import main
main({descriptor}, {ear})
"""


class ProcessPlaces:
    """Functions of any kind, in up to `size` child processes.

    `calls_per_process` replaces a child after so many calls, for code that loses memory. Those `with_hooks` have the
    app's hooks around their lives, as a worker does.
    """

    def __init__(
        self, size: int, deliver: Deliver, *, calls_per_process: int | None = None, with_hooks: bool = False
    ) -> None:
        self._size = size
        self._deliver = deliver
        self._calls_per_process = calls_per_process
        self._with_hooks = with_hooks
        self._pile = _Pile(self._finished)
        self._busy = 0  # used on the engine's loop only
        self._threads = 0
        self._news = threading.Condition()  # guards what follows; nobody waits for a child while holding it
        self._waiting: dict[str, Call] = {}
        self._running: dict[str, _Place] = {}
        self._closed = False

    def start(self, calls: Iterable[Call]) -> None:
        with self._news:
            for call in calls:
                self._busy += 1
                self._waiting[call.key] = call
                self._news.notify()
        while self._threads < min(self._busy, self._size):
            self._threads += 1
            threading.Thread(target=self._main, name=f"holdfast-process-{self._threads}", daemon=True).start()

    def _finished(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        self._busy -= len(outcomes)
        self._deliver(outcomes)

    def interrupt(self, keys: Iterable[str]) -> None:
        with self._news:
            for key in keys:
                if self._waiting.pop(key, None) is not None:
                    self._pile.add(key, INTERRUPTED)
                elif place := self._running.get(key):
                    place.interrupt()
        self._pile.announce()

    def cancel(self, keys: Iterable[str]) -> None:
        with self._news:
            for key in keys:
                if self._waiting.pop(key, None) is not None:
                    self._pile.add(key, NOT_BEGUN)
                elif place := self._running.get(key):
                    place.tell(CANCEL)
        self._pile.announce()

    def soften(self, keys: Iterable[str]) -> None:
        with self._news:
            for key in keys:
                if place := self._running.get(key):
                    place.tell(SOFT)

    def force(self, keys: Iterable[str]) -> None:
        self.interrupt(keys)

    def is_blocked(self, key: str) -> bool:
        return False

    def close(self) -> None:
        """End all children. Calls that still run are interrupted: nobody would learn what became of them."""
        with self._news:
            self._closed = True
            keys = [*self._waiting, *self._running]
            self._news.notify_all()
        self.interrupt(keys)

    # --- on the threads

    def _main(self) -> None:
        place = _Place(self._news, self._calls_per_process, self._with_hooks)
        while (call := self._next(place)) is not None:
            outcome = place.run(call)
            with self._news:
                del self._running[call.key]
            self._pile.add(call.key, outcome)
            self._pile.announce()
            del call, outcome  # an idle thread must not keep the last call's values alive
            place.rest()
        place.close()

    def _next(self, place: _Place) -> Call | None:
        with self._news:
            while not self._waiting and not self._closed:
                self._news.wait()
            if self._closed:
                return None
            call = self._waiting.pop(next(iter(self._waiting)))
            self._running[call.key] = place
            place.begin()
            return call


class _Place:
    """A thread's child process: started when there is a call, replaced when it has died or has run enough.

    `guard` is held by whoever interrupts. What is under it is `interrupted` and which child is here, so that only a
    child that has not been waited for is killed: after that, its number may belong to somebody else.
    """

    def __init__(self, guard: threading.Condition, calls_per_process: int | None, with_hooks: bool) -> None:
        self.interrupted = False
        self._guard = guard
        self._calls_per_process = calls_per_process
        self._with_hooks = with_hooks
        self._child: _Child | None = None
        self._untold: list[str] = []  # since nobody was there yet to hear it
        self._asked_already = False

    def begin(self) -> None:
        """A new call. Called with the guard held."""
        self.interrupted = self._asked_already = False
        self._untold.clear()

    def tell(self, what: str) -> None:
        """Called with the guard held."""
        if self._child is not None and self._asked_already:
            self._child.tell(what)
        else:
            self._untold.append(what)

    def interrupt(self) -> None:
        """Called with the guard held."""
        self.interrupted = True
        if self._child is not None:
            self._child.kill()

    def run(self, call: Call) -> Outcome:
        """Whatever happens is an outcome."""
        try:
            address = address_of(call.task, call.function, call.codec)
            question, parts = question_of(call, address, with_hooks=self._with_hooks)
            call.payloads.clear()  # they are in `parts`, and go when they are sent
            child = self._asked(question, parts)
            parts.clear()
            with self._guard:
                self._asked_already = True
                for what in self._untold:
                    child.tell(what)
            outcome = outcome_of(*child.hear())
        except Unreachable as error:
            return Unfit(str(error))
        except (OSError, EOFError) as error:
            why = self._bury() or f"no process could be started: {error}"
            return INTERRUPTED if self.interrupted else Crashed(why)
        except Exception as error:  # a defect of ours, or no memory; the caller must not wait for ever
            self._bury(kill=True)
            return Crashed(f"it cannot be talked to: {type(error).__name__}: {error}")
        if self.interrupted:  # too late: it has its outcome, and its child was killed for nothing
            self._bury()
        return outcome

    def _asked(self, question: Question, parts: list[bytes]) -> _Child:
        """The child that has the question now.

        One that has died idle is replaced: it cannot have begun, since it has never had the whole question.
        """
        if self._child is not None:
            try:
                self._child.ask(question, parts)
                return self._child
            except OSError:
                if self.interrupted:
                    raise
                self._bury()
        fresh = _Child()
        with self._guard:
            self._child = fresh
            if self.interrupted:
                fresh.kill()
        fresh.ask(question, parts)
        return fresh

    def _bury(self, *, kill: bool = False) -> str:
        """Let go of a child that has died, and say how it ended."""
        with self._guard:
            child, self._child = self._child, None
            if kill and child is not None:
                child.kill()
        return "" if child is None else child.ended()

    def rest(self) -> None:
        """Between two calls."""
        if self._child is not None and self._child.calls == self._calls_per_process:
            self.close()

    def close(self) -> None:
        with self._guard:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process that runs calls, and the connection to it.

    It is started by the thread that uses it: on Linux a child ends with the thread that has made it.
    """

    def __init__(self) -> None:
        path = os.fsencode("\0".join(part for part in sys.path if isinstance(part, str)))
        self._connection, theirs = socket.socketpair()
        self._mouth, ear = socket.socketpair()
        with theirs, ear:
            try:
                boot = _BOOT.format(size=len(path), descriptor=theirs.fileno(), ear=ear.fileno())
                self._process = subprocess.Popen(
                    [_executable(), *_interpreter_flags(), "-c", boot],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), ear.fileno()],
                    process_group=0,
                )
            except BaseException:
                self._connection.close()
                self._mouth.close()
                raise
        self._greeting = path
        self._channel = Channel(self._connection)
        self.calls = 0

    def ask(self, question: Question, parts: Sequence[bytes]) -> None:
        if not self.calls:
            self._connection.sendall(self._greeting)
            self._channel.send(hello())
        self.calls += 1
        self._channel.send(question, parts)

    def hear(self) -> tuple[Answer, list[bytes]]:
        """The answer. Raises `EOFError` or `OSError` when there will be none.

        A process that the child has forked may hold the connection open after the child's death: so look at the child
        too, now and then.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(_LOOK_MILLISECONDS):
            if self._process.poll() is not None:
                raise EOFError
        return self._channel.receive(Answer)

    def tell(self, what: str) -> None:
        """Say something about the call that it runs. It is heard in the middle of it: see `child.Ears`."""
        with contextlib.suppress(OSError):  # it has died, or does not listen to a thousand messages
            self._mouth.send(f"{what} {self.calls}\n".encode(), socket.MSG_DONTWAIT | FLAGS)
            os.kill(self._process.pid, DOORBELL)

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a dead group
            os.killpg(self._process.pid, signal.SIGKILL)

    def ended(self) -> str:
        """Wait for its end, which has begun, and say how it came."""
        self._connection.close()
        self._mouth.close()
        try:
            why = _in_words(self._process.wait(_GRACE_SECONDS))
        except subprocess.TimeoutExpired:
            why = "it closed its connection"
        self.kill()  # or at least what it has left behind
        self._process.wait()
        return why

    def end(self) -> None:
        """Let it end by itself; shortly afterwards, end it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a close is not enough if somebody has forked meanwhile
        self._connection.close()
        self._mouth.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def _executable() -> str:
    """The interpreter: where Python is embedded in another program, `multiprocessing` was told which one it is."""
    from multiprocessing.spawn import get_executable

    return os.fsdecode(get_executable())


def _interpreter_flags() -> list[str]:
    """Those that this process was started with, such as ``-O`` or ``-X utf8``."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
    hint = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
    return f"{name} ({signal.strsignal(-status)}){hint}"
