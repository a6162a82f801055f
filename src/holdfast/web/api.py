"""The HTTP API: one table of routes under ``/api/v1``; `docs/reference/http.md` is compared with it."""

from __future__ import annotations

from holdfast._version import __version__
from holdfast.web.openapi import described
from holdfast.web.routes import (
    apps,
    archive,
    audit,
    bulk,
    calls,
    events,
    groups,
    hooks,
    invocations,
    live,
    queues,
    runners,
    schedules,
    stats,
    store,
    streams,
    tasks,
    workflows,
    world,
)
from holdfast.web.routing import PREFIX, ApiRoute, Asked, Render, RouteTable


async def list_routes(asked: Asked) -> Render:
    return lambda: {
        "routes": [{"method": each.method, "path": PREFIX + each.path, "summary": each.summary} for each in ROUTES]
    }


async def describe_routes(asked: Asked) -> Render:
    root = str(asked.request.scope.get("root_path", "")).rstrip("/")
    return lambda: described(ROUTES, __version__, root)


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "", list_routes, "list these routes"),
    ApiRoute("GET", "/openapi.json", describe_routes, "describe these routes, as OpenAPI 3.1"),
    *bulk.ROUTES,
    *calls.ROUTES,
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
    *runners.ROUTES,
    *world.ROUTES,
    *store.ROUTES,
    *groups.ROUTES,
    *apps.ROUTES,
    *live.ROUTES,
    *audit.ROUTES,
)
TABLE = RouteTable(ROUTES)
