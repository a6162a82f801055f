"""The store: where and how large it is, its check when asked for, and damaged records that were set aside."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.pages.page import Context, WebPage
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked

_SHOWN = 20


async def store_page(asked: Asked) -> Callable[[], Context]:
    reading = asked.reading.store
    facts = await asked.runtime.arun(reading.facts())
    aside = await asked.runtime.arun(reading.aside(_SHOWN))
    checked = await asked.runtime.arun(reading.check()) if asked.query["check"] else None
    return lambda: {
        "store": facts,
        "aside": aside.document(),
        "at": [each.at for each in aside.records],
        "checked": checked,
    }


PAGES = (
    WebPage(
        "/store",
        "Store",
        "store.html",
        store_page,
        {"check": Parameter("look at the store as `holdfast store check` does", choices=("1",))},
        nav="store",
        topics=("store",),
    ),
)
