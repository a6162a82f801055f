"""Triggers in the store: put there when a runner starts, tended to by the services.

As with declared schedules, a trigger that no living runner declares, although one knows its task or module, is
retired: it fires no more, and is kept. Its name contains a digest of its conditions, so a changed trigger is a new one.

The sweep dispatches what a crash has left: ended invocations and events with an outbox, and joins that are complete. It
waits two seconds for their writer to do so; dispatching twice is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from msgspec.structs import replace

from holdfast.errors import CorruptRecord, StoreReadOnly, StoreUnavailable
from holdfast.fleet.services import Duty
from holdfast.model.records import Entry, InvocationRecord
from holdfast.runtime.engine import Engine
from holdfast.store.contract import EntryOrder, Filter, Order
from holdfast.telemetry.events import (
    DeclarationRestored,
    DeclarationRetired,
    PutOff,
    TriggersLoop,
    TriggersNotPublished,
)
from holdfast.triggers import events, joins
from holdfast.triggers.dispatch import TriggerDispatcher
from holdfast.triggers.outbox import Events, TriggerOutbox
from holdfast.triggers.rules import KIND, TriggerRecord, cycles, from_entry, to_entry
from holdfast.triggers.subscriptions import Subscriptions

_SWEEP_SECONDS = 2.0
_LOOK_SECONDS = 15.0  # whether there are triggers now
_IDLE_SECONDS = 10.0  # ends of calls that others follow
_RUNS_SECONDS = 5.0  # ends of children that their parents wait for
_THOROUGH_SECONDS = 60.0
_PUT_OFF_SECONDS = 60.0
_REST_SECONDS = 15.0
_AT_ONCE = 100


class TriggerRegistry:
    """A feature of a runner: store the triggers that code declares, retire triggers that no code declares."""

    def __init__(self, engine: Engine, declared: Sequence[TriggerRecord], *, has_runs: bool = False) -> None:
        self._engine = engine
        self._has_runs = has_runs
        self._store = engine.store
        self._subscriptions = engine.part(Subscriptions)
        self._emit = engine.telemetry.emit
        self._declared = {each.name: each for each in declared}
        self._app = engine.app

    @property
    def declares(self) -> tuple[str, ...]:
        return tuple(f"trigger:{name}" for name in self._declared)

    def duties(self) -> Sequence[Duty]:
        return (
            Duty(name="triggers", every_seconds=1.0, perform=Sweep(self._engine, has_runs=self._has_runs).sweep),
            Duty(name="declared triggers", every_seconds=60.0, perform=self.retire),
        )

    async def register(self) -> None:
        for each in self._declared.values():
            await self._ensure(each)
        if self._declared:
            await self._subscriptions.publish()
            for circle in cycles(list(self._declared.values())):
                self._emit(TriggersLoop(" → ".join(circle)))

    async def split_declared(self) -> tuple[list[TriggerRecord], list[TriggerRecord]]:
        """Return the declared triggers that were never stored, and the stored ones that are not retired."""
        if not self._declared:
            return [], []
        stored = await self._subscriptions.get(self._declared)
        now = self._store.now()
        missing = [replace(each, created_at=now) for name, each in self._declared.items() if name not in stored]
        return missing, [each for each in stored.values() if each.retired_at is None]

    async def store_missing(self) -> list[TriggerRecord]:
        """Store declared triggers that are missing, for a program that emits and never had a runner. Retired triggers
        stay retired: the runners' code decides.

        Return the triggers that other processes may not know, because this user may not publish a new version.
        """
        missing, stored = await self.split_declared()
        for each in missing:
            await self._store.put_entry(to_entry(each))
        if self._declared:
            try:
                await self._subscriptions.publish()
            except StoreReadOnly as error:
                self._emit(TriggersNotPublished(str(error)))
                return [*missing, *stored]
        return []

    async def _ensure(self, declared: TriggerRecord) -> None:
        while True:
            entries = await self._store.entries(self._app, KIND, [declared.name])
            fresh = replace(declared, created_at=self._store.now())
            if entries:
                fresh = replace(fresh, version=entries[0].version + 1)
                try:
                    there = from_entry(entries[0])
                except CorruptRecord as error:
                    self._emit(DeclarationRestored("triggers", f"trigger '{declared.name}'", str(error)))
                else:
                    fresh = replace(fresh, created_at=there.created_at)
                    if replace(fresh, version=there.version) == there:
                        return
            if await self._store.put_entry(to_entry(fresh)):
                return

    async def retire(self) -> None:
        """Retire triggers that no code declares, revive declared triggers, and store damaged ones again."""
        stored = await self._subscriptions.all()
        gone = set(self._declared) - {record.name for record in stored}
        if gone:  # an unreadable entry stays: a newer version may have written it
            gone -= {entry.name for entry in await self._store.entries(self._app, KIND, sorted(gone))}
        for name in sorted(gone):
            self._emit(DeclarationRestored("triggers", f"trigger '{name}'", "it was damaged and quarantined"))
            await self._ensure(self._declared[name])
        if gone:
            stored = await self._subscriptions.all()
        if stored:
            roster = await self._store.roster(self._app)
            declared = {name for runner in roster for name in runner.declares}
            known = {task for runner in roster for task in runner.tasks}
            for record in stored:
                rests = f"trigger:{record.name}" not in declared
                has_module = not known.isdisjoint((record.call.task, *record.module_tasks))
                if rests and record.retired_at is None and has_module:
                    self._emit(DeclarationRetired("triggers", f"trigger '{record.name}'"))
                    await self._rest(record, self._store.now())
                elif not rests and record.retired_at is not None:
                    await self._rest(record, None)
            await self._subscriptions.publish()

    async def _rest(self, record: TriggerRecord, retired_at: float | None) -> None:
        await self._store.put_entry(to_entry(replace(record, retired_at=retired_at, version=record.version + 1)))


class Sweep:
    """Dispatches outboxes and joins that a crash has left. Without triggers there are none, unless workflows have
    children: then ends are looked at every few seconds (`has_runs`).
    """

    def __init__(self, engine: Engine, *, has_runs: bool = False) -> None:
        self._idle_seconds = _RUNS_SECONDS if has_runs else _IDLE_SECONDS
        self._store = engine.store
        self._subscriptions = engine.part(Subscriptions)
        self._emit = engine.telemetry.emit
        self._outbox = engine.part(TriggerOutbox)
        self._events = engine.part(Events)
        self._dispatcher = engine.part(TriggerDispatcher)
        self._app = engine.app
        self._monotonic = monotonic = engine.clock.monotonic
        self._next = float("-inf")
        self._idle_until = monotonic() + self._idle_seconds
        self._thorough_at = monotonic() + _THOROUGH_SECONDS
        self._put_off: dict[str, float] = {}

    async def sweep(self) -> bool:
        """Perform the duty; return True if there may be more. An app without triggers is looked at seldom."""
        if self._monotonic() < self._next:
            return False
        await self._subscriptions.refresh()
        self._next = self._monotonic() + (
            _SWEEP_SECONDS if self._subscriptions else min(_LOOK_SECONDS, self._idle_seconds)
        )
        if not self._subscriptions and self._monotonic() < self._idle_until:
            return False
        self._idle_until = self._monotonic() + self._idle_seconds
        before = self._store.now() - _SWEEP_SECONDS
        if self._monotonic() >= self._thorough_at:  # some may be stamped by a clock that was ahead
            self._thorough_at, before = self._monotonic() + _THOROUGH_SECONDS, float("inf")
        more = await self._ended(before)
        more |= await self._due(events.KIND, self._dispatch_event)
        more |= await self._due(joins.KIND, self._dispatcher.tidy)
        if more:
            self._next = float("-inf")
        return more

    async def _ended(self, before: float) -> bool:
        """Dispatch ends; return True if there may be more. An end that fails is put off."""
        now = self._monotonic()
        self._put_off = {id: until for id, until in self._put_off.items() if until > now}
        limit = _AT_ONCE + len(self._put_off)
        found = await self._store.find(self._app, Filter(until=before), limit, order=Order.OUTBOX, set_aside=True)
        ended = [record for record in found if record.id not in self._put_off][:_AT_ONCE]
        await self._dispatch_ends(ended)
        return len(ended) == _AT_ONCE

    async def _dispatch_ends(self, ended: Sequence[InvocationRecord]) -> None:
        """Dispatch all ends together, or one by one if a batch fails."""
        try:
            return self._put_off_full(await self._outbox.dispatch(ended))
        except StoreUnavailable:
            raise
        except Exception:  # which one it is will be seen below
            pass
        for record in ended:
            try:
                self._put_off_full(await self._outbox.dispatch([record]))
            except StoreUnavailable:
                raise
            except Exception as error:
                what = f"triggers of the end of {record.task} {record.id}"
                self._emit(PutOff("triggers", what, str(error), error))
                self._put_off[record.id] = self._monotonic() + _REST_SECONDS

    def _put_off_full(self, refused: Collection[str]) -> None:
        """Look later at ends whose receiver takes no more now."""
        self._put_off |= dict.fromkeys(refused, self._monotonic() + _SWEEP_SECONDS)

    async def _dispatch_event(self, entry: Entry) -> None:
        await self._events.dispatch(events.from_entry(entry))

    async def _due(self, kind: str, tend: Callable[[Entry], Awaitable[object]]) -> bool:
        now = self._store.now()
        entries = await self._store.entries(self._app, kind, order=EntryOrder.DUE, limit=_AT_ONCE)
        due = [entry for entry in entries if entry.due_at is not None and entry.due_at <= now]
        for entry in due:
            try:
                await tend(entry)
            except StoreUnavailable:
                raise
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
            except Exception as error:  # it must not stand in front of the others for ever
                self._emit(PutOff("triggers", f"triggers of the {kind} '{entry.name}'", str(error), error))
                await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=now + _PUT_OFF_SECONDS))
        return len(due) == _AT_ONCE
