"""What the engine does while the store is away: it waits, says so, and asks again.

Nothing that was accepted is dropped because a database restarts. The pauses grow and are spread by chance, so that a
fleet does not come back in step.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.errors import StoreError

log = logging.getLogger("holdfast.engine")

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0


class Patience:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def until_answered(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """The answer of `attempt`, asked until there is one.

        It is told whether it was asked before: then an earlier try may have been carried out.
        """
        pause, again = FIRST_PAUSE_SECONDS, False
        while True:
            try:
                return await attempt(again)
            except StoreError as error:
                wait = pause * (0.5 + self._rng.random() / 2)
                log.warning("%s: no answer from the store, next try in %.2f s: %s", what, wait, error)
            await asyncio.sleep(wait)
            pause, again = min(pause * 2, LONGEST_PAUSE_SECONDS), True
