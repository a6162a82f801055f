"""A bell: something happened, wake up."""

from __future__ import annotations

import asyncio


class Bell:
    """Something happened:

    wake up. Cheaper than an Event with a timeout, and this is where an idle runner spends its life.
    """

    def __init__(self) -> None:
        self._rung = False
        self._sleeper: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        if self._sleeper is not None:
            _wake(self._sleeper)

    async def wait(self, seconds: float | None) -> bool:
        """Sleep until the bell rings (True), or for so long (False).

        A bell that rang since the last wait does not let anybody sleep.
        """
        if not self._rung and seconds != 0:
            loop = asyncio.get_running_loop()
            self._sleeper = sleeper = loop.create_future()
            timer = None if seconds is None else loop.call_later(seconds, _wake, sleeper)
            try:
                await sleeper
            finally:
                self._sleeper = None
                if timer is not None:
                    timer.cancel()
        rung, self._rung = self._rung, False
        return rung


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
