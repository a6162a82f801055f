"""Hints: a worker waits for lanes that have work, a caller for the end of an invocation, a runner for changes.

`Hub.send` notifies the listeners in this process at once, and the other processes through a channel if there is one. A
hint may be lost, doubled or come too early, so every listener also looks by itself now and then (`Pace`). Where hints
arrive reliably (a change stream is open), a look is only a safety net, and an idle fleet should cost the database next
to nothing. Where none arrive from other processes, looking is all there is: often while something happens, and ever
more seldom while nothing does, down to once per polling interval.

Such looks hide a hint that is never sent: everything still happens, a little later. So tests switch them off, with
``HOLDFAST_TEST_FALLBACK_LOOKS=off`` in the environment or with `switch`, and see that the hint alone is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.model.records import ENDED, Hint, HintChannel
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import HintLost

REMEMBERED = 4096

Wake = Callable[[], None]
Unsubscribe = Callable[[], None]

VARIABLE = "HOLDFAST_TEST_FALLBACK_LOOKS"
_NEVER_SECONDS = 1e6
QUICKEST_SECONDS = 0.02
_SLOWER = 1.3


class Hub:
    """Not for threads: everything here happens on the engine's loop."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._channel: HintChannel | None = None
        self._listening: set[str] = set()
        self._listeners: dict[str, list[Callable[[Hint], None]]] = {}  # by kind
        self._final: dict[str, set[Wake]] = {}
        self._ended: dict[str, None] = {}  # the last ids that ended, in that order

    def connect(self, channel: HintChannel | None) -> None:
        self._channel = channel
        self._listening.clear()

    @property
    def trust(self) -> int:
        """Return for how many polling intervals a waiter may rely on hints alone. Without a channel, all of them are
        from here.
        """
        return 1 if self._channel is None else self._channel.trust

    def on(self, kind: str, listener: Callable[[Hint], None]) -> Unsubscribe:
        """Call `listener` with each hint of this kind: READY (lanes got work), CANCEL (invocations are to end), ROSTER
        (a runner of the services' cycle is gone), PAUSES or SCHEDULES (they changed). Return a function that ends the
        subscription.
        """
        self._listen(kind)
        self._listeners.setdefault(kind, []).append(listener)
        return lambda: self._listeners[kind].remove(listener)

    def on_final(self, id: str, wake: Wake) -> Unsubscribe:
        """Call `wake` when the invocation has ended. Return a function that ends the subscription."""
        self._listen(ENDED)
        self._final.setdefault(id, set()).add(wake)

        def unsubscribe() -> None:
            wakes = self._final.get(id, set())
            wakes.discard(wake)
            if not wakes:
                self._final.pop(id, None)

        return unsubscribe

    def _listen(self, kind: str) -> None:
        if self._channel is not None and kind not in self._listening:
            self._listening.add(kind)
            self._channel.listen(kind, self._receive)

    def send(self, *hints: Hint, abroad: bool = True) -> None:
        """Send hints to all listeners, here and in other processes."""
        for hint in hints:
            self._receive(hint)
        if abroad:
            self.send_abroad(*hints)

    def send_abroad(self, *hints: Hint) -> None:
        """Send hints to other processes. Any thread may do this where the store inserts on the caller's thread."""
        if self._channel is not None:
            try:
                self._channel.send(hints)
            except Exception as error:  # a hint is never worth an error: its write is done
                self.telemetry.emit(HintLost(repr(error)))

    def _receive(self, hint: Hint) -> None:
        for listener in tuple(self._listeners.get(hint.kind, ())):
            listener(hint)
        if hint.kind == ENDED:
            self._remember(hint.subjects)
            if self._final:
                for id in hint.subjects or tuple(self._final):
                    for wake in tuple(self._final.get(id, ())):
                        wake()

    def _remember(self, ids: tuple[str, ...]) -> None:
        self._ended.update(dict.fromkeys(ids))
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, id: str) -> bool:
        """Return whether a hint of its end has arrived, not too long ago."""
        return id in self._ended


_are_on = True


def switch(given: str | None) -> None:
    """Switch the looks by the value of the variable: ``on`` (or nothing) or ``off``."""
    global _are_on
    if given not in (None, "", "on", "off"):
        raise ConfigurationError(f"{VARIABLE}={given:.80}: expected 'on' or 'off'; 'off' is for tests only")
    _are_on = given != "off"


def look_after(seconds: float) -> float:
    """Return after how many seconds to look unasked, where that is only for the case that a hint was lost."""
    return seconds if _are_on else _NEVER_SECONDS


class Wakeup:
    """Wake a sleeper. Cheaper than an Event with a timeout, and this is where an idle runner spends its life."""

    def __init__(self) -> None:
        self._notified = False
        self._sleeper: asyncio.Future[None] | None = None

    def notify(self) -> None:
        self._notified = True
        if self._sleeper is not None:
            _wake(self._sleeper)

    async def wait(self, seconds: float | None) -> bool:
        """Sleep until `notify` (True), or for so long (False).

        Returns at once if `notify` was called since the last wait.
        """
        if not self._notified and seconds != 0:
            loop = asyncio.get_running_loop()
            self._sleeper = sleeper = loop.create_future()
            timer = None if seconds is None else loop.call_later(seconds, _wake, sleeper)
            try:
                await sleeper
            finally:
                self._sleeper = None
                if timer is not None:
                    timer.cancel()
        notified, self._notified = self._notified, False
        return notified


async def first_of(*awaited: asyncio.Event | asyncio.Task[Any], seconds: float | None = None) -> None:
    """Wait for the first of these events and tasks, for so long. The tasks go on."""
    events = [asyncio.create_task(each.wait()) for each in awaited if isinstance(each, asyncio.Event)]
    tasks = [each for each in awaited if isinstance(each, asyncio.Task)]
    try:
        await asyncio.wait([*tasks, *events], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for event in events:
            event.cancel()


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, for so long. Return False if it did not come."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class Pace:
    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._pause = interval_seconds

    def quicken(self) -> None:
        """Look often: where something has happened, something may happen again soon."""
        self._pause = min(QUICKEST_SECONDS, self._interval)

    def pause(self, *, trust: int) -> float:
        """Return seconds until the next look, if hints can be relied on for `trust` polling intervals."""
        if trust:
            return look_after(self._interval * trust)
        pause, self._pause = self._pause, min(self._pause * _SLOWER, self._interval)
        return look_after(pause)
