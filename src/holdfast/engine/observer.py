"""Every runner watches the others: whoever is silent for too long is declared dead.

One look tells who was silent longest, by the store's clock. Nobody else can be dead before that one would be, so the
next look is due when its time would be up: a healthy fleet costs one query in most of the dead-after time. An observer
that was itself not heard throughout that time declares nobody dead: it was the store that was away. Settings may
differ, in the middle of a deploy say: whoever promises less, or expects less, is granted it.

Declaring is one conditional write, and whoever makes it sees to the dead one's work, until that is under way. If the
reply to the write is lost, whoever made it cannot know, and sees to the work if the runner is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from holdfast.crashpoints import crashpoint
from holdfast.engine.outages import repeated
from holdfast.errors import StoreError
from holdfast.lifecycle.records import RunnerRecord
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.runner")

_SOONEST_SECONDS = 0.05
_AGAIN_SECONDS = 0.5
_SPREAD_SECONDS = 0.2  # so that not all observers come at once


class Observer:
    def __init__(
        self,
        store: Store,
        rng: random.Random,
        *,
        app: str,
        dead_after_seconds: float,
        steady_seconds: Callable[[], float],
        on_death: Callable[[RunnerRecord], Awaitable[None]],
    ) -> None:
        self._store = store
        self._rng = rng
        self._app = app
        self._dead_after = dead_after_seconds
        self._steady = steady_seconds
        self._on_death = on_death
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
        """Declare dead whoever is; the seconds until the next look."""
        await self._see_to_the_dead()
        found = await self._store.silent(self._app)
        if found is None:
            return self._dead_after
        runner, silence = found
        patience = max(self._dead_after, runner.dead_after_seconds)
        if silence <= patience:
            return min(self._dead_after, patience - silence)  # less than none: the clock was set back
        steady = self._steady()
        if steady < patience:
            return min(patience - steady, self._dead_after / 4)
        if abs(self._store.now() - runner.heartbeat_at - silence) > self._dead_after / 2:
            return self._dead_after / 4  # by a clock that was set: our next beat tells us of it
        crashpoint("death.before")
        self._unseen[runner.id] = runner
        if await self._store.declare_dead(runner):
            crashpoint("death.declared")
            log.warning("runner %s on %s was silent for %.1f s and is declared dead", runner.id, runner.host, silence)
            await self._on_death(runner)
        del self._unseen[runner.id]
        return 0.0

    async def _see_to_the_dead(self) -> None:
        """Once more, where an error came in between."""
        if self._unseen:
            alive = {runner.id for runner in await self._store.roster(self._app)}
            for id, runner in tuple(self._unseen.items()):
                if id not in alive:
                    await self._on_death(runner)
                del self._unseen[id]
