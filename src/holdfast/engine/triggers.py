"""Triggers in the store: put there when a runner starts, tended to by the services.

As with declared schedules, a trigger that nobody alive declares any more, although somebody knows its task or its
module, is retired: it fires no more, and is kept. Its name contains a digest of what it says, so a changed trigger is
another one.

The services tell what a crash kept from being told: ended invocations and events with an outbox, and happenings that
are complete. They wait two seconds, so as not to do what its writer is about to do; to do it twice would be harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from holdfast.engine.ends import Ends
from holdfast.engine.events import Events
from holdfast.engine.outages import Seldom
from holdfast.engine.subscriptions import Subscriptions
from holdfast.engine.telling import Teller
from holdfast.errors import CorruptRecord, StoreReadOnly, StoreUnavailable
from holdfast.lifecycle import events, joins
from holdfast.lifecycle.records import Entry, InvocationRecord
from holdfast.lifecycle.triggers import KIND, TriggerRecord, cycles, from_entry, to_entry
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.triggers")

_SWEEP_SECONDS = 2.0
_LOOK_SECONDS = 15.0  # whether there are triggers now
_IDLE_SECONDS = 120.0
_THOROUGH_SECONDS = 60.0
_PUT_OFF_SECONDS = 60.0
_REST_SECONDS = 15.0
_AT_ONCE = 100


class TriggerBook:
    """Stores what code declares, and retires what no code declares any more."""

    def __init__(
        self, store: Store, subscriptions: Subscriptions, declared: Sequence[TriggerRecord], *, app: str
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._declared = {each.name: each for each in declared}
        self._app = app

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"trigger:{name}" for name in self._declared)

    async def register(self) -> None:
        for each in self._declared.values():
            await self._ensure(each)
        if self._declared:
            await self._subscriptions.publish()
            for circle in cycles(list(self._declared.values())):
                log.warning(
                    "these triggers go in a circle: %s. Each round is one more invocation, until trigger_max_depth.",
                    " → ".join(circle),
                )

    async def looked_up(self) -> tuple[list[TriggerRecord], list[TriggerRecord]]:
        """Those that were never stored, and those that are and do not rest."""
        if not self._declared:
            return [], []
        stored = await self._subscriptions.get(self._declared)
        now = self._store.now()
        missing = [replace(each, created_at=now) for name, each in self._declared.items() if name not in stored]
        return missing, [each for each in stored.values() if each.retired_at is None]

    async def store_missing(self) -> list[TriggerRecord]:
        """Store those that never were, for a program that emits and may never have had a runner. What a runner has let
        rest stays so: its code is the one that runs.

        Returns those that others do not know of yet: this user may not say that there is something new.
        """
        missing, stored = await self.looked_up()
        for each in missing:
            await self._store.put_entry(to_entry(each))
        if self._declared:
            try:
                await self._subscriptions.publish()
            except StoreReadOnly as error:
                log.info("runners publish the triggers of this program: %s", error)
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
                    log.warning("%s; it is written anew", error)
                else:
                    fresh = replace(fresh, created_at=there.created_at)
                    if replace(fresh, version=there.version) == there:
                        return
            if await self._store.put_entry(to_entry(fresh)):
                return

    async def retire(self) -> None:
        """Let rest what no code declares any more, and store anew what was damaged. Nobody deletes triggers."""
        stored = await self._subscriptions.all()
        gone = set(self._declared) - {record.name for record in stored}
        if gone:  # what is there and cannot be read stays: a newer version may have written it
            gone -= {entry.name for entry in await self._store.entries(self._app, KIND, sorted(gone))}
        for name in sorted(gone):
            log.warning("store the trigger '%s' anew: it was damaged, and set aside", name)
            await self._ensure(self._declared[name])
        if gone:
            stored = await self._subscriptions.all()
        if stored:
            roster = await self._store.roster(self._app)
            declared = {name for runner in roster for name in runner.declares}
            known = {task for runner in roster for task in runner.tasks}
            for record in stored:
                rests = f"trigger:{record.name}" not in declared
                has_module = not known.isdisjoint((record.call.task, *record.beside))
                if rests and record.retired_at is None and has_module:
                    log.warning("trigger '%s' is no longer declared by any code, and rests", record.name)
                    await self._rest(record, self._store.now())
                elif not rests and record.retired_at is not None:
                    await self._rest(record, None)
            await self._subscriptions.publish()

    async def _rest(self, record: TriggerRecord, retired_at: float | None) -> None:
        await self._store.put_entry(to_entry(replace(record, retired_at=retired_at, version=record.version + 1)))


class Sweep:
    """A duty: tell what nobody was told."""

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions,
        ends: Ends,
        events: Events,
        teller: Teller,
        *,
        app: str,
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._ends = ends
        self._events = events
        self._teller = teller
        self._app = app
        self._monotonic = monotonic
        self._next = float("-inf")
        self._idle_until = monotonic() + _IDLE_SECONDS
        self._thorough_at = monotonic() + _THOROUGH_SECONDS
        self._put_off: dict[str, float] = {}
        self._seldom = Seldom(monotonic)

    async def sweep(self) -> bool:
        """True: there may be more. Where there are no triggers, somebody looks seldom."""
        if self._monotonic() < self._next:
            return False
        await self._subscriptions.freshen()
        self._next = self._monotonic() + (_SWEEP_SECONDS if self._subscriptions else _LOOK_SECONDS)
        if not self._subscriptions and self._monotonic() < self._idle_until:
            return False
        self._idle_until = self._monotonic() + _IDLE_SECONDS
        before = self._store.now() - _SWEEP_SECONDS
        if self._monotonic() >= self._thorough_at:  # some may be stamped by a clock that was ahead
            self._thorough_at, before = self._monotonic() + _THOROUGH_SECONDS, float("inf")
        more = await self._ended(before)
        more |= await self._due(events.KIND, self._tell)
        more |= await self._due(joins.KIND, self._teller.tidy)
        if more:
            self._next = float("-inf")
        return more

    async def _ended(self, before: float) -> bool:
        """Tell of ends. What could not be told must not stand in front of the others: it has a rest."""
        now = self._monotonic()
        self._put_off = {id: until for id, until in self._put_off.items() if until > now}
        found = await self._store.outboxes(self._app, before, _AT_ONCE + len(self._put_off))
        ended = [record for record in found if record.id not in self._put_off][:_AT_ONCE]
        await self._tell_ends(ended)
        return len(ended) == _AT_ONCE

    async def _tell_ends(self, ended: Sequence[InvocationRecord]) -> None:
        """Together, or one by one if something is wrong with one: it must not keep the others from being told."""
        try:
            return await self._ends.tell(ended)
        except StoreUnavailable:
            raise
        except Exception:
            log.debug("%d ends are told one by one", len(ended), exc_info=True)
        for record in ended:
            try:
                await self._ends.tell([record])
            except StoreUnavailable:
                raise
            except Exception as error:
                if self._seldom.is_due(record.id):
                    log.error("triggers cannot be told of the end of %s %s: %s", record.task, record.id, error)
                self._put_off[record.id] = self._monotonic() + _REST_SECONDS

    async def _tell(self, entry: Entry) -> None:
        await self._events.tell(events.from_entry(entry))

    async def _due(self, kind: str, tend: Callable[[Entry], Awaitable[object]]) -> bool:
        now = self._store.now()
        entries = await self._store.due_entries(self._app, kind, _AT_ONCE)
        due = [entry for entry in entries if entry.due_at is not None and entry.due_at <= now]
        for entry in due:
            try:
                await tend(entry)
            except StoreUnavailable:
                raise
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
            except Exception as error:  # it must not stand in front of the others for ever
                if self._seldom.is_due(entry.name):
                    log.error("what is to be told by the %s '%s' is put off: %s", kind, entry.name, error)
                await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=now + _PUT_OFF_SECONDS))
        return len(due) == _AT_ONCE
