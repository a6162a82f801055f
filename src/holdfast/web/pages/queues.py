"""Pages about queues, limits and rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.runtime.runs import WORLD_QUEUE
from holdfast.web.pages.overview import quoted
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.queues import MOST_COUNTED, MOST_KEYS, QueueReading
from holdfast.web.routing import Asked


async def queues(asked: Asked) -> Callable[[], Context]:
    reading = QueueReading(asked.runtime)
    found, limits = await asyncio.gather(reading.queues(), reading.limits())
    most = {"most": MOST_COUNTED, "most_keys": MOST_KEYS, "world": WORLD_QUEUE}
    return lambda: found.document() | limits.document() | most


async def limit(asked: Asked) -> Callable[[], Context]:
    whole = await QueueReading(asked.runtime).limit(asked.path["name"])
    return lambda: {"found": whole.document(), "most_keys": MOST_KEYS, "quoted": quoted}


PAGES = (
    WebPage("/queues", "Queues and limits", "queues.html", queues, nav="queues", topics=("queues", "invocations")),
    WebPage("/limits/{name}", "Limit", "limit.html", limit, nav="queues", topics=("queues", "invocations")),
)
