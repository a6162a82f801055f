"""Events: stored with the triggers that want to hear of them, told at once, kept for a while with what they caused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.engine.ending import end_all
from holdfast.engine.submit import until_over
from holdfast.engine.subscriptions import Subscriptions
from holdfast.engine.telling import Teller
from holdfast.errors import CorruptRecord, EventNotFound, StoreError
from holdfast.lifecycle.events import KEY_KIND, KIND, EventRecord, from_entry, key_entry, to_entry
from holdfast.lifecycle.records import Entry
from holdfast.lifecycle.triggers import TriggerRecord
from holdfast.lifecycle.triggers import to_entry as trigger_entry
from holdfast.store.contract import Store, Transaction

log = logging.getLogger("holdfast.triggers")


Steps = Generator[Sequence[Entry], Sequence[Entry | None], EventRecord]


class Events:
    def __init__(self, store: Store, subscriptions: Subscriptions, teller: Teller, *, app: str) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._teller = teller
        self._app = app
        self._waiting: set[asyncio.Task[None]] = set()

    async def emit(self, event: EventRecord, own: Sequence[TriggerRecord] = ()) -> EventRecord:
        """Store it and tell its triggers. Once it is stored, they will be told, whatever happens here. `own` are the
        emitter's triggers that may not be known yet.

        With a key that was used before, the event of that time.
        """
        event = await self.addressed(event, own)
        if event.key:
            event = await self._first_of_its_key(event)
        stored = await self._store.put_entry(to_entry(event))
        crashpoint("event.stored")
        if not stored and event.key:
            entries = await self._store.entries(self._app, KIND, [event.id])
            with contextlib.suppress(CorruptRecord):
                return from_entry(entries[0]) if entries else event  # it was told of then
            return event
        try:
            return await self.tell(event)
        except StoreError as error:
            log.warning("the event '%s' %s is stored, and triggers are told later: %s", event.name, event.id, error)
            return event

    # --- in a user's own transaction

    async def addressed(self, event: EventRecord, own: Sequence[TriggerRecord]) -> EventRecord:
        """The event with the names of those who want to hear of it, and of the emitter's own triggers that do."""
        await self._subscriptions.freshen()
        names = [*self._subscriptions.of_event(event.name), *[each.name for each in own if each.wants(event.name)]]
        return replace(event, outbox=tuple(dict.fromkeys(names)))

    async def announce(
        self, transaction: Transaction, event: EventRecord, declare: Callable[[], Awaitable[object]]
    ) -> None:
        """Tell the triggers once the transaction is over, if the event is there then; else the services do."""
        self._waiting.add(task := asyncio.create_task(self._tell_after(transaction, event, declare)))
        task.add_done_callback(self._waiting.discard)

    async def _tell_after(
        self, transaction: Transaction, event: EventRecord, declare: Callable[[], Awaitable[object]]
    ) -> None:
        await until_over(transaction)
        try:
            if entries := await self._store.entries(self._app, KIND, [event.id]):
                await declare()
                await self.tell(from_entry(entries[0]))
        except StoreError as error:
            log.warning("the triggers of the event '%s' %s are told later: %s", event.name, event.id, error)

    async def close(self) -> None:
        """Those whose transactions are not over are not waited for: the services tell of their events."""
        await end_all(*self._waiting)

    async def _first_of_its_key(self, event: EventRecord) -> EventRecord:
        """The one that has this key; a key whose time is over counts no more, whether it was removed already or not."""
        entry = key_entry(event)
        for _ in range(_TRIES):
            if await self._store.put_entry(entry):
                return event
            there = await self._store.entries(self._app, KEY_KIND, [entry.name])
            if there:
                try:
                    first = from_entry(there[0])
                except CorruptRecord as error:
                    await self._store.quarantine_entry(there[0], error)
                    continue
                if first.keep_until > self._store.now():
                    return replace(first, version=event.version)
                await self._store.remove_entry(there[0])
        raise StoreError(
            f"the key '{event.key}' of the event '{event.name}' is used by others again and again; try again"
        )

    async def tell(self, event: EventRecord) -> EventRecord:
        """Tell the triggers in its outbox, and write down what they made of it."""
        if not event.outbox:
            return event
        (caused,) = await self._teller.tell([(event.facts, event.outbox)])
        after = replace(event, outbox=(), caused=(*event.caused, *caused), version=event.version + 1)
        if not await self._store.put_entry(to_entry(after)):
            log.debug("the event %s was told by somebody else as well", event.id)
        crashpoint("event.told")
        return after

    async def get(self, id: str) -> EventRecord:
        entries = await self._store.entries(self._app, KIND, [id])
        if not entries:
            raise EventNotFound(f"the store has no event {id} of the app '{self._app}'")
        return from_entry(entries[0])

    async def latest(self, limit: int, *, name: str = "", before: str | None = None) -> list[EventRecord]:
        """Newest first."""
        found: list[EventRecord] = []
        while len(found) < limit:
            page = await self._store.latest_entries(self._app, KIND, _PAGE, before)
            for entry in page:
                try:
                    event = from_entry(entry)
                except CorruptRecord as error:
                    log.error("%s", error)
                    continue
                if not name or event.name == name:
                    found.append(event)
            if len(page) < _PAGE:
                break
            before = page[-1].name
        return found[:limit]


def emission(event: EventRecord, new: Sequence[TriggerRecord]) -> Steps:
    """What is put into a user's transaction, step by step: each is told what was there already. Returns the event; with
    a key that was used before, the event of that time. The same for a blocking session and for one that is awaited.
    """
    if event.key:
        (there,) = yield [key_entry(event)]
        if there is not None:
            event = replace(from_entry(there), version=event.version, outbox=event.outbox)
    *_, before = yield [*[trigger_entry(each) for each in new], to_entry(event)]
    return event if before is None else from_entry(before)


_PAGE = 200
_TRIES = 5
