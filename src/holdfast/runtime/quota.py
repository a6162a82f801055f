"""How many calls of an app may wait: beyond `max_waiting`, submits are refused.

The store is asked every few seconds, and what this process submits meanwhile is added. So other processes may exceed
the quota by what they submit in that time, and a submit usually costs no question.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.errors import QueueFull
from holdfast.model.status import WAITING
from holdfast.showing import at_least

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

FRESH_SECONDS = 2.0  # a number is used so long
AGAIN_SECONDS = 0.1  # after a look that found no room, there is no other before that
_SHARE = 20  # nor before this multiple of the duration of the last count


class Quota:
    """Count the calls that wait, and refuse what would be too many. Threads share it: its number is approximate."""

    def __init__(self, engine: Engine) -> None:
        self.most = engine.settings.max_waiting
        self.fresh_until = float("-inf")
        self._store, self._app, self._clock = engine.store, engine.app, engine.clock
        self._waiting = self._added = 0  # at the last look, and by this process since
        self._next_look = float("-inf")
        self._lock = asyncio.Lock()

    def has_room(self, count: int) -> bool:
        """Take room from the known free room. False: there is not enough, or the number is too old."""
        if not self.most:
            return True
        if self._clock.monotonic() >= self.fresh_until or self._waiting + self._added + count > self.most:
            return False
        self._added += count
        return True

    async def admit(self, count: int) -> None:
        """Take so much room. Raises `QueueFull`."""
        if self.has_room(count):
            return
        async with self._lock:
            if self.has_room(count):
                return
            if self._added or self._clock.monotonic() >= self._next_look:
                await self._look()
            if not self.has_room(count):
                raise QueueFull(self._refusal(count))

    async def _look(self) -> None:
        began = self._clock.monotonic()
        self._waiting = sum((await self._store.counts(self._app, self.most + 1, WAITING)).values())
        self._added = 0
        now = self._clock.monotonic()
        pause = (now - began) * _SHARE
        self._next_look, self.fresh_until = now + max(AGAIN_SECONDS, pause), now + max(FRESH_SECONDS, pause)

    def _refusal(self, count: int) -> str:
        waiting = at_least(self._waiting, self.most)
        more = "one more" if count == 1 else f"{count:,} more"
        return (
            f"{waiting} calls of '{self._app}' wait, and with {more} there would be more than max_waiting allows "
            f"({self.most:,}); nothing was stored. Try again later, start more runners, or raise the setting."
        )
