"""The store over HTTP, and whether all is well."""

from __future__ import annotations

from holdfast.web.principals import Role
from holdfast.web.requests import limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def show_health(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.health.health())).document


async def show_store(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.store.facts())).document


async def check_store(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.store.check())).document


async def list_quarantine(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.store.aside(asked.query["limit"]))).document


ROUTES = (
    ApiRoute("GET", "/health", show_health, "say in a sentence whether all is well"),
    ApiRoute("GET", "/store", show_store, "show the store: its sizes and its schema"),
    ApiRoute("GET", "/store/check", check_store, "check the store, without reading everything"),
    ApiRoute(
        "GET",
        "/store/quarantine",
        list_quarantine,
        "list damaged records that were set aside, latest first",
        {"limit": limit_parameter(20, 100)},
        role=Role.ADMIN,  # what is damaged is shown whole: nothing in it could be hidden by its name or type
    ),
)
