"""Outages: while the store is away, the engine waits, reports that, and asks again.

Retrying has one place at each level. The driver repeats a statement once (MongoDB's retryable writes). The store
repeats an operation, as often as the settings allow, and then raises `StoreUnavailable`: for a caller, that is the end.
The engine repeats no statement and no operation by itself. To it, "the store is away" is a state: what it has accepted
is not dropped, and goes on when the store answers. The pauses grow and are spread by chance, so that a fleet does not
come back in step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from holdfast.errors import CorruptRecord, PayloadLost, StoreError, StoreUnavailable
from holdfast.runtime.hints import wait_for
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import StoreAwaited, StoreReached

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_AGAIN_SECONDS = 1.0
_MAX_TIMES = 10


class Outage:
    """Wait without end, until `give_up_in`: a runner that has to stop must be able to end."""

    def __init__(self, rng: random.Random, telemetry: Telemetry) -> None:
        self._rng = rng
        self._telemetry = telemetry
        self._ends_at = float("inf")
        self._given_up = asyncio.Event()

    def give_up_in(self, seconds: float) -> None:
        """Raise the store's error after this many seconds, instead of waiting on."""
        loop = asyncio.get_running_loop()
        self._ends_at = min(self._ends_at, loop.time() + seconds)
        loop.call_later(seconds, self._given_up.set)

    async def until_reached(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Do as `until_answered`, but raise refusals of the store: for start-up."""
        return await self._ask(what, attempt, StoreUnavailable)

    async def until_answered(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Return the answer of `attempt`, called until there is one.

        `attempt` gets True if it was called before: then an earlier call may have been carried out.
        """
        return await self._ask(what, attempt, StoreError)

    async def until_accepted(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Do as `until_answered`, but raise an error that is about the written values: it would come again for ever."""
        return await self._ask(what, attempt, StoreError, is_refusal)

    async def _ask(
        self,
        what: str,
        attempt: Callable[[bool], Awaitable[T]],
        forgiven: type[StoreError],
        is_final: Callable[[Exception], bool] | None = None,
    ) -> T:
        pause, again = FIRST_PAUSE_SECONDS, False
        while True:
            try:
                answer = await attempt(again)
                if again:
                    self._telemetry.emit(StoreReached(what))
                return answer
            except forgiven as error:
                if is_final is not None and is_final(error):
                    raise
                if asyncio.get_running_loop().time() >= self._ends_at:
                    raise
                wait = pause * (0.5 + self._rng.random() / 2)
                self._telemetry.emit(StoreAwaited(what, wait, str(error)))
            await wait_for(self._given_up, wait)
            pause, again = min(pause * 2, LONGEST_PAUSE_SECONDS), True


def is_refusal(error: Exception) -> bool:
    """Return whether an error is about the written values, and not about the store as a whole."""
    return not isinstance(error, StoreError) or type(error) in (StoreError, CorruptRecord, PayloadLost)


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel these tasks and wait for them, ignoring their results and errors.

    A driver in the middle of a network call may turn a cancellation into a network error, which the loop around it
    takes for a store that is away. So a task is cancelled again until it has ended.
    """
    for _ in range(_MAX_TIMES):
        left = [task for task in tasks if not task.done()]
        if not left:
            return
        for task in left:  # in their order: the order of a set differs in each run
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_SECONDS)
    left = [task for task in tasks if not task.done()]
    for task in left:
        asyncio.get_running_loop().call_exception_handler({"message": "could not end a task: it goes on", "task": task})
