"""The overview: is all well, and what is going on."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.pages.page import Context, WebPage
from holdfast.web.routing import Asked


async def overview(asked: Asked) -> Callable[[], Context]:
    answer = await asked.runtime.arun(asked.reading.stats("1h"))
    return lambda: {"stats": answer.stats}


PAGES = (WebPage("/", "Overview", "overview.html", overview, nav="overview", topics=("invocations", "runners")),)
