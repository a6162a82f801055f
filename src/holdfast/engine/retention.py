"""Upkeep of the archive: what need not be kept longer is removed.

In batches of a bounded size, each a write of its own, so that nobody waits long for the store. A store that removes by
itself (`Ability.TTL`) is left alone. What a runner of an older version has ended does not say how long it is kept: it
is told once after each start, and again while such a runner is there.
"""

from __future__ import annotations

import logging

from holdfast.engine.services import Duty
from holdfast.store.contract import Ability, Store

log = logging.getLogger("holdfast.retention")

AT_ONCE = 500
_BATCHES = 20  # that one look removes; then others have their turn
_REMOVE_SECONDS = 60.0
_OLD_SECONDS = 3600.0


def upkeep(store: Store, app: str) -> tuple[Duty, ...]:
    """The duties of the services for the archive of this app."""
    old = Duty(name="old ends", every_seconds=_OLD_SECONDS, perform=OldEnds(store, app).look)
    if Ability.TTL in store.abilities:
        return (old,)

    async def remove() -> bool:
        return await remove_expired(store, app)

    return old, Duty(name="retention", every_seconds=_REMOVE_SECONDS, perform=remove)


async def remove_expired(store: Store, app: str) -> bool:
    """Remove what is over; whether there may be more."""
    removed, more = 0, True
    for _ in range(_BATCHES):
        count = await store.remove_expired(app, store.now(), AT_ONCE)
        removed += count
        if count < AT_ONCE:
            more = False
            break
    if removed:
        log.info("removed %d invocations and entries that need not be kept longer", removed)
    return more


class OldEnds:
    """Walks once through what has ended, and again while somebody ends work without saying how long it is kept."""

    def __init__(self, store: Store, app: str) -> None:
        self._store = store
        self._app = app
        self._after: str | None = ""

    async def look(self) -> bool:
        """Look at the next few; whether there may be more."""
        if self._after is None:
            roster = await self._store.roster(self._app)
            if all(runner.schema >= self._store.schema_version for runner in roster):
                return False
            self._after = ""
        self._after = await self._store.retain_old(self._app, self._after, AT_ONCE)
        return self._after is not None
