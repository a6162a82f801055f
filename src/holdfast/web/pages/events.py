"""Pages about events."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import EventNotFound
from holdfast.ids import is_id
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.events import EventReading
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked


async def events(asked: Asked) -> Callable[[], Context]:
    name, before = asked.query["name"] or "", asked.query["before"]
    page = await asked.runtime.arun(EventReading(asked.runtime).page(name=name, limit=50, before=before))
    return page.document


async def event(asked: Asked) -> Callable[[], Context]:
    id = asked.path["id"]
    if not is_id(id):
        raise EventNotFound("there is no event of this id")
    whole = await asked.runtime.arun(EventReading(asked.runtime).one(id))
    return lambda: {"found": whole.document()}


_QUERY = {
    "name": Parameter("only those of this name"),
    "before": Parameter("only older ones", "id"),
}
PAGES = (
    WebPage("/events", "Events", "events.html", events, _QUERY, nav="events", topics=("events",)),
    WebPage("/events/{id}", "Event", "event.html", event, nav="events", topics=("events",)),
)
