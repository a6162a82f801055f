"""What the engine does while the store is away: it waits, says so, and asks again.

Nothing that was accepted is dropped because a database restarts. The pauses grow and are spread by chance, so that a
fleet does not come back in step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.engine.outages import Seldom, repeated
from holdfast.errors import StoreError, StoreUnavailable

log = logging.getLogger("holdfast.engine")

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0


class Patience:
    """Without end, until somebody says `give_up_in`: a runner that was told to stop must be able to end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ends_at = float("inf")
        self._given_up = asyncio.Event()

    def give_up_in(self, seconds: float) -> None:
        """From then on the store's error is passed on instead of another try."""
        loop = asyncio.get_running_loop()
        self._ends_at = min(self._ends_at, loop.time() + seconds)
        loop.call_later(seconds, self._given_up.set)

    async def until_reached(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """As `until_answered`, but a store that answers with a refusal is not asked again: for starting up."""
        return await self._ask(what, attempt, StoreUnavailable)

    async def until_answered(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """The answer of `attempt`, asked until there is one.

        It is told whether it was asked before: then an earlier try may have been carried out.
        """
        return await self._ask(what, attempt, StoreError)

    async def _ask(self, what: str, attempt: Callable[[bool], Awaitable[T]], forgiven: type[StoreError]) -> T:
        pause, again = FIRST_PAUSE_SECONDS, False
        seldom = Seldom(asyncio.get_running_loop().time)
        while True:
            try:
                with repeated():
                    answer = await attempt(again)
                if again:
                    log.info("%s: the store answers again", what)
                return answer
            except forgiven as error:
                if asyncio.get_running_loop().time() >= self._ends_at:
                    raise
                wait = pause * (0.5 + self._rng.random() / 2)
                level = logging.WARNING if seldom.is_due(what) else logging.DEBUG
                log.log(level, "%s: no answer from the store, next try in %.2f s: %s", what, wait, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._given_up.wait()
            pause, again = min(pause * 2, LONGEST_PAUSE_SECONDS), True
