"""The HTTP API: one table of routes under ``/api/v1``; `docs/reference/http.md` is compared with it."""

from __future__ import annotations

from holdfast.web.routes import (
    archive,
    audit,
    events,
    hooks,
    invocations,
    queues,
    schedules,
    stats,
    streams,
    tasks,
    workflows,
)
from holdfast.web.routing import PREFIX, ApiRoute, Asked, Render, RouteTable


async def list_routes(asked: Asked) -> Render:
    return lambda: {
        "routes": [{"method": each.method, "path": PREFIX + each.path, "summary": each.summary} for each in ROUTES]
    }


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "", list_routes, "list these routes"),
    *invocations.ROUTES,
    *workflows.ROUTES,
    *streams.ROUTES,
    *stats.ROUTES,
    *hooks.ROUTES,
    *queues.ROUTES,
    *schedules.ROUTES,
    *events.ROUTES,
    *tasks.ROUTES,
    *archive.ROUTES,
    *audit.ROUTES,
)
TABLE = RouteTable(ROUTES)
