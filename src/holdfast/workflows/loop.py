"""The event loop of a body: deterministic, drained by the engine, without access to the outside.

A drain runs everything that is ready, from a callback on the user's loop, and returns. Nothing in it depends on the
clock, on addresses, on the hash seed or on other loops:

- `time` is the time of the last event that the body got. Timers are calls of the body, which the engine answers.
- Tasks and futures hash by the run's id and a counter: sets of tasks (in `asyncio.wait`, `TaskGroup`) are iterated in
  the same order in each process. The run's id is part of it, since asyncio keeps the tasks of all loops in one set.
- Tasks are named by the loop's own counter; asyncio's is shared by all loops.
- Async generators are kept and closed here: else the collector would finish them on the user's loop.
- The collector is off during a drain: it could run the `finally` of another body.
- `call_soon` outside of a drain is refused: a step that sets an event of its body would not be recorded.

Everything else that a loop can do (sockets, threads, executors, subprocesses) raises `NotDeterministic` with file and
line.

**Eviction** ends a body that is to go on elsewhere or later: `Evicted` is thrown into each of its coroutines, newest
task first, in its own context. Meanwhile, each await raises it again. Plain code in a `finally` does run, also
`event.set()` and `lock.release()`, which wake no task any more. A coroutine that catches everything, a thousand times,
is kept as it is for ever: to drop it would spin in the collector.

**Not covered**: the futures of `asyncio.gather` are asyncio's own, and hash by address. A body that gives several of
them to `asyncio.wait` gets its sets in another order each time; it is to give tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import hashlib
import os
import sys
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from holdfast.errors import NotDeterministic
from holdfast.model.decoding import EARLIEST, LATEST
from holdfast.runtime.app_runtime import running_body

T = TypeVar("T")
_MAX_THROWS = 1000
_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep
_HOLDFAST = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = (_ASYNCIO, _HOLDFAST, contextlib.__file__)


class Evicted(BaseException):
    """Raised inside of a body that is evicted from memory. Not an error: user code must let it pass."""


class BodyFuture(asyncio.Future[Any]):
    """A future with its own hash. `on_cancel` decides what a cancellation does."""

    on_cancel: Callable[[BodyFuture], bool] | None = None

    def __init__(self, *, loop: BodyLoop) -> None:
        self._number = loop.next_future_hash()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number

    def cancel(self, msg: Any = None) -> bool:
        if self.on_cancel is not None and not self.done() and self.on_cancel(self):
            return True  # it ends when its recorded end is delivered
        return super().cancel(msg=msg)

    def end_cancelled(self) -> None:
        """Cancel it now."""
        if not self.done():
            super().cancel()


class BodyTask(asyncio.Task[Any]):
    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        loop: BodyLoop,
        name: str | None,
        context: contextvars.Context | None,
    ) -> None:
        self._number = loop.next_task_hash()
        self.context = contextvars.copy_context() if context is None else context
        super().__init__(coroutine, loop=loop, name=name, context=self.context)

    def __hash__(self) -> int:
        return self._number


class BodyTimer(asyncio.TimerHandle):
    """A timer. `call` is the id of the wait, and `kind` says what it is for."""

    call = ""
    kind = ""


TimerSet = Callable[[BodyTimer], None]


class BodyLoop(asyncio.AbstractEventLoop):
    """The loop of one life of a body. `on_timer` is called for each timer that the body sets."""

    def __init__(self, seed: str, now: float, on_timer: TimerSet, on_timer_cancelled: TimerSet) -> None:
        self._salt = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
        self.now = now
        self.life: Any = None  # its `AsyncLife`
        self._on_timer = on_timer
        self._on_timer_cancelled = on_timer_cancelled
        self._ready: deque[asyncio.Handle] = deque()
        self._task_hashes = self._future_hashes = self._names = 0
        self._raised = 0  # how often `Evicted` was raised in the task
        self.is_draining = self.is_evicting = self._is_closed = False
        self.tasks: dict[BodyTask, None] = {}  # open tasks, in the order of their start
        self._generators: list[AsyncGenerator[Any, Any]] = []
        self._look_at_generators = 64
        self.escaped: BaseException | None = None  # SystemExit or KeyboardInterrupt out of a callback
        self.complaints: list[str] = []
        self.stubborn: list[BodyTask] = []

    def next_task_hash(self) -> int:
        self._task_hashes += 1
        return self._salt ^ _spread(2 * self._task_hashes)

    def next_future_hash(self) -> int:
        """Count apart from tasks: Python versions differ in the number of futures that they make."""
        self._future_hashes += 1
        return self._salt ^ _spread(2 * self._future_hashes + 1)

    # --- draining

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        outer, hooks, collects = asyncio_events._get_running_loop(), sys.get_asyncgen_hooks(), gc.isenabled()
        gc.disable()  # first, and enabled last: what is collected must not run as if it were in this body
        asyncio_events._set_running_loop(self)
        around, running_body.life = running_body.life, self.life
        sys.set_asyncgen_hooks(firstiter=self._generator_begun, finalizer=self._generator_dropped)
        self.is_draining = True
        try:
            yield
        finally:
            self.is_draining = False
            sys.set_asyncgen_hooks(*hooks)
            running_body.life = around
            asyncio_events._set_running_loop(outer)
            if collects:
                gc.enable()

    def drain(self, deliver: Callable[[], None] | None = None) -> None:
        """Deliver, then run everything that is ready. Does nothing after an eviction."""
        if self._is_closed:
            return
        with self._entered():
            if deliver is not None:
                deliver()
            ready = self._ready
            while ready:
                handle = ready.popleft()
                if handle.cancelled():
                    continue
                try:
                    handle._run()
                except (SystemExit, KeyboardInterrupt) as error:  # it must not end the user's loop
                    self.escaped = self.escaped or error

    def evict(self) -> bool:
        """End all coroutines of the body. Return False if one of them cannot be ended."""
        if self._is_closed:
            return not self.stubborn
        self.is_evicting = True
        self._ready.clear()
        with self._entered():
            for task in reversed(list(self.tasks)):
                self._throw_into(task)
            for generator in reversed(self._generators):
                self._raised = 0
                with contextlib.suppress(BaseException):
                    contextvars.copy_context().run(generator.athrow(Evicted()).send, None)
        self._ready.clear()
        self._generators.clear()
        self._is_closed = True
        return not self.stubborn

    def _throw_into(self, task: BodyTask) -> None:
        coroutine: Any = task.get_coro()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if task.done():
            return
        self._raised = 0
        for _ in range(_MAX_THROWS):
            asyncio.tasks._enter_task(self, task)
            try:
                task.context.run(coroutine.throw, Evicted())
            except BaseException:
                return
            finally:
                asyncio.tasks._leave_task(self, task)
            if self._raised >= _MAX_THROWS:
                break
        self.stubborn.append(task)
        _kept_for_ever.append(task)

    def raise_evicted(self) -> None:
        """Raise `Evicted` in a body that is to leave, unless it has caught that a thousand times. Then its calls go on,
        and it comes to wait for a future without a result: otherwise it would hold the thread.
        """
        if not self.is_draining:
            raise NotDeterministic(f"the loop of a workflow's body that has left memory is used ({where()})")
        self._raised += 1
        if self._raised < _MAX_THROWS:
            raise Evicted

    def _generator_begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        if len(self._generators) >= self._look_at_generators:
            self._generators = [each for each in self._generators if each.ag_frame is not None]  # type: ignore[attr-defined]
            self._look_at_generators = max(64, 2 * len(self._generators))
        self._generators.append(generator)

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Do nothing: the code of a generator that is dropped with an evicted body must not run."""

    async def close_generators(self) -> None:
        """Close the generators that the body has left open: the last thing that it does."""
        while self._generators:
            try:
                await self._generators.pop().aclose()
            except Exception as error:
                self.call_exception_handler(
                    {"message": "an async generator failed while it was closed", "exception": error}
                )

    # --- what asyncio asks of a loop

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not (self.is_evicting and self.is_draining):  # a `finally` that sets an event wakes no task any more
            self._check("call_soon")
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self._check("call_at")
        timer = BodyTimer(min(max(EARLIEST, when), LATEST), callback, args, self, context)
        timer.kind = _kind_of(callback)
        if not self.is_evicting:
            self._on_timer(timer)
        return timer

    def fire(self, timer: BodyTimer) -> None:
        """Run a timer in this drain."""
        if not timer.cancelled():
            self._ready.append(timer)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if isinstance(handle, BodyTimer) and not self.is_evicting:
            self._on_timer_cancelled(handle)

    def time(self) -> float:
        return self.now

    def create_future(self) -> BodyFuture:
        if self.is_evicting:
            self.raise_evicted()
        return BodyFuture(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> BodyTask:
        if self.is_evicting or not self.is_draining:
            try:
                self._check("create_task")
            except BaseException:
                _close(coro)
                raise
        if (others := _in_as_completed()) is not None:
            for each in (coro, *others):
                _close(each)
            raise NotDeterministic(
                f"asyncio.as_completed of coroutines starts them in the order of their addresses ({where()}); "
                "give it tasks: asyncio.create_task(…)"
            )
        self._names += 1
        task = BodyTask(coro, loop=self, name=str(name) if name else f"Task-{self._names}", context=context)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)  # type: ignore[call-overload]

    def is_running(self) -> bool:
        return self.is_draining

    def is_closed(self) -> bool:
        return self._is_closed

    def get_debug(self) -> bool:
        return False

    def get_task_factory(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        said = "" if error is None else f": {type(error).__name__}: {error}"
        self.complaints.append(f"{context.get('message', 'an error in a callback')}{said}")

    def _check(self, call: str) -> None:
        if self.is_evicting:
            return self.raise_evicted()
        if not self.is_draining:
            raise NotDeterministic(
                f"{call} on the loop of a workflow's body, from outside of it: a step or another thread has woken "
                f"the body ({where()}). A body gets data from steps as their results"
            )


def _refusing(name: str) -> Any:
    def refuse(self: BodyLoop, *args: Any, **kwargs: Any) -> Any:
        for each in args:
            _close(each)
        if self.is_evicting:
            self.raise_evicted()
        raise NotDeterministic(f"a workflow's body may not use {_SAID.get(name, name)} ({where()}): do that in a step")

    refuse.__name__ = name
    return refuse


_SAID = {
    "run_in_executor": "threads or executors (asyncio.to_thread, run_in_executor)",
    "call_soon_threadsafe": "other threads (call_soon_threadsafe)",
    "create_connection": "sockets (create_connection)",
    "getaddrinfo": "the network (getaddrinfo)",
    "add_signal_handler": "signals",
}
for _name in (
    *("run_in_executor", "call_soon_threadsafe", "run_until_complete", "run_forever", "stop", "close"),
    *("set_default_executor", "getaddrinfo", "getnameinfo", "create_connection", "create_server", "sendfile"),
    *("start_tls", "create_unix_connection", "create_unix_server", "connect_accepted_socket"),
    *("create_datagram_endpoint", "connect_read_pipe", "connect_write_pipe", "subprocess_shell", "subprocess_exec"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer", "sock_recv", "sock_recv_into", "sock_recvfrom"),
    *("sock_recvfrom_into", "sock_sendall", "sock_sendto", "sock_connect", "sock_accept", "sock_sendfile"),
    *("add_signal_handler", "remove_signal_handler", "set_task_factory", "set_exception_handler"),
    *("get_exception_handler", "default_exception_handler", "set_debug", "shutdown_asyncgens"),
    *("shutdown_default_executor",),
):
    setattr(BodyLoop, _name, _refusing(_name))
BodyLoop.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]

_kept_for_ever: list[BodyTask] = []


def _kind_of(callback: Callable[..., object]) -> str:
    name = getattr(callback, "__name__", "timer")
    return {"_set_result_unless_cancelled": "sleep", "_on_timeout": "timeout", "_release_waiter": "wait"}.get(
        name, name
    )


def _spread(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFF


def _close(coroutine: object) -> None:
    """Close a coroutine that will not be awaited."""
    if asyncio.iscoroutine(coroutine):
        coroutine.close()


def _in_as_completed() -> list[Any] | None:
    """Return what `asyncio.as_completed` was given, if it is what starts a task now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (code := frame.f_code).co_filename.startswith(_ASYNCIO):
        if code.co_name == "as_completed" or getattr(code, "co_qualname", "") == "_AsCompletedIterator.__init__":
            given = frame.f_locals.get("fs") or frame.f_locals.get("aws") or ()
            return list(given) if isinstance(given, list | tuple | set | frozenset) else []
        frame = frame.f_back
    return None


def where() -> str:
    """Return file and line of the user code that called; empty if the caller was started by the loop itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _DRAIN:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_DRAIN = BodyLoop.drain.__code__


def raised_at(error: BaseException) -> str:
    """Return file and line of the innermost user code that an error came through."""
    found = ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARY):
            found = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def stack_of(task: asyncio.Task[Any]) -> str:
    """Return where a task waits, innermost call last."""
    lines = []
    coroutine: Any = task.get_coro()
    while coroutine is not None and (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not frame.f_code.co_filename.startswith(_HOLDFAST):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None)
    return "\n".join(lines) or repr(task)
