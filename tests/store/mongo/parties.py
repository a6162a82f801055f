"""Apps that are strangers to each other, as two processes are: each has its own loop, client and stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.commands import CommandCounter
from tests.store.mongo.tools import Events, database_of, until

from holdfast import App
from holdfast.store.mongo.hints import StreamHints
from holdfast.task import Task

LONG = 30  # seconds between unasked looks: whoever is quicker was woken
SOON = 1.0
QUIET_SECONDS = 0.1


class Party:
    """An app with one task, which waits until it is let go, and what its store reported."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.events = Events()
        self.database = database_of(url)
        self.app = App(url, name="shop", **{"poll_interval_seconds": LONG, "drain_timeout_seconds": 1} | settings)
        # Opened here, before anybody listens, so that nothing is reported to the log instead.
        engine = self.app.runtime.run(self.app.runtime.engine())
        engine.store._observe = self.hints.observe = self.events  # type: ignore[attr-defined]
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[float] = []
        self.task: Task[[], int] = self.app.task(name="work")(self._work)

    def _work(self) -> int:
        self.started.append(time.monotonic())
        assert self.gate.wait(20)
        return 7

    @property
    def hints(self) -> StreamHints:
        hints = self.app.runtime.run(self.app.runtime.engine()).store.hints()
        assert isinstance(hints, StreamHints)
        return hints

    def listens(self) -> bool:
        return self.hints.trust > 0


@contextmanager
def two(url: str, **settings: Any) -> Iterator[tuple[Party, Party]]:
    """A runner, idle, and somebody else."""
    runner, other = Party(url, **settings), Party(url, **settings)
    with runner.app, other.app, runner.app.runner():
        yield runner, other


def settle_down(runner: Party) -> None:
    """Wait until the runner relies on hints and has looked for the last time: nothing is sent for a while."""
    until(runner.listens, what="the stream is open")
    with CommandCounter(runner.database) as sent:
        last = [(-1, 0.0)]  # how many were sent, and since when there are no more

        def is_quiet() -> bool:
            if sent.for_tasks.total() != last[0][0]:
                last[0] = (sent.for_tasks.total(), time.monotonic())
            return time.monotonic() - last[0][1] > QUIET_SECONDS

        until(is_quiet)
