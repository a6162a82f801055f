"""Wait for invocations in user code: the caller's side of `holdfast.runtime.waits`.

Outside of tasks, a wait is a call of the engine and nothing else. In a task, the wait is reported to the worker. The
worker gives the slot back while all code of the call waits, and takes a slot again before that code continues, however
the wait ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import HoldfastError
from holdfast.executors.waiting import BESIDE, ELSEWHERE, Wait, only_waits
from holdfast.telemetry.tasks import here

if TYPE_CHECKING:
    from holdfast.runtime.app_runtime import AppRuntime

T = TypeVar("T")
LOOK_AGAIN_SECONDS = 0.005  # after a wait has ended: code that goes on may begin another one


async def held(wait: Wait, work: Coroutine[Any, Any, T]) -> T:
    """Return the outcome of the work, when the code that waits for it may go on. On the engine's loop."""
    wait.refused = asyncio.get_running_loop().create_future()
    inner = asyncio.ensure_future(work)
    try:
        wait.port.begin(wait)
        both: set[asyncio.Future[Any]] = {inner, wait.refused}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if inner.done():
            return inner.result()
        raise wait.refused.result()
    finally:
        inner.cancel()
        wait.refused.cancel()
        try:
            await wait.port.end(wait)
        finally:
            wait.over.set()


def wait_here(runtime: AppRuntime, ids: Sequence[str]) -> Wait | None:
    """Return the wait that begins here; None outside of tasks of this app, and where waits are not reported to a
    worker.
    """
    call: Any = here.get()
    call = getattr(call, "outer", None) or call
    port = None if call is None else getattr(call, "waits", None)
    if port is None or call.codec is not runtime.codec:
        return None
    return Wait(port, call, ids)


def wait(runtime: AppRuntime, ids: Sequence[str], work: Coroutine[Any, Any, T]) -> T:
    """Do this work, which waits for these invocations, and return its outcome. Blocks the thread."""
    begun = wait_here(runtime, ids)
    if begun is None:
        return runtime.run(work)
    if begun.port.runs_on(begun.call):
        begun.beside = frozenset({begun})
    else:
        begun.keeps = ELSEWHERE
    try:
        return runtime.run(held(begun, work))
    except BaseException:
        if not begun.over.is_set():  # this thread was interrupted, and not the wait
            with contextlib.suppress(HoldfastError):  # the app is closed
                runtime.run(_until_over(begun))
        raise


async def await_(runtime: AppRuntime, ids: Sequence[str], work: Coroutine[Any, Any, T]) -> T:
    """Do this work, which waits for these invocations, and return its outcome."""
    begun = wait_here(runtime, ids)
    if begun is None:
        return await runtime.arun(work)
    try:
        with _followed(runtime, begun):
            return await runtime.arun(held(begun, work))
    except BaseException:
        if not begun.over.is_set():  # this task was cancelled, and not the wait
            with contextlib.suppress(HoldfastError):
                await runtime.arun(_until_over(begun))
        raise


async def _until_over(wait: Wait) -> None:
    if wait.refused is not None:  # else it has never begun
        await wait.over.wait()


class _Call:
    """The waits of one call that runs as a coroutine. Used on its loop."""

    def __init__(self, runtime: AppRuntime, main: asyncio.Task[Any]) -> None:
        self._runtime = runtime
        self._main = main
        self._loop = main.get_loop()
        self.waits: dict[asyncio.Task[Any], Wait] = {}

    def look_soon(self, seconds: float = 0.0) -> None:
        if seconds:
            self._loop.call_later(seconds, self._look)
        else:
            self._loop.call_soon(self._loop.call_soon, self._look)  # waits that begin in this turn are seen together

    def _look(self) -> None:
        """Report whether all code of the call waits."""
        waits = frozenset(self.waits.values())
        if not waits or self._main.done():
            return
        wait, is_idle = next(iter(self.waits.values())), only_waits(self._main, self.waits.keys())

        def report() -> None:
            wait.port.only_waits(waits) if is_idle else wait.port.keeps_slot(wait, BESIDE)

        with contextlib.suppress(HoldfastError, RuntimeError):  # the app is closed
            self._runtime.opened().bridge.call(report)


_calls: dict[asyncio.Task[Any], _Call] = {}  # by the task in which each runs


@contextlib.contextmanager
def _followed(runtime: AppRuntime, wait: Wait) -> Iterator[None]:
    """Follow whether all code of the call waits, as long as this wait lasts."""
    main, task = wait.port.main_task_of(wait.call), asyncio.current_task()
    if main is None or task is None or main.get_loop() is not asyncio.get_running_loop():
        wait.keeps = ELSEWHERE
        yield
        return
    call = _calls.get(main)
    if call is None:
        call = _calls[main] = _Call(runtime, main)
    call.waits[task] = wait
    call.look_soon()
    try:
        yield
    finally:
        call.waits.pop(task, None)
        if call.waits:
            call.look_soon(LOOK_AGAIN_SECONDS)
        else:
            _calls.pop(main, None)
