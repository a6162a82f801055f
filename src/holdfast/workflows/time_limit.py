"""The time limit of a run: it counts from the first start, over all owners, and ends the run as a cancel does.

When the time is over, the body gets a recorded CancelledError. It may compensate until its grace is over, which counts
from that record; then the run is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from holdfast.errors import TimedOut
from holdfast.executors.call import Raised, raised
from holdfast.model.decoding import ahead
from holdfast.model.records import InvocationRecord
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item
from holdfast.workflows.declaring import GRACE_SECONDS
from holdfast.workflows.events import Event

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

TIMEOUT = "timeout"  # the name of a recorded request to end that comes from the time limit


def limit_of(record: InvocationRecord, first_started_at: float) -> float:
    """Return when the time of a run is over; infinity if it has no limit. The log of a fork began long before it."""
    timeout = record.terms.timeout
    return inf if timeout is None else ahead(max(first_started_at, record.created_at), timeout)


def ends_by(record: InvocationRecord, first_started_at: float) -> float:
    """Return when the time of a run is over, and that to compensate."""
    grace = record.terms.cancel_grace
    return limit_of(record, first_started_at) + (GRACE_SECONDS if grace is None else grace)


class TimeLimit:
    """The time limit of one run. `at` is the moment when its time is over."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.at: float | None = None
        self.is_over = False
        self._timers: list[asyncio.TimerHandle] = []

    def set(self) -> None:
        run = self._run
        if run.record.terms.timeout is not None:
            self.at = limit_of(run.record, run.first_started_at)
            self._later(self.at, self.pass_over)

    def _later(self, at: float, function: Callable[[], None]) -> None:
        self._timers.append(self._run.host.call_later(max(0.0, at - self._run.host.now()), function))

    @property
    def is_due(self) -> bool:
        """Return whether the time is over, and the body does not know it yet."""
        return self.at is not None and self.at <= self._run.host.now() and not self._is_said

    @property
    def _is_said(self) -> bool:
        return self.is_over or self._run.is_cancelling or self._run.replay.has_cancel

    def pass_over(self) -> None:
        """Ask the body to end."""
        run = self._run
        if run.is_over or self._is_said:
            return
        self.is_over, run.cancel_why = True, f"timed out after {run.record.terms.timeout:g} s"
        run.gather(Item(Event(type=e.CANCEL_REQUESTED, at=run.at(), name=TIMEOUT, why=run.cancel_why)))
        run.flush()

    def said(self, event: Event) -> None:
        """Note a recorded request to end. If it comes from the time limit, the time to compensate begins with it."""
        if event.name == TIMEOUT:
            self.is_over = True
            grace = self._run.record.terms.cancel_grace
            self._later(event.at + (self._run.host.grace_seconds if grace is None else grace), self._end)

    def _end(self) -> None:
        if not self._run.is_over:
            self._run.end(self.outcome())

    def outcome(self) -> Raised:
        run = self._run
        why = f"{run.record.task} {run.id} {run.cancel_why}"
        return raised(run.call, TimedOut(why, invocation_id=run.id))

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
