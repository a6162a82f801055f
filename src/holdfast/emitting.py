"""What an app can do with events: emit them, and see what became of them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.declaring import valid_key
from holdfast.engine.core import Engine
from holdfast.errors import NotEncodable, UsageError
from holdfast.execution.context import here, origin_in, parent_in
from holdfast.ids import InvocationId
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.records import Origin
from holdfast.lifecycle.triggers import DATA
from holdfast.trigger_options import valid_event_name

if TYPE_CHECKING:
    from holdfast.settings import Settings

T = TypeVar("T")
LARGEST_PAYLOAD = 256 * 2**10


class Emitting:
    """The part of an app that is about events."""

    if TYPE_CHECKING:
        name: str
        settings: Settings

        def _run(self, work: Coroutine[Any, Any, T]) -> T: ...
        async def _arun(self, work: Coroutine[Any, Any, T]) -> T: ...
        def _ready(self) -> Engine: ...
        async def _aready(self) -> Engine: ...
        async def _engine(self) -> Engine: ...

    def emit(self, name: str, payload: Any = None, *, key: str | None = None) -> EventRecord:
        """Tell that something has happened: ``app.emit("order.created", {"id": 42})``. Once this returns, the event is
        stored, and every task with a trigger for it (`on_event`) is called once, whatever crashes.

        The payload is plain data of at most 256 KiB. With a `key`, an event of this name is emitted once, however often
        it is asked for while it is kept (`event_retention_seconds`); the event of the first time is returned.
        """
        event = self._event(self._ready(), name, payload, key)
        return self._run(self._emit(event))

    async def aemit(self, name: str, payload: Any = None, *, key: str | None = None) -> EventRecord:
        event = self._event(await self._aready(), name, payload, key)
        return await self._arun(self._emit(event))

    async def _emit(self, event: EventRecord) -> EventRecord:
        return await (await self._engine()).events.emit(event)

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
