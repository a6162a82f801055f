"""The public face of events and triggers: ``app.triggers`` and ``app.emit``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.codec import Packed, Payload, SizeLimits
from holdfast.errors import NotEncodable, UsageError
from holdfast.executors.context import origin_in, parent_in
from holdfast.ids import InvocationId
from holdfast.model.names import valid_key
from holdfast.model.records import Origin
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking, completed
from holdfast.runtime.engine import Engine
from holdfast.runtime.payloads import whole
from holdfast.store.contract import Transaction
from holdfast.telemetry.tasks import here
from holdfast.triggers.conditions import valid_event_name
from holdfast.triggers.evaluation import trigger_records
from holdfast.triggers.events import EventRecord
from holdfast.triggers.outbox import Events, put_event
from holdfast.triggers.rules import DATA, TriggerRecord
from holdfast.triggers.service import TriggerRegistry


class Triggers:
    """The triggers and events of an app: ``app.triggers``. Every blocking method has an async sister with an `a`."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._declared_for: tuple[Callable[[], Engine | None], int] = (lambda: None, -1)  # an engine, how many tasks
        self._unpublished: Sequence[TriggerRecord] = ()

    @property
    def declared(self) -> list[TriggerRecord]:
        """Return the triggers that the tasks of this program declare."""
        tasks = [task for task in self._runtime.tasks.values() if not task.definition.is_hidden]
        return trigger_records(
            list({task.name: task for task in tasks}.values()), self._runtime.name, self._runtime.telemetry
        )

    def emit(self, name: str, payload: Any = None, *, key: str | None = None, session: Any = None) -> EventRecord:
        """Emit an event: ``app.emit("order.created", {"id": 42})``. Once this returns, the event is
        stored, and every task with a trigger for it (`on_event`) is called once, whatever crashes.

        The payload is plain data; a large one is stored apart, as arguments are. With a `key`, an event of this name is
        emitted once, however often it is asked for while it is kept (`event_retention_seconds`); the event of the first
        time is returned.

        With a `session`, your own transaction on the app's store, the event is there if that commits, and its tasks are
        called then; it never was if not.
        """
        return completed(self._emit(name, payload, key, session, is_blocking=True))

    async def aemit(
        self, name: str, payload: Any = None, *, key: str | None = None, session: Any = None
    ) -> EventRecord:
        return await self._emit(name, payload, key, session)

    async def _emit(
        self, name: str, payload: Any, key: str | None, session: Any, *, is_blocking: bool = False
    ) -> EventRecord:
        runtime = self._runtime
        engine = runtime.ready(session) if is_blocking else await runtime.aready(session)
        event, large = self._event(engine, name, payload, key)
        if session is None:
            return await runtime.either(self._emit_alone(engine, event, large), is_blocking)
        transaction = engine.store.joined(session)
        if transaction.is_async and is_blocking:
            raise UsageError("the session belongs to an asynchronous client; await aemit() with it")
        if not transaction.carries_payloads:
            await runtime.either(engine.part(Events).keep(large), is_blocking)
        event, new = await runtime.either(self._addressed(engine, transaction, event), is_blocking)
        event = await put_event(transaction, event, new, whole(large) if transaction.carries_payloads else ())
        announced = engine.part(Events).announce(transaction, event, self._declare_triggers)
        await runtime.either(announced, is_blocking)
        return event

    async def _emit_alone(self, engine: Engine, event: EventRecord, large: Sequence[Payload]) -> EventRecord:
        own = await self._declare_triggers()
        return await engine.part(Events).emit(event, own, large)

    async def _addressed(
        self, engine: Engine, transaction: Transaction, event: EventRecord
    ) -> tuple[EventRecord, list[TriggerRecord]]:
        """Return the event with its outbox, and the triggers to store with it: where the user's transaction locks the
        whole store, our own writer would wait for it.
        """
        if not transaction.carries_payloads or self._has_declared(engine):
            return await engine.part(Events).addressed(event, await self._declare_triggers()), []
        new, stored = await TriggerRegistry(engine, self.declared).split_declared()
        return await engine.part(Events).addressed(event, [*new, *stored]), new

    # --- what this program declares

    async def _declare_triggers(self) -> Sequence[TriggerRecord]:
        """Store the triggers of this program that were never stored: no runner may have started yet. Costs something
        only once. Return the triggers that other processes may not know.
        """
        engine = await self._runtime.engine()
        if not self._has_declared(engine):
            known = len(self._runtime.tasks)
            self._unpublished = await TriggerRegistry(engine, self.declared).store_missing()
            self._declared_for = (weakref.ref(engine), known)
        return self._unpublished

    def _has_declared(self, engine: Engine) -> bool:
        where, count = self._declared_for
        return where() is engine and count == len(self._runtime.tasks)

    def _event(self, engine: Engine, name: str, payload: Any, key: str | None) -> tuple[EventRecord, Sequence[Payload]]:
        """Return an event, and what its payload refers to."""
        packed = _packed(payload, engine.limits)
        running, now = here.get() is not None, engine.store.now()
        origin = (origin_in(self._runtime.name) if running else None) or Origin()
        event = EventRecord(
            app=self._runtime.name,
            id=engine.ids.new(),
            name=valid_event_name(name),
            payload=packed.data,
            at=now,
            keep_until=now + self._runtime.settings.event_retention_seconds,
            emitted_by=(parent_in(self._runtime.name) if running else None) or InvocationId(""),
            key="" if key is None else valid_key("key", key),
            depth=origin.depth,
            path=origin.path,
        )
        return event, packed.payloads

    @blocking
    async def events(
        self, engine: Engine, *, name: str = "", limit: int = 50, before: str | None = None
    ) -> list[EventRecord]:
        """Return the events that are kept, newest first, with what each has caused. `before` is an id: the next page
        begins after it.
        """
        if type(limit) is not int or not 0 <= limit <= 10_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 10,000")
        if not isinstance(name, str) or not (before is None or isinstance(before, str)):
            raise UsageError(f"name={name!r}, before={before!r}: expected the name of events, and the id of one")
        return await engine.part(Events).latest(limit, name=name, before=before)

    aevents = awaited(events)


def _packed(payload: Any, limits: SizeLimits) -> Packed:
    try:
        return DATA.pack(payload, limits, at="payload")
    except NotEncodable as error:
        raise NotEncodable(f"{error}; an event carries plain data, readable without classes", path=error.path) from None
