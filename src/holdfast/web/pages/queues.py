"""Pages about queues, limits and rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.queues import QueueReading
from holdfast.web.routing import Asked


async def queues(asked: Asked) -> Callable[[], Context]:
    reading = QueueReading(asked.runtime)
    found, limits = await asyncio.gather(reading.queues(), reading.limits())
    return lambda: found.document() | limits.document()


async def limit(asked: Asked) -> Callable[[], Context]:
    whole = await QueueReading(asked.runtime).limit(asked.path["name"])
    return lambda: {"found": whole.document()}


PAGES = (
    WebPage("/queues", "Queues and limits", "queues.html", queues, nav="queues", topics=("queues", "invocations")),
    WebPage("/limits/{name}", "Limit", "limit.html", limit, nav="queues", topics=("queues", "invocations")),
)
