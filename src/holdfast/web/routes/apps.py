"""The apps of the store, the settings of this one, and the state machine, over HTTP."""

from __future__ import annotations

from holdfast.web.principals import Role
from holdfast.web.reading.apps import AppReading, statuses_document
from holdfast.web.requests import Parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_apps(asked: Asked) -> Render:
    return (await asked.runtime.arun(AppReading(asked.runtime).all())).document


async def show_settings(asked: Asked) -> Render:
    return AppReading(asked.runtime).settings().document


async def list_statuses(asked: Asked) -> Render:
    return lambda: statuses_document(asked.query["format"])


_FORMAT = Parameter("of the drawing", choices=("mermaid", "svg", "text"), default="mermaid")
ROUTES = (
    ApiRoute("GET", "/apps", list_apps, "list the apps of the store, and count what each has there", role=Role.ADMIN),
    ApiRoute("GET", "/config", show_settings, "show every setting without secrets, and what set it", role=Role.ADMIN),
    ApiRoute("GET", "/statuses", list_statuses, "list the statuses, and draw their changes", {"format": _FORMAT}),
)
