"""What a child process does: it is asked to run a call, runs it, answers, and waits for the next question.

Calls run on the main thread, one at a time, so that a task may do there what only the main thread may. The child has
no store and decides nothing; it ends when its parent is gone or lets go of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import functools
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from holdfast.errors import SoftTimeout
from holdfast.execution.call import Call, Outcome, Raised, Unfit, raised, run, run_coroutine
from holdfast.execution.context import Context, cancelled
from holdfast.execution.declared import Address, Found, Program, Unreachable, find
from holdfast.execution.hooks import Ends, Hooks
from holdfast.execution.lifeline import outlive_the_terminal
from holdfast.execution.throwing import Softly
from holdfast.execution.wire import CANCEL, DOORBELL, SOFT, Answer, Channel, Hello, Question, answer_of

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0
_BEGIN_SECONDS = 0.2  # for code to reach its own `try`
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LEFT_TO_THE_PARENT = (signal.SIGINT, *_ENDING)


def main(descriptor: int, ear: int) -> None:
    """Serve the parent that started this process, until it lets go."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection)
    with contextlib.suppress(EOFError, OSError):
        hello, _ = channel.receive(Hello)
        end_with(hello.pid)
        outlive_the_terminal()
        ears = Ears(socket.socket(fileno=ear))
        _keep_calm(connection, ears)
        sys.argv[:] = [os.fsdecode(each) for each in hello.argv]
        with contextlib.closing(_Worker(hello.program, ears)) as worker:
            while True:
                channel.send(*worker.answer(*channel.receive(Question)))


def end_with(parent: int) -> None:
    """See to it that this process ends when its parent does, even in the middle of a call."""
    if not _told_the_kernel():
        threading.Thread(target=_watch, args=(parent,), name="holdfast-parent", daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we could say so


def _told_the_kernel() -> bool:
    """Linux ends us by itself; it does so even if user code never lets go of the interpreter."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


class Ears:
    """Hears what the parent says about the call that runs, in the middle of it.

    A signal handler runs on the main thread, where calls do, and also while that waits in a system call. Each message
    has the number of the call that it is about: one that comes too late is about none, and one that comes too early
    waits for its call.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.set_inheritable(False)
        self.connection = connection
        self._number = 0
        self._call: Call | None = None
        self._early: list[tuple[str, int]] = []
        self._task: asyncio.Task[Any] | None = None
        self._softly: Softly | None = None
        self._begun = False

    def ring(self, number: int, frame: object) -> None:
        """The handler of the signal."""
        self._hear()

    def next_call(self) -> None:
        self._number += 1

    @contextlib.contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """What is heard from now on is about this call."""
        self._call = call
        try:
            self._hear()
            self._begun = True
            yield
        finally:
            self._call = self._task = self._softly = None
            self._begun = False
            cancelled.discard(_id_of(call))

    async def run_coroutine(self, call: Call) -> Outcome:
        self._task, self._softly = asyncio.current_task(), Softly()
        self._hear()
        return await run_coroutine(call, self._softly)

    def _hear(self) -> None:
        try:
            said = self.connection.recv(2**16).decode().split("\n")[:-1]
        except OSError:  # nothing, or nobody
            said = []
        heard = [*self._early, *[(what, int(number)) for what, number in map(str.split, said)]]
        mine = [what for what, number in heard if number == self._number] if self._call is not None else []
        self._early = [each for each in heard if each[1] > self._number or (each[1] == self._number and not mine)]
        for what in mine:
            self._react(what)

    def _react(self, what: str) -> None:
        assert self._call is not None
        task, is_coroutine = self._task, inspect.iscoroutinefunction(self._call.function)
        if what == CANCEL:
            cancelled.add(_id_of(self._call))
        if is_coroutine and task is None:
            self._early.append((what, self._number))  # it is about to begin
        elif task is not None and self._softly is not None:
            strike = task.cancel if what == CANCEL else functools.partial(self._softly.strike, task)
            task.get_loop().call_soon_threadsafe(strike)
        elif what == SOFT and not self._begun:  # the process took longer to start; its code could not catch it yet
            self._early.append((what, self._number))
            again = threading.Timer(_BEGIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, DOORBELL))
            again.daemon = True
            again.start()
        elif what == SOFT:
            raise SoftTimeout


def _id_of(call: Call) -> str:
    return call.about.invocation_id if isinstance(call.about, Context) else call.key


def _keep_calm(connection: socket.socket, ears: Ears) -> None:
    """Leave it to the parent to react to Ctrl-C and to a service manager that tells every process to stop.

    Handlers, not SIG_IGN: programs that a task starts react as usual.
    """
    for number in _LEFT_TO_THE_PARENT:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _nothing)
    signal.signal(DOORBELL, ears.ring)
    forks = _Forks(connection, ears.connection)
    os.register_at_fork(before=forks.before, after_in_parent=forks.after, after_in_child=forks.inside)
    with contextlib.suppress(Exception):  # no stderr
        faulthandler.enable()


def _nothing(number: int, frame: object) -> None:
    pass


class _Forks:
    """What a task forks lets go of the connection, or the parent could not tell that we are gone; and SIGTERM ends it,
    which `multiprocessing` relies on, as do SIGHUP and SIGQUIT. A signal that comes in between waits.
    """

    def __init__(self, *connections: socket.socket) -> None:
        self._connections = connections
        self._before = threading.local()

    def before(self) -> None:
        self._before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def after(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)

    def inside(self) -> None:
        for connection in self._connections:
            connection.close()
        for number in _ENDING:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        self.after()


class _Worker:
    """Runs calls, and keeps between them what it has found and the event loop."""

    def __init__(self, program: Program | None, ears: Ears) -> None:
        self._program = program
        self._ears = ears
        self._found: dict[Address, tuple[Found, inspect.Signature]] = {}
        self._runner: asyncio.Runner | None = None
        self._hooked: dict[Hooks, Ends] = {}

    def close(self) -> None:
        for ends in self._hooked.values():
            with contextlib.suppress(Exception):  # their task has its outcome
                self._loop().run(ends.leave())
        if self._runner is not None:
            self._runner.close()

    def answer(self, question: Question, parts: list[bytes]) -> tuple[Answer, list[bytes]]:
        self._ears.next_call()
        payloads = dict(zip(question.digests, parts[1:], strict=True))
        return answer_of(self._outcome(question, parts[0], payloads))

    def _outcome(self, question: Question, arguments: bytes, payloads: dict[str, bytes]) -> Outcome:
        try:
            (function, codec, hooks), signature = self._find(question.address)
            if question.with_hooks:
                self._enter(hooks)
        except Unreachable as error:
            return Unfit(str(error))
        task = question.address.task
        call = Call(
            question.key, task, function, signature, arguments, codec, question.limits, payloads, question.about
        )
        outcome: Outcome | None = None
        try:
            with self._ears.during(call):
                outcome = self._run_coroutine(call) if inspect.iscoroutinefunction(function) else run(call)
            return outcome
        except SoftTimeout as error:  # user code had not begun, or was through
            return outcome or raised(call, error)

    def _find(self, address: Address) -> tuple[Found, inspect.Signature]:
        if address not in self._found:
            found = find(address, self._program)
            self._found[address] = found, inspect.signature(found.function)
        return self._found[address]

    def _enter(self, hooks: Hooks) -> None:
        """Have the app's hooks around the rest of this life, on the loop on which its coroutines run."""
        if not hooks or hooks in self._hooked:
            return
        ends = Ends()
        try:
            self._loop().run(hooks.enter(ends))
        except BaseException as error:
            with contextlib.suppress(BaseException):
                self._loop().run(ends.leave())
            why = f"the hooks of its app failed in a process apart: {type(error).__name__}: {error}"
            raise Unreachable(why) from error
        self._hooked[hooks] = ends

    def _loop(self) -> asyncio.Runner:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner

    def _run_coroutine(self, call: Call) -> Outcome:
        """On a loop that stays: what a module keeps between calls, a client say, belongs to the loop it was made on."""
        runner = self._loop()
        try:
            return runner.run(self._ears.run_coroutine(call), context=contextvars.copy_context())
        except BaseException as error:  # something beside the coroutine ended the loop: sys.exit() in another task
            broken, self._runner = runner, None
            with contextlib.suppress(BaseException):
                broken.close()
            record, payloads = call.codec.pack_error(error, call.limits)
            return Raised(record, f"the event loop was ended: {type(error).__name__}: {record.message}", payloads)
