"""The duty `streams`: chunks that need not be kept longer are removed, before their invocation.

Each stream has an entry, which is due when it is to be looked at: a day after its creation, when its chunks are to be
removed, and when its invocation is. With `stream_retention_seconds`, chunks go so long after the end of their
invocation. The entry says so before they do, and stays until the invocation is gone: a reader gets `StreamGone`, not
silence. Without that setting, the store removes chunks together with their invocation, and only the entry is left here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.fleet.services import Duty
from holdfast.ids import InvocationId
from holdfast.model.records import Entry, InvocationRecord
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import EntryOrder
from holdfast.streams.records import KIND, StreamEntry, entry_of, read_entry
from holdfast.streams.rules import LOOK_AGAIN_SECONDS, look_again_after
from holdfast.telemetry.events import StreamsRemoved

EVERY_SECONDS = 60.0
_AT_ONCE = 200
_AFTER_SECONDS = 60.0  # its time to be kept, then its invocation should be gone


class StreamUpkeep:
    """A feature of a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._kept_seconds = engine.settings.stream_retention_seconds

    async def register(self) -> None:
        """Do nothing: no code declares anything here."""

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="streams", every_seconds=EVERY_SECONDS, perform=self.sweep),)

    async def sweep(self) -> bool:
        """Look at the entries that are due. Return True if there may be more."""
        app, now = self._engine.app, self._store.now()
        found = await self._store.entries(app, KIND, order=EntryOrder.DUE, limit=_AT_ONCE)
        due = [entry for entry in found if entry.due_at is not None and entry.due_at <= now]
        ids = [InvocationId(entry.name.partition("/")[0]) for entry in due]
        records = await get_readable(self._store, app, ids) if due else []
        removed = 0
        for entry, record in zip(due, records, strict=True):
            try:
                removed += await self._look(entry, read_entry(entry), record, now)
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        if removed:
            self._engine.telemetry.emit(StreamsRemoved(removed))
        return len(due) == _AT_ONCE

    async def _look(self, entry: Entry, stream: StreamEntry, record: InvocationRecord | None, now: float) -> int:
        """Do what is due for a stream. Return how many were removed: 1 or 0."""
        if record is None and await self._is_damaged(entry):
            await self._put(entry, stream, now + LOOK_AGAIN_SECONDS)
            return 0
        if record is None:
            await self._remove_chunks(entry)
            await self._store.remove_entry(entry)
            return 0 if stream.gone else 1
        gone_at = self._gone_at(record)
        if gone_at is not None and gone_at <= now and not stream.gone:
            pages = await self._store.read_log(entry.app, InvocationId(entry.name), limit=1, latest=True)
            marked = msgspec.structs.replace(stream, gone=True, last=pages[0].last if pages else 0)
            if not await self._put(entry, marked, now):  # due at once: until the chunks are removed
                return 0
            entry, stream = msgspec.structs.replace(entry, version=entry.version + 1), marked
        if stream.gone:
            await self._remove_chunks(entry)
        await self._put(entry, stream, self._next_look(record, stream, now))
        return int(stream.gone)

    async def _is_damaged(self, entry: Entry) -> bool:
        """Return whether the invocation is there, and cannot be read; or is in quarantine."""
        id = InvocationId(entry.name.partition("/")[0])
        try:
            await self._store.get(entry.app, [id])
        except CorruptRecord:
            return True
        return bool(await self._store.quarantined(entry.app, id))

    def _gone_at(self, record: InvocationRecord) -> float | None:
        """Return when the chunks are to be removed before their invocation is; None: not by now."""
        return record.changed_at + self._kept_seconds if record.status in FINAL else None

    def _next_look(self, record: InvocationRecord, stream: StreamEntry, now: float) -> float:
        """Return when to look again: when something is to be removed, but within a day, since much may change."""
        if record.status not in FINAL:
            return now + look_again_after(self._kept_seconds)
        times = [now + LOOK_AGAIN_SECONDS]
        times += [record.retain_until + _AFTER_SECONDS] if record.retain_until is not None else []
        times += [record.changed_at + self._kept_seconds] if not stream.gone else []
        return max(now + EVERY_SECONDS, min(times))

    async def _put(self, entry: Entry, stream: StreamEntry, due_at: float) -> bool:
        return await self._store.put_entry(entry_of(entry.app, entry.name, stream, due_at, entry.version + 1))

    async def _remove_chunks(self, entry: Entry) -> None:
        await self._store.remove_log(entry.app, InvocationId(entry.name), before=1)
