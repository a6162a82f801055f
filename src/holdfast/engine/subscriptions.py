"""What this process knows of the triggers in the store.

Whoever ends an invocation or emits an event has to know which triggers want to hear of it, since their names are part
of that write. The copy is read anew before such a write if it is older than two seconds: first a single small record
with the version of all triggers, and these only if that has changed. One who writes all the time reads it ahead, beside
that, and does not wait. So a trigger counts everywhere two seconds after
it is stored, a process with nothing to tell asks nothing, and one that is busy asks once in two seconds.

The version is a digest of what is there, and not a number, so that a crash between the triggers and their version
leaves nothing to count on: whoever starts next, or tends to the triggers, sees that it is wrong and writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence

from holdfast.engine.ending import end_all
from holdfast.engine.outages import Seldom
from holdfast.errors import CorruptRecord, StoreError
from holdfast.lifecycle.records import Entry
from holdfast.lifecycle.status import Status
from holdfast.lifecycle.triggers import KIND, OnEvent, TriggerRecord, from_entry
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.triggers")

FRESH_SECONDS = 2.0
VERSION_KIND = "triggers"
_VERSION = "version"
_TRIES = 20


class Subscriptions:
    def __init__(self, store: Store, *, app: str, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._app = app
        self._monotonic = monotonic
        self._read_at = float("-inf")
        self._version = b""
        self._by_name: dict[str, TriggerRecord] = {}
        self._by_end: dict[tuple[str, Status], tuple[str, ...]] = {}
        self._by_event: dict[str, tuple[str, ...]] = {}
        self._seldom = Seldom(monotonic)
        self._renewal: asyncio.Task[None] | None = None

    @property
    def are_fresh(self) -> bool:
        return self._monotonic() - self._read_at <= FRESH_SECONDS

    async def freshen(self) -> None:
        """Read what has changed, unless somebody did so a moment ago."""
        if not self.are_fresh:
            await self._look()

    def renew(self) -> None:
        """Read soon, beside whatever is done, if the copy is about to be too old: a writer of ends that never stops
        never has to wait for it.
        """
        if self._monotonic() - self._read_at > FRESH_SECONDS / 2 and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        with contextlib.suppress(StoreError):  # then it is too old soon, and somebody waits for it
            await self._look()

    async def close(self) -> None:
        if self._renewal is not None:
            await end_all(self._renewal)

    async def _look(self) -> None:
        began = self._monotonic()
        version = await self._stored_version()
        if version != self._version:
            self._take(await self._store.entries(self._app, KIND))
            self._version = version
        self._read_at = began

    def forget(self) -> None:
        self._read_at = float("-inf")

    def __len__(self) -> int:
        return len(self._by_name)

    def of_end(self, task: str, status: Status) -> tuple[str, ...]:
        """The names of the triggers that want to hear of such an end."""
        return self._by_end.get((task, status), ())

    def of_event(self, name: str) -> tuple[str, ...]:
        return self._by_event.get(name, ())

    async def get(self, names: Iterable[str]) -> dict[str, TriggerRecord]:
        """These, retired or not; those that are gone, or cannot be read, are left out."""
        wanted = dict.fromkeys(names)
        found = {name: self._by_name[name] for name in wanted if name in self._by_name}
        missing = [name for name in wanted if name not in found]
        if missing:
            found |= {record.name: record for record in self._read(await self._store.entries(self._app, KIND, missing))}
        return found

    async def all(self) -> list[TriggerRecord]:
        return self._read(await self._store.entries(self._app, KIND))

    async def publish(self) -> None:
        """Write the version of what is stored, if it is not that."""
        for _ in range(_TRIES):
            known = await self._store.entries(self._app, VERSION_KIND, [_VERSION])
            version = _digest(await self._store.entries(self._app, KIND))
            if known and known[0].body == version:
                break
            number = known[0].version + 1 if known else 1
            fresh = Entry(app=self._app, kind=VERSION_KIND, name=_VERSION, body=version, version=number)
            if await self._store.put_entry(fresh):
                break
        self.forget()

    async def _stored_version(self) -> bytes:
        known = await self._store.entries(self._app, VERSION_KIND, [_VERSION])
        return known[0].body if known else b""

    def _read(self, entries: Sequence[Entry]) -> list[TriggerRecord]:
        records = []
        for entry in entries:
            try:
                records.append(from_entry(entry))
            except CorruptRecord as error:
                if self._seldom.is_due(entry.name):
                    log.error("%s; it does not fire", error)
        return records

    def _take(self, entries: Sequence[Entry]) -> None:
        active = [record for record in self._read(entries) if record.retired_at is None]
        ends: dict[tuple[str, Status], dict[str, None]] = {}
        events: dict[str, dict[str, None]] = {}
        for record in active:
            for each in record.conditions:
                if isinstance(each, OnEvent):
                    events.setdefault(each.name, {})[record.name] = None
                else:
                    for key in [(task, status) for task in each.tasks for status in each.statuses]:
                        ends.setdefault(key, {})[record.name] = None
        self._by_name = {record.name: record for record in active}
        self._by_end = {key: tuple(names) for key, names in ends.items()}
        self._by_event = {name: tuple(names) for name, names in events.items()}


def _digest(entries: Sequence[Entry]) -> bytes:
    said = "\n".join(f"{entry.name} {entry.version}" for entry in entries)
    return b'"' + hashlib.sha256(said.encode()).hexdigest()[:32].encode() + b'"'
