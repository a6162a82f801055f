"""The copy of the stored triggers in this process.

The names of its triggers are part of the write of an end or an event, so every writer needs a copy of the triggers. A
copy older than two seconds is refreshed before such a write: first a single small record with the version of all
triggers, and the triggers only if it has changed. A busy process refreshes ahead of time, without waiting. So a trigger
takes effect everywhere two seconds after it is stored, and an idle process reads nothing.

The version is a digest of the stored triggers, not a number: after a crash between the triggers and their version, the
next runner or duty finds the version wrong and writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Sequence

from holdfast.errors import CorruptRecord, StoreError
from holdfast.model.records import Entry
from holdfast.model.status import Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import cancel_tasks
from holdfast.telemetry.events import DeclarationUnreadable
from holdfast.triggers.rules import KIND, OnEvent, TriggerRecord, from_entry

FRESH_SECONDS = 2.0
VERSION_KIND = "triggers"
_VERSION = "version"
_TRIES = 20


class Subscriptions:
    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self.telemetry = engine.telemetry
        self._app = engine.app
        self._monotonic = engine.clock.monotonic
        self._read_at = float("-inf")
        self.none_until = float("-inf")  # until then there are no triggers, and nothing is to be read
        self._version = b""
        self._by_name: dict[str, TriggerRecord] = {}
        self._by_end: dict[tuple[str, Status], tuple[str, ...]] = {}
        self._by_event: dict[str, tuple[str, ...]] = {}
        self._renewal: asyncio.Task[None] | None = None

    @property
    def is_fresh(self) -> bool:
        return self._monotonic() - self._read_at <= FRESH_SECONDS

    async def refresh(self) -> None:
        """Read changed triggers, unless the copy is fresh."""
        if not self.is_fresh:
            await self._look()

    def renew(self) -> None:
        """Read soon, beside whatever is done, if the copy is about to be too old: a writer of ends that never stops
        never has to wait for it.
        """
        if self._monotonic() - self._read_at > FRESH_SECONDS / 2 and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        with contextlib.suppress(StoreError):  # the next writer refreshes and waits
            await self._look()

    async def close(self) -> None:
        if self._renewal is not None:
            await cancel_tasks(self._renewal)

    async def _look(self) -> None:
        began = self._monotonic()
        known = await self._store.entries(self._app, VERSION_KIND, [_VERSION])
        version = known[0].body if known else b""
        if version != self._version:
            self._take(await self._store.entries(self._app, KIND))
            self._version = version
        self._read_at = began
        self.none_until = float("-inf") if self._by_name else began + FRESH_SECONDS / 2

    def __len__(self) -> int:
        return len(self._by_name)

    def of_end(self, task: str, status: Status) -> tuple[str, ...]:
        """Return the names of the triggers that subscribe to such an end."""
        return self._by_end.get((task, status), ())

    def of_event(self, name: str) -> tuple[str, ...]:
        return self._by_event.get(name, ())

    async def get(self, names: Iterable[str]) -> dict[str, TriggerRecord]:
        """Return these triggers by name, retired or not, if they are there and readable."""
        wanted = dict.fromkeys(names)
        found = {name: self._by_name[name] for name in wanted if name in self._by_name}
        missing = [name for name in wanted if name not in found]
        if missing:
            found |= {record.name: record for record in self._read(await self._store.entries(self._app, KIND, missing))}
        return found

    async def all(self) -> list[TriggerRecord]:
        return self._read(await self._store.entries(self._app, KIND))

    async def publish(self) -> None:
        """Write the version of the stored triggers, if it has changed."""
        for _ in range(_TRIES):
            known = await self._store.entries(self._app, VERSION_KIND, [_VERSION])
            version = _digest(await self._store.entries(self._app, KIND))
            if known and known[0].body == version:
                break
            number = known[0].version + 1 if known else 1
            fresh = Entry(app=self._app, kind=VERSION_KIND, name=_VERSION, body=version, version=number)
            if await self._store.put_entry(fresh):
                break
        self._read_at = self.none_until = float("-inf")

    def _read(self, entries: Sequence[Entry]) -> list[TriggerRecord]:
        records = []
        for entry in entries:
            try:
                records.append(from_entry(entry))
            except CorruptRecord as error:
                self.telemetry.emit(DeclarationUnreadable("triggers", "so a trigger does not fire", str(error)))
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
