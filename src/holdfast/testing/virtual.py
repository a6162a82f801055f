"""An event loop on virtual time.

When no callback is ready, the loop jumps to the next timer instead of waiting for it. An hour of timeouts takes as long
as its callbacks, and the same program gives the same order every time. It has no threads: code that runs on it must do
without them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START = 1_700_000_000.0


class Stuck(RuntimeError):
    """Raised when every task waits and no timer is set: nothing would ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is `START` plus the seconds that were slept."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._elapsed

    def jump(self, seconds: float) -> None:
        self._elapsed += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Stuck("every task waits, and no timer is set")
        if not ready and timeout:
            # A timer is due when the loop's time has reached it, and a sum of floats may fall a hair short of it.
            self._loop.jump(timeout + 1e-9)
        return ready


class VirtualClock:
    """See `holdfast.clock.Clock`: the time of a `VirtualLoop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: float = START) -> None:
        self._loop = loop
        self._start = start

    def now(self) -> float:
        return self._start + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on its own virtual loop, and hand it the clock."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(VirtualClock(loop)))
