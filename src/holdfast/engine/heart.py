"""The heart of a runner: it beats as long as the store hears it, and says what that proves.

A beat that was written proves that the runner counts as alive from the moment it was sent; the permit to start work
rests on that. If beats fail for a while the runner cannot tell a dead store from its own bad connection, so when it
hears the store again it trusts its view of others only after a whole dead-after time of steady beats. The same holds
when the store's clock was set (or another member of a replica set, with a clock of its own, has become the primary):
until all have beaten by the new time, the living look silent. A beat that finds no entry means that the runner was
declared dead: its work belongs to others.

A beat does not wait for the one before it. One that is swallowed, by a connection that is open on this side only, say,
would otherwise stop the heart until a timeout that may be longer than the dead-after time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from holdfast.clock import Clock, format_duration
from holdfast.engine.ending import end_all
from holdfast.engine.outages import repeated
from holdfast.engine.permit import Permit
from holdfast.errors import StoreError
from holdfast.lifecycle.records import RunnerRecord, WorkerRecord
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.runner")

_PERMITTED = 2 / 3  # of the dead-after time
_MISSED = 2.5  # beats: after so long a pause, beats are not steady
_REMIND_SECONDS = 60.0  # whoever reads the log that the runner is still not heard
_FLUTTER_SECONDS = 30.0  # a store that comes and goes is not told of at each turn
_SET = 1 / 2  # of the dead-after time: less cannot make a runner look dead that beats four times in it


class Heart:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        permit: Permit,
        *,
        record: RunnerRecord,
        joined: float,
        every_seconds: float,
        dead_after_seconds: float,
        workers: Callable[[], Sequence[WorkerRecord]],
        ticks: Callable[[], bool],
        on_entry: Callable[[RunnerRecord], None],
        on_death: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._permit = permit
        self._record = record
        self._every = every_seconds
        self._dead_after = dead_after_seconds
        self._workers = workers
        self._ticks = ticks
        self._on_entry = on_entry
        self._on_death = on_death
        self._last = joined  # when the last beat was sent that was heard; joining is one
        self._heard_at = self._last  # when its answer came, which may be much later
        self._heard_since = self._steady_since = self._last  # without a missed beat; and by one and the same clock
        self._ahead = store.now() - self._last  # of our own elapsed time: the store's, as far as we know it
        self._soon = asyncio.Event()
        self._is_dead = False
        self._next_complaint = float("-inf")
        self._is_unheard = False  # and has said so
        self._why = ""  # what the store said last
        self.draining = False
        permit.grant(self._last + self._dead_after * _PERMITTED)

    async def run(self) -> None:
        """Beat until cancelled, or declared dead."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while not self._is_dead:
                try:
                    async with asyncio.timeout(self._every):
                        await self._soon.wait()
                except TimeoutError:
                    pass
                self._soon.clear()
                if self._clock.monotonic() - self._heard_at > self._every * _MISSED:
                    self._complain()
                if len(under_way) * self._every < self._dead_after:
                    under_way.add(beat := asyncio.create_task(self._beat()))
                    beat.add_done_callback(under_way.discard)
        finally:
            await end_all(*under_way)

    async def _beat(self) -> None:
        sent = self._clock.monotonic()
        try:
            with repeated():
                entry = await self._store.heartbeat(
                    self._record.app, self._record.id, self._workers(), ticks=self._ticks(), draining=self.draining
                )
            self._heard(sent, entry)
        except StoreError as error:
            if sent > self._last:
                self._why = f": {error}"
                self._complain()
        except Exception:
            log.exception("a heartbeat of runner %s", self._record.id)

    def _complain(self) -> None:
        """Once when it begins, and then now and then: an outage may be long, and beats are many."""
        now = self._clock.monotonic()
        if now < self._next_complaint or self._is_dead:
            return
        silence, still = format_duration(round(now - self._heard_at, 1)), "still " if self._is_unheard else ""
        log.warning("runner %s is %snot heard by the store, for %s now%s", self._record.id, still, silence, self._why)
        self._next_complaint, self._is_unheard = now + _REMIND_SECONDS, True

    def _calm_down(self) -> None:
        now = self._clock.monotonic()
        if self._is_unheard:
            silence = format_duration(round(now - self._heard_at, 1))
            log.info("runner %s is heard again, after %s", self._record.id, silence)
            self._next_complaint = now + _FLUTTER_SECONDS
        self._heard_at, self._is_unheard, self._why = now, False, ""

    def _heard(self, sent: float, entry: RunnerRecord | None) -> None:
        if self._is_dead:
            return
        if entry is None:
            self._is_dead = True
            self._soon.set()
            self._on_death()
        elif sent > self._last:
            self._calm_down()
            if sent - self._last > self._every * _MISSED:
                self._heard_since = self._steady_since = sent
            if self._was_set():
                self._steady_since = sent
            self._ahead = self._store.now() - self._clock.monotonic()
            self._last = sent
            self._permit.grant(sent + self._dead_after * _PERMITTED)
            self._on_entry(entry)

    def beat_soon(self) -> None:
        """Something has changed that the roster should tell."""
        self._soon.set()

    def heard_seconds(self) -> float:
        """Return for how long the store has heard every beat; 0 if the last one is overdue."""
        now = self._clock.monotonic()
        return 0.0 if now - self._last > self._every * _MISSED else now - self._heard_since

    def steady_seconds(self) -> float:
        """Return for how long the store has heard every beat, and its clock was not set."""
        return 0.0 if self._was_set() else min(self.heard_seconds(), self._clock.monotonic() - self._steady_since)

    def _was_set(self) -> bool:
        """Whether the store's clock was set since the last beat."""
        return abs(self._store.now() - self._clock.monotonic() - self._ahead) > self._dead_after * _SET
