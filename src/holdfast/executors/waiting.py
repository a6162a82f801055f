"""Waits of user code for other invocations: how a call reports them, and when all of its code waits.

A call gives its slot back while all of its code waits. A function on a thread does one thing at a time, so it only
waits as long as its wait lasts. A coroutine may have others run beside it: `only_waits` follows what asyncio lets it
wait for, down to waits for invocations. What cannot be followed counts as code that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from holdfast.executors.call import Call

ELSEWHERE = "it waits on a thread or loop that its task has made, beside other code perhaps"
BESIDE = "other code of it may run meanwhile"


class Wait:
    """One wait of a call for the ends of invocations. It is used on the engine's loop."""

    def __init__(self, port: WaitPort, call: Call, ids: Sequence[str]) -> None:
        self.port = port
        self.call = call
        self.ids = tuple(ids)
        self.beside: frozenset[Wait] = frozenset()  # as long as exactly these last, no code of the call runs
        self.keeps = ""  # why the slot is kept
        self.refused: asyncio.Future[BaseException] | None = None
        self.over = asyncio.Event()

    def refuse(self, error: BaseException) -> None:
        """Have the wait raise this instead of going on."""
        if self.refused is not None and not self.refused.done():
            self.refused.set_result(error)


class WaitPort(Protocol):
    """The receiver of a call's waits: its worker, or in a process for tasks the connection to it. All but `runs_on` and
    `main_task_of` is used on the engine's loop.
    """

    def runs_on(self, call: Call) -> bool:
        """Return whether the present thread is the one on which the function of this call runs."""
        ...

    def main_task_of(self, call: Call) -> asyncio.Task[Any] | None:
        """Return the task in which the coroutine of this call runs."""
        ...

    def begin(self, wait: Wait) -> None:
        """Note that a wait begins."""
        ...

    def only_waits(self, waits: frozenset[Wait]) -> None:
        """Note that all code of a call is in one of these waits."""
        ...

    def keeps_slot(self, wait: Wait, why: str) -> None:
        """Note that other code of the call may run."""
        ...

    async def end(self, wait: Wait) -> None:
        """Note that a wait is over, and return when the code may go on."""
        ...


@runtime_checkable
class WorkerPort(WaitPort, Protocol):
    """A worker, which also receives the waits of its processes for tasks."""

    def begin_elsewhere(self, wait: Wait, refuse: Callable[[str], None]) -> None:
        """Note that a call waits in another process. `refuse` is called if the wait is refused. From any thread."""
        ...

    def end_elsewhere(self, wait: Wait, go_on: Callable[[], None]) -> None:
        """Note that the call's wait is over; `go_on` is called when its code may continue. From any thread."""
        ...


def only_waits(main: asyncio.Task[Any], waiting: Collection[asyncio.Task[Any]]) -> bool:
    """Return whether a coroutine waits for nothing but these tasks, directly or through others, `asyncio.gather` and
    `asyncio.TaskGroup`.
    """
    seen: set[asyncio.Future[Any]] = set()
    frontier: list[asyncio.Future[Any]] = [main]
    while frontier:
        future = frontier.pop()
        if future.done() or future in seen:
            continue
        seen.add(future)
        if future in waiting:
            continue
        if (others := _awaited_by(future)) is None:
            return False
        frontier += others
    return True


def _awaited_by(future: asyncio.Future[Any]) -> list[asyncio.Future[Any]] | None:
    """Return the futures that a future waits for; None if that is unknown, or if it does not wait."""
    children: Any = getattr(future, "_children", None)  # of gather
    if children is not None:
        return list(children)
    if not isinstance(future, asyncio.Task):
        return None
    awaited: Any = getattr(future, "_fut_waiter", None)
    if awaited is None:
        return None  # it is about to run
    if isinstance(awaited, asyncio.Task) or getattr(awaited, "_children", None) is not None:
        return [awaited]
    group = next(_groups_left_by(future), None)
    return None if group is None else list(getattr(group, "_tasks", ()))


def _groups_left_by(task: asyncio.Task[Any]) -> Iterator[asyncio.TaskGroup]:
    """Yield the task group that a task is leaving: its innermost coroutine is the group's `__aexit__`."""
    innermost: Any = task.get_coro()
    while True:
        following = getattr(innermost, "cr_await", None) or getattr(innermost, "gi_yieldfrom", None)
        frame = getattr(following, "cr_frame", None) or getattr(following, "gi_frame", None)
        if frame is None:
            break
        innermost = following
    frame = getattr(innermost, "cr_frame", None)
    if frame is not None and frame.f_code is asyncio.TaskGroup.__aexit__.__code__:
        yield frame.f_locals["self"]
