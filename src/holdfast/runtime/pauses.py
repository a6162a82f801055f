"""Paused queues. A pause is an entry of the store, and each change of it is conditional on the version that was read.

A runner reads the pauses when it starts, after a hint, and after each heartbeat interval (five of them while hints are
reliable). Its workers get them with their permit. So a pause reaches every runner at once where hints arrive, and
within five heartbeats if one is lost; a worker knows of all pauses before its first claim. While the store is away, the
last known pauses hold.
"""

from __future__ import annotations

import asyncio

from holdfast.errors import CorruptRecord
from holdfast.model import queues
from holdfast.model.decoding import PAUSE
from holdfast.model.queues import QueuePause
from holdfast.model.records import PAUSES, Entry
from holdfast.runtime.claim import Permit
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import look_after, wait_for
from holdfast.store.contract import Store
from holdfast.telemetry.events import DutyFailed, QueuePaused, QueueResumed


async def pause_queue(store: Store, wanted: QueuePause) -> QueuePause | None:
    """Pause a queue. Return the pause that is in force: this one, or an earlier one, which stays as it is. None: this
    operation was carried out before, and the queue was resumed since.
    """
    while True:
        before = await _entry(store, wanted.app, wanted.name)
        if before is None:
            # To pause is to change an entry: on MongoDB, a submitter may insert entries and not change them.
            await store.put_entry(queues.unpaused(wanted.app, wanted.name))
            continue
        if (in_force := queues.pause_of(before)) is not None:
            return in_force
        if wanted.operation in queues.state_of(before).operations:
            return None
        if await store.put_entry(queues.paused(wanted, before), before):
            return wanted


async def resume_queue(store: Store, app: str, name: str, operation: str) -> bool:
    """End the pause of a queue. Return False if it was not paused; repeated with the same operation, True again."""
    while True:
        before = await _entry(store, app, name)
        if before is None:
            return False
        state = queues.state_of(before)
        if state.paused_at is None or operation in state.operations:
            return operation in state.operations
        if await store.put_entry(queues.resumed(before, operation), before):
            return True


async def pauses_of(store: Store, app: str) -> list[QueuePause]:
    """Return the pauses in force, in the order of the queues' names. Entries that cannot be read are quarantined."""
    found = []
    for entry in await store.entries(app, PAUSE):
        try:
            found.append(queues.pause_of(entry))
        except CorruptRecord as error:
            await store.quarantine_entry(entry, error)
    return [pause for pause in found if pause is not None]


async def _entry(store: Store, app: str, name: str) -> Entry | None:
    for entry in await store.entries(app, PAUSE, [name]):
        try:
            queues.state_of(entry)
            return entry
        except CorruptRecord as error:  # it makes room, unless this user may not move it
            if not await store.quarantine_entry(entry, error):
                raise
    return None


_MAX_TRUST = 5  # heartbeats without a look, while hints arrive


class PauseWatch:
    def __init__(self, engine: Engine, permit: Permit) -> None:
        self._store = engine.store
        self._hub = engine.hub
        self._app = engine.app
        self._every = engine.settings.runner_heartbeat_seconds
        self._permit = permit
        self._notified = asyncio.Event()
        self._unsubscribe = self._hub.on(PAUSES, lambda hint: self._notified.set())  # before the first look

    async def look(self, again: bool = False) -> None:
        paused = frozenset(pause.name for pause in await pauses_of(self._store, self._app))
        before = self._permit.paused
        self._permit.pause(paused)
        for event, names in ((QueuePaused, paused - before), (QueueResumed, before - paused)):
            for queue in sorted(names):
                self._hub.telemetry.emit(event(queue))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            trusted = max(1, min(self._hub.trust, _MAX_TRUST))
            await wait_for(self._notified, look_after(self._every * trusted))
            self._notified.clear()
            try:
                await self.look()
            except Exception as error:
                self._hub.telemetry.emit(DutyFailed("runner", "look which queues are paused", error))

    def close(self) -> None:
        """Hear no more hints."""
        self._unsubscribe()
