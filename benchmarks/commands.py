"""Counts the commands that MongoDB clients send.

The driver tells listeners only about clients that are made after they were registered, so this module is imported
before the app is used. Counting is switched on by entering a `CommandCounter`, for one database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from pymongo import monitoring

Sent = tuple[str, str]  # command and collection
Command = Mapping[str, Any]  # as it was sent

# What is not part of a task's cost: the change stream, the driver's own, and a runner's signs of life.
ASIDE = frozenset({"getMore", "hello", "ping", "endSessions", "killCursors"})
HEARTBEAT: Sent = ("findAndModify", "holdfast_runners")


class CommandCounter:
    """While it is entered, every command to `database` counts."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._sent: list[tuple[Sent, Command]] = []  # appended to by the driver's loops; appending is atomic

    def __enter__(self) -> Self:
        _LISTENER.counters.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _LISTENER.counters.remove(self)

    def hear(self, database: str, sent: Sent, command: Command) -> None:
        if database == self._database:
            self._sent.append((sent, command))

    @property
    def commands(self) -> list[tuple[Sent, Command]]:
        """One by one, in the order in which they were sent."""
        return [item for item in self._sent if item[0][0] not in ASIDE]

    @property
    def all(self) -> Counter[Sent]:
        """Everything but what the driver needs for itself and for the change stream."""
        return Counter(sent for sent, _ in self.commands)

    @property
    def for_tasks(self) -> Counter[Sent]:
        """Heartbeats aside, which depend on time and not on work."""
        counted = self.all
        del counted[HEARTBEAT]
        return counted


class _Listener(monitoring.CommandListener):
    def __init__(self) -> None:
        self.counters: list[CommandCounter] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if self.counters:
            sent = (event.command_name, str(event.command.get(event.command_name)))
            for counter in tuple(self.counters):
                counter.hear(event.database_name, sent, event.command)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


_LISTENER = _Listener()
monitoring.register(_LISTENER)
