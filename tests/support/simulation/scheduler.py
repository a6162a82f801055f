"""A loop that runs what is ready in an order drawn by lot, for processes that can be frozen and killed.

Everything a process does carries the process in its context, so the scheduler knows whose callback it has drawn. It
keeps back those of a frozen process, and those of a dead one for ever: no cleanup runs, no last word is written, as
with ``kill -9``. A process can be made to die before any of its steps, and a step ends at an ``await``.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from holdfast.testing.virtual import VirtualLoop

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class State(Enum):
    ALIVE = "alive"
    FROZEN = "frozen"
    DEAD = "dead"


class Process:
    """One simulated process, from its start to its end."""

    def __init__(self, name: str, pid: int, on_death: Callable[[Process], None]) -> None:
        self.name = name
        self.pid = pid
        self.state = State.ALIVE
        self.steps = 0
        self.dies_at: int | None = None  # the step before which it dies
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self._on_death = on_death
        self._kept: list[asyncio.Handle] = []

    @property
    def is_dead(self) -> bool:
        return self.state is State.DEAD

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do this in the process."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def call(self, function: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(function, context=self.context.copy())

    def freeze(self) -> None:
        if self.state is State.ALIVE:
            self.state = State.FROZEN

    def thaw(self) -> None:
        if self.state is State.FROZEN:
            self.revive()

    def revive(self) -> None:
        """Run what was kept back. Only the end of the simulation revives the dead, to be rid of their tasks."""
        self.state, self.dies_at = State.ALIVE, None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        loop.run_again(self._kept)
        self._kept = []

    def kill(self) -> None:
        if not self.is_dead:
            self.exit()
            self._on_death(self)

    def exit(self) -> None:
        """It has ended by itself; whatever it still had under way ends with it."""
        self.state = State.DEAD

    def may_run(self, handle: asyncio.Handle) -> bool:
        """Whether its next step is run now."""
        self.steps += self.state is State.ALIVE
        if self.steps == self.dies_at and self.state is State.ALIVE:
            self.kill()
        if self.state is not State.ALIVE:
            self._kept.append(handle)
        return self.state is State.ALIVE


class SeededLoop(VirtualLoop):
    """`disorder` is the share of steps that are drawn by lot from all that are ready, instead of the oldest."""

    def __init__(self, rng: random.Random, disorder: float) -> None:
        super().__init__()
        nothing = asyncio.Handle(_pass, (), self)
        nothing.cancel()
        self._ready = _Ready(rng, disorder, nothing)  # what asyncio takes its next step from

    def run_again(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)


def _pass() -> None:
    pass


class _Ready(deque[asyncio.Handle]):
    def __init__(self, rng: random.Random, disorder: float, nothing: asyncio.Handle) -> None:
        super().__init__()
        self._rng = rng
        self._disorder = disorder
        self._nothing = nothing  # asyncio skips what is cancelled

    def popleft(self) -> asyncio.Handle:
        if len(self) > 1 and self._rng.random() < self._disorder:
            self.rotate(-self._rng.randrange(len(self)))
        handle = super().popleft()
        if handle.cancelled():
            return handle
        process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        return handle if process is None or process.may_run(handle) else self._nothing
