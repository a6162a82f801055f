"""Which queues are paused: a runner looks when it starts, when it is told, and as often as its heart beats.

It tells its workers by their permit. So a pause reaches every runner at once where hints arrive, and after a heartbeat
where they do not; and a worker knows of all pauses before its first claim. While the store is away, what was known
last holds.
"""

from __future__ import annotations

import asyncio
import logging

from holdfast.engine.outages import repeated
from holdfast.engine.permit import Permit
from holdfast.errors import StoreError
from holdfast.store.contract import Store
from holdfast.wakeup.fallback import look_after
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.runner")


class PauseWatch:
    def __init__(self, store: Store, hub: Hub, permit: Permit, *, app: str, every_seconds: float) -> None:
        self._store = store
        self._hub = hub
        self._permit = permit
        self._app = app
        self._every = every_seconds
        self._told = asyncio.Event()

    async def look(self, again: bool = False) -> None:
        paused = frozenset(pause.name for pause in await self._store.pauses(self._app))
        before = self._permit.paused
        self._permit.pause(paused)
        for what, queues in (("paused", paused - before), ("resumed", before - paused)):
            for queue in sorted(queues):
                log.info("the queue '%s' is %s", queue, what)

    async def run(self) -> None:
        """Look until cancelled."""
        unsubscribe = self._hub.on_pauses(self._told.set)
        try:
            while True:
                try:
                    async with asyncio.timeout(look_after(self._every)):
                        await self._told.wait()
                except TimeoutError:
                    pass
                self._told.clear()
                try:
                    with repeated():
                        await self.look()
                except StoreError as error:
                    log.debug("the pauses of queues were not read: %s", error)
                except Exception:
                    log.exception("while looking which queues are paused")
        finally:
            unsubscribe()
