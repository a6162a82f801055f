"""Retention: remove ended invocations after their retention time.

Each batch has a bounded size and is its own write, so that other writers do not wait long. A store that removes by
itself (`Ability.TTL`) removes what has no logs: those of runs and streams have to go before their invocation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from holdfast.fleet.services import Duty
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Store
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import Removed

AT_ONCE = 500
_BATCHES = 20  # removed in one look; then other duties have their turn
_REMOVE_SECONDS = 60.0


class Retention:
    """A feature of a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def register(self) -> None:
        """Do nothing: no code declares anything here."""

    def duties(self) -> Sequence[Duty]:
        store, app = self._engine.store, self._engine.app
        remove = functools.partial(remove_expired, store, app, self._engine.telemetry)
        return (Duty(name="retention", every_seconds=_REMOVE_SECONDS, perform=remove),)


async def remove_expired(store: Store, app: str, telemetry: Telemetry) -> bool:
    """Remove expired records. Return True if there may be more."""
    removed, more = 0, True
    for _ in range(_BATCHES):
        count = await store.remove_expired(app, store.now(), AT_ONCE)
        removed += count
        if count < AT_ONCE:
            more = False
            break
    if removed:
        telemetry.emit(Removed(removed))
    return more
