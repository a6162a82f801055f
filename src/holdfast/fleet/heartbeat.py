"""Send the heartbeats of a runner, and say what each answer proves.

An answered heartbeat proves that the runner counts as alive from the moment it was sent; the permit to start work rests
on that. If heartbeats fail for a while, the store may be down, or only this runner's connection. So afterwards the
runner trusts its view of others only after a whole dead-after time of steady heartbeats. The same holds when the
store's clock was set (or another member of a replica set, with its own clock, has become the primary): until all
runners have sent heartbeats by the new time, the living look silent. A heartbeat that finds no entry means that the
runner was declared dead: its work belongs to others.

A heartbeat does not wait for the previous heartbeat. A half-open connection may swallow a heartbeat, and the timeout of
its request may be longer than the dead-after time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.clock import format_duration
from holdfast.errors import StoreError
from holdfast.fleet.supervisor import Workers
from holdfast.model.records import RunnerRecord, WorkerRecord
from holdfast.runtime.claim import Permit
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import wait_for
from holdfast.runtime.outage import cancel_tasks
from holdfast.telemetry.events import DutyFailed, OutageBegan, OutageEnded

_PERMITTED = 2 / 3  # of the dead-after time
_MISSED = 2.5  # beats: after so long a pause, beats are not steady
_REMIND_SECONDS = 60.0  # between two lines that the store still does not answer
_FLUTTER_SECONDS = 30.0  # a store that comes and goes is not reported at each turn
_SET = 1 / 2  # of the dead-after time: less cannot make a runner look dead that beats four times in it


class Heartbeat:
    """`joined` is when the runner joined the roster; `ticks` says whether its services move. `on_entry` gets the entry
    that each heartbeat finds. `dead` is set when a heartbeat finds none: the runner was declared dead.
    """

    def __init__(
        self,
        engine: Engine,
        permit: Permit,
        record: RunnerRecord,
        joined: float,
        workers: Workers,
        *,
        ticks: Callable[[], bool],
        on_entry: Callable[[RunnerRecord], None],
    ) -> None:
        self._store = engine.store
        self._clock = engine.clock
        self._emit = engine.telemetry.emit
        self._permit = permit
        self._record = record
        self._every = engine.settings.runner_heartbeat_seconds
        self._dead_after = engine.settings.dead_after_seconds
        self._workers = workers
        self._ticks = ticks
        self._on_entry = on_entry
        self.dead = asyncio.Event()
        self._last = joined  # when the last answered beat was sent; joining is one
        self._answered_at = self._last  # when its answer came, which may be much later
        self._answered_since = self._steady_since = self._last  # without a missed beat; and by one and the same clock
        self._ahead = engine.store.now() - self._last  # of our own elapsed time: the store's, as far as we know it
        self._soon = asyncio.Event()
        self._next_report = float("-inf")
        self._is_unanswered = False  # and has said so
        self._why = ""  # what the store said last
        self.draining = False
        permit.grant(self._last + self._dead_after * _PERMITTED)

    async def run(self) -> None:
        """Beat until cancelled, or declared dead."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while not self.dead.is_set():
                await wait_for(self._soon, self._every)
                self._soon.clear()
                if self._clock.monotonic() - self._answered_at > self._every * _MISSED:
                    self._report_outage()
                if len(under_way) * self._every < self._dead_after:
                    under_way.add(beat := asyncio.create_task(self._beat()))
                    beat.add_done_callback(under_way.discard)
        finally:
            await cancel_tasks(*under_way)

    async def _beat(self) -> None:
        sent = self._clock.monotonic()
        try:
            workers = self._workers.records()
            entry = await self._store.heartbeat(
                self._record.app, self._record.id, workers, ticks=self._ticks(), draining=self.draining
            )
            self._answered(sent, entry, workers)
        except StoreError as error:
            if sent > self._last:
                self._why = str(error)
                self._report_outage()
        except Exception as error:
            self._emit(DutyFailed("runner", f"send a heartbeat of runner {self._record.id}", error))

    def _report_outage(self) -> None:
        """Report an outage when it begins, and then now and then: it may be long, and beats are many."""
        now = self._clock.monotonic()
        if now < self._next_report or self.dead.is_set():
            return
        silence, still = format_duration(round(now - self._answered_at, 1)), "still " if self._is_unanswered else ""
        why = f": {self._why}" if self._why else ""
        self._emit(OutageBegan(self._record.id, f"has {still}not written a heartbeat for {silence}{why}"))
        self._next_report, self._is_unanswered = now + _REMIND_SECONDS, True

    def _report_answer(self) -> None:
        now = self._clock.monotonic()
        if self._is_unanswered:
            silence = format_duration(round(now - self._answered_at, 1))
            self._emit(OutageEnded(self._record.id, silence))
            self._next_report = now + _FLUTTER_SECONDS
        self._answered_at, self._is_unanswered, self._why = now, False, ""

    def _answered(self, sent: float, entry: RunnerRecord | None, workers: Sequence[WorkerRecord]) -> None:
        if self.dead.is_set():
            return
        if entry is None:
            self.dead.set()
            self._soon.set()
        elif sent > self._last:
            self._report_answer()
            if sent - self._last > self._every * _MISSED:
                self._answered_since = self._steady_since = sent
            if self._was_set():
                self._steady_since = sent
            self._ahead = self._store.now() - self._clock.monotonic()
            self._last = sent
            self._workers.are_on_roster(workers)  # before the permit, which is passed on to these
            self._permit.grant(sent + self._dead_after * _PERMITTED)
            self._on_entry(entry)

    @property
    def why_disconnected(self) -> str:
        """Return the store's error to the last beat; empty if that was answered."""
        return self._why

    def age(self) -> float:
        """Return the seconds since the last answered beat was sent."""
        return self._clock.monotonic() - self._last

    def beat_soon(self) -> None:
        """Send a heartbeat soon: something has changed that belongs on the roster."""
        self._soon.set()

    def answered_seconds(self) -> float:
        """Return for how long the store has answered every beat; 0 if the last one is overdue."""
        now = self._clock.monotonic()
        return 0.0 if now - self._last > self._every * _MISSED else now - self._answered_since

    def steady_seconds(self) -> float:
        """Return for how long the store has answered every beat, and its clock was not set."""
        return 0.0 if self._was_set() else min(self.answered_seconds(), self._clock.monotonic() - self._steady_since)

    def _was_set(self) -> bool:
        """Return whether the store's clock was set since the last beat."""
        return abs(self._store.now() - self._clock.monotonic() - self._ahead) > self._dead_after * _SET
