"""The page about ended invocations."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.pages.filters import command
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.reading.archive import ArchiveReading
from holdfast.web.routes import archive as routes
from holdfast.web.routing import Asked

_FILTERS = tuple(name for name in routes.PARAMETERS if name not in ("before", "limit"))


async def archive(asked: Asked) -> Callable[[], Context]:
    given = {name: asked.query[name] for name in _FILTERS}
    where = await routes.meant(asked, given, "query")
    reading = ArchiveReading(asked.runtime)
    page = await asked.runtime.arun(reading.page(where, limit=asked.query["limit"], before=asked.query["before"]))
    chosen = {name: value for name, value in given.items() if value not in (None, "", [])}
    endings = routes.PARAMETERS["status"].choices

    def twin(*words: str) -> str:
        """Return the command that does the same with what is shown."""
        named = [(name, each) for name, value in (chosen or {"status": endings}).items() for each in _listed(value)]
        return command(*words, *(part for name, each in named for part in (f"--{name}", each)))

    return lambda: page.document() | {"chosen": chosen, "endings": endings, "twin": twin}


def _listed(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


PAGES = (WebPage("/archive", "Archive", "archive.html", archive, routes.PARAMETERS, nav="archive"),)
