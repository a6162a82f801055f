"""What an app can do with events: emit them, and see what became of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from holdfast.declaring import valid_key
from holdfast.engine.core import Engine
from holdfast.engine.events import Steps, emission
from holdfast.engine.triggers import TriggerBook
from holdfast.errors import NotEncodable, UsageError
from holdfast.execution.context import here, origin_in, parent_in
from holdfast.ids import InvocationId
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.records import Origin
from holdfast.lifecycle.triggers import DATA, TriggerRecord
from holdfast.store.contract import Transaction
from holdfast.trigger_options import valid_event_name

if TYPE_CHECKING:
    from holdfast.settings import Settings
    from holdfast.task import Submittable

T = TypeVar("T")
LARGEST_PAYLOAD = 256 * 2**10


class Emitting:
    """The part of an app that is about events."""

    _declared_for: tuple[Callable[[], Engine | None], int] = (
        lambda: None,
        -1,
    )  # an engine, and how many tasks

    _unpublished: Sequence[TriggerRecord] = ()

    if TYPE_CHECKING:
        name: str
        settings: Settings
        _tasks: dict[str, Submittable[..., Any]]

        def _run(self, work: Coroutine[Any, Any, T]) -> T: ...
        async def _arun(self, work: Coroutine[Any, Any, T]) -> T: ...
        def _ready(self, beside: object = None) -> Engine: ...
        async def _aready(self, beside: object = None) -> Engine: ...
        def _triggers(self) -> list[TriggerRecord]: ...
        async def _engine(self) -> Engine: ...

    def emit(self, name: str, payload: Any = None, *, key: str | None = None, session: Any = None) -> EventRecord:
        """Tell that something has happened: ``app.emit("order.created", {"id": 42})``. Once this returns, the event is
        stored, and every task with a trigger for it (`on_event`) is called once, whatever crashes.

        The payload is plain data of at most 256 KiB. With a `key`, an event of this name is emitted once, however often
        it is asked for while it is kept (`event_retention_seconds`); the event of the first time is returned.

        With a `session`, your own transaction on the app's store, the event is there if that commits, and its tasks are
        called then; it never was if not.
        """
        engine = self._ready(session)
        event = self._event(engine, name, payload, key)
        if session is None:
            return self._run(self._emit(event))
        transaction = engine.store.joined(session)
        if transaction.is_async:
            raise UsageError("the session belongs to an asynchronous client; await aemit() with it")
        event, new = self._run(self._addressed(engine, transaction, event))
        event = _carried_out(emission(event, new), transaction)
        self._run(engine.events.announce(transaction, event, self._declare_triggers))
        return event

    async def aemit(
        self, name: str, payload: Any = None, *, key: str | None = None, session: Any = None
    ) -> EventRecord:
        engine = await self._aready(session)
        event = self._event(engine, name, payload, key)
        if session is None:
            return await self._arun(self._emit(event))
        transaction = engine.store.joined(session)
        event, new = await self._arun(self._addressed(engine, transaction, event))
        steps = emission(event, new)
        event = await _acarried_out(steps, transaction) if transaction.is_async else _carried_out(steps, transaction)
        await self._arun(engine.events.announce(transaction, event, self._declare_triggers))
        return event

    async def _emit(self, event: EventRecord) -> EventRecord:
        own = await self._declare_triggers()
        return await (await self._engine()).events.emit(event, own)

    async def _addressed(
        self, engine: Engine, transaction: Transaction, event: EventRecord
    ) -> tuple[EventRecord, list[TriggerRecord]]:
        """The event with its triggers, and those that have to be stored with it: where the user's transaction holds the
        lock of the whole store, our own writer would wait for it.
        """
        if not transaction.carries_payloads or self._has_declared(engine):
            return await engine.events.addressed(event, await self._declare_triggers()), []
        new, stored = await self._book(engine).looked_up()
        return await engine.events.addressed(event, [*new, *stored]), new

    # --- what this program declares

    async def _declare_triggers(self) -> Sequence[TriggerRecord]:
        """Store the triggers of this program that were never stored: no runner may have started yet. Costs something
        only once. Returns those that others may not know of.
        """
        engine = await self._engine()
        if not self._has_declared(engine):
            known = len(self._tasks)
            self._unpublished = await self._book(engine).store_missing()
            self._declared_for = (weakref.ref(engine), known)
        return self._unpublished

    def _has_declared(self, engine: Engine) -> bool:
        where, count = self._declared_for
        return where() is engine and count == len(self._tasks)

    def _book(self, engine: Engine) -> TriggerBook:
        return TriggerBook(engine.store, engine.subscriptions, self._triggers(), app=self.name)

    def _event(self, engine: Engine, name: str, payload: Any, key: str | None) -> EventRecord:
        data = _encoded(payload)
        running, now = here.get() is not None, engine.store.now()
        origin = (origin_in(self.name) if running else None) or Origin()
        return EventRecord(
            app=self.name,
            id=engine.ids.new(),
            name=valid_event_name(name),
            payload=data,
            at=now,
            keep_until=now + self.settings.event_retention_seconds,
            emitted_by=(parent_in(self.name) if running else None) or InvocationId(""),
            key="" if key is None else valid_key("key", key),
            depth=origin.depth,
            path=origin.path,
        )

    def events(self, *, name: str = "", limit: int = 50, before: str | None = None) -> list[EventRecord]:
        """The events that are kept, newest first, with what each has caused. `before` is an id: the next page."""
        return self._run(self._events(name, limit, before))

    async def aevents(self, *, name: str = "", limit: int = 50, before: str | None = None) -> list[EventRecord]:
        return await self._arun(self._events(name, limit, before))

    async def _events(self, name: str, limit: int, before: str | None) -> list[EventRecord]:
        if type(limit) is not int or not 0 <= limit <= 10_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 10,000")
        if not isinstance(name, str) or not (before is None or isinstance(before, str)):
            raise UsageError(f"name={name!r}, before={before!r}: expected the name of events, and the id of one")
        return await (await self._engine()).events.latest(limit, name=name, before=before)


def _carried_out(steps: Steps, transaction: Transaction) -> EventRecord:
    """Put each step into a user's transaction; the event that is stored then."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(transaction.put_entries(wanted))
    except StopIteration as end:
        return cast(EventRecord, end.value)


async def _acarried_out(steps: Steps, transaction: Transaction) -> EventRecord:
    wanted = next(steps)
    while True:
        there = await transaction.aput_entries(wanted)
        try:
            wanted = steps.send(there)
        except StopIteration as end:
            return cast(EventRecord, end.value)


def _encoded(payload: Any) -> bytes:
    try:
        data = DATA.encode(payload, at="payload")
    except NotEncodable as error:
        raise NotEncodable(f"{error}; an event carries plain data, which anybody can read", path=error.path) from None
    if len(data) > LARGEST_PAYLOAD:
        raise UsageError(
            f"the payload has {len(data):,} bytes, and an event carries at most {LARGEST_PAYLOAD:,}: store it "
            "elsewhere, and let the event say where"
        )
    return data
