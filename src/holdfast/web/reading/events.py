"""Questions about events: what happened, what it carried, and what it caused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import NotDecodable
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.wait import get_readable
from holdfast.showing import fields, without_named
from holdfast.triggers.api import Triggers
from holdfast.triggers.evaluation import EVALUATES
from holdfast.triggers.events import Caused, EventRecord
from holdfast.triggers.outbox import Events
from holdfast.triggers.rules import DATA
from holdfast.web.documents import Document
from holdfast.web.reading.schedules import ScheduleReading, cause_of


class Outcome(NamedTuple):
    """The status of an invocation; of a trigger's evaluation, also the invocations that it called."""

    status: str
    called: list[str] | None


class EventPage(NamedTuple):
    """Events, newest first, and the cursor of the next page; None if there is none."""

    events: Sequence[EventRecord]
    before: str | None

    def document(self) -> Document:
        return {"events": [happening_document(event) for event in self.events], "before": self.before}


class WholeEvent(NamedTuple):
    """An event with what became of the calls that it has caused."""

    event: EventRecord
    became: Mapping[str, Outcome]
    now: float

    def document(self) -> Document:
        return happening_document(self.event, self.became)


class EventReading:
    """Ask for events. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def page(self, *, name: str = "", limit: int = 50, before: str | None = None) -> EventPage:
        found = await Triggers(self._runtime).aevents(name=name, limit=limit, before=before)
        return EventPage(found, found[-1].id if found and len(found) == limit else None)

    async def one(self, id: str) -> WholeEvent:
        """Return one event. Raises `EventNotFound`."""
        engine = await self._runtime.engine()
        event = await engine.part(Events).get(id)
        ids = [each.invocation for each in event.caused if each.invocation]
        found = await get_readable(engine.store, engine.app, ids) if ids else ()
        there: dict[str, Outcome] = {
            record.id: Outcome(record.status.value, _called(record)) for record in found if record is not None
        }
        became: dict[str, Outcome] = {id: there.get(id, Outcome("not kept any more", None)) for id in ids}
        return WholeEvent(event, became, engine.store.now())

    async def called_by(self, name: str) -> Sequence[str]:
        """Return the tasks that stored triggers call for an event of this name, whatever it carries."""
        triggers = await ScheduleReading(self._runtime).triggers()
        active = [each for each in triggers.records if each.retired_at is None]
        cause = f"the event {name}"
        return sorted({each.call.task for each in active if cause in map(cause_of, each.conditions)})


def happening_document(event: EventRecord, became: Mapping[str, Outcome] | None = None) -> Document:
    return fields(event, "id", "app", "name", "kind", "at", "depth", "path", "keep_until") | {
        "payload": payload_of(event),
        "key": event.key or None,
        "emitted_by": event.emitted_by or None,
        "to_be_told": event.outbox,
        "caused": [_caused_document(each, became) for each in event.caused],
    }


def _caused_document(each: Caused, became: Mapping[str, Outcome] | None) -> Document:
    facts = {"trigger": each.trigger, "invocation": each.invocation or None, "why": each.why}
    if became is None:
        return facts
    known = became.get(each.invocation)
    return facts | {"status": known and known.status, "called": known and known.called}


def payload_of(event: EventRecord) -> Any:
    """Return what an event carries, without what its names say is secret; in words, if it cannot be read here."""
    try:
        return without_named(DATA.decode(event.payload, describe=True))
    except NotDecodable as error:
        return f"{counted(len(event.payload), 'byte')} that cannot be read here: {error}"


def _called(record: InvocationRecord) -> list[str] | None:
    """Return what an invocation that decides for a trigger has called; None if it has not decided."""
    if not record.task.startswith(EVALUATES) or record.result is None:
        return None
    try:
        return [str(id) for id in DATA.decode(record.result)]
    except (NotDecodable, TypeError):
        return None
