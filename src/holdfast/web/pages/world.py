"""Pages about a World: its runs, what is under way to them, and one message."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.model.status import Status
from holdfast.runtime.foreign import MAX_DELIVERIES
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.problems import about
from holdfast.web.reading.world import WorldReading
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked

_MESSAGES = 20
TONES = {"waiting": "idle", "delivering": "busy", "done": "good", "failed": "bad", "cancelled": "idle"}


async def world(asked: Asked) -> Callable[[], Context]:
    reading, arun = WorldReading(asked.runtime), asked.runtime.arun
    status = [asked.query["status"]] if asked.query["status"] else []
    with about("query.status"):
        runs = await arun(reading.runs(status=status, before=asked.query["before"]))
    messages = await arun(reading.messages(limit=_MESSAGES))
    ended = await arun(reading.messages(ended=True, limit=1)) if not runs.runs else messages
    servers = await arun(reading.servers())
    has_world = bool(runs.runs or ended.messages or servers.servers)
    facts = {"has_world": has_world, "message_tones": TONES, "statuses": tuple(Status), "deliveries": MAX_DELIVERIES}
    more = messages.before is not None
    return lambda: (
        runs.document()
        | {
            **facts,
            "messages": messages.document()["messages"],
            "more_messages": more,
            "servers": servers.document()["servers"],
        }
    )


async def message(asked: Asked) -> Callable[[], Context]:
    whole = await asked.runtime.arun(WorldReading(asked.runtime).message(asked.path["id"]))
    return lambda: {"found": whole.document(), "message_tones": TONES, "deliveries": MAX_DELIVERIES}


_QUERY = {
    "status": Parameter("only of this status"),
    "before": Parameter("only older ones", "id"),
}
PAGES = (
    WebPage("/world", "World runs", "world.html", world, _QUERY, nav="world", topics=("world",)),
    WebPage("/world/messages/{id}", "Message", "message.html", message, nav="world", topics=("world",)),
)
