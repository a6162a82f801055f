"""Ends of many invocations, as they come.

A look reads invocations whose end was hinted, and the first few open ones: hints may be lost. So waiting for 100,000
costs as much per look as waiting for a few hundred.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from holdfast.ids import InvocationId
from holdfast.model.records import ENDED, Hint, InvocationRecord
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Pace, wait_for

WINDOW = 200
MOST_AT_ONCE = 500


class EndReader:
    """Reads the ends of invocations, each once. Used on the engine's loop."""

    def __init__(self, engine: Engine, ids: Sequence[InvocationId]) -> None:
        self._engine = engine
        self._open: dict[str, InvocationId] = {id: id for id in ids}
        self._announced: dict[str, None] = {id: None for id in ids if engine.hub.has_ended(id)}
        self._event = asyncio.Event()
        self._turn = 0
        self._pace = Pace(engine.settings.poll_interval_seconds)
        self._pace.quicken()
        self._unsubscribe = engine.hub.on(ENDED, self._hinted)

    def close(self) -> None:
        """Let go of the hints. On any thread: an iterator may be thrown away anywhere, after its app is closed."""
        self._unsubscribe()

    @property
    def open(self) -> Sequence[InvocationId]:
        """Return the invocations whose end was not returned yet."""
        return list(self._open.values())

    def _hinted(self, hint: Hint) -> None:
        hinted = [id for id in hint.subjects if id in self._open]
        self._announced.update(dict.fromkeys(hinted))
        if hinted or not hint.subjects:
            self._event.set()

    async def more(self, until: float | None) -> list[InvocationRecord]:
        """Return ends that were not returned before: at least one, or none if the deadline (by the loop's clock) passes
        first.
        """
        loop = asyncio.get_running_loop()
        while self._open:
            self._event.clear()
            ended = await self._look()
            if ended:
                return ended
            now = loop.time()
            if until is not None and now >= until:
                break
            patience = self._pace.pause(trust=self._engine.hub.trust)
            await wait_for(self._event, patience if until is None else min(patience, until - now))
        return []

    async def _look(self) -> list[InvocationRecord]:
        """Read invocations whose end was hinted; if there are none, the first open ones, and others in turn."""
        asked = [self._open[id] for id in islice(self._announced, MOST_AT_ONCE) if id in self._open]
        for id in list(islice(self._announced, MOST_AT_ONCE)):
            del self._announced[id]
        if not asked:
            start, self._turn = self._turn, (self._turn + WINDOW) % max(1, len(self._open))
            window = {**dict(islice(self._open.items(), WINDOW)), **dict(islice(self._open.items(), start, self._turn))}
            asked = list(window.values())
        ended = list((await self._engine.watcher.ends(asked, 0.0)).values())
        for record in ended:
            del self._open[record.id]
        if self._announced:
            self._event.set()
        return ended
