"""Counts the commands that this process sends to MongoDB, by name.

Commands that nobody asked for do not count: the driver's own (hello, ping, endSessions), and getMore, by which a change
stream waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import Self

from pymongo import monitoring

NOT_COUNTED = frozenset({"hello", "ismaster", "ping", "getmore", "endsessions"})


class CommandCounter(monitoring.CommandListener):
    """Counts while it is on, that is, between `on` and `off` or inside a ``with``.

    It hears the clients that are made after `register`, or that are given it (``event_listeners=[counter]``). The
    driver cannot forget a listener, so a process should register only one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # clients call from the threads of their loops
        self._counting = False
        self._counts: Counter[str] = Counter()

    def register(self) -> Self:
        monitoring.register(self)
        return self

    def on(self) -> None:
        """Count, from nothing."""
        with self._lock:
            self._counts = Counter()
            self._counting = True

    def off(self) -> None:
        with self._lock:
            self._counting = False

    def __enter__(self) -> Self:
        self.on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.off()

    @property
    def counts(self) -> Counter[str]:
        """By ``command collection``, as in ``insert holdfast_invocations``."""
        with self._lock:
            return self._counts.copy()

    @property
    def total(self) -> int:
        return self.counts.total()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        name = event.command_name
        if name.lower() in NOT_COUNTED:
            return
        target = event.command.get(name)
        with self._lock:
            if self._counting:
                self._counts[f"{name} {target}" if isinstance(target, str) else name] += 1

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        pass

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass
