"""The page of the audit record: who did what, when, why and from where."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.pages.page import Context, WebPage
from holdfast.web.principals import Role
from holdfast.web.problems import about
from holdfast.web.routes import audit as routes
from holdfast.web.routing import Asked

_PARAMETERS = routes.ROUTES[0].query


async def audit(asked: Asked) -> Callable[[], Context]:
    with about("query"):
        page = await asked.runtime.arun(asked.reading.audit(**asked.query))
    filters = {name: value for name, value in asked.query.items() if name not in ("before", "limit") and value}
    return lambda: page.document() | {"filters": filters}


PAGES = (WebPage("/audit", "Audit", "audit.html", audit, _PARAMETERS, role=Role.ADMIN, nav="audit"),)
