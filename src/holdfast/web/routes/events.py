"""Events over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.errors import EventNotFound
from holdfast.ids import is_id
from holdfast.model.names import counted
from holdfast.triggers.api import Triggers
from holdfast.web.actions import touched
from holdfast.web.reading.events import EventReading, happening_document
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action


class EmitEvent(Act):
    """The body of an event. With a `key`, an event of this name and key is emitted once."""

    name: str
    payload: Any = None
    key: str | None = None


async def list_events(asked: Asked) -> Render:
    given = asked.query
    reading = EventReading(asked.runtime)
    page = reading.page(name=given["name"] or "", limit=given["limit"], before=given["before"])
    return (await asked.runtime.arun(page)).document


async def show_event(asked: Asked) -> Render:
    id = asked.path["id"]
    if not is_id(id):
        raise EventNotFound(f"there is no event '{id[:80]}': an id is 26 characters, and not shortened")
    return (await asked.runtime.arun(EventReading(asked.runtime).one(id))).document


async def emit_event(asked: Asked) -> Render:
    body: EmitEvent = asked.body
    triggers = Triggers(asked.runtime)
    if body.preview:
        reading = EventReading(asked.runtime)
        called = await asked.runtime.arun(reading.called_by(body.name))
        return lambda: touched(f"The event '{body.name}' calls {counted(len(called), 'task')}.", len(called), called)
    event = await asyncio.to_thread(triggers.emit, body.name, body.payload, key=body.key)
    return lambda: touched(f"emitted {event.id}", id=event.id, event=happening_document(event))


ROUTES = (
    ApiRoute(
        "GET",
        "/events",
        list_events,
        "list events, newest first, with what each caused",
        {
            "name": Parameter("only those of this name"),
            "before": Parameter("only older ones: the cursor of the page before", "id"),
            "limit": limit_parameter(50, 500),
        },
    ),
    action("/events", emit_event, "emit an event", "event.emit", EmitEvent),
    ApiRoute("GET", "/events/{id}", show_event, "show one event, and the invocations that it caused"),
)
