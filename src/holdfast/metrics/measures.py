"""Measures of one process: a subscriber of the engine's events, durations of the store, lag of the loop.

All is counted on the engine's loop. Durations of the store may end on any thread: they wait in a list until the loop
counts them.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from holdfast.metrics.rules import (
    BY_NAME,
    DEATHS,
    ENDED,
    LAG,
    LOST,
    OUTCOMES,
    RAN,
    RECOVERED,
    RETRIED,
    SKIPS,
    STORE,
    WAITED,
    Histogram,
    LabelNames,
    Tables,
    relabelled,
)
from holdfast.model.changes import Applied, Change
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.stats.rules import began_at
from holdfast.store.contract import Store
from holdfast.telemetry import events as e

LOOK_SECONDS = 0.5
_OUTCOMES = {Status.SUCCESS: "succeeded", Status.FAILED: "failed", Status.CANCELLED: "cancelled"}
_TAKEN_BACK = {
    Status.RUNNING_RECOVERY: "running",
    Status.PENDING_RECOVERY: "pending",
    Status.KILLED: "killed",
}
_MOST_WAITING = 100_000
_OPERATIONS = (
    *("insert", "find_conflicts", "claim", "release_waiters", "lanes", "apply", "append", "read_log", "get", "find"),
    *("queue_depths", "keep_payloads", "put_payloads", "get_payload", "heartbeat", "roster", "silent", "owners"),
    *("remove_ended", "remove_expired", "put_entry", "entries", "remove_entry"),
)


class _Cell(msgspec.Struct):
    """First attempts of a task in a queue that succeeded."""

    ran: list[int]
    waited: list[int]
    seconds_run: float = 0.0
    seconds_waited: float = 0.0


class Measures:
    """Count for one app in one process. `monotonic` is the clock that durations go by."""

    def __init__(self, app: str, monotonic: Callable[[], float]) -> None:
        self._app = app
        self._monotonic = monotonic
        self.tables = Tables({}, {})  # since the start of the process, those of its workers included
        self._fresh = Tables({}, {})  # since the last time that they were taken
        self._tasks, self._queues = LabelNames(), LabelNames()
        self._quick: dict[tuple[str, str], _Cell] = {}
        self._operations: deque[tuple[str, float]] = deque(maxlen=_MOST_WAITING)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._counts: dict[type[e.Event], Callable[[Any], None]] = {
            e.ChangesWritten: self._written,
            e.ChangeLost: self._lost,
            e.SlotSkipped: lambda event: self._fresh.count(SKIPS),
            e.WorkerDied: lambda event: self._fresh.count(DEATHS),  # killed workers included
        }

    # --- events

    def wants(self, kind: type[e.Event]) -> bool:
        return kind in self._counts

    def check_for(self, kind: type[e.Event]) -> Callable[[], bool] | None:
        return (lambda: True) if kind in self._counts else None

    def __call__(self, event: e.Event) -> None:
        if (count := self._counts.get(type(event))) is not None:
            count(event)

    def _written(self, event: e.ChangesWritten) -> None:
        """Count changes. Most are first attempts that succeeded: they are counted here, without further calls."""
        quick = self._quick
        for (record, change), verdict in zip(event.wanted, event.verdicts, strict=True):
            if not isinstance(verdict, Applied):
                continue
            last = record.history[-1] if record.history else None
            if (
                change.name != "completed"
                or record.epoch != 1
                or record.run is not None
                or last is None
                or last.status is not Status.RUNNING
            ):
                self._count(record, change)
                continue
            cell = quick.get((record.task, record.queue))
            if cell is None:
                cell = quick[record.task, record.queue] = _Cell(
                    [0] * (len(RAN.bounds) + 1), [0] * (len(RAN.bounds) + 1)
                )
            began = last.at
            ran, waited = change.at - began, began - max(record.due_at, record.created_at)
            cell.ran[bisect_left(RAN.bounds, ran)] += 1
            cell.waited[bisect_left(WAITED.bounds, waited)] += 1
            cell.seconds_run += ran if ran > 0 else 0.0
            cell.seconds_waited += waited if waited > 0 else 0.0

    def _count(self, record: InvocationRecord, change: Change) -> None:
        outcome = _OUTCOMES.get(change.path[-1])
        if outcome is None and change.name != "retried":
            taken_back = [_TAKEN_BACK[status] for status in change.path if status in _TAKEN_BACK]
            if taken_back:
                self._fresh.count(RECOVERED, taken_back[0])
            return
        task, tables = self._tasks.label(record.task), self._fresh
        if outcome is not None:
            tables.count(ENDED, f"{task}\n{outcome}")
        else:
            tables.count(RETRIED, task)
        began = None if change.never_began else began_at(record)
        if began is None:
            return
        start, due = began
        tables.histogram(RAN, task).note(RAN, change.at - start)
        if due is not None:
            tables.histogram(WAITED, self._queues.label(record.queue)).note(WAITED, start - due)

    def _count_quick(self) -> None:
        for (name, queue), cell in self._quick.items():
            task = self._tasks.label(name)
            self._fresh.count(ENDED, f"{task}\nsucceeded", sum(cell.ran))
            self._fresh.histogram(RAN, task).add(Histogram(cell.ran, cell.seconds_run))
            self._fresh.histogram(WAITED, self._queues.label(queue)).add(Histogram(cell.waited, cell.seconds_waited))
        self._quick.clear()

    def _lost(self, event: e.ChangeLost) -> None:
        if event.record.app == self._app:
            self._fresh.count(LOST)

    # --- the store

    def watch_store(self, store: Store) -> None:
        """Measure how long the operations of a store take, from now on. A store is watched once."""
        for name in _OPERATIONS:
            if name not in vars(store):
                setattr(store, name, self._timed(name, getattr(store, name)))
        if hasattr(store, "insert_blocking") and "insert_blocking" not in vars(store):
            vars(store)["insert_blocking"] = self._timed_here("insert", store.insert_blocking)

    def _timed(self, name: str, operation: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        monotonic, note = self._monotonic, self._operations.append

        @functools.wraps(operation)
        async def timed(*args: Any, **options: Any) -> Any:
            began = monotonic()
            try:
                return await operation(*args, **options)
            finally:
                note((name, monotonic() - began))

        return timed

    def _timed_here(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        monotonic, note = self._monotonic, self._operations.append

        @functools.wraps(operation)
        def timed(*args: Any, **options: Any) -> Any:
            began = monotonic()
            try:
                return operation(*args, **options)
            finally:
                note((name, monotonic() - began))

        return timed

    def _count_operations(self) -> None:
        for _ in range(len(self._operations)):
            name, seconds = self._operations.popleft()
            self._fresh.histogram(STORE, name).note(STORE, seconds)

    # --- the loop

    def begin(self) -> None:
        """Look twice a second how late the engine's loop is."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + LOOK_SECONDS
        self._timer = loop.call_at(self._due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._fresh.histogram(LAG).note(LAG, max(0.0, loop.time() - self._due))
        self._count_operations()
        self.begin()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- on their way

    def taken(self) -> bytes:
        """Return what was counted since the last time, encoded; empty if that is nothing."""
        fresh = self._gathered()
        return _encoder.encode(fresh) if fresh else b""

    def _gathered(self) -> Tables:
        """Add what is fresh to the tables, and return it."""
        self._count_operations()
        self._count_quick()
        fresh, self._fresh = self._fresh, Tables({}, {})
        self._add(fresh)
        return fresh

    def add(self, data: bytes) -> None:
        """Add what a worker has `taken`. What it measures and this process does not know is left out."""
        self._add(_decoder.decode(data))

    def _add(self, other: Tables) -> None:
        names = self._tasks, self._queues
        for name, cells in other.counters.items():
            if (metric := BY_NAME.get(name)) is not None:
                for labels, many in cells.items():
                    self.tables.count(metric, relabelled(metric, labels, *names), many)
        for name, histograms in other.histograms.items():
            if (metric := BY_NAME.get(name)) is not None:
                for labels, histogram in histograms.items():
                    self.tables.histogram(metric, relabelled(metric, labels, *names)).add(histogram)

    def expect(self, tasks: Iterable[str]) -> None:
        """Begin the counts of these tasks with 0: the first count of a series that was not there before is no increase
        for Prometheus.
        """
        for task in map(self._tasks.label, tasks):
            self.tables.count(RETRIED, task, 0)
            for outcome in OUTCOMES:
                self.tables.count(ENDED, f"{task}\n{outcome}", 0)

    def now(self) -> Tables:
        """Return a copy of all that was counted since the start of this process. On the engine's loop."""
        self._gathered()
        return _decoder.decode(_encoder.encode(self.tables))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tables)
