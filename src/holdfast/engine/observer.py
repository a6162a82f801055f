"""Every runner watches the others: a runner that is silent for too long is declared dead.

Silence is proved in one of two ways. Where all heartbeats are stamped by one clock (`SHARED_CLOCK`), their age is
proof, as long as that clock was not set. Anywhere else, and for a heartbeat that is stamped ahead, a stamp proves
nothing: the runner's clock may have been wrong by an hour, or ours is. Then the observer watches whether the stamp
changes, by its own monotonic clock, which counts suspension; a living runner's stamp changes four times in that time.

With one clock, a look tells whose heartbeat is oldest. No other runner can be dead before that one, so the next look is
due when its time is up: a healthy fleet costs one query in most of the dead-after time. Stamps that have to be watched
are looked at eight times in it.

An observer that was itself not heard throughout that time declares no runner dead: it was the store that was away.
Settings may differ, in the middle of a deploy say: the longer promise counts.

Declaring is one conditional write, and the observer that makes it sees to the dead runner's work, until that is under
way. If the reply to the write is lost, the observer cannot know, and sees to the work if the runner is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.engine.outages import repeated
from holdfast.errors import StoreError
from holdfast.lifecycle.records import RunnerRecord
from holdfast.store.contract import Ability, Store

log = logging.getLogger("holdfast.runner")

_SOONEST_SECONDS = 0.05
_AGAIN_SECONDS = 0.5
_SPREAD_SECONDS = 0.2  # so that not all observers come at once
_WATCHING = 1 / 8  # of the dead-after time, between two looks at stamps that are watched


class Watch:
    """Since when each roster entry has had its heartbeat's stamp, as far as an observer has seen, by its own clock."""

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


class Observer:
    """`steady_seconds`: for how long the store has heard every heartbeat of ours, while its clock was not set;
    `heard_seconds`: the same, whatever its clock does.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        rng: random.Random,
        *,
        app: str,
        dead_after_seconds: float,
        steady_seconds: Callable[[], float],
        heard_seconds: Callable[[], float],
        on_death: Callable[[RunnerRecord], Awaitable[None]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._app = app
        self._dead_after = dead_after_seconds
        self._steady = steady_seconds
        self._heard = heard_seconds
        self._on_death = on_death
        self._watch = Watch(4 * dead_after_seconds)
        self._unseen: dict[str, RunnerRecord] = {}  # whose work is not seen to yet; perhaps they are not even dead

    async def run(self) -> None:
        while True:
            try:
                with repeated():
                    wait = await self._look()
            except StoreError as error:
                log.debug("the roster was not read: %s", error)
                wait = min(self._dead_after / 4, _AGAIN_SECONDS) if self._unseen else self._dead_after / 4
            except Exception:
                log.exception("while watching the other runners")
                wait = self._dead_after / 4
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
        unchanged, heard = self._watch.unchanged(runner), self._heard()
        if min(unchanged, heard) > patience:
            return unchanged, 0.0
        if Ability.SHARED_CLOCK not in self._store.abilities or age < 0.0:
            return unchanged, min(self._dead_after * _WATCHING, max(patience - min(unchanged, heard), _SOONEST_SECONDS))
        if age <= patience:
            return age, max(patience - age, _SOONEST_SECONDS)
        if (steady := self._steady()) < patience:
            return age, min(max(patience - steady, _SOONEST_SECONDS), self._dead_after / 4)
        if abs(self._store.now() - runner.heartbeat_at - age) > self._dead_after / 2:
            return age, self._dead_after / 4  # by a clock that was set: our next beat tells us of it
        return age, 0.0

    async def _declare_dead(self, runner: RunnerRecord, silence: float) -> None:
        crashpoint("death.before")
        self._unseen[runner.id] = runner
        if await self._store.declare_dead(runner):
            crashpoint("death.declared")
            log.warning("runner %s on %s was silent for %.1f s and is declared dead", runner.id, runner.host, silence)
            await self._on_death(runner)
        del self._unseen[runner.id]

    async def _see_to_the_dead(self) -> None:
        """Once more, where an error came in between."""
        if self._unseen:
            alive = {runner.id for runner in await self._store.roster(self._app)}
            for id, runner in tuple(self._unseen.items()):
                if id not in alive:
                    await self._on_death(runner)
                del self._unseen[id]
