"""Detect dead runners: a runner that is silent for too long is declared dead by any of the others.

Silence is proved in one of two ways. Where all heartbeats are stamped by one clock (`SHARED_CLOCK`), their age is
proof, as long as that clock was not set. Anywhere else, and for a heartbeat that is stamped ahead, a stamp proves
nothing: the runner's clock may have been wrong by an hour, or ours is. Then the detector watches whether the stamp
changes, by its own monotonic clock, which counts suspension; a living runner's stamp changes four times in that time.

With one clock, a look returns the oldest heartbeat. No other runner can be dead before the stalest one, so the next
look is due when that runner's time is up: a healthy fleet costs one query in most of the dead-after time. Watched
stamps are looked at eight times in it. A detector whose own heartbeats were not answered throughout that time declares
no runner dead: it was the store that was away. Settings may differ, in the middle of a deploy say: the longer promise
counts.

Declaring is one conditional write, and the detector that makes it sees to the dead runner's work, until that is under
way. If the reply to the write is lost, the detector cannot know, and sees to the work if the runner is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from holdfast.crashpoints import crashpoint
from holdfast.fleet.heartbeat import Heartbeat
from holdfast.model.records import RunnerRecord
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Ability
from holdfast.telemetry.events import DutyFailed, RunnerDeclaredDead

_SOONEST_SECONDS = 0.05
_AGAIN_SECONDS = 0.5
_SPREAD_SECONDS = 0.2  # so that not all observers come at once
_WATCHING = 1 / 8  # of the dead-after time, between two looks at stamps that are watched


class Watch:
    """Know since when each roster entry has had its heartbeat's stamp, as far as a detector has
    seen, by its own clock.
    """

    def __init__(self, forget_after_seconds: float) -> None:
        self._forget_after = forget_after_seconds
        self._seen: dict[str, tuple[float, float, float]] = {}  # stamp, first and last time it was seen

    def see(self, entries: Sequence[RunnerRecord], asked: float, answered: float) -> None:
        """Take note of entries that were read between these two times."""
        for runner in entries:
            stamp, first, _ = self._seen.get(runner.id, (None, answered, asked))
            self._seen[runner.id] = (runner.heartbeat_at, first if stamp == runner.heartbeat_at else answered, asked)
        for id in [id for id, seen in self._seen.items() if asked - seen[2] > self._forget_after]:
            del self._seen[id]

    def unchanged(self, runner: RunnerRecord) -> float:
        """Return for how many seconds the entry has certainly not changed."""
        stamp, first, last = self._seen[runner.id]
        return max(0.0, last - first) if stamp == runner.heartbeat_at else 0.0


class FailureDetector:
    """`heartbeat` is that of this runner; `on_death` sees to the work of a runner that was declared dead."""

    def __init__(
        self, engine: Engine, heartbeat: Heartbeat, on_death: Callable[[RunnerRecord], Awaitable[None]]
    ) -> None:
        self._store = engine.store
        self._clock = engine.clock
        self._emit = engine.telemetry.emit
        self._rng = engine.rng
        self._app = engine.app
        self._dead_after = engine.settings.dead_after_seconds
        self._heartbeat = heartbeat
        self._on_death = on_death
        self._watch = Watch(4 * self._dead_after)
        self._unseen: dict[str, RunnerRecord] = {}  # their work is not seen to yet; perhaps they are not even dead

    async def run(self) -> None:
        while True:
            try:
                wait = await self._look()
            except Exception as error:
                self._emit(DutyFailed("runner", "watch the other runners", error))
                wait = min(self._dead_after / 4, _AGAIN_SECONDS) if self._unseen else self._dead_after / 4
            spread = min(_SPREAD_SECONDS, self._dead_after / 10)
            await asyncio.sleep(max(wait, _SOONEST_SECONDS) + self._rng.random() * spread)

    async def _look(self) -> float:
        """Declare dead runners dead. Return the seconds until the next look."""
        await self._see_to_the_dead()
        asked = self._clock.monotonic()
        found = await self._store.silent(self._app)
        self._watch.see([runner for runner, _ in found], asked, self._clock.monotonic())
        wait = self._dead_after
        for runner, age in found:
            lasted, left = self._silence(runner, age)
            if left <= 0.0:
                await self._declare_dead(runner, lasted)
                return 0.0
            wait = min(wait, left)
        return wait

    def _silence(self, runner: RunnerRecord, age: float) -> tuple[float, float]:
        """Return for how long the runner was silent, and in how many seconds to look at it again; 0: it is dead."""
        patience = max(self._dead_after, runner.dead_after_seconds)
        unchanged, heard = self._watch.unchanged(runner), self._heartbeat.answered_seconds()
        if min(unchanged, heard) > patience:
            return unchanged, 0.0
        if Ability.SHARED_CLOCK not in self._store.abilities or age < 0.0:
            return unchanged, min(self._dead_after * _WATCHING, max(patience - min(unchanged, heard), _SOONEST_SECONDS))
        if age <= patience:
            return age, max(patience - age, _SOONEST_SECONDS)
        if (steady := self._heartbeat.steady_seconds()) < patience:
            return age, min(max(patience - steady, _SOONEST_SECONDS), self._dead_after / 4)
        if abs(self._store.now() - runner.heartbeat_at - age) > self._dead_after / 2:
            return age, self._dead_after / 4  # by a clock that was set, as our next beat will show
        return age, 0.0

    async def _declare_dead(self, runner: RunnerRecord, silence: float) -> None:
        crashpoint("death.before")
        self._unseen[runner.id] = runner
        if await self._store.remove_runner(runner.app, runner.id, heartbeat_at=runner.heartbeat_at):
            crashpoint("death.declared")
            self._emit(RunnerDeclaredDead(runner.id, f"silent on {runner.host} for {silence:.1f} s"))
            await self._on_death(runner)
        del self._unseen[runner.id]

    async def _see_to_the_dead(self) -> None:
        """See to dead runners once more, where an error came in between."""
        if self._unseen:
            alive = {runner.id for runner in await self._store.roster(self._app)}
            for id, runner in tuple(self._unseen.items()):
                if id not in alive:
                    await self._on_death(runner)
                del self._unseen[id]
