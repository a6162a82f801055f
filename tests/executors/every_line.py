"""A program: throw into the thread of a call before every statement of ours that it comes through, or at any statement
of the thrower let the call go on. What is thrown hits that call or nothing.

It has an interpreter of its own: a mistake here hits whatever runs in the same one.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.lines import gated
from tests.support.patience import patient

from holdfast.codec import Codec, SizeLimits
from holdfast.executors import call as call_module
from holdfast.executors import local as places_module
from holdfast.executors.call import Call, Outcome

BLOCKED_SECONDS = 0.05  # one side waits for a lock that the other has: then that one goes first
PATIENCE_SECONDS = patient(10.0)
PLACE, THROWER = "holdfast-executor", "thrower"
GATES: list[Callable[[str, int], None]] = []  # that of the meeting that is on
CALLING, PLACING = (gated(module, lambda *at: GATES[0](*at)) for module in (call_module, places_module))


class Meeting:
    """Two calls on one thread, and a thrower that is after the first of them. One side stops at its n-th statement and
    lets the other do what it can.
    """

    def __init__(self, what: str, stops: str, number: int) -> None:
        self.where = ""
        self._what = what
        self._stops = stops
        self._left = number
        self._may_go = threading.Event()
        self._came: Outcome | None = None  # of the first call, if it came to an end
        self._codec = Codec()
        PLACING.__dict__.update(run=self._run)
        GATES[:] = [self.gate]
        self._places: Any = None
        self._thrower: threading.Thread | None = None

    def _run(self, call: Call) -> Outcome:
        outcome: Outcome = CALLING.__dict__["run"](call)
        if call.key == "a":
            self._came = outcome
        return outcome

    def _work(self, x: int) -> int:
        if x == 1 and self._stops == "thrower":
            self._throw_beside()
            self._may_go.wait(PATIENCE_SECONDS)
        return x + 1

    def gate(self, function: str, line: int) -> None:
        is_place = threading.current_thread().name.startswith(PLACE)
        if self.where or self._places is None or is_place is not (self._stops == "place"):
            return
        if not is_place and threading.current_thread().name != THROWER:
            return
        self._left -= 1
        if self._left:
            return
        self.where = f"{function}:{line}"
        if is_place:
            self._throw_beside().join(BLOCKED_SECONDS)
        else:
            self._may_go.set()
            self._over.wait(BLOCKED_SECONDS)

    def _throw_beside(self) -> threading.Thread:
        thrower = threading.Thread(target=self._throw, name=THROWER)
        thrower.start()
        self._thrower = thrower
        return thrower

    def _throw(self) -> None:
        getattr(self._places, self._what)(["a"])
        self._may_go.set()

    async def play(self) -> None:
        delivered: list[tuple[str, Any]] = []
        news, self._over = asyncio.Event(), threading.Event()

        def deliver(outcomes: Sequence[tuple[str, Outcome]]) -> None:
            delivered.extend(outcomes)
            news.set()

        places = self._places = PLACING.__dict__["ThreadExecutor"](1, deliver)
        places.start([self._call("a", 1), self._call("b", 2)])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(delivered) < 2:
                await news.wait()
                news.clear()
        self._over.set()
        places.close()
        if self._thrower is not None:
            self._thrower.join(PATIENCE_SECONDS)
        outcomes = dict(delivered)
        assert [key for key, _ in delivered] == ["a", "b"], delivered
        assert outcomes["a"] is self._came or (
            self._came is None and type(outcomes["a"]).__name__ in ("Raised", "Interrupted")
        )
        assert type(outcomes["b"]).__name__ == "Returned", f"b was hit by what was meant for a: {outcomes['b']}"
        assert self._codec.decode(outcomes["b"].result) == 3
        assert not places._where, places._where
        assert not places._thrown, places._thrown

    def _call(self, key: str, x: int) -> Call:
        signature, arguments = inspect.signature(self._work), self._codec.encode_call((x,), {})
        return Call(key, "work", self._work, signature, arguments, self._codec, SizeLimits(2**16, 2**20), {})


def main(what: str) -> None:
    for stops in ("place", "thrower"):
        number = 0
        while True:
            number += 1
            meeting = Meeting(what, stops, number)
            asyncio.run(meeting.play())
            if not meeting.where:
                break
            print(meeting.where, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
