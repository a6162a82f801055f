"""Outboxes: an end or an event is stored with the names of its triggers, which are dispatched after that.

The names are part of the same write, so a crash right after it loses none: the services find the outbox. Dispatch runs
beside the other work of the writer, and emptying the outbox comes last. Where no trigger listens, an end costs two
lookups in memory, and one small read in two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from holdfast.clock import moment
from holdfast.codec import Codec, Payload, references
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, EventNotFound, StoreError
from holdfast.ids import InvocationId
from holdfast.model.changes import Applied, Change, Verdict, delivered
from holdfast.model.records import Entry, InvocationRecord, StoredPayload
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import COUNTED_AT_ONCE, Engine, Outbox
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.submit import until_over
from holdfast.runtime.wait import entry_set_aside, get_readable
from holdfast.schedules.records import ScheduleRecord
from holdfast.schedules.rules import invocation_id
from holdfast.store.contract import EntryOrder, Transaction
from holdfast.telemetry.events import (
    ChangedMeanwhile,
    ChangesWritten,
    DeclarationUnreadable,
    DispatchedLater,
    DutyFailed,
)
from holdfast.triggers.dispatch import TriggerDispatcher
from holdfast.triggers.events import KEY_KIND, KIND, EventRecord, from_entry, key_entry, to_entry
from holdfast.triggers.rules import Facts, TriggerRecord
from holdfast.triggers.rules import to_entry as trigger_entry
from holdfast.triggers.subscriptions import Subscriptions

_LAST_SECONDS = 2.0
_ANNOUNCED = (1, COUNTED_AT_ONCE)
_FULL_SECONDS = 2.0  # after which an end is sent again to a run whose inbox was full


class TriggerOutbox(Outbox):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.store)
        self._subscriptions = engine.part(Subscriptions)
        self._dispatcher = engine.part(TriggerDispatcher)
        self._app = engine.app
        self._monotonic = engine.clock.monotonic
        self._telemetry = engine.telemetry
        self._dispatching: set[asyncio.Task[None]] = set()

    async def apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> Sequence[Verdict]:
        """Apply these changes, each to its record; return the verdicts of `Store.apply`."""
        changes = [change for _, change in wanted]
        if self._monotonic() > self._subscriptions.none_until and self._has_end(changes):
            await self._look()
            if self._subscriptions:
                changes = [self._addressed(record, change) for record, change in wanted]
        verdicts = await self._store.apply(changes)
        if self._telemetry.wants(ChangesWritten):
            self._telemetry.emit(ChangesWritten(wanted, verdicts))
        if self.written is not None:
            self.written.append((wanted, verdicts))
            if (so_many := len(self.written)) in _ANNOUNCED:
                self.on_written(so_many)
        written = [
            change.id
            for change, verdict in zip(changes, verdicts, strict=True)
            if change.outbox and isinstance(verdict, Applied)
        ]
        if written:
            crashpoint("outbox.written")
            self.ended(written)
        return verdicts

    def of_end(self, task: str, status: Status) -> tuple[str, ...]:
        return self._subscriptions.of_end(task, status)

    async def _look(self) -> None:
        if self._subscriptions.is_fresh:
            self._subscriptions.renew()
        else:
            await self._subscriptions.refresh()

    async def refusal_outboxes(self, tasks: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        if self._monotonic() > self._subscriptions.none_until:
            await self._look()
        each = {task: self._subscriptions.of_end(task, Status.CONCURRENCY_CONTROLLED_FINAL) for task in tasks}
        return {task: names for task, names in each.items() if names}

    def ended(self, ids: Sequence[InvocationId]) -> None:
        """Deliver soon what the outboxes of these invocations name."""
        self._dispatching.add(task := asyncio.get_running_loop().create_task(self._dispatch_ids(ids)))
        task.add_done_callback(self._dispatching.discard)

    def _has_end(self, changes: Sequence[Change]) -> bool:
        return any(change.path[-1] in FINAL and change.app == self._app for change in changes)

    def _addressed(self, record: InvocationRecord, change: Change) -> Change:
        names = self._subscriptions.of_end(record.task, change.path[-1]) if change.app == self._app else ()
        there = change.outbox or ()
        return replace(change, outbox=(*there, *names)) if names else change

    async def _dispatch_ids(self, ids: Sequence[InvocationId]) -> None:
        try:
            while ids:
                found = await get_readable(self._store, self._app, ids)
                ids = sorted(await self.dispatch([record for record in found if record is not None]))
                if ids:
                    await asyncio.sleep(_FULL_SECONDS)
        except Exception as error:
            duty = f"dispatch triggers of {', '.join(ids[:5])}; the services will"
            self._subscriptions.telemetry.emit(DutyFailed("triggers", duty, error))

    async def dispatch(self, records: Sequence[InvocationRecord]) -> Collection[InvocationId]:
        """Dispatch the triggers in these records' outboxes, then empty the outboxes. Return the ids of records whose
        outbox stays, since a receiver takes no more now.
        """
        refused = set[InvocationId]()
        waiting = [record for record in records if record.outbox]
        if waiting:
            for name, receive in self.receivers.items():
                if named := [record for record in waiting if name in record.outbox]:
                    refused.update(InvocationId(id) for id in await receive(named))
            triggered = [(record, names) for record in waiting if (names := _triggers_in(record.outbox))]
            if triggered:
                await self._dispatcher.dispatch(
                    [(await self._dispatcher.facts_of(record), names) for record, names in triggered]
                )
            await self._store.apply([delivered(record) for record in waiting if record.id not in refused])
            crashpoint("outbox.delivered")
        return refused

    async def get_ready(self) -> None:
        with contextlib.suppress(StoreError):
            await self._subscriptions.refresh()

    async def finish(self) -> None:
        """Give dispatches that are under way a moment; the services make up for the others."""
        if self._dispatching:
            await asyncio.wait(set(self._dispatching), timeout=_LAST_SECONDS)
        await cancel_tasks(*self._dispatching)


def _triggers_in(outbox: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in outbox if not name.startswith("@"))


class Events:
    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self._subscriptions = engine.part(Subscriptions)
        self._dispatcher = engine.part(TriggerDispatcher)
        self._emit = engine.telemetry.emit
        self._payloads = engine.payloads
        self._app = engine.app
        self._waiting: set[asyncio.Task[None]] = set()

    async def emit(
        self, event: EventRecord, own: Sequence[TriggerRecord] = (), large: Sequence[Payload] = ()
    ) -> EventRecord:
        """Store the event and dispatch its triggers; if this fails after the store's write, the services dispatch them.
        `own` are triggers of the emitting program that subscriptions may not have yet, `large` the large values of its
        payload.

        Return the event; with a key that was used before, the event of that time.
        """
        await self.keep(large)
        event = await self.addressed(event, own)
        if event.key:
            event = await self._first_of_its_key(event)
        stored = await self._store.put_entry(to_entry(event))
        crashpoint("event.stored")
        if not stored and event.key:
            entries = await self._store.entries(self._app, KIND, [event.id])
            with contextlib.suppress(CorruptRecord):
                return from_entry(entries[0]) if entries else event  # the first emitter dispatched it
            return event
        try:
            return await self.dispatch(event)
        except StoreError as error:
            self._emit(DispatchedLater("triggers", f"event '{event.name}' {event.id}", str(error)))
            return event

    async def emit_tick(self, schedule: ScheduleRecord, tick: float, now: float) -> EventRecord:
        """Emit the event of a tick, whose id follows from it."""
        return await self.emit(
            EventRecord(
                app=schedule.app,
                id=invocation_id(schedule, tick),
                name=schedule.call.event,
                payload=_codec.encode({"tick": moment(tick)}),
                at=tick,
                keep_until=now + _TICK_KEPT_SECONDS,
                kind="tick",
            )
        )

    async def keep(self, large: Sequence[Payload]) -> None:
        """Store the large values of an event's payload, before the event."""
        if large:
            await self._payloads.keep(large)
            crashpoint("event.kept")

    async def facts_of(self, event: EventRecord) -> Facts:
        """Return the facts of an event, with its payload. Raises `PayloadLost`."""
        wanted = references(event.payload)
        return event.facts_with(await self._payloads.fetch(wanted) if wanted else {})

    # --- in a user's own transaction

    async def addressed(self, event: EventRecord, own: Sequence[TriggerRecord]) -> EventRecord:
        """Return the event with its outbox: the subscribed triggers, and those of `own` that want it."""
        await self._subscriptions.refresh()
        names = [*self._subscriptions.of_event(event.name), *[each.name for each in own if each.wants(event.name)]]
        return replace(event, outbox=tuple(dict.fromkeys(names)))

    async def announce(
        self, transaction: Transaction, event: EventRecord, declare: Callable[[], Awaitable[object]]
    ) -> None:
        """Dispatch the triggers when the transaction is over, if it has committed the event."""
        self._waiting.add(task := asyncio.create_task(self._dispatch_after(transaction, event, declare)))
        task.add_done_callback(self._waiting.discard)

    async def _dispatch_after(
        self, transaction: Transaction, event: EventRecord, declare: Callable[[], Awaitable[object]]
    ) -> None:
        await until_over(transaction)
        try:
            if entries := await self._store.entries(self._app, KIND, [event.id]):
                await declare()
                await self.dispatch(from_entry(entries[0]))
        except StoreError as error:
            self._emit(DispatchedLater("triggers", f"event '{event.name}' {event.id}", str(error)))

    async def close(self) -> None:
        """Stop waiting for open transactions: the services dispatch their events."""
        await cancel_tasks(*self._waiting)

    async def _first_of_its_key(self, event: EventRecord) -> EventRecord:
        """Return the event that holds this key. An expired key does not count, removed or not."""
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

    async def dispatch(self, event: EventRecord) -> EventRecord:
        """Dispatch the triggers in the event's outbox; return the event with what they caused."""
        if not event.outbox:
            return event
        (caused,) = await self._dispatcher.dispatch([(await self.facts_of(event), event.outbox)])
        after = replace(event, outbox=(), caused=(*event.caused, *caused), version=event.version + 1)
        if not await self._store.put_entry(to_entry(after)):
            self._emit(ChangedMeanwhile("triggers", f"event {event.id}"))
        crashpoint("event.told")
        return after

    async def get(self, id: str) -> EventRecord:
        entries = await self._store.entries(self._app, KIND, [id])
        if not entries:
            aside = await entry_set_aside(self._store, self._app, KIND, id)
            raise EventNotFound(f"the store has no event {id} of the app '{self._app}'{aside}")
        return from_entry(entries[0])

    async def latest(self, limit: int, *, name: str = "", before: str | None = None) -> list[EventRecord]:
        """Return kept events, newest first."""
        found: list[EventRecord] = []
        while len(found) < limit:
            page = await self._store.entries(self._app, KIND, order=EntryOrder.LATEST, limit=_PAGE, before=before)
            for entry in page:
                try:
                    event = from_entry(entry)
                except CorruptRecord as error:
                    self._emit(DeclarationUnreadable("triggers", "so an event is left out", str(error)))
                    continue
                if not name or event.name == name:
                    found.append(event)
            if len(page) < _PAGE:
                break
            before = page[-1].name
        return found[:limit]


async def put_event(
    transaction: Transaction, event: EventRecord, new: Sequence[TriggerRecord], stored: Sequence[StoredPayload] = ()
) -> EventRecord:
    """Put an event, its large values, and new triggers into a user's transaction. Suspends only if that is
    asynchronous.

    Return the event; with a key that was used before, the event of that time.
    """

    async def put(*entries: Entry) -> Sequence[Entry | None]:
        if transaction.is_async:
            return await transaction.aput_entries(entries, stored)
        return transaction.put_entries(entries, stored)

    if event.key:
        (there,) = await put(key_entry(event))
        if there is not None:
            event = replace(from_entry(there), version=event.version, outbox=event.outbox)
    *_, before = await put(*[trigger_entry(each) for each in new], to_entry(event))
    return event if before is None else from_entry(before)


_PAGE = 200
_TICK_KEPT_SECONDS = 86_400.0
_codec = Codec()
_TRIES = 5
